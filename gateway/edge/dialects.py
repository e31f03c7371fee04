"""Conversations of the Messages and Responses APIs, measured like chat.

Owns: the readers of `system` + `messages` (Anthropic) and `instructions` + `input` (Responses).
Promises: as `content`: every text is measured, what is not known is refused (raises `Refused`).
Talks to: `content` for its sizes and parts, `media` for images and sound.
"""

from __future__ import annotations

from typing import Any

from gateway.edge import content as content_parts
from gateway.edge import media
from gateway.edge.content import Content
from gateway.edge.fields import MAX_MESSAGES


def anthropic(document: dict[str, Any], rules: media.Rules) -> Content:
    """`system` and `messages` of the Messages API."""
    messages = document.get("messages")
    if type(messages) is not list or not messages or len(messages) > MAX_MESSAGES:
        raise content_parts.bad(f"messages must be a list of 1 to {MAX_MESSAGES} messages.", "messages")
    content = Content()
    content.messages = len(messages) + ("system" in document)
    system = document.get("system")
    if type(system) is list:
        _blocks(system, content, rules, "system")
    elif type(system) is str:
        content.text(system)
    elif system is not None:
        raise content_parts.bad("system must be a string or a list of text blocks.", "system")
    for index, message in enumerate(messages):
        param = f"messages.{index}"
        if type(message) is not dict or not message.keys() <= {"role", "content"}:
            raise content_parts.bad("A message is an object with role and content.", param)
        if message.get("role") not in ("user", "assistant", "system"):
            raise content_parts.bad("The role is user, assistant or system.", f"{param}.role")
        value = message.get("content")
        if type(value) is str:
            content.text(value)
        elif type(value) is list:
            _blocks(value, content, rules, f"{param}.content")
        else:
            raise content_parts.bad("content must be a string or a list of blocks.", f"{param}.content")
    return content


def _blocks(blocks: list[Any], content: Content, rules: media.Rules, param: str) -> None:
    """Anthropic content blocks. Everything but text makes the conversation not plain."""
    content.parts += len(blocks)
    for index, block in enumerate(blocks):
        where = f"{param}.{index}"
        kind = block.get("type") if type(block) is dict else None
        if kind == "text" and type(block.get("text")) is str:
            content.text(block["text"])
            continue
        content.plain = False
        if kind == "image":
            content_parts.media_part("image", block, content, rules, where)
        elif kind == "thinking" and type(block.get("thinking")) is str:
            content.text(block["thinking"])
        elif kind == "tool_use" and type(block.get("name")) is str and type(block.get("input", {})) is dict:
            content.text(block["name"])
        elif kind == "tool_result":
            _tool_result(block.get("content"), content, rules, f"{where}.content")
        elif kind != "redacted_thinking":
            raise media.not_allowed("This type of content block is not accepted, or a field of it is missing.", where)


def _tool_result(value: Any, content: Content, rules: media.Rules, param: str) -> None:
    if type(value) is str:
        content.text(value)
    elif type(value) is list:
        _blocks(value, content, rules, param)
    elif value is not None:
        raise content_parts.bad("The content of a tool result is a string or a list of blocks.", param)


def responses(document: dict[str, Any], rules: media.Rules) -> Content:
    """`instructions` and `input` of the Responses API."""
    value = document.get("input")
    content = Content()
    instructions = document.get("instructions")
    if type(instructions) is str:
        content.text(instructions)
        content.messages += 1
    if type(value) is str:
        content.text(value)
        content.messages += 1
        return content
    if type(value) is not list or not value or len(value) > MAX_MESSAGES:
        raise content_parts.bad(f"input must be a string or a list of 1 to {MAX_MESSAGES} items.", "input")
    content.messages += len(value)
    for index, item in enumerate(value):
        if type(item) is not dict:
            raise content_parts.bad("An input item must be an object.", f"input.{index}")
        _item(item, content, rules, f"input.{index}")
    return content


def _item(item: dict[str, Any], content: Content, rules: media.Rules, param: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
        content_parts.general(message, message.get("role"), content, rules, param)
        return
    content.plain = False
    if kind == "function_call" and type(item.get("name")) is str and type(item.get("arguments")) is str:
        content.text(item["name"])
        content.text(item["arguments"])
    elif kind == "function_call_output" and type(item.get("output")) is str and type(item.get("call_id")) is str:
        content.text(item["output"])
    else:
        raise media.not_allowed("This type of input item is not accepted, or a field of it is missing.", f"{param}.type")
