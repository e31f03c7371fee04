"""What else about a request changes its cost: the features of its shape.

Owns: the mapping from request fields to feature names.
Promises: a field that is absent, null or neutral adds nothing, so a plain request has none.
Talks to: nobody; it reads a document that the field table has already checked.
"""

from __future__ import annotations

from typing import Any

from gateway.edge.content import Content
from gateway.edge.routes import Parser
from gateway.flow.shape import NO_FEATURES

PENALTIES: dict[str, float] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_MASKS = ("logit_bias", "bad_words", "allowed_token_ids")
_STRUCTURED = frozenset({"response_format", "structured_outputs", "tools", "text", "output_config"})
_TELLING = frozenset(
    {"logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "include", "tool_choice", *PENALTIES, *_MASKS}
) | _STRUCTURED  # fmt: skip


def asked(parser: Parser, document: dict[str, Any], content: Content, lora: bool) -> frozenset[str]:
    """The features one request has. Names: logprobs, prompt_logprobs, structured_output, penalties, lora, media."""
    if not lora and not content.media and _TELLING.isdisjoint(document):
        return NO_FEATURES
    found = {
        "logprobs": _logprobs(document),
        "prompt_logprobs": document.get("prompt_logprobs") is not None or _echoes_logprobs(parser, document),
        "structured_output": _structured(document),
        "penalties": _penalties(document),
        "lora": lora,
        "media": content.media > 0,
    }
    return frozenset(name for name, present in found.items() if present)


def _logprobs(document: dict[str, Any]) -> bool:
    value = document.get("logprobs")
    asked = value is True or type(value) is int
    included = "message.output_text.logprobs" in _items(document.get("include"))
    return asked or bool(document.get("top_logprobs")) or bool(document.get("logprob_token_ids")) or included


def _echoes_logprobs(parser: Parser, document: dict[str, Any]) -> bool:
    return parser == "completions" and document.get("echo") is True and document.get("logprobs") is not None


def _penalties(document: dict[str, Any]) -> bool:
    moved = any(name in document and document[name] != neutral for name, neutral in PENALTIES.items())
    return moved or any(document.get(name) for name in _MASKS)


def _structured(document: dict[str, Any]) -> bool:
    """A grammar constrains the output: a JSON format, an explicit constraint, a forced tool call, a strict tool."""
    formats = (
        _members(document.get("response_format")),
        _members(_members(document.get("text")).get("format")),
        _members(_members(document.get("output_config")).get("format")),
    )
    if any(item.get("type", "text") != "text" for item in formats) or document.get("structured_outputs"):
        return True
    choice = document.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind is not None and kind not in ("none", "auto"):
        return True
    tools = [_members(tool) for tool in _items(document.get("tools"))]
    return any(tool.get("strict") is True or _members(tool.get("function")).get("strict") is True for tool in tools)


def _members(value: Any) -> dict[str, Any]:
    """The object, or an empty one: a field that the policy opened may hold anything."""
    return value if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
