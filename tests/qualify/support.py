"""What the tests of this area share: small plans, a silent display, samples made by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway import policy
from gateway.qualify import plan as plans
from gateway.qualify.plan import Plan
from gateway.qualify.samples import RawSample
from gateway.qualify.session import Session, opened
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.server import SimulatorServer

# Latencies of a few milliseconds. The lag of a busy test machine says nothing here, so that no cell is void because of it.
FAST = SimulatorConfig(speed=20.0)


def plan(**changes: Any) -> Plan:
    """One cell of tiny requests at 1 and 4, three repeats."""
    cell = {
        "input_tokens": {"min": 1, "max": 64}, "output_tokens": {"min": 1, "max": 8}, "concurrency": [1, 4], "requests": 60,
        "batches": 48, "max_seconds": 30, **changes.pop("cell", {}),
    }  # fmt: skip
    value = {
        "schema": "plimsoll-plan/v1", "name": "test", "cells": [cell], "max_lag_ms": 10_000, "confidence": 0.8,
        "warmup": {"requests": 8, "window": 4, "tolerance": 1.0, "max_requests": 400}, **changes,
    }  # fmt: skip
    return plans.Plan.model_validate(value)


class Quiet:
    """A display that keeps what it heard."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.sent = 0

    def stage(self, text: str, total: int | None) -> None:
        self.stages.append(text)

    def advance(self) -> None:
        self.sent += 1

    def note(self, text: str) -> None:
        self.notes.append(text)


@asynccontextmanager
async def session_on(sim: SimulatorServer, chosen: Plan) -> AsyncIterator[Session]:
    """A session on a simulator."""
    async with opened(policy.Backend(url=sim.url), None, chosen) as session:
        yield session


def sample(**changes: Any) -> RawSample:
    """A success of 100 ms with 8 tokens, the first after 30 ms."""
    start = changes.pop("start", 0.0)
    values: dict[str, Any] = {
        "cell": 0, "concurrency": 4, "repeat": 0, "wave": 0, "index": 0, "kind": "uniform", "intended_at": start,
        "sent_at": start,
        "first_at": start + 0.03, "last_at": start + 0.1, "asked_input": 16, "asked_output": 8, "input_tokens": 16,
        "output_tokens": 8, "in_flight": 4, "status": "ok", **changes,
    }  # fmt: skip
    return RawSample(**values)
