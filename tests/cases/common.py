"""What several cases do: the slot test, the count of outcomes, and scripts that hold on."""

from __future__ import annotations

import asyncio

from tests.support.client import Response, ask
from tests.support.gateway import GatewayProcess
from tests.support.upstream import SSE_HEAD, STREAM, Call, chunk, completion, delta

HOLD_S = 10.0  # how long a holding script keeps its request, if nobody ends it


async def slot_is_free(gateway: GatewayProcess, model: str = "one") -> None:
    """One ordinary request is answered at once; its backend must be answering by then."""
    got = await asyncio.wait_for(ask(gateway.port, model=model), 3)
    assert (got.status, got.whole) == (200, True), got


class Outcomes:
    """How many requests of a model have ended in each way since `take`."""

    def __init__(self, gateway: GatewayProcess, model: str) -> None:
        self.gateway, self.model = gateway, model

    async def _counts(self) -> dict[tuple[str, str], float]:
        series = await self.gateway.series("plimsoll_requests_total")
        mine = [s for s in series if s.labels["model"] == self.model]
        return {(s.labels["outcome"], s.labels["reason"]): s.value for s in mine}

    async def take(self) -> Outcomes:
        self.before = await self._counts()
        return self

    async def since(self) -> dict[tuple[str, str], int]:
        now = await self._counts()
        changes = {key: int(value - self.before.get(key, 0)) for key, value in now.items()}
        return {key: value for key, value in changes.items() if value}


async def silent(call: Call) -> None:
    """Takes the request and says nothing until the gateway gives up."""
    await call.gone(HOLD_S)


async def head_only(call: Call) -> None:
    """The head of a stream, then nothing."""
    await call.say(SSE_HEAD)
    await call.gone(HOLD_S)


async def two_then_silent(call: Call) -> None:
    """The head and two events, then nothing."""
    await call.say(SSE_HEAD, chunk(delta("a")), chunk(delta("b")))
    await call.gone(HOLD_S)


async def chatty(call: Call) -> None:
    """Events for as long as anybody takes them."""
    await call.say(SSE_HEAD)
    for _ in range(int(HOLD_S / 0.005)):
        await call.say(chunk(delta("x")))
        await asyncio.sleep(0.003)


def released_by(event: asyncio.Event):
    """A good answer once `event` is set."""

    async def script(call: Call) -> None:
        await event.wait()
        await completion(call)

    return script


def streaming_for(seconds: float, every: float = 0.1):
    """A healthy stream of that length, one event in every `every` seconds."""

    async def script(call: Call) -> None:
        await call.say(SSE_HEAD)
        for _ in range(round(seconds / every)):
            await call.say(chunk(delta("x")))
            await asyncio.sleep(every)
        await call.say(b"".join(chunk(each) for each in STREAM) + b"0\r\n\r\n")

    return script


def saying(*segments: bytes, then: str = "stay"):
    """Says the segments, then resets, closes, or stays until the gateway leaves."""

    async def script(call: Call) -> None:
        await call.say(*segments)
        if then == "rst":
            call.reset()
        elif then == "fin":
            call.fin()
        elif then == "stay":
            await call.gone(HOLD_S)

    return script


def request_id(got: Response) -> str:
    return got.fields["x-request-id"]
