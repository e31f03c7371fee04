"""One gateway before three simulators: `tiny` is measured, `bare` is not rightly, `drifter` is measured and then changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.world import WAITING, World
from tests.support.attested import AttestedGateway, Box, fetch_identity, record_from, simulator

HERE = Path(__file__).parent
TENANTS = {
    "few": {"requests_per_minute": 1},
    "little": {"tokens_per_minute": 150},
    "one": {"max_in_flight": 1},
    "elsewhere": {"models": ["bare"]},
}
BOXES = (Box(1024, 256, 8, features=("structured_output",)), Box(512, 0, 8, task="pool"))
TIMEOUTS = {"queue_s": 1, "first_token_s": 1.5, "stall_s": 3, "execution_s": 20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here run on one loop, so that the processes outlive a test."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("clients")
    async with AsyncExitStack() as stack:
        flags = {"tiny": ("--speed", "4"), "bare": ("--max-num-seqs", "12"), "drifter": ("--max-num-seqs", "10")}
        urls = {
            name: await stack.enter_async_context(simulator(folder / f"{name}.log", "--served-model-name", name, *more))
            for name, more in flags.items()
        }
        gateway = AttestedGateway(
            folder, urls,
            [
                record_from(fetch_identity(urls[name]), BOXES, "unknown" if name == "bare" else "omitted") for name in flags
            ],
            keys={f"sk-{tenant}": tenant for tenant in TENANTS}, wait_for=("tiny", "drifter"),
            tenants={"acme": {}, "other": {"class": "batch"}, **TENANTS},
            timeouts=TIMEOUTS, queue={"max_requests": WAITING}, server={"max_body_bytes": 200_000},
            breaker={"min_requests": 1_000_000, "consecutive_failures": 1_000_000},
        )  # fmt: skip
        await stack.enter_async_context(gateway)
        yield World(gateway, urls)
