"""A second shared gateway: the one that is attacked from the outside, with everything switched on that has a door.

Owns: backends with and without a key of their own, one that hears audio, one that takes images, one that pools; CORS; tenants
with and without budgets; tight bounds on time and connections' bodies. Talks to `gateway` and `upstream`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.client import KEY, within
from tests.support.gateway import KEYS, Backend, GatewayProcess, hash_of
from tests.support.upstream import ScriptedUpstream

ORIGIN = "https://app.example"
UPSTREAM_KEY = "sk-upstream-7f3a90c1-secret"
BODY_TIMEOUT_S = 1.0
MAX_BODY_BYTES = 20_971_520
WIDTHS = {"keyed": 64, "bare": 64, "images": 16, "speech": 8, "pool": 16}
POOR = tuple(f"poor-{number}" for number in range(10))  # tenants with 1,000 tokens a minute each
IMAGE_TOKENS = 500


class Quay(GatewayProcess):
    """The process of `quay`. A model of each backend's name, `org/name` and `alias`, which is `upstream/name` behind."""

    def policy(self) -> dict[str, Any]:
        document = super().policy()
        document["models"]["alias"]["upstream_model"] = "upstream/name"
        document["tenants"] = {
            "acme": {}, "other": {"models": ["bare"]}, **{name: {"tokens_per_minute": 1000} for name in POOR},
        }  # fmt: skip
        for name in POOR:
            document["keys"].append({"id": name, "hash": hash_of(f"sk-{name}"), "role": "client", "tenant": name})
        document["keys"].append(
            {"id": "old", "hash": hash_of("sk-old"), "role": "client", "tenant": "acme", "expires": "2020-01-01T00:00:00Z"}
        )
        return document

    async def settled(self, timeout: float = 5) -> None:
        """As of every gateway, asked in one question, for there are hundreds of tests."""

        async def empty() -> bool:
            status = await self.status()
            return not any(each["in_flight_requests"] for each in status["backends"]) and not any(
                each["requests"] for each in status["queues"]
            )

        await within(timeout, empty, "nothing in flight and nothing queued")


def quay_process(folder: Path, upstreams: dict[str, ScriptedUpstream], **sections: Any) -> Quay:
    """A gateway in front of `upstreams`, named as in `WIDTHS`."""
    kinds = {"speech": {"task": "transcribe"}, "pool": {"task": "pool"}, "images": {"features": ("media",)}}
    key = {"api_key_env": "UPSTREAM_KEY"}
    backends = {
        name: Backend(upstream, WIDTHS[name], input_max=8192, extra={} if name == "bare" else key, **kinds.get(name, {}))
        for name, upstream in upstreams.items()
    }
    models = {name: [name] for name in upstreams} | {"org/name": ["keyed"], "alias": ["keyed"]}
    server = {
        "listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "cors_origins": [ORIGIN],
        "body_timeout_s": BODY_TIMEOUT_S, "max_body_bytes": MAX_BODY_BYTES,
    }  # fmt: skip
    options = {"media": {"image_tokens": IMAGE_TOKENS, "audio_tokens_per_s": 10}}
    return Quay(
        folder, backends, models, model_options=options, env={"UPSTREAM_KEY": UPSTREAM_KEY},
        **{"server": server, "timeouts": {"connect_s": 0.5, "execution_s": 8, "queue_s": 2},
           "breaker": {"min_requests": 1_000_000, "consecutive_failures": 1_000_000}, **sections},
    )  # fmt: skip


class Shore:
    """`quay` as a test sees it: the process, its ports and its backends."""

    def __init__(self, gateway: Quay, upstreams: dict[str, ScriptedUpstream]) -> None:
        self.gateway, self.upstreams = gateway, upstreams

    @property
    def port(self) -> int:
        return self.gateway.port

    @property
    def admin_port(self) -> int:
        return self.gateway.admin_port

    def __getitem__(self, backend: str) -> ScriptedUpstream:
        return self.upstreams[backend]

    @property
    def calls(self) -> list[Any]:
        """Every request that reached any backend on the data path."""
        return [call for upstream in self.upstreams.values() for call in upstream.calls]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_quay(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shore]:
    """The process, started once."""
    upstreams = {name: ScriptedUpstream() for name in WIDTHS}
    for upstream in upstreams.values():
        await upstream.start()
    async with quay_process(tmp_path_factory.mktemp("quay"), upstreams) as gateway:
        yield Shore(gateway, upstreams)
    for upstream in upstreams.values():
        await upstream.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def quay(shared_quay: Shore) -> AsyncIterator[Shore]:
    """The attacked gateway: afterwards it is alive, holds nothing, and has logged no traceback."""
    yield shared_quay
    for upstream in shared_quay.upstreams.values():
        await upstream.reset()
    await shared_quay.gateway.settled()
    assert "Traceback" not in shared_quay.gateway.log()


__all__ = ["KEY", "KEYS", "ORIGIN", "UPSTREAM_KEY", "Shore", "quay", "shared_quay"]
