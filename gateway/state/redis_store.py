"""Leases on Redis: one function, one round trip an operation.

Owns the library of functions, the names of the keys and the session of this replica's connection. Promises: a command of an
earlier connection grants nothing (its session is over), so that an acquire that was executed late leaves nothing behind; a
script that Redis has forgotten is sent again. The keys of a backend share one hash tag, so that they lie on one node of a
cluster; the tag begins with the version of the layout, so that replicas of two versions never read each other's.
Talks to: `nodes`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import hiredis
import orjson

from gateway.state.leases import Answer, Ask, Rules, StateLost, Verdict, View, Wake
from gateway.state.nodes import Nodes

LAYOUT = "v1"
_SOURCE = files("gateway.state").joinpath("leases.lua").read_bytes()
FUNCTION = f"plimsoll_{LAYOUT}_{hashlib.sha256(_SOURCE).hexdigest()[:12]}"  # two versions of the rules are two libraries
LIBRARY = f"#!lua name={FUNCTION}\n".encode() + _SOURCE.replace(b"FUNCTION_NAME", FUNCTION.encode())
_PRESENT = b"""
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
_KEPT_S = 120.0  # keys outlive the longest execution by so much


class RedisLeases:
    """A `LeaseStore`. `on_state(None)`: registered leases may be asked for; `on_state(why)`: the store is lost."""

    def __init__(
        self,
        url: str,
        owner: str,
        *,
        namespace: str = "plimsoll",
        lease_s: float = 10.0,
        longest_s: float = 600.0,
        timeout_s: float = 0.2,
        on_wake: Wake,
        on_state: Callable[[str | None], None],
    ) -> None:
        self.owner = owner
        self._namespace = namespace
        self._lease_ms = int(lease_s * 1000)
        self._ttl_ms = int((longest_s + max(_KEPT_S, 10 * lease_s)) * 1000)
        self._on_wake, self._on_state = on_wake, on_state
        self._session = 0
        self._channels: dict[bytes, Callable[[bytes], None]] = {}
        self._keys: dict[str, tuple[str, ...]] = {}
        self.operations = 0
        self.link = Nodes(url, timeout_s=timeout_s, on_up=self._up, on_lost=on_state, on_message=self._message)

    @property
    def connected(self) -> bool:
        return self.link.up

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await self.link.run()

    def _up(self) -> None:
        self._session += 1
        self.link.everywhere("FUNCTION", "LOAD", "REPLACE", LIBRARY)
        for channel in self._channels:
            self.link.send("SUBSCRIBE", channel)
        self._on_state(None)

    def _listen(self, backend: str) -> None:
        """Hear, from the first call for a backend on, when this replica's head there may come."""
        mine = self.owner.encode()

        def heard(data: bytes) -> None:
            owner, _, view = data.partition(b" ")
            if owner == mine:
                self._on_wake(backend, View.parse(view))

        self.hear(self._names(backend)[0] + ":wake", heard)

    def hear(self, channel: str, heard: Callable[[bytes], None]) -> None:
        """Hear a channel from now on, over every connection there will be."""
        name = channel.encode()
        if name not in self._channels:
            self._channels[name] = heard
            if self.link.up:
                self.link.send("SUBSCRIBE", name)

    def _message(self, channel: bytes, data: bytes) -> None:
        heard = self._channels.get(channel)
        if heard is not None:
            heard(data)

    # Operations

    def acquire(self, backend: str, ask: Ask, following: Ask | None) -> asyncio.Future[Answer]:
        return self._call(backend, "acquire", ask.packed(), following.packed() if following is not None else b"")

    def settle(self, backend: str, lease: str, rules: Rules, refund: float) -> asyncio.Future[Answer]:
        return self._call(backend, "settle", lease, repr(refund), rules.digest, str(len(rules.rows)))

    def beat(self, backend: str, rules: Rules, head: Ask | None, held: list[Ask] | None) -> asyncio.Future[Answer]:
        holds = b"[" + b",".join(ask.packed() for ask in held) + b"]" if held is not None else b""
        return self._call(backend, "beat", rules.digest, rules.text, head.packed() if head is not None else b"", holds)

    def reap(self, backend: str, owner: str) -> asyncio.Future[Answer]:
        return self._call(backend, "reap", owner)

    def strange(self, backend: str, owners: list[str]) -> asyncio.Future[Answer]:
        return self._call(backend, "strange", orjson.dumps(owners))

    def present(self, *, leaving: bool = False) -> asyncio.Future[tuple[str, ...]]:
        self.operations += 1
        names: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        key = f"plimsoll:{{{LAYOUT}:{self._namespace}}}:replicas"
        words = (self.owner, "0" if leaving else str(self._lease_ms), str(4 * self._lease_ms))

        def done(sent: asyncio.Future[Any]) -> None:
            if names.done():
                return
            if sent.exception() is None:
                names.set_result(tuple(sorted(name.decode() for name in sent.result())))
            else:
                names.set_exception(StateLost(str(sent.exception())))
                names.exception()  # whoever asked may have left: then nobody reads it

        self.link.send("EVAL", _PRESENT, "1", key, *words).add_done_callback(done)
        return names

    def withdraw(self, backend: str) -> asyncio.Future[Answer]:
        return self._call(backend, "withdraw")

    def _call(self, backend: str, operation: str, *more: bytes | str) -> asyncio.Future[Answer]:
        self.operations += 1
        names = self._names(backend)
        words = (
            "5", *names, operation, self.owner, str(self._session), str(self._lease_ms), str(self._ttl_ms),
            self.link.run_of(names[0]), *more,
        )  # fmt: skip
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.link.call(lambda reply, error: self._done(reply, error, answer, words), "FCALL", FUNCTION, *words)
        return answer

    def _done(
        self, reply: Any, error: Exception | None, answer: asyncio.Future[Answer], words: tuple[bytes | str, ...] | None
    ) -> None:
        if error is not None and "Function not found" in str(error) and words is not None:
            self.link.everywhere("FUNCTION", "LOAD", "REPLACE", LIBRARY)
            self.link.call(lambda again, odd: self._done(again, odd, answer, None), "FCALL", FUNCTION, *words)
            return
        if answer.done():
            return
        if error is None:
            try:
                answer.set_result(_parse(reply))
                return
            except (ValueError, TypeError, IndexError, AttributeError) as odd:
                error = hiredis.ReplyError(f"an answer that is none to what was asked: {odd}")
        if isinstance(error, hiredis.ReplyError):  # a defect, or another Redis than this needs: begin anew
            error = StateLost(f"Redis refused: {error}")
            self.link.fail(str(error))
        answer.set_exception(error)
        answer.exception()  # whoever asked may have left: then nobody reads it

    def _names(self, backend: str) -> tuple[str, ...]:
        names = self._keys.get(backend)
        if names is None:
            tag = f"plimsoll:{{{LAYOUT}:{self._namespace}:{backend}}}:"
            names = self._keys[backend] = tuple(tag + name for name in ("sum", "own", "lea", "head", "vt"))
            self._listen(backend)
        return names


def _parse(reply: list[bytes]) -> Answer:
    verdict, view = Verdict(reply[0].decode("ascii")), View.parse(reply[1])
    if verdict is Verdict.COLD:
        return Answer(verdict, view, retry_s=int(reply[2]) / 1000)
    if verdict in (Verdict.OK, Verdict.NEXT) and len(reply) > 2:
        owners, suspects = (tuple(text.decode().split(",")) if text else () for text in reply[2:4])
        return Answer(verdict, view, owners=owners, suspects=suspects)
    return Answer(verdict, view)
