"""What a conversation holds, measured without tokenizing: bytes of text, messages, parts, media.

Owns: `Content` and the reader of chat messages; `dialects` reads the other two conversation formats with its parts.
Promises: every text that reaches the prompt is measured; what is not known is refused (raises `Refused`), never skipped;
`plain` is true only when nothing but text in plain roles is there, so that a bound on bytes is a bound on the prompt.
Talks to: `media` for images and sound.
"""

from __future__ import annotations

from typing import Any

from gateway.edge import media
from gateway.edge.fields import MAX_MESSAGES
from gateway.errors import Reason, Refusal, Refused

PLAIN_ROLES = frozenset({"system", "user", "assistant"})
ROLES = PLAIN_ROLES | {"developer", "tool"}
_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"})
_BESIDE_CONTENT = _MESSAGE_KEYS - {"role", "content"}
_IGNORED_KEYS = frozenset({"id", "type", "status", "annotations", "audio", "function_call", "logprobs", "parsed"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_PART_KEYS = frozenset({"type", "cache_control", "annotations", "logprobs", "signature"})
MAX_MEDIA = 64


class Content:
    """Sizes of one prompt, or of the largest of several.

    `narrow`: bytes of pure ASCII strings; `wide`: UTF-8 bytes of the others; `longest`: characters of the longest user
    text, surrounding blanks cut off; `tokens`: ids given as numbers; `media_tokens`: what media are taken for.
    """

    __slots__ = ("longest", "media", "media_tokens", "messages", "narrow", "parts", "plain", "sequences", "tokens", "wide")

    def __init__(self) -> None:
        self.narrow = 0
        self.wide = 0
        self.messages = 0
        self.parts = 0
        self.tokens = 0
        self.media = 0
        self.media_tokens = 0
        self.sequences = 1
        self.longest = ""
        self.plain = True

    def text(self, value: str) -> None:
        """Add one string."""
        if value.isascii():
            self.narrow += len(value)
        else:
            self.wide += len(value.encode())

    @property
    def bytes(self) -> int:
        return self.narrow + self.wide


def bad(message: str, param: str) -> Refused:
    """A body that cannot be used, ready to raise."""
    return Refused(Refusal(Reason.INVALID_BODY, message, param=param))


def chat(messages: Any, rules: media.Rules) -> Content:
    """Chat messages. The loop's first branch is the common case: a role and a string."""
    content = Content()
    if type(messages) is not list or not messages or len(messages) > MAX_MESSAGES:
        raise bad(f"messages must be a list of 1 to {MAX_MESSAGES} messages.", "messages")
    narrow = 0
    longest = ""
    for index, message in enumerate(messages):
        if type(message) is not dict:
            raise bad("A message must be an object.", f"messages.{index}")
        value = message.get("content")
        role = message.get("role")
        if type(value) is str and len(message) == 2 and type(role) is str and role in PLAIN_ROLES:
            if value.isascii():
                narrow += len(value)
            else:
                content.wide += len(value.encode())
            if role == "user" and len(value) > len(longest):
                longest = value
        else:
            general(message, role, content, rules, f"messages.{index}")
    content.narrow += narrow
    content.longest = longest
    content.messages = len(messages)
    return content


def general(message: dict[str, Any], role: Any, content: Content, rules: media.Rules, param: str) -> None:
    """The general case of one chat message."""
    if type(role) is not str or role not in ROLES:
        raise bad("A message needs a role: system, developer, user, assistant or tool.", f"{param}.role")
    for name, value in message.items():
        if value is not None and name not in _MESSAGE_KEYS:
            if name in _IGNORED_KEYS and not value:
                continue
            raise media.not_allowed("This field of a message is not allowed.", f"{param}.{name[:64]}")
    value = message.get("content")
    beside = [name for name, value in message.items() if value is not None and name in _BESIDE_CONTENT]
    if beside or role not in PLAIN_ROLES:
        content.plain = False
        _extras(message, content, param)
    if type(value) is str:
        content.text(value)
    elif type(value) is list:
        _parts(value, content, rules, f"{param}.content")
    elif value is not None:
        raise bad("content must be a string or a list of parts.", f"{param}.content")
    elif role in ("system", "user", "developer"):
        raise bad("content is missing.", f"{param}.content")


def _extras(message: dict[str, Any], content: Content, param: str) -> None:
    """Texts beside the content: name, reasoning, tool calls and their arguments."""
    for name in ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content"):
        value = message.get(name)
        if type(value) is str:
            content.text(value)
        elif value is not None:
            raise bad("must be a string.", f"{param}.{name}")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if type(calls) is not list:
        raise bad("tool_calls must be a list.", f"{param}.tool_calls")
    for index, call in enumerate(calls):
        function = call.get("function") if type(call) is dict else None
        where = f"{param}.tool_calls.{index}"
        if type(function) is not dict or type(function.get("name")) is not str or call.get("type", "function") != "function":
            raise bad("A tool call must have type function, with a name and arguments.", where)
        arguments = function.get("arguments")
        if arguments is not None and type(arguments) is not str:
            raise bad("The arguments of a tool call are a string of JSON.", f"{where}.function.arguments")
        content.text(function["name"])
        content.text(arguments or "")


def _parts(parts: list[Any], content: Content, rules: media.Rules, param: str) -> None:
    """A list of content parts. Text counts as text; media by the policy; anything else is refused."""
    content.parts += len(parts)
    for index, part in enumerate(parts):
        where = f"{param}.{index}"
        kind = part.get("type") if type(part) is dict else None
        if type(kind) is not str:
            raise bad("A content part must be an object with a type.", where)
        key = _TEXT_PARTS.get(kind)
        if key is None:
            media_part(kind, part, content, rules, where)
            continue
        value = part.get(key)
        if type(value) is not str:
            raise bad(f"A part of type {kind} needs {key}, a string.", where)
        for name in part:
            if name != key and name not in _PART_KEYS:
                raise media.not_allowed("This field of a content part is not allowed.", f"{where}.{name[:64]}")
        if kind == "thinking":
            content.plain = False
        content.text(value)


def media_part(kind: str, part: dict[str, Any], content: Content, rules: media.Rules, param: str) -> None:
    content.plain = False
    content.media += 1
    if content.media > MAX_MEDIA:
        raise media.not_allowed(f"At most {MAX_MEDIA} media parts are allowed.", param)
    allowed_keys = {"type", kind, "detail", "cache_control", "source"}
    if not part.keys() <= allowed_keys and kind != "input_image":
        raise media.not_allowed("This media part has a field that is not allowed.", param)
    if kind == "image_url":
        inner = part.get("image_url")
        url = inner.get("url") if type(inner) is dict else inner
        content.media_tokens += media.image_tokens(url, rules, param)
    elif kind == "input_image" and part.keys() <= {"type", "image_url", "detail"}:
        content.media_tokens += media.image_tokens(part.get("image_url"), rules, param)
    elif kind == "image" and type(part.get("source")) is dict:
        content.media_tokens += media.image_tokens(_source_url(part["source"]), rules, param)
    elif kind == "input_audio":
        content.media_tokens += media.input_audio_tokens(part.get("input_audio"), rules, param)
    else:
        raise media.not_allowed("This type of content part is not accepted.", f"{param}.type")


def _source_url(source: dict[str, Any]) -> Any:
    if source.get("type") == "url":
        return source.get("url")
    return f"data:{source.get('media_type')};base64," if type(source.get("data")) is str else None
