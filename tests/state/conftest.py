"""One redis-server for all tests of this folder; each test has a namespace of its own on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(service: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(service("redis-server"), tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()
