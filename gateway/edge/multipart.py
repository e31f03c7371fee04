"""multipart/form-data: audio uploads, read in place and forwarded byte for byte.

Owns: finding each part's bytes inside the body, wherever the `model` part stands.
Promises: the file's bytes are never copied or decoded; a rebuilt body differs in the model's value and one added part only;
names that stand twice, unnamed parts and bodies without a closing boundary are refused. The parser is the one that
the engine's own web framework uses, so both read the same parts; and the content-type sent on names the boundary alone,
for a charset in it would have the engine read other texts than were checked here.
Talks to: python-multipart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.edge.content import bad
from gateway.errors import Reason, Refusal

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64
MAX_VALUE_BYTES = 16 * 1024
MAX_PART_HEADER_BYTES = 8 * 1024
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046
_REPEATABLE = frozenset({"timestamp_granularities[]", "include[]"})
_TRUTH = {"true": True, "false": False}


class _Stop(Exception):
    """Ends parsing with a message for the caller."""


def _nowhere() -> slice:
    return slice(0, 0)


@dataclass(slots=True)
class Form:
    """The parts of one body. `values`: text parts by name; `file`, `model`: where their bytes stand in `raw`."""

    raw: bytes
    boundary: bytes
    values: dict[str, str] = field(default_factory=dict)
    file: slice = field(default_factory=_nowhere)
    model: slice = field(default_factory=_nowhere)
    close: int = 0  # where the closing boundary's line begins

    @property
    def content_type(self) -> bytes:
        """What the body is sent on as."""
        return b'multipart/form-data; boundary="' + self.boundary + b'"'

    def rebuilt(self, model: str, added: tuple[str, str] | None) -> bytes:
        """The body under another model name and with one more text part; the same bytes when neither changes."""
        raw = self.raw
        if added is None and self.values.get("model") == model:
            return raw
        extra = b""
        if added is not None:
            head = b'\r\nContent-Disposition: form-data; name="' + added[0].encode() + b'"\r\n\r\n'
            extra = b"\r\n--" + self.boundary + head + added[1].encode()
        start, stop = self.model.start, self.model.stop
        return b"".join((raw[:start], model.encode(), raw[stop : self.close], extra, raw[self.close :]))

    def boolean(self, name: str) -> bool:
        """A text part that must say true or false. Raises Refused."""
        value = self.values.get(name) or "false"
        if value.lower() not in _TRUTH:
            raise bad(f"{name} must be true or false.", name)
        return _TRUTH[value.lower()]

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A text part that must be a whole number in [low, high]; None when it is absent or empty. Raises Refused."""
        value = self.values.get(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= 20 and low <= int(value) <= high):
            raise bad(f"{name} must be an integer from {low} to {high}.", name)
        return int(value)

    def numbers(self, names: dict[str, float]) -> dict[str, float]:
        """The named text parts as numbers, absent ones left out. Raises Refused."""
        found: dict[str, float] = {}
        for name in names:
            if not self.values.get(name):
                continue
            try:
                found[name] = float(self.values[name])
            except ValueError:
                raise bad(f"{name} must be a number.", name) from None
        return found


def read(content_type: bytes | None, raw: bytes) -> Form | Refusal:
    """The parts of a body. 415 for another content type, 400 for a body that is not well formed."""
    kind, options = parse_options_header(content_type or b"")
    boundary = options.get(b"boundary", b"")
    charset = options.get(b"charset", b"utf-8").lower()
    if kind.lower() != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary) or charset not in (b"utf-8", b"utf8"):
        message = "The content-type must be multipart/form-data with a boundary, and its texts in UTF-8."
        return Refusal(Reason.UNSUPPORTED_ENCODING, message, param="content-type", fits="multipart/form-data")
    form = Form(raw, boundary)
    reader = _Reader(form)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(raw)
    except (FormParserError, _Stop) as error:
        message = str(error) if isinstance(error, _Stop) else "The body is not well-formed multipart/form-data."
        return Refusal(Reason.INVALID_BODY, message)
    if not reader.ended:
        return Refusal(Reason.INVALID_BODY, "The multipart body ends before its closing boundary.")
    if not reader.has_file:
        return Refusal(Reason.INVALID_BODY, "A part named file, with a filename, is needed.", param="file")
    form.close = raw.rfind(b"\r\n--" + boundary + b"--", 0, reader.last + len(boundary) + 8)
    if form.close < 0:
        return Refusal(Reason.INVALID_BODY, "The multipart body ends before its closing boundary.")
    return form


class _Reader:
    """Collects offsets from the parser's callbacks: the whole body is fed at once, so offsets are the body's own."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.ended = False
        self.has_file = False
        self.last = 0  # the end of the last part's data
        self._parts = 0
        self._header_bytes = 0
        self._name = b""
        self._value = b""
        self._disposition = b""
        self._start = self._stop = -1

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _Stop(f"At most {MAX_PARTS} parts are allowed.")
        self._disposition = b""
        self._header_bytes = 0
        self._start = self._stop = -1

    def _header_begin(self) -> None:
        self._name = self._value = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_PART_HEADER_BYTES:
            raise _Stop("The headers of a part are too large.")

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            if self._disposition:
                raise _Stop("A part has two Content-Disposition headers.")
            self._disposition = self._value

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._start < 0:
            self._start = start
        self._stop = end

    def _end(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if kind.lower() != b"form-data" or not name.isascii() or not name.decode("ascii").isprintable() or not name:
            raise _Stop("Each part needs Content-Disposition: form-data with a name.")
        span = slice(max(self._start, 0), max(self._stop, 0))
        self.last = max(self.last, span.stop)
        self._keep(name.decode("ascii"), span, b"filename" in options)

    def _keep(self, name: str, span: slice, is_file: bool) -> None:
        form = self.form
        if is_file != (name == "file"):
            raise _Stop("Exactly the part named file carries a filename.")
        if (is_file and self.has_file) or (name in form.values and name not in _REPEATABLE):
            raise _Stop(f"The part {name[:64]!r} stands twice.")
        if is_file:
            self.has_file = True
            form.file = span
            return
        if span.stop - span.start > MAX_VALUE_BYTES:
            raise _Stop(f"The part {name[:64]!r} is larger than {MAX_VALUE_BYTES} bytes.")
        try:
            form.values[name] = form.raw[span].decode("utf-8")
        except UnicodeDecodeError:
            raise _Stop(f"The part {name[:64]!r} is not UTF-8 text.") from None
        if name == "model":
            form.model = span

    def _finish(self) -> None:
        self.ended = True
