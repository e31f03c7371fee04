"""Canonical JSON (RFC 8785) on the gateway's side.

Owns: the one byte form of a document, its digest, and the check that a document from outside may have one.
Promises: equal documents have equal bytes; floats, integers from 2^53 on, deep nesting and lone surrogates are refused.
Talks to: the `rfc8785` package. (The vLLM side has `plain_json`, standard library only; a test proves that both agree.)
"""

import hashlib
from typing import Any

import orjson
import rfc8785

MAX_DEPTH = 32
MAX_SAFE_INT = 2**53 - 1


class CanonicalError(ValueError):
    """The value has no canonical form here; the message names the place and what is wrong with it."""


def canonical(value: Any) -> bytes:
    """RFC 8785 bytes of a document of dicts, lists, text, integers, booleans and null. Raises `CanonicalError`."""
    check(value)
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeError) as error:
        raise CanonicalError(str(error)) from error


def digest(value: Any) -> str:
    """`sha256:` and 64 hex digits over the canonical bytes. Raises `CanonicalError`."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def parse(raw: bytes, *, limit: int) -> Any:
    """JSON from outside, at most `limit` bytes, checked to be canonicalisable. Raises `CanonicalError`."""
    if len(raw) > limit:
        raise CanonicalError(f"{len(raw)} bytes, more than the {limit} allowed")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise CanonicalError(f"not JSON: {error}") from error
    check(value)
    return value


def check(value: Any, place: str = "document", depth: int = 0) -> None:
    """Walk `value` and raise `CanonicalError` at the first part that cannot be canonical."""
    if depth > MAX_DEPTH:
        raise CanonicalError(f"{place}: nested deeper than {MAX_DEPTH}")
    match value:
        case None | bool() | str():
            return
        case int():
            if abs(value) > MAX_SAFE_INT:
                raise CanonicalError(f"{place}: integer beyond 2^53")
        case list() | tuple():
            for index, item in enumerate(value):
                check(item, f"{place}[{index}]", depth + 1)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise CanonicalError(f"{place}: a key must be text")
                check(item, f"{place}.{key}", depth + 1)
        case float():
            raise CanonicalError(f"{place}: a float; decimals are written as text")
        case _:
            raise CanonicalError(f"{place}: {type(value).__name__} is not JSON")
