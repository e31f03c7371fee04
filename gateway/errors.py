"""The words for what can happen to a request. No HTTP status here: `edge/responses.py` alone knows those.

`Reason` is one closed list. It is the `code` of an error, the `reason` label of a metric and the
`reason` field of a journal line, so that the three always tell the same story.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; each request has exactly one."""

    SERVED = "served"  # the backend's answer reached the caller whole (vLLM's own 4xx included)
    REFUSED = "refused"  # never dispatched
    FAILED = "failed"  # dispatched, and the answer is broken, late or an error
    CANCELLED = "cancelled"  # the caller left


class Axis(StrEnum):
    """The way a request left the measured slices; one retest trigger is counted per axis."""

    INPUT = "input"
    OUTPUT = "output"
    SEQUENCES = "sequences"
    FEATURE = "feature"
    CONCURRENCY = "concurrency"


class Reason(StrEnum):
    """Why. Values are the `code` that callers see."""

    OK = "ok"
    # who is asking
    INVALID_API_KEY = "invalid_api_key"
    NOT_PERMITTED = "not_permitted"
    # what is asked
    UNKNOWN_ROUTE = "unknown_route"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_BODY = "invalid_body"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    REQUEST_TIMEOUT = "request_timeout"  # the request itself was not sent within the body deadline
    FIELD_NOT_ALLOWED = "field_not_allowed"
    # what was measured
    OUT_OF_SLICE_INPUT = "out_of_slice_input"
    OUT_OF_SLICE_OUTPUT = "out_of_slice_output"
    OUT_OF_SLICE_SEQUENCES = "out_of_slice_sequences"
    OUT_OF_SLICE_FEATURE = "out_of_slice_feature"
    NO_QUALIFIED_RECORD = "no_qualified_record"
    CONFIGURATION_CHANGED = "configuration_changed"
    MIXED_IDENTITY = "mixed_identity"
    BACKEND_NOT_EXCLUSIVE = "backend_not_exclusive"
    # who else is here
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DRAINING = "draining"
    RATE_LIMITED = "rate_limited"
    TOKENS_LIMITED = "tokens_limited"
    CONCURRENCY_LIMITED = "concurrency_limited"
    # what the backend did
    BACKEND_UNAVAILABLE = "backend_unavailable"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_ERROR = "upstream_error"  # an error status or an error event of vLLM's own, relayed untouched
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STALL_TIMEOUT = "stall_timeout"
    EXECUTION_TIMEOUT = "execution_timeout"
    CALLER_DEADLINE = "caller_deadline"
    # the caller
    CLIENT_CLOSED = "client_closed"
    CLIENT_WRITE_TIMEOUT = "client_write_timeout"  # it stopped reading for longer than client_write_s
    # us
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed no. `message` is for people; `fits` says what would have been admitted (numbers with units).

    `retry_after_s` is None where trying again cannot help; otherwise seconds, before jitter.
    `param` is the request field at fault, where there is one.
    """

    reason: Reason
    message: str
    axis: Axis | None = None
    param: str | None = None
    fits: str | None = None
    retry_after_s: float | None = None


class Refused(Exception):
    """Carries a `Refusal` through code that returns something else; raised by shells, never by decisions."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class PlimsollError(Exception):
    """Base of the errors an operator sees; the message is one clear sentence, without a traceback."""
