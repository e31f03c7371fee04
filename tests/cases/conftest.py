"""What the field cases share: one event loop, and one gateway in front of scripted backends of different width.

Starting a gateway costs seconds, so that most cases use `harbour`; those that open breakers, end the process or need other
clocks start their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.gateway import Backend, GatewayProcess
from tests.support.quay import quay, shared_quay  # noqa: F401 - fixtures of the cases that attack from outside
from tests.support.upstream import ScriptedUpstream

HERE = Path(__file__).parent
TIMEOUTS = {"queue_s": 3, "connect_s": 0.5, "first_token_s": 0.6, "stall_s": 0.6, "execution_s": 8, "client_write_s": 1.5}
NEVER_OPENS = {"min_requests": 1_000_000, "consecutive_failures": 1_000_000}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases run on one loop, so that the gateway's backends outlive a test."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class Harbour:
    """The shared gateway and its backends: `one` takes one at a time, `eight` eight, `wide` 256, `pair` is two of two."""

    def __init__(self, gateway: GatewayProcess, upstreams: dict[str, ScriptedUpstream]) -> None:
        self.gateway, self.upstreams = gateway, upstreams

    @property
    def port(self) -> int:
        return self.gateway.port

    def __getitem__(self, backend: str) -> ScriptedUpstream:
        return self.upstreams[backend]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_harbour(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    upstreams = {name: ScriptedUpstream() for name in ("one", "eight", "wide", "left", "right")}
    for upstream in upstreams.values():
        await upstream.start()
    widths = {"one": 1, "eight": 8, "wide": 256, "left": 2, "right": 2}
    gateway = GatewayProcess(
        tmp_path_factory.mktemp("harbour"),
        {name: Backend(upstream, widths[name]) for name, upstream in upstreams.items()},
        {"one": ["one"], "eight": ["eight"], "wide": ["wide"], "pair": ["left", "right"]},
        timeouts=TIMEOUTS, breaker=NEVER_OPENS, queue={"max_requests": 100},
    )  # fmt: skip
    async with gateway:
        yield Harbour(gateway, upstreams)
    for upstream in upstreams.values():
        await upstream.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def harbour(shared_harbour: Harbour) -> AsyncIterator[Harbour]:
    """The shared gateway, with nothing in flight before the test and nothing after it."""
    yield shared_harbour
    for upstream in shared_harbour.upstreams.values():
        await upstream.reset()
    await shared_harbour.gateway.settled()
