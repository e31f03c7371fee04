"""The backends of one policy: watched, judged against the records, warmed up, and put before the controller.

Owns, for each backend, the watch, the last decision on its gate, the record it was last open under, and which engine
starts are ready. Promises: a gate follows its observation in the same instant; a closed
gate closes the connections' expected hash with it, so that nothing is dispatched over a connection that says otherwise; every
change of identity is written to the retest ledger with the fields that differ. Talks to: `forward.watch`, `flow.gate`, the
controller, `evidence.store`, the ledger and the metrics.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from gateway import policy as policies
from gateway import probes
from gateway.counting import Counting
from gateway.edge.tokens import Counter, TokenCounter
from gateway.evidence.record import Record
from gateway.evidence.store import StoreReport
from gateway.evidence.target import Target
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed, Open
from gateway.flow.envelope import Box
from gateway.flow.gate import GateDecision, View, decide
from gateway.forward.upstream import Upstream
from gateway.forward.watch import POLL_S, Watch
from gateway.observe.demand import Change
from gateway.observe.metrics import Metrics
from gateway.observe.retest import Ledger
from gateway.warmup import WarmUp

log = logging.getLogger("plimsoll.fleet")

REVIEW_S = 5.0  # records expire without anything else happening
RESTART_S = 1.0
Question = Callable[[Controller, Watch, str, Callable[[], float]], Coroutine[Any, Any, None]]
_POLLS_A_STALL = 4  # looks at an engine's progress before its silence is called a stall


class Berth:
    """One backend and all that is kept about it."""

    __slots__ = ("decision", "drained", "preparing", "previous", "probing", "ready", "task", "unreached", "views", "watch")

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.views: dict[str, View] = {}
        self.decision: GateDecision | None = None
        self.previous: Record | None = None  # in force when the gate was last open
        self.ready: set[str] = set()  # engine starts that are warm and whose tokenizer is here
        self.preparing: asyncio.Task[None] | None = None
        self.probing: asyncio.Task[None] | None = None
        self.unreached = 0  # how often the backend went away: stands in for an engine start that is not told
        self.drained = False
        self.task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> str:
        """Names this engine start."""
        return self.watch.observation.engine or f"unnamed-{self.unreached}"

    @property
    def hash(self) -> str | None:
        """The configuration hash the gate is open on."""
        gate = self.decision.gate if self.decision is not None else None
        return gate.hash if isinstance(gate, Open) else None


class Fleet:
    """All backends. Everything here runs on the event loop; blocking work is for threads of others.

    `counting` makes the token counter that has to be there before a gate opens; `on_gate()` hears that some gate changed.
    """

    def __init__(
        self,
        controller: Controller,
        metrics: Metrics,
        ledger: Ledger,
        *,
        instance: str,
        key_of: Callable[[policies.Backend], str | None],
        counting: Counting,
        on_gate: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._controller = controller
        self._metrics = metrics
        self._ledger = ledger
        self._instance = instance
        self._key_of = key_of
        self._counting = counting
        self._on_gate = on_gate
        self._clock = clock
        self._wall = wall
        self._store = StoreReport()
        self._policy: policies.Policy | None = None
        self.berths: dict[str, Berth] = {}

    # What is wanted

    def apply(self, policy: policies.Policy) -> None:
        """Put a policy in force: backends that are new or different are watched anew, the others keep all they are."""
        old, self._policy = self._policy, policy
        for name in [n for n in self.berths if n not in policy.backends]:
            self._retire(name)
            self._controller.remove_backend(name)
        for name, config in policy.backends.items():
            berth = self.berths.get(name)
            same_timeout = old is not None and old.timeouts.connect_s == policy.timeouts.connect_s
            if berth is None or berth.watch.config != config or not same_timeout:
                if berth is not None:
                    self._retire(name)
                berth = self.berths[name] = Berth(self._watch(name, config, policy))
                berth.task = self._keep(berth.watch.run, f"watching backend {name}")
            berth.watch.poll_s = min(POLL_S, policy.timeouts.stall_s / _POLLS_A_STALL)
            berth.views = {
                model: View(Target.from_policy(m.target), m.target.require_signature, m.token_budget)
                for model, m in policy.models.items()
                if name in m.backends
            }
            self.review(name)

    def set_store(self, report: StoreReport) -> None:
        """Other records are there now."""
        self._store = report
        for name in list(self.berths):
            self.review(name)

    def call_itself(self, instance: str) -> None:
        """The name that requests bear at the backends from now on."""
        for berth in self.berths.values():
            berth.watch.upstream.call_itself(instance)

    def drain(self, name: str, drained: bool) -> None:
        """An operator takes a backend out, or puts it back."""
        self.berths[name].drained = drained
        self.review(name)

    async def run(self) -> None:
        """Review every gate now and then, until cancelled; then stop watching."""
        try:
            while True:
                await asyncio.sleep(REVIEW_S)
                for name in list(self.berths):
                    self.review(name)
        finally:
            for name in list(self.berths):
                self._retire(name)

    @property
    def store(self) -> StoreReport:
        return self._store

    def open_backends(self) -> Iterator[str]:
        """Names of the backends whose gate is open."""
        return (name for name, berth in self.berths.items() if berth.hash is not None)

    # What is seen

    def review(self, name: str) -> None:
        """Decide on the gate of one backend again, and put it in force where it differs."""
        berth, now = self.berths[name], dt.datetime.fromtimestamp(self._wall(), dt.UTC)
        seen = berth.watch.observation
        decision = decide(
            seen,
            self._store,
            berth.views,
            previous=berth.previous,
            foreign_closes=berth.watch.config.foreign == "close",
            ready=berth.engine in berth.ready,
            drained=berth.drained,
            now=now,
        )
        if decision.needs_preparation and decision.record is not None:
            self._prepare(name, berth, decision.record)
        before, berth.decision = berth.decision, decision
        gate = decision.gate
        berth.watch.expected_hash = gate.hash if isinstance(gate, Open) else self._observed_hash(berth)
        if isinstance(gate, Open):
            berth.previous = decision.record
            self._controller.set_foreign(name, seen.foreign or 0)
        if before is None or before.gate != gate:
            self._controller.set_backend(name, gate)
            self._tell(name, before, decision)
            self._on_gate()

    def _observed_hash(self, berth: Berth) -> str | None:
        """What may be dispatched to behind a closed gate: nothing, unless the policy only observes."""
        identity = berth.watch.observation.identity
        observing = self._policy is not None and self._policy.enforcement == "observe"
        return identity.hash if observing and identity is not None and identity.source == "attested" else None

    def _tell(self, name: str, before: GateDecision | None, decision: GateDecision) -> None:
        gate = decision.gate
        if isinstance(gate, Closed):
            detail = f" ({decision.detail})" if decision.detail else ""
            log.warning("backend %s is closed: %s: %s%s", name, gate.refusal.reason, gate.refusal.message, detail)
        else:
            log.info("backend %s is open on %s with %d slices", name, gate.hash[:23], len(gate.envelope.boxes))
        if decision.triggers and (before is None or before.triggers != decision.triggers):
            self._note_change(name, decision)

    def _note_change(self, name: str, decision: GateDecision) -> None:
        berth = self.berths[name]
        identity = berth.watch.observation.identity
        old = berth.previous.identity.server_configuration_hash if berth.previous is not None else None
        fields = tuple(change.field for change in decision.changes)
        for model in berth.views:
            for trigger in decision.triggers:
                self._metrics.trigger(model, name, trigger)
            self._ledger.changed(Change(self._wall(), model, name, old, identity.hash if identity else None, fields))

    def _changed(self, name: str) -> None:
        """The watch saw something new."""
        berth = self.berths.get(name)
        if berth is None:
            return
        if not berth.watch.observation.reachable:
            berth.unreached += 1
        self.review(name)

    # Before a gate opens

    def _prepare(self, name: str, berth: Berth, record: Record) -> None:
        """Have the token counter, then the warm-up; the next review finds the engine ready, or tries again."""
        if berth.preparing is not None:
            return
        engine, models = berth.engine, self._models_of(name)

        async def prepare() -> None:
            try:
                if await self._counting.learn(berth.watch, models) and await self._warm_up(berth, models, record):
                    berth.ready.add(engine)
            finally:
                berth.preparing = None
            if engine in berth.ready and self.berths.get(name) is berth:
                self.review(name)

        berth.preparing = asyncio.create_task(prepare())

    async def _warm_up(self, berth: Berth, models: Mapping[str, policies.Model], record: Record) -> bool:
        model = next((m.upstream_model or name for name, m in models.items()), "")
        return await WarmUp(berth.watch, model, record).run()

    def _models_of(self, backend: str) -> dict[str, policies.Model]:
        models = self._policy.models if self._policy is not None else {}
        return {name: model for name, model in models.items() if backend in model.backends}

    def boxes(self, model: str) -> list[Box]:
        """The slices now open for a model, on all its backends."""
        gates = [b.decision.gate for n in self._backends_of(model) if (b := self.berths.get(n)) and b.decision is not None]
        return [box for gate in gates if isinstance(gate, Open) for box in gate.envelope.boxes]

    # What the request path asks

    def upstream(self, backend: str) -> Upstream | None:
        """The connections to a backend; None when it has left the policy."""
        berth = self.berths.get(backend)
        return berth.watch.upstream if berth is not None else None

    def progress(self, backend: str) -> int | None:
        """Iterations of the backend's engine so far; None when not known."""
        berth = self.berths.get(backend)
        return berth.watch.iterations if berth is not None else None

    def undercounted(self, backend: str, expected: int, found: int) -> None:
        """A backend read more input tokens than its counter said: no bound of that counter is relied on any more."""
        counter = self._counting.of(backend)
        if isinstance(counter, TokenCounter) and not counter.saw(expected, found):
            log.error(
                "backend %s read %d input tokens, %d were counted: its bounds are off from now on", backend, found, expected
            )

    def suspect(self, backend: str) -> None:
        """A backend answered 500: one token of our own tells whether the engine is broken, or a request was odd."""
        self._ask(backend, probes.suspected)

    def forewarned(self, backend: str) -> None:
        """Another replica's breaker has opened: one token of our own, before anything else is sent."""
        self._ask(backend, probes.forewarned)

    def _ask(self, backend: str, question: Question) -> None:
        berth = self.berths.get(backend)
        if berth is not None and berth.probing is None:
            berth.probing = asyncio.create_task(self._probe(backend, berth, question))

    async def _probe(self, name: str, berth: Berth, question: Question) -> None:
        try:
            model = next((m.upstream_model or n for n, m in self._models_of(name).items()), "")
            await question(self._controller, berth.watch, model, self._clock)
        finally:
            berth.probing = None

    def counter(self, model: str) -> Counter:
        """Who counts a model's input tokens."""
        return self._counting.of_first(self._backends_of(model))

    def server_default(self, model: str) -> int | None:
        """The output limit a model's server would give a chat that names none; None when it has none or none is known."""
        for group in self._documents(model):
            sampling = group.get("default_sampling")
            limit = sampling.get("max_tokens") if isinstance(sampling, Mapping) else None
            if isinstance(limit, int) and limit > 0:
                return limit
        return None

    def max_model_len(self, model: str) -> int | None:
        """The context length of a model's server in tokens, where it is known."""
        lengths = (group.get("max_model_len") for group in self._documents(model))
        return next((length for length in lengths if isinstance(length, int)), None)

    def _documents(self, model: str) -> Iterator[Mapping[str, Any]]:
        """The `model` group of the configuration document of each backend that shows one."""
        for name in self._backends_of(model):
            berth = self.berths.get(name)
            identity = berth.watch.observation.identity if berth is not None else None
            group = identity.document.get("model") if identity is not None else None
            if isinstance(group, Mapping):
                yield group

    def _backends_of(self, model: str) -> tuple[str, ...]:
        found = self._policy.models.get(model) if self._policy is not None else None
        return found.backends if found is not None else ()

    # Tasks

    def _watch(self, name: str, config: policies.Backend, policy: policies.Policy) -> Watch:
        return Watch(
            name,
            config,
            self._key_of(config),
            instance=self._instance,
            connect_timeout_s=policy.timeouts.connect_s,
            on_change=self._changed,
            busy=lambda: self._busy(name),
            clock=self._clock,
        )

    def _busy(self, name: str) -> bool:
        backends = self._controller.snapshot(self._clock()).backends
        return any(backend.requests for backend in backends if backend.name == name)

    def _retire(self, name: str) -> None:
        berth = self.berths.pop(name)
        berth.watch.upstream.retire()
        for task in (berth.task, berth.preparing, berth.probing):
            if task is not None:
                task.cancel()

    def _keep(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        """Run `work` for ever. Should it break (a defect), that is logged and it starts again: a gate must not go unwatched."""

        async def kept() -> None:
            while True:
                task = asyncio.ensure_future(work())
                try:
                    await asyncio.wait([task])
                finally:
                    task.cancel()
                if task.cancelled():
                    return
                log.error("%s broke off; it starts again", what, exc_info=task.exception())
                await asyncio.sleep(RESTART_S)

        return asyncio.create_task(kept())
