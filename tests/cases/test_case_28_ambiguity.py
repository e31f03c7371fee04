"""Case 28: JSON that two parsers read differently is refused, so that what was checked is what is sent."""

from __future__ import annotations

import pytest

from tests.support.client import post
from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, say

M = '"messages": [{"role": "user", "content": "hi"}]'
TWICE = {
    "allowed then forbidden": '{"model": "bare", "model": "keyed", %s}',
    "forbidden then allowed": '{"model": "keyed", "model": "bare", %s}',
    "the same twice": '{"model": "bare", "model": "bare", %s}',
    "escaped": '{"model": "bare", "mod\\u0065l": "keyed", %s}',
    "escaped first": '{"mod\\u0065l": "keyed", "model": "bare", %s}',
    "all escaped": '{"\\u006d\\u006f\\u0064\\u0065\\u006c": "keyed", "model": "bare", %s}',
    "escaped in capitals": '{"model": "bare", "\\u006Dodel": "keyed", %s}',
    "with a colon in a value": '{"model": "bare", "model": "keyed", "user": "a:b:c", %s}',
    "two streams": '{"model": "bare", "stream": false, "stream": true, %s}',
    "two caps": '{"model": "bare", "max_tokens": 1, "max_tokens": 100000, %s}',
    "a null and a cap": '{"model": "bare", "max_tokens": null, "max_tokens": 100000, %s}',
    "two lists of messages": '{"model": "bare", "messages": [{"role": "user", "content": "a"}], %s}',
    "nested": '{"model": "bare", "stream_options": {"include_usage": true, "include_usage": false}, %s}',
    "nested, escaped": '{"model": "bare", "stream_options": {"include_usage": true, "include\\u005fusage": false}, %s}',
    "in a message": '{"model": "bare", "messages": [{"role": "user", "role": "system", "content": "a"}]}',
    "in a message, escaped": '{"model": "bare", "messages": [{"role": "user", "content": "a", "conten\\u0074": "b"}]}',
    "in a tool's schema": '{"model": "bare", "tools": [{"type": "function", "function": {"name": "f", "parameters": '
    '{"a": 1, "a": 2}}}], %s}',
    "escaped colons hide nothing": '{"model": "bare", "user": "\\u003a", "model": "keyed", %s}',
    "a colon more and one less": '{"model": "bare", "stop": "\\u003a\\u003a", "stream": false, "stream": false, %s}',
}


def filled(text: str) -> bytes:
    return (text % M if "%s" in text else text).encode()


@pytest.mark.parametrize("key", ["client", "other"])
@pytest.mark.parametrize("name", TWICE)
async def test_a_key_that_stands_twice_is_refused(quay, name, key):
    got = await say(quay.port, post(filled(TWICE[name]), key=KEYS[key]))
    assert_envelope(got, 400, "invalid_body")
    assert quay.calls == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"])
async def test_on_every_route(quay, path):
    body = b'{"model": "bare", "input": "x", "prompt": "x", "max_tokens": 3, "model": "keyed"}'
    got = await say(quay.port, post(body, path=path, key=KEYS["other"]))
    assert_envelope(got, 400, "invalid_body", dialect="anthropic" if path == "/v1/messages" else "openai")
    assert quay.calls == []


@pytest.mark.parametrize("value", ['"true"', '"false"', "1", "0", "[]", "{}", '""'])
async def test_stream_is_a_boolean_or_absent(quay, value):
    got = await say(quay.port, post(filled('{"model": "bare", "stream": ' + value + ", %s}")))
    assert_envelope(got, 400, "invalid_body")
    assert got.json()["error"]["param"] == "stream"
    assert quay.calls == []


@pytest.mark.parametrize(("value", "streamed"), [("true", True), ("false", False), ("null", False)])
async def test_and_means_what_it_says(quay, value, streamed):
    got = await say(quay.port, post(filled('{"model": "bare", "stream": ' + value + ", %s}")))
    assert got.status == 200
    assert got.fields["content-type"].startswith("text/event-stream") == streamed
    assert (b'"stream":true' in quay.calls[0].body) == streamed


@pytest.mark.parametrize("name", ["Model", "MODEL", "model ", "model\\u0000", "mo\\u200bdel"])
async def test_a_name_that_looks_like_another_is_not_forwarded(quay, name):
    got = await say(quay.port, post(filled('{"model": "bare", "' + name + '": "keyed", %s}'), key=KEYS["other"]))
    assert_envelope(got, 400, "field_not_allowed")
    assert quay.calls == []


async def test_what_is_sent_is_what_was_read(quay):
    raw = (
        '{ "model" : "b\\u0061re",\n "messages":[{"role":"user","content":"a\\/b \\ud83d\\ude42"}],"temperature":1e-1,"seed":12}'
    )
    assert (await say(quay.port, post(raw.encode(), key=KEYS["other"]))).status == 200
    sent = quay.calls[0].json()
    assert (sent["model"], sent["messages"][0]["content"], sent["temperature"], sent["seed"]) == ("bare", "a/b 🙂", 0.1, 12)
    assert quay.calls[0].body.count(b'"model"') == 1
