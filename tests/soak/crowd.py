"""Crowds of clients in little memory, and what the gateway weighs under them.

Owns nothing. Promises: `room_for` has raised the limit of open files far enough, or fails saying so.
"""

from __future__ import annotations

import asyncio
import resource

from tests.support.gateway import GatewayProcess


def room_for(files: int) -> None:
    """Let this process, and what it starts, have that many files open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= files, f"this needs {files} open files, the hard limit is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else hard, hard))


class Drops(asyncio.Protocol):
    """A client that sends one request, keeps nothing of the answer but its size, and stays.

    `answered` is set when `until` has come by. With `reads` False it takes nothing once the head is there.
    """

    def __init__(self, request: bytes, until: bytes, *, reads: bool = True) -> None:
        self.request, self.until, self.reads = request, until, reads
        self.size = 0
        self.tail = b""
        self.answered = asyncio.Event()
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        self.tail = (self.tail + data)[-256:] if len(data) < 256 else data[-256:]
        if self.until in data or self.until in self.tail:
            self.answered.set()
        if not self.reads:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.answered.set()


async def gather_crowd(port: int, count: int, request: bytes, until: bytes, at_once: int = 50) -> list[Drops]:
    """That many clients, a few at a time, each of which has had its answer up to `until`."""
    loop, crowd = asyncio.get_running_loop(), []
    for _ in range(0, count, at_once):
        group = [Drops(request, until) for _ in range(min(at_once, count - len(crowd)))]
        for each in group:
            await loop.create_connection(lambda each=each: each, "127.0.0.1", port)
        await asyncio.wait_for(asyncio.gather(*(each.answered.wait() for each in group)), 60)
        crowd += group
    return crowd


def disperse(crowd: list[Drops]) -> None:
    """They all leave."""
    for each in crowd:
        each.transport.abort()


async def heaviest(gateway: GatewayProcess, seconds: float) -> int:
    """The most memory that was resident within so many seconds, in kB."""
    most = gateway.rss_kb()
    for _ in range(round(seconds * 10)):
        await asyncio.sleep(0.1)
        most = max(most, gateway.rss_kb())
    return most
