"""What sharing adds to a request through HTTP: `python -m tests.state.latency [RATE] [ROUNDS]`. Prints one JSON document.

Two gateways before the benchmark's stand-in, one with its state in memory, one with a real Redis on the loopback, under the same
paced load in turns, so that what else the machine does meets both. Milliseconds from the intended time of sending to the end of
the answer; the figures are the medians over the rounds. `ping`: one bare PING at the same pace, which is what this machine takes
for a round trip to a process that sleeps; nothing that asks Redis once can add less.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop
import yaml

from tests.bench import fixture
from tests.bench.run import ROOT, until_it_answers
from tests.support.redis_server import RedisServer

SECONDS = 5


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(40)


def policy(folder: Path, backend: int, state: dict[str, Any]) -> tuple[Path, int]:
    """A policy file like the benchmark's, and the port that it listens on."""
    document = yaml.safe_load((fixture.HERE / "policy.yaml").read_text())
    port = free_port()
    folder.mkdir()
    document["server"] = {"listen": f"127.0.0.1:{port}", "admin_listen": f"127.0.0.1:{free_port()}"}
    document["backends"]["a"]["url"] = f"http://127.0.0.1:{backend}"
    document["models"]["tiny"]["tokenizer"] = str(ROOT / "gateway" / "simulator" / "model")
    shutil.copytree(fixture.HERE / "records", folder / "records")
    (folder / "policy.yaml").write_text(yaml.safe_dump({**document, "state": state}))
    return folder / "policy.yaml", port


async def paced(port: int, rate: int) -> dict[str, float]:
    """One round of load."""
    words = ("-m", "tests.bench.load", str(port), "paced", str(rate), str(SECONDS))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    found: dict[str, float] = json.loads((await process.communicate())[0])
    assert found["bad"] == 0, found
    return found


async def pings(port: int, rate: int) -> dict[str, float]:
    """One round of bare round trips to Redis, milliseconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop, took = asyncio.get_running_loop(), []
    begun = loop.time()
    for number in range(rate * SECONDS):
        await asyncio.sleep(begun + number / rate - loop.time())
        sent = time.perf_counter()
        writer.write(b"PING\r\n")
        await reader.readline()
        took.append((time.perf_counter() - sent) * 1000)
    writer.close()
    took.sort()
    return {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100]}


def measure(folder: Path, redis: RedisServer, rate: int, rounds: int) -> dict[str, Any]:
    backend = free_port()
    states = {"memory": {"url": "memory"}, "redis": {"url": redis.url, "lease_s": 2}}
    ports: dict[str, int] = {}
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in (*states, "ping")}
    with ExitStack() as stack:
        stack.enter_context(running("tests.bench.standin", str(backend)))
        for kind, state in states.items():
            file, ports[kind] = policy(folder / f"on-{kind}", backend, state)
            stack.enter_context(running("gateway", "serve", "--policy", str(file)))
        for port in ports.values():
            until_it_answers(port)
        for turn in range(rounds + 1):
            for kind, port in ports.items():
                row = asyncio.run(paced(port, rate))
                if turn:  # the first warms up
                    rows[kind].append(row)
            if turn:
                rows["ping"].append(uvloop.run(pings(redis.port, rate)))
    found = {k: {q: round(statistics.median(r[q] for r in of), 3) for q in ("p50", "p99")} for k, of in rows.items()}
    added = {q: round(found["redis"][q] - found["memory"][q], 3) for q in ("p50", "p99")}
    return {"requests_per_s": rate, "rounds": rounds, "ms": found, "added_ms": added, "load_average": os.getloadavg()[0]}


def main() -> None:
    words = sys.argv[1:]
    rate, rounds = int(words[0]) if words else 100, int(words[1]) if len(words) > 1 else 5
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is not installed"
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(program, Path(folder) / "redis")
        redis.start()
        try:
            print(json.dumps(measure(Path(folder), redis, rate, rounds), indent=2))
        finally:
            redis.stop()


if __name__ == "__main__":
    main()
