"""Case 27: JSON that crashes parsers is a 400 in the envelope, and the next request is served."""

from __future__ import annotations

import json

import pytest

from tests.support.client import post
from tests.support.raw import assert_envelope, say

GOOD = b'{"model": "bare", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'


def chat(content: bytes = b'"hi"', more: bytes = b"") -> bytes:
    return b'{"model": "bare", "messages": [{"role": "user", "content": ' + content + b'}], "max_tokens": 4' + more + b"}"


def deep(levels: int) -> bytes:
    return b'{"type": "object", "properties": {"a": ' * levels + b"{}" + b"}}" * levels


TOOL = b', "tools": [{"type": "function", "function": {"name": %b, "parameters": %b}}]'
BAD = {
    "20,000 brackets": b"[" * 20_000,
    "20,000 closed brackets": b"[" * 20_000 + b"]" * 20_000,
    "20,000 objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "brackets inside a field": chat(more=b', "stop": ' + b"[" * 20_000 + b"]" * 20_000),
    "a million brackets": b"[" * 1_000_000,
    "a tools schema 1,000 deep": chat(more=TOOL % (b'"f"', deep(500))),
    "a tools schema 200 deep": chat(more=TOOL % (b'"f"', deep(100))),
    "a schema 1,000 deep": chat(
        more=b', "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ' + deep(500) + b"}}"
    ),
    "a lone surrogate in content": chat(b'"\\ud800"'),
    "a lone low surrogate": chat(b'"\\udc00x"'),
    "surrogates in the wrong order": chat(b'"\\udc00\\ud800"'),
    "a lone surrogate in the model": GOOD.replace(b'"bare"', b'"\\ud800"'),
    "a lone surrogate in a tool's name": chat(more=TOOL % (b'"\\ud800"', b"{}")),
    "a lone surrogate in a key": chat(more=b', "\\ud800": 1'),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "utf-16": GOOD.decode().encode("utf-16"),
    "utf-16 without a mark": GOOD.decode().encode("utf-16-le"),
    "utf-32": GOOD.decode().encode("utf-32"),
    "bytes that are no utf-8": chat(b'"\xff\xfe"'),
    "a surrogate as utf-8": chat(b'"\xed\xa0\x80"'),
    "overlong utf-8": chat(b'"\xc0\xaf"'),
    "a NUL inside": chat(b'"a\x00b"'),
    "a raw newline inside": chat(b'"a\nb"'),
    "nothing": b"",
    "blanks": b"  \r\n ",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"1",
    "true": b"true",
    "bytes behind": GOOD + b"x",
    "two documents": GOOD + GOOD,
    "a comma behind": GOOD[:-1] + b",}",
    "a comment": b"/* x */" + GOOD,
    "single quotes": GOOD.replace(b'"', b"'"),
    "NaN": chat(more=b', "temperature": NaN'),
    "Infinity": chat(more=b', "temperature": Infinity'),
    "1e999": chat(more=b', "temperature": 1e999'),
    "a seed of a thousand digits": chat(more=b', "seed": ' + b"9" * 1000),
    "a cap of a thousand digits": GOOD.replace(b'"max_tokens": 4', b'"max_tokens": ' + b"9" * 1000),
    "messages of the wrong type": GOOD.replace(b'[{"role": "user", "content": "hi"}]', b'"hi"'),
    "a message of the wrong type": GOOD.replace(b'{"role": "user", "content": "hi"}', b"1"),
    "content of the wrong type": chat(b"1"),
    "content of nested lists": chat(b'[["a"]]'),
    "a part without a type": chat(b'[{"text": "a"}]'),
    "a role of the wrong type": GOOD.replace(b'"user"', b"[]"),
    "a model of the wrong type": GOOD.replace(b'"bare"', b"1"),
    "no model": GOOD.replace(b'"model": "bare", ', b""),
    "no messages": b'{"model": "bare"}',
    "no message": b'{"model": "bare", "messages": []}',
    "a wide object": chat(more=b', "logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(50_000)) + b"}"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_400_and_the_next_is_served(quay, name):
    got = await say(quay.port, post(BAD[name]))
    assert_envelope(got, 400)
    assert got.code in ("invalid_body", "field_not_allowed")
    assert len(got.body) < 1000
    assert (await say(quay.port, post(model="bare"))).status == 200
    assert len(quay.calls) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
                                  "/tokenize", "/detokenize", "/v1/messages/count_tokens"])  # fmt: skip
async def test_every_route_reads_json_as_strictly(quay, path):
    for name in (
        "20,000 closed brackets",
        "a lone surrogate in content",
        "a byte order mark",
        "utf-16",
        "nothing",
        "null",
        "bytes behind",
    ):
        got = await say(quay.port, post(BAD[name], path=path))
        assert_envelope(got, 400, dialect="anthropic" if path.startswith("/v1/messages") else "openai")
    assert quay.calls == []


TYPES = {
    "text/plain": 415, "application/x-www-form-urlencoded": 415, "multipart/form-data; boundary=x": 415, "application/xml": 415,
    "application/json; charset=utf-16": 415, "application/json; charset=latin-1": 415, "application/json, text/plain": 415,
    "application/jsonx": 415, "json": 415, "application/json": 200, "application/json; charset=utf-8": 200,
    "Application/JSON;charset=UTF-8": 200, 'application/json; charset="utf-8"': 200, "": 200,
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
async def test_content_types(quay, kind):
    raw = post(GOOD).replace(b"content-type: application/json\r\n", b"content-type: " + kind.encode() + b"\r\n" if kind else b"")
    got = await say(quay.port, raw)
    assert got.status == TYPES[kind], got.body
    if got.status != 200:
        assert_envelope(got, 415, "unsupported_encoding")


async def test_what_is_odd_but_legal_arrives(quay):
    content = 'q\u0000"\\/\u2028\U0001f642\ufffe é'
    raw = json.dumps({"model": "bare", "messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()
    for body in (raw, b"\r\n\t " + raw + b"\n", raw.replace(b"bare", b"\\u0062are")):
        assert (await say(quay.port, post(body))).status == 200
    assert [call.json()["messages"][0]["content"] for call in quay.calls] == [content] * 3
    assert all(call.json()["model"] == "bare" for call in quay.calls)
