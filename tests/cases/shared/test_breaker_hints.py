"""One replica's open circuit is known to the others, and each asks the backend for itself."""

from __future__ import annotations

from tests.cases.shared.conftest import Pair
from tests.state.fleet import ReplicaProcess, complete
from tests.support.client import within

FAILURES = 5


async def _open(pair: Pair, replica: ReplicaProcess) -> None:
    """Fail as many requests of one replica as open its breaker."""
    pair.upstream.failing = {await pair.name_of(replica)}
    for _ in range(FAILURES):
        assert await complete(replica.port) == 502
    await replica.breaker_is("a", "open", "half_open")


def _asked(pair: Pair, name: str) -> int:
    """How often a replica has sent its own one-token question."""
    return sum(call.fields["x-plimsoll-gateway"] == name for call in pair.upstream.own)


async def _elsewhere(replica: ReplicaProcess, count: int) -> None:
    async def told() -> bool:
        return await replica.value("plimsoll_breaker_elsewhere") == count

    await within(5, told, f"{count} other replicas have a breaker that is not closed")


async def test_the_others_ask_for_themselves_and_go_on(pair: Pair) -> None:
    name = await pair.name_of(pair.y)
    asked = _asked(pair, name)
    await _open(pair, pair.x)
    await within(5, lambda: _asked(pair, name) == asked + 1, "the other replica asks, once")
    await _elsewhere(pair.y, 1)
    assert (await pair.y.status())["backends"][0]["breaker_elsewhere"] == 1
    await pair.y.breaker_is("a", "closed")
    assert await complete(pair.y.port) == 200
    assert await pair.x.value("plimsoll_breaker_elsewhere") == 0
    pair.upstream.failing = set()
    await pair.serving()
    await _elsewhere(pair.y, 0)


async def test_what_fails_for_them_too_opens_theirs_before_a_request_is_lost(pair: Pair) -> None:
    name = await pair.name_of(pair.y)
    before = len(pair.upstream.reached)
    pair.upstream.probe_status = b"500 Internal Server Error"
    await _open(pair, pair.x)
    await pair.y.breaker_is("a", "open", "half_open")
    await _elsewhere(pair.x, 1)
    assert [gateway for gateway, _ in pair.upstream.reached[before:] if gateway == name] == []
    pair.upstream.failing, pair.upstream.probe_status = set(), b"200 OK"
    await pair.serving()
    for replica in (pair.x, pair.y):
        await _elsewhere(replica, 0)
