"""An issuer's public keys: fetched within bounds, and read into the few kinds that can verify a token.

Owns the form of a key set. Promises: symmetric keys, keys for encryption, short RSA keys and kinds unknown here are left out;
a document of any size or content gives a `KeySet` or `KeySetError`. Talks to the issuer's key server, or to a file.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from gateway.errors import PlimsollError
from gateway.policy_oidc import Oidc

MAX_BYTES = 1_048_576
MAX_KEYS = 256
MIN_RSA_BITS = 2048
FETCH_S = 5.0
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class KeySetError(PlimsollError):
    """The keys cannot be had, or are not a key set."""


class KeySet:
    """Keys by id and algorithm. Immutable."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Mapping[tuple[str | None, str], PublicKey]) -> None:
        self._keys: Final = dict(keys)

    @classmethod
    def parse(cls, raw: bytes) -> KeySet:
        """The usable keys of a JWKS document (RFC 7517). Raises KeySetError when it is none."""
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise KeySetError("the key set is not JSON") from error
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise KeySetError("the key set has no list of keys")
        found: dict[tuple[str | None, str], PublicKey] = {}
        for entry in entries[:MAX_KEYS]:
            key = _public_key(entry)
            if key is None:
                continue
            for algorithm in _algorithms(key, entry.get("alg")):
                found.setdefault((entry.get("kid"), algorithm), key)
        return cls(found)

    def find(self, kid: str | None, algorithm: str) -> PublicKey | None:
        """The key with that id for that algorithm. A token without an id is verified only where one key is possible."""
        if kid is not None:
            return self._keys.get((kid, algorithm))
        fitting = [key for (_, name), key in self._keys.items() if name == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    def names(self) -> frozenset[tuple[str | None, str]]:
        """Ids and algorithms, for the log."""
        return frozenset(self._keys)


def _public_key(entry: Any) -> PublicKey | None:
    """The public key of one entry; None for what cannot or must not verify tokens."""
    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if entry.get("use", "sig") != "sig" or not isinstance(entry.get("kid"), str | None):
        return None
    operations = entry.get("key_ops")
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return None
    public = {name: value for name, value in entry.items() if name in ("kty", "crv", "n", "e", "x", "y")}
    try:
        key = jwt.PyJWK(public).key
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
        return None
    if isinstance(key, RSAPublicKey):
        return key if key.key_size >= MIN_RSA_BITS else None
    return key if isinstance(key, EllipticCurvePublicKey | Ed25519PublicKey) else None


def _algorithms(key: PublicKey, named: Any) -> tuple[str, ...]:
    """What a key may be used for: all that its kind can do, or the one that its owner names."""
    able: tuple[str, ...]
    if isinstance(key, RSAPublicKey):
        able = _RSA
    elif isinstance(key, Ed25519PublicKey):
        able = ("EdDSA",)
    else:
        able = tuple(name for curve, name in _CURVES.items() if curve == key.curve.name)
    return able if named is None else tuple(name for name in able if name == named)


async def fetch(config: Oidc) -> bytes:
    """The bytes of the issuer's key set. Raises KeySetError; no redirect is followed, no proxy of the environment used."""
    if config.jwks_file is not None:
        return await asyncio.to_thread(_read, config.jwks_file)
    url = str(config.jwks_url)
    try:
        async with asyncio.timeout(FETCH_S):
            context = await asyncio.to_thread(_context, config.jwks_ca)  # reading the authorities takes a while
            async with httpx.AsyncClient(trust_env=False, verify=context, timeout=FETCH_S) as client:
                return await _get(client, url)
    except (httpx.HTTPError, TimeoutError, OSError) as error:
        raise KeySetError(f"{url}: {str(error) or type(error).__name__}") from error


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url, headers={"accept": "application/json"}) as answer:
        if answer.status_code != 200:
            raise KeySetError(f"{url}: answered {answer.status_code}")
        data = bytearray()
        async for piece in answer.aiter_bytes():
            data += piece
            if len(data) > MAX_BYTES:
                raise KeySetError(f"{url}: more than {MAX_BYTES} bytes")
        return bytes(data)


def _context(ca: Path | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=None if ca is None else str(ca))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeySetError(f"{path}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise KeySetError(f"{path}: more than {MAX_BYTES} bytes")
    return data
