"""Case 33, the half about streams: a reload that changes a backend, or its clocks, does not touch what runs."""

from __future__ import annotations

import pytest

from tests.cases.common import streaming_for
from tests.cases.conftest import TIMEOUTS
from tests.support.client import ask, open_stream
from tests.support.upstream import STREAM

CHANGES = {
    "the connect timeout": {"timeouts": {**TIMEOUTS, "connect_s": 0.7}},
    "the stall limit": {"timeouts": {**TIMEOUTS, "stall_s": 1}},
    "the breaker": {"breaker": {"consecutive_failures": 3, "cooldown_s": 0.5}},
    "the backend's section": {"backends": "foreign"},
    "the backend is gone": {"backends": "gone"},
}


@pytest.mark.parametrize("name", CHANGES)
async def test_what_runs_goes_on(tideway, name):
    gateway, change = tideway.gateway, CHANGES[name]
    tideway["left"].script = streaming_for(1)
    async with open_stream(tideway.port, model="left") as stream:
        if change.get("backends") == "foreign":
            document = gateway.policy()
            document["backends"]["left"]["foreign"] = "count"
            await gateway.reload_document(document)
        elif change.get("backends") == "gone":
            document = gateway.policy()
            del document["backends"]["left"], document["models"]["left"]
            await gateway.reload_document(document)
            assert (await ask(tideway.port, model="left")).status == 404
        else:
            await gateway.reload(**change)
        body, whole = await stream.finish()
    assert whole and body.endswith(b"".join(STREAM))
    await gateway.reload_document(gateway.policy())
    await gateway.opened("left")
    assert (await ask(tideway.port, model="left")).status == 200
