"""What replicas tell each other beside leases, over real Redis."""

from __future__ import annotations

import asyncio

from gateway.state.news import News
from gateway.state.redis_store import RedisLeases
from tests.state.stores import Replica, connect
from tests.state.test_agreement import until
from tests.support.redis_server import RedisServer


class Reader:
    """One replica's news, written down."""

    def __init__(self, name: str) -> None:
        self.replica = Replica(name)
        self.drifts: list[tuple[str, str]] = []
        self.breakers: list[tuple[str, str, str]] = []
        self.records: list[bytes] = []
        self.signed: list[tuple[str, str]] = []

    def record(self, name: str, raw: bytes | None, signatures: tuple[str, ...]) -> None:
        if raw is not None:
            self.records.append(raw)
        self.signed += [(name, line) for line in signatures]

    async def connect(self, url: str, namespace: str) -> None:
        self.task = await connect(self.replica, url, namespace)
        assert isinstance(self.replica.store, RedisLeases)
        self.news = News(
            self.replica.store,
            namespace,
            on_drift=lambda *what: self.drifts.append(what),
            on_breaker=lambda *what: self.breakers.append(what),
            on_record=self.record,
        )
        await self.news.share([])  # which is answered after the channel is heard


async def test_drift_is_heard_by_all_others_and_not_by_oneself(redis_server: RedisServer) -> None:
    readers = [Reader(name) for name in "ABC"]
    for reader in readers:
        await reader.connect(redis_server.url, "news-drift")
    readers[0].news.drift("b", "sha256:1")
    await until(lambda: readers[1].drifts == readers[2].drifts == [("b", "sha256:1")])
    assert readers[0].drifts == []
    for reader in readers:
        reader.task.cancel()


async def test_a_record_reaches_those_that_are_there_and_those_that_come_later(redis_server: RedisServer) -> None:
    first, second, late = Reader("A"), Reader("B"), Reader("C")
    await first.connect(redis_server.url, "news-record")
    await second.connect(redis_server.url, "news-record")
    await first.news.share([("ab" * 32, lambda: b"raw", ("by one",))])
    await until(lambda: second.records == [b"raw"])
    await late.connect(redis_server.url, "news-record")
    await until(lambda: late.records == [b"raw"])
    assert second.signed == late.signed == [("ab" * 32, "by one")]
    await second.news.share([("ab" * 32, lambda: b"raw", ("by one", "by two"))])
    await until(lambda: first.signed == [("ab" * 32, "by two")] and len(late.signed) == 2)
    assert second.records == [b"raw"] and first.records == []
    redis_server.client.flushdb()
    first.news.forgotten()
    await first.news.share([("ab" * 32, lambda: b"raw", ("by one",))])
    assert redis_server.client.get("plimsoll:{v1:news-record}:record:" + "ab" * 32) == b"raw"
    for key in redis_server.client.scan_iter("plimsoll:{v1:news-record}:*"):
        assert redis_server.client.pttl(key) > 0
    for reader in (first, second, late):
        reader.task.cancel()


async def test_what_is_no_news_is_ignored(redis_server: RedisServer) -> None:
    reader = Reader("A")
    await reader.connect(redis_server.url, "news-odd")
    for odd in (b"\xff", b"[]", b'{"from": "X"}', b'{"from": "X", "record": "nowhere"}'):
        redis_server.client.publish("plimsoll:{v1:news-odd}:news", odd)
    redis_server.client.publish("plimsoll:{v1:news-odd}:news", b'{"from": "X", "backend": "b", "hash": "h"}')
    await until(lambda: reader.drifts == [("b", "h")])
    assert reader.records == []
    reader.task.cancel()
    await asyncio.gather(reader.task, return_exceptions=True)
