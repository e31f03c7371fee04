"""The official clients work through the gateway as they are."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.clients import conversations as talk
from tests.clients.world import World
from tests.support.client import KEY

PLAIN = [
    talk.chat, talk.chat_raw_response, talk.several_choices, talk.tools_offered, talk.tools_required, talk.completions,
    talk.responses, talk.models, talk.embeddings, talk.messages, partial(talk.langchain, force=True),
]  # fmt: skip


@pytest.mark.parametrize("conversation", PLAIN, ids=lambda each: getattr(each, "__name__", "langchain"))
async def test_it_works_unchanged(world: World, conversation: talk.Conversation) -> None:
    await asyncio.to_thread(conversation, world.url, KEY)
    await world.gateway.settled()


async def test_the_asynchronous_client_works_and_may_leave(world: World) -> None:
    await talk.chat_async(world.url, KEY)
    await world.gateway.settled()
    assert (await world.stats())["running"] == 0
