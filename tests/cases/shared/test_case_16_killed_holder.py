"""16: a replica is killed with requests at the backend: its places come back, and those of the living stay."""

from __future__ import annotations

import asyncio

from tests.cases.shared.conftest import Pair
from tests.state.fleet import complete
from tests.support.client import within


async def test_the_places_of_a_killed_replica_come_back(pair: Pair) -> None:
    mine = await pair.hold(pair.y, 2)
    theirs = await pair.hold(pair.x, 6)
    process = pair.x.process
    assert process is not None
    process.kill()
    await process.wait()
    assert await complete(pair.y.port) == 200  # waits until the backend's count says that they are gone
    await within(10, lambda: pair.leases() == 2, "only the living hold")
    await pair.restart(pair.x)
    await pair.serving()
    await within(5, lambda: pair.leases() == 2, "the restart has swept nobody")
    assert not any(task.done() for task in mine)
    pair.upstream.release.set()
    assert [await task for task in mine] == [200, 200]
    assert {await task for task in theirs} == {0}


async def test_killed_while_asking(pair: Pair) -> None:
    """Between acquire and dispatch: the slow network holds the answer back while the replica dies."""
    pair.proxy.delay_s = 0.05
    asked = [asyncio.create_task(complete(pair.x.port)) for _ in range(8)]
    await within(5, lambda: pair.leases() > 0, "leases are granted that nobody has used yet")
    process = pair.x.process
    assert process is not None
    process.kill()
    await process.wait()
    await asyncio.gather(*asked)
    pair.proxy.delay_s = 0.0
    assert await asyncio.gather(*(complete(pair.y.port) for _ in range(8))) == [200] * 8
    await within(10, lambda: pair.leases() == 0, "nothing is left of the dead")
    await pair.restart(pair.x)
