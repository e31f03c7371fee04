"""Real gateways that share one real Redis, before a backend that counts: the whole of it, in processes of their own.

Owns: the counting backend (attested, so that replicas learn its own count of each gateway), and replicas as processes. Promises:
what the backend notes is what it saw, not what anybody claims; a request counts from its last byte to the end of its answer, or
until its connection is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from gateway.evidence.canonical import digest
from gateway.evidence.identity import identity_of
from gateway.evidence.model_files import tokenizer_bundle
from tests.support.attested import AttestedGateway, Box, record_from
from tests.support.client import KEY, post, wire
from tests.support.gateway import TOKENIZER, Backend, configuration_of
from tests.support.upstream import Call, Gone, ScriptedUpstream

SMALL, LARGE = Box(64, 64, 8), Box(2048, 256, 2)


class CountingUpstream(ScriptedUpstream):
    """`service_s` draws the time of an answer; `limits`: sequences at once, with and without a large request among them."""

    def __init__(self, service_s: Any, width: int = 8) -> None:
        super().__init__()
        self.service_s = service_s
        self.document = configuration_of("shared", Backend(self, width))
        self.hash = digest(self.document)
        self.script = self._serve
        self.reached: list[tuple[str, str]] = []  # (gateway, configuration) of every request that was dispatched
        self.running: dict[Call, tuple[str, int, bool]] = {}
        self.peak = self.served = 0
        self.violations: list[str] = []
        self.stranger: dict[str, Any] | None = None  # another configuration, which `shown_to` (None: everybody) see instead
        self.shown_to: set[str] | None = None
        self.engine = "e1"
        self.failing: set[str] = set()  # gateways whose requests are reset
        self.release = asyncio.Event()  # ends the calls that hold
        self.limits = {False: 8, True: 2}

    async def restart(self, stranger: dict[str, Any] | None) -> None:
        """Come back as another engine, with this configuration (None: that which was measured)."""
        self.engine, self.stranger = f"e{int(self.engine[1:]) + 1}", stranger
        await self._drop()
        self.peers = []

    @property
    def identity(self) -> dict[str, Any]:
        """The payload of GET /plimsoll/identity, as of now."""
        return self._identity(self.document)

    def _identity(self, document: dict[str, Any]) -> dict[str, Any]:
        hash_ = digest(document)
        stated = identity_of(document, hash_)
        counts: Counter[str] = Counter(gateway for gateway, _, _ in self.running.values())
        return {
            "schema": "plimsoll-identity/v1",
            "server_configuration_hash": hash_,
            "identity": {
                "model_revision": stated.model_revision, "vllm_version": stated.vllm_version,
                "server_configuration_hash": hash_, "hardware_profile": stated.hardware_profile,
            },
            "configuration": document,
            "capabilities": {},
            "runtime": {"engine_start_id": self.engine, "started_at": "2026-01-01T00:00:00Z", "foreign_in_flight": 0,
                        "gateway_in_flight": dict(counts), "api_processes": 1},
        }  # fmt: skip

    def _shown(self, call: Call) -> dict[str, Any]:
        """The configuration that this caller sees."""
        sees = self.shown_to is None or call.fields.get("x-plimsoll-gateway") in self.shown_to
        return self.stranger if self.stranger is not None and sees else self.document

    async def _stock(self, call: Call) -> None:
        if call.path == "/plimsoll/identity":
            await call.answer(json.dumps(self._identity(self._shown(call))).encode(), self._line(call))
        elif call.path == "/plimsoll/tokenizer":
            bundle = {**tokenizer_bundle(TOKENIZER, None), "chat_template_kwargs": {}}
            await call.answer(json.dumps(bundle).encode(), self._line(call))
        else:
            await super()._stock(call)

    def _line(self, call: Call) -> bytes:
        return b"x-plimsoll-config: " + digest(self._shown(call)).encode()

    async def _serve(self, call: Call) -> None:
        body = call.json()
        prompt = body["prompt"]
        large = len(prompt) > 100
        sequences = int(body.get("n") or 1)
        if call.fields["x-plimsoll-gateway"] in self.failing:
            call.reset()
            raise Gone
        self.running[call] = (call.fields["x-plimsoll-gateway"], sequences, large)
        self.reached.append((call.fields["x-plimsoll-gateway"], digest(self._shown(call))))
        self._check()
        try:
            await self._hold(call, prompt)
            done = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "usage": done,
                      "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}  # fmt: skip
            del self.running[call]  # before the last byte can be seen
            await call.answer(json.dumps(answer).encode(), self._line(call))
            self.served += 1
        finally:
            self.running.pop(call, None)

    async def _hold(self, call: Call, prompt: str) -> None:
        """The time an answer takes; ended by the gateway's closing."""
        seconds = None if prompt.startswith("hold") else self.service_s()
        waits = [asyncio.create_task(call.peer.closed.wait())]
        if seconds is None:
            waits.append(asyncio.create_task(self.release.wait()))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if call.closed:
            raise Gone

    def _check(self) -> None:
        sequences = sum(count for _, count, _ in self.running.values())
        self.peak = max(self.peak, sequences)
        limit = self.limits[any(large for _, _, large in self.running.values())]
        if sequences > limit:
            self.violations.append(f"{sequences} sequences where {limit} were measured: {sorted(self.running.values())}")


class ReplicaProcess(AttestedGateway):
    """One `plimsoll serve` of several: `url` is that of Redis. `set_clock` makes its wall clock wrong, also while it runs."""

    def __init__(self, folder: Path, upstream: CountingUpstream, url: str, *, lease_s: float = 1.0, degraded: str = "closed",
                 boxes: tuple[Box, ...] = (SMALL, LARGE), **sections: Any) -> None:  # fmt: skip
        sections = {"timeouts": {"queue_s": 30, "execution_s": 20}, **sections}
        state = {"url": url, "lease_s": lease_s, "degraded": degraded, "namespace": "test"}
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            folder, {"a": upstream.url}, [record_from(upstream.identity, boxes)], {"tiny": ["a"]}, state=state, **sections
        )

    def set_clock(self, wrong_by_s: float) -> None:
        """Its time of day, and nothing else of it: libfaketime reads the file once a second. (Under it Python's time.sleep fails,
        for want of an absolute sleep on the monotonic clock; the gateway never calls it while it serves.)"""
        (self.folder / "clock").write_text(f"{wrong_by_s:+.0f}\n")
        self.env |= {
            "LD_PRELOAD": next(str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")),
            "FAKETIME_TIMESTAMP_FILE": str(self.folder / "clock"), "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip

    def policy(self) -> dict[str, Any]:
        document = super().policy()
        for model in document["models"].values():
            model["token_budget"] = None
        return document


async def complete(port: int, prompt: str = "hello", key: str = KEY, timeout: float = 40, **fields: Any) -> int:
    """One completion that is not streamed; its status, 0 when the connection broke."""
    try:
        async with wire(port) as client:
            document = {"model": "tiny", "prompt": prompt, "max_tokens": 8, **fields}
            await client.send(post(document, path="/v1/completions", key=key))
            return (await client.response(timeout)).status
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return 0
