"""Log-probabilities as numbers that repeat: they have the right shape and order, and mean nothing.

Owns the two shapes of OpenAI's API. Pure.
"""

from collections.abc import Sequence
from typing import Any


def _logprob(token: int, rank: int) -> float:
    return -0.05 - 0.01 * (token % 13) - 0.5 * rank


def _entry(pieces: tuple[str, ...], token: int, of: int, rank: int) -> dict[str, Any]:
    return {"token": pieces[token], "logprob": _logprob(of, rank), "bytes": list(pieces[token].encode("utf-8"))}


def chat_logprobs(pieces: tuple[str, ...], tokens: Sequence[int], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            {
                **_entry(pieces, token, token, 0),
                "top_logprobs": [_entry(pieces, (token + rank) % len(pieces), token, rank) for rank in range(top)],
            }
            for token in tokens
        ]
    }


def completion_logprobs(pieces: tuple[str, ...], tokens: Sequence[int], top: int, offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions; `offset` is where the first token's text starts."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(pieces[token])
    return {
        "text_offset": offsets,
        "token_logprobs": [_logprob(token, 0) for token in tokens],
        "tokens": [pieces[token] for token in tokens],
        "top_logprobs": [
            {pieces[(token + rank) % len(pieces)]: _logprob(token, rank) for rank in range(max(1, top))} for token in tokens
        ],
    }
