"""The data path in one piece, without the composition root: real uvicorn, real controller, gates set by the test."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn

from gateway import policy as policies
from gateway.edge.intake import Intake
from gateway.edge.keys import FailureLimiter
from gateway.edge.path import DataPath
from gateway.edge.protocol import PlimsollProtocol
from gateway.edge.reader import Bounds
from gateway.edge.retry_budget import RetryBudget
from gateway.edge.rules import PathRules
from gateway.flow.controller import Controller
from gateway.flow.demand import Open
from gateway.flow.envelope import Box, Envelope
from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import Upstream
from gateway.observe.metrics import Metrics, Names

KEY = "sk-bench"
POLICY = """
backends: {{a: {{url: "{url}"}}}}
models: {{tiny: {{backends: [a]}}}}
tenants: {{acme: {{}}}}
keys: [{{id: acme-1, hash: "sha256:{digest}", role: client, tenant: acme}}]
journal: {{path: null}}
"""
NO_FEATURES: frozenset[str] = frozenset()


class ByteCounter:
    """Counts a token a byte of content, at most: enough where tokens are not the point."""

    def bound(self, parsed):
        return 1, max(1, len(parsed.compact) // 2)

    async def count(self, parsed, deadline):
        return max(1, len(parsed.compact) // 2)


class Yard:
    """The backends, as the path asks for them."""

    def __init__(self, upstreams):
        self.upstreams = upstreams
        self.iterations = {}
        self.suspected = []

    def upstream(self, backend):
        return self.upstreams[backend]

    def progress(self, backend):
        return self.iterations.get(backend)

    def suspect(self, backend):
        self.suspected.append(backend)

    def counter(self, model):
        return ByteCounter()

    def server_default(self, model):
        return None


class Site:
    """One gateway. `accounts` holds every exchange in the order of their ends."""

    def __init__(self, policy, *, concurrency=512, input_max=8192, output_max=4096, journal=None):
        self.policy = policy
        self.accounts = []
        self.journal = journal
        self.triggers = []
        self.controller = Controller(policy.queue, time.monotonic, lambda *trigger: self.triggers.append(trigger), policy.breaker)
        box = Box("generate", NO_FEATURES, 1, input_max, 1, output_max, concurrency, "r" * 64)
        self.upstreams = {
            name: Upstream(
                Endpoint.from_policy(backend), api_key=b"backend-key", instance="g", attest=False,
                connect_timeout_s=policy.timeouts.connect_s,
            )
            for name, backend in policy.backends.items()
        }  # fmt: skip
        for name in policy.backends:
            self.controller.set_backend(name, Open(Envelope((box,)), "sha256:h"))
        self.yard = Yard(self.upstreams)
        self.metrics = Metrics(
            Names(
                frozenset(policy.models), frozenset(policy.queue.classes), frozenset(policy.tenants), frozenset(policy.backends)
            )
        )
        server = policy.server
        self.path = DataPath(
            PathRules.from_policy(policy, secret=b"s" * 32),
            Bounds(
                server.max_body_bytes, server.body_timeout_s, server.keep_alive_s, server.max_connections,
                server.max_connections_per_address, 8 * server.max_body_bytes, policy.timeouts.client_write_s,
            ),
            controller=self.controller,
            intake=Intake(self.controller, self.yard, FailureLimiter(1.0, 20)),
            backends=self.yard,
            metrics=self.metrics,
            journal=self,
            retries=RetryBudget(policy.retries, time.monotonic()),
            upstreams=lambda: self.upstreams.values(),
        )  # fmt: skip

    def write(self, exchange):
        if self.journal is not None:
            self.journal.write(exchange)
        else:
            self.accounts.append(exchange)

    def waiting(self):
        return sum(each.requests for each in self.controller.snapshot(time.monotonic()).classes.values())

    def in_flight(self):
        return sum(backend.requests for backend in self.controller.snapshot(time.monotonic()).backends)


def policy_for(port, text=POLICY, **more):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return policies.parse(text.format(url=f"http://127.0.0.1:{port}", digest=digest, **more), base=Path("/"))


@contextmanager
def _no_signals():
    yield


async def fallback(scope, receive, send):
    """What answers the routes that are not proxied, in these tests."""
    body = (await receive()).get("body", b"")
    text = b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def server_for(site, port=0, **more):
    config = uvicorn.Config(
        fallback, host="127.0.0.1", port=port, http=PlimsollProtocol.bound(site.path), loop="uvloop", lifespan="off",
        access_log=False, log_level="error", proxy_headers=False, server_header=False, ws="none", **more,
    )  # fmt: skip
    return uvicorn.Server(config)


@asynccontextmanager
async def running(site, **more):
    """Serve `site` on an ephemeral port; yields the port."""
    server = server_for(site, **more)
    server.capture_signals = _no_signals
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(site.path.run())]
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        for connection in list(site.path.connections):
            connection.cut()
        server.should_exit = True
        await asyncio.wait_for(tasks[0], 10)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        for upstream in site.upstreams.values():
            upstream.close()
