"""Images and sound inside a request: refused, or counted by what the policy states.

Owns: which media URL may be named, and how many tokens an item is taken for.
Promises: base64 is never counted as text; a URL passes only when its host is listed and is not a private address;
pure, no name is resolved and nothing is fetched here (vLLM fetches: give it --allowed-media-domains as well).
Talks to: the policy's `media` rules.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import math
import struct
from typing import Any, Literal
from urllib.parse import urlsplit

from gateway.errors import Reason, Refusal, Refused
from gateway.policy import MediaRules

MAX_URL = 2048
MIN_AUDIO_BYTES_PER_S = 750  # 6 kbit/s, the lowest rate of a speech codec: size over this bounds the duration
Rules = MediaRules | Literal["refuse"]


def not_allowed(message: str, param: str) -> Refused:
    """A refusal by the field rules, ready to raise."""
    return Refused(Refusal(Reason.FIELD_NOT_ALLOWED, message, param=param))


def image_tokens(url: Any, rules: Rules, param: str) -> int:
    """Tokens one image is taken for, given its URL (http, https or data). Raises Refused."""
    if not isinstance(rules, MediaRules) or rules.image_tokens is None:
        raise not_allowed("Images are not accepted for this model: their size in tokens is not known.", param)
    check_url(url, rules, "image", param)
    return rules.image_tokens


def audio_tokens(data: bytes, rules: Rules, param: str) -> int:
    """Tokens a sound file is taken for, from its bytes: exact for PCM WAV, else bounded from its size. Raises Refused."""
    if not isinstance(rules, MediaRules) or rules.audio_tokens_per_s is None:
        raise not_allowed("Audio is not accepted for this model: its size in tokens is not known.", param)
    seconds = wav_seconds(data)
    if seconds is None:
        seconds = len(data) / MIN_AUDIO_BYTES_PER_S
    return max(1, math.ceil(seconds * rules.audio_tokens_per_s))


def input_audio_tokens(part: Any, rules: Rules, param: str) -> int:
    """Tokens of an `input_audio` part {"data": base64, "format": …}. Raises Refused."""
    data = part.get("data") if isinstance(part, dict) else None
    if not isinstance(data, str):
        raise Refused(Refusal(Reason.INVALID_BODY, "input_audio needs data, as base64.", param=param))
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(Refusal(Reason.INVALID_BODY, "input_audio.data is not valid base64.", param=param)) from None
    return audio_tokens(raw, rules, param)


def wav_seconds(data: bytes) -> float | None:
    """Duration of a PCM WAV from its sample format and the bytes that are there, not from what its sizes claim."""
    if len(data) < 44 or data[:4] != b"RIFF" or data[8:16] != b"WAVEfmt ":
        return None
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, 20)
    frame = channels * bits // 8
    if kind != 1 or not frame or not 4_000 <= rate <= 192_000:
        return None
    return len(data) / float(frame * rate)


def check_url(url: Any, rules: MediaRules, kind: str, param: str) -> None:
    """Raises Refused unless `url` is inline data of that kind or names a listed, public host."""
    if not isinstance(url, str):
        raise Refused(Refusal(Reason.INVALID_BODY, "A media part needs a url.", param=param))
    if url[:5].lower() == "data:":
        if not url[5:].lower().startswith(f"{kind}/"):
            raise not_allowed(f"An inline {kind} must be data:{kind}/…", param)
        return
    host = _host(url)
    if host is None or host not in {name.lower() for name in rules.hosts} or is_private(host):
        raise not_allowed("A media URL must be inline data, or http(s) on a host that the policy lists.", param)


def _host(url: str) -> str | None:
    """The host of a plain http(s) URL; None when it is anything else (other schemes, credentials, odd characters)."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or any(mark in url for mark in " \\"):
        return None
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or not parts.hostname or not port_ok:
        return None
    return parts.hostname.rstrip(".").lower()


def is_private(host: str) -> bool:
    """Whether a host is an address or name that is never public. Odd spellings of IPv4 (0x7f.1, 2130706433) count."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        last = host.rpartition(".")[2]
        return last.isdigit() or last.startswith("0x") or "." not in host or last in ("localhost", "local", "internal")
