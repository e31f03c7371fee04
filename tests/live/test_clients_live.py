"""The official clients through the gateway to a real vLLM, as they are. The same conversations as before the simulator."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import openai
import pytest

from tests.clients import conversations as talk
from tests.support.attested import AttestedGateway
from tests.support.client import KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")
CONVERSATIONS = [
    talk.chat, talk.chat_raw_response, talk.several_choices, talk.tools_offered, talk.completions, talk.responses, talk.models,
    talk.messages, partial(talk.langchain, force=False),
]  # fmt: skip


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda each: getattr(each, "__name__", "langchain"))
async def test_it_works_unchanged(live_gateway: AttestedGateway, conversation: talk.Conversation) -> None:
    await asyncio.to_thread(conversation, live_gateway.url, KEY)
    await live_gateway.settled()


async def test_the_asynchronous_client_works_and_may_leave(live_gateway: AttestedGateway) -> None:
    await talk.chat_async(live_gateway.url, KEY)
    await live_gateway.settled()


REFUSALS: list[tuple[type[openai.APIStatusError], str, dict[str, Any], str]] = [
    (openai.AuthenticationError, "invalid_api_key", {}, "sk-nobody"),
    (openai.PermissionDeniedError, "not_permitted", {}, "sk-operator"),
    (openai.NotFoundError, "model_not_found", {"model": "large"}, KEY),
    (openai.BadRequestError, "out_of_slice_input", {"messages": [{"role": "user", "content": "load " * 600}]}, KEY),
    (openai.BadRequestError, "out_of_slice_output", {"max_tokens": 25}, KEY),
    (openai.BadRequestError, "out_of_slice_sequences", {"n": 5}, KEY),
    (openai.BadRequestError, "out_of_slice_feature", {"logprobs": True}, KEY),
    (openai.BadRequestError, "field_not_allowed", {"extra_body": {"kv_transfer_params": {}}}, KEY),
]


@pytest.mark.parametrize(("kind", "code", "fields", "key"), REFUSALS, ids=[row[1] for row in REFUSALS])
async def test_a_refusal_is_the_exception_the_client_expects(
    live_gateway: AttestedGateway, kind: type[openai.APIStatusError], code: str, fields: dict[str, Any], key: str
) -> None:
    async with talk.async_openai(live_gateway.url, key) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**{"model": "tiny", "messages": talk.HELLO, "max_tokens": 4, **fields})
    assert caught.value.code == code
