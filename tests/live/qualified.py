"""The whole way as an operator goes it: `plimsoll qualify` on a real vLLM, then `plimsoll serve` on the record it wrote.

Owns: the run of `qualify`, and the gateway before the real server with clocks short enough for tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.live.harness import VllmServer
from tests.support.attested import AttestedGateway
from tests.support.client import within

PLAN = Path(__file__).with_name("plan.yaml")
SLOTS, INPUT_MAX, OUTPUT_MAX = 4, 512, 24  # of the plan
STALL_S = 4.0
TIMEOUTS = {"queue_s": 30, "connect_s": 2, "first_token_s": 8, "stall_s": STALL_S, "execution_s": 60, "client_write_s": 3}
BREAKER = {"consecutive_failures": 2, "cooldown_s": 1}
QUALIFY_TIMEOUT_S = 300


@dataclass(frozen=True)
class Qualified:
    """A record that was measured on this server, as `qualify` left it."""

    folder: Path
    identifier: str
    raw: bytes

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.raw)
        return document

    def level(self, concurrency: int) -> dict[str, Any]:
        """What was measured at so many at once."""
        levels = self.document["slices"][0]["levels"]
        return next(level for level in levels if level["concurrency"] == concurrency)


def command(*words: str, key: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `plimsoll`; the backend's key is in the environment."""
    return subprocess.run(
        [sys.executable, "-m", "gateway", *words],
        capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "VLLM_API_KEY": key},
    )  # fmt: skip


def qualify(server: VllmServer, folder: Path, plan: Path = PLAN) -> Qualified:
    """Measure `server`, by the plan beside this file where no other is given."""
    out = folder / "measured"
    done = command(
        *("qualify", "--backend", server.url, "--plan", str(plan), "--out", str(out), "--json"),
        *("--external-boundary", "the test machine's loopback"),
        key=server.api_key, timeout_s=QUALIFY_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    path = Path(json.loads(done.stdout.splitlines()[-1])["path"])
    return Qualified(folder, path.stem, path.read_bytes())


def gateway_before(server: VllmServer, folder: Path, *records: bytes, **sections: Any) -> AttestedGateway:
    """A gateway, not started, whose one backend and model is `tiny`."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = {"timeouts": TIMEOUTS, "breaker": BREAKER, "queue": {"max_requests": 200}, **sections}
    return AttestedGateway(folder, {"tiny": server.url}, records, api_key=server.api_key, **sections)


async def gate_is(gateway: AttestedGateway, gate: str, seconds: float) -> None:
    """Wait until the gate is `open`, or closed for this reason."""

    async def so() -> bool:
        return await gateway.gate("tiny") == gate

    await within(seconds, so, f"the gate is {gate}")


class EngineView:
    """The server's own counts, read over one connection that is not the gateway's."""

    def __init__(self, server: VllmServer) -> None:
        self._client = httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=30, trust_env=False)

    async def __aenter__(self) -> EngineView:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def metric(self, *names: str) -> float:
        """The sum of the samples of these metrics."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        starts = tuple(f"{name}{end}" for name in names for end in "{ ")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(starts))

    async def sequences(self) -> int:
        """Sequences in the engine now, running or waiting."""
        return int(await self.metric("vllm:num_requests_running", "vllm:num_requests_waiting"))

    async def requests(self) -> tuple[int, int]:
        """Requests that the middleware counts now: those of gateways, and those of others."""
        runtime = (await self._client.get("/plimsoll/identity")).json()["runtime"]
        return sum(runtime["gateway_in_flight"].values()), runtime["foreign_in_flight"]
