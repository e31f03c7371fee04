"""The simulator's /tokenize counts a chat as the gateway does: else the gateway would have to ask it each time."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.edge.tokens import CountPool, TokenCounter
from gateway.simulator.server import SimulatorServer


async def test_the_gateways_counter_agrees_with_tokenize(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    payload = (await client.get("/plimsoll/tokenizer")).json()
    counter = TokenCounter.from_payload(payload, CountPool())

    async def fetch(body: dict[str, Any]) -> list[int]:
        answer = await client.post("/tokenize", json={"model": "tiny", **body})
        return list(answer.json()["tokens"])

    assert await counter.verify(fetch)
    assert counter.mode == "local"
