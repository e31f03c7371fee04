"""Case 22: usage is read and never made up, asked for or summed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.cases.common import request_id
from tests.support.client import ask
from tests.support.upstream import COMPLETION, DONE, Call, completion, delta, event, usage


def with_usage(text: str, read: int, written: int, finish: str | None = None) -> bytes:
    return delta(text, finish, usage={"prompt_tokens": read, "completion_tokens": written})


async def like_vllm(call: Call) -> None:
    """Usage comes only where the request asks for it."""
    options = call.json().get("stream_options") or {}
    ending = (usage(),) if options.get("include_usage") else ()
    await call.stream(delta("a"), delta("b"), delta("c", "stop"), *ending, DONE)


PLAIN = delta("a") + delta("b") + delta("c", "stop") + DONE
WITH = PLAIN.removesuffix(DONE) + usage() + DONE


class Asked(NamedTuple):
    fields: dict[str, object]
    stream: bytes


ASKED = {
    "nothing": Asked({}, PLAIN),
    "usage": Asked({"stream_options": {"include_usage": True}}, WITH),
    "no usage": Asked({"stream_options": {"include_usage": False}}, PLAIN),
    "null": Asked({"stream_options": None}, PLAIN),
}


@pytest.mark.parametrize("name", ASKED)
async def test_the_client_sees_what_it_asked_for(harbour, name):
    fields, stream = ASKED[name]
    harbour["one"].script = like_vllm
    got = await ask(harbour.port, model="one", stream=True, **fields)
    assert (got.status, got.body, got.whole) == (200, stream, True)
    sent = harbour["one"].calls[0].json()
    assert sent.get("stream_options") == fields.get("stream_options")  # nothing was added
    row = await harbour.gateway.account(request_id(got))
    if stream == WITH:
        assert (row["input_tokens"], row["output_tokens"], row["usage_estimated"]) == (7, 3, False)
    else:
        assert (row["output_tokens"], row["usage_estimated"]) == (3, True)
        assert row["input_tokens"] >= 1


async def test_running_totals_are_not_summed(harbour):
    stream = (with_usage("a", 7, 1), with_usage("b", 7, 2), with_usage("c", 7, 3, "stop"), usage(7, 3), DONE)

    async def script(call: Call) -> None:
        await call.stream(*stream)

    harbour["one"].script = script
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await ask(harbour.port, model="one", stream=True, stream_options=options)
    assert got.body == b"".join(stream)
    row = await harbour.gateway.account(request_id(got))
    assert (row["input_tokens"], row["output_tokens"], row["usage_estimated"]) == (7, 3, False)


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_a_request_that_is_not_streamed_is_not_given_stream_options(harbour, options):
    async def script(call: Call) -> None:
        if call.json().get("stream_options"):
            await call.answer(b'{"error":{"message":"only with stream"}}', status=b"400 Bad Request")
        else:
            await completion(call)

    harbour["one"].script = script
    fields = {} if options is None else {"stream_options": options}
    got = await ask(harbour.port, model="one", stream=False, **fields)
    if options is None:
        assert got.status == 200 and "stream_options" not in harbour["one"].calls[0].json()
        row = await harbour.gateway.account(request_id(got))
        assert (row["input_tokens"], row["output_tokens"], row["usage_estimated"]) == (7, 3, False)
    else:
        assert got.status == 400  # the caller's own mistake stays one, whoever finds it


ENDINGS = {
    "no choices": ((delta("a"), delta("", "stop"), usage(9, 4), DONE), (9, 4, False)),
    "in the chunk that finishes": ((delta("a"), with_usage("", 9, 4, "stop"), DONE), (9, 4, False)),
    "null in every chunk, then numbers": (
        (delta("a", usage=None), delta("", "stop", usage=None), usage(9, 4), DONE), (9, 4, False),
    ),
    "null in every chunk and none": ((delta("a", usage=None), delta("b", "stop", usage=None), DONE), (None, 2, True)),
    "none at all": ((delta("a"), delta("b"), delta("c", "stop"), DONE), (None, 3, True)),
    "empty": ((delta("a"), delta("b", "stop", usage={}), DONE), (None, 2, True)),
    "negative": ((delta("a"), delta("b", "stop", usage={"prompt_tokens": -5, "completion_tokens": -5}), DONE), (None, 2, True)),
    "text that speaks of usage": (
        (delta('"usage": {"prompt_tokens": 1000}'), delta("", "stop"), usage(9, 4), DONE), (9, 4, False),
    ),
    "usage inside a delta": (
        (event({"choices": [{"index": 0, "delta": {"content": "a", "usage": {"prompt_tokens": 99}}}]}), delta("b", "stop"), DONE),
        (None, 2, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
async def test_wherever_usage_stands(harbour, name):
    stream, (read, written, estimated) = ENDINGS[name]

    async def script(call: Call) -> None:
        await call.stream(*stream)

    harbour["one"].script = script
    got = await ask(harbour.port, model="one", stream=True)
    assert got.body == b"".join(stream)
    row = await harbour.gateway.account(request_id(got))
    assert (row["output_tokens"], row["usage_estimated"]) == (written, estimated)
    if read is not None:
        assert row["input_tokens"] == read


async def test_an_answer_without_usage_is_not_counted_as_nothing(harbour):
    async def script(call: Call) -> None:
        await call.answer(COMPLETION.replace(b'"usage"', b'"used"'))

    harbour["one"].script = script
    row = await harbour.gateway.account(request_id(await ask(harbour.port, model="one")))
    assert row["input_tokens"] is None and row["output_tokens"] is None  # unknown: the reservation stands
