"""Who is asking: credentials out of headers, principals out of digests.

Owns the key format, the lookup and the allowance for failed attempts. Promises: keys are kept as SHA-256 digests only; a
lookup costs one hash whatever was sent; bytes are compared in constant time; nothing a client sends makes any of this
raise. Talks to nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

from gateway.policy import Key, Policy

Role = Literal["client", "operator", "scraper", "prober"]

KEY_PREFIX = "plim_"
MAX_KEY_BYTES = 4096  # room for a signed token; longer ones are refused unread
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = 43  # 62**43 > 2**256: every key has the same length
_BEARER = re.compile(rb"bearer +([\x21-\x7e]+)[ \t]*", re.IGNORECASE)
_BARE = re.compile(rb"[ \t]*([\x21-\x7e]+)[ \t]*")
_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})


class Conflict(Enum):
    """Credentials were sent that cannot be used; the answer is the one for a wrong key."""

    MALFORMED = auto()
    CONFLICTING = auto()


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `expires` is Unix seconds, None for never; `tenant` is set for clients only."""

    id: str
    role: Role
    tenant: str | None
    expires: float | None


FindToken = Callable[[bytes, bytes], Principal | None]  # digest and token to whose it is


def new_key() -> tuple[str, str]:
    """A fresh key of 256 random bits and the `sha256:` digest that the policy stores."""
    number, digits = secrets.randbits(256), []
    for _ in range(_DIGITS):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    key = KEY_PREFIX + "".join(reversed(digits))
    return key, digest_of(key)


def digest_of(key: str) -> str:
    """The form of a key that is safe to store."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> bytes | Conflict | None:
    """The one credential in a request's headers (names in lower case).

    None when there is none. A scheme other than Bearer, bytes outside printable ASCII, an empty value, two Authorization
    lines, or two different keys in any of the three headers give a `Conflict`.
    """
    found: bytes | None = None
    seen: set[bytes] = set()
    for name, value in headers:
        if name not in _HEADERS:
            continue
        match = (_BEARER if name == b"authorization" else _BARE).fullmatch(value) if len(value) <= MAX_KEY_BYTES else None
        if match is None:
            return Conflict.MALFORMED
        token = match[1]
        if name in seen or (found is not None and token != found):
            return Conflict.CONFLICTING
        seen.add(name)
        found = token
    return found


class KeyRing:
    """The keys of one policy. Immutable: a reload makes another ring.

    `tokens` is asked for what is not among the keys; a token of a tenant that the policy does not name (`tenants`) is not good.
    """

    __slots__ = ("_by_digest", "_tenants", "_tokens", "_wall")

    def __init__(
        self,
        entries: Iterable[tuple[bytes, Principal]],
        *,
        wall: Callable[[], float] = time.time,
        tokens: FindToken | None = None,
        tenants: Collection[str] = (),
    ) -> None:
        self._by_digest: Final = {digest: (digest, principal) for digest, principal in entries}
        self._wall = wall
        self._tokens = tokens
        self._tenants: Final = frozenset(tenants)

    @classmethod
    def from_policy(cls, policy: Policy, *, wall: Callable[[], float] = time.time, tokens: FindToken | None = None) -> KeyRing:
        """The ring of a checked policy; `wall` gives Unix seconds, read only for keys that expire."""
        entries = ((bytes.fromhex(key.hash.removeprefix("sha256:")), _principal(key)) for key in policy.keys)
        return cls(entries, wall=wall, tokens=None if policy.oidc is None else tokens, tenants=policy.tenants)

    def find(self, token: bytes) -> Principal | None:
        """Whose key this is; None when unknown or expired."""
        digest = hashlib.sha256(token).digest()
        known = self._by_digest.get(digest)
        if known is None or not hmac.compare_digest(known[0], digest):
            return None if self._tokens is None else self._by_token(self._tokens, digest, token)
        principal = known[1]
        if principal.expires is not None and principal.expires <= self._wall():
            return None
        return principal

    def _by_token(self, tokens: FindToken, digest: bytes, token: bytes) -> Principal | None:
        principal = tokens(digest, token)
        if principal is None or (principal.tenant is not None and principal.tenant not in self._tenants):
            return None
        return principal

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal | None:
        """`credentials` and `find` in one: None for every way of not being known."""
        token = credentials(headers)
        return self.find(token) if isinstance(token, bytes) else None

    def __len__(self) -> int:
        return len(self._by_digest)


def _principal(key: Key) -> Principal:
    return Principal(key.id, key.role, key.tenant, None if key.expires is None else key.expires.timestamp())


class FailureLimiter:
    """An allowance of failed attempts per address: a token bucket each, in a bounded table.

    It is asked only after a key has failed, so that a good key passes from any address, whatever its neighbours do.
    An IPv6 address counts with its /64, for one host owns all of it.
    """

    def __init__(self, rate_per_s: float = 10.0, burst: int = 300, max_addresses: int = 10_000) -> None:
        self._rate = rate_per_s
        self._burst = float(burst)
        self._max = max_addresses
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str | None, now: float) -> float | None:
        """Count a failure. None: within the allowance, answer 401; otherwise seconds until the next is within it."""
        name = _network(address)
        level, since = self._buckets.pop(name, (self._burst, now))
        level = min(self._burst, level + max(0.0, now - since) * self._rate)
        allowed = level >= 1.0
        self._buckets[name] = (level - 1.0 if allowed else level, now)
        if len(self._buckets) > self._max:
            self._buckets.popitem(last=False)
        return None if allowed else (1.0 - level) / self._rate


def _network(address: str | None) -> str:
    if address is None:
        return "local"
    if ":" not in address:
        return address
    try:
        return str(ipaddress.IPv6Network((address.split("%")[0], 64), strict=False))
    except ValueError:
        return address
