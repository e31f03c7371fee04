"""Prompts of exact length that share nothing by accident.

Owns: the choice of tokens and the JSON body of each measured request.
Promises: random tokens for every request, so that a prefix cache finds nothing but what the plan asks for; lengths exact by
token ids (completions, embeddings), or by text that was counted with the attested tokenizer (chat).
Talks to: `plan`, `sizes`. The tokenizer comes from the backend's own /plimsoll/tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import orjson
from tokenizers import Tokenizer

from gateway.qualify.plan import Cell, PlanError
from gateway.qualify.sizes import Size

# Without a tokenizer, ids that every vocabulary in use holds and that lie above the special ones.
_COMMON_IDS = tuple(range(300, 1000))
_MOST_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that are safe in a prompt, and words that stay one token each beside others. No words: chat is impossible."""

    ids: tuple[int, ...]
    words: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def common(cls) -> Vocabulary:
        """For a backend that hands out no tokenizer."""
        return cls(_COMMON_IDS)

    @classmethod
    def from_bundle(cls, raw: bytes) -> Vocabulary:
        """From the answer of /plimsoll/tokenizer; `common` where it holds no tokenizer.json. Raises `PlanError`."""
        try:
            text = orjson.loads(raw).get("tokenizer")
            if text is None:
                return cls.common()
            tokenizer = Tokenizer.from_str(text)
        except (orjson.JSONDecodeError, AttributeError, ValueError) as error:
            raise PlanError(f"the backend's tokenizer cannot be used: {error}") from error
        except Exception as error:  # the binding raises bare Exception for a file it cannot read
            raise PlanError(f"the backend's tokenizer cannot be read: {error}") from error
        return cls.of(tokenizer)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Every id but the special ones; as words, the tokens that stand alone when spoken in a row."""
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = tuple(sorted(set(tokenizer.get_vocab().values()) - special))
        words = []
        for index in ids:
            word = tokenizer.decode([index])
            if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha():
                words.append(word)
            if len(words) == _MOST_WORDS:
                break
        return cls(ids, tuple(words), tokenizer)

    def count(self, text: str) -> int:
        """Tokens of a text, without special tokens."""
        if self.tokenizer is None:
            raise PlanError("the route chat needs a backend that hands out its tokenizer")
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


class Prompts:
    """Makes request bodies for one cell. `overhead` is what the chat template adds to a message, in tokens."""

    def __init__(self, route: str, model: str, cell: Cell, vocabulary: Vocabulary, seed: str, overhead: int = 0) -> None:
        self._route, self._model, self._cell, self._vocabulary = route, model, cell, vocabulary
        self._seed, self._overhead = seed, overhead
        self._rng = Random(seed)  # noqa: S311 - a reproducible draw, not a secret

    @property
    def path(self) -> bytes:
        """The path these bodies are for."""
        return {"completions": b"/v1/completions", "chat": b"/v1/chat/completions", "embeddings": b"/v1/embeddings"}[self._route]

    def body(self, size: Size) -> bytes:
        """The request for one size; another prompt on every call."""
        head = Random(f"{self._seed}/{size.prefix}")  # noqa: S311 - the same head for the same name
        if self._route == "chat":
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": self._text(size, head)}]}
        else:
            ids, rest = self._vocabulary.ids, size.input_tokens - size.prefix_tokens
            tokens = [head.choice(ids) for _ in range(size.prefix_tokens)] + self._rng.choices(ids, k=rest)
            prompt = {"input" if self._route == "embeddings" else "prompt": tokens}
        return orjson.dumps({"model": self._model, **prompt, **self._output(size), **self._cell.body})

    def _output(self, size: Size) -> dict[str, Any]:
        if self._route == "embeddings":
            return {}
        length = {"max_tokens": size.output_tokens, "min_tokens": size.output_tokens, "ignore_eos": True}
        return {**length, "stream": True, "stream_options": {"include_usage": True}}

    def _text(self, size: Size, head: Random) -> str:
        """Words that count as the wanted tokens less the template's own, at least one."""
        words, wanted = self._vocabulary.words, max(1, size.input_tokens - self._overhead)
        if not words:
            raise PlanError("the route chat needs a backend that hands out its tokenizer, with whole words in it")
        chosen = [head.choice(words) for _ in range(min(size.prefix_tokens, wanted))]
        chosen += self._rng.choices(words, k=wanted - len(chosen))
        text = "".join(chosen)[1:]
        while len(chosen) > 1 and self._vocabulary.count(text) > wanted:
            chosen.pop()
            text = "".join(chosen)[1:]
        return text
