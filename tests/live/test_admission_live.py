"""Measured, judged, served: a real vLLM never holds more than its record says, and is no slower than it says.

One record, made by `plimsoll qualify` with up to four requests at once, one gateway, sixteen clients.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from math import comb
from typing import Any

import httpx
import pytest

from tests.live.harness import VllmServer
from tests.live.qualified import INPUT_MAX, OUTPUT_MAX, SLOTS, STALL_S, EngineView, Qualified, command, gate_is
from tests.support.attested import AttestedGateway
from tests.support.client import KEY, open_stream, post, wire, within

pytestmark = pytest.mark.asyncio(loop_scope="session")
CLIENTS = 16
ALPHA = 0.01


def request(chance: random.Random, **more: Any) -> dict[str, Any]:
    """A completion of a size drawn over the whole box, of exactly that length."""
    output = chance.randint(1, OUTPUT_MAX)
    prompt = chance.choices(range(300, 1000), k=chance.randint(1, INPUT_MAX))
    return {"model": "tiny", "prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True, **more}


async def crowd(url: str, key: str, requests: int, clients: int = CLIENTS) -> list[float]:
    """Clients that send so many requests each, one after the other. How long each took in milliseconds, as they saw it."""
    took: list[float] = []
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as client:

        async def one(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(requests):
                began = time.perf_counter()
                answer = await client.post("/v1/completions", json=request(chance))
                took.append((time.perf_counter() - began) * 1000)
                assert answer.status_code == 200, answer.text

        async with asyncio.TaskGroup() as group:
            for seed in range(clients):
                group.create_task(one(seed))
    return took


async def most_at_once(server: VllmServer, load: asyncio.Task[list[float]]) -> tuple[int, int, int]:
    """While `load` runs: the most sequences in the engine, and the most requests of gateways and of others."""
    peaks = [0, 0, 0]
    async with EngineView(server) as view:
        while not load.done():
            seen = (await view.sequences(), *await view.requests())
            peaks = [max(old, new) for old, new in zip(peaks, seen, strict=True)]
            await asyncio.sleep(0.02)
    await load
    return peaks[0], peaks[1], peaks[2]


def tail(over: int, total: int, p: float = 0.05) -> float:
    """P(X >= over) for X ~ Binomial(total, p): the chance of so many slow requests when the bound holds."""
    return 1.0 - sum(comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(over))


async def test_the_record_passes_and_the_gate_opens_on_it(live_gateway: AttestedGateway, qualified: Qualified) -> None:
    record = live_gateway.folder / "records" / f"{qualified.identifier}.json"
    judged = await asyncio.to_thread(
        command, "evaluate", str(record), "--policy", str(live_gateway.folder / "policy.yaml"), "--json", key="sk-live-upstream"
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr
    fields = json.dumps(json.loads(judged.stdout))
    assert '"final_decision": "PASS"' in fields and '"reason_class": "QUALIFIED"' in fields
    verdicts = await live_gateway.series("plimsoll_verdict")
    assert [sample.labels["decision"] for sample in verdicts if sample.value] == ["PASS"]
    limits = {s.labels["axis"]: s.value for s in await live_gateway.series("plimsoll_envelope_limit")}
    assert (limits["input"], limits["output"]) == (INPUT_MAX, OUTPUT_MAX)


async def test_sixteen_clients_are_four_at_the_server(vllm_server: VllmServer, live_gateway: AttestedGateway) -> None:
    load = asyncio.create_task(crowd(live_gateway.url, KEY, 4))
    sequences, ours, others = await most_at_once(vllm_server, load)
    assert (sequences, ours, others) == (SLOTS, SLOTS, 0)
    await live_gateway.settled()


async def test_without_the_gateway_they_are_more_and_the_gate_closes(
    vllm_server: VllmServer, live_gateway: AttestedGateway
) -> None:
    load = asyncio.create_task(crowd(vllm_server.url, vllm_server.api_key, 4))
    closes = asyncio.create_task(gate_is(live_gateway, "backend_not_exclusive", 20))
    sequences, ours, others = await most_at_once(vllm_server, load)
    await closes
    assert sequences > SLOTS and others > SLOTS and ours == 0
    await gate_is(live_gateway, "open", 20)


def holds(times: list[float], bound: float) -> bool:
    """Whether these times agree with at most one in twenty over the bound."""
    return tail(sum(time > bound for time in times), len(times)) >= ALPHA


async def test_what_was_admitted_is_as_fast_as_the_record_says(
    vllm_server: VllmServer, live_gateway: AttestedGateway, qualified: Qualified
) -> None:
    """Four at once without the gateway are the control: where they are slower than measured, the machine has changed."""
    upper = qualified.level(SLOTS)["e2e_ms"].get("p95_upper")
    if upper is None:
        pytest.skip("the machine was too unsteady for a bound: the record claims none")
    bound = float(upper)
    before, requests = len(live_gateway.journal()), CLIENTS * 8
    await crowd(live_gateway.url, KEY, 8)
    await within(3, lambda: len(live_gateway.journal()) - before == requests, "every request has its account")
    times = [row["backend_ms"] for row in live_gateway.journal()[before:]]
    if not holds(times, bound):
        control = await crowd(vllm_server.url, vllm_server.api_key, requests // SLOTS, SLOTS)
        await gate_is(live_gateway, "open", 20)
        if not holds(control, bound):
            pytest.skip(f"the machine is slower than when it was measured: bound {bound}, now {sorted(control)[-10:]}")
    assert holds(times, bound), f"of {len(times)} over {bound} ms: {sorted(time for time in times if time > bound)}"


async def test_a_departure_frees_its_slot_wherever_the_request_was(
    vllm_server: VllmServer, live_gateway: AttestedGateway
) -> None:
    chance = random.Random(7)

    async def leave() -> None:
        async with wire(live_gateway.port) as client:
            await client.send(post(request(chance, stream=chance.random() < 0.7), path="/v1/completions"))
            await asyncio.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.5:
                client.reset()

    before = len(live_gateway.journal())
    async with EngineView(vllm_server) as view:
        for _ in range(5):
            await asyncio.gather(*(leave() for _ in range(10)))
            await live_gateway.settled(5)
            await within(5, lambda: _none(view), "the engine has dropped them")
    await within(3, lambda: len(live_gateway.journal()) - before == 50, "every request has its account")


async def _none(view: EngineView) -> bool:
    return await view.sequences() == 0 and await view.requests() == (0, 0)


async def test_chaos_ends_with_nothing_in_flight_and_every_request_accounted_once(
    vllm_server: VllmServer, live_gateway: AttestedGateway
) -> None:
    """Whole answers, early departures, halves of requests and readers that hardly read, twenty at once for a while."""
    before, sent = len(live_gateway.journal()), 0
    until = asyncio.get_running_loop().time() + 20

    async def client(seed: int) -> None:
        nonlocal sent
        chance = random.Random(seed)
        while asyncio.get_running_loop().time() < until:
            sent += 1
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await act(chance)

    async def act(chance: random.Random) -> None:
        stream, kind = chance.random() < 0.7, chance.random()
        async with wire(live_gateway.port) as peer:
            await peer.send(post(request(chance, stream=stream), path="/v1/completions"))
            if kind < 0.4:
                assert (await peer.response(60)).status == 200
            elif kind < 0.8:
                await asyncio.sleep(chance.uniform(0, 1))
                if kind < 0.6:
                    peer.reset()
            else:
                for _ in range(20):
                    if not await asyncio.wait_for(peer.reader.read(16), 60):
                        break
                    await asyncio.sleep(0.05)

    await asyncio.gather(*(client(seed) for seed in range(20)))
    await live_gateway.settled(10)
    async with EngineView(vllm_server) as view:
        await within(10, lambda: _none(view), "the engine is empty")
    await within(3, lambda: len(live_gateway.journal()) - before >= sent, "every request has its account")
    rows = live_gateway.journal()[before:]
    assert len({row["request_id"] for row in rows}) == len(rows) == sent
    assert {row["outcome"] for row in rows} <= {"served", "cancelled"}, [row for row in rows if row["outcome"] == "failed"]
    assert await live_gateway.gate("tiny") == "open"


async def test_a_frozen_engine_is_found_and_comes_back(vllm_server: VllmServer, live_gateway: AttestedGateway) -> None:
    """Its /health stays 200. The stream that hangs ends with its reason, the next are refused, and SIGCONT heals it."""
    engine = vllm_server.engine()
    async with open_stream(live_gateway.port, model="tiny", max_tokens=OUTPUT_MAX, ignore_eos=True) as stream:
        vllm_server.freeze(engine)
        try:
            rest = await stream.rest(10 * STALL_S)
            assert b"stall_timeout" in rest or b"first_token_timeout" in rest
            assert vllm_server.get("/health").status_code == 200
            await within(30, lambda: _refuses(live_gateway), "the breaker is open")
        finally:
            vllm_server.thaw(engine)
    await within(30, lambda: _serves(live_gateway), "it serves again")
    await live_gateway.settled(10)


async def _answer(gateway: AttestedGateway) -> tuple[int, str]:
    async with wire(gateway.port) as peer:
        await peer.send(post(model="tiny", max_tokens=1))
        answer = await peer.response(30)
        return answer.status, answer.fields.get("x-plimsoll-reason", "")


async def _refuses(gateway: AttestedGateway) -> bool:
    return await _answer(gateway) == (503, "backend_unavailable")


async def _serves(gateway: AttestedGateway) -> bool:
    return (await _answer(gateway))[0] == 200
