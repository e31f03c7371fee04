"""A scripted backend on a raw socket: what it says, byte for byte, is the test's choice, and it sees what reaches it.

Owns: one listening port, the connections to it, and the list of calls (requests on the data path) it was sent. Stock
endpoints (/version, /v1/models, /metrics) and the gateway's own probe are answered here, so that a script sees nothing but
what a caller caused. Promises: a call knows the moment in which the gateway closed its connection, whatever its script does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

Script = Callable[["Call"], Awaitable[None]]
OWN_CLIENT = b"user-agent: plimsoll"  # what the gateway asks on its own account, off the data path


class Gone(ConnectionError):
    """The other side has closed."""


class Peer(asyncio.Protocol):
    """One accepted connection: a buffer of what came, and the moment the other side left."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self.upstream = upstream
        self.buffer = bytearray()
        self.closed_at: float | None = None
        self.closed = asyncio.Event()
        self.calls = 0
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.upstream.peers.append(self)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._more.set()

    def eof_received(self) -> bool:
        self._left()
        return True  # our side stays open: a script may still want to speak

    def connection_lost(self, error: Exception | None) -> None:
        self._left()

    def _left(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.monotonic()
        self.closed.set()
        self._more.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drained(self) -> None:
        """Wait while TCP holds us back. Raises Gone. Always yields: a failed write is told by the loop, on its next turn."""
        await asyncio.sleep(0)
        await self._writable.wait()
        if self.closed.is_set():
            raise Gone

    async def something(self) -> None:
        """Wait for the first byte of what comes next. Raises Gone."""
        while not self.buffer:
            await self._next()

    async def read_until(self, needle: bytes) -> bytes:
        """Take the bytes up to and with `needle`. Raises Gone."""
        while (at := self.buffer.find(needle)) < 0:
            await self._next()
        return self._take(at + len(needle))

    async def read(self, size: int) -> bytes:
        """Take exactly `size` bytes. Raises Gone."""
        while len(self.buffer) < size:
            await self._next()
        return self._take(size)

    async def _next(self) -> None:
        if self.closed.is_set():
            raise Gone
        self._more.clear()
        await self._more.wait()

    def _take(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def _serve(self) -> None:
        try:
            while not self.transport.is_closing():
                await self.upstream.accept(self)
        except Gone:
            self.transport.abort()


class Call:
    """One request on the data path, and the means to answer it."""

    def __init__(self, peer: Peer, head: bytes, body: bytes) -> None:
        self.peer = peer
        self.head = head
        self.body = body
        self.at = time.monotonic()

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode("latin-1")

    @property
    def fields(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def closed(self) -> bool:
        """Whether the gateway has closed this connection."""
        return self.peer.closed.is_set()

    async def gone(self, timeout: float = 5) -> float:
        """Wait until the gateway has closed this connection; the monotonic moment. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await self.peer.closed.wait()
        assert self.peer.closed_at is not None
        return self.peer.closed_at

    async def say(self, *segments: bytes) -> None:
        """Send each segment in a read of its own. Raises Gone."""
        for segment in segments:
            self.peer.transport.write(segment)
            await self.peer.drained()
            await asyncio.sleep(0.002)

    async def stream(self, *events: bytes) -> None:
        """A whole SSE answer: head, each event in a chunk of its own, last chunk."""
        await self.say(SSE_HEAD + b"".join(chunk(event) for event in events) + LAST_CHUNK)

    async def answer(self, body: bytes = b"", *lines: bytes, status: bytes = b"200 OK") -> None:
        """A whole answer with content-length, application/json unless `lines` name a type."""
        await self.say(response(body, *lines, status=status))

    def reset(self) -> None:
        """Close with RST."""
        linger_zero(self.peer.transport)
        self.peer.transport.abort()

    def fin(self) -> None:
        """Close with FIN, after what was said."""
        self.peer.transport.close()


class ScriptedUpstream:
    """One backend. `script` answers each call; `next_scripts`, when filled, are used up first.

    `iterations`: the engine's progress counter in /metrics; None leaves it out, as an engine that does not tell.
    `probe_status`: what the gateway's own one-token probe is answered with. `stale` ("rst" or "fin"): a connection that has
    served before is closed that way at the first byte of its next request.
    """

    def __init__(self, *, version: str = "0.32.0") -> None:
        self.version = version
        self.port = 0
        self.peers: list[Peer] = []
        self.calls: list[Call] = []
        self.own: list[Call] = []
        self.script: Script = completion
        self.next_scripts: deque[Script] = deque()
        self.stale: str | None = None
        self.iterations: int | None = None
        self.probe_status = b"200 OK"
        self._server: asyncio.Server | None = None
        self._failures: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *, unix_path: str | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        """Listen: on the port that was used before, where there was one."""
        loop = asyncio.get_running_loop()
        if unix_path is not None:
            self._server = await loop.create_unix_server(lambda: Peer(self), unix_path)
            return
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self.port, ssl=ssl_context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop every connection: from now on connecting is refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._drop()

    async def reset(self) -> None:
        """Forget what was seen and drop the connections. Raises what a script raised, other than a closed connection."""
        await self._drop()
        failures, self._failures = self._failures, []
        self.peers, self.calls, self.own = [], [], []
        self.script, self.iterations, self.probe_status, self.stale = completion, None, b"200 OK", None
        self.next_scripts.clear()
        if failures:
            raise failures[0]

    async def _drop(self) -> None:
        tasks = [peer.task for peer in self.peers]
        for peer in self.peers:
            peer.task.cancel()
            peer.transport.abort()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ConnectionError | asyncio.CancelledError):
                self._failures.append(result)

    async def accept(self, peer: Peer) -> None:
        """Read one request of a connection and answer it. Raises Gone."""
        await peer.something()
        if self.stale is not None and peer.calls:
            if self.stale == "rst":
                linger_zero(peer.transport)
            peer.transport.abort() if self.stale == "rst" else peer.transport.close()
            raise Gone
        head = await peer.read_until(b"\r\n\r\n")
        call = Call(peer, head, b"")
        call.body = await peer.read(int(call.fields.get("content-length", 0)))
        if head.startswith(b"GET "):
            await self._stock(call)
        elif OWN_CLIENT in head.lower():
            self.own.append(call)
            known = call.path == "/v1/completions"
            await call.answer(b"{}", status=self.probe_status if known else b"404 Not Found")
        else:
            self.calls.append(call)
            peer.calls += 1
            script = self.next_scripts.popleft() if self.next_scripts else self.script
            await script(call)

    async def _stock(self, call: Call) -> None:
        path = call.path
        if path == "/version":
            await call.answer(json.dumps({"version": self.version}).encode())
        elif path == "/v1/models":
            await call.answer(b'{"object":"list","data":[]}')
        elif path == "/metrics":
            counter = b"" if self.iterations is None else b"vllm:iteration_tokens_total_count %d\n" % self.iterations
            await call.answer(counter, b"content-type: text/plain")
        else:
            await call.answer(b"{}", status=b"404 Not Found")

    async def called(self, count: int = 1, timeout: float = 5) -> Call:
        """Wait for the `count`-th call and return it."""
        async with asyncio.timeout(timeout):
            while len(self.calls) < count:
                await asyncio.sleep(0.002)
        return self.calls[count - 1]


def linger_zero(transport: asyncio.BaseTransport) -> None:
    """Make the close that follows an RST."""
    raw = transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# What backends say

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def response(body: bytes, *lines: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole response with content-length."""
    kind = () if any(line.lower().startswith(b"content-type:") for line in lines) else (b"content-type: application/json",)
    return b"\r\n".join((b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *kind, *lines)) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(document: object) -> bytes:
    """One SSE event; bytes are taken as they are."""
    data = document if isinstance(document, bytes) else json.dumps(document, ensure_ascii=False).encode()
    return b"data: " + data + b"\n\n"


def delta(text: str = "", finish: str | None = None, **more: object) -> bytes:
    """One chunk of a chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1, "choices": [choice], **more})


def usage(read: int = 7, written: int = 3) -> bytes:
    """The usage event that ends a stream."""
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return event({"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1, "choices": [], "usage": counts})


DONE = event(b"[DONE]")
STREAM = (delta("a"), delta("b"), delta("c", "stop"), usage(), DONE)
COMPLETION = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}).encode()  # fmt: skip


async def completion(call: Call) -> None:
    """A good answer at once: a stream or a completion, as was asked."""
    if b'"stream":true' in call.body:
        await call.stream(*STREAM)
    else:
        await call.answer(COMPLETION)
