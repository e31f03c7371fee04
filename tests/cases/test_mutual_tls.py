"""Certificates on both sides: callers must show one where the policy says so, and the gateway shows its own to a backend."""

from __future__ import annotations

import ipaddress
import ssl

import pytest
import pytest_asyncio
from cryptography import x509

from gateway.policy import ServerTLS
from gateway.server import ListenError, check_tls
from tests.support.authority import Authority, TlsGateway, server_context
from tests.support.client import KEY, post
from tests.support.gateway import Backend
from tests.support.raw import dial, request
from tests.support.upstream import COMPLETION, Call, ScriptedUpstream, completion

LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


class Gateway(TlsGateway):
    waits_for = ("mutual",)


class Vault:
    """The gateway, its backends (all of which demand a certificate of our authority), and callers by what they show."""

    def __init__(self, gateway: Gateway, upstreams: dict[str, ScriptedUpstream], seen: dict[str, list[str | None]]) -> None:
        self.gateway, self.upstreams, self.seen = gateway, upstreams, seen
        self.callers: dict[str, ssl.SSLContext] = {}

    async def ask(self, caller: str, raw: bytes) -> bytes:
        """What comes back before the connection closes, be it by an alert of TLS."""
        try:
            async with dial(self.gateway.port, ssl=self.callers[caller], name="gateway.example") as wire:
                await wire.send(raw)
                return await wire.closed()
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vault(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutual")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    front = ours.issue("front", [x509.DNSName("gateway.example")])
    engine = ours.issue("engine", [x509.DNSName("engine.internal")])
    foreign = theirs.issue("foreign-engine", [x509.DNSName("engine.internal")])
    gate = ours.issue("gate", [x509.DNSName("gate.example")])
    false_gate = theirs.issue("false-gate", [x509.DNSName("gate.example")])
    shown = {"mutual": gate, "nothing": None, "false": false_gate, "impostor": gate}
    upstreams = {name: ScriptedUpstream() for name in shown}
    seen: dict[str, list[str | None]] = {name: [] for name in shown}
    backends = {}
    for name, upstream in upstreams.items():
        files = foreign if name == "impostor" else engine
        await upstream.start(ssl_context=server_context(*files, seen[name], client_ca=ours.file))
        tls = {"ca": str(ours.file), "server_name": "engine.internal"}
        if shown[name] is not None:
            tls |= {"certificate": str(shown[name][0]), "key": str(shown[name][1])}
        backends[name] = Backend(upstream, url=f"https://127.0.0.1:{upstream.port}", extra={"tls": tls})
    tls = {"certificate": str(front[0]), "key": str(front[1]), "client_ca": str(ours.file)}
    server = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "tls": tls}
    callers = {
        "known": ours.issue("caller", [x509.DNSName("caller.example")]),
        "expired": ours.issue("late", [x509.DNSName("caller.example")], days=-1),
        "of another authority": theirs.issue("stranger", [x509.DNSName("caller.example")]),
        "with none": None,
    }
    async with Gateway(folder, backends, server=server, timeouts={"connect_s": 1, "queue_s": 1}) as gateway:
        made = Vault(gateway, upstreams, seen)
        for name, files in callers.items():
            made.callers[name] = ssl.create_default_context(cafile=str(ours.file))
            if files is not None:
                made.callers[name].load_cert_chain(*files)
        yield made
        assert "Traceback" not in gateway.log()
    for upstream in upstreams.values():
        await upstream.stop()


async def test_a_caller_shows_a_certificate_and_its_key(vault):
    got = await vault.ask("known", post(None, "connection: close", model="mutual"))
    assert got.startswith(b"HTTP/1.1 200 ") and got.endswith(COMPLETION), got
    got = await vault.ask("known", post(None, "connection: close", model="mutual", key=None))
    assert got.startswith(b"HTTP/1.1 401 "), "a certificate alone is no key"


@pytest.mark.parametrize("caller", ["with none", "of another authority", "expired"])
async def test_a_caller_without_a_good_certificate_gets_nothing(vault, caller):
    before = len(vault.upstreams["mutual"].calls)
    for raw in (post(model="mutual"), request("GET", "/v1/models", key=KEY), request("GET", "/health/live")):
        assert await vault.ask(caller, raw) == b"", raw
    assert len(vault.upstreams["mutual"].calls) == before


async def test_a_backend_is_shown_the_certificate_of_the_policy_on_every_connection(vault):
    names: set[object] = set()

    async def looks(call: Call) -> None:
        found = call.peer.transport.get_extra_info("peercert")
        names.update(value for part in found["subject"] for key, value in part if key == "commonName")
        await completion(call)

    upstream = vault.upstreams["mutual"]
    upstream.script = looks
    async with dial(vault.gateway.port, ssl=vault.callers["known"], name="gateway.example") as wire:
        for stream in (False, True, False):
            await wire.send(post(model="mutual", stream=stream))
            got = await wire.response()
            assert got.status == 200 and got.whole, got
    for peer in upstream.peers:  # the gateway's own questions came over the same kind of connection
        found = peer.transport.get_extra_info("peercert")
        names.update(value for part in found["subject"] for key, value in part if key == "commonName")
    assert names == {"gate"}
    assert set(vault.seen["mutual"]) == {"engine.internal"}


@pytest.mark.parametrize("backend", ["nothing", "false", "impostor"])
async def test_where_either_side_is_not_trusted_nothing_is_sent(vault, backend):
    """No certificate of the gateway's, one of another authority, and a backend whose own is of another authority."""
    assert await vault.gateway.gate(backend) != "open"
    got = await vault.ask("known", post(None, "connection: close", model=backend))
    assert got.startswith(b"HTTP/1.1 503 "), got
    upstream = vault.upstreams[backend]
    assert upstream.calls == [] and upstream.own == []
    assert all(not peer.buffer for peer in upstream.peers)


async def test_files_that_cannot_be_used_are_one_clear_line(tmp_path):
    authority = Authority(tmp_path, "ours")
    front, other = authority.issue("front", [LOOPBACK]), authority.issue("other", [LOOPBACK])
    good = {"certificate": front[0], "key": front[1], "client_ca": authority.file}
    check_tls(ServerTLS(**good))
    for broken in ({"certificate": tmp_path / "none"}, {"key": tmp_path}, {"client_ca": front[1]}, {"key": other[1]}):
        with pytest.raises(ListenError, match=r"server\.tls"):
            check_tls(ServerTLS(**{**good, **broken}))
    upstream = ScriptedUpstream()
    await upstream.start()
    tls = {"certificate": str(front[0]), "key": str(other[1])}
    server = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "tls": tls}
    gateway = Gateway(tmp_path, {"mutual": Backend(upstream)}, server=server)
    with pytest.raises(AssertionError):
        await gateway.start()
    assert await gateway.ended() != 0
    log = gateway.log()
    assert "Traceback" not in log and "server.tls" in log and len(log.splitlines()) == 1, log
    await upstream.stop()
