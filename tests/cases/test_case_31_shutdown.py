"""Case 31: a shutdown with streams open ends them well, within its time, and answers everybody."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager

from tests.cases.common import streaming_for
from tests.support.client import ask, get, open_stream, post, wire, within
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.upstream import STREAM, ScriptedUpstream


@asynccontextmanager
async def gateway_that_drains(folder, seconds: float, width: int = 1):
    upstream = ScriptedUpstream()
    await upstream.start()
    gateway = GatewayProcess(folder, {"one": Backend(upstream, width)}, server={"drain_s": seconds})
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
        upstream.script = streaming_for(2)
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


async def test_after_its_time_what_still_runs_is_ended_with_an_error(tmp_path):
    """A stream, an answer that is not streamed, and an upload that never becomes whole."""
    async with (
        gateway_that_drains(tmp_path, 1, width=2) as (gateway, upstream),
        wire(gateway.port) as streamed,
        wire(gateway.port) as held,
        wire(gateway.port) as half,
    ):
        upstream.script = streaming_for(20)
        await streamed.send(post(model="one", stream=True))
        await streamed.until(b"finish_reason")
        await held.send(post(model="one"))
        await upstream.called(2)
        await half.send(post(model="one")[:-5])
        gateway.signal()
        rest, answer, nothing = await asyncio.gather(streamed.closed(8), held.closed(8), half.closed(8))
        assert await gateway.ended(8) == 0
        told = rest.split(b"data: ")[-1].split(b"\n\n")[0]
        assert json.loads(told)["error"]["code"] == "draining"
        assert rest.count(b"finish_reason") > 4  # it had its time
        assert not rest.endswith(b"0\r\n\r\n")
        assert b" 503 " in answer.split(b"\r\n")[0] and b'"draining"' in answer
        assert nothing == b""
        assert len(upstream.calls) == 2
        assert all([await call.gone(2) for call in upstream.calls])


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
