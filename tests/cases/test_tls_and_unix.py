"""TLS towards clients and backends (an authority of one's own, SNI, names that do not match), and backends on Unix sockets."""

from __future__ import annotations

import ipaddress
import ssl

import pytest_asyncio
from cryptography import x509

from tests.support.authority import Authority, TlsGateway, server_context
from tests.support.client import KEY, post, within
from tests.support.gateway import Backend
from tests.support.raw import dial, request
from tests.support.upstream import COMPLETION, ScriptedUpstream


class Gateway(TlsGateway):
    waits_for = ("private", "named", "socket", "prefixed")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secure(tmp_path_factory):
    """A gateway behind TLS, in front of backends behind TLS and on a socket, of which two cannot be trusted."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    front = ours.issue("front", [x509.DNSName("gateway.example"), loopback])
    by_address = ours.issue("by-address", [loopback])
    by_name = ours.issue("by-name", [x509.DNSName("engine.internal")])
    stranger = theirs.issue("stranger", [loopback])
    upstreams = {name: ScriptedUpstream() for name in ("private", "named", "misnamed", "untrusted", "socket", "prefixed")}
    seen: dict[str, list[str | None]] = {name: [] for name in upstreams}
    for name, files in {"private": by_address, "named": by_name, "misnamed": by_name, "untrusted": stranger}.items():
        await upstreams[name].start(ssl_context=server_context(*files, seen[name]))
    path = folder / "engine.sock"
    await upstreams["socket"].start(unix_path=str(path))
    await upstreams["prefixed"].start()
    ca = {"tls": {"ca": str(ours.file)}}
    backends = {
        name: Backend(upstreams[name], url=f"https://127.0.0.1:{upstreams[name].port}", extra=ca)
        for name in ("private", "misnamed", "untrusted")
    }
    backends["named"] = Backend(
        upstreams["named"], url=f"https://127.0.0.1:{upstreams['named'].port}",
        extra={"tls": {"ca": str(ours.file), "server_name": "engine.internal"}},
    )  # fmt: skip
    backends["socket"] = Backend(upstreams["socket"], url="http+unix://" + str(path).replace("/", "%2F"))
    backends["prefixed"] = Backend(upstreams["prefixed"])
    tls = {"certificate": str(front[0]), "key": str(front[1])}
    server = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "tls": tls}
    async with Gateway(folder, backends, server=server, timeouts={"connect_s": 1, "queue_s": 1}) as gateway:
        client = ssl.create_default_context(cafile=str(ours.file))
        yield gateway, upstreams, seen, client
    for upstream in upstreams.values():
        await upstream.stop()


async def over_tls(gateway, client: ssl.SSLContext, raw: bytes, name: str = "gateway.example"):
    async with dial(gateway.port, ssl=client, name=name) as wire:
        await wire.send(raw)
        return await wire.response()


async def test_clients_over_tls(secure):
    gateway, upstreams, _, client = secure
    for name in ("gateway.example", "127.0.0.1"):
        async with dial(gateway.port, ssl=client, name=name) as wire:
            for _ in range(2):
                await wire.send(post(model="prefixed"))
                got = await wire.response()
                assert (got.status, got.body) == (200, COMPLETION)
            raw = post(model="prefixed", stream=True)
            await wire.send(*[raw[i : i + 50] for i in range(0, len(raw), 50)])
            got = await wire.response()
            assert got.whole and b"[DONE]" in got.body
            await wire.send(request("GET", "/v1/models", key=KEY))
            assert (await wire.response()).status == 200
            await wire.send(post(model="prefixed", key="sk-wrong"))
            assert (await wire.response()).status == 401
            assert await wire.closed() == b""
    assert len(upstreams["prefixed"].calls) >= 6


async def test_a_client_that_leaves_over_tls_is_noticed(secure):
    gateway, upstreams, _, client = secure

    async def silent(call):
        await call.gone()

    upstreams["prefixed"].next_scripts.append(silent)
    before = len(upstreams["prefixed"].calls)
    async with dial(gateway.port, ssl=client, name="gateway.example") as wire:
        await wire.send(post(model="prefixed"))
        call = await upstreams["prefixed"].called(before + 1)
    await call.gone(2)
    await gateway.settled()


async def test_clear_text_and_old_versions_are_not_answered(secure):
    gateway, _, _, client = secure
    async with dial(gateway.port) as wire:
        await wire.send(post(model="prefixed"))
        assert not (await wire.closed()).startswith(b"HTTP/")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    try:
        async with dial(gateway.port, ssl=old, name="gateway.example"):
            raise AssertionError("TLS 1.1 was accepted")
    except (ssl.SSLError, ConnectionError):
        pass
    assert (await over_tls(gateway, client, post(model="prefixed"))).status == 200


async def test_backends_over_tls_with_an_authority_of_their_own(secure):
    gateway, upstreams, seen, client = secure
    for name in ("private", "named"):
        got = await over_tls(gateway, client, post(model=name))
        assert (got.status, got.body) == (200, COMPLETION)
        got = await over_tls(gateway, client, post(model=name, stream=True))
        assert got.whole and b"[DONE]" in got.body
        assert len(upstreams[name].calls) >= 2
    assert set(seen["named"]) == {"engine.internal"}
    assert set(seen["private"]) <= {None, "127.0.0.1"}


async def test_a_backend_that_cannot_be_trusted_gets_nothing(secure):
    gateway, upstreams, _, client = secure
    for name in ("misnamed", "untrusted"):
        assert await gateway.gate(name) != "open"
        got = await over_tls(gateway, client, post(model=name))
        assert got.status == 503, got.body
        assert upstreams[name].calls == [] and upstreams[name].own == []


async def test_a_backend_on_a_unix_socket(secure):
    gateway, upstreams, _, client = secure
    got = await over_tls(gateway, client, post(model="socket"))
    assert (got.status, got.body) == (200, COMPLETION)
    got = await over_tls(gateway, client, post(model="socket", stream=True))
    assert got.whole and b"[DONE]" in got.body
    assert len(upstreams["socket"].calls) == 2
    assert upstreams["socket"].calls[0].fields["host"]
    await upstreams["socket"].stop()
    got = await over_tls(gateway, client, post(model="socket"))
    assert got.status in (502, 503)

    async def shut() -> bool:
        return await gateway.gate("socket") != "open"

    await within(10, shut, "the gate closes")
