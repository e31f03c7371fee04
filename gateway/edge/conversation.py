"""The conversation a chat template is given, made from a request the way vLLM makes it.

Owns: the translation of chat, Messages and Responses bodies into template messages and tools.
Promises: pure; works on documents that `content` and `dialects` have accepted; raises `Uncountable` for what it cannot
translate faithfully, so that it is refused and not guessed.
Talks to: nobody.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gateway.edge.routes import Parser
from gateway.edge.templates import ContentFormat, Message

_BILLING = "x-anthropic-billing-header"  # a line some clients put first in system texts; the server drops it
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA = {"image_url": "image", "input_image": "image", "input_audio": "audio"}
_PART_FIELDS = frozenset({"type", "text", "refusal", "thinking", "annotations", "logprobs", "signature"})


class Uncountable(Exception):
    """The request holds something whose place in the prompt is not known."""


class Conversation(NamedTuple):
    """What a template renders."""

    messages: list[Message]
    tools: list[Message] | None
    kwargs: dict[str, Any]


def build(parser: Parser, document: dict[str, Any], content_format: ContentFormat, knows_developer: bool) -> Conversation:
    """The conversation of a request of any of the three chat APIs (or of /tokenize and count_tokens)."""
    if parser in ("messages", "count_tokens"):
        messages, tools = _anthropic_messages(document), [_anthropic_tool(tool) for tool in document.get("tools") or ()]
    elif parser == "responses":
        messages, tools = _responses_messages(document), [_tool(_flat(tool)) for tool in document.get("tools") or ()]
    else:
        messages, tools = document["messages"], [_tool(tool) for tool in document.get("tools") or ()]
    built = [_message(message, content_format) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in built):
        built = _without_developer(built)
    has_tools = document.get("tools") is not None and (bool(tools) or parser == "chat")
    return Conversation(built, tools if has_tools else None, _kwargs(parser, document))


def _kwargs(parser: Parser, document: dict[str, Any]) -> dict[str, Any]:
    """Arguments beside messages and tools; null and "auto" count as not given."""
    kwargs: dict[str, Any] = dict(document.get("chat_template_kwargs") or {})
    effort = document.get("reasoning_effort")
    if parser in ("messages", "count_tokens"):
        effort = (document.get("output_config") or {}).get("effort")
        if (document.get("thinking") or {}).get("type") == "disabled":
            effort = effort or "none"
    elif parser == "responses":
        effort = (document.get("reasoning") or {}).get("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    kwargs["add_generation_prompt"] = document.get("add_generation_prompt", True)
    if document.get("continue_final_message"):
        raise Uncountable("continue_final_message cannot be counted here.")
    return kwargs


def _message(message: Message, content_format: ContentFormat) -> Message:
    """One message as the template sees it: content as one string or as parts, arguments of tool calls as objects."""
    role = message["role"]
    value = message.get("content")
    parts = [] if value is None else [{"type": "text", "text": value}] if isinstance(value, str) else value
    if role == "system":
        parts = _without_billing(parts)
    built: Message = {"role": role, "content": _content(parts, content_format)}
    if role == "assistant":
        _assistant(message, built)
    elif role == "tool":
        if "tool_call_id" in message:
            built["tool_call_id"] = message["tool_call_id"]
        if isinstance(built["content"], list) and all(part["type"] == "text" for part in built["content"]):
            built["content"] = "\n".join(part["text"] for part in built["content"])
    if isinstance(message.get("name"), str):
        built["name"] = message["name"]
    if role == "developer":
        built["tools"] = None
    return built


def _content(parts: list[Message], content_format: ContentFormat) -> str | list[Message]:
    """Parts joined by line ends, or kept as parts with media reduced to their kind."""
    kept: list[Message] = []
    for part in parts:
        key = _TEXT_KEYS.get(part["type"])
        if key is not None:
            kept.append({"type": "text", "text": part[key], **{n: v for n, v in part.items() if n not in _PART_FIELDS}})
        elif part["type"] in _MEDIA and content_format == "openai":
            kept.append({"type": _MEDIA[part["type"]]})
        elif part["type"] not in _MEDIA:
            raise Uncountable("A content part of this type cannot be counted here.")
    return kept if content_format == "openai" else "\n".join(part["text"] for part in kept)


def _assistant(message: Message, built: Message) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if message.get("tool_calls"):
        built["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    if reasoning is not None:
        built["reasoning"] = built["reasoning_content"] = reasoning


def _tool_call(call: Message) -> Message:
    """Arguments become an object: templates expect one. What is not a JSON object becomes an empty one.

    The order of keys matters, for templates print them: the server's model of a chat message sorts id, function, type
    and arguments, name; a Responses call keeps name before arguments.
    """
    function = call["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    if call.get("from_responses"):
        made = {"name": function["name"], "arguments": arguments}
    else:
        made = {"arguments": arguments, "name": function["name"]}
    return {**({"id": call["id"]} if "id" in call else {}), "function": made, "type": "function"}


def _without_billing(parts: list[Message]) -> list[Message]:
    kept: list[Message] = []
    for part in parts:
        if part.get("type") == "text" and part["text"].startswith(_BILLING):
            rest = part["text"].partition("\n")[2]
            if rest:
                kept.append({**part, "text": rest})
        else:
            kept.append(part)
    return kept


def _without_developer(messages: list[Message]) -> list[Message]:
    """Developer messages become system messages; several system messages become one, in front."""
    changed = [
        {**{k: v for k, v in message.items() if k != "tools"}, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
    places = [index for index, message in enumerate(changed) if message["role"] == "system"]
    if places == [0]:
        return changed
    texts = [_joined(changed[index]["content"]) for index in places]
    merged: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in changed if message["role"] != "system")]


def _joined(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _tool(tool: Any) -> Message:
    """A tool with the keys, and the order of keys, that the server's own model of it has."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or tool.get("type", "function") != "function":
        raise Uncountable("Only tools of type function can be counted here.")
    built = {name: function.get(name) for name in ("name", "description", "parameters")}
    built |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": built}


def _flat(tool: Any) -> Message:
    """A Responses tool, whose function's fields stand at the top."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Uncountable("Only tools of type function can be counted here.")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _anthropic_tool(tool: Any) -> Message:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise Uncountable("Only tools with an input_schema can be counted here.")
    schema = tool["input_schema"] if "type" in tool["input_schema"] else {**tool["input_schema"], "type": "object"}
    return _tool({"function": {**tool, "parameters": schema}})


def _anthropic_messages(document: dict[str, Any]) -> list[Message]:
    """Messages API to chat: system blocks joined, tool results as messages of their own before the text."""
    built: list[Message] = []
    system = document.get("system") or ()
    blocks = [{"text": system}] if isinstance(system, str) else system
    kept = [block["text"] for block in blocks if block.get("text")]
    text = "".join(kept if isinstance(system, str) else [item for item in kept if not item.startswith(_BILLING)])
    if text:
        built.append({"role": "system", "content": text})
    for message in document["messages"]:
        content = message["content"]
        if message["role"] == "system":
            raise Uncountable("System messages inside messages cannot be counted here.")
        if isinstance(content, str):
            built.append({"role": message["role"], "content": content})
        else:
            built.extend(_anthropic_blocks(message["role"], content))
    return built


def _anthropic_blocks(role: str, blocks: list[Message]) -> list[Message]:
    before: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text" and block["text"]:
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url"})
        elif kind == "thinking":
            reasoning.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            before.append(_tool_result(role, block))
    message: Message = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return [*before, message] if role == "assistant" or "content" in message else before


def _tool_result(role: str, block: Message) -> Message:
    content = block.get("content") or ""
    if role != "user" or (isinstance(content, list) and any(item["type"] != "text" for item in content)):
        raise Uncountable("A tool result of this form cannot be counted here.")
    text = content if isinstance(content, str) else "\n".join(item["text"] for item in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}


def _responses_messages(document: dict[str, Any]) -> list[Message]:
    """Responses input to chat; calls and answers of one assistant turn are merged into one message."""
    built: list[Message] = []
    if document.get("instructions"):
        built.append({"role": "system", "content": document["instructions"]})
    given = document["input"]
    if isinstance(given, str):
        return [*built, {"role": "user", "content": given}]
    first = len(built)
    for item in given:
        _responses_item(item, built, built[-1] if len(built) > first and built[-1]["role"] == "assistant" else None)
    return built


def _responses_item(item: Message, built: list[Message], previous: Message | None) -> None:
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {"id": item.get("call_id"), "from_responses": True}
        call["function"] = {"name": item["name"], "arguments": item["arguments"]}
        if previous is not None:
            previous.setdefault("tool_calls", []).append(call)
        else:
            built.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "function_call_output":
        built.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    elif item["role"] == "assistant" and item.get("content"):
        content = item["content"]
        text = content if isinstance(content, str) else content[0].get("text")
        if previous is not None and previous.get("content") is None:
            previous["content"] = text
        else:
            built.append({"role": "assistant", "content": text})
    else:
        built.append({name: value for name, value in item.items() if name in ("role", "content", "name")})
