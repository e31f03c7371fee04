"""One backend under measurement: its identity, its connections, and the watch that both stay the same.

Owns: opening and closing what a run talks with, and `Guard`, which remembers the first sign of another configuration.
Promises: no record without an attested or declared identity; a changed hash, a restarted engine, or load that is not ours is
found before, after and on every response, and ends the run.
Talks to: `forward.upstream`, `evidence.identity_client`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from gateway import policy
from gateway.errors import PlimsollError
from gateway.evidence.identity import IdentityError, ObservedIdentity, parse_attested
from gateway.evidence.identity_client import fetch_attested, fetch_declared, fetch_tokenizer
from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import Upstream
from gateway.qualify.plan import Plan
from gateway.qualify.prompts import Vocabulary


class QualifyError(PlimsollError):
    """The run ended without a record; the message says why."""


class IdentityChanged(QualifyError):
    """The backend is not, or no longer, the one that was measured from the start."""


class Guard:
    """Compares every sighting of an identity with the first. `changed` is the first difference, in words; None: the same."""

    def __init__(self, first: ObservedIdentity) -> None:
        self._first = first
        self.changed: str | None = None

    def seen(self, hash_: str | None, payload: bytes | None) -> bool:
        """What a connection or a response said of itself; whether it may be used."""
        if payload is None:
            return self._differ(f"a response carried configuration {_short(hash_)}, the run began on {_short(self._first.hash)}")
        try:
            observed = parse_attested(payload)
        except IdentityError as error:
            return self._differ(str(error))
        if observed.hash != hash_:
            return self._differ("the identity document and the x-plimsoll-config header differ")
        return self.compare(observed)

    def compare(self, observed: ObservedIdentity) -> bool:
        """A whole identity against the first one."""
        if observed.hash != self._first.hash or observed.contradictions:
            return self._differ(f"the configuration is {_short(observed.hash)}, the run began on {_short(self._first.hash)}")
        if observed.engine_start_id != self._first.engine_start_id:
            return self._differ("the engine was started again during the run")
        return True

    def _differ(self, what: str) -> bool:
        self.changed = self.changed or what
        return False


@dataclass(frozen=True, slots=True)
class Session:
    """What a run needs of one backend."""

    base_url: str
    api_key: str | None
    model: str
    instance: str
    http: httpx.AsyncClient
    upstream: Upstream
    observed: ObservedIdentity
    declared: policy.DeclaredIdentity | None
    vocabulary: Vocabulary
    guard: Guard

    async def check(self) -> None:
        """Look at the identity afresh. Raises `IdentityChanged`, or `QualifyError` where others load the engine too."""
        try:
            observed = await _observe(self.http, self.base_url, self.api_key, self.declared)
        except IdentityError as error:
            raise IdentityChanged(f"the identity could not be checked: {error}") from error
        self.guard.compare(observed)
        self.raise_if_changed()
        others = sum(count for name, count in observed.gateway_in_flight.items() if name != self.instance)
        if strange := others + (observed.foreign_in_flight or 0):
            raise QualifyError(f"{strange} requests in flight are not of this run: a backend is measured alone")

    def raise_if_changed(self) -> None:
        """Raises `IdentityChanged` when any connection or response has shown another configuration."""
        if self.guard.changed is not None:
            raise IdentityChanged(f"{self.guard.changed}; no record is written")


@asynccontextmanager
async def opened(backend: policy.Backend, api_key: str | None, plan: Plan) -> AsyncIterator[Session]:
    """A session on `backend`, closed with everything in flight when the block ends. Raises `QualifyError`."""
    endpoint = Endpoint.from_policy(backend)
    instance = f"qualify-{secrets.token_hex(4)}"
    declared = backend.identity if isinstance(backend.identity, policy.DeclaredIdentity) else None
    http, base_url = _http(backend, endpoint)
    async with http:
        try:
            observed = await _observe(http, base_url, api_key, declared)
        except IdentityError as error:
            raise QualifyError(f"{error}. A record needs an attested identity, or one that is declared") from error
        if observed.contradictions:
            raise QualifyError("the declared identity is contradicted: " + "; ".join(map(str, observed.contradictions)))
        guard = Guard(observed)
        upstream = Upstream(
            endpoint,
            api_key=None if api_key is None else api_key.encode("ascii"),
            instance=instance,
            connect_timeout_s=plan.timeouts.connect_s,
            attest=declared is None,
            expect=lambda: observed.hash,
            on_identity=guard.seen,
            max_idle=4096,
        )
        model = plan.model or next(iter(observed.served_models), None)
        if model is None:
            raise QualifyError("the backend names no served model; name one in the plan (model: ...)")
        vocabulary = await _vocabulary(http, base_url, api_key) if declared is None else Vocabulary.common()
        try:
            yield Session(base_url, api_key, model, instance, http, upstream, observed, declared, vocabulary, guard)
        finally:
            upstream.close()


async def _observe(
    http: httpx.AsyncClient, base_url: str, api_key: str | None, declared: policy.DeclaredIdentity | None
) -> ObservedIdentity:
    if declared is not None:
        return await fetch_declared(http, base_url, api_key, declared)
    return await fetch_attested(http, base_url, api_key)


async def _vocabulary(http: httpx.AsyncClient, base_url: str, api_key: str | None) -> Vocabulary:
    try:
        bundle = await fetch_tokenizer(http, base_url, api_key)
    except IdentityError:
        return Vocabulary.common()
    return Vocabulary.from_bundle(bundle)


def _http(backend: policy.Backend, endpoint: Endpoint) -> tuple[httpx.AsyncClient, str]:
    """A client for what is asked between cells, never during one."""
    if endpoint.unix_path is not None:
        transport = httpx.AsyncHTTPTransport(uds=endpoint.unix_path)
        return httpx.AsyncClient(transport=transport), "http://localhost" + endpoint.prefix.decode("ascii")
    return httpx.AsyncClient(verify=endpoint.ssl if endpoint.ssl is not None else True, trust_env=False), backend.url


def _short(hash_: str | None) -> str:
    return "none" if hash_ is None else hash_.removeprefix("sha256:")[:16]
