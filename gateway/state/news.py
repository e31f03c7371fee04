"""What replicas tell each other beside leases: records that were pushed to one, and configurations that one saw change,
and breakers that opened.

Owns one channel and the keys of the records. Promises: a record is written once, under its digest, and kept for a day while any
replica has it, its signatures beside it; whoever comes later asks for what it has not; news that is lost is only late, for every
replica also looks for itself. Nothing here is on the request path. Talks to: `link`, through the store's connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

import hiredis
import orjson

from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

log = logging.getLogger("plimsoll.state")

KEPT_MS = 86_400_000
MOST_RECORDS = 1000
MOST_SIGNATURES = 64  # of one record
_ADD = b"""
redis.call('SADD', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""  # in one go: whoever dies in between leaves a key that stays for ever
Kept = tuple[str, Callable[[], bytes], tuple[str, ...]]
"""A record's name, its bytes, and its signatures as lines."""


class News:
    """`on_drift(backend, hash)`: another replica saw this one. `on_breaker(owner, backend, state)`: what its breaker is.

    `on_record(name, raw, signatures)`: a record that is not here (raw None: it is), and signatures that are not, unverified.
    """

    def __init__(
        self,
        store: RedisLeases,
        namespace: str,
        *,
        on_drift: Callable[[str, str], None],
        on_breaker: Callable[[str, str, str], None],
        on_record: Callable[[str, bytes | None, tuple[str, ...]], None],
    ) -> None:
        self._store, self._on_drift, self._on_breaker, self._on_record = store, on_drift, on_breaker, on_record
        tag = f"plimsoll:{{{LAYOUT}:{namespace}}}:"
        self._channel, self._index, self._record = tag + "news", tag + "records", tag + "record:"
        self._signed = tag + "signed:"
        self._here: dict[str, frozenset[str]] = {}  # signatures that are here, by record
        self._put: dict[str, frozenset[str]] = {}  # and those that we have put into the state
        store.hear(self._channel, self._heard)
        self._tasks: set[asyncio.Task[None]] = set()

    def drift(self, backend: str, hash_: str) -> None:
        """Tell that a backend showed another configuration than the one its gate was open on."""
        self._publish({"from": self._store.owner, "backend": backend, "hash": hash_})

    def breaker(self, backend: str, state: str) -> None:
        """Tell the state of this replica's breaker."""
        self._publish({"from": self._store.owner, "backend": backend, "breaker": state})

    async def share(self, records: Iterable[Kept]) -> None:
        """Say which records and signatures are here, and fetch those that are elsewhere. Raises StateLost."""
        link = self._store.link
        try:
            for name, raw, signatures in records:
                is_new = name not in self._put
                if is_new:
                    await link.send("SET", self._record + name, raw(), "NX", "PX", KEPT_MS)
                    await link.send("EVAL", _ADD, "1", self._index, KEPT_MS, name)
                lines = [line for line in signatures[:MOST_SIGNATURES] if line not in self._put.get(name, ())]
                if lines:
                    await link.send("EVAL", _ADD, "1", self._signed + name, KEPT_MS, *lines)
                self._put[name] = frozenset(signatures)
                self._here[name] = self._here.get(name, frozenset()) | frozenset(signatures)
                if is_new or lines:
                    self._publish({"from": self._store.owner, "record": name})
                for key in (self._record + name, self._signed + name):
                    await link.send("PEXPIRE", key, KEPT_MS)
            await link.send("PEXPIRE", self._index, KEPT_MS)
            found = [name.decode("ascii", "replace") for name in await link.send("SRANDMEMBER", self._index, MOST_RECORDS)]
            signed = [link.send("SMEMBERS", self._signed + name) for name in found]
            await asyncio.gather(*signed)
            for name, lines_of in zip(found, signed, strict=True):
                await self._fetch(name, lines_of.result())
        except hiredis.ReplyError as error:
            raise StateLost(f"Redis refused: {error}") from error

    def forgotten(self) -> None:
        """The state may have lost what was put there."""
        self._put.clear()

    async def _fetch(self, name: str, found: Iterable[bytes]) -> None:
        """Take what is not here yet of one record and its signatures."""
        lines = frozenset(line.decode("ascii", "replace") for line in found)
        raw = None
        if name not in self._here:
            raw = await self._store.link.send("GET", self._record + name)
            if raw is None:
                await self._store.link.send("SREM", self._index, name)
                return
        missing = lines - self._here.get(name, frozenset())
        if raw is not None or missing:
            self._here[name] = self._here.get(name, frozenset()) | lines
            self._on_record(name, raw, tuple(sorted(missing))[:MOST_SIGNATURES])

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
        with suppress(StateLost, hiredis.ReplyError):  # asked for again when the state is back, and once a minute
            await self._fetch(name, await self._store.link.send("SMEMBERS", self._signed + name))
