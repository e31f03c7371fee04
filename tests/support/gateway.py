"""A real gateway: `plimsoll serve` in a process of its own, with a policy, records and keys made for the test.

Owns: the process, its folder and its two ports. Promises: `start` returns when every gate is open; `stop` ends the process
and gives its exit code; nothing of it is left. Backends are `declared`, each with a configuration and a record of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gateway.evidence.canonical import digest
from gateway.evidence.identity import identity_of
from gateway.evidence.lab import record_for
from gateway.evidence.record import dump, record_id, validate
from tests.support.client import KEY, get, within
from tests.support.upstream import ScriptedUpstream

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "gateway" / "simulator" / "model"
KEYS = {"client": KEY, "other": "sk-other", "operator": "sk-operator", "scraper": "sk-scraper", "prober": "sk-prober"}
START_S = 60.0
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LISTENS = re.compile(r"(?:serves .* on|operators:) https?://127\.0\.0\.1:(\d+)")


class Sample(NamedTuple):
    """One line of the exposition."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Backend:
    """One backend of a test: how many at once were measured, and up to which size."""

    upstream: ScriptedUpstream
    concurrency: int = 64
    input_max: int = 4096
    output_max: int = 512
    features: tuple[str, ...] = ()
    task: str = "generate"
    extra: dict[str, Any] = field(default_factory=dict)  # more keys of the policy's backend section
    url: str | None = None


def configuration_of(name: str, backend: Backend) -> dict[str, Any]:
    """A configuration document that no other backend has."""
    return {
        "schema": "plimsoll-configuration/v1",
        "model": {"id": f"test-{name}", "revision": "0123abcd", "dtype": "float32", "quantization": None, "max_model_len": 8192},
        "parallelism": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "scheduler": {"max_num_seqs": backend.concurrency, "policy": "fcfs"},
        "versions": {"vllm": backend.upstream.version},
        "hardware": {"profile": "a scripted backend"},
    }


def record_of(name: str, backend: Backend) -> tuple[str, bytes]:
    """Id and canonical bytes of the record that opens the gate of `backend`."""
    raw = record_for(configuration_of(name, backend), backend.input_max, backend.output_max, backend.concurrency)
    raw["protocol"] |= {
        "warmup_state": "omitted",
        "warmup_requests": None,
        "kv_cache_tokens": None,
        "identity_source": "declared",
    }
    raw["valid_until"] = None
    box = raw["slices"][0]
    box |= {"features": sorted(backend.features), "task": backend.task}
    if backend.task == "pool":
        box["output_tokens"] = box["observed_output_tokens"] = {"min": 0, "max": 0}
    if backend.concurrency == 1:
        del box["levels"][0]  # the lab's half level would be the full one again
    record = validate(raw)
    return record_id(record), dump(record)


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class GatewayProcess:
    """`backends` by name; `models` maps a model's name to the backends it uses (default: one model a backend, of its name).

    `sections` are merged over the policy: `timeouts={"stall_s": 1}`, `queue=...`, `server=...`, `tenants=...`.
    """

    def __init__(
        self,
        folder: Path,
        backends: Mapping[str, Backend],
        models: Mapping[str, list[str]] | None = None,
        *,
        model_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **sections: Any,
    ) -> None:
        self.folder = folder
        self.backends = dict(backends)
        self.models = dict(models) if models is not None else {name: [name] for name in backends}
        self.model_options = dict(model_options or {})
        self.sections = sections
        self.env = dict(env or {})
        self.port = 0
        self.admin_port = 0
        self.process: asyncio.subprocess.Process | None = None

    # The folder

    def policy(self) -> dict[str, Any]:
        """The policy as a document; a test may change a copy and `write` it."""
        target = {"conditional": "admit"}
        document: dict[str, Any] = {
            "server": {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"},
            "records": "records",
            "backends": {name: self._backend(name, backend) for name, backend in self.backends.items()},
            "models": {
                name: {
                    "backends": used,
                    "target": target,
                    "tokenizer": str(TOKENIZER),
                    "token_budget": None,
                    **self.model_options,
                }
                for name, used in self.models.items()
            },
            "tenants": {"acme": {}, "other": {"class": "batch"}},
            "keys": [
                {"id": name, "hash": hash_of(key), "role": "client" if name in ("client", "other") else name}
                | ({"tenant": "acme" if name == "client" else "other"} if name in ("client", "other") else {})
                for name, key in KEYS.items()
            ],
            "journal": {"path": "journal.jsonl"},
        }
        for name, section in self.sections.items():
            document[name] = {**document.get(name, {}), **section} if isinstance(section, Mapping) else section
        return document

    def _backend(self, name: str, backend: Backend) -> dict[str, Any]:
        document = configuration_of(name, backend)
        stated = identity_of(document, digest(document))
        identity = {
            "model_revision": stated.model_revision,
            "vllm_version": stated.vllm_version,
            "server_configuration_hash": stated.server_configuration_hash,
            "hardware_profile": stated.hardware_profile,
            "configuration": document,
        }
        return {"url": backend.url or backend.upstream.url, "identity": identity, **backend.extra}

    def write(self, policy: Mapping[str, Any]) -> None:
        """Put a policy into the file."""
        (self.folder / "policy.yaml").write_text(yaml.safe_dump(dict(policy), sort_keys=False))

    async def reload(self, **sections: Any) -> None:
        """Merge `sections` over the policy as it stands, and wait until that is in force."""
        self.sections = {**self.sections, **sections}
        await self.reload_document(self.policy())

    async def reload_document(self, document: Mapping[str, Any]) -> None:
        """Put this policy in force."""
        applied = await self.value("plimsoll_policy_reloads_total", result="applied")
        self.write(document)
        self.signal(signal.SIGHUP)

        async def in_force() -> bool:
            return await self.value("plimsoll_policy_reloads_total", result="applied") > applied

        await within(5, in_force, "the new policy is in force")

    def _prepare(self) -> None:
        records = self.folder / "records"
        records.mkdir(parents=True, exist_ok=True)
        for name, backend in self.backends.items():
            identifier, raw = record_of(name, backend)
            (records / f"{identifier}.json").write_bytes(raw)
        self.write(self.policy())

    # The process

    async def start(self) -> None:
        """Start and wait until every gate is open."""
        self._prepare()
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "serve", "--policy", str(self.folder / "policy.yaml"),
                stdout=log, stderr=log, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **self.env},
            )  # fmt: skip
        try:
            await within(START_S, self._listens, "the gateway listens")
            await within(START_S, self._all_open, "every gate is open")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error

    def _listens(self) -> bool:
        assert self.process is not None and self.process.returncode is None, self.log()
        ports = _LISTENS.findall(self.log())
        if len(ports) < 2:
            return False
        self.port, self.admin_port = int(ports[0]), int(ports[1])
        return True

    async def _all_open(self) -> bool:
        try:
            return {s.labels["backend"] for s in await self.series("plimsoll_envelope_limit")} >= set(self.backends)
        except ConnectionRefusedError:  # said, and not yet listening
            return False

    async def is_open(self, backend: str) -> bool:
        """Whether the gate of a backend is open."""
        return any(s.labels.get("backend") == backend for s in await self.series("plimsoll_envelope_limit"))

    async def opened(self, backend: str) -> None:
        """Wait until the gate of a backend that was away is open."""
        await within(5, lambda: self.is_open(backend), f"the gate of {backend} is open")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the gateway."""
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, timeout: float = 10) -> int:
        """Wait for the end of the process; its exit code."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), timeout)

    async def stop(self) -> int:
        """Drain, or kill when that takes too long."""
        assert self.process is not None
        if self.process.returncode is None:
            self.signal()
            try:
                return await self.ended()
            except TimeoutError:
                self.process.kill()
        return await self.ended()

    async def __aenter__(self) -> GatewayProcess:
        try:
            await self.start()
        except BaseException:
            if self.process is not None and self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def log(self) -> str:
        """What it wrote to standard error so far."""
        path = self.folder / "log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def rss_kb(self) -> int:
        """Resident memory now, in kB."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])

    def open_files(self) -> int:
        """File descriptors now open."""
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    # What it tells

    async def scrape(self) -> str:
        """The exposition, as Prometheus would get it."""
        answer = await get(self.port, "/metrics", KEYS["scraper"])
        assert answer.status == 200, answer
        return answer.body.decode()

    async def series(self, name: str, text: str | None = None) -> list[Sample]:
        """The samples of one metric (full sample name, as `plimsoll_requests_total`); of `text`, or of a scrape made now."""
        text = await self.scrape() if text is None else text
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return [Sample(dict(_LABEL.findall(line)), float(line.rsplit(" ", 1)[1])) for line in lines]

    async def value(self, name: str, text: str | None = None, **labels: str) -> float:
        """The sum of the samples of a metric whose labels agree with `labels`."""
        samples = await self.series(name, text)
        return sum(sample.value for sample in samples if all(sample.labels.get(k) == v for k, v in labels.items()))

    async def status(self) -> Any:
        """GET /admin/status."""
        return (await get(self.admin_port, "/admin/status", KEYS["operator"])).json()

    async def breaker(self, backend: str) -> str:
        """The state of a backend's breaker, as the gauges tell it: up to 0.2 s late."""
        return next(s.labels["state"] for s in await self.series("plimsoll_breaker_state")
                    if s.labels["backend"] == backend and s.value)  # fmt: skip

    async def breaker_is(self, backend: str, *states: str) -> None:
        """Wait until the gauges tell one of `states`."""

        async def told() -> bool:
            return await self.breaker(backend) in states

        await within(2, told, f"the breaker of {backend} is {' or '.join(states)}")

    async def in_flight(self) -> float:
        """Sequences at all backends."""
        return await self.value("plimsoll_in_flight_sequences")

    async def queued(self) -> float:
        """Requests that wait."""
        return await self.value("plimsoll_queue_requests")

    async def settled(self, timeout: float = 5) -> None:
        """Wait until nothing is in flight and nothing waits; fails when that does not happen in time."""

        async def empty() -> bool:
            text = await self.scrape()
            return not any([await self.value(name, text) for name in ("plimsoll_in_flight_sequences", "plimsoll_queue_requests")])

        await within(timeout, empty, "nothing in flight and nothing queued")

    def journal(self) -> list[dict[str, Any]]:
        """The accounts written so far (a line may take 100 ms to come)."""
        return [json.loads(line) for line in self._lines()]

    def _lines(self) -> list[bytes]:
        """The journal's whole lines."""
        path = self.folder / "journal.jsonl"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    async def account(self, request_id: str, timeout: float = 2) -> dict[str, Any]:
        """The journal's line about one request, by the id its answer bore or its client sent."""
        deadline = time.monotonic() + timeout
        while True:
            for line in self._lines():
                if request_id.encode() in line and request_id in (
                    (row := json.loads(line))["request_id"],
                    row["client_request_id"],
                ):
                    return dict(row)
            assert time.monotonic() < deadline, f"no line about {request_id}"
            await asyncio.sleep(0.02)
