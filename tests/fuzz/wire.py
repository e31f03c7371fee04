"""The same damage over real sockets: a gateway process, its backend, and what an outsider can see of either.

Owns: one gateway for a run. Promises: after each target the process is the one that was started, has logged no traceback, has
nothing in flight, serves a good request, and its memory has not grown beyond a bound; no answer on the way was a 500.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.attack.test_openapi import play
from tests.support.client import ask
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.raw import dial, request, stranger
from tests.support.upstream import SSE_HEAD, Call, ScriptedUpstream, chunk, completion

from .mutations import SEEDS, inputs
from .stage import STATUS, USUAL
from .targets import CODINGS, COUNTING, READ

AT_ONCE = 24
IDLE_S = 0.03  # after so long without a byte, a damaged request is taken to be one that waits for more
HANG_S = 120.0  # of a batch, on a machine that does other things too
GROWTH_KB = 300_000
TYPES = ("content-type: application/json", "content-type: multipart/form-data; boundary=x", "content-type: text/plain")
ADMIN = [
    request(method, path, "content-type: application/json", key=KEYS["operator"], body=body)
    for method, path, body in (
        ("GET", "/admin/status", b""), ("GET", "/admin/journal?limit=5&reason=x", b""), ("GET", "/openapi.json", b""),
        ("POST", "/admin/records", b'{"schema":"capacity-evidence-record/v1"}'), ("GET", "/console", b""),
        ("POST", "/admin/explain", b'{"model":"tiny","input_tokens":5,"output_tokens":5,"features":["media"]}'),
        ("POST", "/admin/retest/plan", b'{"model":"tiny","share":0.9}'), ("GET", "/admin/audit", b""),
    )
]  # fmt: skip


async def run(wanted: dict[str, int], seed: int) -> dict[str, int]:
    """Play so many inputs of each target; how many were played, and what schemathesis made."""
    upstream = ScriptedUpstream()
    await upstream.start()
    with tempfile.TemporaryDirectory() as folder:
        gateway = GatewayProcess(
            Path(folder), {"tiny": Backend(upstream, 64, 8192)},
            breaker={"min_requests": 1_000_000_000, "consecutive_failures": 1_000_000_000},
            timeouts={"queue_s": 2, "first_token_s": 1, "stall_s": 1, "execution_s": 3},
            model_options={"media": {"image_tokens": 5, "audio_tokens_per_s": 5}},
        )  # fmt: skip
        async with gateway:
            field = Field(gateway, upstream)
            played = {}
            for target, count in wanted.items():
                played[target] = await field.play(target, seed, count)
            played["document"] = await field.document(20)
    await upstream.stop()
    return played


class Field:
    """The gateway and its backend during a run."""

    def __init__(self, gateway: GatewayProcess, upstream: ScriptedUpstream) -> None:
        self.gateway, self.upstream = gateway, upstream
        assert gateway.process is not None
        self.process = gateway.process
        self.says: deque[bytes] = deque()
        self.targets: dict[str, Callable[[list[bytes]], Awaitable[None]]] = {
            "requests": lambda batch: self.raw(gateway.port, batch),
            "admin": lambda batch: self.raw(gateway.admin_port, batch),
            "bodies": self.bodies,
            "answers": self.answers,
        }

    async def play(self, target: str, seed: int, count: int) -> int:
        """Inputs of one target, by several connections at once; how many."""
        made, before = _inputs(target, seed, count), self.gateway.rss_kb()
        each, played = self.targets[target], 0

        async def worker() -> None:
            nonlocal played
            for first in made:
                batch = [first, *(data for _, data in zip(range(7), made, strict=False))]
                try:
                    async with asyncio.timeout(HANG_S):
                        await each(batch)
                except BaseException as error:
                    error.add_note(f"{target} over sockets, seed {seed}: one of {batch!r}")
                    raise
                played += len(batch)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE if target != "answers" else 1):
                group.create_task(worker())
        await self.upstream.reset()
        await self.sound(f"{target} seed {seed}", before)
        return played

    async def sound(self, what: str, before_kb: int) -> None:
        """The worker is alive and holds nothing."""
        assert self.process.returncode is None, f"{what}: {self.gateway.log()[-2000:]}"
        assert "Traceback" not in self.gateway.log(), f"{what}: {self.gateway.log()[-4000:]}"
        await self.gateway.settled(10)
        assert (await ask(self.gateway.port, model="tiny")).status == 200, what
        assert self.gateway.rss_kb() - before_kb < GROWTH_KB, what
        await self.upstream.reset()

    async def raw(self, port: int, batch: list[bytes]) -> None:
        """Bytes as they are, each on a connection of its own."""
        source = stranger()
        for data in batch:
            async with dial(port, source) as client:
                with suppress(ConnectionError):
                    await client.send(data)
                _usual(await _all(client.reader), data)

    async def bodies(self, batch: list[bytes]) -> None:
        """Damaged bodies in sound requests."""
        paths = [path.decode() for path in (*READ, *COUNTING)]
        for data in batch:
            path, kind = paths[data[0] % len(paths)], TYPES[data[1] % len(TYPES)]
            coding = CODINGS[data[2] % len(CODINGS)]
            lines = (kind,) if coding is None else (kind, b"content-encoding: " + coding)
            async with dial(self.gateway.port) as client:
                await client.send(request("POST", path, *lines, key=KEYS["client"], body=data[3:]))
                got = await client.response(HANG_S)
                assert got.status in USUAL and b"internal_error" not in got.body, (path, kind, data[3:], got)

    async def answers(self, batch: list[bytes]) -> None:
        """Damaged answers of the backend to sound requests; what it says with a status of its own may be relayed."""
        for data in batch:

            async def script(call: Call, data: bytes = data) -> None:
                await call.say(data)
                call.fin()

            self.upstream.script = script
            async with dial(self.gateway.port) as client:
                await client.send(request("POST", "/v1/chat/completions", TYPES[0], key=KEYS["client"], body=_asks(data)))
                got = await client.response(HANG_S)
            assert got.fields["server"] == "plimsoll" and b"internal_error" not in got.body, (data, got)
            self.upstream.peers = [peer for peer in self.upstream.peers if not peer.closed.is_set()]
            self.upstream.calls.clear()

    async def document(self, examples: int) -> int:
        """What schemathesis makes of the gateway's own document, for operators and for callers; how many requests."""
        before, made = self.gateway.rss_kb(), 0
        self.upstream.script = speaks_each_dialect
        for base, role in (("admin", "operator"), ("public", "client"), ("public", "scraper")):
            port = self.gateway.admin_port if base == "admin" else self.gateway.port
            document = f"http://127.0.0.1:{self.gateway.admin_port}/openapi.json"
            played = await asyncio.to_thread(play, f"http://127.0.0.1:{port}", document, role, KEYS[role], examples)
            made += sum(played.values())
        await self.sound("schemathesis", before)
        return made


async def speaks_each_dialect(call: Call) -> None:
    """A good answer in the dialect of the route: a stream or a document, as was asked."""
    if b'"stream":true' in call.body and call.path == "/v1/responses":
        await call.stream(
            b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":1}}}\n\n'
        )
    elif b'"stream":true' in call.body and call.path == "/v1/messages":
        await call.stream(
            b'event: message_start\ndata: {"type":"message_start"}\n\n', b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )
    else:
        await completion(call)


def _asks(data: bytes) -> bytes:
    stream = b"true" if len(data) % 2 else b"false"
    return b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":8,"stream":' + stream + b"}"


def _inputs(target: str, seed: int, count: int) -> Iterator[bytes]:
    if target == "answers":
        half = count // 2
        yield from inputs("answers", seed, half)
        for data in inputs("events", seed, count - half):
            yield SSE_HEAD + chunk(data[1:]) + b"0\r\n\r\n" if len(data) > 1 else SSE_HEAD
    elif target == "bodies":
        half = count // 2
        yield from (data + bytes(3) for data in inputs("bodies", seed, half))
        for data in inputs("counting", seed, count - half):
            yield bytes((len(READ) + sum(data[:1]) % len(COUNTING), 0)) + data[1:] + bytes(1)
    else:
        if target == "admin":
            SEEDS["admin"] = ADMIN
        yield from inputs(target, seed, count)


async def _all(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes or says nothing for a moment."""
    out = b""
    with suppress(TimeoutError, ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), IDLE_S):
            out += piece
    return out


def _usual(out: bytes, data: bytes) -> None:
    statuses = {int(found) for found in STATUS.findall(out)} - {204}
    assert statuses <= USUAL, (statuses, data, out[:500])
    assert b"x-plimsoll-reason: internal_error" not in out and b"Traceback" not in out, (data, out[:500])
