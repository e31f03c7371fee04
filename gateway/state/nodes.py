"""One Redis or all the masters of a Redis Cluster, as one connection.

Owns the first connection (the home: topology, messages) and, for a cluster, one more to each master, and which slot is whose.
Promises: it is up when every master is, and lost when one of them is, for a part of a fleet's backends that can be agreed on is
worse to operate than none; a slot that has moved, or a failover, is a loss that ends with the new table; a command goes to the
master of its key, those of one master in order. Talks to: `link`.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import hiredis
from redis.crc import key_slot

from gateway.state.leases import StateLost
from gateway.state.link import CONNECT_S, Link, Message, Receiver, failed

SLOTS = 16384
_ANYWHERE = frozenset({"PUBLISH", "SUBSCRIBE"})  # the cluster carries messages to every node
_AFTER_COUNT = frozenset({"FCALL", "EVAL"})  # whose key stands behind the number of keys


class Range(NamedTuple):
    """Slots `first` to `last`, and who serves them."""

    last: int
    first: int
    address: tuple[str, int]
    node: bytes


class Nodes:
    """`run` keeps everything connected until cancelled. `on_up()`: commands may be sent; `on_lost(why)`: none may."""

    def __init__(
        self, url: str, *, timeout_s: float, on_up: Callable[[], None], on_lost: Callable[[str], None], on_message: Message
    ) -> None:
        self._url, self._timeout_s, self._on_message = url, timeout_s, on_message
        self._on_up, self._on_lost = on_up, on_lost
        self._home = self._link(None, self._home_up)
        self._ranges: list[tuple[Range, Link]] = []
        self._slots: dict[str, int] = {}
        self._others: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._learning: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.up = False

    def _link(self, address: tuple[str, int] | None, on_up: Callable[[str], None]) -> Link:
        return Link(
            self._url, timeout_s=self._timeout_s, on_up=on_up, on_lost=self._lost, on_message=self._on_message, address=address
        )

    # Commands

    def send(self, *words: bytes | str | int) -> asyncio.Future[Any]:
        """One command, to the master of its key; its answer, or StateLost or hiredis.ReplyError."""
        if not self.up:
            return failed("there is no connection to Redis")
        return self._for(words).send(*words)

    def call(self, receiver: Receiver, *words: bytes | str | int) -> None:
        """One command, to the master of its key, whose answer is handed over in the moment in which it comes."""
        if self.up:
            self._for(words).call(receiver, *words)
        else:
            receiver(None, StateLost("there is no connection to Redis"))

    def _for(self, words: tuple[bytes | str | int, ...]) -> Link:
        if not self._ranges or words[0] in _ANYWHERE:
            return self._home
        return self._of(str(words[3 if words[0] in _AFTER_COUNT else 1]))

    def everywhere(self, *words: bytes | str | int) -> None:
        """One command to every master; nobody waits for the answers."""
        for link in {id(link): link for _, link in self._ranges}.values() if self._ranges else (self._home,):
            link.send(*words).add_done_callback(lambda done: done.cancelled() or done.exception())

    def run_of(self, key: str) -> str:
        """Names this life of the server that holds a key: another after each restart."""
        return self._of(key).run_id if self._ranges else self._home.run_id

    def _of(self, key: str) -> Link:
        tag = key.partition("{")[2].partition("}")[0] or key
        slot = self._slots.get(tag)
        if slot is None:
            slot = self._slots[tag] = key_slot(tag.encode())
        return self._ranges[bisect.bisect_left(self._ranges, slot, key=lambda each: each[0].last)][1]

    def fail(self, why: str) -> None:
        """Give everything up, and begin anew."""
        self._lost(why)

    # Staying connected

    async def run(self) -> None:
        """Connect, and again whenever something is gone, until cancelled."""
        try:
            await self._home.run()
        finally:
            self.up = False
            for task in (*self._others.values(), *([self._learning] if self._learning is not None else [])):
                task.cancel()

    def _home_up(self, run_id: str) -> None:
        if self._learning is not None:
            self._learning.cancel()
        if not self._home.clustered:
            self.up = True
            self._on_up()
            return
        self._learning = asyncio.ensure_future(self._learn())

    async def _learn(self) -> None:
        """Read who serves what, and connect to all of them."""
        try:
            async with asyncio.timeout(CONNECT_S):
                mine: bytes = await self._home.send("CLUSTER", "MYID")
                table = sorted(_range(row) for row in await self._home.send("CLUSTER", "SLOTS"))
                self._connect(table, mine)
                while not all(link.up for _, link in self._ranges):
                    self._changed.clear()
                    await self._changed.wait()
        except (StateLost, TimeoutError, hiredis.ReplyError, ValueError) as error:
            self._lost(f"the cluster cannot be used: {error or 'a master does not answer'}")
            return
        self.up = True
        self._on_up()

    def _connect(self, table: list[Range], mine: bytes) -> None:
        """Connect to every master; whatever was known before is forgotten. Raises ValueError where slots are missing."""
        if sum(each.last - each.first + 1 for each in table) != SLOTS:
            raise ValueError("not every slot is served")
        self._forget()
        links: dict[tuple[str, int], Link] = {}
        for each in table:
            address = (each.address[0] or self._home.address[0], each.address[1])
            if each.node == mine:
                links[address] = self._home
            elif address not in links:
                link = links[address] = self._link(address, lambda _: self._changed.set())
                self._others[address] = asyncio.ensure_future(link.run())
            self._ranges.append((each, links[address]))
        self._home.instead = [*links]  # where to ask, should the home be gone for good

    def _forget(self) -> None:
        for task in self._others.values():
            task.cancel()
        self._others, self._ranges = {}, []

    def _lost(self, why: str) -> None:
        """One of them is gone: all are, until everything is known again."""
        was_up, self.up = self.up, False
        self._forget()
        if self._home.up:
            self._home.fail(why)
        if was_up:
            self._on_lost(why)


def _range(row: list[Any]) -> Range:
    """One row of CLUSTER SLOTS: first, last, the master, its replicas."""
    host, port, node = row[2][:3]
    return Range(int(row[1]), int(row[0]), (bytes(host or b"").decode("ascii"), int(port)), bytes(node))
