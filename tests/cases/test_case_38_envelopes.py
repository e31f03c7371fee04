"""Case 38: every error is in the envelope of its dialect, with status and id; the real clients know it by its class."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest

from tests.edge_path.site import Site, policy_for, running
from tests.edge_path.wire import ask
from tests.support.client import KEY, post, within
from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, dial, request, say, stranger
from tests.support.upstream import SSE_HEAD, chunk, completion, delta

DIALECTS = {
    "/v1/chat/completions": ("openai", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    "/v1/messages": ("anthropic", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    "/v1/responses": ("responses", {"input": "hi", "max_output_tokens": 4}),
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_each_error_in_each_dialect(quay, path):
    dialect, body = DIALECTS[path]
    good = {"model": "bare", **body}
    cap = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    wrong_type = {**good, "input": 1} if path == "/v1/responses" else {**good, "messages": "hi"}
    wanted = [
        (post(good, path=path, key=None), 401, "invalid_api_key"),
        (post(good, path=path, key="sk-wrong"), 401, "invalid_api_key"),
        (post(good, path=path, key=KEYS["scraper"]), 403, "not_permitted"),
        (request("GET", path, key=KEY), 405, "method_not_allowed"),
        (post(b"{", path=path), 400, "invalid_body"),
        (post(wrong_type, path=path), 400, "invalid_body"),
        (post({**good, "kv_transfer_params": {}}, path=path), 400, "field_not_allowed"),
        (post({**good, "model": "nothing"}, path=path), 404, "model_not_found"),
        (post({**good, cap: 100_000}, path=path), 400, "out_of_slice_output"),
        (post(good, "content-encoding: x", path=path), 415, "unsupported_encoding"),
        (post(good, "content-length: 99999999999", path=path).replace(b"content-length: ", b"x-was: ", 1), 413, "body_too_large"),
        (post({**good, cap: 500}, path=path, key="sk-poor-6"), 200, None),
        (post({**good, cap: 512}, path=path, key="sk-poor-6"), 429, "tokens_limited"),
    ]

    async def writes(call):  # as many tokens as were asked for
        await call.answer(
            b'{"usage": {"prompt_tokens": 300, "completion_tokens": 500, "input_tokens": 300, "output_tokens": 500}}'
        )

    quay["bare"].script = writes
    for raw, status, code in wanted:
        got = await say(quay.port, raw, source=stranger())
        if code is None:
            assert got.status in (200, 429)
            continue
        assert_envelope(got, status, code, dialect)
        assert (got.fields.get("allow") == "POST") == (status == 405)
        assert got.fields["x-should-retry"] == ("true" if status == 429 else "false")
    assert len(quay.calls) <= 1


async def test_errors_of_no_route(quay):
    for raw, status, code in (
        (request("GET", "/nothing", key=KEY), 404, "unknown_route"),
        (request("POST", "/v1/models", key=KEY), 405, "method_not_allowed"),
        (request("DELETE", "/v1/models/bare", key=KEY), 405, "method_not_allowed"),
        (request("GET", "/v1/models/none", key=KEY), 404, "model_not_found"),
        (request("GET", "/nothing"), 401, "invalid_api_key"),
        (b"rubbish\r\n\r\n", 400, "invalid_body"),
    ):
        assert_envelope(await say(quay.port, raw, source=stranger()), status, code)


async def test_what_the_backend_says_is_untouched(quay):
    body = b'{"object":"error","message":"maximum context length is 10","type":"BadRequestError","param":null,"code":400}'
    for status in (
        b"400 Bad Request",
        b"404 Not Found",
        b"422 Unprocessable Entity",
        b"429 Too Many Requests",
        b"503 Busy",
        b"500 Oh",
    ):
        quay["bare"].script = lambda call, status=status: call.answer(body, b"retry-after: 7", status=status)
        for stream in (False, True):
            got = await say(quay.port, post(model="bare", stream=stream))
            assert (got.status, got.body) == (int(status[:3]), body)
            assert got.fields["retry-after"] == "7" and got.fields["x-request-id"]
    quay["bare"].script = lambda call: call.answer(b"<h1>oh</h1>", b"content-type: text/html", status=b"503 Service Unavailable")
    got = await say(quay.port, post(model="bare", stream=True))
    assert (got.status, got.body, got.fields["content-type"]) == (503, b"<h1>oh</h1>", "text/html")


async def test_full_and_timed_out_queues_and_a_backend_that_is_gone(harbour):
    async def silent(call):
        await call.gone()

    harbour["one"].script = silent
    async with dial(harbour.port) as first:
        await first.send(post(model="one"))
        await harbour["one"].called()
        waits = (post(model="one"), post(None, "x-stainless-retry-count: 1", model="one"))
        fresh, again = await asyncio.gather(*(say(harbour.port, raw, timeout=8) for raw in waits))
        for got in (fresh, again):
            assert_envelope(got, 503, "queue_timeout")
            assert int(got.fields["retry-after-ms"]) > 0
        assert (fresh.fields["x-should-retry"], again.fields["x-should-retry"]) == ("true", "false")
    await harbour.gateway.settled()
    await harbour["one"].stop()
    got = await say(harbour.port, post(model="one"), timeout=8)
    assert_envelope(got, got.status, "upstream_unreachable" if got.status == 502 else "backend_unavailable")
    assert got.status in (502, 503) and got.fields["x-should-retry"] == "true"
    await harbour["one"].start()
    await within(10, lambda: harbour.gateway.is_open("one"), "the gate opens again")


async def test_a_defect_of_the_gateway_is_a_500_without_a_word_of_it():
    class Broken:
        def bound(self, parsed):
            raise RuntimeError("secret words of /usr/lib/x.py")

    site = Site(policy_for(1))
    site.yard.counter = lambda model: Broken()
    async with running(site) as port:
        for _ in range(2):
            got = await ask(port)
            assert_envelope(got, 500, "internal_error")
            assert "secret" not in got.body.decode()
        assert site.in_flight() == 0
    assert [exchange.reason for exchange in site.accounts] == ["internal_error"] * 2


async def test_the_real_clients_raise_the_class_that_matches(quay):
    url = f"http://127.0.0.1:{quay.port}/v1"
    message = [{"role": "user", "content": "hi"}]

    async def with_openai(key: str, **fields):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            await client.chat.completions.create(**{"model": "bare", "messages": message, "max_tokens": 4, **fields})

    async def with_anthropic(key: str, **fields):
        async with anthropic.AsyncAnthropic(base_url=url[:-3], api_key=key, max_retries=0) as client:
            await client.messages.create(**{"model": "bare", "messages": message, "max_tokens": 4, **fields})

    async def gone(call):
        call.reset()

    quay["bare"].script = gone
    for call, library in ((with_openai, openai), (with_anthropic, anthropic)):
        for key, fields, name in (
            ("sk-wrong", {}, "AuthenticationError"), (KEYS["scraper"], {}, "PermissionDeniedError"),
            (KEY, {"model": "nothing"}, "NotFoundError"), (KEY, {"max_tokens": 5_000}, "BadRequestError"),
            (KEY, {"extra_body": {"kv_transfer_params": {}}}, "BadRequestError"), (KEY, {}, "InternalServerError"),
            ("sk-poor-7", {"max_tokens": 512, "extra_body": {"n": 2} if library is openai else {}}, None),
        ):  # fmt: skip
            if name is None:
                continue
            with pytest.raises(getattr(library, name)) as raised:
                await call(key, **fields)
            assert raised.value.request_id is None or raised.value.request_id
            error = raised.value.body["error"] if library is anthropic else raised.value.body
            assert error["message"] and error["type"]
            assert raised.value.response.headers["x-request-id"]
    with pytest.raises(openai.RateLimitError):
        await with_openai("sk-poor-7", max_tokens=512, n=2)
    quay["bare"].script = completion


EVENTS = {
    "/v1/chat/completions": delta("a"),
    "/v1/messages": b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"a"}}\n\n',
    "/v1/responses": b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_an_error_inside_a_stream_is_in_its_dialect(quay, path):
    async def breaks(call):
        await call.say(SSE_HEAD + chunk(EVENTS[path]))
        call.reset()

    quay["bare"].script = breaks
    dialect, body = DIALECTS[path]
    async with dial(quay.port) as client:
        await client.send(post({"model": "bare", **body, "stream": True}, path=path))
        got = await client.response()
    last = got.body.split(b"\n\n")[-2]
    assert (got.status, got.whole) == (200, False)
    assert got.body.startswith(EVENTS[path]) and b"[DONE]" not in got.body
    assert last.startswith(b"data: " if dialect == "openai" else b"event: error\ndata: ")
    document = json.loads(last.partition(b"data: ")[2])
    if dialect == "responses":
        assert document["type"] == "error" and document["code"] == "upstream_reset"
    elif dialect == "anthropic":
        assert document["type"] == "error" and document["error"]["type"] == "api_error"
    else:
        assert document["error"]["code"] == "upstream_reset"
