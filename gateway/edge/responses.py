"""The one module that knows HTTP statuses: refusals and failures to bytes, and the heads of relayed answers.

Owns the table of reasons and the shapes of errors in each dialect. Promises: every response has one Date, one Server
and one x-request-id; nothing of a client's text is put into a header unless it is short and printable. Pure, but for
the wall clock behind the Date header, which is read once a second at most.
"""

from __future__ import annotations

import math
import re
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import orjson

from gateway.edge.routes import Dialect
from gateway.errors import Reason, Refusal
from gateway.forward.upstream import Headers


class Answer(NamedTuple):
    """What a reason looks like on the wire. `retry`: may the same request be sent again."""

    status: int
    type: str
    retry: bool


_ANSWERS: dict[Reason, Answer] = {
    Reason.INVALID_API_KEY: Answer(401, "authentication_error", False),
    Reason.NOT_PERMITTED: Answer(403, "permission_error", False),
    Reason.UNKNOWN_ROUTE: Answer(404, "not_found_error", False),
    Reason.MODEL_NOT_FOUND: Answer(404, "not_found_error", False),
    Reason.METHOD_NOT_ALLOWED: Answer(405, "invalid_request_error", False),
    Reason.INVALID_BODY: Answer(400, "invalid_request_error", False),
    Reason.BODY_TOO_LARGE: Answer(413, "request_too_large", False),
    Reason.HEADERS_TOO_LARGE: Answer(431, "invalid_request_error", False),
    Reason.UNSUPPORTED_ENCODING: Answer(415, "invalid_request_error", False),
    Reason.REQUEST_TIMEOUT: Answer(408, "timeout_error", False),
    Reason.FIELD_NOT_ALLOWED: Answer(400, "invalid_request_error", False),
    Reason.OUT_OF_SLICE_INPUT: Answer(400, "invalid_request_error", False),
    Reason.OUT_OF_SLICE_OUTPUT: Answer(400, "invalid_request_error", False),
    Reason.OUT_OF_SLICE_SEQUENCES: Answer(400, "invalid_request_error", False),
    Reason.OUT_OF_SLICE_FEATURE: Answer(400, "invalid_request_error", False),
    Reason.NO_QUALIFIED_RECORD: Answer(503, "overloaded_error", False),
    Reason.CONFIGURATION_CHANGED: Answer(503, "overloaded_error", False),
    Reason.MIXED_IDENTITY: Answer(503, "overloaded_error", False),
    Reason.BACKEND_NOT_EXCLUSIVE: Answer(503, "overloaded_error", True),
    Reason.QUEUE_FULL: Answer(503, "overloaded_error", True),
    Reason.QUEUE_TIMEOUT: Answer(503, "overloaded_error", True),
    Reason.DRAINING: Answer(503, "overloaded_error", True),
    Reason.RATE_LIMITED: Answer(429, "rate_limit_error", True),
    Reason.TOKENS_LIMITED: Answer(429, "rate_limit_error", True),
    Reason.CONCURRENCY_LIMITED: Answer(429, "rate_limit_error", True),
    Reason.BACKEND_UNAVAILABLE: Answer(503, "overloaded_error", True),
    Reason.UPSTREAM_UNREACHABLE: Answer(502, "api_error", True),
    Reason.UPSTREAM_RESET: Answer(502, "api_error", False),
    Reason.UPSTREAM_ERROR: Answer(502, "api_error", False),
    Reason.FIRST_TOKEN_TIMEOUT: Answer(504, "timeout_error", False),
    Reason.STALL_TIMEOUT: Answer(504, "timeout_error", False),
    Reason.EXECUTION_TIMEOUT: Answer(504, "timeout_error", False),
    Reason.CALLER_DEADLINE: Answer(504, "timeout_error", False),
    Reason.CLIENT_CLOSED: Answer(499, "api_error", False),
    Reason.CLIENT_WRITE_TIMEOUT: Answer(499, "api_error", False),
    Reason.INTERNAL_ERROR: Answer(500, "api_error", False),
}
_RETRY_AFTER_S = {  # where a refusal does not say when
    Reason.NO_QUALIFIED_RECORD: 30.0,
    Reason.CONFIGURATION_CHANGED: 30.0,
    Reason.MIXED_IDENTITY: 30.0,
    Reason.DRAINING: 1.0,
    Reason.BACKEND_NOT_EXCLUSIVE: 1.0,
    Reason.UPSTREAM_UNREACHABLE: 1.0,
}
# A caller that comes again while there is too much already only adds to it.
_OVERLOAD = {Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.BACKEND_UNAVAILABLE, Reason.BACKEND_NOT_EXCLUSIVE}
_JITTER = 0.25
_STATUS_LINES = {s.value: b"HTTP/1.1 %d %s\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
# Of a backend's headers only these are its answer; the rest is between it and us, or would be said twice.
_RELAYED = frozenset({
    b"content-type", b"content-encoding", b"content-language", b"content-disposition", b"cache-control", b"retry-after",
})  # fmt: skip
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,64}")


def status_of(reason: Reason) -> int:
    """The status a refusal with this reason is answered with."""
    return _ANSWERS[reason].status


def acceptable_id(value: bytes | None) -> str | None:
    """A client's request id, where it is short and printable; None otherwise."""
    return value.decode("ascii") if value is not None and _CLIENT_ID.fullmatch(value) else None


class DateHeader:
    """`date` and `server` lines, rebuilt once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._lines = b"date: %s\r\nserver: plimsoll\r\n" % formatdate(second, usegmt=True).encode()
        return self._lines


DATE = DateHeader()


def relayed_head(status: int, headers: Headers, ours: bytes, length: int | None, *, chunked: bool, keep_alive: bool) -> bytes:
    """The head of a backend's answer. `ours`: whole lines. `length` None: chunked, or until the connection closes."""
    parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, DATE.lines()]
    for name, value in headers:
        if name in _RELAYED:
            parts.append(b"%b: %b\r\n" % (name, value))
    parts.append(ours)
    if _repeated_by_clients(status):
        parts.append(b"x-should-retry: false\r\n")
    if length is not None:
        if status not in (204, 304):
            parts.append(b"content-length: %d\r\n" % length)
    elif chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)


def _repeated_by_clients(status: int) -> bool:
    """Whether SDKs would send it again unasked, though the engine may have worked for it; not so where it was too busy."""
    return status in (408, 409) or (status >= 500 and status != 503)


def error_document(refusal: Refusal, dialect: Dialect) -> dict[str, object]:
    """The body of an error in the caller's dialect."""
    kind = _ANSWERS[refusal.reason].type
    error = {"message": _sentence(refusal), "type": kind, "param": refusal.param, "code": refusal.reason.value}
    if dialect == "anthropic":
        return {"type": "error", "error": error}
    return {"error": error}


def render(
    refusal: Refusal, dialect: Dialect, ours: bytes, *, jitter: float, retries: int, keep_alive: bool, allow: bytes | None = None
) -> bytes:
    """A whole response. `jitter` in [0, 1) spreads Retry-After by up to a quarter; `retries` is the caller's own count."""
    answer = _ANSWERS[refusal.reason]
    body = orjson.dumps(error_document(refusal, dialect))
    never = answer.status == 429 and refusal.retry_after_s is None  # more than the whole quota: no time will help
    retry = answer.retry and not never and not (retries and refusal.reason in _OVERLOAD)
    parts = [
        _STATUS_LINES.get(answer.status) or b"HTTP/1.1 %d \r\n" % answer.status,
        DATE.lines(),
        b"content-type: application/json\r\n",
        ours,
        b"x-plimsoll-reason: %b\r\nx-should-retry: %b\r\n" % (refusal.reason.encode(), b"true" if retry else b"false"),
    ]
    after_s = refusal.retry_after_s if refusal.retry_after_s is not None else _RETRY_AFTER_S.get(refusal.reason)
    if after_s is not None:
        after_s *= 1 + _JITTER * jitter
        parts.append(b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, math.ceil(after_s)), math.ceil(after_s * 1000)))
    if answer.status == 401:
        parts.append(b"www-authenticate: Bearer\r\n")
    if allow is not None:
        parts.append(b"allow: %b\r\n" % allow)
    parts.append(b"content-length: %d\r\n" % len(body))
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    parts.append(body)
    return b"".join(parts)


def head_of(answer: bytes) -> bytes:
    """A whole response without its body, as HEAD is answered."""
    return answer[: answer.index(b"\r\n\r\n") + 4]


def error_event(refusal: Refusal, dialect: Dialect, sequence: int) -> bytes:
    """One complete SSE event that tells of a failure inside a stream. `sequence`: events before it (responses dialect)."""
    document = error_document(refusal, dialect)
    if dialect == "anthropic":
        return b"event: error\ndata: " + orjson.dumps(document) + b"\n\n"
    if dialect == "responses":
        typed = {"type": "error", "code": refusal.reason.value, "message": _sentence(refusal), "param": refusal.param}
        return b"event: error\ndata: " + orjson.dumps({**typed, "sequence_number": sequence}) + b"\n\n"
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _sentence(refusal: Refusal) -> str:
    return f"{refusal.message.rstrip('.')}. What would fit: {refusal.fits}" if refusal.fits else refusal.message


class Cors:
    """CORS lines for the origins of the policy; empty for anyone else."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = {origin.encode("ascii", "ignore") for origin in origins}

    def lines(self, origin: bytes | None) -> bytes:
        """Header lines for an answer to `origin`."""
        if origin is None or not (self._any or origin in self._origins):
            return b""
        exposed = (
            b"access-control-expose-headers: x-request-id, x-plimsoll-reason, retry-after, retry-after-ms, x-should-retry\r\n"
        )
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n%b" % (origin, exposed)

    def preflight(self, origin: bytes | None, ours: bytes) -> bytes | None:
        """The whole answer to a preflight from `origin`; None when that origin may not ask."""
        lines = self.lines(origin)
        if not lines:
            return None
        allowed = (
            b"access-control-allow-methods: GET, POST, OPTIONS\r\n"
            b"access-control-allow-headers: authorization, content-type, x-api-key, api-key, x-request-id, x-request-timeout, "
            b"anthropic-version, x-stainless-timeout, x-stainless-read-timeout, x-stainless-retry-count\r\n"
            b"access-control-max-age: 600\r\n"
        )
        return b"".join((_STATUS_LINES[204], DATE.lines(), lines, allowed, ours, b"\r\n"))
