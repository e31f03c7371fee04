"""Case 13: a stale connection is no reason for a second generation, and nothing that was begun is replayed."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.common import saying
from tests.support.client import ask
from tests.support.upstream import SSE_HEAD, chunk, delta


async def one_idle_connection(harbour, backend: str) -> None:
    """Leave exactly one kept-alive connection to the backend, which has served once."""
    await harbour[backend].reset()
    assert (await ask(harbour.port, model=backend)).status == 200
    assert any(peer.calls and not peer.closed.is_set() for peer in harbour[backend].peers)


@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_small_body_was_whole_when_the_connection_closed(harbour, stream, how):
    """It may have been read and begun: the caller is told, and nothing is sent twice."""
    upstream = harbour["eight"]
    await one_idle_connection(harbour, "eight")
    upstream.stale = how
    got = await ask(harbour.port, model="eight", stream=stream)
    assert (got.status, got.code, got.fields["x-should-retry"]) == (502, "upstream_reset", "false")
    assert len(upstream.calls) == 1  # the one before; the second was never read, and not sent again


async def test_a_large_body_was_not_whole_and_is_sent_once_more(harbour):
    upstream = harbour["huge"]
    await one_idle_connection(harbour, "huge")
    upstream.stale = "rst"
    before = await harbour.gateway.value("plimsoll_retries_total", backend="huge", result="served")
    got = await ask(harbour.port, {"model": "huge", "messages": [{"role": "user", "content": "x" * 12_000_000}], "max_tokens": 2})
    assert got.status == 200
    assert len(upstream.calls) == 2
    assert await harbour.gateway.value("plimsoll_retries_total", backend="huge", result="served") == before + 1


async def test_an_orderly_close_before_is_not_even_noticed(harbour):
    upstream = harbour["eight"]
    for _ in range(5):
        assert (await ask(harbour.port, model="eight")).status == 200
        for peer in upstream.peers:
            peer.transport.close()
        await asyncio.sleep(0.05)
    assert len(upstream.calls) == 5


@pytest.mark.parametrize("first", ["left", "right"])
async def test_after_one_event_nothing_is_replayed(harbour, first):
    for name in ("left", "right"):
        harbour[name].script = saying(SSE_HEAD, chunk(delta("a")), then="rst")
    got = await ask(harbour.port, model="pair", stream=True)
    assert got.status in (200, 502) and not (got.status == 200 and got.whole)
    assert len(harbour["left"].calls) + len(harbour["right"].calls) == 1


ENDS = {
    "a status line and headers, then RST": saying(SSE_HEAD, then="rst"),
    "a status line and headers, then FIN": saying(SSE_HEAD, then="fin"),
    "the body read, then RST": saying(then="rst"),
    "the body read, then FIN": saying(then="fin"),
    "an interim answer, then RST": saying(b"HTTP/1.1 100 Continue\r\n\r\n", then="rst"),
    "half a status line, then FIN": saying(b"HTTP/1.", then="fin"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ENDS)
async def test_nothing_that_was_read_is_sent_again(harbour, name, stream):
    for each in ("left", "right"):
        harbour[each].script = ENDS[name]
    got = await ask(harbour.port, model="pair", stream=stream)
    assert (got.status, got.code, got.fields["x-should-retry"]) == (502, "upstream_reset", "false")
    assert len(harbour["left"].calls) + len(harbour["right"].calls) == 1


async def test_a_refused_connection_goes_to_the_other_backend(harbour):
    await harbour["left"].stop()
    try:
        for _ in range(6):
            assert (await ask(harbour.port, model="pair")).status == 200
        assert len(harbour["right"].calls) == 6
    finally:
        await harbour["left"].start()
        await harbour.gateway.opened("left")


async def test_a_refused_connection_to_the_only_backend_is_said(harbour):
    await harbour["eight"].stop()
    try:
        got = await ask(harbour.port, model="eight")
        assert (got.status, got.code) in ((502, "upstream_unreachable"), (503, "backend_unavailable"))
        assert got.fields["x-should-retry"] == "true" and int(got.fields["retry-after"]) >= 1
    finally:
        await harbour["eight"].start()
        await harbour.gateway.opened("eight")
