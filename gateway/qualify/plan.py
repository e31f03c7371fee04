"""What to measure and how: the plan file, checked whole before a request is sent.

Owns: the plan's schema, the plans that ship with the package, and the estimate of what a plan sends and how long it takes.
Promises: frozen, unknown keys refused, every limit explicit; the same plan has the same digest.
Talks to: nobody. The shipped plans are the files of `gateway/qualify/plans` (also to be seen as `policies/plans`), so that an
installed package has them; they are named without their ending (`quick`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.errors import PlimsollError
from gateway.evidence.canonical import digest
from gateway.evidence.record import Feature

SHIPPED = Path(__file__).parent / "plans"
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
MAX_PLAN_BYTES = 1_048_576

# Request fields that change what a request costs, by the feature a record names.
_FEATURES: dict[str, frozenset[Feature]] = {
    "logprobs": frozenset({"logprobs"}),
    "top_logprobs": frozenset({"logprobs"}),
    "prompt_logprobs": frozenset({"prompt_logprobs"}),
    "response_format": frozenset({"structured_output"}),
    "structured_outputs": frozenset({"structured_output"}),
    "guided_json": frozenset({"structured_output"}),
    "presence_penalty": frozenset({"penalties"}),
    "frequency_penalty": frozenset({"penalties"}),
    "repetition_penalty": frozenset({"penalties"}),
}
_OWNED = frozenset({"model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos",
                    "stream", "stream_options", "n"})  # fmt: skip


class PlanError(PlimsollError):
    """The plan cannot be used; the message names the field and what is wrong with it."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenRange(_Part):
    """A closed range of tokens."""

    min: Annotated[int, Field(ge=0, lt=2**31)]
    max: Annotated[int, Field(ge=0, lt=2**31)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is over max {self.max}")
        return self


class Warmup(_Part):
    """Sent before anything counts: `requests` at least, then windows until the median settles.

    Steady: the median latency of a window is within `tolerance` of the window before, twice in a row. Not steady after
    `max_requests`: the run ends without a record.
    """

    requests: Positive = 32
    window: Annotated[int, Field(ge=4, lt=10_000)] = 16
    tolerance: Annotated[float, Field(gt=0, le=1)] = 0.15
    max_requests: Positive = 512


class Mix(_Part):
    """How many waves in a cycle are of which kind.

    `uniform` draws over the whole box, `opposite` puts opposite corners beside each other, `largest` is the far corner.
    """

    uniform: Annotated[int, Field(ge=1, le=100)] = 2
    opposite: Annotated[int, Field(ge=1, le=100)] = 1
    largest: Annotated[int, Field(ge=1, le=100)] = 1

    @property
    def waves(self) -> int:
        """Waves in one whole cycle."""
        return self.uniform + self.opposite + self.largest


class Poisson(_Part):
    """An open loop: arrivals at a rate, whatever the server does."""

    poisson_per_s: Annotated[float, Field(gt=0, le=100_000)]


class SharedPrefix(_Part):
    """Every prompt begins with the same tokens."""

    shared_prefix: Positive


class Trace(_Part):
    """Requests of a JSONL file in its order: `input_tokens`, `output_tokens`, optionally `prefix` and `prefix_tokens`."""

    trace: Path


class Cell(_Part):
    """One box of sizes at rising concurrency. A level has `requests`, and at least `batches` waves, over all repeats."""

    task: Literal["generate", "pool"] = "generate"
    features: tuple[Literal["lora"], ...] = ()
    prefix_reuse: Literal["none"] | SharedPrefix | Trace = "none"
    input_tokens: TokenRange
    output_tokens: TokenRange = TokenRange(min=0, max=0)
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=64)]
    arrival: Literal["closed_loop"] | Poisson = "closed_loop"
    requests: Positive = 96
    batches: Positive = 24
    min_seconds: Annotated[float, Field(ge=0, le=86_400)] = 0
    max_seconds: Seconds = 120
    burst_every: Positive | None = 4
    mix: Mix = Mix()
    body: dict[str, Any] = {}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if list(self.concurrency) != sorted(set(self.concurrency)):
            raise ValueError("concurrency levels rise and stand once")
        if self.input_tokens.min < 1:
            raise ValueError("input_tokens.min is at least 1")
        if (self.task == "generate") != (self.output_tokens.min >= 1):
            raise ValueError("a generate cell has output_tokens from 1; a pool cell has none")
        if isinstance(self.prefix_reuse, SharedPrefix) and self.prefix_reuse.shared_prefix >= self.input_tokens.min:
            raise ValueError("shared_prefix is less than input_tokens.min, so that no two prompts are equal")
        if self.min_seconds > self.max_seconds:
            raise ValueError("min_seconds is over max_seconds")
        if owned := sorted(_OWNED & self.body.keys()):
            raise ValueError(f"body.{owned[0]} is set by the plan itself")
        return self

    @property
    def all_features(self) -> tuple[Feature, ...]:
        """The features a request of this cell has, sorted: those of its body, and those only its author knows."""
        found: set[Feature] = set(self.features)
        for name, value in self.body.items():
            if value not in (None, False, 0):
                found |= _FEATURES.get(name, frozenset())
        return tuple(sorted(found))

    @property
    def reuse(self) -> str:
        """The regime as the record names it."""
        match self.prefix_reuse:
            case SharedPrefix(shared_prefix=tokens):
                return f"shared_prefix:{tokens}"
            case Trace(trace=path):
                return f"trace:{path.name}"
            case _:
                return "none"

    def per_repeat(self, concurrency: int, repeats: int) -> int:
        """Requests of one repeat at a level: whole waves, and whole cycles of the mix where there is room for one."""
        total = max(self.requests, self.batches * concurrency)
        waves = math.ceil(total / repeats / concurrency)
        return max(waves, self.mix.waves) * concurrency


class Limits(_Part):
    """What ends a request; each end is counted as a timeout."""

    connect_s: Seconds = 5
    first_token_s: Seconds = 120
    execution_s: Seconds = 600


class Plan(_Part):
    """The whole file."""

    schema_: Literal["plimsoll-plan/v1"] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    description: Annotated[str, Field(max_length=1000)] = ""
    route: Literal["completions", "chat", "embeddings"] = "completions"
    model: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 7
    repeats: Annotated[int, Field(ge=1, le=100)] = 3
    confidence: Annotated[float, Field(ge=0.8, le=0.999)] = 0.95
    warmup: Warmup | None = Warmup()
    cells: Annotated[tuple[Cell, ...], Field(min_length=1, max_length=64)]
    timeouts: Limits = Limits()
    max_lag_ms: Annotated[float, Field(gt=0, le=10_000)] = 50
    valid_days: Annotated[int, Field(ge=1, le=3650)] | None = None

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        task = "pool" if self.route == "embeddings" else "generate"
        if any(cell.task != task for cell in self.cells):
            raise ValueError(f"route {self.route} measures cells of task {task}")
        return self

    @property
    def digest(self) -> str:
        """`sha256:…` of the plan; numbers that are not whole are written as text first."""
        return digest(_without_floats(self.model_dump(mode="json", by_alias=True)))


class Step(_Part):
    """One line of `--dry-run`: a level, what it sends, and an estimate of its time."""

    cell: int
    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float


def steps(plan: Plan, token_ms: float = 15.0) -> tuple[Step, ...]:
    """What `plan` would send. Seconds assume `token_ms` for each output token of a sequence, and are capped by the plan."""
    found = []
    for index, cell in enumerate(plan.cells):
        for concurrency in cell.concurrency:
            each = cell.per_repeat(concurrency, plan.repeats)
            inputs, outputs = (_mean(r, cell.mix) for r in (cell.input_tokens, cell.output_tokens))
            one = max(1.0, outputs) * token_ms / 1000
            rate = cell.arrival.poisson_per_s if isinstance(cell.arrival, Poisson) else concurrency / one
            seconds = min(max(each / rate, cell.min_seconds), cell.max_seconds) * plan.repeats
            found.append(
                Step(cell=index, concurrency=concurrency, requests=each * plan.repeats, seconds=seconds,
                     input_tokens=int(inputs * each * plan.repeats), output_tokens=int(outputs * each * plan.repeats))
            )  # fmt: skip
    return tuple(found)


def _mean(size: TokenRange, mix: Mix) -> float:
    middle = (size.min + size.max) / 2
    return (middle * (mix.uniform + mix.opposite) + size.max * mix.largest) / mix.waves


def shipped() -> tuple[str, ...]:
    """The names of the plans that come with the package."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def load(source: str) -> Plan:
    """The plan in the file `source`, or the shipped plan of that name. Raises `PlanError`."""
    path = Path(source)
    if not path.exists() and source in shipped():
        path = SHIPPED / f"{source}.yaml"
    try:
        raw = path.read_bytes()
    except OSError as error:
        names = ", ".join(shipped())
        raise PlanError(f"{source}: neither a plan file nor a shipped plan ({names}): {error.strerror}") from error
    return parse(raw, base=path.resolve().parent, name=source)


def parse(raw: bytes, *, base: Path = Path(), name: str = "plan") -> Plan:
    """Check `raw` as a plan; the path of a trace is relative to `base`. Raises `PlanError`."""
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"{name}: more than {MAX_PLAN_BYTES} bytes")
    try:
        value = yaml.safe_load(raw)
        plan = Plan.model_validate(value)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or 'plan'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise PlanError(f"{name}: " + "; ".join(lines[:10])) from error
    return plan.model_copy(update={"cells": tuple(_resolved(cell, base) for cell in plan.cells)})


def _resolved(cell: Cell, base: Path) -> Cell:
    if isinstance(cell.prefix_reuse, Trace):
        return cell.model_copy(update={"prefix_reuse": Trace(trace=base / cell.prefix_reuse.trace)})
    return cell


def _without_floats(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value == int(value) else repr(value)
    if isinstance(value, dict):
        return {key: _without_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_floats(item) for item in value]
    return value
