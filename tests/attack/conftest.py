"""What the attacks share: one event loop, and a gateway before two scripted backends, `a` and `b`, of which `b` has a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.edge_local.issuer import AUDIENCE, ISSUER, key_set, public_jwk
from tests.support.gateway import Backend, GatewayProcess
from tests.support.upstream import ScriptedUpstream

HERE = Path(__file__).parent
UPSTREAM_KEY = "sk-upstream-0c2d-secret"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All on one loop, so that the backends outlive a test."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class Fort:
    """The gateway under attack, and its backends."""

    def __init__(self, gateway: GatewayProcess, upstreams: dict[str, ScriptedUpstream]) -> None:
        self.gateway, self.upstreams, self.port = gateway, upstreams, gateway.port

    @property
    def calls(self) -> int:
        """Requests that reached a backend."""
        return sum(len(each.calls) for each in self.upstreams.values())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_fort(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fort]:
    upstreams = {name: ScriptedUpstream() for name in ("a", "b")}
    for upstream in upstreams.values():
        await upstream.start()
    folder = tmp_path_factory.mktemp("fort")
    (folder / "keys.json").write_bytes(key_set(public_jwk("RS256", "k1")))
    gateway = GatewayProcess(
        folder,
        {"a": Backend(upstreams["a"], 8), "b": Backend(upstreams["b"], 8, extra={"api_key_env": "UPSTREAM_KEY"})},
        env={"UPSTREAM_KEY": UPSTREAM_KEY},
        tenants={"acme": {}, "other": {"models": ["b"]}},
        breaker={"min_requests": 1_000_000, "consecutive_failures": 1_000_000},
        timeouts={"queue_s": 1, "first_token_s": 2, "stall_s": 1, "execution_s": 5},
        oidc={"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "keys.json"},
    )
    async with gateway:
        yield Fort(gateway, upstreams)
    for upstream in upstreams.values():
        await upstream.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def fort(shared_fort: Fort) -> AsyncIterator[Fort]:
    """Afterwards the gateway has nothing in flight, has not said a traceback, and serves."""
    yield shared_fort
    for upstream in shared_fort.upstreams.values():
        await upstream.reset()
    await shared_fort.gateway.settled()
    assert "Traceback" not in shared_fort.gateway.log()
