"""Reading a stream of server-sent events without parsing it: what a gateway must know, and nothing else.

Owns: event boundaries across any segmentation (CR, LF, CRLF), counts, and the few events worth a JSON parse: the
first ones until content appears, and those in which a byte search finds usage, a finish, an error or `[DONE]`.
Promises: the bytes of the stream are never changed or held; memory stays below `MAX_PENDING` whatever arrives.
In the middle of a stream a read costs a handful of byte searches.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import orjson

from gateway.forward.account import believable

Dialect = Literal["openai", "anthropic", "responses"]

MAX_PENDING = 65_536  # of an unfinished event; of a longer one only its two ends are kept
_KEPT_HEAD, _KEPT_TAIL = 256, 16_384
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR_EVENT = re.compile(rb"^event: ?error$", re.MULTILINE)
_BOM = b"\xef\xbb\xbf"
# What makes a read worth a closer look, by dialect; content that happens to hold such text only costs the look.
_NEEDLES: dict[Dialect, tuple[bytes, ...]] = {
    "openai": (b"[DONE]", b"error"),
    "anthropic": (b"message_stop", b"error"),
    "responses": (b'"response.completed"', b'"response.incomplete"', b'"response.failed"', b"error"),
}
_DELTA_CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")


class Scanner:
    """What is known of one stream so far.

    `choices` is the number of finish reasons that make it whole. `events` counts data lines, `content_events` those
    from the first content on: a lower bound of the tokens delivered. `usage` is (input, output), the last values seen.
    """

    __slots__ = (
        "_carriage", "_finished", "_needles", "_pending", "_started", "choices", "content_events", "dialect", "done", "error",
        "error_code", "events", "input_tokens", "output_tokens",
    )  # fmt: skip

    def __init__(self, dialect: Dialect, choices: int = 1) -> None:
        self.dialect = dialect
        self.choices = choices
        self.events = 0
        self.content_events = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.error = False
        self.error_code: int | str | None = None
        self.done = False  # [DONE], or the dialect's own last event
        self._finished: set[int] = set()
        self._needles = _NEEDLES[dialect]
        self._pending = b""
        self._carriage = False
        self._started = False

    @property
    def whole(self) -> bool:
        """Whether the stream may be called finished: every choice has its reason, and no error was told."""
        if self.error:
            return False
        return len(self._finished) >= self.choices if self.dialect == "openai" else self.done

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream, cut anywhere."""
        if b"\r" in data or self._carriage:
            data = self._line_feeds(data)
        if self._pending:
            data = self._pending + data
        if not self._started:
            if len(data) < len(_BOM) and _BOM.startswith(data):  # it may have been cut too
                self._pending = data
                return
            self._started = True
            data = data.removeprefix(_BOM)
        if data.endswith(b"\n\n"):
            self._pending = b""
            self._block(data)
            return
        end = data.rfind(b"\n\n") + 2
        if end > 1:
            self._block(data[:end])
            data = data[end:]
        if len(data) > MAX_PENDING:
            data = data[:_KEPT_HEAD] + data[-_KEPT_TAIL:]
        self._pending = data

    def close(self) -> None:
        """The stream has ended: an event without its blank line is read as it stands."""
        if self._pending:
            pending, self._pending = self._pending, b""
            self._block(pending)

    def _line_feeds(self, data: bytes) -> bytes:
        """CR and CRLF as LF, also where the pair is cut in two."""
        if self._carriage and data.startswith(b"\n"):
            data = data[1:]
        self._carriage = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _block(self, block: bytes) -> None:
        """Whole events. The way through the middle of a stream ends after the byte searches."""
        count = block.count(b"\ndata:") + block.startswith(b"data:")
        if not count:  # comments are not progress
            return
        self.events += count
        if self.content_events and not self._remarkable(block):
            self.content_events += count
            return
        for event in block.split(b"\n\n"):
            if self.content_events and event.startswith(b"data:") and not self._remarkable(event):
                self.content_events += 1
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self.error = self.error or _ERROR_EVENT.search(event) is not None
                self._event(b"\n".join(lines))

    def _remarkable(self, block: bytes) -> bool:
        for needle in self._needles:
            if needle in block:
                return True
        if block.count(b"finish_reason") != block.count(b'finish_reason":null'):
            return True
        return b'"usage"' in block and _USAGE.search(block) is not None

    def _event(self, payload: bytes) -> None:
        if payload == b"[DONE]":  # the other dialects have last events of their own
            self.done = self.done or self.dialect == "openai"
            return
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):  # not ours to judge; whoever reads it will
            self.content_events += 1
            return
        self._error(document)
        match self.dialect:
            case "openai":
                content = self._openai(document)
            case "anthropic":
                content = self._anthropic(document)
            case "responses":
                content = self._responses(document)
        if content:
            self.content_events += 1

    def _error(self, document: dict[str, Any]) -> None:
        error = document.get("error")
        if error and (self.dialect != "responses" or document.get("type") in (None, "error")):
            self.error = True
            self.error_code = error.get("code") if isinstance(error, dict) else None

    def _openai(self, document: dict[str, Any]) -> bool:
        self._usage(document.get("usage"), "prompt_tokens", "completion_tokens")
        content = False
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            index, delta = choice.get("index", 0), choice.get("delta")
            if choice.get("finish_reason") and isinstance(index, int):
                self._finished.add(index)
            if choice.get("text") or (isinstance(delta, dict) and any(delta.get(name) for name in _DELTA_CONTENT)):
                content = True
        return content

    def _anthropic(self, document: dict[str, Any]) -> bool:
        kind, message = document.get("type"), document.get("message")
        self._usage(document.get("usage"), "input_tokens", "output_tokens")
        if isinstance(message, dict):
            self._usage(message.get("usage"), "input_tokens", "output_tokens")
        if kind == "message_stop":
            self.done = True
        return kind == "content_block_delta"

    def _responses(self, document: dict[str, Any]) -> bool:
        kind, response = str(document.get("type")), document.get("response")
        if kind in ("response.completed", "response.incomplete"):
            self.done = True
            if isinstance(response, dict):
                self._usage(response.get("usage"), "input_tokens", "output_tokens")
        elif kind in ("response.failed", "error"):
            self.error = True
        return kind.endswith(".delta")

    def _usage(self, usage: object, input_name: str, output_name: str) -> None:
        if not isinstance(usage, dict):
            return
        read, written = believable(usage.get(input_name)), believable(usage.get(output_name))
        if read is not None:
            self.input_tokens = read
        if written is not None:
            self.output_tokens = written
