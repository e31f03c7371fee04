"""Watching a backend goes on, whatever the backend does to the connection, and after a defect of our own."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway import policy as policies
from gateway.forward.watch import Watch
from tests.forward.scripted import serving


def watching(port: int, changes: list[str]) -> Watch:
    return Watch(
        "a", policies.Backend(url=f"http://127.0.0.1:{port}"), "key", instance="g", connect_timeout_s=1,
        on_change=changes.append, busy=lambda: True,
    )  # fmt: skip


async def test_connections_that_are_reset_as_soon_as_they_are_made():
    async def reset(peer) -> None:
        peer.reset()

    async with serving(reset) as server:
        watch = watching(server.port, [])
        for _ in range(20):
            await watch.poll()
            assert await watch.metric("any") is None
            assert await watch.post("/v1/completions", b"{}", 1) is None
    assert watch.observation.identity is None and watch.observation.problem != "not asked yet"


async def test_a_connection_without_a_peer_is_a_broken_answer(monkeypatch):
    """What uvloop makes of that reset when it comes in a certain instant, which cannot be brought about at will."""

    async def nameless(transport, request):
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", nameless)
    watch = watching(1, [])
    await watch.poll()
    assert await watch.post("/v1/completions", b"{}", 1) is None
    assert watch.observation.identity is None and not watch.observation.reachable


async def test_watching_starts_again_after_a_defect():
    """The first poll raises what none should; the next call of `run` asks as if nothing had been."""
    changes: list[str] = []
    watch = watching(1, changes)  # nothing listens there
    asking = watch._identity

    async def broken():
        raise ZeroDivisionError

    watch._identity = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await watch.run()
    assert not changes
    watch._identity = asking  # type: ignore[method-assign]
    again = asyncio.create_task(watch.run())
    async with asyncio.timeout(5):
        while not changes:
            await asyncio.sleep(0.005)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    assert "127.0.0.1:1" in str(watch.observation.problem)
