"""Each refusal reaches a client as the exception it knows, with its code, and is tried again only where that can help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.clients.conversations import EXACT, HELLO, async_openai
from tests.clients.world import WAITING, World
from tests.support.client import KEY, within

Call = Callable[[openai.AsyncOpenAI], Any]


def chat(**fields: Any) -> Call:
    """A chat request with these fields."""
    return lambda client: client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 4, **fields})


def respond(**fields: Any) -> Call:
    """The same by the responses API."""
    return lambda client: client.responses.create(**{"model": "tiny", "input": "How deep?", **fields})


@dataclass(frozen=True)
class Case:
    """What is asked, with which key; the class, the status and the code that come of it."""

    kind: type[openai.APIStatusError]
    status: int
    code: str
    call: Call = field(default_factory=chat)
    key: str = KEY
    says: str = ""


LONG: Any = [{"role": "user", "content": "load " * 1500}]
REFUSALS = [
    Case(openai.AuthenticationError, 401, "invalid_api_key", key="sk-nobody"),
    Case(openai.AuthenticationError, 401, "invalid_api_key", lambda c: c.models.list(), key="sk-nobody"),
    Case(openai.PermissionDeniedError, 403, "not_permitted", key="sk-operator"),
    Case(openai.NotFoundError, 404, "model_not_found", chat(model="large")),
    Case(openai.NotFoundError, 404, "model_not_found", key="sk-elsewhere"),
    Case(openai.NotFoundError, 404, "model_not_found", lambda c: c.models.retrieve("large")),
    Case(openai.NotFoundError, 404, "unknown_route", lambda c: c.files.list()),
    Case(openai.APIStatusError, 405, "method_not_allowed", lambda c: c.get("/chat/completions", cast_to=object)),
    Case(openai.BadRequestError, 400, "invalid_body", chat(temperature="hot")),
    Case(openai.BadRequestError, 400, "invalid_body", chat(messages="hello")),
    Case(openai.BadRequestError, 400, "field_not_allowed", chat(extra_body={"priority": 9}), says="priority"),
    Case(openai.BadRequestError, 400, "out_of_slice_input", chat(messages=LONG), says="1024"),
    Case(openai.BadRequestError, 400, "out_of_slice_output", chat(max_tokens=257), says="256"),
    Case(openai.BadRequestError, 400, "out_of_slice_sequences", chat(n=9), says="8"),
    Case(openai.BadRequestError, 400, "out_of_slice_feature", chat(logprobs=True), says="logprobs"),
    Case(openai.BadRequestError, 400, "out_of_slice_output", respond(max_output_tokens=999)),
    Case(openai.BadRequestError, 400, "out_of_slice_input", lambda c: c.embeddings.create(model="tiny", input="load " * 900)),
    Case(openai.APIStatusError, 413, "body_too_large", chat(messages=[{"role": "user", "content": "x" * 250_000}])),
    Case(openai.InternalServerError, 503, "no_qualified_record", chat(model="bare")),
]  # fmt: skip


def body_of(error: openai.APIStatusError) -> dict[str, Any]:
    """The `error` object; the client takes it out of its envelope."""
    assert isinstance(error.body, dict)
    return error.body


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: f"{case.status}-{case.code}")
async def test_a_refusal_is_the_expected_exception_and_is_sent_once(world: World, case: Case) -> None:
    before, upstream = await world.arrived(), await world.stats()
    async with async_openai(world.url, case.key) as client:
        with pytest.raises(case.kind) as caught:
            await case.call(client)
    error = caught.value
    assert (type(error) is case.kind, error.status_code, error.code) == (True, case.status, case.code)
    assert error.response.headers["x-plimsoll-reason"] == case.code
    assert error.request_id
    assert {"message", "type", "param", "code"} == set(body_of(error))
    assert case.says in error.message
    assert error.response.headers["x-should-retry"] == "false"
    assert await world.arrived() - before == 1, "the client is told not to try again, and does not"
    assert (await world.stats())["started"] == upstream["started"], "nothing reached the backend"


@pytest.mark.parametrize(("key", "code"), [("sk-few", "rate_limited"), ("sk-little", "tokens_limited")])
async def test_a_quota_is_a_rate_limit_error_with_its_time(world: World, key: str, code: str) -> None:
    async with async_openai(world.url, key, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            for _ in range(9):
                await chat(max_tokens=20, extra_body=EXACT)(client)
    assert caught.value.code == code
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 75
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_more_than_the_whole_quota_is_not_worth_a_second_try(world: World) -> None:
    before = await world.arrived()
    async with async_openai(world.url, "sk-little") as client:
        with pytest.raises(openai.RateLimitError, match="never fits"):
            await chat(max_tokens=200)(client)
    assert await world.arrived() - before == 1


async def test_too_many_at_once_is_a_rate_limit_error_and_trying_again_helps(world: World) -> None:
    async with async_openai(world.url, "sk-one", max_retries=0) as client, async_openai(world.url, "sk-one") as patient:
        stream = await chat(stream=True, max_tokens=100, extra_body=EXACT)(client)
        with pytest.raises(openai.RateLimitError) as caught:
            await chat()(client)
        assert caught.value.code == "concurrency_limited"
        later = asyncio.create_task(chat()(patient))
        assert [chunk async for chunk in stream]
        assert (await later).usage is not None


async def test_a_full_queue_is_a_503_and_a_second_try_is_the_last(world: World) -> None:
    await world.fault("freeze")
    async with world.full(waiting=WAITING), async_openai(world.url, KEY, max_retries=0) as client:
        for again, hint in ((0, "true"), (1, "false")):
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(extra_headers={"x-stainless-retry-count": str(again)})(client)
            assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
            assert caught.value.response.headers["x-should-retry"] == hint
            assert int(caught.value.response.headers["retry-after"]) >= 1
    await world.mend()


async def test_who_waited_too_long_gets_a_503(world: World) -> None:
    await world.fault("freeze")
    async with world.full(), async_openai(world.url, KEY, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat()(client)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")
    await world.mend()


@pytest.mark.parametrize(
    ("fault", "stream", "status", "code"),
    [
        ("reset", False, 502, "upstream_reset"),
        ("fin;after=2", False, 502, "upstream_reset"),
        ("stall", True, 504, "first_token_timeout"),
    ],
)  # fmt: skip
async def test_a_failure_behind_the_gateway_is_never_paid_for_twice(
    world: World, fault: str, stream: bool, status: int, code: str
) -> None:
    await world.fault(fault)
    before = (await world.stats())["started"]
    async with async_openai(world.url, KEY) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(stream=stream, extra_body=EXACT)(client)
    await world.mend()
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert (await world.stats())["started"] - before <= 1
    await world.gateway.settled()


@pytest.mark.parametrize(("fault", "code"), [("reset;after=3", "upstream_reset"), ("stall;after=3", "stall_timeout")])
async def test_a_stream_that_breaks_raises_with_its_reason(world: World, fault: str, code: str) -> None:
    await world.fault(fault)
    before, texts = (await world.stats())["started"], []
    async with async_openai(world.url, KEY) as client:
        with pytest.raises(openai.APIError) as caught:
            async for chunk in await chat(stream=True, max_tokens=60, extra_body=EXACT)(client):
                texts.append(chunk.choices[0].delta.content or "")
    await world.mend()
    assert caught.value.code == code
    assert "".join(texts), "what had come before was delivered"
    assert (await world.stats())["started"] - before == 1
    await world.gateway.settled()


async def test_a_caller_hears_of_its_own_deadline_before_it_expires(world: World) -> None:
    await world.fault("freeze")
    before = await world.arrived()
    async with async_openai(world.url, KEY, timeout=1.0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat()(client)
    await world.mend()
    assert (caught.value.status_code, caught.value.code) == (504, "caller_deadline")
    assert await world.arrived() - before == 1
    await world.gateway.settled(4)


ANTHROPIC: list[tuple[type[anthropic.APIStatusError], int, str, dict[str, Any], str]] = [
    (anthropic.AuthenticationError, 401, "invalid_api_key", {}, "sk-nobody"),
    (anthropic.PermissionDeniedError, 403, "not_permitted", {}, "sk-operator"),
    (anthropic.NotFoundError, 404, "model_not_found", {"model": "large"}, KEY),
    (anthropic.BadRequestError, 400, "out_of_slice_output", {"max_tokens": 257}, KEY),
    (anthropic.BadRequestError, 400, "out_of_slice_input", {"messages": LONG}, KEY),
    (anthropic.BadRequestError, 400, "field_not_allowed", {"extra_body": {"container": "x"}}, KEY),
    (anthropic.InternalServerError, 503, "no_qualified_record", {"model": "bare"}, KEY),
]


@pytest.mark.parametrize(("kind", "status", "code", "fields", "key"), ANTHROPIC, ids=[row[2] for row in ANTHROPIC])
async def test_anthropics_client_gets_errors_of_its_own_shape(
    world: World, kind: type[anthropic.APIStatusError], status: int, code: str, fields: dict[str, Any], key: str
) -> None:
    before = await world.arrived()
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=key) as client:
        with pytest.raises(kind) as caught:
            await client.messages.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 4, **fields})
    error = caught.value
    assert error.status_code == status
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["error"]["code"] == code == error.response.headers["x-plimsoll-reason"]
    assert await world.arrived() - before == 1


async def test_anthropics_stream_that_breaks_raises_with_its_reason(world: World) -> None:
    await world.fault("reset;after=3")
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=KEY) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model="tiny", messages=HELLO, max_tokens=60) as stream:
                async for _ in stream:
                    pass
    await world.mend()
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["code"] == "upstream_reset"
    await world.gateway.settled()


async def test_langchain_raises_what_the_openai_client_raises(world: World) -> None:
    def model(**fields: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{world.url}/v1", **{"api_key": KEY, "model": "tiny", "max_completion_tokens": 4, **fields})

    for fields, kind in (
        ({"api_key": "sk-nobody"}, openai.AuthenticationError),
        ({"model": "large"}, openai.NotFoundError),
        ({"max_completion_tokens": 999}, openai.BadRequestError),
        ({"model": "bare"}, openai.InternalServerError),
    ):
        with pytest.raises(kind):
            await model(**fields).ainvoke("How deep?")


async def test_a_backend_that_has_changed_is_a_503_that_names_the_field(world: World) -> None:
    async with async_openai(world.url, KEY) as client:
        assert await chat(model="drifter")(client)
        before = await world.arrived()
        await world.fault("restart;max_num_seqs=3;seconds=0.1", "drifter")
        await within(10, lambda: _is(world, "configuration_changed"), "the gate closes")
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(model="drifter")(client)
    assert (caught.value.status_code, caught.value.code) == (503, "configuration_changed")
    assert "max_num_seqs" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert await world.arrived() - before == 1
    assert await world.gateway.value("plimsoll_retest_triggers_total", axis="batching_limits", model="drifter") == 1


async def _is(world: World, gate: str) -> bool:
    return await world.gateway.gate("drifter") == gate
