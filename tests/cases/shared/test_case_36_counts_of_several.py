"""36: metrics of several processes: what is in flight is what is there, whoever dies; nothing is left behind between rounds."""

from __future__ import annotations

from tests.cases.shared.conftest import Pair
from tests.support.client import within

ROUNDS = 2


async def _shows(pair: Pair, x: int, y: int) -> None:
    """The gauges of both replicas, which may be a fifth of a second old."""

    async def told() -> bool:
        return (await pair.x.in_flight(), await pair.y.in_flight()) == (x, y)

    await within(3, told, f"in flight: {x} and {y}")


async def test_gauges_tell_the_truth_after_kills(pair: Pair) -> None:
    before = await pair.y.value("plimsoll_requests_total")
    for _ in range(ROUNDS):
        mine = await pair.hold(pair.y, 2)
        theirs = await pair.hold(pair.x, 3)
        await _shows(pair, 3, 2)
        process = pair.x.process
        assert process is not None
        process.kill()
        await process.wait()
        await pair.restart(pair.x)
        await pair.serving()
        assert len(pair.upstream.running) == 2
        await _shows(pair, 0, 2)
        pair.upstream.release.set()
        assert [await task for task in mine] == [200, 200]
        assert {await task for task in theirs} == {0}
        await pair.settled()
        pair.upstream.release.clear()
        after = await pair.y.value("plimsoll_requests_total")
        assert after >= before + 2
        before = after
