"""Capacity Evidence Record v1: what was measured, on exactly what, how, and for how long it counts.

Owns: the record's schema and its consistency rules, its canonical bytes and its id.
Promises: a record is frozen; unknown keys are refused; there are no floats (decimals are text); a record that is loaded
is consistent in itself: ranges are ordered, percentiles rise, counts add up, bounds lie on the right side of estimates, a
slice claims no size that was not observed, and the configuration hashes to the hash that the identity states.
Talks to: `canonical`. Whether a record is good enough for anything is `verdict`'s to say.

Capability (`capabilities`), chosen configuration (`configuration`), measurement (`slices`) and decision (in none of them)
stay apart. A slice is a box that was sampled as a mix; the one assumption is that fewer of the same are no slower.
"""

import datetime as dt
import hashlib
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from gateway.errors import PlimsollError
from gateway.evidence.canonical import CanonicalError, canonical, check, digest, parse

MAX_RECORD_BYTES = 8 * 1024 * 1024
SCHEMA = "capacity-evidence-record/v1"
ASSUMPTION = "at a lower concurrency than was measured, the same requests are no slower"

Text = Annotated[str, Field(min_length=1, max_length=4096, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**53, strict=True)]
Positive = Annotated[int, Field(ge=1, lt=2**53, strict=True)]
DecimalText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,14})(\.[0-9]{1,9})?$", strict=True)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", strict=True)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", strict=True)]
Instant = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z$", strict=True)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$", strict=True)]
Task = Literal["generate", "pool", "transcribe"]
Feature = Literal["logprobs", "prompt_logprobs", "structured_output", "penalties", "lora", "media"]
Trigger = Literal[
    "model_revision",
    "vllm_version",
    "hardware_profile",
    "server_configuration_hash",
    "parallelism",
    "max_model_len",
    "batching_limits",
    "target_slice",
    "live_slo",
]
ALL_TRIGGERS: tuple[Trigger, ...] = (
    "model_revision",
    "vllm_version",
    "hardware_profile",
    "server_configuration_hash",
    "parallelism",
    "max_model_len",
    "batching_limits",
    "target_slice",
)


class RecordError(PlimsollError):
    """The bytes are not a usable record; the message names the field and what is wrong with it."""


def instant(text: str) -> dt.datetime:
    """An `Instant` as an aware datetime in UTC."""
    return dt.datetime.fromisoformat(text.removesuffix("Z") + "+00:00")


def _checked_instant(value: str | None) -> str | None:
    if value is not None:
        instant(value)
    return value


def _not_falling(values: Iterable[str | None], what: str) -> None:
    numbers = [Decimal(value) for value in values if value is not None]
    if numbers != sorted(numbers):
        raise ValueError(f"{what} fall: {', '.join(map(str, numbers))}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RecordIdentity(_Part):
    """What ran. None means that it is not known, and makes provenance incomplete."""

    model_revision: Text | None
    vllm_version: Text | None
    server_configuration_hash: Digest | None
    hardware_profile: Text | None


class Protocol(_Part):
    """How it was measured. `confidence` is the one at which the `_upper` and `_lower` bounds hold.

    `notes` say where the measurement fell short of its plan; a record without any has no such key.
    """

    tool: Text
    started_at: Instant
    finished_at: Instant | None = None
    warmup_state: Literal["completed", "omitted", "unknown"]
    warmup_requests: Count | None = None
    arrival: Literal["closed_loop", "open_loop_poisson", "trace", "unknown"]
    dataset: Text
    route: Text | None = None
    seed: Count | None = None
    repeats: Count
    path: Literal["direct", "gateway", "unknown"]
    kv_cache_tokens: Positive | None = None
    confidence: DecimalText | None = None
    identity_source: Literal["attested", "declared"] | None = None
    plan: Digest | None = None
    assumptions: tuple[Text, ...] = (ASSUMPTION,)
    notes: Annotated[tuple[Text, ...], Field(max_length=256)] = ()

    @field_validator("started_at", "finished_at")
    @classmethod
    def _is_an_instant(cls, value: str | None) -> str | None:
        return _checked_instant(value)

    @model_serializer(mode="wrap")
    def _without_empty_notes(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name != "notes" or value}


class Range(_Part):
    """A closed range of whole numbers."""

    min: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is over max {self.max}")
        return self

    def contains(self, other: "Range") -> bool:
        """Whether the whole of `other` lies inside this range."""
        return self.min <= other.min and other.max <= self.max


class Statistics(_Part):
    """Milliseconds, as decimal text. An `_upper` is the one-sided confidence bound; what is not known is left out."""

    mean: DecimalText | None = None
    p50: DecimalText | None = None
    p95: DecimalText | None = None
    p99: DecimalText | None = None
    p50_upper: DecimalText | None = None
    p95_upper: DecimalText | None = None
    p99_upper: DecimalText | None = None

    @model_validator(mode="after")
    def _rising(self) -> Self:
        _not_falling((self.p50, self.p95, self.p99), "percentiles")
        for name in ("p50", "p95", "p99"):
            estimate, upper = getattr(self, name), getattr(self, name + "_upper")
            if upper is not None and estimate is None:
                raise ValueError(f"{name}_upper without {name}")
            _not_falling((estimate, upper), f"{name} and {name}_upper")
        return self

    @model_serializer(mode="wrap")
    def _without_unknowns(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class Level(_Part):
    """One concurrency of a slice. `requests` counts all that were sent; a void level is no evidence.

    `preemptions` is None when the server did not tell. `oversaturated`: load grew faster than it was served in the cell,
    so the numbers are of no steady state.
    """

    concurrency: Positive
    requests: Count
    errors: Count
    timeouts: Count
    cancelled: Count = 0
    preemptions: Count | None = None
    duration_s: DecimalText | None = None
    e2e_ms: Statistics = Statistics()
    ttft_ms: Statistics = Statistics()
    tpot_ms: Statistics = Statistics()
    itl_ms: Statistics = Statistics()
    queue_ms: Statistics = Statistics()
    queue_source: Literal["vllm_metrics", "client"] | None = None
    output_tokens_per_s: DecimalText | None = None
    output_tokens_per_s_lower: DecimalText | None = None
    requests_per_s: DecimalText | None = None
    requests_per_s_lower: DecimalText | None = None
    void: bool = False
    oversaturated: bool = False

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.errors + self.timeouts + self.cancelled > self.requests:
            raise ValueError("errors, timeouts and cancelled are more than requests")
        _not_falling((self.output_tokens_per_s_lower, self.output_tokens_per_s), "output_tokens_per_s_lower and its estimate")
        _not_falling((self.requests_per_s_lower, self.requests_per_s), "requests_per_s_lower and its estimate")
        return self


class Slice(_Part):
    """A box of shapes that was sampled as a mix, up to a concurrency. Bounds claim no more than was observed."""

    task: Task
    features: tuple[Feature, ...] = ()
    prefix_reuse: Text = "none"
    input_tokens: Range
    output_tokens: Range
    concurrency: Range
    observed_input_tokens: Range | None = None
    observed_output_tokens: Range | None = None
    levels: Annotated[tuple[Level, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.features) != sorted(set(self.features)):
            raise ValueError("features are sorted and stand once")
        steps = [level.concurrency for level in self.levels]
        if steps != sorted(set(steps)):
            raise ValueError("levels rise in concurrency and stand once")
        if self.concurrency.min < 1 or steps[-1] > self.concurrency.max:
            raise ValueError(f"concurrency {self.concurrency.min}..{self.concurrency.max} does not hold every level")
        for name in ("input_tokens", "output_tokens"):
            claimed, observed = getattr(self, name), getattr(self, "observed_" + name)
            if observed is not None and not observed.contains(claimed):
                raise ValueError(f"{name} claims {claimed.min}..{claimed.max}, observed was {observed.min}..{observed.max}")
        return self


class Samples(_Part):
    """The raw samples, in a file beside the record."""

    file: FileName
    sha256: Hex


class BoundaryNote(_Part):
    """What vLLM's API key covers, and which outer boundary is expected. Blank counts as missing."""

    api_key_covers: Annotated[str, Field(max_length=8192, strict=True)]
    external_boundary: Annotated[str, Field(max_length=8192, strict=True)]


class Supersedes(_Part):
    """Which record this one replaces, which identity or slice fields changed, which evidence was rebuilt."""

    record: Hex
    changed: tuple[Text, ...]
    rebuilt: tuple[Text, ...]


class Record(_Part):
    """The whole record. See the module for what each part is for."""

    schema_: Literal["capacity-evidence-record/v1"] = Field(alias="schema")
    identity: RecordIdentity
    configuration: dict[str, Any]
    capabilities: dict[str, bool]
    protocol: Protocol
    slices: Annotated[tuple[Slice, ...], Field(min_length=1, max_length=256)]
    samples: Samples | None = None
    security_boundary_note: BoundaryNote | None = None
    retest_triggers: Annotated[tuple[Trigger, ...], Field(min_length=1)]
    valid_until: Instant | None = None
    supersedes: Supersedes | None = None

    @field_validator("valid_until")
    @classmethod
    def _is_an_instant(cls, value: str | None) -> str | None:
        return _checked_instant(value)

    @field_validator("configuration")
    @classmethod
    def _is_canonical(cls, value: dict[str, Any]) -> dict[str, Any]:
        check(value, "configuration")
        return value

    @model_validator(mode="after")
    def _hashes(self) -> Self:
        stated = self.identity.server_configuration_hash
        if self.configuration and stated is not None and digest(self.configuration) != stated:
            raise ValueError("configuration does not hash to identity.server_configuration_hash")
        return self


def record_id(record: Record) -> str:
    """64 hex digits: the SHA-256 of the record's canonical bytes."""
    return hashlib.sha256(dump(record)).hexdigest()


def dump(record: Record) -> bytes:
    """The record's canonical bytes (RFC 8785)."""
    return canonical(as_json(record))


def as_json(record: Record) -> dict[str, Any]:
    """The record as plain JSON values, every key present."""
    return record.model_dump(mode="json", by_alias=True)


def load(raw: bytes) -> Record:
    """A record from JSON bytes, whatever their layout. Raises `RecordError` naming the field."""
    try:
        return validate(parse(raw, limit=MAX_RECORD_BYTES))
    except CanonicalError as error:
        raise RecordError(str(error)) from error


def validate(value: object) -> Record:
    """A record from parsed JSON. Raises `RecordError` naming the fields at fault."""
    try:
        return Record.model_validate(value)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or 'record'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise RecordError("; ".join(lines[:20])) from error


def decimal_text(value: float | Decimal, places: int = 3) -> DecimalText:
    """A non-negative number as the record writes it: fixed point, at most `places` digits after it, no trailing zeros."""
    text = format(round(Decimal(str(value)), places), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
