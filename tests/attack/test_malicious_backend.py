"""A backend that wants to do harm: callers get a whole answer or a clean error, and the gateway and its counters stay sane."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re

import pytest

from gateway.evidence.canonical import digest
from gateway.evidence.identity import IDENTITY_SCHEMA
from tests.edge.building import payload
from tests.support.client import ask, get
from tests.support.gateway import KEYS, Backend, GatewayProcess, configuration_of
from tests.support.upstream import COMPLETION, DONE, SSE_HEAD, Call, Gone, ScriptedUpstream, chunk, delta, event, response

from .conftest import UPSTREAM_KEY

MB = 1024 * 1024
BOMB = gzip.compress(b"\0" * (64 * MB))


def usage(**counts: str) -> bytes:
    """A completion whose usage holds these raw JSON values."""
    inner = ",".join(f'"{name}":{value}' for name, value in counts.items())
    return COMPLETION.replace(b'{"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}', b"{" + inner.encode() + b"}")


def lies(value: str) -> bytes:
    return usage(prompt_tokens=value, completion_tokens=value, total_tokens=value)


SAYS: dict[str, tuple[bytes, set[int]]] = {
    "a huge header": (b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * MB + b"\r\ncontent-length: 0\r\n\r\n", {502}),
    "ten thousand headers": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10_000 + b"content-length: 0\r\n\r\n", {502}),
    "a head without end": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 150, {502, 504}),
    "a status of its own": (response(b"{}", status=b"999 Nines"), {999, 502}),
    "a status below": (response(b"{}", status=b"099 Zero"), {502}),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", {502}),
    "a switch of protocols": (b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", {502}),
    "interim answers without end": (b"HTTP/1.1 100 Continue\r\n\r\n" * 500, {502}),
    "less than it said": (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + COMPLETION[:50], {504}),
    "more than it said": (response(COMPLETION) + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", {200}),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 200\r\n\r\n{}", {502}),
    "length and chunks": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", {200, 502},
    ),
    "a trailer without end": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"a" * MB, {502},
    ),
    "a chunk's extension without end": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n1; x=" + b"a" * MB, {502},
    ),
    "a negative length": (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}", {502}),
    "a vast chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nx", {502}),
    "a split header": (response(b"{}", b"content-type: application/json\rset-cookie: evil=1"), {502}),
    "headers that are not its own": (
        response(COMPLETION, b"set-cookie: evil=1", b"x-request-id: evil", b"access-control-allow-origin: *",
                 b"www-authenticate: Basic", b"server: evil", b"location: http://evil/", b"x-plimsoll-record: evil"), {200},
    ),
    "a redirect": (response(b"", b"location: http://169.254.169.254/", status=b"302 Found"), {502}),
    "a bomb": (response(BOMB, b"content-encoding: gzip"), {200, 502}),
    "json without depth": (response(b"[" * 200_000), {502}),
    "infinite usage": (response(lies("1e999")), {200}),
    "negative usage": (response(lies("-5")), {200}),
    "usage beyond measure": (response(lies("9" * 400)), {200}),
    "usage of 2^62": (response(lies(str(2**62))), {200}),
    "usage of 2^40": (response(lies(str(2**40))), {200}),
    "usage in words": (response(lies('"many"')), {200}),
    "usage that is true": (response(lies("true")), {200}),
    "usage in a list": (response(lies("[1]")), {200}),
    "its key": (response(b'{"error":{"message":"no"}}', status=b"401 Unauthorized"), {401, 502}),
}  # fmt: skip


async def tokens(gateway: GatewayProcess) -> float:
    return await gateway.value("plimsoll_tokens_total")


async def sane(gateway: GatewayProcess) -> None:
    """Every number that is told is finite and not negative."""
    answer = await get(gateway.port, "/metrics", KEYS["scraper"])
    assert answer.status == 200
    for line in answer.body.decode().splitlines():
        if not line.startswith("#"):
            value = float(line.rsplit(" ", 1)[1])
            assert 0 <= value < math.inf, line


@pytest.mark.parametrize("name", SAYS)
async def test_what_a_backend_may_say(fort, name):
    said, right = SAYS[name]

    async def script(call: Call) -> None:
        await call.say(said)
        await call.gone(8)

    async def answers(call: Call) -> None:
        await call.say(said)  # and goes on with whatever comes next on this connection

    before = await tokens(fort.gateway)
    fort.upstreams["b"].script = answers if right == {200} else script
    got = await ask(fort.port, model="b")
    assert got.status in right, (name, got.status, got.body[:200])
    for header in ("set-cookie", "www-authenticate", "location", "access-control-allow-origin"):
        assert header not in got.fields or got.status == 401, (header, got.fields)
    assert got.fields["server"] == "plimsoll" and got.fields["x-request-id"] != "evil"
    assert got.fields.get("x-plimsoll-record") != "evil" and b"evil" not in got.body
    assert UPSTREAM_KEY.encode() not in got.body and UPSTREAM_KEY not in str(got.fields)
    await sane(fort.gateway)
    assert await tokens(fort.gateway) - before < 100_000, "what a backend says it used is believed within reason"
    await fort.upstreams["b"].reset()
    assert (await ask(fort.port, model="b")).status == 200, "the next one is served"


STREAMS: dict[str, list[bytes]] = {
    "comments without end": [b": x\n\n"] * 300,
    "an event without end": [b"data: " + b"x" * 60_000] * 40,
    "usage that lies": [delta("a"), event(b'{"choices":[],"usage":{"prompt_tokens":1e999,"completion_tokens":-7}}'), DONE],
    "usage that lies a lot": [
        delta("a", "stop"), event(b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (2**52, 2**52)), DONE,
    ],
    "no finish": [delta("a"), DONE],
    "an end and then more": [delta("a", "stop"), DONE, delta("evil"), DONE],
    "no json": [b"data: {{{{\n\n"] * 20 + [b"data: \xff\xfe\n\n", b"data: " + b"[" * 5000 + b"\n\n"],
    "nulls": [b"\0" * 5000, b"data: \0\n\n"],
    "carriage returns": [b"\r" * 5000, b"data: x\r\r"],
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
async def test_what_a_backend_may_stream(fort, name):
    async def script(call: Call) -> None:
        await call.say(SSE_HEAD + b"".join(chunk(each) for each in STREAMS[name]) + b"0\r\n\r\n")

    before = await tokens(fort.gateway)
    fort.upstreams["b"].script = script
    got = await ask(fort.port, model="b", stream=True)
    assert got.status in (200, 502), got
    assert b"Traceback" not in got.body
    await fort.gateway.settled()
    await sane(fort.gateway)
    assert await tokens(fort.gateway) - before < 100_000
    await fort.upstreams["b"].reset()
    assert (await ask(fort.port, model="b")).status == 200


async def test_a_body_without_end_is_cut_and_memory_stays_bounded(fort):
    async def endless(call: Call) -> None:
        await call.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = chunk(b"x" * MB)
        while True:  # until the gateway leaves, which raises
            call.peer.transport.write(piece)
            await call.peer.drained()

    before = fort.gateway.rss_kb()
    fort.upstreams["b"].script = endless
    answers = await asyncio.gather(*(ask(fort.port, model="b") for _ in range(2)))
    assert {answer.status for answer in answers} <= {502, 504}
    assert fort.gateway.rss_kb() - before < 256 * 1024, "two answers of at most 32 MB each"


class Liar(ScriptedUpstream):
    """A backend that attests itself, as `tells` says: bytes a connection, in turn; the last one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.tells: list[bytes] = []
        self.hash = b""  # what it says where its body says none
        self.told: dict[int, bytes] = {}

    async def _stock(self, call: Call) -> None:
        if call.path == "/plimsoll/tokenizer":
            await call.answer(json.dumps(payload()).encode())
            return
        if call.path != "/plimsoll/identity":
            await super()._stock(call)
            return
        body = self.tells.pop(0) if len(self.tells) > 1 else self.tells[0]
        self.told[id(call.peer)] = body
        stated = re.search(rb'"server_configuration_hash": "(sha256:[0-9a-f]{64})"', body)
        await call.answer(body, b"x-plimsoll-config: " + (stated[1] if stated else self.hash))


def identity(document: dict, stated: str | None = None, **runtime: object) -> bytes:
    return json.dumps({
        "schema": IDENTITY_SCHEMA, "configuration": document, "server_configuration_hash": stated or digest(document),
        "capabilities": {}, "runtime": {"engine_start_id": "e1", "api_processes": 1, "foreign_in_flight": 0, **runtime},
    }).encode()  # fmt: skip


async def test_a_backend_that_lies_about_itself_gets_nothing(tmp_path):
    liar = Liar()
    await liar.start()
    backend = Backend(liar, 8, extra={"identity": "attested"})
    honest_document = configuration_of("a", backend)
    honest, other = identity(honest_document), identity({**honest_document, "scheduler": {"max_num_seqs": 999}})
    liar.hash = digest(honest_document).encode()
    header = b"x-plimsoll-config: " + liar.hash

    async def answer(call: Call) -> None:
        await call.answer(COMPLETION, header)

    liar.script, liar.tells = answer, [honest]
    async with GatewayProcess(tmp_path, {"a": backend}) as gateway:

        async def gate() -> str:
            return str((await gateway.status())["backends"][0]["gate"])

        async def is_closed() -> bool:
            return await gate() != "open"

        assert (await ask(gateway.port, model="a")).status == 200

        # It says another configuration in one answer: nothing more is sent to it.
        async def slip(call: Call) -> None:
            await call.answer(COMPLETION, b"x-plimsoll-config: sha256:" + b"0" * 64)

        liar.script, liar.tells = slip, [other]
        await ask(gateway.port, model="a")
        assert await is_closed()
        seen = len(liar.calls)
        got = await ask(gateway.port, model="a")
        assert got.status == 503 and got.code in ("configuration_changed", "mixed_identity", "backend_unavailable"), got.body
        assert len(liar.calls) == seen
        # Everything an identity should not be.
        for bad in (b"", b"[]", b"[" * 100_000, b"\xff" * 1000, b"x" * (2 * MB), identity(honest_document, "sha256:" + "1" * 64),
                    identity(honest_document, foreign_in_flight=-5), identity(honest_document, kv_cache_size_tokens=2**70),
                    honest.replace(b'"max_num_seqs": 8', b'"max_num_seqs": 1e999'), honest[:-20]):  # fmt: skip
            liar.tells = [bad]
            got = await ask(gateway.port, model="a")
            assert got.status == 503, (bad[:80], got.body)
        assert len(liar.calls) == seen, "nothing was sent to a backend that does not say what it is"
        assert "Traceback" not in gateway.log()
        await sane(gateway)
        assert gateway.process is not None and gateway.process.returncode is None
    await liar.stop()


async def test_a_backend_that_changes_from_connection_to_connection(tmp_path):
    liar = Liar()
    await liar.start()
    backend = Backend(liar, 8, extra={"identity": "attested"})
    honest_document = configuration_of("a", backend)
    honest, other = identity(honest_document), identity({**honest_document, "scheduler": {"max_num_seqs": 999}})

    async def answer(call: Call) -> None:
        await call.say(response(COMPLETION, b"connection: close", b"x-plimsoll-config: " + digest(honest_document).encode()))
        call.fin()
        raise Gone

    liar.script, liar.tells = answer, [honest]
    async with GatewayProcess(tmp_path, {"a": backend}) as gateway:
        assert (await ask(gateway.port, model="a")).status == 200
        liar.tells = [other, honest] * 50
        statuses = [(await ask(gateway.port, model="a")).status for _ in range(30)]
        assert set(statuses) <= {200, 502, 503} and 503 in statuses, statuses
        for call in liar.calls:
            assert liar.told[id(call.peer)] == honest, "a request went over a connection that said it was another"
        await sane(gateway)
        assert "Traceback" not in gateway.log()
    await liar.stop()
