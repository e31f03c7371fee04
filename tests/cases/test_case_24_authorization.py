"""Case 24: credentials in every shape. Either they are one known key, or the answer is 401 in the envelope."""

from __future__ import annotations

import base64
import hashlib

import pytest

from tests.support.client import KEY
from tests.support.raw import assert_envelope, request, say, stranger

BAD: dict[str, tuple[list[str | bytes], int]] = {
    "a byte that is no ascii": ([b"authorization: Bearer \xe9"], 401),
    "smart quotes": (["authorization: Bearer “k”".encode()], 401),
    "smart quotes around the right key": ([f"authorization: Bearer “{KEY}”".encode()], 401),
    "plain quotes": ([f'authorization: Bearer "{KEY}"'], 401),
    "no token": (["authorization: Bearer"], 401),
    "an empty token": (["authorization: Bearer "], 401),
    "100 KB": (["authorization: Bearer " + "k" * 100_000], 431),
    "60 KB": (["authorization: Bearer " + "k" * 60_000], 401),
    "basic": (["authorization: Basic dXNlcjpwYXNz"], 401),
    "basic with the right key": (["authorization: Basic " + base64.b64encode(f"x:{KEY}".encode()).decode()], 401),
    "the key without a scheme": ([f"authorization: {KEY}"], 401),
    "a tab between": ([f"authorization: Bearer\t{KEY}"], 401),
    "two tokens": ([f"authorization: Bearer {KEY} {KEY}"], 401),
    "a comma": ([f"authorization: Bearer {KEY},"], 401),
    "a NUL": ([f"authorization: Bearer {KEY}\x00"], 400),
    "a bare CR inside": ([f"authorization: Bearer {KEY}\rx-a: b"], 400),
    "a key cut short": ([f"authorization: Bearer {KEY[:-1]}"], 401),
    "a key with one more": ([f"authorization: Bearer {KEY}x"], 401),
    "the key in capitals": ([f"authorization: Bearer {KEY.upper()}"], 401),
    "an empty line": (["authorization: "], 401),
    "x-api-key wrong": (["x-api-key: wrong"], 401),
    "x-api-key empty": (["x-api-key:"], 401),
    "x-api-key right, authorization wrong": ([f"x-api-key: {KEY}", "authorization: Bearer wrong"], 401),
    "x-api-key right, authorization empty": ([f"x-api-key: {KEY}", "authorization:"], 401),
    "x-api-key right, authorization basic": ([f"x-api-key: {KEY}", "authorization: Basic eDp5"], 401),
    "authorization right, x-api-key wrong": ([f"authorization: Bearer {KEY}", "x-api-key: wrong"], 401),
    "two authorization lines, one right": ([f"authorization: Bearer {KEY}", "authorization: Bearer wrong"], 401),
    "two authorization lines, the other right": (["authorization: Bearer wrong", f"authorization: Bearer {KEY}"], 401),
    "the right key twice": ([f"authorization: Bearer {KEY}", f"authorization: Bearer {KEY}"], 401),
    "proxy-authorization": ([f"proxy-authorization: Bearer {KEY}"], 401),
    "a cookie": ([f"cookie: api_key={KEY}"], 401),
    "x-goog-api-key": ([f"x-goog-api-key: {KEY}"], 401),
    "an expired key": (["authorization: Bearer sk-old"], 401),
    "the digest instead of the key": (
        ["authorization: Bearer sha256:" + hashlib.sha256(KEY.encode()).hexdigest()], 401,
    ),
}  # fmt: skip
GOOD: dict[str, list[str]] = {
    "bearer": [f"authorization: Bearer {KEY}"],
    "lower case": [f"authorization: bearer {KEY}"],
    "upper case, two spaces": [f"authorization: BEARER  {KEY}"],
    "a space behind": [f"authorization: Bearer {KEY} "],
    "x-api-key": [f"x-api-key: {KEY}"],
    "api-key": [f"api-key: {KEY}"],
    "header name in capitals": [f"AUTHORIZATION: Bearer {KEY}"],
    "two headers that agree": [f"authorization: Bearer {KEY}", f"x-api-key: {KEY}"],
}
TARGETS = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize("name", BAD)
async def test_bad_credentials(quay, name):
    lines, status = BAD[name]
    source = stranger()
    for method, path in TARGETS:
        got = await say(quay.port, request(method, path, *lines), source=source)
        assert_envelope(got, status, dialect="anthropic" if path == "/v1/messages" and status == 401 else "openai")
        if status == 401:
            assert got.fields["x-plimsoll-reason"] == "invalid_api_key"
            assert got.fields["x-should-retry"] == "false"
            assert got.fields["www-authenticate"]
    got = await say(quay.admin_port, request("GET", "/admin/status", *lines), source=source)
    assert got.status in ({status, 403} if "basic with" in name else {status})
    assert quay.calls == []


@pytest.mark.parametrize("name", GOOD)
async def test_good_credentials(quay, name):
    assert (await say(quay.port, request("GET", "/v1/models", *GOOD[name]))).status == 200
    assert (await say(quay.port, request("GET", "/metrics", *GOOD[name]))).status == 403


async def test_an_address_that_fails_too_often_is_slowed_and_its_neighbours_are_not(quay):
    source = stranger()
    seen = set()
    for _ in range(800):
        got = await say(quay.port, request("GET", "/v1/models", key="sk-guess"), source=source)
        seen.add(got.status)
        if got.status == 429:
            assert_envelope(got, 429, "rate_limited")
            assert int(got.fields["retry-after-ms"]) > 0
            break
    assert seen == {401, 429}
    assert (await say(quay.port, request("GET", "/v1/models", key=KEY), source=source)).status == 200
    assert (await say(quay.port, request("GET", "/v1/models", key="sk-guess"), source=stranger())).status == 401
