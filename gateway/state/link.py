"""One connection to Redis for everything: commands in order, answers in order, messages in between.

Owns the socket, the handshake (HELLO 3, AUTH, SELECT, the server's run id), and reconnecting. Promises: an answer goes to the
command it answers, whatever became of its caller, because both are queues of the same order; the oldest command without an
answer for `timeout_s` fails it and all behind it, closes the connection and tells `on_lost` at once; commands of one turn of the
event loop leave in one write; a command is never sent a second time by this module. Talks to: Redis, over hiredis's parser.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import parse_url

from gateway.state.leases import StateLost

log = logging.getLogger("plimsoll.state")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONNECT_S = 2.0
STEADY_S = 1.0  # a connection that lasted so long was a good one: the next is tried soon
_UNUSABLE = ("LOADING", "OOM", "NOAUTH", "WRONGPASS", "READONLY", "MASTERDOWN", "NOPERM", "MISCONF", "CLUSTERDOWN",
             "MOVED", "ASK", "TRYAGAIN", "NOREPLICAS", "BUSY")  # fmt: skip

Message = Callable[[bytes, bytes], None]
Receiver = Callable[[Any, Exception | None], None]
"""Takes an answer, or why there is none. Called from the socket's events; it must not raise."""


class Link(asyncio.Protocol):
    """`run` keeps it connected until cancelled. `on_up(run_id)`: commands may be sent; `on_lost(why)`: none may.

    `address`: another than the URL's. `run_id` names this life of the server; `clustered`: it is a node of a cluster.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        on_up: Callable[[str], None],
        on_lost: Callable[[str], None],
        on_message: Message,
        address: tuple[str, int] | None = None,
    ) -> None:
        self._options: dict[str, Any] = dict(parse_url(url))
        self._timeout_s = timeout_s
        self._on_up, self._on_lost, self._on_message = on_up, on_lost, on_message
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(protocolError=hiredis.ProtocolError, replyError=hiredis.ReplyError)
        self._waiting: deque[tuple[float, Receiver]] = deque()
        self._out: list[bytes] = []
        self._written = False  # something, in this round of the loop
        self._down = asyncio.Event()
        self._checking = False
        options = self._options
        self.address = address or (str(options.get("host", "localhost")), int(options.get("port", 6379)))
        self.instead: list[tuple[str, int]] = []  # other nodes of the same cluster, to be tried in turn
        self.run_id = ""
        self.clustered = False
        self.up = False

    # Commands

    def send(self, *words: bytes | str | int) -> asyncio.Future[Any]:
        """One command; its answer, or StateLost or hiredis.ReplyError."""
        if not self.up:
            return failed("there is no connection to Redis")
        return self._send(words)

    def call(self, receiver: Receiver, *words: bytes | str | int) -> None:
        """One command, whose answer is handed over in the moment in which it comes."""
        if self.up:
            self._ask(receiver, words)
        else:
            receiver(None, StateLost("there is no connection to Redis"))

    def _send(self, words: Sequence[bytes | str | int]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def receive(reply: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(reply)
            else:
                future.set_exception(error)
                future.exception()  # whoever asked may have left: then nobody reads it

        self._ask(receive, words)
        return future

    def _ask(self, receiver: Receiver, words: Sequence[bytes | str | int]) -> None:
        loop = asyncio.get_running_loop()
        packed: bytes = hiredis.pack_command(tuple(words))  # type: ignore[arg-type]  # the stub knows one word only
        # The first of a round goes at once, so that one that is alone waits for nobody; the rest go together.
        if self._written:
            self._out.append(packed)
        elif self._transport is not None:
            self._written = True
            loop.call_soon(self._flush)
            self._transport.write(packed)
        now = loop.time()
        self._waiting.append((now, receiver))
        if not self._checking:
            self._checking = True
            loop.call_at(now + self._timeout_s, self._check)

    def _flush(self) -> None:
        self._written = False
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def _check(self) -> None:
        """The oldest command without an answer decides whether Redis is still there."""
        loop = asyncio.get_running_loop()
        self._checking = False
        if not self._waiting:
            return
        due = self._waiting[0][0] + self._timeout_s
        if due <= loop.time():
            self.fail(f"no answer within {self._timeout_s * 1000:.0f} ms")
        else:
            self._checking = True
            loop.call_at(due, self._check)

    def fail(self, why: str) -> None:
        """Give the connection up: every command in flight fails, and `run` makes another one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        was_up, self.up = self.up, False
        waiting, self._waiting = self._waiting, deque()
        self._out = []
        if was_up:
            self._on_lost(why)
        for _, receive in waiting:
            receive(None, StateLost(why))
        self._down.set()

    # The socket

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self.fail(f"what came from Redis is not its protocol: {error}")

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.PushNotification):
            if reply[0] == b"message":
                self._on_message(reply[1], reply[2])
                return
            if reply[0] != b"subscribe":  # which is the answer to SUBSCRIBE, one for each channel
                return
        if not self._waiting:
            return
        _, receive = self._waiting.popleft()
        if not isinstance(reply, hiredis.ReplyError):
            receive(reply, None)
        elif str(reply).split(" ", 1)[0] in _UNUSABLE:
            receive(None, StateLost(str(reply)))
            self.fail(str(reply))
        else:
            receive(None, reply)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self.fail(str(error) if error is not None else "Redis has closed the connection")

    # Staying connected

    async def run(self) -> None:
        """Connect, and again whenever the connection is gone, until cancelled."""
        pause = FIRST_RETRY_S
        try:
            while True:
                self._down.clear()
                try:
                    async with asyncio.timeout(CONNECT_S):
                        run_id = await self._connect()
                except (OSError, TimeoutError, StateLost, hiredis.ReplyError) as error:
                    log.warning("Redis cannot be used: %s", str(error) or "no answer")
                    self.fail(str(error))
                    if self.instead:
                        self.instead.append(self.address)
                        self.address = self.instead.pop(0)
                    await asyncio.sleep(pause)
                    pause = min(LAST_RETRY_S, pause * 2)
                    continue
                since, self.up, self.run_id = asyncio.get_running_loop().time(), True, run_id
                self._on_up(run_id)
                await self._down.wait()
                if asyncio.get_running_loop().time() - since > STEADY_S:
                    pause = FIRST_RETRY_S
                await asyncio.sleep(pause)
                pause = min(LAST_RETRY_S, pause * 2)
        finally:
            self.up = False  # told to nobody: it is wanted
            self.fail("closed")

    async def _connect(self) -> str:
        loop, options = asyncio.get_running_loop(), self._options
        self._reader = hiredis.Reader(protocolError=hiredis.ProtocolError, replyError=hiredis.ReplyError)
        if "path" in options:
            transport, _ = await loop.create_unix_connection(lambda: self, options["path"])
        else:
            secure = None
            if options.get("connection_class") is not None:
                secure = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
                if options.get("ssl_certfile"):  # this replica's own, where Redis asks for one
                    secure.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
            transport, _ = await loop.create_connection(lambda: self, *self.address, ssl=secure)
        self._transport = transport
        await self._send((b"HELLO", b"3", *self._credentials()))
        if options.get("db"):
            await self._send((b"SELECT", str(options["db"])))
        text: bytes = await self._send((b"INFO", b"server"))
        self.clustered = b"redis_mode:cluster" in bytes(text)
        for line in bytes(text).splitlines():
            if line.startswith(b"run_id:"):
                return line[7:].decode("ascii")
        raise StateLost("Redis does not tell its run id")

    def _credentials(self) -> tuple[str, ...]:
        password = self._options.get("password")
        return () if password is None else ("AUTH", self._options.get("username") or "default", password)


def failed(why: str) -> asyncio.Future[Any]:
    """The answer to a command that cannot be sent."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(StateLost(why))
    future.exception()
    return future
