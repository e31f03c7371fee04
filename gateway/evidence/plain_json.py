"""Canonical JSON (RFC 8785) in the standard library, for the part of the evidence code that runs inside vLLM.

Owns: the canonical bytes and digest of a document without floats.
Promises: the same bytes as the `rfc8785` package for every document it accepts; anything else raises `NotCanonical`.
Talks to: nothing. It imports the standard library only, so that it loads in any vLLM environment.
"""

import hashlib
import json

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]

MAX_SAFE_INT = 2**53 - 1


class NotCanonical(ValueError):
    """The value cannot be part of a canonical document (a float, a big integer, a lone surrogate, another type)."""


def canonical(value: Json) -> bytes:
    """RFC 8785 bytes of `value`: keys sorted by UTF-16 code units, no white space, UTF-8. Raises `NotCanonical`."""
    return json.dumps(_ordered(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def digest(value: Json) -> str:
    """`sha256:` and 64 hex digits over the canonical bytes of `value`."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def _ordered(value: object) -> object:
    match value:
        case None | bool():
            return value
        case int():
            if abs(value) > MAX_SAFE_INT:
                raise NotCanonical(f"integer beyond 2^53: {value}")
            return int(value)
        case str():
            return _text(value)
        case list() | tuple():
            return [_ordered(item) for item in value]
        case dict():
            return {key: _ordered(value[key]) for key in sorted(value, key=_utf16)}
    raise NotCanonical(f"{type(value).__name__} has no canonical form here; write decimals as strings")


def _text(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotCanonical("text with a lone surrogate") from error
    return str(value)


def _utf16(key: object) -> bytes:
    if not isinstance(key, str):
        raise NotCanonical(f"a key must be text, not {type(key).__name__}")
    return _text(key).encode("utf-16-be")
