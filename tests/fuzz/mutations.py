"""A small fuzzer of our own: seeded, so that a run can be repeated, and with words of the formats it damages."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import orjson

from gateway.edge import fields
from tests.edge_path.site import KEY
from tests.edge_path.wire import post
from tests.support.upstream import COMPLETION, SSE_HEAD, STREAM, chunk, response

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True, "n": 1}
UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
CHUNKED = post(CHAT).replace(b"content-length: ", b"transfer-encoding: chunked\r\nx-was: ")
FORM = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
MULTIPART = FORM % (b"model", b"", b"tiny") + FORM % (b"file", b'; filename="a.wav"', b"RIFF0000WAVE") + b"--x--\r\n"
JSONS = [
    CHAT,
    {"model": "tiny", "prompt": ["a", "b"], "n": 3, "logprobs": 1, "logit_bias": {"1": -100}},
    {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "é"}]}], "max_output_tokens": 9},
    {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 5, "system": "s",
     "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    {"model": "tiny", "query": "q", "documents": ["a", "b"]}, {"model": "tiny", "text_1": "a", "text_2": ["b"]},
    {"model": "tiny", "input": [[1, 2], [3]]}, {"model": "tiny", "tokens": [1, 2]},
    {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}}},
]  # fmt: skip
COUNTED = [
    {"model": "tiny", "prompt": "the line was above the water é", "add_special_tokens": False, "return_token_strs": True},
    {**{name: CHAT[name] for name in ("model", "messages")}, "add_generation_prompt": True},
    {"model": "tiny", "messages": [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}]},
    {"model": "tiny", "tokens": [1, 2, 300, 2147483647]},
    {"model": "tiny", "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": "r"}, {"type": "text", "text": "x"}]}],
     "tools": [{"name": "f", "input_schema": {"type": "object"}}], "thinking": {"type": "disabled"}},
    {"model": "tiny", "messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
     "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip
SEEDS: dict[str, list[bytes]] = {
    "requests": [
        post(CHAT), post({**CHAT, "stream": False}), post(CHAT) * 2, CHUNKED, post(CHAT, *UPGRADE),
        post(CHAT, "expect: 100-continue"),
        post(CHAT, key=None), post(CHAT, version="1.0"), post(gzip.compress(orjson.dumps(CHAT)), "content-encoding: gzip"),
        b"GET /v1/models HTTP/1.1\r\nhost: g\r\nauthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        post(CHAT, "x-request-timeout: 5", "x-request-id: abc", "cookie: a=b", "traceparent: 00-1-1-01", key=KEY),
        CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + chunk(orjson.dumps(CHAT)) + b"0\r\ntrailer: x\r\n\r\n" + post(CHAT),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    "repeats": [
        post(CHAT), post({**CHAT, "stream": False}), post({**CHAT, "n": 2}), post(CHAT, "x-request-id: abc"), CHUNKED,
        post(CHAT) * 2, post(CHAT, path="/v1/completions"), post(CHAT, version="1.0"), post(CHAT, "connection: close"),
        post(CHAT, key="sk-bencx"),
    ],
    "bodies": [
        *(bytes((n, 0, 0)) + json.dumps(each).encode() for each in JSONS for n in range(9)),
        *(bytes((n, 1, 0)) + MULTIPART for n in range(12)),
        *(bytes((n, 0, 2)) + gzip.compress(json.dumps(each).encode()) for n, each in enumerate(JSONS)),
    ],
    "counting": [
        *(bytes((n, 0)) + json.dumps(each).encode() for each in COUNTED for n in range(3)),
        *(bytes((n, 2)) + gzip.compress(json.dumps(each).encode()) for each in COUNTED for n in range(3)),
    ],
    "headers": [
        b"authorization:Bearer plim_x\nx-api-key:y\nhost:g\ncontent-length:5",
        b"authorization:Bearer eyJhbGciOiJub25lIn0.e30.AA\nupgrade:websocket\nx-request-timeout:1e3\nx-stainless-retry-count:2",
        b"x-request-timeout:nan\ncontent-type:application/json\nhost:g\nhost:h\norigin:https://a.test\napi-key:k",
    ],
    "events": [
        *(bytes((n,)) + b"".join(STREAM) for n in range(3)),
        b"\x01event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3}}}\r\n\r\n"
        b"event: content_block_delta\rdata: {\"type\":\"content_block_delta\"}\r\r"
        b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        b"\x02data: {\"type\":\"response.output_text.delta\"}\n\ndata: {\"type\":\"response.completed\",\"response\":"
        b"{\"usage\":{\"input_tokens\":1,\"output_tokens\":2}}}\n\n",
        b"\x00: ping\n\ndata: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n",
        b"\x00\xef\xbb\xbfdata:{\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\r\n\r\n",
    ],
    "answers": [
        response(COMPLETION), SSE_HEAD + b"".join(chunk(each) for each in STREAM) + b"0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(b"{}"), b"HTTP/1.1 204 No Content\r\n\r\n", response(b"x") * 2,
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\na: b\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nx",
    ],
}  # fmt: skip
WORDS = [
    b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n", b" ", b"\t", b":", b"{", b"}", b"[" * 300, b"null", b"true", b"-1", b"1e999",
    b"NaN", b"9" * 400, b"18446744073709551616", b"-9223372036854775809", b"0x10", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800",
    b"\\u0000",
    b"Content-Length: 0\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity, chunked\r\n", b"Transfer-Encoding : chunked\r\n", b"Connection: close\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n", b"Host: h\r\n", b"HTTP/1.1", b"HTTP/0.9",
    b"GET http://a/v1/models HTTP/1.1\r\n", b"/v1/../metrics", b"//v1/models", b"/v1/models/%2e%2e%2f", b"POST", b"CONNECT",
    b"HEAD",
    b'"n":', b'"model":"tiny",', b'"kv_transfer_params":{},', b'"cache_salt":"x",', b'"stream":true,', b'"max_tokens":',
    b'"finish_reason":"stop"', b'"usage":{', b'"usage":{"prompt_tokens":-5,"completion_tokens":1e999}', b"data: ",
    b"event: error\n",
    b"data: [DONE]\n\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"Bearer ", b"Bearer " + KEY.encode(), b"A" * 5000,
    b"a: b\r\n" * 210,
]  # fmt: skip


TALK = {"model": "tiny", "messages": [
    {"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url",
        "image_url": {"url": "data:image/png;base64,A"}}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "y"}]},
    {"role": "assistant", "content": "z", "reasoning": "r", "refusal": None}], "max_completion_tokens": 5}  # fmt: skip
TURNS = {"model": "tiny", "instructions": "i", "max_output_tokens": 5, "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "o"}, {"role": "assistant", "content": "z"}],
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}}  # fmt: skip
# Which document belongs to which route, by the number in its first bytes, and the fields that the route knows.
AT = {"chat": 2, "completions": 3, "embeddings": 4, "messages": 5, "rerank": 6, "responses": 7, "score": 8}
OWN = [
    ("chat", JSONS[0]), ("completions", JSONS[1]), ("responses", JSONS[2]), ("messages", JSONS[3]), ("rerank", JSONS[4]),
    ("score", JSONS[5]), ("embeddings", JSONS[6]), ("chat", JSONS[8]), ("chat", TALK), ("chat", TALK), ("responses", TURNS),
    ("messages", {**COUNTED[4], "max_tokens": 5}),
]  # fmt: skip
ASKED = {"detokenize": 0, "tokenize": 1, "count_tokens": 2}
ASKS = [
    ("tokenize", COUNTED[0]), ("tokenize", COUNTED[1]), ("tokenize", COUNTED[2]), ("detokenize", COUNTED[3]),
    ("count_tokens", COUNTED[4]), ("tokenize", COUNTED[5]), ("tokenize", {name: TALK[name] for name in ("model", "messages")}),
]  # fmt: skip
DOCUMENTS = {
    "bodies": [(bytes((AT[parser], 0, 0)), document, sorted(fields.TABLE[parser])) for parser, document in OWN],
    "counting": [(bytes((ASKED[parser], 0)), document, sorted(fields.TABLE[parser])) for parser, document in ASKS],
}
VALUES: list[object] = [
    None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 1e300, "", "x", "\u00e9" * 9, "auto", "text", "function", "{", [], {}, [1],
    ["x"], [[]], [{}], [None], {"type": "text", "text": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"role": "tool", "content": "x"},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}, {"a": {"b": None}},
    {"type": "function", "function": {"name": "f", "arguments": "[]"}}, {"type": "thinking", "thinking": "x"},
]  # fmt: skip
INNER = ["role", "content", "type", "text", "name", "tool_calls", "function", "arguments", "input", "id", "source", "output"]


def inputs(target: str, seed: int, count: int) -> Iterator[bytes]:
    """`count` damaged inputs; the first are the seeds as they are."""
    dice = random.Random(f"{target} {seed}")
    seeds = SEEDS[target]
    yield from seeds[:count]
    for _ in range(count - len(seeds)):
        if target in DOCUMENTS and dice.random() < 0.6:
            yield _rearranged(*dice.choice(DOCUMENTS[target]), dice)
            continue
        if target == "bodies" and dice.random() < 0.2:
            yield _form(dice)
            continue
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.choice((1, 1, 2, 3, 5, 8))):
            _damage(data, dice, seeds)
        yield bytes(data[:100_000])


def _rearranged(prefix: bytes, document: dict[str, object], names: list[str], dice: random.Random) -> bytes:
    """A document with some of its values changed, gone, moved or new: still JSON, so that it gets past the parser."""
    document = copy.deepcopy(document)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        holder, name = dice.choice([(None, None), *_places(document)])
        if holder is None:
            document[dice.choice(names)] = copy.deepcopy(dice.choice(VALUES))
            continue
        match dice.randrange(6):
            case 0:
                del holder[name]
            case 1:
                holder[name] = [holder[name]]
            case 2 if isinstance(holder, dict):
                holder[dice.choice(INNER)] = copy.deepcopy(holder[name])
            case 3 if isinstance(holder[name], dict):
                holder[name][dice.choice(INNER)] = copy.deepcopy(dice.choice(VALUES))
            case 4 if isinstance(holder[name], list):
                holder[name].append(copy.deepcopy(dice.choice(VALUES)))
            case _:
                alike = [value for value in VALUES if type(value) is type(holder[name])] if dice.random() < 0.6 else VALUES
                holder[name] = copy.deepcopy(dice.choice(alike or VALUES))
    return prefix + json.dumps(document).encode()


PARTS = [
    (b"model", b"", b"tiny"), (b"file", b'; filename="a.wav"', b"RIFF0000WAVE"), (b"language", b"", b"en"),
    (b"prompt", b"", b"x"), (b"max_completion_tokens", b"", b"5"), (b"stream", b"", b"true"), (b"temperature", b"", b"0.5"),
    (b"include[]", b"", b"logprobs"),
    (b"presence_penalty", b"", b"1e999"), (b"response_format", b"", b"json"), (b"hotwords", b"", b"\xc3\xa9"),
]  # fmt: skip
TEXTS = [
    b"",
    b"0",
    b"-1",
    b"9" * 30,
    b"true",
    b"nan",
    b"\xff",
    b"\r\n--x",
    b"\r\n--x--\r\n",
    b"a" * 5000,
    b"0x10",
    b"1_0",
    b"\xd9\xa3",
]


def _form(dice: random.Random) -> bytes:
    """An upload of well-formed parts: some left out, some twice, in any order, some with another text."""
    parts = [part for part in PARTS if dice.random() < (0.9 if part[0] in (b"model", b"file") else 0.3)]
    parts += dice.choices(PARTS, k=dice.choice((0, 0, 0, 0, 1)))
    dice.shuffle(parts)
    if parts and dice.random() < 0.5:
        at = dice.randrange(len(parts))
        parts[at] = (*parts[at][:2], dice.choice(TEXTS))
    return bytes((dice.randrange(2), 1, 0)) + b"".join(FORM % part for part in parts) + b"--x--\r\n"


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, name
            yield from _places(item)


def _damage(data: bytearray, dice: random.Random, seeds: list[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    end = min(len(data), at + dice.choice((1, 1, 2, 4, 16, 64)))
    match dice.randrange(9):
        case 0 if at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at:end] = dice.randbytes(dice.randrange(1, 5))
        case 2:
            del data[at:end]
        case 3:
            data[at:at] = data[at:end] * dice.randrange(1, 4)
        case 4:
            other = dice.choice(seeds)
            cut = dice.randrange(len(other) + 1)
            data[at:] = other[cut:]
        case 5:
            del data[at:]
        case 6:
            data[at:end] = dice.choice(WORDS)
        case _:
            data[at:at] = dice.choice(WORDS)
