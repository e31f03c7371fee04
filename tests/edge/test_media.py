import base64
import io
import wave
from typing import Any

import pytest

from gateway.edge import media
from gateway.errors import Reason
from gateway.policy import MediaRules

from .building import accepted, refused

RULES = MediaRules(image_tokens=1049, audio_tokens_per_s=50, hosts=("cdn.example.org", "127.0.0.1", "Media.Example.COM"))
DATA_URL = "data:image/png;base64," + "A" * 3_000_000


def image(url: Any = DATA_URL, **more: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}, **more}
    return {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]}


def test_media_are_refused_by_default() -> None:
    found = refused("/v1/chat/completions", image())
    assert (found.reason, found.param) == (Reason.FIELD_NOT_ALLOWED, "messages.0.content.1")


def test_an_image_is_what_the_policy_says_and_never_text() -> None:
    parsed = accepted("/v1/chat/completions", image(), media=RULES)
    assert parsed.content.media_tokens == 1049
    assert parsed.content.bytes == len("what?")
    assert parsed.features == {"media"}
    assert not parsed.content.plain


@pytest.mark.parametrize(
    "url", ["https://cdn.example.org/a.png", "http://CDN.example.org:8080/x", "https://media.example.com./y"]
)
def test_listed_hosts_pass(url: str) -> None:
    assert accepted("/v1/chat/completions", image(url), media=RULES)


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.org/a.png", "https://cdn.example.org.evil.org/", "https://cdn.example.org@evil.org/", "http://127.0.0.1/",
        "http://user:pw@cdn.example.org/", "http://[::1]/", "http://169.254.169.254/latest", "file:///etc/passwd",
        "ftp://cdn.example.org/", "https://cdn.example.org\\@evil.org/", "https:///cdn.example.org", "//cdn.example.org/a",
        "http://cdn.example.org:99999/", "", 5, None, ["x"], "data:text/html;base64,AA", "https://cdn.example.org/ a",
        "https://ⅽdn.example.org/", "http://2130706433/", "http://0x7f.1/",
    ],
)  # fmt: skip
def test_other_urls_do_not(url: object) -> None:
    assert refused("/v1/chat/completions", image(url), media=RULES).reason in (Reason.FIELD_NOT_ALLOWED, Reason.INVALID_BODY)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "192.168.1.1", "::1", "fe80::1", "0.0.0.0", "localhost", "db", "x.local", "2130706433", "0x7f.1"]
)
def test_private_hosts_are_private(host: str) -> None:
    assert media.is_private(host)
    assert not media.is_private("example.org")
    assert not media.is_private("8.8.8.8")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "https://cdn.example.org/v"}}, {"type": "prompt_embeds", "data": "AA"},
        {"type": "image_embeds", "image_embeds": "AA"}, {"type": "file", "file": {}}, {"type": "image_url"}, {"type": "x"},
        {"type": "input_audio", "input_audio": {"data": "!!"}}, {"type": "input_audio"}, {"image_url": "https://cdn.example.org/"},
        {"type": "image_url", "image_url": {"url": DATA_URL}, "uuid": "1"},
        {"type": "text", "text": "x", "image_url": "https://cdn.example.org/a"},
    ],
)  # fmt: skip
def test_parts_that_could_hide_something_are_refused(part: dict[str, Any]) -> None:
    document = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    assert refused("/v1/chat/completions", document, media=RULES).param.startswith("messages.0.content.0")  # type: ignore[union-attr]


def test_images_of_the_other_dialects() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    assert accepted("/v1/messages", message, media=RULES).content.media_tokens == 1049
    item = {"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL}]}
    assert accepted("/v1/responses", {"model": "tiny", "input": [item]}, media=RULES).content.media_tokens == 1049
    assert refused("/v1/messages", message).reason is Reason.FIELD_NOT_ALLOWED


def sound(seconds: float, rate: int = 8000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(int(seconds * rate) * 2))
    return out.getvalue()


def test_audio_is_counted_by_its_duration() -> None:
    assert media.audio_tokens(sound(10), RULES, "file") == pytest.approx(500, abs=1)
    opaque = b"\xff\xfb" + bytes(750_000 - 2)
    assert media.audio_tokens(opaque, RULES, "file") == 50_000
    lying = bytearray(sound(10))
    lying[40:44] = (8).to_bytes(4, "little")  # a header that claims four samples
    assert media.audio_tokens(bytes(lying), RULES, "file") == pytest.approx(500, abs=1)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(2)).decode(), "format": "wav"}}
    document = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    assert accepted("/v1/chat/completions", document, media=RULES).content.media_tokens == pytest.approx(100, abs=1)
