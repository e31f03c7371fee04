"""The form of a refusal for ASGI routes, taken from `responses`, which alone knows statuses and headers.

Owns the translation of whole HTTP responses into Starlette's. Date and Server are left to the server, which writes one of
each. Talks to `responses`.
"""

from __future__ import annotations

import random

from starlette.responses import Response

from gateway.edge import responses
from gateway.edge.routes import Dialect
from gateway.errors import Refusal

_LEFT_TO_THE_SERVER = frozenset({b"date", b"server", b"connection", b"content-length"})


def refuse(refusal: Refusal, dialect: Dialect, *, retries: int = 0, allow: str | None = None) -> Response:
    """A refusal as a response; `retries` is the caller's own count of attempts before this one."""
    whole = responses.render(
        refusal, dialect, b"", jitter=random.random(), retries=retries, keep_alive=True,  # noqa: S311 - spreads load, hides nothing
        allow=None if allow is None else allow.encode(),
    )  # fmt: skip
    head, _, body = whole.partition(b"\r\n\r\n")
    return _response(head, body)


def preflight(cors: responses.Cors, origin: bytes | None) -> Response | None:
    """The answer to a CORS preflight; None when that origin may not ask."""
    whole = cors.preflight(origin, b"")
    return None if whole is None else _response(whole.partition(b"\r\n\r\n")[0], b"")


def header_lines(lines: bytes) -> list[tuple[bytes, bytes]]:
    """`name: value` lines as pairs."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name, value) for name, _, value in pairs if name not in _LEFT_TO_THE_SERVER]


def _response(head: bytes, body: bytes) -> Response:
    status_line, _, lines = head.partition(b"\r\n")
    response = Response(body or None, int(status_line.split(b" ", 2)[1]))
    kept = [(name, value) for name, value in response.raw_headers if name == b"content-length"]
    response.raw_headers = kept + header_lines(lines)
    return response
