"""What the field cases share: one event loop, and one gateway in front of scripted backends of different width.

Starting a gateway costs seconds, so that most cases use `harbour`; those that open breakers, end the process or need other
clocks start their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.client import ask, within
from tests.support.gateway import Backend, GatewayProcess
from tests.support.quay import quay, shared_quay  # noqa: F401 - fixtures of the cases that attack from outside
from tests.support.upstream import ScriptedUpstream

HERE = Path(__file__).parent
TIMEOUTS = {"queue_s": 1.5, "connect_s": 0.5, "first_token_s": 1, "stall_s": 0.8, "execution_s": 3.5, "client_write_s": 1.5}
NEVER_OPENS = {"min_requests": 1_000_000, "consecutive_failures": 1_000_000}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases run on one loop, so that the gateway's backends outlive a test."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class Harbour:
    """The shared gateway and its backends: `one` takes one at a time, `eight` eight, `wide` 256, `pair` is two of two,
    `huge` takes prompts of megabytes."""

    def __init__(self, gateway: GatewayProcess, upstreams: dict[str, ScriptedUpstream]) -> None:
        self.gateway, self.upstreams = gateway, upstreams

    @property
    def port(self) -> int:
        return self.gateway.port

    def __getitem__(self, backend: str) -> ScriptedUpstream:
        return self.upstreams[backend]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_harbour(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    upstreams = {name: ScriptedUpstream() for name in ("one", "eight", "wide", "huge", "left", "right")}
    for upstream in upstreams.values():
        await upstream.start()
    widths = {"one": 1, "eight": 8, "wide": 256, "huge": 2, "left": 2, "right": 2}
    gateway = GatewayProcess(
        tmp_path_factory.mktemp("harbour"),
        {name: Backend(each, widths[name], 16_000_000 if name == "huge" else 4096) for name, each in upstreams.items()},
        {"one": ["one"], "eight": ["eight"], "wide": ["wide"], "huge": ["huge"], "pair": ["left", "right"]},
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_tideway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    upstreams = {"one": ScriptedUpstream(), "left": ScriptedUpstream()}
    for upstream in upstreams.values():
        await upstream.start()
    gateway = GatewayProcess(
        tmp_path_factory.mktemp("tideway"),
        {"one": Backend(upstreams["one"], 1), "left": Backend(upstreams["left"], 8)},
        timeouts=TIMEOUTS, breaker={"min_requests": 10, "consecutive_failures": 5, "cooldown_s": 0.3},
    )  # fmt: skip
    async with gateway:
        yield Harbour(gateway, upstreams)
    for upstream in upstreams.values():
        await upstream.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def tideway(shared_tideway: Harbour) -> AsyncIterator[Harbour]:
    """A gateway whose policy a test may change (`gateway.reload`) and whose breakers open quickly: five failures, 0.3 s.

    Backends: `one` takes one at a time, `left` eight. Afterwards the breakers are closed again and the policy is the old one.
    """
    sections = dict(shared_tideway.gateway.sections)
    yield shared_tideway
    for upstream in shared_tideway.upstreams.values():
        await upstream.reset()
    gateway = shared_tideway.gateway
    if gateway.sections != sections:
        gateway.sections = sections
        await gateway.reload()
    for backend in shared_tideway.upstreams:

        async def closed(backend: str = backend) -> bool:
            return (await ask(gateway.port, model=backend)).status == 200  # a good probe closes it

        await within(5, closed, f"the breaker of {backend} is closed")
    for upstream in shared_tideway.upstreams.values():
        await upstream.reset()
    await gateway.settled()
