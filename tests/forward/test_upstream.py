"""The upstream client against every way in which a backend was seen to misbehave."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import ConnectFailed, FailureKind, Upstream, fetch
from tests.forward.scripted import LAST_CHUNK, SSE_HEAD, Peer, chunk, response, serving


class Recorder:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.heads, self.body, self.ends, self.failures = [], bytearray(), 0, []
        self.over = asyncio.Event()
        self.begun = asyncio.Event()

    def head(self, status, headers):
        self.heads.append((status, headers))

    def data(self, data):
        assert not self.over.is_set()
        self.body += data
        self.begun.set()

    def end(self):
        assert not self.over.is_set()
        self.ends += 1
        self.over.set()

    def lost(self, failure):
        assert not self.over.is_set()
        self.failures.append(failure)
        self.over.set()


def upstream_to(port: int, **more) -> Upstream:
    settings = {"api_key": None, "instance": "g-1", "connect_timeout_s": 2.0, "attest": False} | more
    return Upstream(Endpoint.from_url(f"http://127.0.0.1:{port}"), **settings)


def post(upstream: Upstream, body: bytes = b"{}") -> bytes:
    return upstream.request(b"/v1/completions", b"r-1", b"application/json", body)


async def ask(upstream: Upstream, body: bytes = b"{}") -> Recorder:
    connection = upstream.take() or await upstream.connect()
    sink = Recorder()
    connection.send(post(upstream, body), sink)
    await asyncio.wait_for(sink.over.wait(), 5)
    return sink


def saying(*segments: bytes, after=None):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*segments)
        if after:
            after(peer)
        else:
            await peer.gone()

    return script


async def test_the_request_carries_only_what_the_gateway_built():
    seen = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.say(response(b"ok"))
        await peer.gone()

    async with serving(script) as server:
        upstream = upstream_to(server.port, api_key=b"backend-key")
        assert (await ask(upstream, b'{"a":1}')).body == b"ok"
    assert seen == [
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept-encoding: identity\r\nx-plimsoll-gateway: g-1\r\n"
        b"authorization: Bearer backend-key\r\nx-request-id: r-1\r\ncontent-type: application/json\r\ncontent-length: 7\r\n"
        b'\r\n{"a":1}' % server.port
    ]


async def test_a_connection_is_used_again():
    async def script(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.say(SSE_HEAD + chunk(b"a") + LAST_CHUNK)
        await peer.gone()

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        assert (await ask(upstream)).body == b"a"
        assert upstream.idle == 1
        assert (await ask(upstream)).body == b"a"
        assert server.peers == 1


async def test_any_segmentation_gives_the_same_answer():
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"abc") + chunk(b"defg") + LAST_CHUNK
    async with serving(saying(*[whole[i : i + 1] for i in range(len(whole))])) as server:
        sink = await ask(upstream_to(server.port))
        assert (sink.body, sink.ends, len(sink.heads)) == (b"abcdefg", 1, 1)


BROKEN = {
    "fin before the head": ([b"HTTP/1.1 200"], "fin", FailureKind.RESET),
    "rst before the head": ([], "rst", FailureKind.RESET),
    "rst inside a stream": ([SSE_HEAD + chunk(b"a")], "rst", FailureKind.TRUNCATED),
    "fin without the last chunk": ([SSE_HEAD + chunk(b"a")], "fin", FailureKind.TRUNCATED),
    "fin inside a chunk": ([SSE_HEAD + b"10\r\nab"], "fin", FailureKind.TRUNCATED),
    "content-length too long": ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"], "fin", FailureKind.TRUNCATED),
    "not http": ([b"SSH-2.0-x\r\n"], "stay", FailureKind.MALFORMED),
    "garbage for a chunk size": ([SSE_HEAD + b"zz\r\n"], "stay", FailureKind.MALFORMED),
    "length and chunked": ([SSE_HEAD[:-2] + b"content-length: 3\r\n\r\nabc"], "stay", FailureKind.MALFORMED),
    "one huge header": ([b"HTTP/1.1 200 OK\r\nx: ", b"a" * 40_000, b"a" * 40_000], "stay", FailureKind.MALFORMED),
    "one huge header at once": (
        [b"HTTP/1.1 200 OK\r\nx: " + b"a" * 80_000 + b"\r\ncontent-length: 0\r\n\r\n"],
        "stay",
        FailureKind.MALFORMED,
    ),
    "many headers": ([b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * 300 + b"content-length: 0\r\n\r\n"], "stay", FailureKind.MALFORMED),
    "switching protocols": (
        [b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"],
        "stay",
        FailureKind.MALFORMED,
    ),
    "interim answers without end": ([b"HTTP/1.1 102 Processing\r\n\r\n" * 20], "stay", FailureKind.MALFORMED),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_lost_once_and_never_ends(name):
    segments, then, kind = BROKEN[name]
    after = {"fin": lambda peer: peer.writer.close(), "rst": lambda peer: peer.reset(), "stay": None}[then]
    async with serving(saying(*segments, after=after)) as server:
        upstream = upstream_to(server.port)
        sink = await ask(upstream)
        assert sink.ends == 0
        assert [failure.kind for failure in sink.failures] == [kind]
        assert not sink.failures[0].before_written
        assert upstream.idle == 0


UNUSABLE_AFTERWARDS = {
    "connection: close": [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"],
    "http/1.0": [b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok"],
    "two responses in one read": [response(b"ok") + response(b"other")],
    "body longer than its length": [response(b"ok") + b"garbage"],
    "a byte while idle": [response(b"ok"), b"H"],
    "an interim answer while idle": [response(b"ok"), b"HTTP/1.1 100 Continue\r\n\r\n"],
}


@pytest.mark.parametrize("name", UNUSABLE_AFTERWARDS)
async def test_a_connection_that_said_too_much_is_not_used_again(name):
    async with serving(saying(*UNUSABLE_AFTERWARDS[name])) as server:
        upstream = upstream_to(server.port)
        sink = await ask(upstream)
        assert (sink.body, sink.ends) == (b"ok", 1)
        while upstream.connections:  # the stray bytes may come a moment later
            await asyncio.sleep(0.001)
        assert upstream.take() is None


async def test_interim_answers_and_trailers_are_not_the_answer():
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    segments = (interim, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"a") + b"0\r\nx-trailer: 1\r\n\r\n")
    async with serving(saying(*segments)) as server:
        upstream = upstream_to(server.port)
        sink = await ask(upstream)
        assert sink.heads == [(200, [(b"transfer-encoding", b"chunked")])]
        assert (sink.body, sink.ends, upstream.idle) == (b"a", 1, 1)


async def test_a_close_delimited_body_ends_with_the_connection():
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", after=lambda peer: peer.writer.close())) as server:
        sink = await ask(upstream_to(server.port))
        assert (sink.body, sink.ends) == (b"abcdef", 1)


async def test_204_has_no_body():
    async with serving(saying(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        upstream = upstream_to(server.port)
        sink = await ask(upstream)
        assert (sink.heads[0][0], sink.body, sink.ends, upstream.idle) == (204, b"", 1, 1)


async def test_idle_connections_grow_old():
    now = [100.0]
    async with serving(saying(response(b"ok"))) as server:
        upstream = upstream_to(server.port, clock=lambda: now[0])
        await ask(upstream)
        now[0] += 3.1
        assert upstream.take() is None
        await ask(upstream)
        assert server.peers == 2
        upstream.sweep(now[0] + 3.1)
        assert upstream.idle == 0


async def test_a_close_by_the_backend_while_idle_is_noticed():
    async with serving(saying(response(b"ok"), after=lambda peer: peer.writer.close())) as server:
        upstream = upstream_to(server.port)
        await ask(upstream)
        while upstream.connections:
            await asyncio.sleep(0.001)
        assert upstream.take() is None


async def test_abort_closes_and_silences():
    closed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(SSE_HEAD + chunk(b"a"))
        await peer.gone()
        closed.set()

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        connection, sink = await upstream.connect(), Recorder()
        connection.send(post(upstream), sink)
        await sink.begun.wait()
        connection.abort()
        connection.abort()
        await asyncio.wait_for(closed.wait(), 5)
        assert (sink.ends, sink.failures) == (0, [])
        assert not upstream.connections


async def test_pause_holds_the_backend_back():
    stuck = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20000000\r\n\r\n")
        sent = 0
        while sent < 20_000_000:
            peer.writer.write(b"x" * 100_000)
            sent += 100_000
            try:
                await asyncio.wait_for(peer.writer.drain(), 0.2)
            except TimeoutError:
                stuck.set()
                await peer.writer.drain()
        await peer.gone()

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        connection, sink = await upstream.connect(), Recorder()
        connection.send(post(upstream), sink)
        await sink.begun.wait()
        connection.pause()
        await asyncio.wait_for(stuck.wait(), 5)
        held = len(sink.body)
        assert held < 10_000_000
        connection.resume()
        await asyncio.wait_for(sink.over.wait(), 5)
        assert (len(sink.body), sink.ends, upstream.idle) == (20_000_000, 1, 1)


async def test_a_close_before_the_last_byte_was_written_is_known():
    async def script(peer: Peer) -> None:
        await peer.reader.read(1000)
        peer.reset()

    async with serving(script) as server:
        sink = await ask(upstream_to(server.port), b"x" * 20_000_000)
        assert [(f.kind, f.before_written) for f in sink.failures] == [(FailureKind.RESET, True)]


async def test_a_large_body_that_was_written_whole_is_not_called_unwritten():
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with serving(script) as server:
        sink = await ask(upstream_to(server.port), b"x" * 3_000_000)
        assert [(f.kind, f.before_written) for f in sink.failures] == [(FailureKind.RESET, False)]


async def test_a_connection_that_carried_a_large_body_is_used_again():
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(response(b"ok"))

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        for size in (3_000_000, 10, 200_000):
            assert (await ask(upstream, b"x" * size)).body == b"ok"
        assert server.peers == 1


async def test_nothing_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed) as caught:
            await upstream_to(taken.getsockname()[1]).connect()
    assert caught.value.kind is FailureKind.REFUSED


@pytest.mark.parametrize("attest", [False, True])
async def test_a_pool_that_is_retired_while_it_connects(attest):
    """The connection is not handed out, and saying so is no defect: the request can go elsewhere."""

    class Leaving(Upstream):
        def opened(self, connection):
            super().opened(connection)
            self.retire()

    async with serving(saying(response(b"ok"))) as server:
        settings = {"api_key": None, "instance": "g", "connect_timeout_s": 2, "attest": attest}
        upstream = Leaving(Endpoint.from_url(f"http://127.0.0.1:{server.port}"), **settings)
        with pytest.raises(ConnectFailed) as failed:
            await upstream.connect()
        assert failed.value.may_retry


async def test_unix_socket(tmp_path):
    path = tmp_path / "b.sock"
    async with serving(saying(response(b"ok")), unix_path=str(path)):
        endpoint = Endpoint.from_url(f"http+unix://{str(path).replace('/', '%2F')}")
        upstream = Upstream(endpoint, api_key=None, instance="g", connect_timeout_s=2, attest=False)
        assert (await ask(upstream)).body == b"ok"


# Attestation

IDENTITY = b'{"hash":"h1"}'


def attested(answers: list[bytes], identity: bytes = response(IDENTITY, b"x-plimsoll-config: h1")):
    async def script(peer: Peer) -> None:
        assert (await peer.request()).startswith(b"GET /plimsoll/identity HTTP/1.1\r\n")
        await peer.say(identity)
        for answer in answers:
            await peer.request()
            await peer.say(answer)
        await peer.gone()

    return script


class Watch:
    def __init__(self, usable=True):
        self.heard, self.usable = [], usable

    def __call__(self, config, payload):
        self.heard.append((config, payload))
        return self.usable


async def test_a_new_connection_is_attested_before_its_first_request():
    watch = Watch()
    same = response(b"ok", b"x-plimsoll-config: h1")
    async with serving(attested([same, same])) as server:
        upstream = upstream_to(server.port, attest=True, expect=lambda: "h1", on_identity=watch)
        for _ in range(2):
            assert (await ask(upstream)).body == b"ok"
        assert watch.heard == [("h1", IDENTITY)]
        assert server.peers == 1


@pytest.mark.parametrize("header", [(b"x-plimsoll-config: h2",), ()])
async def test_another_configuration_in_an_answer_is_told_at_once(header):
    watch = Watch()
    async with serving(attested([response(b"ok", *header)])) as server:
        upstream = upstream_to(server.port, attest=True, expect=lambda: "h1", on_identity=watch)
        sink = await ask(upstream)
        assert (sink.body, sink.ends) == (b"ok", 1)  # it was dispatched, so its caller gets it
        assert watch.heard[1:] == [("h2" if header else None, None)]
        assert upstream.take() is None


async def test_an_identity_that_is_not_usable():
    async with serving(attested([])) as server:
        upstream = upstream_to(server.port, attest=True, on_identity=Watch(usable=False))
        with pytest.raises(ConnectFailed) as caught:
            await upstream.connect()
        assert caught.value.kind is FailureKind.IDENTITY
        assert upstream.idle == 0


async def test_a_backend_without_identity():
    watch = Watch()
    async with serving(attested([], response(b"no", status=b"404 Not Found"))) as server:
        with pytest.raises(ConnectFailed) as caught:
            await upstream_to(server.port, attest=True, on_identity=watch).connect()
        assert caught.value.kind is FailureKind.IDENTITY
        assert watch.heard == [(None, None)]


async def test_a_backend_that_never_says_who_it_is():
    async with serving(saying()) as server:
        upstream = upstream_to(server.port, attest=True, connect_timeout_s=0.1)
        with pytest.raises(ConnectFailed) as caught:
            await upstream.connect()
        assert caught.value.kind is FailureKind.TIMEOUT
        while upstream.connections:
            await asyncio.sleep(0.001)


async def test_idle_connections_of_another_configuration_are_not_taken():
    expected = ["h1"]
    async with serving(attested([response(b"ok", b"x-plimsoll-config: h1")])) as server:
        upstream = upstream_to(server.port, attest=True, expect=lambda: expected[0])
        await ask(upstream)
        expected[0] = "h2"
        assert upstream.take() is None


async def test_fetch_is_bounded():
    async with serving(saying(response(b"x" * 1000))) as server:
        upstream = upstream_to(server.port)
        with pytest.raises(OSError, match="more than 100 bytes"):
            await fetch(await upstream.connect(), upstream.get(b"/x"), 100)
