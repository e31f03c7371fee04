"""Runs the engine in real time: sleeps to the end of each step, then hands the tokens to whoever waits for them.

Owns the one engine task and the `Collector` of each request. Promises: nothing polls; a request's sequences are aborted when
its collector is closed; a step starts where the last one ended, so that late timers do not slow the model. Talks to the
engine, the metrics and the request handlers.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from gateway.simulator.engine import Engine
from gateway.simulator.metrics import EngineMetrics
from gateway.simulator.sequence import Finish, SequenceSpec, Step, Token

_MAX_LAG_S = 0.1


class EngineDeadError(RuntimeError):
    """The engine died with this request in it."""


class ClientGoneError(RuntimeError):
    """The caller left; nobody is there to answer."""


class EngineBusyError(RuntimeError):
    """More requests are queued than max_num_queued_reqs allows."""


class Delta(NamedTuple):
    """News of one sequence of a request: its new tokens, and why it ended (None: it goes on)."""

    choice: int
    tokens: list[int]
    finish: str | None


class _Timing:
    """When what happened to one sequence, for the histograms."""

    __slots__ = ("arrived_at", "first_at", "last_at", "scheduled_at", "tokens")

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.scheduled_at = arrived_at
        self.first_at: float | None = None
        self.last_at = arrived_at
        self.tokens = 0


class Collector:
    """What one request waits on. News that piles up while the caller is slow is merged, as in vLLM."""

    def __init__(self) -> None:
        self.seq_ids: list[int] = []
        self._pending: dict[int, Delta] = {}
        self._event = asyncio.Event()
        self._failure: Exception | None = None

    def put(self, index: int, tokens: list[int], finish: str | None) -> None:
        """Add news of sequence `index`."""
        before = self._pending.get(index)
        if before is not None:
            before.tokens.extend(tokens)
            self._pending[index] = Delta(index, before.tokens, finish)
        else:
            self._pending[index] = Delta(index, tokens, finish)
        self._event.set()

    def fail(self, failure: Exception) -> None:
        """Make the next `take` raise `failure`."""
        self._failure = failure
        self._event.set()

    async def take(self) -> list[Delta]:
        """Wait for news, by sequence. Raises EngineDeadError or ClientGoneError."""
        while self._failure is None and not self._pending:
            self._event.clear()
            await self._event.wait()
        if self._failure is not None:
            raise self._failure
        news = list(self._pending.values())
        self._pending.clear()
        return news


class EngineDriver:
    """The engine's clock. `start` before use, `stop` after."""

    def __init__(self, engine: Engine, metrics: EngineMetrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self._routes: dict[int, tuple[Collector, int, _Timing]] = {}
        self._wake = asyncio.Event()
        self._frozen = False
        self._task: asyncio.Task[None] | None = None

    @property
    def frozen(self) -> bool:
        """Whether the engine stands still (a fault)."""
        return self._frozen

    @frozen.setter
    def frozen(self, value: bool) -> None:
        self._frozen = value
        self._wake.set()

    def start(self) -> None:
        """Start the engine task in the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="simulator-engine")

    async def stop(self) -> None:
        """End the engine; whoever waits gets EngineDeadError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self.die()

    def die(self) -> None:
        """Fail every request in the engine."""
        for collector, _, _ in list(self._routes.values()):
            collector.fail(EngineDeadError("EngineCore encountered an issue."))

    def submit(self, specs: Sequence[SequenceSpec]) -> Collector:
        """Queue the sequences of one request; deltas carry their index in `specs`. Raises EngineBusyError."""
        limit = self.engine.config.max_num_queued_reqs
        if limit is not None and self.engine.stats.in_flight + len(specs) > limit:
            self.metrics.rejected("queue_full")
            raise EngineBusyError("The server is overloaded: too many requests are queued.")
        if self._task is None or self._task.done():
            raise EngineDeadError("cannot schedule new futures after shutdown")
        now = asyncio.get_running_loop().time()
        collector = Collector()
        for index, spec in enumerate(specs):
            seq_id = self.engine.add(spec, now)
            collector.seq_ids.append(seq_id)
            self._routes[seq_id] = (collector, index, _Timing(now))
        self._wake.set()
        return collector

    def abort(self, seq_id: int, stopped: bool = False) -> None:
        """Drop one sequence (`stopped`: at a stop string); harmless when it has ended."""
        if self._routes.pop(seq_id, None) is None:
            return
        self.engine.abort(seq_id, stopped)
        if stopped:
            self.metrics.ended("stop")

    def close(self, collector: Collector) -> None:
        """Abort whatever of a request is still running."""
        for seq_id in collector.seq_ids:
            self.abort(seq_id)

    def pause(self, collector: Collector, paused: bool) -> None:
        """Hold (or resume) the sequences of one request in their seats."""
        for seq_id in collector.seq_ids:
            self.engine.pause(seq_id, paused)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            if self._frozen or not self.engine.has_work():
                self._wake.clear()
                await self._wake.wait()
                at = loop.time()
                continue
            step = self.engine.step(at)
            await asyncio.sleep(max(0.0, step.ends_at - loop.time()))
            self._deliver(step)
            now = loop.time()
            at = step.ends_at if now - step.ends_at < _MAX_LAG_S else now

    def _deliver(self, step: Step) -> None:
        self.metrics.iteration_tokens.observe(step.prefill_tokens + step.decode_seqs)
        tokens: dict[int, int] = {}
        for event in step.events:
            match event:
                case Token(seq_id, token, _):
                    tokens[seq_id] = token
                case Finish(seq_id, reason):
                    self._hand_over(step, seq_id, tokens.pop(seq_id, None), reason)
        for seq_id, token in tokens.items():
            self._hand_over(step, seq_id, token, None)

    def _hand_over(self, step: Step, seq_id: int, token: int | None, finish: str | None) -> None:
        route = self._routes.get(seq_id)
        if route is None:
            return
        collector, index, timing = route
        if token is not None:
            self._time_token(step, seq_id, timing)
        if finish is not None:
            del self._routes[seq_id]
            self._time_end(step, timing, finish)
        collector.put(index, [] if token is None else [token], finish)

    def _time_token(self, step: Step, seq_id: int, timing: _Timing) -> None:
        timing.tokens += 1
        if timing.first_at is None:
            timing.first_at = step.ends_at
            sequence = self.engine.sequence(seq_id)
            if sequence is not None and sequence.scheduled_at is not None:
                timing.scheduled_at = sequence.scheduled_at
            self.metrics.ttft.observe(step.ends_at - timing.arrived_at)
        else:
            self.metrics.itl.observe(step.ends_at - timing.last_at)
        timing.last_at = step.ends_at

    def _time_end(self, step: Step, timing: _Timing, finish: str) -> None:
        first_at = timing.first_at if timing.first_at is not None else step.ends_at
        self.metrics.ended(finish)
        self.metrics.e2e.observe(step.ends_at - timing.arrived_at)
        self.metrics.queue.observe(max(0.0, timing.scheduled_at - timing.arrived_at))
        self.metrics.prefill.observe(first_at - timing.scheduled_at)
        self.metrics.decode.observe(step.ends_at - first_at)
        if timing.tokens > 1:
            self.metrics.tpot.observe((step.ends_at - first_at) / (timing.tokens - 1))
