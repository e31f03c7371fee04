"""What a whole answer says of itself: tokens used, and whether it is an error in the clothes of a 200. Pure."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import orjson

MAX_PARSED_BYTES = 65_536  # of a longer answer (embeddings, many choices) only its end is searched
_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_ERROR_START = re.compile(rb'\s*\{\s*"error"\s*:\s*[{"]')


class Account(NamedTuple):
    """Tokens are None where the answer does not say. `error`: the answer is an error object; `code` is what it gives.

    `torn`: it is no JSON document, though whoever calls itself JSON must be one: what is missing cannot be known.
    """

    input_tokens: int | None
    output_tokens: int | None
    error: bool
    code: int | str | None
    torn: bool = False


def read_account(body: bytes) -> Account:
    """Of a response body that came with status 200: JSON of any API that is proxied, or text."""
    if len(body) > MAX_PARSED_BYTES:
        return _searched(body)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:  # NaN, or not JSON at all: text, srt, vtt, or half a document
        return _searched(body)._replace(torn=not _lenient_json(body))
    if not isinstance(document, dict):
        return Account(None, None, False, None)
    error = document.get("error")
    if not error:
        return Account(*_tokens(document.get("usage")), False, None)
    code = error.get("code") if isinstance(error, dict) else None
    return Account(*_tokens(document.get("usage")), True, code)


def _lenient_json(body: bytes) -> bool:
    """Whether it is JSON as vLLM may write it: NaN and infinities are numbers there."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _searched(body: bytes) -> Account:
    error = _ERROR_START.match(body) is not None
    torn = body[-64:].rstrip()[-1:] not in (b"}", b"]")
    found = _USAGE.findall(body, max(0, len(body) - 4096))
    if not found:
        return Account(None, None, error, None, torn)
    try:
        usage = orjson.loads(found[-1])
    except orjson.JSONDecodeError:
        usage = None
    return Account(*_tokens(usage), error, None, torn)


def _tokens(usage: object) -> tuple[int | None, int | None]:
    """(input, output) under any of their names; an API without output (embeddings) has used 0 of it."""
    if not isinstance(usage, dict):
        return None, None
    read = usage.get("prompt_tokens", usage.get("input_tokens"))
    written = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return believable(read), believable(written)


def believable(count: object) -> int | None:
    """A number of tokens as a server may state it; None for what is none (negative, a truth value, text, a fraction)."""
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**53 else None
