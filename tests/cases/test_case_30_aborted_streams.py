"""Case 30: what was delivered is paid for, whoever ends the stream; what produced nothing is given back exactly once."""

from __future__ import annotations

import pytest

from tests.support.client import open_stream, post, within
from tests.support.raw import assert_envelope, dial, say
from tests.support.upstream import COMPLETION, SSE_HEAD, chunk, delta

WORDS = b"".join(chunk(delta("a")) for _ in range(200))


async def spent(quay, name: str) -> float:
    """Tokens that a tenant's account says were read and written."""
    return sum([await quay.gateway.value("plimsoll_tokens_total", tenant=name, kind=kind) for kind in ("input", "output")])


async def runs_out(quay, name: str, script, how: str) -> list[int]:
    """Twenty streams that end before their usage; the statuses. The tenant has 1,000 tokens a minute."""
    quay["bare"].script = script
    seen = []
    for _ in range(20):
        async with dial(quay.port) as client:
            await client.send(post(None, model="bare", key=f"sk-{name}", stream=True, max_tokens=300))
            head = await client.until(b"\r\n\r\n")
            seen.append(int(head.split(b" ", 2)[1]))
            if seen[-1] == 200 and how != "upstream":
                await client.until(b"200th")
                if how == "rst":
                    client.reset()
            elif seen[-1] == 200:
                await client.closed()
        if seen[-1] == 200:
            await quay.gateway.settled()
    return seen


async def holds(call):
    await call.say(SSE_HEAD + WORDS + chunk(delta("200th")))
    await call.gone()


async def resets(call):
    await call.say(SSE_HEAD + WORDS)
    call.reset()


@pytest.mark.parametrize(
    ("name", "script", "how"), [("poor-0", holds, "fin"), ("poor-1", holds, "rst"), ("poor-2", resets, "upstream")]
)
async def test_the_budget_runs_out(quay, name, script, how):
    seen = await runs_out(quay, name, script, how)
    assert 3 <= seen.count(200) <= 6, seen  # a stream costs its prompt and 200 tokens
    assert set(seen) == {200, 429} and seen[-1] == 429
    assert await spent(quay, name) > 200 * seen.count(200)

    def told() -> bool:
        return seen.count(429) == sum(
            row["tenant"] == name and row["reason"] == "tokens_limited" for row in quay.gateway.journal()
        )

    await within(3, told, "every refusal is in the journal")
    estimated = [row for row in quay.gateway.journal() if row["tenant"] == name and row["output_tokens"]]
    assert estimated and all(row["usage_estimated"] and 200 <= row["output_tokens"] <= 202 for row in estimated)


async def test_what_produced_nothing_is_given_back_once(quay):
    """Answers that are errors, resets and refusals before a token: thirty of them leave the budget as it was, and no larger."""

    async def bad(call):
        await call.answer(b'{"error": {"message": "no", "type": "x", "param": null, "code": 400}}', status=b"400 Bad Request")

    async def broken(call):
        await call.answer(b"oh", status=b"500 Internal Server Error")

    async def silent(call):
        call.reset()

    ask = {"model": "bare", "key": "sk-poor-3", "max_tokens": 400}
    for script, status in ((bad, 400), (broken, 500), (silent, 502)):
        for stream in (False, True):
            quay["bare"].script = script
            for _ in range(5):
                assert (await say(quay.port, post(None, stream=stream, **ask))).status == status
            await quay.gateway.settled()

    async def generous(call):
        await call.answer(
            COMPLETION.replace(b'"prompt_tokens": 7, "completion_tokens": 3', b'"prompt_tokens": 50, "completion_tokens": 400')
        )

    quay["bare"].script = generous
    assert (await say(quay.port, post(None, **ask))).status == 200
    assert (await say(quay.port, post(None, **ask))).status == 200
    got = await say(quay.port, post(None, **ask))
    assert_envelope(got, 429, "tokens_limited")
    assert got.fields["x-should-retry"] == "true" and int(got.fields["retry-after-ms"]) > 0


async def test_a_caller_that_leaves_the_queue_or_before_a_token_pays_nothing(quay):
    async def silent(call):
        await call.gone()

    quay["bare"].script = silent
    for _ in range(6):
        async with dial(quay.port) as client:
            await client.send(post(None, model="bare", key="sk-poor-4", stream=True, max_tokens=400))
            await quay["bare"].called(1)
        await quay.gateway.settled()
        quay["bare"].calls.clear()
    quay["bare"].script = holds
    async with open_stream(quay.port, model="bare", key="sk-poor-4", max_tokens=400) as stream:
        assert stream.status == 200


async def test_usage_beyond_the_reservation_is_charged(quay):
    """A backend that says it wrote more than was asked for: the next request feels it."""

    async def more(call):
        await call.answer(COMPLETION.replace(b'"completion_tokens": 3', b'"completion_tokens": 900'))

    quay["bare"].script = more
    assert (await say(quay.port, post(None, model="bare", key="sk-poor-5", max_tokens=20))).status == 200
    await quay.gateway.settled()
    assert_envelope(await say(quay.port, post(None, model="bare", key="sk-poor-5", max_tokens=400)), 429, "tokens_limited")


async def test_a_request_larger_than_the_whole_budget_is_told_so(quay):
    got = await say(quay.port, post(None, model="bare", key="sk-poor-5", prompt=None, max_tokens=512, n=3))
    assert_envelope(got, 429, "tokens_limited")
    assert "retry-after" not in got.fields
