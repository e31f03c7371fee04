"""How many tokens a text can become at most, read off the tokenizer's own description.

Owns: `TextBound` and the rules by which a tokenizer gets one.
Promises: where a bound is given, tokens <= narrow + factor × wide + prefix + specials holds for every text, because each
token of a BPE vocabulary covers at least one byte of the *normalised* text, and Unicode normalisation lengthens UTF-8 at
most 3 times (NFC) or 11 times (NFKC; U+FDFA is 3 bytes that become 33). ASCII is not changed by either. What is not
understood gives no bound.
Talks to: nobody. `tokenizers` is asked for its byte alphabet only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers

_FACTORS = {"NFC": 3, "NFKC": 11}
_SPLITTERS = frozenset({"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})
_BLANK = "▁"


@dataclass(frozen=True, slots=True)
class TextBound:
    """`factor`: None where no bound holds. `prefix`: tokens added before a text. `longest`: the most bytes that one
    token can stand for, None where a token may swallow any number."""

    factor: int | None
    prefix: int = 0
    longest: int | None = None

    def high(self, narrow: int, wide: int) -> int | None:
        """Tokens at most, without specials: `narrow` ASCII bytes and `wide` bytes of other text."""
        return None if self.factor is None else narrow + self.factor * wide + self.prefix


class _NoBound(Exception):
    """A part of the tokenizer that the rules do not cover."""


def analyse(description: dict[str, Any]) -> TextBound:
    """The bound of a tokenizer.json. Never raises on a description that `tokenizers` itself accepts."""
    model = description.get("model") or {}
    try:
        if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise _NoBound
        vocabulary = model["vocab"]
        factor, prefix = _normalizer(description.get("normalizer"), vocabulary)
        prefix += _pre_tokenizer(description.get("pre_tokenizer"), vocabulary)
        added = [token["content"] for token in description.get("added_tokens") or ()]
        # Each added token starts a new segment and each segment gets the prefix: its own text must pay for that.
        if prefix and any(len(content.encode()) < prefix + 1 for content in added):
            raise _NoBound
    except (_NoBound, KeyError, TypeError, AttributeError):
        return TextBound(None)
    return TextBound(factor, prefix, _longest(description, vocabulary, added))


def _normalizer(node: dict[str, Any] | None, vocabulary: dict[str, int]) -> tuple[int, int]:
    """(factor, prefix tokens) of a normalizer."""
    factor, prefix = 1, 0
    for part in _parts(node, "normalizers"):
        kind = part["type"]
        if kind in _FACTORS:
            if factor > 1:
                raise _NoBound
            factor = _FACTORS[kind]
        elif kind == "Prepend":
            prefix += sum(1 if char in vocabulary else len(char.encode()) for char in part["prepend"])
        elif kind != "Replace" or part["pattern"] != {"String": " "} or part["content"] != _BLANK or _BLANK not in vocabulary:
            raise _NoBound
    return factor, prefix


def _pre_tokenizer(node: dict[str, Any] | None, vocabulary: dict[str, int]) -> int:
    """Prefix tokens of a pre-tokenizer. One that adds a blank to every piece, not only to the first, has no bound."""
    prefix = 0
    for place, part in enumerate(_parts(node, "pretokenizers")):
        kind = part["type"]
        if kind == "ByteLevel":
            adds = part["add_prefix_space"]
        elif kind == "Metaspace":
            adds = part.get("prepend_scheme", "always") != "never"
            if part["replacement"] not in vocabulary:
                raise _NoBound
        elif kind in _SPLITTERS:
            continue
        else:
            raise _NoBound
        if adds and place:
            raise _NoBound
        prefix += bool(adds)
    return prefix


def _parts(node: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    if node is None:
        return ()
    return node[children] if node["type"] == "Sequence" else (node,)


def _longest(description: dict[str, Any], vocabulary: dict[str, int], added: list[str]) -> int | None:
    """Bytes of the longest token, where every byte of a text must be covered by some token; else None."""
    pre = list(_parts(description.get("pre_tokenizer"), "pretokenizers"))
    strips = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens") or ())
    shortens = any(part["type"] in _FACTORS for part in _parts(description.get("normalizer"), "normalizers"))
    if strips or shortens or any(_drops(part) for part in pre):
        return None
    if any(part["type"] == "ByteLevel" for part in pre):
        if not all(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet()):
            return None
        longest = max(map(len, vocabulary))
    elif description["model"].get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        longest = max(len(token.encode()) for token in vocabulary)
    else:
        return None
    return max(longest, *(len(content.encode()) for content in added), 1)


def _drops(part: dict[str, Any]) -> bool:
    return part["type"] in ("Whitespace", "WhitespaceSplit") or part.get("behavior") == "Removed"
