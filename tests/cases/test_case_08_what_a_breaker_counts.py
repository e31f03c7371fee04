"""Case 08: a breaker counts what the backend did wrong, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.common import head_only, saying, silent, slot_is_free, two_then_silent
from tests.support.client import Response, ask
from tests.support.upstream import SSE_HEAD, Call, chunk, completion, delta

THRESHOLD = 5
INNOCENT = {
    "the context is too long": (b"400 Bad Request", (), '{"error":{"message":"maximum context length","code":400}}'),
    "401": (b"401 Unauthorized", (), '{"error":{"message":"no","code":401}}'),
    "404": (b"404 Not Found", (), '{"error":{"message":"no","code":404}}'),
    "413": (b"413 Content Too Large", (), '{"error":{"message":"no","code":413}}'),
    "422": (b"422 Unprocessable Entity", (), '{"error":{"message":"no","code":422}}'),
    "429 with Retry-After": (b"429 Too Many Requests", (b"retry-after: 7",), '{"error":{"message":"busy","code":429}}'),
    "503 with Retry-After": (b"503 Service Unavailable", (b"retry-after: 7",), '{"error":{"message":"busy","code":503}}'),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", INNOCENT)
async def test_a_refusal_or_a_busy_engine_is_no_fault(tideway, name, stream):
    status, lines, body = INNOCENT[name]

    async def script(call: Call) -> None:
        await call.answer(body.encode(), *lines, status=status)

    upstream = tideway["left"]
    upstream.script = script
    for _ in range(3 * THRESHOLD):
        got = await ask(tideway.port, model="left", stream=stream)
        assert (got.status, got.body.decode()) == (int(status.split()[0]), body)
        if lines:
            assert got.fields["retry-after"] == "7"
    await tideway.gateway.breaker_is("left", "closed")
    upstream.script = completion
    await slot_is_free(tideway.gateway, "left")
    assert not [call for call in upstream.own if call.path == "/v1/completions"]  # nor is it a suspicion


@pytest.mark.parametrize("probe", [b"200 OK", b"500 Internal Server Error"])
async def test_one_500_is_below_every_threshold(tideway, probe):
    async def script(call: Call) -> None:
        await call.answer(b'{"error":{"message":"boom","code":500}}', status=b"500 Internal Server Error")

    upstream = tideway["left"]
    upstream.next_scripts.append(script)
    upstream.probe_status = probe
    assert (await ask(tideway.port, model="left")).status == 500
    await slot_is_free(tideway.gateway, "left")
    await tideway.gateway.breaker_is("left", "closed")


async def ask_until_open(tideway, most: int, **fields: object) -> list[Response]:
    """Ask one after the other until the breaker refuses; what was answered before."""
    answers = []
    for _ in range(most):
        got = await ask(tideway.port, model="left", **fields)
        if got.status == 503 and got.code == "backend_unavailable":
            assert got.fields["x-should-retry"] == "true" and int(got.fields["retry-after"]) >= 1
            return answers
        answers.append(got)
    raise AssertionError(f"still closed after {most}: {answers[-1]}")


async def answered_500(call: Call) -> None:
    await call.answer(b'{"error":{"message":"boom","code":500}}', status=b"500 Internal Server Error")


FAULTS = {
    "reset before the answer": (saying(then="rst"), False, 502),
    "reset inside a stream": (saying(SSE_HEAD, chunk(delta("a")), then="rst"), True, 200),
    "closed before the answer": (saying(then="fin"), False, 502),
    "no first token": (silent, True, 504),
    "a head and no first token": (head_only, True, 504),
    "a stall": (two_then_silent, True, 200),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_faults_open_it_and_it_heals(tideway, name):
    script, stream, status = FAULTS[name]
    upstream = tideway["left"]
    upstream.script = script
    if name in ("no first token", "a head and no first token", "a stall"):  # each takes its time: all five at once
        answers = await asyncio.gather(*(ask(tideway.port, model="left", stream=stream) for _ in range(THRESHOLD)))
        await tideway.gateway.breaker_is("left", "open")
    else:
        answers = await ask_until_open(tideway, THRESHOLD + 1, stream=stream)
        assert len(answers) == THRESHOLD
    assert {answer.status for answer in answers} <= {status, 502}
    upstream.script = completion
    await asyncio.sleep(0.4)
    await slot_is_free(tideway.gateway, "left")
    await tideway.gateway.breaker_is("left", "closed")


async def test_a_backend_that_answers_500_to_the_gateways_own_probe_is_broken(tideway):
    tideway["left"].script = answered_500
    tideway["left"].probe_status = b"500 Internal Server Error"
    await ask_until_open(tideway, 200)


async def test_500s_to_odd_requests_of_a_healthy_backend_are_no_fault(tideway):
    """A validation error that was reported as a 500: the gateway's own probe is answered well, so that nobody else suffers."""
    tideway["left"].script = answered_500
    for _ in range(3 * THRESHOLD):
        got = await ask(tideway.port, model="left")
        assert (got.status, got.fields["x-should-retry"]) == (500, "false"), got
    tideway["left"].script = completion
    await slot_is_free(tideway.gateway, "left")
    assert [call for call in tideway["left"].own if call.path == "/v1/completions"]  # it was looked into


async def test_cancels_and_short_patience_are_no_fault(tideway):
    tideway["left"].script = silent
    for _ in range(3):
        answers = await asyncio.gather(
            *(ask(tideway.port, None, "x-request-timeout: 0.4", model="left", stream=stream) for stream in (True, False) * 4)
        )
        assert {(answer.status, answer.code) for answer in answers} == {(504, "caller_deadline")}
    await tideway.gateway.breaker_is("left", "closed")
