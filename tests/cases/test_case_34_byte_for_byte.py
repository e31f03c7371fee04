"""Case 34: nothing is lost or rewritten on the way, in streams and in whole answers."""

from __future__ import annotations

import pytest

from tests.cases.common import request_id, saying
from tests.support.client import ask
from tests.support.upstream import DONE, LAST_CHUNK, SSE_HEAD, chunk, event, response, usage


def choice(delta: str, more: str = "") -> bytes:
    return event(b'{"id":"c","choices":[{"index":0,"delta":%b,"finish_reason":null%b}]}' % (delta.encode(), more.encode()))


FINISH = event(b'{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
TOOL = '{"tool_calls":[{"index":%d,"id":"call_%d","type":"function","function":{"name":"f%d","arguments":"{\\"a\\":1}"}}]}'
MORE = '{"tool_calls":[{"index":%d,"function":{"arguments":"%s"}}]}'
CHUNKS = {
    "reasoning": choice('{"reasoning":"because"}'),
    "reasoning_content": choice('{"reasoning_content":"because","content":null}'),
    "a whole tool call in one": choice(TOOL % (0, 0, 0)),
    "two tool calls, interleaved": b"".join(
        choice(each) for each in (TOOL % (0, 0, 0), TOOL % (1, 1, 1), MORE % (1, "x"), MORE % (0, "y"), MORE % (1, "z"))
    ),
    "logprobs": choice('{"content":"a"}', ',"logprobs":{"content":[{"token":"a","logprob":-1.2345678901234567e-300}]}'),
    "infinities and NaN": choice('{"content":"a"}', ',"logprobs":{"content":[{"logprob":-Infinity},{"logprob":NaN}]}'),
    "token_ids null": choice('{"content":"a"}', ',"token_ids":null,"stop_reason":null'),
    "unknown top-level keys": event(b'{"id":"c","zzz":{"deep":[1,{"x":null}]},"choices":[{"index":0,"delta":{"content":"a"}}]}'),
    "numbers": choice('{"content":"a"}', ',"n":[1e-7,1.0,12345678901234567890,-0.0,1E+2,0.1000]'),
    "escaped and raw": choice('{"content":"\\u00e9 é \\/ / \\ud83d\\udea2 🚢 \\u2028"}'),
    "a lone surrogate": choice('{"content":"\\ud800"}'),
    "a key that stands twice": choice('{"content":"a","content":"b"}'),
    "white space": event(b'{ "id" : "c" ,  "choices" : [ { "index" : 0 , "delta" : { "content" : "a" } } ] }'),
    "not JSON": event(b"hello"),
    "an empty data line": choice('{"content":"a"}') + b"data:\n\n",
    "an empty content first": choice('{"role":"assistant","content":""}') + choice('{"content":"a"}'),
    "a refusal": choice('{"refusal":"no"}'),
    "audio": choice('{"audio":{"id":"x","data":"AAAA"}}'),
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_stream_passes_byte_for_byte(harbour, name):
    stream = CHUNKS[name] + FINISH + usage() + DONE
    harbour["eight"].script = saying(SSE_HEAD + chunk(stream) + LAST_CHUNK, then="none")
    got = await ask(harbour.port, model="eight", stream=True)
    assert (got.status, got.whole, got.body) == (200, True, stream)
    row = await harbour.gateway.account(request_id(got))
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("served", 7, 3)
    assert row["ttft_ms"] is not None


@pytest.mark.parametrize("name", [name for name in CHUNKS if name not in ("not JSON", "an empty data line")])
async def test_a_whole_answer_passes_byte_for_byte(harbour, name):
    inner = CHUNKS[name].split(b"\n\n")[0].removeprefix(b"data: ")
    body = b' {"usage":{"prompt_tokens":7,"completion_tokens":3},"inner":' + inner + b"}\n"
    harbour["eight"].script = saying(response(body), then="none")
    got = await ask(harbour.port, model="eight")
    assert (got.status, got.body, got.fields["content-type"]) == (200, body, "application/json")
    row = await harbour.gateway.account(request_id(got))
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("served", 7, 3)


ERRORS = {
    "vLLM's own": b'{"error":{"message":"maximum context length","type":"BadRequestError","param":null,"code":400}}',
    "a list": b'{"detail":[{"loc":["body"],"msg":"x"}]}',
    "text": b"no such thing",
    "nothing": b"",
}


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found", b"422 Unprocessable Entity", b"418 I'm a teapot"])
@pytest.mark.parametrize("name", ERRORS)
async def test_a_4xx_of_the_backend_is_not_touched(harbour, name, status):
    kind = b"content-type: text/plain" if name == "text" else b"content-type: application/json"
    harbour["eight"].script = saying(response(ERRORS[name], kind, status=status), then="none")
    got = await ask(harbour.port, model="eight")
    assert (got.status, got.body) == (int(status[:3]), ERRORS[name])
    assert got.fields["content-type"] == kind.split(b": ")[1].decode()
    assert got.fields["x-request-id"]


async def test_only_the_headers_of_an_answer_are_relayed(harbour):
    lines = (
        b"content-language: en", b"cache-control: no-store", b"set-cookie: a=b", b"server: uvicorn", b"date: never",
        b"x-request-id: theirs", b"x-plimsoll-config: sha256:0", b"connection: keep-alive, x-hop", b"x-hop: 1", b"via: x",
        b"authorization: Bearer leaked", b"keep-alive: timeout=5",
    )  # fmt: skip
    harbour["eight"].script = saying(response(b"{}", *lines), then="none")
    got = await ask(harbour.port, model="eight")
    names = [name.lower() for name, _ in got.lines]
    assert (got.fields["content-language"], got.fields["cache-control"]) == ("en", "no-store")
    assert {"set-cookie", "x-plimsoll-config", "x-hop", "via", "authorization", "keep-alive"}.isdisjoint(names)
    assert names.count("date") == names.count("server") == names.count("x-request-id") == 1
    assert got.fields["x-request-id"] != "theirs"
