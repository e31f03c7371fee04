"""What the gateway says of itself: to clients (models, tokens, health) and to operators (status, records, actions).

Owns nothing; reads and changes the parts that `app` has put together. Implements `edge.operations.Gateway` and
`Operations`. Promises: nothing here is on the data path; file and CPU work runs in threads.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway import standing
from gateway.edge import tokenize
from gateway.edge.intake import THREAD_BYTES
from gateway.edge.keys import KeyRing
from gateway.edge.operations import BackendStatus, Changed, ModelCard, Question, QueueStatus, Status
from gateway.edge.routes import Route
from gateway.edge.tokens import TokenCounter
from gateway.errors import Axis, Reason, Refusal, Refused
from gateway.evidence import signing
from gateway.evidence.record import Record, RecordError, load, record_id
from gateway.evidence.store import StoreError
from gateway.flow.breaker import Event
from gateway.flow.demand import Closed, Demand
from gateway.flow.shape import Shape, Task
from gateway.flow.snapshot import ClassSnapshot
from gateway.observe import retest_plan
from gateway.observe.exposition import render

if TYPE_CHECKING:
    from gateway.app import App

COUNT_S = 10.0
_TASKS: tuple[Task, ...] = ("generate", "pool", "transcribe")


class Desk:
    """One instance a process. `reload` puts the policy file in force again."""

    def __init__(self, app: App, reload: Callable[[], Any]) -> None:
        self._app = app
        self._reload = reload
        self._started = time.monotonic()

    @property
    def keys(self) -> KeyRing:
        return self._app.rules.keys

    # For clients

    def models(self, tenant: str) -> tuple[ModelCard, ...]:
        """The models a tenant may use, with the largest sizes that would be admitted."""
        rules = self._app.policy.tenants.get(tenant)
        return tuple(self._card(name) for name in self._app.policy.models if rules is not None and rules.may_use(name))

    def _card(self, name: str) -> ModelCard:
        backends = self._app.policy.models[name].backends
        open_ = [b for b in self._app.controller.snapshot(time.monotonic()).backends if b.name in backends and b.reason is None]
        largest = [max((b.limits[axis] for b in open_), default=None) for axis in ("input", "output")]
        return ModelCard(name, self._app.created, largest[0], largest[1], len(open_))

    def ready(self) -> Refusal | None:
        """None when every model could be served by some backend."""
        if self._app.draining:
            return Refusal(Reason.DRAINING, "The gateway is shutting down.", retry_after_s=1.0)
        for name, model in self._app.policy.models.items():
            gates = [self._gate(backend) for backend in model.backends]
            if all(isinstance(gate, Closed) or gate is None for gate in gates):
                first = next((gate.refusal for gate in gates if isinstance(gate, Closed)), None)
                why = first.message if first is not None else "no backend has been looked at yet"
                reason = first.reason if first is not None else Reason.BACKEND_UNAVAILABLE
                return Refusal(reason, f"No backend of {name} is open: {why}", retry_after_s=1.0)
        return None

    def _gate(self, backend: str) -> object:
        berth = self._app.fleet.berths.get(backend)
        return berth.decision.gate if berth is not None and berth.decision is not None else None

    async def metrics(self) -> bytes:
        self._app.path.settle_accounts()  # a scrape sees every request that has ended
        return await asyncio.to_thread(render, self._app.metrics.snapshot())

    async def count(self, route: Route, tenant: str, content_type: bytes | None, body: bytes) -> dict[str, Any] | Refusal:
        """The answer of /tokenize, /detokenize or /v1/messages/count_tokens."""
        found = self._app.rules.tenants.get(tenant)
        if found is None:
            return Refusal(Reason.MODEL_NOT_FOUND, "There is no such model.")
        read = partial(tokenize.read, route, content_type, body, found.lookup)
        question = await asyncio.to_thread(read) if len(body) > THREAD_BYTES else read()
        if isinstance(question, Refusal):
            return question
        counter = self._app.fleet.counter(question.rules.name)
        if not isinstance(counter, TokenCounter):
            return Refusal(Reason.BACKEND_UNAVAILABLE, "No tokenizer is known for this model now.", retry_after_s=1.0)
        length = self._app.fleet.max_model_len(question.rules.name)
        deadline = asyncio.get_running_loop().time() + COUNT_S
        try:
            return await self._app.pool.run(lambda: tokenize.answer(question, counter, length), deadline, len(body))
        except Refused as refused:
            return refused.refusal

    # For operators: what is

    def status(self) -> Status:
        app, now = self._app, time.monotonic()
        snapshot, not_ready = app.controller.snapshot(now), self.ready()
        waiting = {name: snapshot.classes.get(name, ClassSnapshot()) for name in app.policy.queue.classes}
        queues = [QueueStatus(n, w.requests, w.tokens, w.oldest_s if w.requests else None) for n, w in waiting.items()]
        return Status(
            version=app.version,
            uptime_s=now - self._started,
            ready=not_ready is None,
            not_ready_because=not_ready.message if not_ready is not None else None,
            draining=app.draining,
            enforcement=app.policy.enforcement,
            policy_file=str(app.policy_file),
            policy_error=app.policy_error,
            state_degraded=app.degraded,
            backends=tuple(self._backend(name) for name in app.fleet.berths),
            queues=tuple(queues),
            journal_dropped=app.journal.dropped,
        )

    def _backend(self, name: str) -> BackendStatus:
        berth = self._app.fleet.berths[name]
        decision, seen = berth.decision, berth.watch.observation
        now = next(b for b in self._app.controller.snapshot(time.monotonic()).backends if b.name == name)
        gate = decision.gate if decision is not None else None
        identity = seen.identity.identity if seen.identity is not None else None
        return BackendStatus(
            name=name,
            url=berth.watch.config.url,
            source=seen.source,
            gate=gate.refusal.reason.value if isinstance(gate, Closed) else "open" if gate is not None else "unknown",
            gate_message=_gate_words(gate.refusal, decision.detail) if decision and isinstance(gate, Closed) else None,
            hash=seen.identity.hash if seen.identity is not None else None,
            vllm_version=identity.vllm_version if identity is not None else None,
            hardware=identity.hardware_profile if identity is not None else None,
            models=tuple(berth.views),
            breaker=now.breaker,
            breaker_elsewhere=self._app.breakers_elsewhere(name),
            draining=berth.drained,
            in_flight_requests=now.requests,
            in_flight_sequences=now.sequences,
            reserved_tokens=now.reserved_tokens,
            token_budget=gate.envelope.kv_tokens if gate is not None and not isinstance(gate, Closed) else None,
            foreign_requests=seen.foreign,
            limits=now.limits,
            verdicts=tuple(standing.verdict_row(j) for j in decision.judgements) if decision is not None else (),
        )

    def records(self) -> list[dict[str, Any]]:
        store = self._app.fleet.store
        return [self._record(name, record) for name, record in store.records.items()] + [
            {"id": None, "file": each.name, "refused": each.reason} for each in store.refused
        ]

    def _record(self, name: str, record: Record) -> dict[str, Any]:
        return {
            "id": name,
            "identity": record.identity.model_dump(),
            "slices": [
                f"{s.task} {s.input_tokens.min}-{s.input_tokens.max} in, {s.output_tokens.min}-{s.output_tokens.max} out, "
                f"concurrency up to {s.levels[-1].concurrency}"
                for s in record.slices
            ],
            "started_at": record.protocol.started_at,
            "valid_until": record.valid_until,
            "verdicts": standing.of_record(self._app.fleet, name, record, dt.datetime.now(dt.UTC)),
        }

    async def retest(self) -> dict[str, Any]:
        ledger, replicas = await self._app.demand()
        return {"replicas": replicas, **ledger.list()}

    async def retest_plan(self, model: str, share: float) -> dict[str, Any] | Refusal:
        if model not in self._app.policy.models:
            return Refusal(Reason.MODEL_NOT_FOUND, f"The policy has no model {model!r}.", param="model")
        ledger, _ = await self._app.demand()
        try:
            return retest_plan.plan((row[3] for row in ledger.groups(model)), share, model)
        except retest_plan.NoDemand as error:
            return Refusal(Reason.INVALID_BODY, str(error), param="model")

    def recent(self, limit: int, reason: str | None, tenant: str | None) -> list[dict[str, Any]]:
        return self._app.journal.recent(limit, reason=reason, tenant=tenant)

    def explain(self, question: Question) -> dict[str, Any] | Refusal:
        model = self._app.rules.models.get(question.model)
        if model is None:
            return Refusal(Reason.MODEL_NOT_FOUND, f"The policy has no model {question.model!r}.", param="model")
        task = next((t for t in _TASKS if t == question.task), None)
        if task is None:
            return Refusal(Reason.INVALID_BODY, f"task is one of {', '.join(_TASKS)}.", param="task")
        tenant = self._app.rules.tenants.get(question.tenant) if question.tenant is not None else None
        if question.tenant is not None and tenant is None:
            return Refusal(Reason.INVALID_BODY, f"The policy has no tenant {question.tenant!r}.", param="tenant")
        output = question.output_tokens
        if output is None:
            default = self._app.fleet.server_default(question.model)
            found = self._app.controller.default_output(model.backends, task, question.features, question.input_tokens, default)
            output = found if found is not None else 1
        shape = Shape(task, question.features, question.input_tokens, output, question.sequences)
        now = time.monotonic()
        classes = self._app.policy.queue.classes
        name = tenant.priority_class if tenant is not None else min(classes, key=lambda c: classes[c].priority)
        demand = Demand(
            question.model, model.backends, shape, question.tenant or "", tenant.weight if tenant is not None else 1.0,
            name, classes[name].priority, now + model.queue_s, limits=tenant.limits if tenant is not None else None,
        )  # fmt: skip
        answer = self._app.controller.explain(demand, now)
        return {"asked": {**shape._asdict(), "features": sorted(shape.features)}, **_plain(asdict(answer))}

    # For operators: what may be done

    async def push_record(self, body: bytes, signatures: tuple[str, ...], *, must_be_signed: bool) -> dict[str, Any] | Refusal:
        try:
            record = await asyncio.to_thread(load, body)
            given = [signing.read_signature(line) for line in signatures]
            if must_be_signed and (problem := self._unsigned(record, given)) is not None:
                return Refusal(Reason.NOT_PERMITTED, f"Over this address only signed records are taken: {problem}")
            name = record_id(record)
            new = name not in self._app.fleet.store.records
            await asyncio.to_thread(self._app.store.put, record)
            for signature in given:
                if signing.holds(record, signature):
                    await asyncio.to_thread(self._app.store.put_signature, name, signature)
        except (RecordError, signing.SignatureError) as error:
            return Refusal(Reason.INVALID_BODY, f"This is not a usable record: {error}")
        except StoreError as error:
            return Refusal(Reason.INVALID_BODY, f"The record cannot be stored: {error}")
        await self._app.look_at_records(who=None)
        verdicts = standing.of_record(self._app.fleet, name, record, dt.datetime.now(dt.UTC))
        return {"id": name, "new": new, "verdicts": verdicts}

    def _unsigned(self, record: Record, given: list[signing.Signature]) -> str | None:
        """Why no key that some model of the policy trusts has signed the record; None when one has."""
        trusted = {key for model in self._app.policy.models.values() for key in model.target.require_signature or ()}
        try:
            signing.require(record, given, trusted)
        except signing.SignatureError as error:
            return str(error)
        return None

    async def reload(self) -> Changed | Refusal:
        result = await self._reload()
        if isinstance(result, str):
            return Refusal(Reason.INVALID_BODY, f"The policy file is refused, the last good one stays in force: {result}")
        return Changed(result.before, result.after)

    def drain_backend(self, name: str) -> Changed | Refusal:
        return self._set_drained(name, drained=True)

    def undrain_backend(self, name: str) -> Changed | Refusal:
        return self._set_drained(name, drained=False)

    def _set_drained(self, name: str, *, drained: bool) -> Changed | Refusal:
        berth = self._app.fleet.berths.get(name)
        if berth is None:
            return _no_backend()
        before = {"drained": berth.drained}
        self._app.fleet.drain(name, drained)
        return Changed(before, {"drained": drained})

    def reset_breaker(self, name: str) -> Changed | Refusal:
        if name not in self._app.fleet.berths:
            return _no_backend()
        breaker = self._app.controller.breaker(name)
        before = breaker.state.value
        breaker.apply(Event.RESET, time.monotonic())
        self._app.controller.sweep(time.monotonic())
        return Changed({"breaker": before}, {"breaker": breaker.state.value})


def _no_backend() -> Refusal:
    return Refusal(Reason.UNKNOWN_ROUTE, "The policy has no such backend.")


def _gate_words(refusal: Refusal, detail: str | None) -> str:
    return f"{refusal.message}: {detail}" if detail else refusal.message


def _plain(answer: dict[str, Any]) -> dict[str, Any]:
    refusal = answer.pop("refusal")
    if refusal is not None:
        axis = refusal["axis"]
        answer["refusal"] = {**refusal, "reason": refusal["reason"].value, "axis": axis.value if isinstance(axis, Axis) else axis}
    return answer
