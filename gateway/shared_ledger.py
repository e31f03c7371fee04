"""The retest ledgers of all replicas, kept beside each other in the shared state.

Owns three keys: the ledgers by their own name, what tells one state of them from the next, and when each was last said. Promises:
a ledger is replaced whole by the replica that keeps it, so that nothing is counted twice, however often it is said or its replica
is restarted; memory is bounded (`MOST` ledgers of `MOST_BYTES`, the longest silent go first); nothing here is on the request
path: ledgers of others are fetched when an operator asks. Talks to: `link`, through the store's connection; `observe.retest`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

import hiredis
import orjson

from gateway.observe.retest import Ledger, LedgerError
from gateway.observe.retest_merge import merged
from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

log = logging.getLogger("plimsoll.retest")

SAID_S = 2.0  # a change is told so late at most
AGAIN_S = 60.0
KEPT_MS = 30 * 86_400_000  # the demand that a replica met outlives it by so much
MOST = 128
MOST_BYTES = 256 * 1024
_SAY = b"""
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
local clock = redis.call('TIME')
local now, most, kept = clock[1] * 1000, tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('ZADD', KEYS[3], now, ARGV[1])
local gone = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - kept)
local over = redis.call('ZCARD', KEYS[3]) - #gone - most
if over > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[3], #gone, #gone + over - 1)) do gone[#gone + 1] = id end
end
for _, id in ipairs(gone) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, kept) end
"""


class SharedLedger:
    """`own` is this replica's; `due()` says when it has to be told."""

    def __init__(self, store: RedisLeases, namespace: str, own: Ledger) -> None:
        self._store, self._own = store, own
        tag = f"plimsoll:{{{LAYOUT}:{namespace}}}:"
        self._keys = (tag + "ledgers", tag + "ledgers-at", tag + "ledgers-seen")
        self._said: tuple[int, float] | None = None  # version of ours, and when
        self._others: dict[str, tuple[bytes, Ledger]] = {}

    def forgotten(self) -> None:
        """The state may have lost what was said."""
        self._said = None

    def due(self, now: float) -> bool:
        """Whether there is something to say (`now`: monotonic seconds). An empty ledger is not said."""
        if not self._own.noted:
            return False
        if self._said is None:
            return True
        version, at = self._said
        return now - at >= (SAID_S if version != self._own.version else AGAIN_S)

    async def say(self, now: float) -> None:
        """Put our ledger in place of what was there of it. Raises StateLost."""
        version, text = self._own.version, bounded(self._own)
        state = hashlib.sha256(text).hexdigest()[:16]
        words = ("EVAL", _SAY, "3", *self._keys, self._own.name, text, state, str(MOST), str(KEPT_MS))
        try:
            await self._store.link.send(*words)
        except hiredis.ReplyError as error:
            raise StateLost(f"Redis refused: {error}") from error
        self._said = (version, now)

    async def all(self) -> tuple[Ledger, int]:
        """The ledgers of all replicas as one, and how many they are; without the state, as they were when last asked for."""
        try:
            await self._fetch()
        except (StateLost, hiredis.ReplyError) as error:
            log.warning("the retest ledgers of other replicas cannot be read (%s): as last known", error)
        others = [ledger for _, ledger in self._others.values()]
        return merged([self._own, *others]), 1 + len(others)

    async def _fetch(self) -> None:
        """Read what has changed since the last time, one ledger at a time: the connection serves admissions meanwhile."""
        flat = await self._store.link.send("HGETALL", self._keys[1])
        states = {name.decode("ascii", "replace"): state for name, state in _pairs(flat)}
        states.pop(self._own.name, None)
        for gone in self._others.keys() - states.keys():
            del self._others[gone]
        for name, state in list(states.items())[:MOST]:
            if name in self._others and self._others[name][0] == state:
                continue
            text = await self._store.link.send("HGET", self._keys[0], name)
            if text is not None and len(text) <= MOST_BYTES:
                self._others[name] = (state, await asyncio.to_thread(_read, text))


def bounded(ledger: Ledger) -> bytes:
    """The ledger's document in at most `MOST_BYTES`: groups that were seen last come first, changes fill up to a quarter."""
    document = ledger.document()
    changes, left = _within(reversed(document["changes"]), MOST_BYTES // 4)
    latest = sorted(document["groups"], key=lambda row: float(row["last"]), reverse=True)
    groups, _ = _within(latest, MOST_BYTES * 3 // 4 + left - 256)
    return orjson.dumps({**document, "groups": groups[::-1], "changes": changes[::-1]})


def _within(rows: object, budget: int) -> tuple[list[object], int]:
    """As many rows, in order, as fit into so many bytes; and what is left of them."""
    kept: list[object] = []
    for row in rows:  # type: ignore[attr-defined]
        size = len(orjson.dumps(row)) + 1
        if size > budget:
            break
        kept.append(row)
        budget -= size
    return kept, budget


def _pairs(flat: object) -> list[tuple[bytes, bytes]]:
    """A hash as RESP3 gives it (a mapping), or as a flat list."""
    if isinstance(flat, dict):
        return list(flat.items())
    items = list(flat) if isinstance(flat, list) else []
    return list(zip(items[::2], items[1::2], strict=True))


def _read(text: bytes) -> Ledger:
    try:
        return Ledger.from_document(orjson.loads(text))
    except (orjson.JSONDecodeError, LedgerError) as error:
        log.warning("another replica's retest ledger is ignored: %s", error)
        return Ledger()
