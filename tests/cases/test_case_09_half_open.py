"""Case 09: a probe that never reports does not wedge the breaker."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.common import released_by, saying, silent
from tests.support.client import ask, post, wire, within
from tests.support.upstream import COMPLETION, SSE_HEAD, Call, completion, response

COOLDOWN_S = 0.3


async def opened(tideway) -> None:
    """Open the breaker of `left` and wait until the cool-down is over."""
    tideway["left"].script = saying(then="rst")
    for _ in range(5):
        assert (await ask(tideway.port, model="left")).status == 502
    await tideway.gateway.breaker_is("left", "open")
    assert (await ask(tideway.port, model="left")).code == "backend_unavailable"
    tideway["left"].calls.clear()
    await asyncio.sleep(COOLDOWN_S + 0.1)


async def flows(tideway, seconds: float = COOLDOWN_S) -> None:
    """Traffic flows again within the cool-down (and what a loaded machine adds to it)."""
    tideway["left"].script = completion

    async def served() -> bool:
        return (await ask(tideway.port, model="left")).status == 200

    await within(seconds + 1.5, served, "traffic flows again")
    await tideway.gateway.breaker_is("left", "closed")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_the_probes_client_leaves_before_the_head(tideway, how, stream):
    await opened(tideway)
    tideway["left"].script = silent
    async with wire(tideway.port) as client:
        await client.send(post(model="left", stream=stream))
        call = await tideway["left"].called()
        if how == "rst":
            client.reset()
        else:
            client.writer.close()
        await call.gone(3)
    await flows(tideway)


ENDS = {
    "a 400": (saying(response(b'{"error":{"message":"no"}}', status=b"400 Bad Request"), then="none"), False, 400),
    "a busy 503": (saying(response(b"{}", status=b"503 Service Unavailable"), then="none"), False, 503),
    "a 500": (saying(response(b"{}", status=b"500 Internal Server Error"), then="none"), False, 500),
    "a head, then it hangs": (saying(SSE_HEAD), True, 504),
    "a body that is not what its coding says": (
        saying(response(b"not gzip", b"content-encoding: gzip"), then="none"), False, None,
    ),
    "a body that is no chunked body": (
        saying(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"), False, 502,
    ),
    "half a document": (saying(response(COMPLETION[:40]), then="none"), False, 502),
    "an error in the clothes of a 200": (saying(response(b'{"error":{"message":"x","code":500}}'), then="none"), False, 200),
    "a redirect": (saying(response(b"", b"location: http://127.0.0.1:9/", status=b"302 Found"), then="none"), False, 502),
    "nothing but a reset": (saying(then="rst"), False, 502),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
async def test_however_the_probe_ends_traffic_flows_again(tideway, name):
    script, stream, status = ENDS[name]
    await opened(tideway)
    tideway["left"].script = script
    got = await ask(tideway.port, model="left", stream=stream)
    assert status is None or got.status == status, got
    await flows(tideway)


async def test_the_callers_patience_ends_the_probe(tideway):
    await opened(tideway)
    tideway["left"].script = silent
    got = await ask(tideway.port, None, "x-request-timeout: 0.3", model="left")
    assert got.code == "caller_deadline"
    await flows(tideway)


async def test_a_caller_that_would_be_gone_takes_no_probe(tideway):
    await opened(tideway)
    got = await ask(tideway.port, None, "x-request-timeout: 0.01", model="left")
    assert got.code == "caller_deadline" and tideway["left"].calls == []
    await flows(tideway)


async def test_one_that_was_refused_before_it_was_sent_takes_no_probe(tideway):
    await tideway.gateway.reload(tenants={"acme": {"requests_per_minute": 7}, "other": {"class": "batch"}})
    await opened(tideway)
    codes = [(await ask(tideway.port, model="left", max_tokens=100_000)).code for _ in range(3)]
    assert codes == ["out_of_slice_output"] * 3
    tideway["left"].script = completion
    while (got := await ask(tideway.port, model="left")).status == 200:
        pass
    assert got.code == "rate_limited"
    await tideway.gateway.reload(tenants={"acme": {}, "other": {"class": "batch"}})
    await flows(tideway)


async def test_while_the_probe_is_out_another_waits_and_gets_in(tideway):
    await opened(tideway)
    release = asyncio.Event()
    tideway["left"].script = released_by(release)
    probe = asyncio.create_task(ask(tideway.port, model="left"))
    await tideway["left"].called()
    other = asyncio.create_task(ask(tideway.port, model="left"))
    await asyncio.sleep(0.2)
    assert len(tideway["left"].calls) == 1  # one probe at a time
    release.set()
    first, second = await asyncio.gather(probe, other)
    assert first.status == 200 and second.status in (200, 503)
    await flows(tideway)


async def test_a_refused_connection_is_a_failed_probe(tideway):
    """The backend is gone for a moment: nothing is sent, and its return is found by itself."""
    upstream = tideway["left"]
    await opened(tideway)
    await upstream.stop()
    got = await ask(tideway.port, model="left")
    assert (got.status, got.code) in ((502, "upstream_unreachable"), (503, "backend_unavailable"))
    await upstream.start()
    await flows(tideway, 3)


async def test_a_late_answer_of_before_changes_nothing(tideway):
    """Sent while it was closed, answered after it has opened: neither closes it nor takes the probe's place."""
    release = asyncio.Event()

    async def late(call: Call) -> None:
        await release.wait()
        await completion(call)

    tideway["left"].next_scripts.append(late)
    old = asyncio.create_task(ask(tideway.port, model="left"))
    await tideway["left"].called()
    tideway["left"].script = saying(then="rst")
    for _ in range(5):
        await ask(tideway.port, model="left")
    await tideway.gateway.breaker_is("left", "open")
    release.set()
    assert (await old).status == 200
    await tideway.gateway.breaker_is("left", "open", "half_open")
    await flows(tideway)
