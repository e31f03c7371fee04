"""Case 39: multipart audio arrives byte for byte, its model is checked wherever it stands, and any answer comes back."""

from __future__ import annotations

import pytest

from tests.support.client import KEY
from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, request, say
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, chunk, event

PATHS = ["/v1/audio/transcriptions", "/v1/audio/translations"]
SOUND = b"RIFF\x00\x01\xff\xfe\r\n--boundary-not\r\n--boundary\x00\r\n\r\n\x00" * 20
ANSWER = b'{"text": "hi"}'


def part(name: str, value: bytes, more: str = "", *lines: str) -> bytes:
    head = [f'Content-Disposition: form-data; name="{name}"{more}', *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + value


def form(*parts: bytes, boundary: bytes = b"boundary-x1", end: bytes = b"--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + each + b"\r\n" for each in parts) + b"--" + boundary + end


FILE = part("file", SOUND, '; filename="a.wav"', "Content-Type: audio/wav")
MODEL = part("model", b"speech")
CAP = part("max_completion_tokens", b"50")


def upload(body: bytes, path: str = PATHS[0], kind: str = "multipart/form-data; boundary=boundary-x1", key: str = KEY) -> bytes:
    return request("POST", path, f"content-type: {kind}", key=key, body=body)


ODD = b"a'b(c)+_,-./:=?d"
LEGAL = {
    "model first": (form(MODEL, FILE, CAP), "multipart/form-data; boundary=boundary-x1"),
    "model after the file": (form(FILE, MODEL, CAP), "multipart/form-data; boundary=boundary-x1"),
    "a quoted boundary": (form(FILE, MODEL, CAP), 'multipart/form-data; boundary="boundary-x1"'),
    "a boundary with odd letters": (form(FILE, MODEL, CAP, boundary=ODD), f'multipart/form-data; boundary="{ODD.decode()}"'),
    "a parameter before": (form(FILE, MODEL, CAP), "multipart/form-data; charset=utf-8; boundary=boundary-x1"),
    "capitals": (form(FILE, MODEL, CAP), "Multipart/Form-Data; Boundary=boundary-x1"),
    "no line break at the end": (form(FILE, MODEL, CAP, end=b"--"), "multipart/form-data; boundary=boundary-x1"),
    "a file name in utf-8": (
        form(part("file", SOUND, '; filename="\u00e9\U0001f3b5.wav"'), MODEL, CAP), "multipart/form-data; boundary=boundary-x1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bytes_arrive_as_they_were_sent(quay, name, path, framing):
    body, kind = LEGAL[name]
    quay["speech"].script = lambda call: call.answer(ANSWER)
    raw = upload(body, path, kind)
    if framing == "chunked":
        head = raw[: -len(body)].replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        raw = head + b"".join(chunk(body[i : i + 100]) for i in range(0, len(body), 100)) + LAST_CHUNK
    got = await say(quay.port, raw)
    assert (got.status, got.body) == (200, ANSWER)
    call = quay["speech"].calls[0]
    boundary = ODD.decode() if ODD in body else "boundary-x1"
    assert (call.path, call.body, call.fields["content-type"]) == (path, body, f'multipart/form-data; boundary="{boundary}"')


async def test_only_what_must_change_is_changed(quay):
    """Without a cap of its own the request gets one, in a part added at the end; every other byte is kept."""
    quay["speech"].script = lambda call: call.answer(ANSWER)
    body = form(FILE, MODEL)
    got = await say(quay.port, upload(body))
    assert got.status == 200, got.body
    sent, limit = quay["speech"].calls[0].body, got.fields["x-plimsoll-max-tokens"].encode()
    head, tail = body[: -len(b"--boundary-x1--\r\n")], b"--boundary-x1--\r\n"
    assert sent.startswith(head) and sent.endswith(tail)
    assert sent[len(head) : -len(tail)] == (
        b'--boundary-x1\r\nContent-Disposition: form-data; name="max_completion_tokens"\r\n\r\n' + limit + b"\r\n"
    )


TEXTS = [
    ("text/plain", b"hi\n"),
    ("application/x-subrip", b"1\n00:00:00,000 --> 00:00:01,000\nhi\n"),
    ("text/vtt; charset=utf-8", b"WEBVTT\n\n00:00.000 --> 00:01.000\nhi\n"),
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
async def test_answers_that_are_no_json_come_back(quay, kind, text):
    quay["speech"].script = lambda call: call.answer(text, b"content-type: " + kind.encode())
    wanted = part("response_format", {"text/plain": b"text", "application/x-subrip": b"srt"}.get(kind, b"vtt"))
    got = await say(quay.port, upload(form(wanted, FILE, MODEL, CAP)))
    assert (got.status, got.body, got.fields["content-type"]) == (200, text, kind)


async def test_a_streamed_transcription(quay):
    events = (event({"object": "transcription.chunk", "choices": [{"delta": {"content": "hi"}, "finish_reason": None}]}),
              event({"object": "transcription.chunk", "choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}),
              event(b"[DONE]"))  # fmt: skip

    async def streams(call):
        await call.say(SSE_HEAD, *(chunk(each) for each in events), LAST_CHUNK)

    quay["speech"].script = streams
    got = await say(quay.port, upload(form(part("stream", b"true"), FILE, MODEL, CAP)))
    assert (got.status, got.whole, got.body) == (200, True, b"".join(events))


REFUSED = {
    "no model": (form(FILE, CAP), None, 400),
    "an empty model": (form(FILE, part("model", b"")), None, 400),
    "an unknown model": (form(FILE, part("model", b"nothing")), None, 404),
    "two models": (form(MODEL, FILE, part("model", b"bare")), None, 400),
    "two models, the same": (form(MODEL, FILE, MODEL), None, 400),
    "a model with a file name": (form(part("model", b"speech", '; filename="x"'), FILE), None, 400),
    "no file": (form(MODEL, CAP), None, 400),
    "two files": (form(FILE, MODEL, FILE), None, 400),
    "a file without a name": (form(part("file", SOUND), MODEL), None, 400),
    "no end": (form(FILE, MODEL, end=b""), None, 400),
    "cut in the file": (form(FILE, MODEL)[:300], None, 400),
    "nothing": (b"", None, 400),
    "not multipart at all": (b'{"model": "speech"}', None, 400),
    "another boundary": (form(FILE, MODEL, boundary=b"other"), None, 400),
    "no boundary": (form(FILE, MODEL), "multipart/form-data", 415),
    "texts in a charset of their own": (form(FILE, MODEL), "multipart/form-data; boundary=boundary-x1; charset=utf-7", 415),
    "an empty boundary": (form(FILE, MODEL), "multipart/form-data; boundary=", 415),
    "a boundary of 100 letters": (form(FILE, MODEL, boundary=b"b" * 100), "multipart/form-data; boundary=" + "b" * 100, 415),
    "json": (b'{"model": "speech"}', "application/json", 415),
    "urlencoded": (b"model=speech", "application/x-www-form-urlencoded", 415),
    "a part without a disposition": (form(FILE, MODEL, b"x: y\r\n\r\nz"), None, 400),
    "a part without a name": (form(FILE, MODEL, b"Content-Disposition: form-data\r\n\r\nz"), None, 400),
    "a field that is not known": (form(FILE, MODEL, part("kv_transfer_params", b"{}")), None, 400),
    "a cap that is no number": (form(FILE, MODEL, part("max_completion_tokens", b"-5")), None, 400),
    "a cap beyond the slice": (form(FILE, MODEL, part("max_completion_tokens", b"100000")), None, 400),
    "stream that is no boolean": (form(FILE, MODEL, part("stream", b"1.5")), None, 400),
    "a thousand parts": (form(FILE, MODEL, *[part(f"p{n}", b"") for n in range(1000)]), None, 400),
    "a prompt that is not utf-8": (form(FILE, MODEL, part("prompt", b"\xff")), None, 400),
    "a sound longer than the slice": (form(part("file", bytes(1_000_000), '; filename="a"'), MODEL), None, 400),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_malformed_is_told_so(quay, name):
    body, kind, status = REFUSED[name]
    for path in PATHS:
        got = await say(quay.port, upload(body, path, *([kind] if kind else [])))
        assert_envelope(got, status)
    assert quay.calls == []


async def test_a_model_of_another_tenant_is_not_served_wherever_it_stands(quay):
    for body in (form(FILE, MODEL), form(MODEL, FILE), form(FILE, part("model", b"bare"), MODEL)):
        got = await say(quay.port, upload(body, key=KEYS["other"]))
        assert got.status in (400, 404)
    assert quay.calls == []
