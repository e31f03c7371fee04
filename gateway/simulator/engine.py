"""The engine core: continuous batching on virtual time.

Owns the waiting and the running sequences, the token budget of a step, preemption and the step's cost. The order is that
of vLLM's scheduler: running sequences first (decodes and chunked prefills alike), then waiting ones while budget, seats and
blocks last; when a running sequence finds no block, the youngest running one is preempted and later recomputed.

Promises: the same seed and the same calls with the same times give the same events. Pure: `now` is an argument, in
seconds; nothing sleeps, nothing is sent. Talks to `BlockPool` for memory and to nobody else.

    step seconds = base + a * prefill tokens + b * decoding sequences + c * KV tokens + d * sequences with logprobs
"""

import random
from collections import deque

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.kv import BlockPool, prefix_hashes
from gateway.simulator.sequence import EngineStats, Event, Finish, Phase, Preempt, Sequence, SequenceSpec, Step, Token


class Engine:
    """See the module. `vocabulary` are the tokens it may say."""

    def __init__(self, config: SimulatorConfig, vocabulary: tuple[int, ...]) -> None:
        self.config = config
        self.stats = EngineStats()
        self._vocabulary = vocabulary
        self._jitter = random.Random(config.seed)  # noqa: S311 - reproducible, not secret
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._next_id = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self._pool.used / self._pool.num_blocks

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return any(not s.paused for s in self._running) or any(not s.paused for s in self._waiting)

    def sequence(self, seq_id: int) -> Sequence | None:
        """The live sequence with this id, to look at."""
        return self._sequences.get(seq_id)

    def add(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence and give its id."""
        self._next_id += 1
        names = prefix_hashes(spec.prompt, self.config.block_size, spec.salt) if self.config.enable_prefix_caching else []
        rng = random.Random(spec.seed)  # noqa: S311
        sequence = Sequence(self._next_id, spec, now, rng, names)
        self._sequences[sequence.seq_id] = sequence
        self._waiting.append(sequence)
        self.stats.started += 1
        self._count()
        return sequence.seq_id

    def abort(self, seq_id: int, stopped: bool = False) -> bool:
        """Drop a sequence and free its blocks at once; False when it is not there (late news).

        `stopped`: it ended well, at a stop string that only its text shows.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return False
        self._remove(sequence)
        if stopped:
            self.stats.finished += 1
        else:
            self.stats.aborted += 1
        return True

    def pause(self, seq_id: int, paused: bool = True) -> None:
        """Stop (or resume) computing one sequence; it keeps its seat and its blocks. A fault."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.paused = paused

    def step(self, now: float) -> Step:
        """Schedule and compute one step that starts at `now`; state is that of its end when this returns."""
        events: list[Event] = []
        scheduled = self._schedule(now, events)
        prefill_cost, prefill_tokens, decode_seqs, kv_tokens, logprobs = 0.0, 0, 0, 0, 0
        for sequence, count in scheduled:
            if sequence.phase is Phase.DECODE:
                decode_seqs += 1
            else:
                prefill_tokens += count
                prefill_cost += count * sequence.spec.prefill_factor
            sequence.computed += count
            kv_tokens += sequence.computed
            logprobs += sequence.spec.logprobs
        seconds = self.config.cost.step_s(prefill_cost, decode_seqs, kv_tokens, logprobs)
        seconds *= 1.0 + self.config.cost.jitter * (2.0 * self._jitter.random() - 1.0)
        for sequence, _ in scheduled:
            self._advance(sequence, events)
        self.stats.iterations += 1
        self._count()
        return Step(now, now + seconds / self.config.speed, prefill_tokens, decode_seqs, events)

    def _schedule(self, now: float, events: list[Event]) -> list[tuple[Sequence, int]]:
        budget = self.config.max_num_batched_tokens
        scheduled: list[tuple[Sequence, int]] = []
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            index += 1
            count = 0 if sequence.paused else self._chunk(sequence, budget)
            if not count:
                continue
            fits, lost = self._make_room(sequence, count, events)
            preempted = preempted or lost
            if not fits:
                break
            scheduled.append((sequence, count))
            budget -= count
        if not preempted:
            self._admit(now, budget, scheduled)
        return scheduled

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of `sequence` to compute in this step."""
        count = sequence.needed
        if self.config.long_prefill_token_threshold:
            count = min(count, self.config.long_prefill_token_threshold)
        if count > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(count, budget)

    def _make_room(self, sequence: Sequence, count: int, events: list[Event]) -> tuple[bool, bool]:
        """Find blocks for a running sequence, preempting the youngest. Gives (it fits, somebody was preempted)."""
        lost = False
        while not self._pool.grow(sequence.held, sequence.computed + count):
            victim = self._running[-1]
            self._preempt(victim, events)
            lost = True
            if victim is sequence:
                return False, lost
        return True, lost

    def _preempt(self, victim: Sequence, events: list[Event]) -> None:
        self._running.remove(victim)
        self._pool.release(victim.held)
        victim.computed = 0
        victim.running = False
        self._waiting.appendleft(victim)
        self.stats.preemptions += 1
        events.append(Preempt(victim.seq_id))

    def _admit(self, now: float, budget: int, scheduled: list[tuple[Sequence, int]]) -> None:
        while budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = next((s for s in self._waiting if not s.paused), None)
            if sequence is None:
                break
            hits = self._reuse_prefix(sequence)
            count = self._chunk(sequence, budget)
            if not count or not self._pool.grow(sequence.held, sequence.computed + count):
                self._pool.release(sequence.held)
                sequence.computed = 0
                break
            self.stats.prefix_queries += len(sequence.spec.prompt) if sequence.names else 0
            self.stats.prefix_hits += hits
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.running = True
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
                self.stats.prompt_tokens += len(sequence.spec.prompt)
            scheduled.append((sequence, count))
            budget -= count

    def _reuse_prefix(self, sequence: Sequence) -> int:
        """Take cached blocks, but leave at least one token to compute. Gives the tokens saved."""
        blocks = self._pool.cached_prefix(sequence.names)
        while blocks * self.config.block_size >= len(sequence.spec.prompt) + len(sequence.output):
            blocks -= 1
        if blocks <= 0:
            return 0
        self._pool.take_cached(sequence.held, sequence.names[:blocks])
        sequence.computed = blocks * self.config.block_size
        return sequence.computed

    def _advance(self, sequence: Sequence, events: list[Event]) -> None:
        """After the step: publish full prompt blocks, make a token when all is computed, end the sequence when due."""
        if not sequence.running:
            return
        if sequence.names and not sequence.output:
            full = min(sequence.computed // self.config.block_size, len(sequence.names))
            self._pool.publish(sequence.held, sequence.names[:full])
        if sequence.needed:
            return
        if sequence.spec.max_tokens > 0:
            token = self._sample(sequence)
            events.append(Token(sequence.seq_id, token, not sequence.output))
            sequence.output.append(token)
            self.stats.generation_tokens += 1
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._remove(sequence)
            self.stats.finished += 1
            events.append(Finish(sequence.seq_id, reason))

    def _sample(self, sequence: Sequence) -> int:
        position = len(sequence.output)
        if position < len(sequence.spec.script):
            return sequence.spec.script[position]
        return self._vocabulary[int(sequence.rng.random() * len(self._vocabulary))]

    @staticmethod
    def _finish_reason(sequence: Sequence) -> str | None:
        made = len(sequence.output)
        if sequence.spec.eos_after is not None and made >= sequence.spec.eos_after:
            return "stop"
        return "length" if made >= sequence.spec.max_tokens else None

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        if sequence.running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._pool.release(sequence.held)
        self._count()

    def _count(self) -> None:
        stats = self.stats
        stats.running, stats.waiting = len(self._running), len(self._waiting)
        stats.peak_running = max(stats.peak_running, stats.running)
        stats.peak_in_flight = max(stats.peak_in_flight, stats.in_flight)
