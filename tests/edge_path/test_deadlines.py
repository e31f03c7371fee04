"""Every clock of a request by itself, in the races between them, and where none may strike."""

from __future__ import annotations

import asyncio
import os

import orjson
import pytest

from gateway.errors import Outcome, Reason
from tests.edge_path.site import POLICY, Site, policy_for, running
from tests.edge_path.test_streams import DONE, STREAM, delta
from tests.edge_path.wire import ask, post, until, wire
from tests.forward.scripted import LAST_CHUNK, SSE_HEAD, Peer, chunk, response, serving


def timeouts(**seconds: float) -> str:
    return POLICY + "timeouts: {{" + ", ".join(f"{name}: {value}" for name, value in seconds.items()) + "}}\n"


def then_silent(*segments: bytes):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*segments)
        await peer.gone()
        peer.server.requests.append(b"closed")

    return script


async def outcome_of(script, text, *headers, progress=None, **fields):
    async with serving(script) as up:
        site = Site(policy_for(up.port, text))
        if progress is not None:
            site.yard.progress = progress
        async with running(site) as port:
            got = await ask(port, None, *headers, **fields)
            await until(lambda: up.requests)  # the backend's connection was dropped
            await until(lambda: len(site.accounts) == 1)
        assert site.in_flight() == 0
        return got, site


BEFORE_THE_FIRST_BYTE = {
    "first token": (timeouts(first_token_s=0.2), (), True, Reason.FIRST_TOKEN_TIMEOUT),
    "execution": (timeouts(execution_s=0.2), (), True, Reason.EXECUTION_TIMEOUT),
    "execution, not streamed": (timeouts(execution_s=0.2), (), False, Reason.EXECUTION_TIMEOUT),
    "patience": (POLICY, ("x-request-timeout: 0.3",), True, Reason.CALLER_DEADLINE),
    "patience, not streamed": (POLICY, ("x-stainless-timeout: 0.3",), False, Reason.CALLER_DEADLINE),
    "the least patience": (POLICY, ("x-request-timeout: 9", "x-stainless-read-timeout: 0.3"), False, Reason.CALLER_DEADLINE),
    "unusable patience": (
        timeouts(execution_s=0.2), ("x-request-timeout: nan", "x-stainless-timeout: -1"), False, Reason.EXECUTION_TIMEOUT,
    ),
    "patience before execution": (timeouts(execution_s=0.9), ("x-request-timeout: 0.3",), False, Reason.CALLER_DEADLINE),
}  # fmt: skip


@pytest.mark.parametrize("sent", ["nothing", "head"])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_BYTE)
async def test_before_the_first_byte_the_answer_is_a_504(name, sent):
    text, headers, stream, reason = BEFORE_THE_FIRST_BYTE[name]
    got, site = await outcome_of(then_silent(*([SSE_HEAD] if sent == "head" else [])), text, *headers, stream=stream)
    assert (got.status, got.code, got.fields["x-should-retry"]) == (504, reason, "false")
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (Outcome.FAILED, reason)


async def test_comments_are_not_a_first_token():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(SSE_HEAD)
        try:
            while True:
                await peer.say(chunk(b": keep-alive\n\n"))
                await asyncio.sleep(0.02)
        finally:
            peer.server.requests.append(b"closed")

    got, site = await outcome_of(script, timeouts(first_token_s=0.3), stream=True)
    assert got.status == 200 and not got.whole
    assert orjson.loads(got.events()[-1])["error"]["code"] == "first_token_timeout"
    assert site.accounts[0].reason is Reason.FIRST_TOKEN_TIMEOUT


AFTER_IT = {
    "stall, progress unknown": (timeouts(stall_s=0.2), None, Reason.STALL_TIMEOUT),
    "stall, engine frozen": (timeouts(stall_s=0.2), lambda _: 7, Reason.STALL_TIMEOUT),
    "execution": (timeouts(execution_s=0.3, stall_s=5), None, Reason.EXECUTION_TIMEOUT),
}


@pytest.mark.parametrize("name", AFTER_IT)
async def test_inside_a_stream_the_end_is_an_error_event_and_a_cut(name):
    text, progress, reason = AFTER_IT[name]
    got, site = await outcome_of(then_silent(SSE_HEAD + chunk(delta("a"))), text, progress=progress, stream=True)
    assert not got.whole
    assert orjson.loads(got.events()[-1])["error"]["code"] == reason
    assert site.accounts[0].reason is reason


async def test_a_frozen_engine_ends_an_answer_that_is_not_streamed():
    got, _ = await outcome_of(then_silent(), timeouts(stall_s=0.2), progress=lambda _: 7)
    assert (got.status, got.code) == (504, "stall_timeout")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_silent_parser_with_a_working_engine_is_not_a_stall(stream):
    steps = iter(range(10**9))
    answer = SSE_HEAD + chunk(delta("a")) if stream else b""
    rest = chunk(STREAM) + LAST_CHUNK if stream else response(b"{}")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer)
        await asyncio.sleep(0.6)
        await peer.say(rest)
        peer.server.requests.append(b"said")
        await peer.gone()

    got, site = await outcome_of(script, timeouts(stall_s=0.2), progress=lambda _: next(steps), stream=stream)
    assert got.status == 200 and got.whole
    assert site.accounts[0].outcome is Outcome.SERVED


async def test_a_long_healthy_stream_is_not_cut():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(SSE_HEAD)
        for _ in range(15):
            await peer.say(chunk(delta("a")))
            await asyncio.sleep(0.06)
        await peer.say(chunk(delta("b", "stop") + DONE) + LAST_CHUNK)
        peer.server.requests.append(b"said")
        await peer.gone()

    got, _ = await outcome_of(script, timeouts(stall_s=0.2, first_token_s=0.2), "x-request-timeout: 0.5", stream=True)
    assert got.whole and got.events()[-1] == b"[DONE]"


async def test_a_client_that_does_not_read_is_cut():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(SSE_HEAD)
        while True:
            peer.writer.write(chunk(b"data: " + b"x" * 100_000 + b"\n\n"))
            await peer.writer.drain()

    async with serving(script) as up:
        site = Site(policy_for(up.port, timeouts(client_write_s=0.3, stall_s=0.2)))
        async with running(site) as port, wire(port) as client:
            client.writer.transport.pause_reading()
            await client.send(post(stream=True))
            await until(lambda: len(site.accounts) == 1)
            assert site.in_flight() == 0
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (Outcome.CANCELLED, Reason.CLIENT_WRITE_TIMEOUT)


async def test_the_queue_has_a_clock_of_its_own_and_the_execution_clock_starts_at_dispatch():
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await asyncio.sleep(0.4)
            await peer.say(response(b"{}"))

    async with serving(script) as up:
        site = Site(policy_for(up.port, timeouts(queue_s=0.6, execution_s=0.7)), concurrency=1)
        async with running(site) as port:
            answers = [asyncio.create_task(ask(port)) for _ in range(2)]
            assert [(await answer).status for answer in answers] == [200, 200]  # 0.8 s from arrival
            running_one = asyncio.create_task(ask(port, None))
            await until(lambda: site.in_flight() == 1)
            late = [asyncio.create_task(ask(port)) for _ in range(3)]
            statuses = sorted([(await answer).status for answer in late])
            assert statuses == [200, 503, 503]
            refused = [answer.result() for answer in late if answer.result().status == 503]
            assert {answer.code for answer in refused} <= {"queue_timeout", "queue_full"}
            assert all(answer.fields["x-should-retry"] == "true" and "retry-after" in answer.fields for answer in refused)
            await running_one
    assert site.controller.breaker("a").state == "closed"


async def test_a_second_try_under_overload_is_told_to_stop():
    async with serving(then_silent()) as up:
        site = Site(policy_for(up.port, timeouts(queue_s=0.1)), concurrency=1)
        async with running(site) as port, wire(port) as client:
            await client.send(post())
            await until(lambda: site.in_flight() == 1)
            first, second = await ask(port), await ask(port, None, "x-stainless-retry-count: 1")
            assert (first.status, first.fields["x-should-retry"]) == (503, "true")
            assert (second.status, second.fields["x-should-retry"]) == (503, "false")


async def test_patience_over_in_the_queue_is_never_dispatched():
    async with serving(then_silent()) as up:
        site = Site(policy_for(up.port), concurrency=1)
        async with running(site) as port, wire(port) as client:
            await client.send(post())
            await until(lambda: site.in_flight() == 1)
            got = await ask(port, None, "x-request-timeout: 0.3")
            assert (got.status, got.code) == (504, "caller_deadline")
        assert up.peers == 1


async def test_connect_failures_open_the_breaker_and_it_says_until_when():
    async with serving(then_silent()) as up:
        nobody = up.port
    text = POLICY + "breaker: {{consecutive_failures: 4, cooldown_s: 5}}\nretries: {{budget_ratio: 0, budget_min_per_s: 0}}\n"
    site = Site(policy_for(nobody, text))
    async with running(site) as port:
        codes = [(await ask(port)).code for _ in range(5)]
        assert codes == ["upstream_unreachable"] * 4 + ["backend_unavailable"]
        got = await ask(port)
        assert 4000 < int(got.fields["retry-after-ms"]) <= 6250
    assert all(account.attempts <= 1 for account in site.accounts)


async def test_clients_at_fault_do_not_open_the_breaker():
    answers = [
        b"400 Bad Request",
        b"404 Not Found",
        b"422 Unprocessable",
        b"429 Too Many Requests",
        b"503 Service Unavailable",
    ] * 4

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(response(b"{}", status=answers.pop() if answers else b"200 OK"))

    async with serving(script) as up:
        site = Site(policy_for(up.port, POLICY + "breaker: {{consecutive_failures: 2, min_requests: 2}}\n"))
        async with running(site) as port:
            for _ in range(20):
                await ask(port)
            assert (await ask(port)).status == 200


DRAIN = POLICY


async def test_draining_lets_streams_finish_and_refuses_the_rest():
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(SSE_HEAD + chunk(delta("a")))
        await release.wait()
        await peer.say(chunk(STREAM) + LAST_CHUNK)
        await peer.gone()

    async with serving(script) as up:
        site = Site(policy_for(up.port, DRAIN), concurrency=1)
        async with running(site) as port, wire(port) as client, wire(port) as idle, wire(port) as late:
            await client.send(post(stream=True))
            await client.until(b"finish_reason")
            queued = asyncio.create_task(ask(port))
            await until(lambda: site.waiting() == 1)
            await late.send(post()[:20])
            await until(lambda: any(c._reader.receiving for c in site.path.connections))
            draining = asyncio.create_task(site.path.drain(asyncio.get_running_loop().time() + 30))
            assert ((await queued).status, (await queued).code) == (503, "draining")
            assert await idle.closed() == b""
            release.set()
            assert (await client.until(b"0\r\n\r\n")).endswith(DONE + b"\r\n0\r\n\r\n")
            await asyncio.wait_for(draining, 5)
            got = await ask(port)
            assert (got.status, got.code, got.fields["connection"]) == (503, "draining", "close")


async def test_what_outlives_the_drain_ends_with_an_error():
    async with serving(then_silent(SSE_HEAD + chunk(delta("a")))) as up:
        site = Site(policy_for(up.port, DRAIN))
        async with running(site) as port, wire(port) as client:
            await client.send(post(stream=True))
            await client.until(b"finish_reason")
            await site.path.drain(0.0)
            rest = await client.closed()
            assert b'"draining"' in rest and not rest.endswith(LAST_CHUNK)
            assert site.in_flight() == 0


@pytest.mark.skipif(os.environ.get("PLIMSOLL_INTERPRETED") == "0", reason="a compiled method cannot be replaced by a broken one")
async def test_a_defect_in_one_request_ends_no_clock_of_another(monkeypatch):
    """What goes wrong while one is ended is that caller's 500; the tick behind all clocks goes on."""
    troubles = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context["exception"]))
    async with serving(then_silent()) as up:
        site = Site(policy_for(up.port, timeouts(execution_s=0.2)))
        async with running(site) as port:
            with monkeypatch.context() as broken:
                broken.setattr(site.path._dispatch, "conclude", lambda *_: 1 / 0)
                first = await ask(port)
            second = await ask(port)
            await until(lambda: len(site.accounts) == 2)
        assert site.in_flight() == 0
    assert (first.status, first.code) == (500, "internal_error")
    assert (second.status, second.code) == (504, "execution_timeout")
    assert [type(trouble) for trouble in troubles] == [ZeroDivisionError]
