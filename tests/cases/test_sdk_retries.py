"""The real `openai` and `anthropic` clients at their default retries: one call never causes two generations."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from tests.cases.common import Outcomes, head_only, saying, silent, streaming_for, two_then_silent
from tests.cases.conftest import TIMEOUTS
from tests.support.client import open_stream
from tests.support.gateway import KEYS
from tests.support.upstream import COMPLETION, SSE_HEAD, Call, chunk, completion, delta, event, response

MESSAGE = (
    b'{"id":"m","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"hi"}],'
    b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":7,"output_tokens":3}}'
)
FIRST_EVENT = {
    "openai": delta("a"),
    "anthropic": b"event: content_block_delta\n"
    + event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
}
ERRORS = (openai.APIError, anthropic.APIError, httpx.HTTPError)


class Clients:
    """One client of each library, made once: making one costs more than a call."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def clients():
    async with openai.AsyncOpenAI(api_key=KEYS["client"]) as one, anthropic.AsyncAnthropic(api_key=KEYS["client"]) as other:
        Clients.openai, Clients.anthropic = one, other
        yield


async def call(library: str, port: int, *, stream: bool, model: str, timeout: float = 60) -> str | None:
    """One call as a user writes it; the text of the answer. Raises what the library raises."""
    messages = [{"role": "user", "content": "hi"}]
    base = f"http://127.0.0.1:{port}"
    if library == "openai":
        client = Clients.openai.with_options(base_url=base + "/v1", timeout=timeout)
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([(c.choices[0].delta.content or "") if c.choices else "" async for c in answer])
    claude = Clients.anthropic.with_options(base_url=base, timeout=timeout)
    answer = await claude.messages.create(model=model, messages=messages, max_tokens=8, stream=stream)
    if not stream:
        return answer.content[0].text
    return "".join([e.delta.text async for e in answer if e.type == "content_block_delta"])


def first_event_then(then: str):
    async def script(call: Call) -> None:
        kind = "anthropic" if call.path == "/v1/messages" else "openai"
        await saying(SSE_HEAD, chunk(FIRST_EVENT[kind]), then=then)(call)

    return script


class Fault(NamedTuple):
    script: object
    streams: tuple[bool, ...] = (True, False)


def answered(status: bytes, *lines: bytes):
    return saying(response(b'{"error":{"message":"x","type":"x","code":null}}', *lines, status=status), then="none")


FAULTS = {
    "reset before the answer": Fault(saying(then="rst")),
    "closed before the answer": Fault(saying(then="fin")),
    "reset after the head": Fault(saying(SSE_HEAD, then="rst")),
    "reset after the first event": Fault(first_event_then("rst"), (True,)),
    "closed after the first event": Fault(first_event_then("fin"), (True,)),
    "half a document": Fault(saying(response(COMPLETION[:50]), then="none"), (False,)),
    "half a body": Fault(saying(response(COMPLETION)[:-20], then="fin"), (False,)),
    "no first token": Fault(silent, (True,)),
    "a head and no first token": Fault(head_only, (True,)),
    "a stall": Fault(two_then_silent, (True,)),
    "too long": Fault(streaming_for(20), (False,)),
    "500": Fault(answered(b"500 Internal Server Error")),
    "502": Fault(answered(b"502 Bad Gateway")),
    "504": Fault(answered(b"504 Gateway Timeout")),
    "408": Fault(answered(b"408 Request Timeout")),
    "409": Fault(answered(b"409 Conflict")),
    "400": Fault(answered(b"400 Bad Request")),
    "a redirect": Fault(answered(b"307 Temporary Redirect", b"location: /v1/chat/completions")),
}
COMBINATIONS = [(name, stream) for name, fault in FAULTS.items() for stream in fault.streams]


async def both_fail(port: int, *, stream: bool, model: str) -> None:
    """One call of each library, at the same time; each raises an exception of its own."""
    calls = [call(library, port, stream=stream, model=model) for library in ("openai", "anthropic")]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, ERRORS) for end in ended), ended


@pytest.mark.parametrize(("name", "stream"), COMBINATIONS)
async def test_whatever_breaks_is_asked_for_once(harbour, name, stream):
    upstream = harbour["eight"]
    upstream.script = FAULTS[name].script
    await both_fail(harbour.port, stream=stream, model="eight")
    assert sorted(call.path for call in upstream.calls) == ["/v1/chat/completions", "/v1/messages"]


@pytest.mark.parametrize("library", ["openai", "anthropic"])
@pytest.mark.parametrize("how", ["rst", "fin"])
async def test_a_stale_connection(harbour, library, how):
    upstream = harbour["eight"]
    upstream.script = good
    assert await call(library, harbour.port, stream=False, model="eight") == "hi"
    upstream.stale = how
    with pytest.raises(ERRORS):
        await call(library, harbour.port, stream=False, model="eight")
    assert len(upstream.calls) == 1  # the second was read to its first byte, and never sent again


@pytest.mark.parametrize("library", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_clients_own_timeout_is_answered_before_it_ends(harbour, library, stream):
    harbour["eight"].script = silent
    outcomes = await Outcomes(harbour.gateway, "eight").take()
    with pytest.raises(ERRORS) as raised:
        await call(library, harbour.port, stream=stream, model="eight", timeout=0.5)
    assert getattr(raised.value, "status_code", None) == 504  # said by the gateway, and not found out by the client
    await harbour["eight"].calls[-1].gone(2)
    found_out = (await outcomes.since()).get(("cancelled", "client_closed"), 0)  # a machine that is too busy to be in time
    assert len(harbour["eight"].calls) == 1 + found_out


async def good(call: Call) -> None:
    if call.path == "/v1/messages":
        await call.answer(MESSAGE)
    else:
        await completion(call)


BUSY = {
    "503": answered(b"503 Service Unavailable", b"retry-after-ms: 50"),
    "429": answered(b"429 Too Many Requests", b"retry-after: 0"),
}


@pytest.mark.parametrize("library", ["openai", "anthropic"])
@pytest.mark.parametrize("name", BUSY)
async def test_a_busy_engine_may_be_asked_again(harbour, library, name):
    """It generated nothing: the client's own retry is the only generation."""
    upstream = harbour["eight"]
    upstream.next_scripts.append(BUSY[name])
    upstream.script = good
    assert await call(library, harbour.port, stream=False, model="eight") == "hi"
    assert len(upstream.calls) == 2


async def test_a_refused_connection_sends_nothing(harbour):
    await harbour["eight"].stop()
    try:
        await both_fail(harbour.port, stream=False, model="eight")
        assert harbour["eight"].calls == []
    finally:
        await harbour["eight"].start()
        await harbour.gateway.opened("eight")


async def test_a_full_queue_ends_in_no_generation(tideway):
    await tideway.gateway.reload(queue={"max_requests": 0}, timeouts={**TIMEOUTS, "execution_s": 60})
    tideway["one"].script = streaming_for(30)
    async with open_stream(tideway.port, model="one"):
        await both_fail(tideway.port, stream=False, model="one")
    assert len(tideway["one"].calls) == 1  # the one that held the slot


@pytest.mark.parametrize("library", ["openai", "anthropic"])
async def test_a_cancelled_call_stops_its_generation(harbour, library):
    harbour["eight"].script = silent
    task = asyncio.create_task(call(library, harbour.port, stream=False, model="eight"))
    generation = await harbour["eight"].called()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await generation.gone(3)
    assert len(harbour["eight"].calls) == 1
