"""Fixtures that every area may use.

`service` finds a program that a test needs (redis-server, promtool, chromium). Where it is missing the test is skipped
and says so; with PLIMSOLL_REQUIRE_SERVICES=1 (as .ci/run sets) it fails instead, so that nothing is skipped unseen.

In this process the tests run the sources, which coverage can follow; gateways that they start by themselves run what users run,
the compiled build where there is one. `make test-compiled` has some of the former on the compiled build as well.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ.setdefault("PLIMSOLL_INTERPRETED", "1")  # before anything here imports the gateway

# Generated cases are new ones on every developer's run, and the same ones in CI: there a red run is a fault of the change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def service() -> Callable[[str], str]:
    """`service("redis-server")` -> the path of the program."""

    def find(program: str) -> str:
        path = shutil.which(program)
        if path is None and os.environ.get("PLIMSOLL_REQUIRE_SERVICES") == "1":
            pytest.fail(f"{program} is not installed, and PLIMSOLL_REQUIRE_SERVICES asks for it")
        if path is None:
            pytest.skip(f"{program} is not installed")
        return path

    return find
