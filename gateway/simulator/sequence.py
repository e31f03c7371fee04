"""What the engine runs, what it reports, and what it counts.

Owns the types that cross the engine's border: `SequenceSpec` in, `Step` and its events out, `EngineStats` beside. No logic
beyond what a sequence can say about itself. Talks to nobody.
"""

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from gateway.simulator.kv import BlockName


class Phase(Enum):
    """Where a sequence is: waiting for a seat, reading its prompt, or making tokens."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence to run. `max_tokens` 0 means that only the prompt is read (pooling).

    `eos_after` is the length at which the model would stop by itself (None: never, `ignore_eos`); `script` are the tokens
    to say first, `prefill_factor` makes this prompt dearer (a fault), `salt` keeps prefix caches apart.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    eos_after: int | None = None
    script: tuple[int, ...] = ()
    seed: int = 0
    logprobs: bool = False
    salt: int = 0
    prefill_factor: float = 1.0


class Token(NamedTuple):
    """A token was made at the end of the step; `first` when it is the sequence's first."""

    seq_id: int
    token: int
    first: bool


class Finish(NamedTuple):
    """A sequence ended by itself: `stop` or `length`."""

    seq_id: int
    reason: str


class Preempt(NamedTuple):
    """A sequence lost its blocks and waits to be recomputed."""

    seq_id: int


Event = Token | Finish | Preempt


class Step(NamedTuple):
    """One engine step. The events happen at `ends_at`."""

    started_at: float
    ends_at: float
    prefill_tokens: int
    decode_seqs: int
    events: list[Event]


@dataclass(slots=True)
class Sequence:
    """A live sequence; `computed` tokens of prompt and output are in the cache."""

    seq_id: int
    spec: SequenceSpec
    arrived_at: float
    rng: random.Random
    names: list[int]
    held: list[BlockName] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    paused: bool = False
    scheduled_at: float | None = None

    @property
    def needed(self) -> int:
        """Tokens to compute before the next one can be made."""
        return len(self.spec.prompt) + len(self.output) - self.computed

    @property
    def phase(self) -> Phase:
        """Waiting, prefill or decode."""
        if not self.running:
            return Phase.WAITING
        return Phase.DECODE if self.output and self.needed == 1 else Phase.PREFILL


@dataclass(slots=True)
class EngineStats:
    """Counters of truth since the engine was made."""

    running: int = 0
    waiting: int = 0
    peak_running: int = 0
    peak_in_flight: int = 0
    started: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    iterations: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def in_flight(self) -> int:
        """Sequences in the engine now."""
        return self.running + self.waiting
