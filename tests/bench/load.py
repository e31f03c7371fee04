"""A load generator on the gateway's own upstream client. `python -m tests.bench.load PORT MODE CONNECTIONS SECONDS`

MODE `once`: each connection sends the next request when the last is answered. `stream`: the same with streams of 200 events.
`paced`: requests are sent at CONNECTIONS a second, whatever comes back. Prints one JSON line: how many, how many were bad,
content events, and for `paced` the milliseconds from the intended send time (p50, p99).
"""

from __future__ import annotations

import asyncio
import sys
import time

import orjson
import uvloop

from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import Connection, Headers, Upstream, UpstreamFailure
from tests.bench.fixture import KEY

ONCE = {"model": "tiny", "messages": [{"role": "user", "content": "the sea is wide " * 45}], "max_tokens": 8}
STREAM = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "stream": True}


class Call:
    """One request: `done` is whether it was answered 200 and whole."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.status = 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: Headers) -> None:
        self.status = status

    def data(self, data: bytes) -> None:
        self.totals.events += data.count(b"data: {")

    def end(self) -> None:
        self._over(self.status == 200)

    def lost(self, failure: UpstreamFailure) -> None:
        self._over(False)

    def _over(self, good: bool) -> None:
        self.totals.count += 1
        self.totals.bad += not good
        self.done.set_result(good)


class Totals:
    def __init__(self) -> None:
        self.count = self.bad = self.events = 0
        self.latencies: list[float] = []


async def worker(upstream: Upstream, request: bytes, totals: Totals, end: float) -> None:
    while time.perf_counter() < end:
        await call(upstream, request, totals)


async def call(upstream: Upstream, request: bytes, totals: Totals) -> None:
    connection: Connection = upstream.take() or await upstream.connect()
    each = Call(totals)
    connection.send(request, each)
    await each.done


async def paced(upstream: Upstream, request: bytes, totals: Totals, rate: float, seconds: float) -> None:
    start, tasks = time.perf_counter() + 0.1, []

    async def one(due: float) -> None:
        await call(upstream, request, totals)
        totals.latencies.append(1000 * (time.perf_counter() - due))

    for number in range(int(rate * seconds)):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)


async def main(port: int, mode: str, connections: int, seconds: float) -> None:
    upstream = Upstream(
        Endpoint.from_url(f"http://127.0.0.1:{port}"), api_key=KEY.encode(), instance="load", connect_timeout_s=10, attest=False
    )
    body = orjson.dumps(STREAM if mode == "stream" else ONCE)
    request = upstream.request(b"/v1/chat/completions", b"load", b"application/json", body)
    totals, began = Totals(), time.perf_counter()
    if mode == "paced":
        await paced(upstream, request, totals, connections, seconds)
    else:
        await asyncio.gather(*[worker(upstream, request, totals, began + seconds) for _ in range(connections)])
    took, latencies = time.perf_counter() - began, sorted(totals.latencies)
    row = {"count": totals.count, "bad": totals.bad, "events": totals.events, "seconds": took}
    if latencies:
        row |= {f"p{p}": latencies[len(latencies) * p // 100] for p in (50, 99)}
    print(orjson.dumps(row).decode())


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
