"""The composition root: every part is made here, once, and handed to those that need it.

Owns the policy in force and the parts made from it. Promises: a policy takes effect whole or not at all; what a reload cannot
change (addresses, the journal's file, shared state) is said and left as it is. Talks to everything; nothing talks to it but the
server around it and the desk beside it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gateway import changes, standing
from gateway import policy as policies
from gateway.counting import Counting
from gateway.credentials import backend_key
from gateway.desk import Desk
from gateway.edge.admin import admin_app
from gateway.edge.count_pool import CountPool
from gateway.edge.intake import Intake
from gateway.edge.keys import FailureLimiter, KeyRing
from gateway.edge.local import local_app
from gateway.edge.oidc import Tokens
from gateway.edge.operations import Changed
from gateway.edge.path import DataPath
from gateway.edge.private import Private
from gateway.edge.protocol import Bounds
from gateway.edge.responses import Cors
from gateway.edge.retry_budget import RetryBudget
from gateway.edge.rules import PathRules
from gateway.edge.shell import Rules
from gateway.errors import Axis, PlimsollError
from gateway.evidence.record import RecordError, load, record_id
from gateway.evidence.signing import SignatureError, holds, read_signature
from gateway.evidence.store import RecordStore, StoreError, StoreReport
from gateway.fleet import Fleet
from gateway.flow.controller import Controller
from gateway.flow.shape import Shape
from gateway.forward.upstream import Upstream
from gateway.forward.watch import Counted
from gateway.gauges import Facts, Gauges
from gateway.ledgers import Accounts
from gateway.observe.audit import AuditError, AuditLog, Entry
from gateway.observe.journal import Journal
from gateway.observe.metrics import Metrics, Names
from gateway.observe.retest import Ledger
from gateway.observe.retest_file import LedgerFile
from gateway.observe.tracing import open_tracer
from gateway.queue_time import check_queue_times, queue_s
from gateway.sharing import Sharing

log = logging.getLogger("plimsoll")

LOOK_S = 1.0
BUFFERED_BYTES = 256 * 1024 * 1024  # request bodies held at once, over all connections


class App:
    """All parts of one gateway process. Made on the running event loop; `start` then `close`."""

    def __init__(self, policy: policies.Policy, policy_file: Path) -> None:
        self.version = version("plimsoll-gateway")
        self.created = int(time.time())
        self.instance = f"plimsoll-{secrets.token_hex(6)}"
        self.policy, self.policy_file = policy, policy_file
        self.policy_error: str | None = None
        self.store = RecordStore(policy.records)
        self._report: StoreReport | None = None
        self._store_error: str | None = None
        self._secret = _secret(policy)

        self.metrics = Metrics(_names(policy))
        self.journal = Journal(policy.journal.path)
        self.tracer = open_tracer(
            policy.tracing.otlp_endpoint, policy.tracing.sample_ratio, lambda: time.time() - time.monotonic()
        )
        self._ledger_file = LedgerFile(policy.records / f".retest-{policy.server.listen.replace(':', '-')}.json")
        self.ledger = self._ledger_file.ledger
        self.pool = CountPool()
        self.sharing = self._sharing() if policy.state.url != "memory" else None
        self.controller = (
            self.sharing.controller
            if self.sharing is not None
            else Controller(policy.queue, time.monotonic, self._trigger, policy.breaker)
        )
        self.controller.set_enforcement(observe=policy.enforcement == "observe")
        self.fleet = Fleet(
            self.controller,
            self.metrics,
            self.ledger,
            instance=self.instance,
            key_of=backend_key,
            counting=Counting(self.pool),
            on_gate=self._gate_changed,
        )
        self.tokens = Tokens(policy.oidc)
        self.rules = self._rules()
        self.retries = RetryBudget(policy.retries, time.monotonic())
        limiter = FailureLimiter()  # one allowance, whichever route the bad key was tried on
        accounts = Accounts(self.journal, self.ledger, self.metrics, self.fleet, self.tracer)
        self.path = DataPath(
            self.rules,
            _bounds(policy),
            controller=self.controller,
            intake=Intake(self.controller, self.fleet, limiter),
            backends=self.fleet,
            metrics=self.metrics,
            journal=accounts,
            retries=self.retries,
            upstreams=self._upstreams,
            agreement=self.sharing,
        )
        facts = Facts(
            classes=lambda: tuple(self.policy.queue.classes),
            draining=lambda: self.draining,
            degraded=lambda: self.degraded,
            breakers_elsewhere=self.breakers_elsewhere,
            policy_stale=lambda: self.policy_error is not None,
            journal_dropped=lambda: self.journal.dropped,
            version=self.version,
        )
        Gauges(self.metrics, self.controller, self.fleet, facts)
        self.desk = Desk(self, self.reload)
        self.audit = AuditLog(policy.audit.path)
        self.local = local_app(self.desk, self._shell_rules, accounts.finish, limiter)
        self.admin = admin_app(self.desk, self._admin_rules, accounts.finish, self.audit, limiter=limiter)
        self.private = Private(self._admin_rules, _bounds(policy), accounts.finish, limiter)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self.path.draining

    @property
    def degraded(self) -> bool:
        """Whether the state that replicas share cannot be reached."""
        return self.sharing is not None and self.sharing.degraded

    def breakers_elsewhere(self, backend: str) -> int:
        """How many other replicas have a breaker for the backend that is not closed."""
        return self.sharing.breakers_elsewhere(backend) if self.sharing is not None else 0

    def _sharing(self) -> Sharing:
        def count_of(backend: str) -> Counted | None:
            berth = self.fleet.berths.get(backend)
            return berth.watch.counted if berth is not None else None

        return Sharing(
            lambda: self.policy, self.instance, self._trigger, count_of, lambda: self.fleet, self._take_record, self.ledger
        )

    async def demand(self) -> tuple[Ledger, int]:
        """What was asked for outside the slices, of all replicas, and how many they are."""
        return (self.ledger, 1) if self.sharing is None else await self.sharing.ledger.all()

    async def _take_record(self, name: str, raw: bytes | None, signatures: tuple[str, ...]) -> None:
        """A record that was pushed to another replica, or signatures of one that is here; only those that hold are kept."""

        def store() -> None:
            record = load(raw) if raw is not None else self.store.get(name)
            self.store.put(record)
            for signature in map(read_signature, signatures):
                if holds(record, signature):
                    self.store.put_signature(record_id(record), signature)

        try:
            await asyncio.to_thread(store)
        except (RecordError, StoreError, SignatureError) as error:
            log.warning("a record from another replica cannot be taken up: %s", error)
            return
        await self.look_at_records("replica")

    # Life

    async def start(self) -> None:
        """Read the records, put the policy in force, begin to watch and to tick."""
        self._ledger_file.check()
        await self.look_at_records()
        await self.tokens.refresh()
        self.fleet.apply(self.policy)
        for work in (self.path.run, self.private.run, self.fleet.run, self.tokens.run, self._look):
            self._tasks.append(asyncio.create_task(work()))
        if self.sharing is not None:
            self._tasks.append(asyncio.create_task(self.sharing.run()))

    async def close(self) -> None:
        """Stop everything that runs, and write what has to be kept."""
        if self.sharing is not None:
            await self.sharing.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ledger_file.keep(time.monotonic(), last=True)
        self._ledger_file.release()
        self.tracer.close()
        self.pool.close()
        await asyncio.to_thread(self.journal.close)

    async def drain(self, seconds: float) -> None:
        """Refuse what comes, let what runs finish for so long, end the rest with an error of its own."""
        await self.path.drain(time.monotonic() + seconds)

    # The policy

    async def reload_for(self, who: str) -> None:
        """As `reload`, because of a signal or of the file; the audit log says so where it changed or refused something."""
        result = await self.reload()
        if isinstance(result, str):
            await self._note(Entry(who, "policy reload", "refused: invalid_body", after={"policy_error": result}))
        elif result.before or result.after:
            await self._note(Entry(who, "policy reload", "done", result.before, result.after))

    async def _note(self, entry: Entry) -> None:
        try:
            await self.audit.record(entry, time.time())
        except AuditError as error:  # nobody asked who could be told
            log.error("%s; what it should have said: %s by %s, %s", error, entry.what, entry.who, entry.result)

    async def reload(self) -> Changed | str:
        """Read the policy file again. What that changed, or why it is not in force: the last good one stays then."""
        old = self.policy
        try:
            fresh = await asyncio.to_thread(policies.load, self.policy_file)
            self._apply(fresh)
        except PlimsollError as error:
            self.policy_error = str(error)
            self.metrics.reload("refused")
            log.error("the policy file is refused, the last good one stays in force: %s", error)
            return self.policy_error
        self.policy_error = None
        self.metrics.reload("applied")
        log.info("the policy file is in force")
        return changes.of_policy(old, fresh)

    def _apply(self, fresh: policies.Policy) -> None:
        check_queue_times(fresh, self._report.records if self._report is not None else {})
        for backend in fresh.backends.values():
            backend_key(backend)  # a key that is not there is found out before anything has changed
        for name, old, new in _fixed(self.policy, fresh):
            if old != new:
                kept = changes.without_credentials(str(old))
                log.warning("%s cannot be changed while running: %s stays in force until a restart", name, kept)
        self.policy, self.store = fresh, RecordStore(fresh.records)
        self.tokens.configure(fresh.oidc)
        self.metrics.set_names(_names(fresh))
        self.controller.set_limits(fresh.queue, fresh.breaker)
        self.controller.set_enforcement(observe=fresh.enforcement == "observe")
        self.path.bounds = self.private.bounds = _bounds(fresh)
        self.retries.set_limits(fresh.retries)
        self.fleet.apply(fresh)
        self._refresh_rules()

    def _rules(self) -> PathRules:
        waits = {n: queue_s(m, self.policy.timeouts.queue_s, self.fleet.boxes(n)) for n, m in self.policy.models.items()}
        return PathRules.from_policy(
            self.policy, secret=self._secret, queue_s=waits, keys=KeyRing.from_policy(self.policy, tokens=self.tokens.find)
        )

    def _refresh_rules(self) -> None:
        """Waits follow from the records in force, so a gate that changes makes new rules too."""
        self.rules = self.path.rules = self._rules()

    def _gate_changed(self) -> None:
        self._refresh_rules()
        if self.sharing is not None:
            self.sharing.gates_changed()

    def _shell_rules(self) -> Rules:
        server = self.policy.server
        return Rules(self.rules.keys, self.rules.cors, server.max_body_bytes, server.body_timeout_s)

    def _admin_rules(self) -> Rules:
        return replace(self._shell_rules(), cors=Cors(()))  # pages of other origins are let to callers' routes alone

    # What is looked at again and again

    async def _look(self) -> None:
        seen = _stamp(self.policy_file)
        while True:
            await asyncio.sleep(LOOK_S)
            stamp = _stamp(self.policy_file)
            if stamp != seen and stamp is not None:
                seen = stamp
                await self.reload_for("file")
            await self.look_at_records()
            await self._ledger_file.keep(time.monotonic())

    async def look_at_records(self, who: str | None = "file") -> None:
        """Take up what has changed in the directory of records; `who` is told to the audit log, None where it knows already."""
        try:
            report = await asyncio.to_thread(self.store.load, self._report)
        except StoreError as error:
            if str(error) != self._store_error:
                log.error("the records cannot be read, those known stay in force: %s", error)
            self._store_error = str(error)
            return
        self._store_error = None
        if report is self._report:
            return
        known = {each.name for each in self._report.refused} if self._report is not None else set()
        for each in report.refused:
            if each.name not in known:
                log.warning("record file %s is refused: %s", each.name, each.reason)
        old, self._report = self._report, report
        self.fleet.set_store(report)
        if old is not None:
            standing.tell(self.fleet, report.records.keys() - old.records.keys(), dt.datetime.now(dt.UTC))
        if old is not None and who is not None:
            changed = changes.of_records(old.stamps, report.stamps)
            await self._note(Entry(who, "records", "done", changed.before, changed.after))

    # What the parts ask of each other

    def _trigger(self, model: str, backend: str, axis: Axis, shape: Shape) -> None:
        self.metrics.trigger(model, backend, axis)
        berth = self.fleet.berths.get(backend)
        self.ledger.note(model, backend, berth.hash if berth is not None else None, axis, shape, time.time())

    def _upstreams(self) -> Iterator[Upstream]:
        return (berth.watch.upstream for berth in self.fleet.berths.values())


def _fixed(old: policies.Policy, new: policies.Policy) -> Iterator[tuple[str, object, object]]:
    """What a reload leaves as it is."""
    yield "server.listen", old.server.listen, new.server.listen
    yield "server.admin_listen", old.server.admin_listen, new.server.admin_listen
    yield "server.tls", old.server.tls, new.server.tls
    yield "journal.path", old.journal.path, new.journal.path
    yield "tracing", old.tracing, new.tracing
    yield "state", old.state, new.state


def _names(policy: policies.Policy) -> Names:
    return Names(
        models=frozenset(policy.models),
        classes=frozenset(policy.queue.classes),
        tenants=frozenset(policy.tenants),
        backends=frozenset(policy.backends),
    )


def _bounds(policy: policies.Policy) -> Bounds:
    server = policy.server
    return Bounds(
        max_body_bytes=server.max_body_bytes,
        body_timeout_s=server.body_timeout_s,
        keep_alive_s=server.keep_alive_s,
        max_connections=server.max_connections,
        max_connections_per_address=server.max_connections_per_address,
        client_write_s=policy.timeouts.client_write_s,
        max_buffered_bytes=max(BUFFERED_BYTES, 2 * server.max_body_bytes),
    )


def _secret(policy: policies.Policy) -> bytes:
    """What users' names and cache salts are hashed under: the same for every replica that holds the same backend keys."""
    keys = sorted(key for backend in policy.backends.values() if (key := backend_key(backend)) is not None)
    if not keys:
        return secrets.token_bytes(32)
    return hashlib.blake2b("\n".join(keys).encode(), person=b"plimsoll-salt").digest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Tells one state of a file from the next, through symbolic links; None while it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
