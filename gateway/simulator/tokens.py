"""Text to tokens and back, with the model directory's own tokenizer and chat template.

Owns `TokenModel` (one per server) and `TextAssembler` (one per choice). Promises real token counts, and that what the
simulator says tokenizes back to the same number of tokens. Reads the model directory; talks to nobody else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

MODEL_DIR = Path(__file__).parent / "model"


class PromptError(ValueError):
    """The messages cannot be rendered, or the ids are not of this vocabulary."""


class TokenModel:
    """The tokenizer and the chat template of one model directory."""

    def __init__(self, directory: Path = MODEL_DIR) -> None:
        self.directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(settings["chat_template"])
        self._specials = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token") if name in settings}
        self.size = self._tokenizer.get_vocab_size()
        self.pieces = tuple(self._tokenizer.decode([i], skip_special_tokens=False) for i in range(self.size))
        self.words = tuple(i for i, piece in enumerate(self.pieces) if self._is_word(i, piece))

    def _is_word(self, token: int, piece: str) -> bool:
        """A lower-case word with its space, that tokenizes back to itself wherever it stands."""
        word = piece[1:]
        plain = piece.startswith(" ") and word.isascii() and word.isalpha()
        return plain and 1 < len(word) < 8 and self.encode(piece) == (token,)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, special tokens in it recognised."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; raises PromptError for ids outside the vocabulary."""
        self.check(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def check(self, ids: Sequence[int]) -> None:
        """Raise PromptError when an id is outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.size):
            raise PromptError(f"Token id {max(ids)} is out of vocabulary")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat as text. Raises PromptError when the template refuses the messages."""
        shown = [_as_templates_see(message) for message in messages]
        try:
            return self._template.render(
                messages=shown, tools=tools, add_generation_prompt=add_generation_prompt, **self._specials, **(extra or {})
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(f"The chat template cannot render these messages: {error}") from error


def _as_templates_see(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """As vLLM hands a message to the template: the arguments of a tool call are an object, and stand before its name."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {"arguments": arguments, "name": function.get("name")}}


@dataclass(slots=True)
class TextAssembler:
    """Turns one choice's tokens into text, holding back what could become a stop string."""

    pieces: tuple[str, ...]
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    _held: str = ""
    stopped_by: str | None = None

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """Text that may be shown now; `last` releases what was held. After a stop string nothing more comes."""
        if self.stopped_by is not None:
            return ""
        text = "".join([self.pieces[token] for token in tokens])
        if not self.stops:
            return text
        text = self._held + text
        hits = [(text.find(stop), stop) for stop in self.stops if stop in text]
        if hits:
            at, self.stopped_by = min(hits)
            return text[: at + len(self.stopped_by)] if self.keep_stop else text[:at]
        hold = 0 if last else max(map(len, self.stops)) - 1
        shown = max(0, len(text) - hold)
        self._held = text[shown:]
        return text[:shown]
