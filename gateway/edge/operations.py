"""What the gateway's own routes need from the gateway: one interface, implemented by the composition root.

Owns the protocols and the frozen values that cross them. `local.py` and `admin.py` talk to these alone, so that neither
knows backends, queues or stores. Every method that may wait is async; the others return at once from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.edge.routes import Route
from gateway.errors import Refusal


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as a client may see it. Limits are the envelope's largest input and output in tokens; None: not known now."""

    id: str
    created: int
    max_input_tokens: int | None
    max_output_tokens: int | None
    backends_open: int = 0


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """A backend as an operator sees it. Times are ages in seconds; None means not known."""

    name: str
    url: str
    source: str  # attested, declared, probed
    gate: str  # open, or the reason it is closed
    gate_message: str | None
    hash: str | None
    vllm_version: str | None
    hardware: str | None
    models: tuple[str, ...]
    breaker: str
    draining: bool
    in_flight_requests: int
    in_flight_sequences: int
    reserved_tokens: int
    token_budget: int | None
    foreign_requests: int | None
    limits: dict[str, int] = field(default_factory=dict)  # axis -> largest measured value
    verdicts: tuple[dict[str, Any], ...] = ()  # model, record, decision, reason, and the eight fields
    identity_age_s: float | None = None
    breaker_elsewhere: int = 0  # other replicas whose breaker for it is not closed


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One priority class: what waits in it."""

    name: str
    requests: int
    tokens: int
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """The whole gateway at one instant."""

    version: str
    uptime_s: float
    ready: bool
    not_ready_because: str | None
    draining: bool
    enforcement: str
    policy_file: str | None
    policy_error: str | None  # why the file on disk is not in force; None when it is
    state_degraded: bool
    backends: tuple[BackendStatus, ...]
    queues: tuple[QueueStatus, ...]
    journal_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """Would such a request be admitted now? Tokens are per sequence; `output_tokens` None asks for the default."""

    model: str
    input_tokens: int
    output_tokens: int | None = None
    sequences: int = 1
    task: str = "generate"
    features: frozenset[str] = frozenset()
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """An operator's action that was taken: state before and after, for the answer and the audit log."""

    before: Any
    after: Any


class Gateway(Protocol):
    """What `local.py` asks: the routes that clients and scrapers use."""

    def models(self, tenant: str) -> tuple[ModelCard, ...]: ...
    def ready(self) -> Refusal | None:
        """None when ready, else why not."""

    async def metrics(self) -> bytes: ...
    async def count(self, route: Route, tenant: str, content_type: bytes | None, body: bytes) -> dict[str, Any] | Refusal:
        """The answer of /tokenize, /detokenize or /v1/messages/count_tokens to a decoded body."""


class Operations(Protocol):
    """What `admin.py` asks. Methods that change something return a `Changed`, or a `Refusal` when they did nothing."""

    def status(self) -> Status: ...
    def records(self) -> list[dict[str, Any]]:
        """Every record in the store: id, model, identity, slices in short, valid until, verdict per backend."""

    async def push_record(self, body: bytes, signatures: tuple[str, ...], *, must_be_signed: bool) -> dict[str, Any] | Refusal:
        """Store a record and its signatures (`ed25519:<public> <signature>`); its id, whether it was new, its verdicts.

        `must_be_signed`: by a key that some model's require_signature names.
        """

    async def retest(self) -> dict[str, Any]:
        """Demand and changes outside the slices; `replicas`: of how many gateways."""

    async def retest_plan(self, model: str, share: float) -> dict[str, Any] | Refusal: ...
    def explain(self, question: Question) -> dict[str, Any] | Refusal: ...
    async def reload(self) -> Changed | Refusal: ...
    def drain_backend(self, name: str) -> Changed | Refusal: ...
    def undrain_backend(self, name: str) -> Changed | Refusal: ...
    def reset_breaker(self, name: str) -> Changed | Refusal: ...
    def recent(self, limit: int, reason: str | None, tenant: str | None) -> list[dict[str, Any]]:
        """Requests that were not served, newest first."""
