"""One backend seen from outside: who it is, whether it answers, whether its engine moves.

Owns: the polling of one backend, the sightings of its configuration hash, and the `Upstream` whose connections are attested
with it. Promises: a hash that is not the expected one is reported in the same instant in which it was seen, before anything
else can be dispatched; a poll that gives no answer under load is not taken for a dead server (only a refused connection is);
unknown stays unknown. Talks to: the backend over httpx (never on the data path) and to its `on_change`, which decides what
an observation means for the gate.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import httpx

from gateway import policy
from gateway.evidence.identity import IdentityError, ObservedIdentity, parse_attested
from gateway.evidence.identity_client import fetch, fetch_attested, fetch_declared, fetch_probed, fetch_tokenizer
from gateway.evidence.stock import MAX_STOCK_BYTES
from gateway.forward.endpoint import Endpoint
from gateway.forward.exposition import total
from gateway.forward.sightings import Sightings
from gateway.forward.upstream import Upstream

log = logging.getLogger("plimsoll.backend")

POLL_S = 1.0
RETRY_S = 0.25
PROGRESS_METRIC = "vllm:iteration_tokens_total_count"
FINISHED_METRIC = "vllm:request_success_total"


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of a backend now; the gate is decided from it and from nothing else.

    `identity` None: never learned, or the server went away. `mixed`: hashes that were alive at once behind the URL.
    `foreign`: requests at the engine that no gateway sent, None when nobody counts them.
    `engine`: tells one engine start from the next, None when unknown. `problem`: why there is no identity, in words.
    """

    source: Literal["attested", "declared", "probed"]
    identity: ObservedIdentity | None = None
    reachable: bool = False
    mixed: tuple[str, ...] = ()
    foreign: int | None = None
    engine: str | None = None
    problem: str | None = "not asked yet"


class Counted(NamedTuple):
    """The backend's own count of requests in flight by gateway, and when it was asked for (monotonic seconds)."""

    asked_at: float
    by_gateway: Mapping[str, int]


class Watch:
    """Polls one backend. `expected_hash` is set by whoever opens the gate; nothing else may be dispatched to.

    `busy()` says whether anything of ours is in flight (the engine's progress is polled only then). `poll_s` lies between two
    polls; it may be changed, and is well below the time after which a silent engine is called stalled, or a working one would be.
    `on_change(name)` is called on the event loop whenever `observation` has changed.
    """

    def __init__(
        self,
        name: str,
        config: policy.Backend,
        api_key: str | None,
        *,
        instance: str,
        connect_timeout_s: float,
        on_change: Callable[[str], None],
        busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.config = config
        self.poll_s = POLL_S
        self.expected_hash: str | None = None
        self.observation = Observation(config.source)
        self.upstream = Upstream(
            Endpoint.from_policy(config),
            api_key=api_key.encode("ascii") if api_key is not None else None,
            instance=instance,
            connect_timeout_s=connect_timeout_s,
            attest=config.source == "attested",
            expect=lambda: self.expected_hash,
            on_identity=self._on_connection,
        )
        self._api_key = api_key
        self._on_change = on_change
        self._busy = busy
        self._clock = clock
        self._client, self._base = http_client(config.url, self.upstream.endpoint, instance)
        self._sightings = Sightings()
        self._wake = asyncio.Event()
        self.shown: str | None = None  # the configuration that this replica itself saw last; None: none yet
        self.counted: Counted | None = None  # by the latest poll; None where nobody counts, or not for the whole engine
        self.iterations: int | None = None  # of the engine, while something of ours is in flight; None: not known

    # Polling

    async def run(self) -> None:
        """Poll until cancelled; idle connections are closed then, the others when their answers have ended.

        Should a poll raise what none should, that ends this call and nothing else: it can be called again.
        """
        try:
            while True:
                await self.poll()
                try:
                    async with asyncio.timeout(self.poll_s if self.observation.identity is not None else RETRY_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        except asyncio.CancelledError:
            self.upstream.retire()
            await self._client.aclose()
            raise

    async def poll(self) -> None:
        """One look at the backend; `on_change` hears of it when anything differs."""
        asked_at = self._clock()
        try:
            seen = await self._identity()
            found = self._learned(seen)
            whole = seen.source == "attested" and (seen.api_processes or 1) == 1  # each API process counts its own
            self.counted = Counted(asked_at, dict(seen.gateway_in_flight)) if whole else None
        except IdentityError as error:
            found = self._unanswered(error)
        if self._busy():
            await self._poll_progress()
        else:
            self.iterations = None
        self._publish(found)

    async def _identity(self) -> ObservedIdentity:
        stated = self.config.identity
        if isinstance(stated, policy.DeclaredIdentity):
            return await fetch_declared(self._client, self._base, self._api_key, stated)
        ask = fetch_attested if stated == "attested" else fetch_probed
        return await ask(self._client, self._base, self._api_key)

    def _learned(self, seen: ObservedIdentity) -> Observation:
        if seen.hash is not None and seen.source == "attested":
            self.shown = seen.hash
            self._sightings = self._sightings.see(seen.hash, seen.engine_start_id, self._clock())
        return replace(
            self.observation,
            identity=replace(seen, foreign_in_flight=None, gateway_in_flight={}),  # counts are not identity: they always differ
            reachable=True,
            foreign=seen.foreign_in_flight,
            engine=seen.engine_start_id,
            problem=None,
        )

    def _unanswered(self, error: IdentityError) -> Observation:
        """A refused connection means that nothing listens; an answer that attests nothing is not the server that was measured.

        Silence leaves what is known in force: a saturated server is slow, and its connections attest themselves.
        """
        cause = error.__cause__
        refused = isinstance(cause, httpx.ConnectError)
        silent = isinstance(cause, httpx.HTTPError | TimeoutError) and not refused
        if silent and self.observation.identity is not None:
            return self.observation
        return replace(
            self.observation, identity=None, reachable=not (refused or silent), foreign=None, engine=None, problem=str(error)
        )

    def _publish(self, found: Observation) -> None:
        fresh = replace(found, mixed=self._sightings.mixed(self._clock()))
        if fresh != self.observation:
            self.observation = fresh
            self._on_change(self.name)

    async def _poll_progress(self) -> None:
        count = await self.metric(PROGRESS_METRIC)
        self.iterations = int(count) if count is not None else None

    # What the data path's connections saw

    def _on_connection(self, hash_: str | None, payload: bytes | None) -> bool:
        """Called by the upstream client with what a connection said of itself; True when it may be dispatched over."""
        if payload is not None:
            try:
                seen = parse_attested(payload)
            except IdentityError as error:
                log.warning("backend %s: %s", self.name, error)
                hash_ = None
            else:
                if seen.hash != hash_:  # its header and its document disagree
                    hash_ = None
                else:
                    self._publish(self._learned(seen))
        elif hash_ is not None:
            self.shown = hash_
            self._sightings = self._sightings.see(hash_, None, self._clock())
        if hash_ is not None and hash_ == self.expected_hash:
            return True
        self._distrust(hash_)
        return False

    def doubt(self, hash_: str) -> None:
        """Another replica saw this configuration behind the URL: unless it is the known one, nothing is sent until we have
        looked; where we see another one then, the URL is mixed, as if we had seen both."""
        known = self.observation.identity
        if hash_ == self.expected_hash or (known is not None and known.hash == hash_):
            return
        self._sightings = self._sightings.see(hash_, None, self._clock())
        if self.expected_hash is not None:
            self._distrust(hash_)

    def _distrust(self, hash_: str | None) -> None:
        """Another configuration than the expected one answered: nothing is dispatched until the next poll explains it."""
        self.upstream.forget_idle()
        self.expected_hash = None
        known = self.observation.identity
        if known is None or known.hash != hash_:
            shown = hash_ or "none"
            self._publish(
                replace(self.observation, identity=None, engine=None, problem=f"a response showed configuration {shown}")
            )
        self._wake.set()

    # Questions to the backend, off the data path

    async def metric(self, name: str) -> float | None:
        """The sum of one metric of the backend; None when it cannot be read."""
        try:
            status, body = await fetch(self._client, self._base + "/metrics", self._api_key, MAX_STOCK_BYTES)
        except IdentityError:
            return None
        return total(body, name) if status == 200 else None

    async def tokenizer(self) -> bytes:
        """The payload of GET /plimsoll/tokenizer. Raises IdentityError."""
        return await fetch_tokenizer(self._client, self._base, self._api_key)

    async def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes] | None:
        """One POST of JSON under the backend's key; None when there was no whole answer within `timeout_s` seconds."""
        headers = {"content-type": "application/json"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.post(self._base + path, content=body, headers=headers)
        except (httpx.HTTPError, TimeoutError):
            return None
        return answer.status_code, answer.content


class _Transport(httpx.AsyncHTTPTransport):
    """A connection that is reset as soon as it is made is asked for its peer, under uvloop, and has none: an AttributeError."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ReadError("the connection was closed as soon as it was made") from error


def http_client(url: str, endpoint: Endpoint, instance: str) -> tuple[httpx.AsyncClient, str]:
    """An httpx client for one backend and the base of its URLs. No proxy of the environment is used; nothing is followed."""
    verify: ssl.SSLContext | bool = endpoint.ssl or True
    # A new connection for every call: a load balancer in between shows itself by answering as two servers.
    fresh = httpx.Limits(max_keepalive_connections=0)
    transport = _Transport(uds=endpoint.unix_path, verify=verify, retries=0, limits=fresh)

    async def name(request: httpx.Request) -> None:
        if endpoint.server_name is not None:
            request.extensions["sni_hostname"] = endpoint.server_name  # sent, and what the certificate is held against

    client = httpx.AsyncClient(
        transport=transport,
        trust_env=False,
        event_hooks={"request": [name]},
        headers={"x-plimsoll-gateway": instance, "user-agent": "plimsoll"},
        timeout=httpx.Timeout(10.0, connect=2.0),
    )
    prefix = endpoint.prefix.decode("ascii")
    return client, f"http://localhost{prefix}" if endpoint.unix_path is not None else url
