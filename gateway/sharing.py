"""Whether this gateway is alone or one of several, decided once from the policy.

Owns the choice of the controller and, with a shared state, the parts that agree with the other replicas. Alone, nothing stands
between a decision and its dispatch. Talks to: `flow`, `replicas`, `state`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from gateway import policy as policies
from gateway.agreeing import Asked
from gateway.apart import APART
from gateway.breaker_hints import BreakerHints
from gateway.evidence.record import dump
from gateway.fleet import Berth, Fleet
from gateway.flow.controller import Trigger
from gateway.flow.grant import Grant
from gateway.flow.observed import ObservedGrant
from gateway.flow.shared import SharedController
from gateway.forward.sightings import MIXED_WINDOW_S
from gateway.forward.watch import Counted
from gateway.observe.retest import Ledger
from gateway.replicas import Replicas
from gateway.shared_ledger import SAID_S, SharedLedger
from gateway.shared_quotas import SharedQuotas
from gateway.state.leases import StateLost
from gateway.state.news import News
from gateway.state.redis_store import RedisLeases

LEAVE_S = 0.5
NEWS_S = 0.1
SHARE_S = 60.0  # records are said again, so that they are kept and late replicas find them
DRIFT_S = MIXED_WINDOW_S / 3  # what differs is said again while it does: the others remember it for one window


class Sharing:
    """One of several replicas. `policy()` is the one in force; `count_of`: what a backend counts, by gateway."""

    def __init__(
        self,
        policy: Callable[[], policies.Policy],
        owner: str,
        on_trigger: Trigger,
        count_of: Callable[[str], Counted | None],
        fleet: Callable[[], Fleet],
        take: Callable[[str, bytes | None, tuple[str, ...]], Awaitable[None]],
        ledger: Ledger,
    ) -> None:
        first, state = policy(), policy().state
        self.degraded = True  # until the first connection
        self._fleet, self._take = fleet, take
        self._open: dict[str, str] = {}  # the configuration each gate was last open on
        self._share_at = 0.0
        self._told: dict[str, tuple[str, float]] = {}  # the one that was seen instead, and when the others were told
        self._heard: dict[str, str] = {}  # what others told, which is not told again
        self._arrived: list[tuple[str, bytes | None, tuple[str, ...]]] = []
        self._hints = BreakerHints(lambda backend, state: self._news.breaker(backend, state.value))
        self.controller = SharedController(first.queue, time.monotonic, on_trigger, first.breaker)
        self._replicas = Replicas(
            self.controller,
            share=state.degraded == "share",
            lease_s=state.lease_s,
            longest_s=lambda: policy().timeouts.execution_s,
            count_of=count_of,
            on_degraded=self._set_degraded,
        )
        self._store = self._replicas.store = RedisLeases(
            state.url,
            owner,
            namespace=state.namespace,
            lease_s=state.lease_s,
            longest_s=first.timeouts.execution_s,
            on_wake=self._replicas.woken,
            on_state=self._replicas.state,
        )

        self._agreeing = self._replicas.agreeing
        self.agreed, self.withdraw = self._agreeing.agreed, self._agreeing.withdraw
        self._replicas.quotas = SharedQuotas(self._store, state.namespace, state.lease_s)
        self.ledger = SharedLedger(self._store, state.namespace, ledger)
        self._news = News(
            self._store,
            state.namespace,
            on_drift=self._doubt,
            on_breaker=self._hint,
            on_record=lambda *what: self._arrived.append(what),
        )

    def _set_degraded(self, degraded: bool) -> None:
        self.degraded = degraded
        self._fleet().call_itself(self._store.owner + (APART if self._replicas.apart is not None else ""))
        if not degraded:
            self._share_at = 0.0  # what is there now may have forgotten everything
            self.ledger.forgotten()
            self._news.forgotten()

    def ask(self, grant: Grant) -> Asked | None:
        """As of the replicas. What was only observed, nobody is asked about."""
        return None if isinstance(grant, ObservedGrant) else self._agreeing.ask(grant)

    async def confirm(self, grant: Grant, asked: Asked | None) -> Grant:
        """Have a grant agreed with the others. Raises Refused. What was only observed holds nothing back."""
        return grant if isinstance(grant, ObservedGrant) else await self._agreeing.confirm(grant, asked)

    async def run(self) -> None:
        """Stay connected and alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._store.run())
            group.create_task(self._replicas.run(lambda: tuple(self._fleet().berths)))
            group.create_task(self._tell())

    # Beside leases

    def _doubt(self, backend: str, hash_: str) -> None:
        berth = self._fleet().berths.get(backend)
        if berth is not None:
            self._heard[backend] = hash_
            berth.watch.doubt(hash_)

    def _hint(self, owner: str, backend: str, state: str) -> None:
        fleet = self._fleet()
        if backend in fleet.berths and self._hints.heard(owner, backend, state, time.monotonic()):
            fleet.forewarned(backend)

    def breakers_elsewhere(self, backend: str) -> int:
        """How many other replicas have a breaker for the backend that is not closed."""
        return self._hints.elsewhere(backend, time.monotonic())

    async def _tell(self) -> None:
        """Tell what changed here, take what arrived; both at most `NEWS_S` late."""
        shared = None
        while True:
            await asyncio.sleep(NEWS_S)
            self.gates_changed()
            breakers = ((name, self.controller.breaker(name).state) for name in self._fleet().berths)
            self._hints.look(breakers, time.monotonic())
            arrived, self._arrived[:] = list(self._arrived), []
            for what in arrived:
                await self._take(*what)
            report, now = self._fleet().store, time.monotonic()
            if not self.degraded and (report is not shared or now >= self._share_at):
                with suppress(StateLost):  # told elsewhere; again when it is back
                    await self._news.share([
                        (name, partial(dump, record), tuple(f"{key} {value}" for key, value in report.signatures.get(name, ())))
                        for name, record in report.records.items()
                    ])  # fmt: skip
                    shared, self._share_at = report, now + SHARE_S
            if not self.degraded and self.ledger.due(now):
                with suppress(StateLost):
                    await self.ledger.say(now)

    def gates_changed(self) -> None:
        """Tell the others at once when something else answers than what a gate was open on, and again while that lasts."""
        now = time.monotonic()
        for name, berth in self._fleet().berths.items():
            if berth.watch.config.source != "attested":
                continue
            before, shown = self._open.get(name), berth.hash
            if shown is not None:
                self._open[name] = shown
            elif before is not None:
                shown = self._stranger(name, berth, before)
            if before is None or shown in (None, before):
                self._told.pop(name, None)
                continue
            told, at = self._told.get(name, ("", 0.0))
            if told != shown or now - at >= DRIFT_S:
                self._told[name] = (str(shown), now)
                self._news.drift(name, str(shown))

    def _stranger(self, name: str, berth: Berth, before: str) -> str | None:
        """What this replica itself has seen behind a closed gate that was open on `before`; None: nothing else."""
        if berth.watch.shown not in (None, before):
            return berth.watch.shown
        others = (before, self._heard.get(name))
        return next((each for each in berth.watch.observation.mixed if each not in others), None)

    async def leave(self) -> None:
        """Hand every place over to the others, as far as that can be done soon."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._replicas.leave()
                if not self.degraded and self.ledger.due(time.monotonic() + SAID_S):
                    await self.ledger.say(time.monotonic())
        except (TimeoutError, StateLost):
            return
