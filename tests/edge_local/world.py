"""A small gateway behind the local and admin routes, and a real uvicorn on an ephemeral port to reach them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn

from gateway.edge import tokenize
from gateway.edge.body import ModelRules
from gateway.edge.keys import KeyRing, Principal, new_key
from gateway.edge.operations import BackendStatus, Changed, ModelCard, Question, QueueStatus, Status
from gateway.edge.responses import Cors
from gateway.edge.routes import Route
from gateway.edge.shell import Rules
from gateway.errors import Axis, Reason, Refusal
from gateway.flow.shape import Shape
from gateway.observe.demand import Change
from gateway.observe.exchange import Exchange
from gateway.observe.journal import Journal
from gateway.observe.metrics import Metrics, Names
from gateway.observe.retest import Ledger
from gateway.observe.retest_plan import NoDemand, plan

HASH = "sha256:" + "3f" * 32


class World:
    """Implements both `Gateway` and `Operations`, in memory."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self.keys = KeyRing([])
        self.add_keys(
            Principal("acme-1", "client", "acme", None),
            Principal("zeta-1", "client", "zeta", None),
            Principal("ops", "operator", None, None),
            Principal("prom", "scraper", None, None),
            Principal("kube", "prober", None, None),
        )
        self.allowed = {"acme": ("tiny", "org/name"), "zeta": ("tiny",)}
        self.not_ready: Refusal | None = None
        self.broken: Exception | None = None
        self.accounted: list[Exchange] = []
        self.pushed: list[tuple[bytes, str]] = []
        self.reload_result: Changed | Refusal = Changed({"digest": "a"}, {"digest": "b"})
        self.journal = Journal(None)
        self.ledger = Ledger()
        self.numbers = Metrics(Names())
        self.backends = [_backend("a"), _backend("b", gate="configuration_changed")]
        self.rules = Rules(self.keys, Cors(("https://chat.example",)), body_limit=100_000, body_timeout_s=0.5)

    def add_keys(self, *principals: Principal) -> None:
        entries = []
        for principal in principals:
            key, digest = new_key()
            self.tokens[principal.id] = key
            entries.append((bytes.fromhex(digest.removeprefix("sha256:")), principal))
        self.keys = KeyRing(entries, wall=lambda: 1_000.0)

    def account(self, exchange: Exchange) -> None:
        self.accounted.append(exchange)
        self.journal.write(exchange)

    # -- Gateway

    def models(self, tenant: str) -> tuple[ModelCard, ...]:
        if self.broken is not None:
            raise self.broken
        return tuple(ModelCard(name, 1_700_000_000, 2048, 512) for name in self.allowed[tenant])

    def ready(self) -> Refusal | None:
        return self.not_ready

    async def metrics(self) -> bytes:
        return self.numbers.render()

    async def count(self, route: Route, tenant: str, content_type: bytes | None, body: bytes) -> dict[str, Any] | Refusal:
        question = tokenize.read(
            route, content_type, body, lambda name: ModelRules(name, name) if name in self.allowed[tenant] else None
        )
        return question if isinstance(question, Refusal) else {"parser": question.parser, "model": question.rules.name}

    # -- Operations

    def status(self) -> Status:
        queues = (QueueStatus("interactive", 3, 4096, 1.25), QueueStatus("batch", 41, 90_112, 38.0))
        return Status("0.1.0", 5_400.0, True, None, False, "enforce", "policy.yaml", None, False, tuple(self.backends), queues)

    def records(self) -> list[dict[str, Any]]:
        return [{"id": "ab" * 32, "model": "tiny", "slices": ["generate 1-2048 in, 1-512 out, up to 8"], "valid_until": None}]

    async def push_record(self, body: bytes, signatures: tuple[str, ...], *, must_be_signed: bool) -> dict[str, Any] | Refusal:
        if not body.startswith(b"{"):
            return Refusal(Reason.INVALID_BODY, "not a record")
        self.pushed.append((body, signatures, must_be_signed))
        return {"id": "cd" * 32, "new": True, "verdicts": []}

    async def retest(self) -> dict[str, Any]:
        return self.ledger.list()

    async def retest_plan(self, model: str, share: float) -> dict[str, Any] | Refusal:
        try:
            return plan([row[3] for row in self.ledger.groups(model)], share, model)
        except NoDemand as error:
            return Refusal(Reason.INVALID_BODY, str(error))

    def explain(self, question: Question) -> dict[str, Any] | Refusal:
        if question.model not in ("tiny", "org/name"):
            return Refusal(Reason.MODEL_NOT_FOUND, "no such model", param="model")
        fits = question.input_tokens <= 2048
        return {"answer": "admitted now" if fits else "refused", "reason": "ok" if fits else "out_of_slice_input"}

    async def reload(self) -> Changed | Refusal:
        return self.reload_result

    def drain_backend(self, name: str) -> Changed | Refusal:
        return self._change(name, draining=True)

    def undrain_backend(self, name: str) -> Changed | Refusal:
        return self._change(name, draining=False)

    def reset_breaker(self, name: str) -> Changed | Refusal:
        return self._change(name, breaker="closed")

    def recent(self, limit: int, reason: str | None, tenant: str | None) -> list[dict[str, Any]]:
        return self.journal.recent(limit, reason=reason, tenant=tenant)

    def _change(self, name: str, **fields: Any) -> Changed | Refusal:
        for index, backend in enumerate(self.backends):
            if backend.name == name:
                self.backends[index] = dataclasses.replace(backend, **fields)
                before = {field: getattr(backend, field) for field in fields}
                return Changed(before, fields)
        return Refusal(Reason.UNKNOWN_ROUTE, "There is no such backend.")


def _backend(name: str, gate: str = "open") -> BackendStatus:
    verdict = {"model": "tiny", "record": "ab" * 8, "decision": "PASS" if gate == "open" else "DEFER",
               "reason": "QUALIFIED" if gate == "open" else "IDENTITY_CHANGED"}  # fmt: skip
    return BackendStatus(
        name=name, url=f"http://127.0.0.1:800{len(name)}", source="attested", gate=gate,
        gate_message=None if gate == "open" else "No record was measured on this configuration: max_num_seqs differs.",
        hash=HASH, vllm_version="0.32.0", hardware="cpu, 2 cores, 8 GiB", models=("tiny", "org/name"), breaker="closed",
        draining=False, in_flight_requests=6, in_flight_sequences=6 if gate == "open" else 0,
        reserved_tokens=9_216 if gate == "open" else 0, token_budget=20_480, foreign_requests=0,
        limits={"input": 2048, "output": 512, "concurrency": 8} if gate == "open" else {}, verdicts=(verdict,),
    )  # fmt: skip


def with_history(world: World) -> World:
    """A world that has seen something: refusals, demand outside the slices, an identity change."""
    said = [
        (Reason.OUT_OF_SLICE_INPUT, "The prompt has 6,120 tokens; what was measured ends at 2,048.", 400, 6120, 256),
        (Reason.QUEUE_TIMEOUT, "No room within 10 s; 41 requests are waiting.", 503, 900, 128),
        (Reason.CONFIGURATION_CHANGED, "The backend runs another configuration than its record was measured on.", 503, 40, 16),
        (Reason.OUT_OF_SLICE_OUTPUT, "4,096 output tokens were asked for; what was measured ends at 512.", 400, 210, 4096),
    ]
    for n in range(14):
        reason, message, status, asked, output = said[n % len(said)]
        exchange = Exchange(f"req-{n:024x}", "chat", 100.0 + n)
        exchange.tenant, exchange.model, exchange.priority_class = (
            ("acme", "tiny", "interactive") if n % 3 else ("zeta", "tiny", "batch")
        )
        exchange.shape = Shape("generate", frozenset(), asked, output, 1)
        exchange.reason, exchange.message, exchange.status = reason, message, status
        exchange.outcome, exchange.ended_at = type(exchange.outcome).REFUSED, 100.5 + n
        exchange.queue_s = 10.0 if reason is Reason.QUEUE_TIMEOUT else 0.0
        world.journal.write(exchange)
    for n in range(200):
        world.ledger.note("tiny", "a", HASH, Axis.INPUT, Shape("generate", frozenset(), 2100 + 37 * n, 128, 1), 1.7e9 + n)
        world.ledger.note(
            "tiny", "a", HASH, Axis.CONCURRENCY, Shape("generate", frozenset(), 300, 64, 1), 1.7e9 + n, wanted=9 + n % 23
        )
    world.ledger.changed(Change(1.7e9, "tiny", "b", HASH, "sha256:" + "9a" * 32, ("scheduler.max_num_seqs", "model.dtype")))
    return world


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI app with stock uvicorn; yields http://127.0.0.1:port."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http="httptools", ws="websockets-sansio", lifespan="off",
                            access_log=False, log_level="critical", proxy_headers=False)  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def raw(url: str, data: bytes) -> bytes:
    """Bytes as they are to the server, and all it answers until it closes or is quiet after a whole answer."""
    host, port = httpx.URL(url).host, httpx.URL(url).port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    answer = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while chunk := await reader.read(65536):
                answer += chunk
    writer.close()
    return answer
