"""The process: sockets, uvicorn, signals. `run` returns when the last answer is out.

Owns: binding (so that an address in use is one clear line), the two listeners, and what signals mean: SIGTERM and SIGINT
drain, a second one ends at once, SIGHUP reads the policy again and reopens the journal. Talks to `app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from gateway import policy as policies
from gateway.app import App
from gateway.edge.protocol import PlimsollProtocol
from gateway.errors import PlimsollError

log = logging.getLogger("plimsoll")

BACKLOG = 4096
GC_ALLOCATIONS = 10_000  # requests leave no cycles behind: a look at each 700 objects, as is the default, is for nothing
SPARE_FILES = 4096  # for connections to backends, records, logs


class ListenError(PlimsollError):
    """An address cannot be listened on."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the process drains before uvicorn may end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(policy_file: Path, *, ready: asyncio.Event | None = None) -> int:
    """Serve until told to end. The exit code: 0 after a drain, 1 when a second signal cut it short. Raises PlimsollError."""
    policy = await asyncio.to_thread(policies.load, policy_file)
    if policy.server.tls is not None:
        await asyncio.to_thread(check_tls, policy.server.tls)
    allow_files(policy.server.max_connections)
    public = bind(policy.server.listen)
    private = bind(policy.server.admin_listen) if policy.server.admin_listen is not None else None
    app = App(policy, policy_file)
    servers = [(_Server(_public(app)), public)]
    if private is not None:
        servers.append((_Server(_config(app.admin, http=PlimsollProtocol.bound(app.private))), private))
    stop, hurry = asyncio.Event(), asyncio.Event()
    tasks = _on_signals(app, stop, hurry)
    await app.start()
    for _, sock in servers:
        sock.listen(BACKLOG)  # what is said next is true from here on: the kernel holds connections until uvicorn accepts
    serving = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in servers]
    gc.collect()
    gc.freeze()  # what was made for the whole life of the process is not looked at again and again
    gc.set_threshold(GC_ALLOCATIONS, 10, 10)
    _say(app, policy, public, private)
    if ready is not None:
        ready.set()
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([stopped, *serving], return_when=asyncio.FIRST_COMPLETED)
    drained = await _drain(app, policy.server.drain_s, hurry)
    for server, _ in servers:
        server.should_exit = True
        server.force_exit = not drained
    await asyncio.gather(*serving)
    stopped.cancel()
    for task in tasks:
        task.cancel()
    await app.close()
    return 0 if drained else 1


def bind(address: str) -> socket.socket:
    """A socket bound to `host:port`. Raises ListenError."""
    host, port = policies.split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


def allow_files(connections: int) -> None:
    """Have the kernel allow that many clients and what we need beside them, as far as it lets us.

    Else idle strangers could use up the files that backends need long before `max_connections` refuses them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connections + SPARE_FILES if hard == resource.RLIM_INFINITY else min(connections + SPARE_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < connections:
        log.warning("only %d files may be open, fewer than server.max_connections (%d): raise LimitNOFILE", most, connections)


def check_tls(tls: policies.ServerTLS) -> None:
    """Load the files as the listener will. Raises ListenError, where the server would only fail once it had begun to serve."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")  # a prompt would wait for nobody
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
    except OSError as error:
        raise ListenError(f"the files of server.tls cannot be used: {error}") from error


async def _drain(app: App, seconds: float, hurry: asyncio.Event) -> bool:
    """Drain; False when it was cut short."""
    draining = asyncio.create_task(app.drain(seconds))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([draining, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()
        return False
    await draining
    return True


def _on_signals(app: App, stop: asyncio.Event, hurry: asyncio.Event) -> set[asyncio.Task[Any]]:
    tasks: set[asyncio.Task[Any]] = set()
    loop = asyncio.get_running_loop()

    def end(name: str) -> None:
        if stop.is_set():
            log.warning("%s again: ending at once", name)
            hurry.set()
        else:
            log.info("%s: draining", name)
            stop.set()

    def again() -> None:
        app.journal.reopen()
        task = asyncio.ensure_future(app.reload_for("signal"))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for name in ("SIGTERM", "SIGINT"):
        loop.add_signal_handler(getattr(signal, name), end, name)
    loop.add_signal_handler(signal.SIGHUP, again)
    return tasks


def _public(app: App) -> uvicorn.Config:
    tls = app.policy.server.tls
    extra: dict[str, Any] = {}
    if tls is not None:
        extra = {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
        if tls.client_ca is not None:
            extra |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return _config(app.local, http=PlimsollProtocol.bound(app.path), **extra)


def _config(app: Any, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app, loop="none", ws="none", lifespan="off", access_log=False, proxy_headers=False, server_header=False,
        headers=[("server", "plimsoll")],
        log_config=None, backlog=BACKLOG, **more,
    )  # fmt: skip


def _say(app: App, policy: policies.Policy, public: socket.socket, private: socket.socket | None) -> None:
    scheme = "https" if policy.server.tls is not None else "http"
    log.info("plimsoll %s serves %s on %s://%s", app.version, ", ".join(policy.models), scheme, _address(public))
    if private is not None:
        log.info("operators: http://%s (/admin/status, /console)", _address(private))


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
