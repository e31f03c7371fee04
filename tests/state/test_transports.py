"""All that is shared, over every way to Redis: a password, TLS with certificates on both sides, a socket file, a cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from redis.crc import key_slot

from gateway.errors import Axis
from gateway.flow.demand import Demand, Limits
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.observe.retest import Ledger
from gateway.shared_ledger import SharedLedger
from gateway.shared_quotas import SharedQuotas
from gateway.state.leases import StateLost, Verdict
from gateway.state.news import News
from gateway.state.nodes import SLOTS
from gateway.state.redis_store import RedisLeases
from tests.state.stores import MIXED, Replica, ask, connect, past_cold
from tests.state.test_agreement import until
from tests.state.test_link import Heard
from tests.support.authority import Authority
from tests.support.redis_server import RedisServer

LOOPBACK: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]


class Way(NamedTuple):
    """A server and the address by which it is reached."""

    server: RedisServer
    url: str


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _password(program: str, folder: Path) -> Way:
    server = RedisServer(program, folder)
    server.start()
    server.client.config_set("requirepass", "s3cret")
    return Way(server, f"redis://default:s3cret@127.0.0.1:{server.port}/3")


def _socket_file(program: str, folder: Path) -> Way:
    server = RedisServer(program, folder, "--unixsocket", str(folder / "redis.sock"))
    server.start()
    return Way(server, f"unix://{folder / 'redis.sock'}")


def _tls(program: str, folder: Path) -> Way:
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder, "authority")
    certificate, key = authority.issue("redis", LOOPBACK)
    own, own_key = authority.issue("replica", LOOPBACK)
    server = RedisServer(program, folder)
    server.options = (
        "--tls-port", str(_free_port()), "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-ca-cert-file", str(authority.file),
    )  # fmt: skip
    server.start()
    query = f"ssl_ca_certs={authority.file}&ssl_certfile={own}&ssl_keyfile={own_key}"
    return Way(server, f"rediss://127.0.0.1:{server.options[1]}/0?{query}")


def _cluster_of_one(program: str, folder: Path) -> Way:
    server = RedisServer(program, folder, "--cluster-enabled", "yes", "--cluster-port", str(_free_port()))
    server.start()
    server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    _stands([server])
    return Way(server, server.url)


def _stands(nodes: list[RedisServer]) -> None:
    """Wait until every node says that all slots are served."""
    deadline = time.monotonic() + 30
    while not all(b"cluster_state:ok" in node.client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True) for node in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


WAYS: dict[str, Callable[[str, Path], Way]] = {
    "password": _password, "socket file": _socket_file, "tls": _tls, "cluster of one": _cluster_of_one,
}  # fmt: skip


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, service: Callable[[str], str], tmp_path: Path) -> Iterator[Way]:
    made = WAYS[request.param](service("redis-server"), tmp_path / "redis")
    yield made
    made.server.stop()


async def test_everything_that_is_shared_is_shared_this_way(way: Way) -> None:
    await everything_is_shared(way.url)


async def everything_is_shared(url: str) -> None:
    """Leases and wake-ups, presence, quotas, records and the ledger, between two replicas."""
    a, b = Replica("A"), Replica("B")
    tasks = [await connect(replica, url, "ways") for replica in (a, b)]
    stores = [replica.store for replica in (a, b)]
    for replica in (a, b):
        await replica.register()
    await past_cold(a)
    await b.store.present()
    assert await a.store.present() == ("A", "B")
    block, waiting = ask(sequences=8), ask()
    await a.takes(block)
    await b.register()
    assert (await b.acquire(waiting)).verdict is Verdict.DENIED
    await a.settle(block)
    async with asyncio.timeout(10):
        await b.woken.wait()
    await b.takes(waiting)

    demand = Demand("m", ("b",), Shape("generate", NO_FEATURES, 10, 10, 1), "t", 1.0, "interactive", 0, 1e9,
                    limits=Limits(requests_per_minute=5, max_in_flight=1))  # fmt: skip
    quotas = [SharedQuotas(store, "ways", 5.0) for store in stores if isinstance(store, RedisLeases)]
    for each, good in zip(quotas, (True, False), strict=True):
        taken = each.take(demand)
        assert taken is not None and (await taken.refusal() is None) is good

    records: list[bytes | None] = []
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    news = [
        News(store, "ways", on_drift=nothing, on_breaker=nothing, on_record=lambda _, raw, __: records.append(raw))
        for store in stores
        if isinstance(store, RedisLeases)
    ]
    await news[1].share([])
    await news[0].share([("ab" * 32, lambda: b"raw", ("signed",))])
    await until(lambda: records == [b"raw"])

    ledgers = [Ledger(), Ledger()]
    shared = [SharedLedger(s, "ways", ledger) for s, ledger in zip(stores, ledgers, strict=True) if isinstance(s, RedisLeases)]
    ledgers[0].note("m", "b", "h", Axis.INPUT, None, 1.0)
    await shared[0].say(0.0)
    assert (await shared[1].all())[1] == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_server_with_another_certificate_is_not_talked_to(service: Callable[[str], str], tmp_path: Path) -> None:
    made = _tls(service("redis-server"), tmp_path / "redis")
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    url = made.url.replace(str(tmp_path / "redis" / "authority.pem"), str(other.file))
    async with Heard(url, 0.2) as heard, Heard(made.url, 5.0) as known:
        await until(lambda: known.link.up)
        assert heard.ups == []
    made.server.stop()


@pytest.fixture
def three(service: Callable[[str], str], tmp_path: Path) -> Iterator[list[RedisServer]]:
    """A cluster of three masters."""
    made = []
    for number in range(3):
        bus = str(_free_port())
        options = ("--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "1000")
        made.append(RedisServer(service("redis-server"), tmp_path / f"node{number}", *options))
    for number, server in enumerate(made):
        server.start()
        first = SLOTS * number // 3
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, SLOTS * (number + 1) // 3 - 1)
        server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", made[0].port, int(made[0].options[3]))
    _stands(made)
    yield made
    for server in made:
        server.stop()


async def test_a_cluster_of_three(three: list[RedisServer]) -> None:
    await everything_is_shared(three[1].url)
    assert sum(server.client.dbsize() > 0 for server in three) > 1  # it was spread


async def test_a_master_that_is_away_is_a_loss_and_a_slot_that_moves_another(three: list[RedisServer]) -> None:
    lost: list[str] = []
    replica = Replica("A")
    store = RedisLeases(three[0].url, "A", namespace="three", lease_s=5.0, timeout_s=1.0, on_wake=replica.on_wake,
                        on_state=lambda why: lost.append(why) if why is not None else None)  # fmt: skip
    task = asyncio.create_task(store.run())
    await until(lambda: store.link.up, 20)
    backends = [f"b{number}" for number in range(12)]  # some on each
    for name in backends:
        assert (await store.beat(name, MIXED, None, [])).verdict is Verdict.OK
    await asyncio.to_thread(three[2].stop)
    await until(lambda: bool(lost) and not store.link.up, 20)
    with pytest.raises(StateLost):
        await store.beat("b0", MIXED, None, [])
    await asyncio.to_thread(three[2].start)
    await asyncio.to_thread(_stands, three)
    await until(lambda: store.link.up, 20)
    for name in backends:
        assert (await store.beat(name, MIXED, None, [])).verdict is Verdict.OK

    moved = key_slot(b"v1:three:other")
    owner = moved * 3 // SLOTS
    other = three[(owner + 1) % 3].client.execute_command("CLUSTER", "MYID")
    for server in (three[(owner + 1) % 3], *three):
        server.client.execute_command("CLUSTER", "SETSLOT", moved, "NODE", other)
    before = len(lost)
    with pytest.raises(StateLost, match="MOVED"):
        await store.beat("other", MIXED, None, [])
    assert len(lost) == before + 1

    async def good() -> bool:
        try:
            return (await store.beat("other", MIXED, None, [])).verdict is Verdict.OK
        except StateLost:  # not learnt yet
            return False

    async with asyncio.timeout(20):
        while not await good():
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
