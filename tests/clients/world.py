"""What the tests of real clients share: the gateway, the simulators behind it, and their own counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.clients.conversations import EXACT, HELLO, async_openai
from tests.support.attested import AttestedGateway
from tests.support.client import KEY, within

SLOTS, WAITING = 8, 17  # what the record and the queue hold


class World:
    """The running processes."""

    def __init__(self, gateway: AttestedGateway, simulators: dict[str, str]) -> None:
        self.gateway, self.simulators = gateway, simulators

    @property
    def url(self) -> str:
        return self.gateway.url

    async def fault(self, text: str, model: str = "tiny") -> None:
        """Put a fault of the simulator in force."""
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{self.simulators[model]}/sim/fault", content=text)).raise_for_status()

    async def mend(self, model: str = "tiny") -> None:
        """Lift all faults."""
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.delete(f"{self.simulators[model]}/sim/fault")).raise_for_status()

    async def stats(self, model: str = "tiny") -> dict[str, Any]:
        """The simulator's own counters."""
        async with httpx.AsyncClient(trust_env=False) as client:
            found: dict[str, Any] = (await client.get(f"{self.simulators[model]}/sim/stats")).json()
            return found

    async def arrived(self) -> float:
        """Requests the gateway has answered or refused so far, of every model and outcome."""
        return await self.gateway.value("plimsoll_requests_total")

    @asynccontextmanager
    async def full(self, waiting: int = 0) -> AsyncIterator[None]:
        """Every slot taken by long streams, and `waiting` more in the queue."""
        async with async_openai(self.url, KEY, max_retries=0, timeout=30) as client:
            call = client.chat.completions.create
            held = [
                asyncio.create_task(call(model="tiny", messages=HELLO, max_tokens=256, extra_body=EXACT))
                for _ in range(SLOTS + waiting)
            ]
            try:
                await within(5, lambda: self._holds(waiting), "every slot is taken")
                yield
            finally:
                for task in held:
                    task.cancel()
                await asyncio.gather(*held, return_exceptions=True)
        await self.gateway.settled(5)

    async def _holds(self, waiting: int) -> bool:
        return await self.gateway.in_flight() >= SLOTS and await self.gateway.queued() >= waiting
