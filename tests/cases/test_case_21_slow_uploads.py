"""Case 21: a request that drips or is oversized ends by a total deadline or a bound, and holds nothing meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.client import KEY, post
from tests.support.gateway import KEYS
from tests.support.quay import BODY_TIMEOUT_S
from tests.support.raw import assert_envelope, dial, request, say, stranger

PATHS = ["/v1/chat/completions", "/v1/audio/transcriptions", "/tokenize", "/v1/messages"]


def listeners(quay):
    return {"public": (quay.port, KEY), "admin": (quay.admin_port, KEYS["operator"])}


async def dripped(port: int, start: bytes, drip: bytes, every_s: float) -> tuple[int | None, float]:
    """Send `start`, then `drip` byte by byte; the status that comes back (None: closed without one) and when."""
    begun = time.monotonic()

    async with dial(port, stranger()) as client:
        await client.send(start)

        async def drips() -> None:
            for byte in drip:
                await asyncio.sleep(every_s)
                await client.send(bytes([byte]))

        dripping = asyncio.create_task(drips())
        try:
            got = await client.response(BODY_TIMEOUT_S + 6)
            return got.status, time.monotonic() - begun
        except asyncio.IncompleteReadError:
            return None, time.monotonic() - begun
        finally:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_a_body_that_does_not_come_ends_by_a_total_deadline(quay, listener):
    port, key = listeners(quay)[listener]
    paths = PATHS if listener == "public" else ["/admin/records", "/admin/explain"]
    lines = ("content-type: application/json", "content-length: 1000")
    silent = [
        dripped(port, request("POST", path, *lines, key=key).replace(b"content-length: 0\r\n", b""), b"", 1) for path in paths
    ]
    slow = [
        dripped(port, request("POST", path, *lines, key=key).replace(b"content-length: 0\r\n", b""), b"x" * 50, 0.2)
        for path in paths
    ]
    heads = [dripped(port, b"GET /v1/mod", b"els HTTP/1.1\r\nhost: g\r\nx-a: bbbbbbbbbb\r\n", 0.2) for _ in range(2)]
    chunks = [
        dripped(
            port,
            request("POST", paths[0], "transfer-encoding: chunked", key=key).replace(b"content-length: 0\r\n", b""),
            b"1\r\nx\r\n" * 20,
            0.2,
        )
    ]
    results = asyncio.gather(*silent, *slow, *heads, *chunks)
    await asyncio.sleep(BODY_TIMEOUT_S / 2)
    assert await quay.gateway.in_flight() == 0 and await quay.gateway.queued() == 0
    for status, took in await results:
        assert status == 408, status
        assert BODY_TIMEOUT_S * 0.9 < took < BODY_TIMEOUT_S + 5
    assert quay.calls == []


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_a_body_where_none_is_expected_holds_nothing(quay, listener):
    port, key = listeners(quay)[listener]
    for target in ("/health/live", "/nothing", "/v1/models"):
        head = request("POST", target, "content-length: 1000", key=key).replace(b"content-length: 0\r\n", b"")
        status, _ = await dripped(port, head, b"x" * 50, 0.05)
        assert status in (403, 404, 405, 408), (target, status)
        head = request("POST", target, "content-length: 1000").replace(b"content-length: 0\r\n", b"")
        status, took = await dripped(port, head, b"x" * 50, 0.05)
        assert status == 401 and took < BODY_TIMEOUT_S, "a stranger is told at once"


HUGE = {
    "a header of 5 MB": [f"x-a: {'b' * 5_000_000}"],
    "2,000 headers": [f"x-{number}: b" for number in range(2000)],
    "a header of 100 kB": [f"x-a: {'b' * 100_000}"],
    "a name of 100 kB": [f"{'x' * 100_000}: b"],
    "a cookie of 70 kB": [f"cookie: {'b' * 70_000}"],
}


@pytest.mark.parametrize("listener", ["public", "admin"])
@pytest.mark.parametrize("segment", [10_000_000, 16_000, 700])
@pytest.mark.parametrize("name", HUGE)
async def test_oversized_heads_have_one_verdict(quay, name, segment, listener):
    port, key = listeners(quay)[listener]
    raw = request("GET", "/v1/models" if listener == "public" else "/admin/status", *HUGE[name], key=key)
    if segment == 700:
        raw = raw[:150_000]  # enough to be over every bound
    got = await say(port, *[raw[i : i + segment] for i in range(0, len(raw), segment)])
    assert_envelope(got, 431, "headers_too_large")


async def test_heads_within_the_bounds_pass(quay):
    lines = [f"x-{number}: {'b' * 200}" for number in range(190)]
    for port, key, path in ((quay.port, KEY, "/v1/models"), (quay.admin_port, KEYS["operator"], "/admin/status")):
        raw = request("GET", path, *lines, key=key)
        assert (await say(port, raw)).status == 200
        assert (await say(port, *[raw[i : i + 5000] for i in range(0, len(raw), 5000)])).status == 200


async def test_a_legal_slow_upload_passes(quay):
    raw = post(model="bare")
    pieces = [raw[i : i + 40] for i in range(0, len(raw), 40)]
    async with dial(quay.port) as client:
        for piece in pieces:
            await client.send(piece)
            await asyncio.sleep(BODY_TIMEOUT_S / 2 / len(pieces))
        assert (await client.response()).status == 200


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_many_who_send_nothing_do_not_keep_others_out(quay, listener):
    port, key = listeners(quay)[listener]
    path = "/v1/models" if listener == "public" else "/admin/status"
    contexts = [dial(port, stranger()) for _ in range(200)]
    clients = [await context.__aenter__() for context in contexts]
    try:
        for client in clients:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n")
        assert (await say(port, request("GET", path, key=key))).status == 200
        ends = await asyncio.gather(*(client.closed(BODY_TIMEOUT_S + 6) for client in clients))
        assert all(end.startswith(b"HTTP/1.1 408") for end in ends)
    finally:
        for context in contexts:
            await context.__aexit__(None, None, None)
