"""A fleet in front of a real simulator, with records made for exactly what that simulator shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import policy as policies
from gateway.counting import Counting
from gateway.edge.tokens import CountPool
from gateway.errors import Axis
from gateway.evidence import lab
from gateway.evidence.identity_client import fetch_attested
from gateway.evidence.record import Record, record_id, validate
from gateway.evidence.store import StoreReport
from gateway.fleet import Berth, Fleet
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed
from gateway.flow.shape import Shape
from gateway.observe.metrics import Metrics, Names
from gateway.observe.retest import Ledger
from gateway.simulator.config import CostModel, SimulatorConfig
from gateway.simulator.server import SimulatorServer

FAST = CostModel(base_s=0.001, prefill_token_s=1e-6, decode_seq_s=1e-5, kv_token_s=0.0, logprobs_seq_s=0.0)


async def record_of(url: str, *, tokens_in: int = 256, tokens_out: int = 32, concurrency: int = 4, **protocol: Any) -> Record:
    """A sound record of the server at `url` as it runs now."""
    async with httpx.AsyncClient(trust_env=False) as client:
        seen = await fetch_attested(client, url, None)
    raw = lab.record_for(dict(seen.document), tokens_in, tokens_out, concurrency)
    raw["protocol"] |= {"kv_cache_tokens": seen.kv_cache_tokens, "warmup_requests": 8} | protocol
    raw["valid_until"] = None
    return validate(raw)


@dataclass
class Harness:
    """A fleet with one backend `a`, and what it told others."""

    fleet: Fleet
    controller: Controller
    metrics: Metrics
    ledger: Ledger
    triggers: list[tuple[str, str, Axis, Shape]] = field(default_factory=list)
    gates_changed: int = 0

    @property
    def berth(self) -> Berth:
        return self.fleet.berths["a"]

    @property
    def reason(self) -> str:
        """`open`, or why the gate is closed."""
        decision = self.berth.decision
        if decision is None:
            return "undecided"
        return decision.gate.refusal.reason.value if isinstance(decision.gate, Closed) else "open"

    async def until(self, reached: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"never: the gate is {self.reason}: {self.berth.decision}"
            self.berth.watch._wake.set()
            await asyncio.sleep(0.02)

    async def until_gate(self, reason: str) -> None:
        await self.until(lambda: self.reason == reason)

    def trust(self, *records: Record) -> None:
        self.fleet.set_store(StoreReport({record_id(r): r for r in records}))


def policy(url: str, **backend: Any) -> policies.Policy:
    raw = {"backends": {"a": {"url": url, **backend}}, "models": {"tiny": {"backends": ["a"]}}, "tenants": {"acme": {}}}
    return policies.Policy.model_validate(raw)


@pytest.fixture
async def sim() -> AsyncIterator[SimulatorServer]:
    async with SimulatorServer(SimulatorConfig(cost=FAST)) as server:
        yield server


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    pool = CountPool()
    triggers: list[tuple[str, str, Axis, Shape]] = []
    metrics = Metrics(Names(models=frozenset({"tiny"}), backends=frozenset({"a"})))
    controller = Controller(policies.Queue(), time.monotonic, lambda *a: triggers.append(a))
    ledger = Ledger()
    made: list[Harness] = []

    def count() -> None:
        if made:
            made[0].gates_changed += 1

    fleet = Fleet(
        controller, metrics, ledger, instance="test", key_of=lambda _: None, counting=Counting(pool), on_gate=count
    )  # fmt: skip
    made.append(Harness(fleet, controller, metrics, ledger, triggers))
    yield made[0]
    for name in list(fleet.berths):
        fleet._retire(name)
    pool.close()


@pytest.fixture
def records_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "records"
    directory.mkdir()
    return directory
