"""Case 31: a shutdown with streams open ends them well, within its time, and answers everybody."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import asynccontextmanager

import pytest

from tests.cases.common import streaming_for
from tests.support.client import ask, get, open_stream, post, wire, within
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.upstream import STREAM, ScriptedUpstream


@asynccontextmanager
async def gateway_that_drains(folder, seconds: float):
    upstream = ScriptedUpstream()
    await upstream.start()
    gateway = GatewayProcess(folder, {"one": Backend(upstream, 1)}, server={"drain_s": seconds})
    async with gateway:
        yield gateway, upstream
    await upstream.stop()


async def refused(gateway: GatewayProcess) -> bool:
    """Whether new work is turned away: by an answer, or because nobody listens any more."""
    try:
        got = await ask(gateway.port, model="one")
    except (ConnectionError, asyncio.IncompleteReadError):
        return True
    return (got.status, got.code) == (503, "draining")


async def queued_one(gateway: GatewayProcess) -> asyncio.Task:
    task = asyncio.create_task(ask(gateway.port, model="one"))

    async def waits() -> bool:
        return await gateway.queued() == 1

    await within(5, waits, "one waits")
    return task


async def test_what_runs_may_finish_and_what_waits_is_told(tmp_path):
    async with gateway_that_drains(tmp_path, 60) as (gateway, upstream):
        upstream.script = streaming_for(3)
        async with wire(gateway.port) as idle, open_stream(gateway.port, model="one") as stream:
            waiting = await queued_one(gateway)
            gateway.signal()
            told = await asyncio.wait_for(waiting, 3)
            assert (told.status, told.code, told.fields["x-should-retry"]) == (503, "draining", "true")
            assert await idle.closed() == b""  # connections without a request are closed at once
            assert await refused(gateway)
            try:
                ready = (await get(gateway.port, "/health/ready", KEYS["prober"])).status
            except ConnectionError:
                ready = 503
            assert ready == 503
            body, whole = await stream.finish()
        assert whole and body.endswith(b"".join(STREAM))
        assert await gateway.ended(10) == 0
        assert len(upstream.calls) == 1
        rows = {(row["outcome"], row["reason"]) for row in gateway.journal()}
        assert {("served", "ok"), ("refused", "draining")} == rows


@pytest.mark.parametrize("kind", ["stream", "held", "upload"])
async def test_after_its_time_what_still_runs_is_ended_with_an_error(tmp_path, kind):
    async with gateway_that_drains(tmp_path, 1) as (gateway, upstream):
        upstream.script = streaming_for(20)
        async with wire(gateway.port) as client:
            request = post(model="one", stream=kind == "stream")
            await client.send(request[:-5] if kind == "upload" else request)
            if kind != "upload":
                call = await upstream.called()
            if kind == "stream":
                await client.until(b"finish_reason")
            began = time.monotonic()
            gateway.signal()
            rest = await client.closed(8)
            assert await gateway.ended(8) == 0
            assert time.monotonic() - began >= (0.9 if kind != "upload" else 0)
        if kind == "stream":
            event = rest.split(b"data: ")[-1].split(b"\n\n")[0]
            assert json.loads(event)["error"]["code"] == "draining"
            assert not rest.endswith(b"0\r\n\r\n")
        elif kind == "held":
            assert b" 503 " in rest.split(b"\r\n")[0] and b'"draining"' in rest
        else:
            assert upstream.calls == []
        if kind != "upload":
            await call.gone(2)


async def test_a_second_signal_ends_it_at_once(tmp_path):
    async with gateway_that_drains(tmp_path, 60) as (gateway, upstream):
        upstream.script = streaming_for(20)
        async with open_stream(gateway.port, model="one") as stream:
            gateway.signal()
            await within(5, lambda: "draining" in gateway.log(), "it drains")
            assert gateway.process.returncode is None
            gateway.signal(signal.SIGINT)
            assert await gateway.ended(5) == 1
            rest = await stream.rest()
            assert not rest.endswith(b"0\r\n\r\n") and b"[DONE]" not in rest
        await upstream.calls[0].gone(2)
        assert "Traceback" not in gateway.log()
