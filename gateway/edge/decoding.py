"""Content codings of a request body: gzip, deflate, br, zstd, each within a bound on what comes out.

Owns: `decode`. It is synchronous and pure: call it in a thread when `raw` is large.
Promises: never more than `limit` bytes are produced, whatever a frame claims; a cut or damaged body is a refusal.
Talks to: zlib, brotli, zstandard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import brotli
import zstandard

from gateway.errors import Reason, Refusal

_STEP = 64 * 1024
_ZSTD_STEP = 256  # input bytes fed at once: four bytes of zstd can say 128 KiB, so a step stays under 8 MiB
_MAX_MEMBERS = 16  # gzip members or zstd frames, one after the other; each costs a copy of what follows
_WINDOW_LIMIT = 8 * 1024 * 1024  # bytes of history a zstd frame may ask for


class _Broken(Exception):
    """The compressed bytes are damaged or incomplete."""


def decode(content_encoding: bytes | None, raw: bytes, limit: int) -> bytes | Refusal:
    """`raw` without its content coding.

    415 for a coding that is unknown or stacked, 400 for damaged or truncated data, 413 for more than `limit` bytes.
    """
    coding = (content_encoding or b"").strip().lower()
    if coding in (b"", b"identity"):
        return raw if len(raw) <= limit else too_large(limit)
    decoder = _DECODERS.get(coding)
    if decoder is None:
        return Refusal(
            Reason.UNSUPPORTED_ENCODING,
            "This content-encoding is not supported.",
            param="content-encoding",
            fits="one of gzip, deflate, br, zstd, identity; one coding at a time",
        )
    parts: list[bytes] = []
    size = 0
    try:
        for part in decoder(raw):
            size += len(part)
            if size > limit:
                return too_large(limit)
            parts.append(part)
    except (_Broken, zlib.error, brotli.error, zstandard.ZstdError):
        return Refusal(Reason.INVALID_BODY, f"The body is not complete, valid {coding.decode('ascii')} data.")
    return b"".join(parts)


def too_large(limit: int) -> Refusal:
    """The refusal of a body over the bound, in bytes after decoding."""
    return Refusal(Reason.BODY_TOO_LARGE, f"The body is larger than {limit} bytes.", fits=f"at most {limit} bytes, decoded")


def _zlib(raw: bytes, window_bits: int) -> Iterator[bytes]:
    for _ in range(_MAX_MEMBERS):
        decoder = zlib.decompressobj(window_bits)
        pending = raw
        while not decoder.eof:
            part = decoder.decompress(pending, _STEP)
            pending = decoder.unconsumed_tail
            if not part and not pending and not decoder.eof:
                raise _Broken
            yield part
        raw = decoder.unused_data
        if not raw:
            return
        if window_bits < 16:  # only gzip may go on with another member
            break
    raise _Broken


def _gzip(raw: bytes) -> Iterator[bytes]:
    return _zlib(raw, 31)


def _deflate(raw: bytes) -> Iterator[bytes]:
    """`deflate` is zlib's format; some clients send it without the zlib header, which is told by the first two bytes."""
    if len(raw) < 2:
        raise _Broken
    wrapped = raw[0] & 0x0F == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return _zlib(raw, 15 if wrapped else -15)


def _brotli(raw: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    pending = raw
    while not decoder.is_finished():
        part = decoder.process(pending, output_buffer_limit=_STEP)
        pending = b""
        if not part and decoder.can_accept_more_data():
            raise _Broken
        yield part


def _zstd(raw: bytes) -> Iterator[bytes]:
    for _ in range(_MAX_MEMBERS):
        decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_LIMIT).decompressobj()
        end = 0
        while not decoder.eof:
            if end >= len(raw):
                raise _Broken
            yield decoder.decompress(raw[end : end + _ZSTD_STEP])
            end += _ZSTD_STEP
        raw = decoder.unused_data + raw[end:]
        if not raw:
            return
    raise _Broken


_DECODERS: dict[bytes, Callable[[bytes], Iterator[bytes]]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    b"br": _brotli,
    b"zstd": _zstd,
}
