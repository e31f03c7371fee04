"""A real gateway before servers that attest themselves: the simulator in a process of its own, or a real vLLM.

Owns: the policy for attested backends, records made for the configuration such a server tells, and the simulator's process.
Promises: as `GatewayProcess`; the simulator ends with its context, whatever happened in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.evidence.lab import record_for
from gateway.evidence.record import dump, record_id, validate
from tests.support.client import get
from tests.support.gateway import KEYS, GatewayProcess, hash_of

UPSTREAM_KEY = "sk-upstream"


@dataclass(frozen=True)
class Box:
    """One slice of a record: the largest sizes, and how many at once."""

    input_max: int = 1024
    output_max: int = 256
    concurrency: int = 8
    task: str = "generate"
    features: tuple[str, ...] = ()


def record_from(identity: Mapping[str, Any], boxes: Iterable[Box], warmup: str = "omitted") -> bytes:
    """The canonical bytes of a record for the server that tells `identity` (the payload of GET /plimsoll/identity).

    With `warmup` "unknown" it opens no gate.
    """
    slices = []
    raw: dict[str, Any] = {}
    for box in boxes:
        raw = record_for(identity["configuration"], box.input_max, box.output_max, box.concurrency)
        pool = {"output_tokens": {"min": 0, "max": 0}, "observed_output_tokens": {"min": 0, "max": 0}}
        kind = {"task": box.task, "features": sorted(box.features)} | (pool if box.task == "pool" else {})
        levels = {level["concurrency"]: level for level in raw["slices"][0]["levels"]}
        slices.append(raw["slices"][0] | kind | {"levels": list(levels.values())})
    raw["slices"], raw["valid_until"] = slices, None
    raw["protocol"] |= {"warmup_state": warmup, "warmup_requests": None, "kv_cache_tokens": None}
    return dump(validate(raw))


def fetch_identity(url: str, key: str = UPSTREAM_KEY) -> dict[str, Any]:
    """What the server says of itself."""
    answer = httpx.get(f"{url}/plimsoll/identity", headers={"authorization": f"Bearer {key}"}, timeout=30, trust_env=False)
    answer.raise_for_status()
    payload: dict[str, Any] = answer.json()
    return payload


class AttestedGateway(GatewayProcess):
    """`urls` by backend name; `records` are whole records as bytes; `keys` adds client keys as {key: tenant}."""

    def __init__(
        self,
        folder: Path,
        urls: Mapping[str, str],
        records: Iterable[bytes] = (),
        models: Mapping[str, list[str]] | None = None,
        *,
        api_key: str = UPSTREAM_KEY,
        keys: Mapping[str, str] | None = None,
        wait_for: Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(folder, {}, models, env={"VLLM_API_KEY": api_key}, **options)
        self.urls, self.records, self.keys = dict(urls), list(records), dict(keys or {})
        self.models = self.models or {name: [name] for name in urls}
        self._wait_for = tuple(urls if wait_for is None else wait_for)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def policy(self) -> dict[str, Any]:
        document = super().policy()
        document["backends"] = {name: {"url": url, "api_key_env": "VLLM_API_KEY"} for name, url in self.urls.items()}
        for model in document["models"].values():
            model.pop("tokenizer")
            model["token_budget"] = self.model_options.get("token_budget", "attested")
        document["keys"] += [
            {"id": f"client-{index}", "hash": hash_of(key), "role": "client", "tenant": tenant}
            for index, (key, tenant) in enumerate(self.keys.items())
        ]
        return document

    def add_record(self, raw: bytes) -> str:
        """Put a record into the directory that the gateway reads; its id."""
        identifier = record_id(validate(json.loads(raw)))
        path = self.folder / "records" / f"{identifier}.json"
        path.with_suffix(".part").write_bytes(raw)
        path.with_suffix(".part").rename(path)
        return identifier

    def _prepare(self) -> None:
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        for raw in self.records:
            self.add_record(raw)
        self.write(self.policy())

    async def _all_open(self) -> bool:
        return all([await self.is_open(name) for name in self._wait_for])

    async def gate(self, backend: str) -> str:
        """`open`, or the reason why the gate of a backend is closed, as /admin/status tells it."""
        status = (await get(self.admin_port, "/admin/status", KEYS["operator"])).json()
        return str(next(each["gate"] for each in status["backends"] if each["name"] == backend))


@asynccontextmanager
async def simulator(log: Path, *flags: str) -> AsyncIterator[str]:
    """A simulator process that heeds /sim/*; yields its URL."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "simulator", "--port", "0", "--allow-control", *flags),
            stdout=asyncio.subprocess.PIPE, stderr=errors, env={**os.environ, "VLLM_API_KEY": UPSTREAM_KEY},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, log.read_text("utf-8", "replace")
        yield str(json.loads(line)["url"])
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
        await process.wait()
