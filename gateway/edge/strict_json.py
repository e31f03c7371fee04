"""JSON that two parsers cannot read differently.

Owns: turning bytes into one object and saying why not.
Promises: a document returned by `read` has no duplicate key at any depth, no lone surrogate, no NaN, is at most
254 levels deep, has a bounded number of lists and objects, and `compact` is exactly what it means, so what was checked can
be what is sent. Nothing is raised.
Talks to: orjson; the standard library's decoder for the one question that orjson does not answer.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson

from gateway.errors import Reason, Refusal

Document = dict[str, Any]
FEW_BYTES = 262_144  # below, its size is bound enough
MANY = 300_000  # brackets, and one more for each 64 bytes: a list or object costs up to 240 bytes, and holds up other threads


class Read(NamedTuple):
    """A checked document and its canonical, compact bytes."""

    document: Document
    compact: bytes


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def invalid(message: str, param: str | None = None) -> Refusal:
    """The refusal of a body that cannot be used."""
    return Refusal(Reason.INVALID_BODY, message, param=param)


def read(raw: bytes) -> Read | Refusal:
    """Bytes to a checked JSON object.

    A dropped duplicate takes its colon with it, so equal counts of colons before and after prove that nothing was
    dropped, unless a colon was written as an escape; only then are all keys compared one by one. Bodies that clients
    wrote compactly are equal to their compact form, which is the quickest proof.
    """
    if len(raw) > FEW_BYTES and raw.count(b"[") + raw.count(b"{") > MANY + len(raw) // 64:
        return invalid("The JSON holds too many lists and objects.")
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return invalid(f"The body is not valid JSON: {error.msg} at byte {error.pos}.")
    if type(document) is not dict:
        return invalid("The body must be one JSON object.")
    try:
        compact = orjson.dumps(document)
    except TypeError:
        return invalid("The JSON is nested too deeply; 254 levels are allowed.")
    if raw != compact and (raw.count(b":") != compact.count(b":") or b"\\u003" in raw):
        key = _duplicate(raw)
        if key is not None:
            return invalid(f"The key {key[:64]!r} stands twice in one object.", key[:64])
    return Read(document, compact)


def _duplicate(raw: bytes) -> str | None:
    """The first key that stands twice in one object of a valid document, escapes resolved; None when there is none."""
    try:
        json.loads(raw, object_pairs_hook=_unique, parse_int=len, parse_float=len)
    except _DuplicateKey as found:
        return found.key
    return None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _DuplicateKey(key)
        seen.add(key)
