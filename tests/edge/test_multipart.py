from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gateway.edge import body
from gateway.errors import Reason, Refusal
from gateway.policy import MediaRules

from .building import counter, parse

PATH = "/v1/audio/transcriptions"
RULES = MediaRules(audio_tokens_per_s=50)
SOUND = b"RIFF\x00\xff\xfe\r\n--boundary-not\r\n--b\r\n\x00" * 20


def form(*parts: tuple[str, bytes] | tuple[str, bytes, str], boundary: bytes = b"b0und") -> bytes:
    out = b""
    for name, value, *filename in parts:
        tail = f'; filename="{filename[0]}"' if filename else ""
        out += b"--" + boundary + f'\r\nContent-Disposition: form-data; name="{name}"{tail}\r\n\r\n'.encode() + value + b"\r\n"
    return out + b"--" + boundary + b"--\r\n"


FILE = ("file", SOUND, "a.wav")
MODEL = ("model", b"tiny")


def read(
    raw: bytes, kind: bytes = b"multipart/form-data; boundary=b0und", path: str = PATH, **changes: Any
) -> body.Parsed | Refusal:
    return parse(path, raw, kind, **{"media": RULES, **changes})


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
@pytest.mark.parametrize("parts", [(FILE, MODEL), (MODEL, FILE)])
def test_the_model_stands_anywhere_and_the_bytes_stay(path: str, parts: Any) -> None:
    raw = form(*parts, ("response_format", b"srt"))
    parsed = read(raw, path=path)
    assert isinstance(parsed, body.Parsed)
    assert parsed.task == "transcribe"
    assert parsed.forward() == raw
    assert raw[parsed.form.file] == SOUND  # type: ignore[union-attr]
    assert isinstance(read(raw, b'multipart/form-data; boundary="b0und"', path), body.Parsed)


def starlette_parts(raw: bytes, kind: str = "multipart/form-data; boundary=b0und") -> dict[str, Any]:
    """The parts as the engine's web framework reads them."""

    async def echo(request: Request) -> JSONResponse:
        async with request.form() as data:
            return JSONResponse([[k, v if isinstance(v, str) else (await v.read()).hex()] for k, v in data.multi_items()])

    client = TestClient(Starlette(routes=[Route("/", echo, methods=["POST"])]))
    answer = client.post("/", content=raw, headers={"content-type": kind})
    assert answer.status_code == 200
    return dict(answer.json())


@pytest.mark.parametrize("parts", [(FILE, MODEL, ("language", b"en")), (("language", b"en"), MODEL, FILE)])
def test_a_rebuilt_body_differs_only_where_it_must(parts: Any) -> None:
    parsed = read(form(*parts), upstream_model="org/real-name")
    assert isinstance(parsed, body.Parsed)
    rebuilt = starlette_parts(parsed.forward(output_limit=77))
    assert rebuilt == {"file": SOUND.hex(), "model": "org/real-name", "language": "en", "max_completion_tokens": "77"}
    assert isinstance(read(parsed.forward(output_limit=77), path=PATH), Refusal)  # the real name is not the public one


def test_fields_of_audio() -> None:
    parsed = read(form(FILE, MODEL, ("stream", b"true"), ("max_completion_tokens", b"9"), ("frequency_penalty", b"0.5")))
    assert isinstance(parsed, body.Parsed)
    assert (parsed.stream, parsed.output_tokens, parsed.features) == (True, 9, {"penalties"})
    assert parsed.content.media_tokens == -(-len(SOUND) * 50 // 750)
    assert parsed.forward(output_limit=4) == parsed.compact


def test_the_prompt_of_audio_is_counted_too() -> None:
    parsed = read(form(FILE, MODEL, ("prompt", "naïve captain".encode())))
    assert isinstance(parsed, body.Parsed)
    made = counter()
    low, high = made.bound(parsed)
    assert high is not None
    assert parsed.content.media_tokens == low < made.count_now(parsed) <= high


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (form(MODEL), Reason.INVALID_BODY),
        (form(FILE), Reason.INVALID_BODY),
        (form(FILE, ("model", b"")), Reason.INVALID_BODY),
        (form(FILE, ("model", b"other")), Reason.MODEL_NOT_FOUND),
        (form(FILE, MODEL, MODEL), Reason.INVALID_BODY),
        (form(FILE, FILE, MODEL), Reason.INVALID_BODY),
        (form(FILE, ("model", b"tiny", "m.txt")), Reason.INVALID_BODY),
        (form(("file", b"x"), MODEL), Reason.INVALID_BODY),
        (form(FILE, MODEL, ("vllm_xargs", b"{}")), Reason.FIELD_NOT_ALLOWED),
        (form(FILE, MODEL, ("use_beam_search", b"true")), Reason.FIELD_NOT_ALLOWED),
        (form(FILE, MODEL, ("stream", b"maybe")), Reason.INVALID_BODY),
        (form(FILE, MODEL, ("max_completion_tokens", b"-1")), Reason.INVALID_BODY),
        (form(FILE, MODEL, ("frequency_penalty", b"x")), Reason.INVALID_BODY),
        (form(FILE, MODEL, ("prompt", b"\xff\xfe")), Reason.INVALID_BODY),
        (form(FILE, MODEL, ("prompt", b"x" * 20_000)), Reason.INVALID_BODY),
        (form(FILE, MODEL)[:-8], Reason.INVALID_BODY),
        (form(FILE, MODEL)[:40], Reason.INVALID_BODY),
        (form(FILE, MODEL, boundary=b"other"), Reason.INVALID_BODY),
        (form(FILE, MODEL, *[("timestamp_granularities[]", b"word")] * 80), Reason.INVALID_BODY),
        (b"", Reason.INVALID_BODY),
        (b"--b0und--\r\n", Reason.INVALID_BODY),
        (b"rubbish", Reason.INVALID_BODY),
        (b'{"model": "tiny"}', Reason.INVALID_BODY),
    ],
)
def test_bodies_that_are_not_usable(raw: bytes, reason: Reason) -> None:
    found = read(raw)
    assert isinstance(found, Refusal)
    assert found.reason is reason


@pytest.mark.parametrize(
    "kind",
    [
        None, b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/mixed; boundary=b0und",
        b'multipart/form-data; boundary="b0\xffund"', b'multipart/form-data; boundary="b0und "',
        b"multipart/form-data; boundary=b0und; charset=utf-16", b"multipart/form-data; charset=utf-7; boundary=b0und",
    ],
)  # fmt: skip
def test_other_content_types(kind: bytes | None) -> None:
    found = read(form(FILE, MODEL), kind)  # type: ignore[arg-type]
    assert isinstance(found, Refusal)
    assert found.reason is Reason.UNSUPPORTED_ENCODING


def test_the_engine_reads_the_texts_that_were_checked() -> None:
    """A charset beside the boundary would have it decode them anew: what is sent on names none."""
    raw = form(FILE, MODEL, ("prompt", b"+AOk-"))
    parsed = read(raw, b'multipart/form-data; boundary="b0und"; charset=UTF-8; x=y')
    assert isinstance(parsed, body.Parsed) and parsed.form is not None
    assert parsed.form.content_type == b'multipart/form-data; boundary="b0und"'
    assert starlette_parts(raw, "multipart/form-data; boundary=b0und; charset=utf-7")["prompt"] == "\u00e9"
    assert starlette_parts(raw, parsed.form.content_type.decode())["prompt"] == parsed.form.values["prompt"] == "+AOk-"


def test_audio_needs_the_policy() -> None:
    found = read(form(FILE, MODEL), media="refuse")
    assert isinstance(found, Refusal)
    assert (found.reason, found.param) == (Reason.FIELD_NOT_ALLOWED, "file")


@settings(deadline=None)  # a busy machine is no finding
@given(st.integers(0, 400), st.binary(max_size=6))
def test_damage_anywhere_is_a_refusal_or_the_same_parts(place: int, patch: bytes) -> None:
    raw = form(("language", b"en"), MODEL, ("file", b"x" * 50, "a.wav"))
    damaged = raw[: place % len(raw)] + patch + raw[place % len(raw) + len(patch) :]
    found = read(damaged)
    assert isinstance(found, body.Parsed | Refusal)
    if isinstance(found, body.Parsed):
        assert starlette_parts(found.forward())["model"] == "tiny"
