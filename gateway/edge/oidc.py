"""Signed tokens in the place of keys: verified here, offline, against the issuer's published keys.

Owns the order of the checks, the keys now known, and a bounded memory of tokens that were found good. Promises: an
algorithm counts only when the policy names it and the key is of its kind; nothing is fetched on the request path; a
known token costs one look-up; without keys, or with keys too old, no token is good. Nothing in a token makes this raise.
Talks to: `jwks` for the keys.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jwt
import orjson

from gateway.edge.jwks import KeySet, KeySetError, fetch
from gateway.edge.keys import Principal, Role
from gateway.policy_oidc import Oidc

log = logging.getLogger("plimsoll")

MAX_REMEMBERED = 10_000
MAX_SUBJECT = 255
_OPTIONS = {
    "require": ["exp", "iss", "aud", "sub"], "verify_signature": True, "verify_aud": True, "verify_iss": True,
    "verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False,
}  # fmt: skip
Json = Mapping[str, Any]


def header_of(token: bytes) -> Json | None:
    """The header of something that looks like a signed token; None for all else.

    Only flat headers are taken: nested ones could exhaust a recursive parser before anything is verified. A header that
    demands understanding of an extension (`crit`) is refused, for none is understood.
    """
    parts = token.split(b".")
    if len(parts) != 3 or not all(parts):
        return None
    try:
        header = orjson.loads(base64.urlsafe_b64decode(parts[0] + b"=" * (-len(parts[0]) % 4)))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(header, dict) or "crit" in header or "b64" in header:
        return None
    if any(isinstance(value, dict) or (isinstance(value, list) and not _texts(value)) for value in header.values()):
        return None
    return header


def verify(token: bytes, keys: KeySet, config: Oidc, now: float) -> Principal | None:
    """Whose token this is at Unix time `now`; None when it is not good in any respect."""
    header = header_of(token)
    if header is None:
        return None
    algorithm, kid = header.get("alg"), header.get("kid")
    if algorithm not in config.algorithms or not isinstance(kid, str | None):
        return None
    key = keys.find(kid, algorithm)
    if key is None:
        return None
    try:
        claims = jwt.decode(
            token, key, algorithms=[algorithm], audience=config.audience, issuer=config.issuer,
            options=_OPTIONS,  # type: ignore[arg-type]
        )  # fmt: skip
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        return None
    return _principal(claims, config, now)


def _principal(claims: Json, config: Oidc, now: float) -> Principal | None:
    expires, starts = _moment(claims.get("exp")), _moment(claims.get("nbf", 0))
    if expires is None or now >= expires + config.leeway_s or starts is None or now < starts - config.leeway_s:
        return None
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
        return None
    role = _role(claims, config)
    tenant = claim(claims, config.tenant_claim) if role == "client" else None
    if role is None or (role == "client" and not isinstance(tenant, str)):
        return None
    return Principal(f"oidc:{subject}", role, tenant, expires + config.leeway_s)


def _role(claims: Json, config: Oidc) -> Role | None:
    if config.role_claim is None:
        return "client"
    found = claim(claims, config.role_claim)
    names = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return next((role for name, role in config.roles.items() if name in names), None)


def claim(claims: Json, name: str) -> Any:
    """The claim of that name, or the one at that path with dots; None when there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _moment(value: object) -> float | None:
    """Unix seconds; None for what is no moment (text, true, infinity, beyond 2^53)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**53) < value < 2**53:
        return None
    return float(value)


def _texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


class Tokens:
    """The issuer that the policy names, if any. `find` is synchronous; `run` keeps the keys fresh beside it."""

    def __init__(
        self,
        config: Oidc | None,
        *,
        fetch: Callable[[Oidc], Awaitable[bytes]] = fetch,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._fetch = fetch
        self._clock = clock
        self._wall = wall
        self._keys = KeySet({})
        self._fetched_at: float | None = None  # when the keys were last had
        self._tried_at: float | None = None
        self._failure: str | None = None
        self._known: OrderedDict[bytes, Principal] = OrderedDict()
        self._wanted = asyncio.Event()

    def configure(self, config: Oidc | None) -> None:
        """Take another policy into force: nothing found good under the old one is still good because of it."""
        old, self._config = self._config, config
        if config == old:
            return
        self._known.clear()
        if config is None or old is None or _source(config) != _source(old):
            self._keys, self._fetched_at, self._tried_at = KeySet({}), None, None
        self._wanted.set()

    def find(self, digest: bytes, token: bytes) -> Principal | None:
        """Whose token this is (`digest` is its SHA-256); None when it is not good. A key id not known asks for a fetch."""
        config = self._config
        if config is None or self._too_old(config):
            return None
        now = self._wall()
        known = self._known.get(digest)
        if known is not None:
            if known.expires is not None and now < known.expires:
                self._known.move_to_end(digest)
                return known
            del self._known[digest]
            return None
        found = verify(token, self._keys, config, now)
        if found is not None:
            self._known[digest] = found
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        elif self._names_new_key(token, config):
            self._wanted.set()
        return found

    def _too_old(self, config: Oidc) -> bool:
        return self._fetched_at is None or self._clock() > self._fetched_at + config.max_age_s

    def _names_new_key(self, token: bytes, config: Oidc) -> bool:
        header = header_of(token)
        if header is None or header.get("alg") not in config.algorithms or not isinstance(header.get("kid"), str):
            return False
        return self._keys.find(header["kid"], header["alg"]) is None

    async def refresh(self) -> None:
        """Fetch the keys. When that fails those known stay, until they are too old."""
        config = self._config
        self._wanted.clear()
        if config is None:
            return
        self._tried_at = self._clock()
        try:
            keys = KeySet.parse(await self._fetch(config))
        except KeySetError as error:
            if str(error) != self._failure:
                log.error("the issuer's keys cannot be had: %s", error)
            self._failure = str(error)
            return
        if config is not self._config:
            return  # the policy has changed meanwhile, and has asked for its own
        if self._failure is not None:
            log.info("the issuer's keys are had again")
        self._failure, self._fetched_at = None, self._clock()
        self._keys = keys
        self._known.clear()  # a key that was withdrawn takes its tokens along

    async def run(self) -> None:
        """Keep the keys fresh until cancelled."""
        while True:
            config = self._config
            wait_s = 60.0 if config is None else config.refresh_s if self._failure is None else config.refetch_s
            try:
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            config = self._config
            if config is not None and self._tried_at is not None:
                await asyncio.sleep(max(0.0, self._tried_at + config.refetch_s - self._clock()))
            await self.refresh()


def _source(config: Oidc) -> tuple[object, ...]:
    return config.issuer, config.jwks_url, config.jwks_file, config.jwks_ca
