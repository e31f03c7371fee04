"""The life of a backend: opened by a record, closed by drift, opened again by another record, never by hope."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from gateway.edge.tokens import TokenCounter
from gateway.observe.exposition import render
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.server import SimulatorServer
from tests.app.conftest import FAST, Harness, policy, record_of


def sent(sim: SimulatorServer) -> int:
    """Generations that reached the engine."""
    return sum(request.path == "/v1/completions" for request in sim.requests)


async def test_it_opens_after_the_tokenizer_and_the_warm_up(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    assert sent(sim) == 8
    assert sim.peak_in_flight <= 4
    assert isinstance(harness.fleet.counter("tiny"), TokenCounter)
    assert harness.fleet.max_model_len("tiny") == 4096
    assert harness.berth.watch.expected_hash == harness.berth.hash


async def test_an_engine_that_has_worked_enough_is_not_warmed_up_again(sim: SimulatorServer, harness: Harness):
    async with httpx.AsyncClient(trust_env=False) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        for _ in range(8):
            assert (await client.post(f"{sim.url}/v1/completions", json=body)).status_code == 200
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    assert sent(sim) == 8


async def test_without_a_record_it_stays_closed_and_nothing_is_sent(sim: SimulatorServer, harness: Harness):
    harness.fleet.apply(policy(sim.url))
    await harness.until(lambda: harness.berth.watch.observation.identity is not None)
    assert harness.reason == "no_qualified_record"
    assert sent(sim) == 0
    assert harness.berth.watch.expected_hash is None


async def test_drift_closes_names_the_field_and_a_new_record_opens(sim: SimulatorServer, harness: Harness):
    first = await record_of(sim.url)
    harness.trust(first)
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    await sim.restart(max_num_seqs=8)
    await harness.until_gate("configuration_changed")
    before = sent(sim)
    assert b'plimsoll_retest_triggers_total{axis="batching_limits",backend="a",model="tiny"} 1.0' in render(
        harness.metrics.snapshot()
    )
    assert [change["fields"] for change in harness.ledger.list()["changes"]] == [["scheduler.max_num_seqs"]]
    assert sent(sim) == before
    harness.trust(first, await record_of(sim.url, warmup_requests=2))
    await harness.until_gate("open")
    assert sent(sim) == before + 2
    await sim.restart(max_num_seqs=16)
    await harness.until_gate("open")


async def test_a_dead_server_is_unavailable_and_is_warmed_up_when_it_is_back(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    await sim.stop()
    await harness.until_gate("backend_unavailable")
    await sim.start()
    await sim.restart()
    await harness.until_gate("open")
    assert sent(sim) == 16


async def test_requests_of_others_close_it_while_they_run(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    await sim.set_fault("stall;after=1;seconds=30;times=1")
    async with httpx.AsyncClient(trust_env=False) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{sim.url}/v1/completions", json=body):
            await harness.until_gate("backend_not_exclusive")
    await harness.until_gate("open")


async def test_where_the_policy_counts_them_others_take_up_concurrency(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url, foreign="count"))
    await harness.until_gate("open")
    await sim.set_fault("stall;after=1;seconds=30;times=1")
    async with httpx.AsyncClient(trust_env=False) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{sim.url}/v1/completions", json=body):
            await harness.until(lambda: harness.berth.watch.observation.foreign == 1)
            assert harness.reason == "open"


async def test_two_configurations_behind_one_url_close_it(sim: SimulatorServer, harness: Harness):
    async with SimulatorServer(SimulatorConfig(cost=FAST, max_num_seqs=8)) as other:
        ports = itertools.cycle((sim.port, other.port))

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(65_536):
                    writer.write(data)
                    await writer.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()

        async def balance(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", next(ports))
            await asyncio.gather(pipe(reader, up_writer), pipe(up_reader, writer))

        balancer = await asyncio.start_server(balance, "127.0.0.1", 0)
        async with balancer:
            harness.trust(await record_of(sim.url))
            harness.fleet.apply(policy(f"http://127.0.0.1:{balancer.sockets[0].getsockname()[1]}"))
            await harness.until_gate("mixed_identity")


async def test_an_operator_takes_it_out_and_puts_it_back(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    harness.fleet.drain("a", True)
    assert harness.reason == "backend_unavailable"
    harness.fleet.drain("a", False)
    assert harness.reason == "open"


async def test_a_policy_without_it_lets_it_go(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    watch = harness.berth.watch
    other = policy("http://127.0.0.1:9").model_copy(update={"backends": {"b": policy("http://127.0.0.1:9").backends["a"]}})
    harness.fleet.apply(
        other.model_copy(update={"models": {"tiny": other.models["tiny"].model_copy(update={"backends": ("b",)})}})
    )
    assert set(harness.fleet.berths) == {"b"}
    assert "a" not in {backend.name for backend in harness.controller.snapshot(0.0).backends}
    await asyncio.sleep(0)
    assert watch.upstream.idle == 0


async def test_a_500_is_only_a_suspicion(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    harness.fleet.suspect("a")
    await harness.until(lambda: harness.berth.probing is None)
    assert harness.controller.breaker("a").state == "closed"
    await sim.set_fault("error500;times=100")
    for _ in range(5):
        harness.fleet.suspect("a")
        await harness.until(lambda: harness.berth.probing is None)
    assert harness.controller.breaker("a").state == "open"


async def test_progress_is_polled_only_while_something_runs(sim: SimulatorServer, harness: Harness):
    harness.trust(await record_of(sim.url))
    harness.fleet.apply(policy(sim.url))
    await harness.until_gate("open")
    assert harness.fleet.progress("a") is None
    assert harness.fleet.progress("nobody") is None


@pytest.mark.parametrize("name", ["tiny", "unknown"])
async def test_a_model_without_backends_counts_nothing(harness: Harness, name: str):
    assert not isinstance(harness.fleet.counter(name), TokenCounter)
    assert harness.fleet.server_default(name) is None
