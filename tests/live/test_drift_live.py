"""Another configuration behind the same URL, under load: nothing is dispatched to it until it has been measured.

Afterwards the same server is started with other tokenizers, for their counts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.live.conftest import Start
from tests.live.counting import differences
from tests.live.harness import MODELS, VllmServer
from tests.live.qualified import EngineView, gate_is, gateway_before
from tests.support.attested import AttestedGateway, Box, record_from
from tests.support.client import KEY, within
from tests.support.gateway import KEYS

pytestmark = pytest.mark.asyncio(loop_scope="session")
WORKERS = 6
BOX = Box(512, 24, 4)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "How deep?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def drifting(vllm_factory: Start) -> VllmServer:
    """A server of this module's own, for it is restarted."""
    return vllm_factory()


class Load:
    """Clients that never stop; what they were told, counted."""

    def __init__(self, gateway: AttestedGateway) -> None:
        self.told: Counter[str] = Counter()
        self._url = gateway.url
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        headers = {"authorization": f"Bearer {KEY}"}
        self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=120, trust_env=False)
        self._tasks = [asyncio.create_task(self._run()) for _ in range(WORKERS)]
        return self

    async def _run(self) -> None:
        while True:
            answer = await self._client.post("/v1/chat/completions", json=BODY)
            self.told[answer.headers.get("x-plimsoll-reason", str(answer.status_code))] += 1
            await asyncio.sleep(0.01 if answer.status_code == 200 else 0.1)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()


async def generated(server: VllmServer) -> int:
    """Prompt tokens that the engine has read since its start: not zero after a single request, whoever sent it."""
    async with EngineView(server) as view:
        return int(await view.metric("vllm:prompt_tokens_total"))


async def test_a_restart_with_other_flags_under_load(drifting: VllmServer, tmp_path: Path) -> None:
    async with gateway_before(drifting, tmp_path, record_from(drifting.identity(), [BOX])) as gateway:
        async with Load(gateway) as load:
            await within(30, lambda: load.told["200"] >= WORKERS, "the gateway serves")
            assert await generated(drifting) > 0
            await asyncio.to_thread(drifting.restart, *drifting.flags, "--max-num-seqs", "8")
            await gate_is(gateway, "configuration_changed", 30)
            load.told.clear()
            await within(30, lambda: load.told.total() >= 5 * WORKERS, "the clients have come again")
            assert set(load.told) == {"configuration_changed"}
        assert await generated(drifting) == 0, "nothing was dispatched to what nobody has measured"
        await refused_and_told(gateway)
        await reopened(gateway, drifting)


async def refused_and_told(gateway: AttestedGateway) -> None:
    """The caller gets a 503 that names the field; so do the metric and the ledger."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json=BODY)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert "max_num_seqs" in answer.json()["error"]["message"]
    assert await gateway.value("plimsoll_retest_triggers_total", axis="batching_limits", backend="tiny") == 1
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEYS['operator']}"}, trust_env=False) as operator:
        ledger = (await operator.get(f"http://127.0.0.1:{gateway.admin_port}/admin/retest")).text
    assert "scheduler.max_num_seqs" in ledger


async def reopened(gateway: AttestedGateway, server: VllmServer) -> None:
    """A record of the new configuration, pushed to the running gateway, opens the gate."""
    raw = record_from(server.identity(), [BOX])
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEYS['operator']}"}, trust_env=False) as operator:
        pushed = await operator.post(f"http://127.0.0.1:{gateway.admin_port}/admin/records", content=raw)
    assert pushed.status_code == 201, pushed.text
    await gate_is(gateway, "open", 30)
    async with Load(gateway) as load:
        await within(30, lambda: load.told["200"] >= WORKERS, "the gateway serves")
    assert set(load.told) == {"200"}
    assert await generated(server) > 0


@pytest.mark.parametrize("model", ["sentencepiece", "nfkc"])
async def test_counts_with_another_tokenizer(drifting: VllmServer, model: str) -> None:
    await asyncio.to_thread(drifting.restart, *drifting.flags, model=MODELS / model)
    compared, found = await differences(drifting)
    assert compared > 500
    assert found == []
