"""What replicas tell each other beside leases: records that were pushed to one, and configurations that one saw change,
and breakers that opened.

Owns one channel and the keys of the records. Promises: a record is written once, under its digest, and kept for a day while any
replica has it; whoever comes later asks for what it has not; news that is lost is only late, for every replica also looks for
itself. Nothing here is on the request path. Talks to: `link`, through the store's connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import hiredis
import orjson

from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

log = logging.getLogger("plimsoll.state")

KEPT_MS = 86_400_000
MOST_RECORDS = 1000


class News:
    """`on_drift(backend, hash)`: another replica saw this configuration. `on_breaker(owner, backend, state)`: what its breaker
    is. `on_record(raw)`: a record that is not known here."""

    def __init__(
        self,
        store: RedisLeases,
        namespace: str,
        *,
        on_drift: Callable[[str, str], None],
        on_breaker: Callable[[str, str, str], None],
        on_record: Callable[[bytes], None],
    ) -> None:
        self._store, self._on_drift, self._on_breaker, self._on_record = store, on_drift, on_breaker, on_record
        tag = f"plimsoll:{{{LAYOUT}:{namespace}}}:"
        self._channel, self._index, self._record = tag + "news", tag + "records", tag + "record:"
        self._known: set[str] = set()
        store.hear(self._channel, self._heard)
        self._tasks: set[asyncio.Task[None]] = set()

    def drift(self, backend: str, hash_: str) -> None:
        """Tell that a backend showed another configuration than the one its gate was open on."""
        self._publish({"from": self._store.owner, "backend": backend, "hash": hash_})

    def breaker(self, backend: str, state: str) -> None:
        """Tell the state of this replica's breaker."""
        self._publish({"from": self._store.owner, "backend": backend, "breaker": state})

    async def share(self, records: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
        """Say which records are here, and fetch those that are elsewhere. Raises StateLost."""
        link = self._store.link
        try:
            for name, raw in records:
                if name not in self._known:
                    await link.send("SET", self._record + name, raw(), "NX", "PX", KEPT_MS)
                    await link.send("SADD", self._index, name)
                    self._known.add(name)
                    self._publish({"from": self._store.owner, "record": name})
                await link.send("PEXPIRE", self._record + name, KEPT_MS)
            await link.send("PEXPIRE", self._index, KEPT_MS)
            found = await link.send("SRANDMEMBER", self._index, MOST_RECORDS)
        except hiredis.ReplyError as error:
            raise StateLost(f"Redis refused: {error}") from error
        for name in found:
            await self._fetch(name.decode("ascii", "replace"))

    async def _fetch(self, name: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        raw = await self._store.link.send("GET", self._record + name)
        if raw is None:
            self._known.discard(name)
        else:
            self._on_record(raw)

    def _publish(self, document: dict[str, str]) -> None:
        sent = self._store.link.send("PUBLISH", self._channel, orjson.dumps(document))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _heard(self, data: bytes) -> None:
        try:
            document = orjson.loads(data)
            who = str(document["from"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            log.warning("news that cannot be read is ignored")
            return
        if who == self._store.owner:
            return
        if "backend" in document and "hash" in document:
            self._on_drift(str(document["backend"]), str(document["hash"]))
        elif "backend" in document and "breaker" in document:
            self._on_breaker(who, str(document["backend"]), str(document["breaker"]))
        elif "record" in document:
            task = asyncio.create_task(self._look(str(document["record"])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, name: str) -> None:
        try:
            await self._fetch(name)
        except StateLost:
            self._known.discard(name)  # asked for again when the state is back
