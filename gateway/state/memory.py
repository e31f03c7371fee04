"""Leases in memory: the rules of `leases` in plain Python, for replicas inside one process.

Owns everything about the backends it was asked for. Promises: the same answers as the script on Redis (one contract suite runs
against both); every operation is atomic because nothing in it awaits. It is the model that recorded histories are checked
against, and what the simulation of a large fleet runs on. Time is a function, in seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.state.leases import AGED_EVERY, OVERTAKINGS, STRANGE_S, WOKEN_S, Answer, Ask, Rules, Verdict, View, Wake

_NOTHING = View(0, 0, 0)


@dataclass(slots=True)
class Held:
    """A lease: its request, whose it is, and when it ends if its owner does not come back."""

    ask: Ask
    owner: str
    deadline: float


@dataclass(slots=True)
class Head:
    """The first of one replica's queue."""

    ask: Ask
    since: float
    passed: int = 0
    woken: float | None = None


@dataclass(slots=True)
class Berth:
    """One backend."""

    since: float  # nothing is granted before
    leases: dict[str, Held] = field(default_factory=dict)
    owners: dict[str, tuple[float, int]] = field(default_factory=dict)  # expiry, session
    rules: dict[str, Rules] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    vtime: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    strange: float = 0.0
    granted: Counter[int] = field(default_factory=Counter)  # by priority, while anything waited
    turns: Counter[int] = field(default_factory=Counter)  # more urgent grants when a level last had its aged turn

    def more_urgent(self, priority: int) -> int:
        """Grants to more urgent levels."""
        return sum(count for each, count in self.granted.items() if each < priority)

    def due(self, now: float, ask: Ask | None = None, since: float = 0.0) -> frozenset[int]:
        """The levels whose aged requests may pass the more urgent ones now."""
        waits = [(head.ask, head.since) for head in self.heads.values()] + ([(ask, since)] if ask is not None else [])
        aged = {each.priority for each, begun in waits if each.aged_s is not None and now - begun >= each.aged_s}
        return frozenset(level for level in aged if self.more_urgent(level) - self.turns[level] >= AGED_EVERY - 1)


class MemoryState:
    """What the replicas share. `lease_s`: after so long without a beat an owner counts as gone."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 10.0) -> None:
        self.clock, self.lease_s = clock, lease_s
        self.berths: dict[str, Berth] = {}
        self.wakes: dict[str, Wake] = {}
        self.present: dict[str, float] = {}  # and until when

    def flush(self) -> None:
        """Forget everything, as a store without persistence does."""
        self.berths.clear()
        self.present.clear()

    def berth(self, backend: str) -> Berth:
        """A backend's leases, made on first use."""
        found = self.berths.get(backend)
        if found is None:
            found = self.berths[backend] = Berth(self.clock() + self.lease_s)
        return found


class MemoryLeases:
    """A `LeaseStore` for one replica on a shared `MemoryState`."""

    connected = True

    def __init__(self, state: MemoryState, owner: str, on_wake: Wake | None = None) -> None:
        self.owner, self._state, self._session = owner, state, 1
        self.operations = 0
        if on_wake is not None:
            state.wakes[owner] = on_wake

    def reconnect(self) -> None:
        """As after a lost connection: nothing is granted until the next registration."""
        self._session += 1

    def acquire(self, backend: str, ask: Ask, following: Ask | None) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        expiry, session = berth.owners.get(self.owner, (0.0, 0))
        if expiry <= now or session != self._session or ask.rules.digest not in berth.rules:
            return _done(Answer(Verdict.UNREGISTERED, _NOTHING))
        cold = max(berth.since, berth.strange)
        if now < cold:
            self._set_head(berth, ask, now)
            return _done(Answer(Verdict.COLD, self._view(berth, self.owner, ask.rules), retry_s=cold - now))
        verdict = Verdict.DENIED
        mine = berth.heads.get(self.owner)
        since = mine.since if mine is not None and mine.ask.lease == ask.lease else now - ask.waited_s
        due = berth.due(now, ask, since)
        if following is not None and following.priority < ask.priority and ask.priority not in due:
            verdict = Verdict.EARLY
        elif _fits(berth, ask):
            verdict = self._in_the_way(berth, ask, since, due, now) or Verdict.GRANTED
        if verdict is Verdict.GRANTED:
            self._grant(berth, ask, following, now)
        else:
            self._set_head(berth, following if verdict is Verdict.EARLY else ask, now)
        if verdict in (Verdict.GRANTED, Verdict.BEHIND):
            self._wake_next(backend, berth, now)
        return _done(Answer(verdict, self._view(berth, self.owner, ask.rules)))

    def settle(self, backend: str, lease: str, rules: Rules, refund: float) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        held, mine = berth.leases.get(lease), False
        if held is not None and held.owner == self.owner:
            del berth.leases[lease]
            berth.vtime[held.ask.priority, held.ask.tenant] -= refund / held.ask.weight
            mine = self._wake_next(backend, berth, now)
        return _done(Answer(Verdict.NEXT if mine else Verdict.OK, self._view(berth, self.owner, rules)))

    def beat(self, backend: str, rules: Rules, head: Ask | None, held: list[Ask] | None) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        berth.rules[rules.digest] = rules
        expiry, session = berth.owners.get(self.owner, (0.0, 0))
        if held is not None:
            named = {ask.lease: ask for ask in held}
            for lease in [k for k, v in berth.leases.items() if v.owner == self.owner and k not in named]:
                del berth.leases[lease]
            for lease, ask in named.items():
                berth.leases.setdefault(lease, Held(ask, self.owner, now + ask.execution_s))
        elif expiry <= now or session != self._session:
            return _done(Answer(Verdict.UNREGISTERED, _NOTHING))
        berth.owners[self.owner] = (now + self._state.lease_s, self._session)
        suspects = _expire(berth, now)
        self._set_head(berth, head, now)
        mine = self._wake_next(backend, berth, now)
        view = self._view(berth, self.owner, rules)
        living = tuple(owner for owner, (until, _) in berth.owners.items() if until > now)
        return _done(Answer(Verdict.NEXT if mine else Verdict.OK, view, owners=living, suspects=suspects))

    def reap(self, backend: str, owner: str) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        if berth.owners.get(owner, (0.0, 0))[0] > now:
            return _done(Answer(Verdict.ALIVE, _NOTHING))
        return self._release(backend, owner)

    def strange(self, backend: str, owners: list[str]) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        berth.strange = now + STRANGE_S if any(owner not in berth.owners for owner in owners) else 0.0
        return _done(Answer(Verdict.OK, _NOTHING))

    def present(self, *, leaving: bool = False) -> asyncio.Future[tuple[str, ...]]:
        now, there = self._state.clock(), self._state.present
        there[self.owner] = now if leaving else now + self._state.lease_s
        self._state.present = {name: until for name, until in there.items() if until > now}
        future: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        future.set_result(tuple(sorted(self._state.present)))
        return future

    def withdraw(self, backend: str) -> asyncio.Future[Answer]:
        return self._release(backend, self.owner)

    # Inside

    def _begin(self, backend: str) -> tuple[Berth, float]:
        self.operations += 1
        return self._state.berth(backend), self._state.clock()

    def _release(self, backend: str, owner: str) -> asyncio.Future[Answer]:
        berth, now = self._begin(backend)
        for lease in [key for key, held in berth.leases.items() if held.owner == owner]:
            del berth.leases[lease]
        berth.owners.pop(owner, None)
        berth.heads.pop(owner, None)
        self._wake_next(backend, berth, now, loud=True)
        return _done(Answer(Verdict.OK, _NOTHING))

    def _grant(self, berth: Berth, ask: Ask, following: Ask | None, now: float) -> None:
        start = _tag(berth, ask)
        clock = (ask.priority, "")
        berth.vtime[clock] = max(start, berth.vtime[clock])
        berth.vtime[ask.priority, ask.tenant] = start + ask.cost / ask.weight
        berth.leases[ask.lease] = Held(ask, self.owner, now + ask.execution_s)
        others = [head.ask for head in berth.heads.values()] + ([following] if following is not None else [])
        if others:
            berth.granted[ask.priority] += 1
            if any(each.priority < ask.priority for each in others):
                berth.turns[ask.priority] = berth.more_urgent(ask.priority)
        self._set_head(berth, following, now)

    def _set_head(self, berth: Berth, ask: Ask | None, now: float) -> None:
        old = berth.heads.get(self.owner)
        if ask is None:
            berth.heads.pop(self.owner, None)
            return
        if not _waits(berth, ask):
            key = (ask.priority, ask.tenant)
            berth.vtime[key] = max(berth.vtime[key], berth.vtime[ask.priority, ""])
        same = old is not None and old.ask.lease == ask.lease
        berth.heads[self.owner] = Head(ask, old.since, old.passed) if same and old is not None else Head(ask, now - ask.waited_s)

    def _in_the_way(self, berth: Berth, ask: Ask, since: float, due: frozenset[int], now: float) -> Verdict | None:
        passed: list[Head] = []
        for head in self._others(berth, now):
            if _key(berth, head.ask, head.since, due) < _key(berth, ask, since, due):
                if _fits(berth, head.ask):
                    return Verdict.BEHIND
                if head.passed >= OVERTAKINGS:
                    return Verdict.HELD
                passed.append(head)
        for head in passed:
            head.passed += 1
        return None

    def _others(self, berth: Berth, now: float) -> Iterable[Head]:
        for owner, head in list(berth.heads.items()):
            if berth.owners.get(owner, (0.0, 0))[0] <= now:
                del berth.heads[owner]
            elif owner != self.owner and not _turn_lost(head, now):
                yield head

    def _wake_next(self, backend: str, berth: Berth, now: float, *, loud: bool = False) -> bool:
        """Tell the replica whose head is next that it may come; True when that is the caller, which its answer tells."""
        for owner, head in list(berth.heads.items()):
            if _turn_lost(head, now) or berth.owners.get(owner, (0.0, 0))[0] <= now:
                del berth.heads[owner]
        due = berth.due(now)
        fitting = [(_key(berth, h.ask, h.since, due), owner) for owner, h in berth.heads.items() if _fits(berth, h.ask)]
        if not fitting:
            return False
        owner = min(fitting)[1]
        head = berth.heads[owner]
        if loud or owner != self.owner:
            head.woken = now if head.woken is None else head.woken
            wake = self._state.wakes.get(owner)
            if wake is not None:
                wake(backend, self._view(berth, owner, head.ask.rules))
        return owner == self.owner

    @staticmethod
    def _view(berth: Berth, owner: str, rules: Rules) -> View:
        sequences, blocks, possible = _load(berth, rules)
        mine = [held.ask for held in berth.leases.values() if held.owner == owner]
        return View(sequences - sum(a.shape.sequences for a in mine), blocks - sum(a.blocks for a in mine), possible)


def _load(berth: Berth, rules: Rules) -> tuple[int, int, int]:
    """Sequences and blocks in flight, and the boxes of `rules` that hold all of it."""
    possible = (1 << len(rules.rows)) - 1
    sequences = blocks = 0
    for held in berth.leases.values():
        ask = held.ask
        sequences, blocks = sequences + ask.shape.sequences, blocks + ask.blocks
        possible &= ask.mask if ask.rules.digest == rules.digest else rules.mask(ask.shape)
    return sequences, blocks, possible


def _fits(berth: Berth, ask: Ask) -> bool:
    sequences, blocks, possible = _load(berth, ask.rules)
    if ask.rules.budget is not None and blocks + ask.blocks > ask.rules.budget:
        return False
    holding, total = ask.mask & possible, sequences + ask.shape.sequences
    return any(holding >> index & 1 and total <= row.concurrency for index, row in enumerate(ask.rules.rows))


def _expire(berth: Berth, now: float) -> tuple[str, ...]:
    """Drop what dead owners held beyond its execution deadline; the dead that still hold something are suspects."""
    dead = {owner for owner in {h.owner for h in berth.leases.values()} | set(berth.owners)
            if berth.owners.get(owner, (0.0, 0))[0] <= now}  # fmt: skip
    for lease in [k for k, h in berth.leases.items() if h.owner in dead and h.deadline <= now]:
        del berth.leases[lease]
    holders = {held.owner for held in berth.leases.values()}
    for owner in dead - holders:
        berth.owners.pop(owner, None)
    return tuple(sorted(dead & holders))


def _waits(berth: Berth, ask: Ask) -> bool:
    return any(h.ask.tenant == ask.tenant and h.ask.priority == ask.priority for h in berth.heads.values())


def _tag(berth: Berth, ask: Ask) -> float:
    own = berth.vtime[ask.priority, ask.tenant]
    return own if _waits(berth, ask) else max(own, berth.vtime[ask.priority, ""])


def _key(berth: Berth, ask: Ask, since: float, due: frozenset[int]) -> tuple[bool, int, float, float]:
    return ask.priority not in due, ask.priority, _tag(berth, ask), since


def _turn_lost(head: Head, now: float) -> bool:
    return head.woken is not None and now - head.woken > WOKEN_S


def _done(answer: Answer) -> asyncio.Future[Answer]:
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future
