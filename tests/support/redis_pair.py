"""Two real Redis servers behind one address, one replicating the other asynchronously, and the failover between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import redis

from tests.support.client import within
from tests.support.delay_proxy import DelayProxy
from tests.support.redis_server import RedisServer


class RedisPair:
    """`url` is the address that clients know; it leads to the master. `lag_s`: how late the other one has what was written."""

    def __init__(self, program: str, folder: Path, lag_s: float) -> None:
        self.lag_s = lag_s
        self._master, self._other = (RedisServer(program, folder / name) for name in "ab")
        self._front: DelayProxy | None = None
        self._replication: DelayProxy | None = None

    @property
    def url(self) -> str:
        assert self._front is not None
        return f"redis://127.0.0.1:{self._front.port}/0"

    @property
    def client(self) -> redis.Redis:
        """A client of the present master."""
        return self._master.client

    async def start(self) -> None:
        """Both, replicating."""
        for server in (self._master, self._other):
            await asyncio.to_thread(server.start)
        self._front = DelayProxy(self._master.port)
        await self._front.start()
        await self._replicate()

    def stop(self) -> None:
        """End both at once."""
        self._master.stop()
        self._other.stop()

    async def close(self) -> None:
        """End both, and what leads to them."""
        self.stop()
        for proxy in (self._front, self._replication):
            if proxy is not None:
                await proxy.stop()

    async def fail_over(self, read_only_s: float) -> None:
        """The master dies with what was not yet replicated; the address leads to the other, which takes writes a little later."""
        assert self._front is not None and self._replication is not None
        written = self._master.client.info("replication")["master_repl_offset"]
        await self._replication.stop()  # what is under way in it is lost
        assert self._other.client.info("replication")["slave_repl_offset"] < written, "something was lost"
        self._front.target = self._other.port
        self._master.stop()
        await asyncio.sleep(read_only_s)
        self._other.client.replicaof("NO", "ONE")
        self._master, self._other = self._other, self._master
        await asyncio.to_thread(self._other.start)
        await self._replicate()

    async def _replicate(self) -> None:
        """The other one copies the master, and from then on follows it `lag_s` later."""
        self._replication = DelayProxy(self._master.port)
        await self._replication.start()
        self._other.client.replicaof("127.0.0.1", self._replication.port)
        await within(20, lambda: self._other.client.info("replication")["master_link_status"] == "up", "the copy is made")
        self._replication.delay_s = self.lag_s
