"""Case 14: each clock measures its own thing; one that hangs hurts nobody else."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.cases.common import Outcomes, head_only, request_id, saying, silent, slot_is_free, streaming_for, two_then_silent
from tests.cases.conftest import TIMEOUTS
from tests.support.client import Response, ask, open_stream, within
from tests.support.upstream import COMPLETION, LAST_CHUNK, SSE_HEAD, STREAM, Call, chunk, completion, delta

STALL_S, EXECUTION_S, QUEUE_S = TIMEOUTS["stall_s"], TIMEOUTS["execution_s"], TIMEOUTS["queue_s"]


async def test_a_backend_that_hangs_does_not_touch_another(harbour):
    harbour["wide"].script = silent
    hung = [asyncio.create_task(ask(harbour.port, model="wide", stream=True)) for _ in range(20)]
    await harbour["wide"].called(20)
    healthy = await asyncio.gather(*(ask(harbour.port, model="eight") for _ in range(20)))
    assert [got.status for got in healthy] == [200] * 20
    assert not any(task.done() for task in hung)
    assert {(got.status, got.code) for got in await asyncio.gather(*hung)} == {(504, "first_token_timeout")}
    assert all([await call.gone(2) for call in harbour["wide"].calls])


async def test_a_slow_healthy_stream_is_not_cut(harbour):
    harbour["one"].script = streaming_for(4 * STALL_S, every=STALL_S / 2)
    got = await ask(harbour.port, model="one", stream=True)
    assert got.whole and got.body.endswith(b"".join(STREAM))


SILENCES = {
    "nothing at all": (silent, 504, "first_token_timeout"),
    "a head": (head_only, 504, "first_token_timeout"),
    "a role and no content": (saying(SSE_HEAD, chunk(delta(""))), 200, "first_token_timeout"),
    "comments only": (saying(SSE_HEAD, *[chunk(b": ping\n\n")] * 200), 200, "first_token_timeout"),
    "two events": (two_then_silent, 200, "stall_timeout"),
}


async def all_silences(harbour) -> list[Response]:
    """One request to each script of SILENCES, in their order and all at once."""
    upstream = harbour["eight"]
    upstream.next_scripts.extend(script for script, _, _ in SILENCES.values())
    asked = []
    for count in range(1, len(SILENCES) + 1):
        asked.append(asyncio.create_task(ask(harbour.port, model="eight", stream=True)))
        await upstream.called(count)
    return await asyncio.gather(*asked)


async def test_silence_is_ended(harbour):
    outcomes = await Outcomes(harbour.gateway, "eight").take()
    for name, got in zip(SILENCES, await all_silences(harbour), strict=True):
        _, status, code = SILENCES[name]
        assert got.status == status, name
        if status == 200:
            assert not got.whole and got.body.endswith(b"\n\n"), name
            assert json.loads(got.events()[-1])["error"]["code"] == code, name
        else:
            assert (got.code, got.fields["x-should-retry"]) == (code, "false"), name
    assert all([await call.gone(2) for call in harbour["eight"].calls])
    assert await outcomes.since() == {("failed", "first_token_timeout"): 4, ("failed", "stall_timeout"): 1}


@pytest.mark.parametrize("script", [silent, two_then_silent])
async def test_after_silence_the_slot_is_free(harbour, script):
    harbour["one"].script = script
    await ask(harbour.port, model="one", stream=True)
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


async def test_comments_after_content_are_no_progress(harbour):
    async def script(call: Call) -> None:
        await call.say(SSE_HEAD, chunk(delta("a")))
        while True:
            await call.say(chunk(b": ping\n\n"))
            await asyncio.sleep(0.1)

    harbour["one"].script = script
    got = await ask(harbour.port, model="one", stream=True)
    assert json.loads(got.events()[-1])["error"]["code"] == "stall_timeout"


async def test_an_answer_that_is_not_streamed_has_no_first_token(harbour):
    """It is silent until it is whole: only the time for the whole of it counts."""

    async def script(call: Call) -> None:
        await asyncio.sleep(1.5)
        await call.answer(COMPLETION)

    harbour["one"].script = script
    assert (await ask(harbour.port, model="one")).status == 200


async def test_the_whole_of_an_answer_has_a_limit(harbour):
    harbour["eight"].script = streaming_for(3 * EXECUTION_S)
    streamed, held = await asyncio.gather(*(ask(harbour.port, model="eight", stream=stream) for stream in (True, False)))
    assert json.loads(streamed.events()[-1])["error"]["code"] == "execution_timeout" and not streamed.whole
    assert (held.status, held.code) == (504, "execution_timeout")
    assert all([await call.gone(2) for call in harbour["eight"].calls])


async def test_waiting_too_long_is_no_fault_of_the_backend(harbour):
    harbour["one"].script = streaming_for(QUEUE_S + 1)
    async with open_stream(harbour.port, model="one") as first:
        got = await ask(harbour.port, model="one")
        assert (got.status, got.code, got.fields["x-should-retry"]) == (503, "queue_timeout", "true")
        assert int(got.fields["retry-after"]) >= 1 and int(got.fields["retry-after-ms"]) > 0
        assert (await first.finish())[1]
    await harbour.gateway.breaker_is("one", "closed")
    assert len(harbour["one"].calls) == 1


async def test_time_in_the_queue_is_not_charged_to_the_answer(harbour):
    """Waiting and answering together take longer than an answer may; each alone does not."""
    harbour["one"].next_scripts.append(streaming_for(1))
    harbour["one"].script = streaming_for(2.7)
    async with open_stream(harbour.port, model="one"):
        began = time.monotonic()
        got = await ask(harbour.port, model="one", stream=True)
    assert time.monotonic() - began > EXECUTION_S
    assert got.whole and int(got.fields["x-plimsoll-queue-ms"]) > 500
    row = await harbour.gateway.account(request_id(got))
    assert row["outcome"] == "served" and row["queue_ms"] > 500


async def test_the_callers_patience_is_answered_before_it_ends(harbour):
    harbour["eight"].script = silent
    began = time.monotonic()
    headers = ("x-request-timeout", "x-stainless-timeout", "x-stainless-read-timeout")
    asked = [
        ask(harbour.port, None, f"{header}: 0.6", model="eight", stream=stream) for header in headers for stream in (True, False)
    ]
    for got in await asyncio.gather(*asked):
        assert (got.status, got.code, got.fields["x-should-retry"]) == (504, "caller_deadline", "false")
    assert time.monotonic() - began >= 0.4
    assert all([await call.gone(2) for call in harbour["eight"].calls])


@pytest.mark.parametrize("value", ["nan", "-1", "0", "soon", "inf", "1e999", "", "NaN", "0x10", "٣"])
async def test_what_is_no_number_of_seconds_is_ignored(harbour, value):
    assert (await ask(harbour.port, None, f"x-request-timeout: {value}".encode().decode("latin-1"), model="one")).status == 200


async def test_a_stream_that_has_begun_is_not_cut_by_patience(harbour):
    harbour["one"].script = streaming_for(1)
    got = await ask(harbour.port, None, "x-request-timeout: 0.6", model="one", stream=True)
    assert got.whole


async def test_nothing_is_sent_for_a_caller_that_would_be_gone(harbour):
    harbour["one"].script = streaming_for(1)
    async with open_stream(harbour.port, model="one"):
        got = await ask(harbour.port, None, "x-request-timeout: 0.4", model="one")
        assert (got.status, got.code) == (504, "caller_deadline")
    await harbour.gateway.settled()
    assert len(harbour["one"].calls) == 1


async def silent_parser(call: Call) -> None:
    """A tool call is being parsed: the engine works, the stream says nothing."""
    await call.say(SSE_HEAD, chunk(delta("a")))
    for _ in range(15):
        await asyncio.sleep(0.1)
        call.peer.upstream.iterations += 1
    await call.say(b"".join(chunk(each) for each in STREAM) + LAST_CHUNK)


async def test_a_silent_stream_of_a_working_engine_is_not_a_stall(harbour):
    harbour["one"].iterations = 1
    harbour["one"].script = silent_parser
    got = await ask(harbour.port, model="one", stream=True)
    assert got.whole and got.body.endswith(b"".join(STREAM))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_frozen_engine_is_a_stall(harbour, stream):
    """It listens and answers its probes; its engine does nothing."""
    harbour["one"].iterations = 7
    harbour["one"].script = two_then_silent if stream else silent
    got = await ask(harbour.port, model="one", stream=stream)
    if stream:
        assert json.loads(got.events()[-1])["error"]["code"] == "stall_timeout"
    else:
        assert (got.status, got.code) == (504, "stall_timeout")
    await harbour["one"].calls[0].gone(2)


async def test_the_gauges_come_back_to_nothing(harbour):
    async def nothing() -> bool:
        return await harbour.gateway.value("plimsoll_reserved_tokens") == 0

    await within(3, nothing, "no token is reserved")
