"""Case 20: what a request reserves is prompts x n x the larger cap; nothing a client writes makes it less than nothing."""

from __future__ import annotations

import base64
import itertools

import pytest

from tests.support.client import post
from tests.support.quay import IMAGE_TOKENS
from tests.support.raw import assert_envelope, say

_ids = itertools.count()
CHAT = {"model": "bare", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "bare", "prompt": "hi"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


async def reserved(quay, document, path="/v1/chat/completions") -> dict:
    """What the journal says was asked for by a request that passed."""
    name = f"cost-{next(_ids)}"
    got = await say(quay.port, post(document, f"x-request-id: {name}", path=path))
    assert got.status == 200, (document, got.body[:300])
    return await quay.gateway.account(name)


REFUSED = {
    "n of a million": ({**CHAT, "n": 1_000_000}, {"invalid_body"}),
    "n of 0": ({**CHAT, "n": 0}, {"invalid_body"}),
    "n below 0": ({**CHAT, "n": -5}, {"invalid_body"}),
    "n no number": ({**CHAT, "n": "2"}, {"invalid_body"}),
    "n true": ({**CHAT, "n": True}, {"invalid_body"}),
    "n beyond the slice": ({**CHAT, "n": 100, "max_tokens": 1}, {"out_of_slice_sequences"}),
    "5,000 prompts": ({**TEXT, "prompt": ["a"] * 5000}, {"invalid_body", "out_of_slice_sequences"}),
    "prompts times n": ({**TEXT, "prompt": ["a"] * 40, "n": 2, "max_tokens": 1}, {"out_of_slice_sequences"}),
    "no prompt in the list": ({**TEXT, "prompt": []}, {"invalid_body"}),
    "an empty token list": ({**TEXT, "prompt": [[1], []]}, {"invalid_body"}),
    "mixed prompts": ({**TEXT, "prompt": ["a", [1]]}, {"invalid_body"}),
    "a negative token": ({**TEXT, "prompt": [-1]}, {"invalid_body"}),
    "a cap of 0": ({**CHAT, "max_tokens": 0}, {"invalid_body"}),
    "a cap of -1": ({**CHAT, "max_tokens": -1}, {"invalid_body"}),
    "a cap of -100000": ({**CHAT, "max_tokens": -100_000}, {"invalid_body"}),
    "a negative cap beside a good one": ({**CHAT, "max_tokens": 5, "max_completion_tokens": -5}, {"invalid_body"}),
    "a cap of 1e30": ({**CHAT, "max_tokens": 1e30}, {"invalid_body"}),
    "a cap of 2**63": ({**CHAT, "max_tokens": 2**63}, {"invalid_body"}),
    "a cap as a float": ({**CHAT, "max_tokens": 5.5}, {"invalid_body"}),
    "a cap as text": ({**CHAT, "max_tokens": "5"}, {"invalid_body"}),
    "both caps, one too large": ({**CHAT, "max_tokens": 1, "max_completion_tokens": 100_000}, {"out_of_slice_output"}),
    "both caps, the other too large": ({**CHAT, "max_tokens": 100_000, "max_completion_tokens": 1}, {"out_of_slice_output"}),
    "best_of of a million": ({**TEXT, "best_of": 1_000_000}, {"invalid_body"}),
    "beam search": ({**CHAT, "use_beam_search": True}, {"field_not_allowed"}),
    "text over the slice": ({**TEXT, "prompt": "word " * 9000}, {"out_of_slice_input"}),
    "tokens over the slice": ({**TEXT, "prompt": [1] * 9000}, {"out_of_slice_input"}),
    "an image where none were measured": (
        {"model": "bare", "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}, {"out_of_slice_feature"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_before_dispatch(quay, name):
    document, codes = REFUSED[name]
    path = "/v1/completions" if "prompt" in document else "/v1/chat/completions"
    got = await say(quay.port, post(document, path=path))
    assert_envelope(got, 400)
    assert got.code in codes
    assert quay.calls == []


async def test_caps_on_the_other_dialects(quay):
    for path, document in (
        ("/v1/responses", {"model": "bare", "input": "hi", "max_output_tokens": 100_000}),
        ("/v1/messages", {"model": "bare", "messages": CHAT["messages"], "max_tokens": 100_000}),
    ):
        got = await say(quay.port, post(document, path=path))
        assert (got.status, got.fields["x-plimsoll-reason"]) == (400, "out_of_slice_output")
    row = await reserved(quay, {"model": "bare", "input": "hi", "max_output_tokens": 77}, "/v1/responses")
    assert (row["asked_output"], row["sequences"]) == (77, 1)
    got = await say(quay.port, post({"model": "bare", "messages": CHAT["messages"]}, path="/v1/messages"))
    assert_envelope(got, 400, "invalid_body", dialect="anthropic")
    assert len(quay.calls) == 1


@pytest.mark.parametrize(("fields", "sequences", "output"), [
    ({"n": 3, "max_tokens": 7}, 3, 7),
    ({"n": None, "max_tokens": 7}, 1, 7),
    ({"max_tokens": 1, "max_completion_tokens": 300}, 1, 300),
    ({"max_tokens": 300, "max_completion_tokens": 1}, 1, 300),
    ({"max_tokens": None, "max_completion_tokens": 9}, 1, 9),
])  # fmt: skip
async def test_chat_reserves_the_larger_cap_times_n(quay, fields, sequences, output):
    row = await reserved(quay, {**CHAT, **fields})
    assert (row["sequences"], row["asked_output"]) == (sequences, output)


async def test_null_is_absent(quay):
    row = await reserved(quay, {**CHAT, "max_tokens": None, "max_completion_tokens": None, "stop": None, "stream": None})
    sent = quay.calls[0].json()
    assert sent["max_completion_tokens"] == row["asked_output"] > 1
    assert "max_tokens" not in sent and "stop" not in sent


PROMPTS = [
    ([1, 2, 3], 1, 1, 3),
    ([[1, 2, 3], [4]], 1, 2, 3),
    ([[1, 2, 3], [4]], 3, 6, 3),
    ("a", 2, 2, None),
    (["a", "b", "c"], 1, 3, None),
]


@pytest.mark.parametrize(("prompt", "n", "sequences", "tokens"), PROMPTS)
async def test_prompt_lists_are_counted_by_element(quay, prompt, n, sequences, tokens):
    row = await reserved(quay, {"model": "bare", "prompt": prompt, "n": n, "max_tokens": 4}, "/v1/completions")
    assert row["sequences"] == sequences
    if tokens is not None:
        assert tokens <= row["asked_input"] <= tokens + 2
    assert quay.calls[0].json()["prompt"] == prompt


async def test_best_of_costs_nothing_because_it_is_not_sent(quay):
    row = await reserved(quay, {**TEXT, "best_of": 8, "n": 2, "max_tokens": 4}, "/v1/completions")
    assert row["sequences"] == 2 and "best_of" not in quay.calls[0].json()


async def test_an_image_of_3_mb_is_not_counted_as_text(quay):
    url = "data:image/png;base64," + base64.b64encode(bytes(3_000_000)).decode()
    content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    row = await reserved(quay, {"model": "images", "messages": [{"role": "user", "content": content}], "max_tokens": 4})
    assert IMAGE_TOKENS < row["asked_input"] < IMAGE_TOKENS + 100
    assert row["features"] == ["media"]
    assert quay.calls[0].json()["messages"][0]["content"][1]["image_url"]["url"] == url


async def test_sound_is_counted_by_its_length(quay):
    data = base64.b64encode(bytes(75_000)).decode()  # at 6 kbit/s: 100 s, 10 tokens each
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    row = await reserved(quay, {"model": "images", "messages": [{"role": "user", "content": content}], "max_tokens": 4})
    assert 1000 <= row["asked_input"] < 1100


async def test_no_content_beside_a_tool_call(quay):
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]  # fmt: skip
    row = await reserved(quay, {"model": "bare", "messages": messages, "max_tokens": 4})
    assert row["asked_input"] > 5
    assert quay.calls[0].json()["messages"] == messages
