"""`plimsoll retest list` and `plan` at one replica tell the demand of all, and a restart counts nothing twice."""

from __future__ import annotations

import json
from typing import Any

from tests.cases.shared.conftest import Pair
from tests.edge_path.wire import post, wire
from tests.state.fleet import ReplicaProcess, complete
from tests.support.client import get, within
from tests.support.gateway import KEYS

TOO_LONG = 700


async def _listed(replica: ReplicaProcess) -> dict[str, Any]:
    found: dict[str, Any] = (await get(replica.admin_port, "/admin/retest", KEYS["operator"])).json()
    return found


async def _count(replica: ReplicaProcess) -> int:
    return sum(row["count"] for row in (await _listed(replica))["groups"] if row["axis"] == "output")


async def _both_tell(pair: Pair, count: int) -> None:
    for replica in (pair.x, pair.y):

        async def told(replica: ReplicaProcess = replica) -> bool:
            return await _count(replica) == count

        await within(8, told, f"{count} requests that left the slices")


async def test_one_replica_tells_the_demand_of_all(pair: Pair) -> None:
    before = await _count(pair.x)
    for replica, times in ((pair.x, 3), (pair.y, 2)):
        for _ in range(times):
            assert await complete(replica.port, max_tokens=TOO_LONG) == 400
    await _both_tell(pair, before + 5)
    assert (await _listed(pair.x))["replicas"] == 2
    await pair.x.stop()
    await pair.restart(pair.x)
    await pair.serving()
    await _both_tell(pair, before + 5)
    assert await complete(pair.x.port, max_tokens=TOO_LONG) == 400
    await _both_tell(pair, before + 6)
    async with wire(pair.y.admin_port) as client:
        await client.send(post({"model": "tiny", "share": 0.9}, path="/admin/retest/plan", key=KEYS["operator"]))
        plan = json.loads((await client.response()).body)
    assert plan["cells"][0]["output_tokens"]["max"] >= TOO_LONG
