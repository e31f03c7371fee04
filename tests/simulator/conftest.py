"""A simulator per test, fast enough for tests and still with real steps."""

from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.simulator.config import CostModel, SimulatorConfig
from gateway.simulator.server import SimulatorServer

FAST = CostModel(base_s=0.001, prefill_token_s=1e-6, decode_seq_s=1e-5, kv_token_s=0.0, logprobs_seq_s=0.0)


@pytest.fixture
async def sim() -> AsyncIterator[SimulatorServer]:
    async with SimulatorServer(SimulatorConfig(cost=FAST, allow_control=True)) as server:
        yield server


@pytest.fixture
async def client(sim: SimulatorServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=sim.url, timeout=20) as http:
        yield http
