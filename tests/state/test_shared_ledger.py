"""Every replica's retest ledger at every other, over real Redis: once each, whoever dies, within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from gateway import shared_ledger
from gateway.errors import Axis
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.observe.demand import Change
from gateway.observe.retest import Ledger
from gateway.observe.retest_file import LedgerFile, load, save
from gateway.shared_ledger import MOST_BYTES, SharedLedger, bounded
from gateway.state.redis_store import RedisLeases
from tests.state.stores import Replica, connect
from tests.support.redis_server import RedisServer


class Keeper:
    """One replica with a ledger."""

    def __init__(self, name: str, ledger: Ledger | None = None) -> None:
        self.replica, self.ledger = Replica(name), ledger or Ledger()

    async def connect(self, url: str, namespace: str) -> Keeper:
        self.task = await connect(self.replica, url, namespace)
        assert isinstance(self.replica.store, RedisLeases)
        self.shared = SharedLedger(self.replica.store, namespace, self.ledger)
        return self

    def asked(self, count: int, size: int = 3000) -> None:
        for _ in range(count):
            self.ledger.note("tiny", "a", "h", Axis.INPUT, Shape("generate", NO_FEATURES, size, 10, 1), 1.0)

    async def count(self) -> int:
        """Requests that left the slices, over all replicas."""
        ledger, _ = await self.shared.all()
        return sum(group.count for *_, group in ledger.groups())


async def keepers(server: RedisServer, namespace: str, names: str) -> list[Keeper]:
    return [await Keeper(name).connect(server.url, namespace) for name in names]


async def test_each_shows_the_demand_of_all_and_nothing_twice(redis_server: RedisServer) -> None:
    made = await keepers(redis_server, "ledger-all", "ABC")
    for number, keeper in enumerate(made):
        keeper.asked(number + 1)
        await keeper.shared.say(0.0)
    assert [await keeper.count() for keeper in made] == [6, 6, 6]
    made[0].asked(4)
    for _ in range(3):
        await made[0].shared.say(1.0)
    assert [await keeper.count() for keeper in made] == [10, 10, 10]
    for key in redis_server.client.scan_iter("plimsoll:{v1:ledger-all}:*"):
        assert redis_server.client.pttl(key) > 0
    for keeper in made:
        keeper.task.cancel()


async def test_a_restart_is_the_same_ledger_and_a_dead_replica_stays(redis_server: RedisServer, tmp_path: Path) -> None:
    (stays,) = await keepers(redis_server, "ledger-restart", "A")
    gone = await Keeper("B").connect(redis_server.url, "ledger-restart")
    gone.asked(5)
    assert save(tmp_path / "ledger.json", gone.ledger.document())
    gone.asked(1)  # not kept any more
    await gone.shared.say(0.0)
    gone.task.cancel()
    assert await stays.count() == 6
    back = await Keeper("B2", load(tmp_path / "ledger.json")).connect(redis_server.url, "ledger-restart")
    assert await back.count() == 5
    back.asked(2)
    await back.shared.say(0.0)
    assert await stays.count() == await back.count() == 7
    for keeper in (stays, back):
        keeper.task.cancel()


async def test_without_the_state_the_last_known_is_shown_and_after_a_flush_all_is_said_again(redis_server: RedisServer) -> None:
    a, b = await keepers(redis_server, "ledger-lost", "AB")
    a.asked(1)
    b.asked(2)
    await a.shared.say(0.0)
    await b.shared.say(0.0)
    assert await a.count() == 3
    a.replica.store.link.fail("cut")  # type: ignore[attr-defined]
    assert await a.count() == 3
    redis_server.client.flushdb()
    assert await b.count() == 2
    assert not b.shared.due(1.0)
    b.shared.forgotten()
    assert b.shared.due(1.0)
    for keeper in (a, b):
        keeper.task.cancel()


async def test_as_many_ledgers_as_agreed_the_longest_silent_go(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_ledger, "MOST", 3)
    (one,) = await keepers(redis_server, "ledger-most", "A")
    for _ in range(5):
        ledger = Ledger()
        ledger.note("tiny", "a", "h", Axis.INPUT, None, 1.0)
        await SharedLedger(one.replica.store, "ledger-most", ledger).say(0.0)  # type: ignore[arg-type]
        await asyncio.sleep(0.002)
    assert redis_server.client.hlen("plimsoll:{v1:ledger-most}:ledgers") == 3
    assert await one.count() == 3
    one.task.cancel()


def test_an_empty_ledger_is_not_told_and_a_change_soon() -> None:
    ledger = Ledger()
    shared = SharedLedger(None, "n", ledger)  # type: ignore[arg-type]  # nothing is sent
    assert not shared.due(100.0)
    ledger.note("tiny", "a", "h", Axis.INPUT, None, 1.0)
    assert shared.due(100.0)
    shared._said = (ledger.version, 100.0)
    assert not shared.due(100.0 + shared_ledger.SAID_S) and shared.due(100.0 + shared_ledger.AGAIN_S)
    ledger.note("tiny", "a", "h", Axis.INPUT, None, 1.0)
    assert not shared.due(100.1) and shared.due(100.0 + shared_ledger.SAID_S)


def test_what_is_told_has_a_bound_and_the_latest_are_in_it() -> None:
    ledger = Ledger()
    for n in range(400):
        for size in range(0, 8000, 40):
            ledger.note(f"model-{n}", "a", "h" * 64, Axis.INPUT, Shape("generate", NO_FEATURES, size, size, 1 + size), float(n))
        ledger.changed(Change(float(n), "tiny", "a", "h" * 64, f"{n}" * 32, ("x" * 400,)))
    text = bounded(ledger)
    assert MOST_BYTES // 2 < len(text) <= MOST_BYTES
    again = Ledger.from_document(orjson.loads(text))
    assert again.groups()[0][0] == "model-399" and again.changes[-1].at == 399.0


def test_two_gateways_on_one_file_keep_one_each(tmp_path: Path) -> None:
    path = tmp_path / ".retest-0.0.0.0-8080.json"
    first, second = LedgerFile(path), LedgerFile(path)
    for number, file in enumerate((first, second)):
        file.ledger.note("tiny", "a", "h", Axis.INPUT, None, float(number))
        asyncio.run(file.keep(0.0))
    assert sorted(each.name for each in tmp_path.glob(".retest*.json")) == [
        ".retest-0.0.0.0-8080-2.json", ".retest-0.0.0.0-8080.json",
    ]  # fmt: skip
    first.release()
    third = LedgerFile(path)
    assert third.ledger.name == first.ledger.name != second.ledger.name
    for file in (second, third):
        file.release()
