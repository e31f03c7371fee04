"""Fixtures of the tests against a real vLLM.

`vllm_server` is one server for the whole session, with the default flags: read from it, do not restart it.
`vllm_factory` starts others; each ends with the session at the latest. A start costs half a minute on two cores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.live import harness
from tests.live.harness import VllmServer
from tests.live.qualified import Qualified, gateway_before, qualify
from tests.support.attested import AttestedGateway

LIVE = Path(__file__).parent
TEST_TIMEOUT_S = 900

Start = Callable[..., VllmServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is live, and a start counts towards the time of the test that asks for it."""
    for item in items:
        if LIVE in item.path.parents:
            item.add_marker(pytest.mark.live)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def vllm_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`vllm_factory(*flags, environment=..., model=..., host=..., port=...)` -> a running, ready VllmServer."""
    if not harness.installed():
        pytest.fail("there is no vLLM environment; run deploy/vllm-cpu/setup.sh (make test-live does)")
    folder = tmp_path_factory.mktemp("vllm")
    servers: list[VllmServer] = []

    def start(*flags: str, **options: object) -> VllmServer:
        server = VllmServer(folder / f"server-{len(servers)}.log", flags, **options)  # type: ignore[arg-type]
        servers.append(server)
        server.start()
        server.wait_ready()
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def vllm_server(vllm_factory: Start) -> VllmServer:
    """The shared server: 2048 tokens, 16 sequences, 1 GiB of cache, eager, the tool parser on."""
    return vllm_factory("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def qualified(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Qualified:
    """The record of the shared server, measured once."""
    return qualify(vllm_server, tmp_path_factory.mktemp("qualified"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def live_gateway(vllm_server: VllmServer, qualified: Qualified) -> AsyncIterator[AttestedGateway]:
    """One gateway before the shared server for the whole session, open on that record."""
    async with gateway_before(vllm_server, qualified.folder / "gateway", qualified.raw) as gateway:
        yield gateway
