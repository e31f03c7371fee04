"""An issuer of tokens for tests: its keys, its tokens, and a key server that counts who asks."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import json
from contextlib import asynccontextmanager

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ISSUER, AUDIENCE, NOW = "https://login.test", "plimsoll", 1_800_000_000.0


@functools.cache
def private(algorithm: str, number: int = 0):
    """A private key; each number another one."""
    if algorithm[:2] in ("RS", "PS"):
        return rsa.generate_private_key(65_537, 1024 if algorithm == "RSA1024" else 2048)
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else ec.generate_private_key(ec.SECP256R1())


def public_jwk(algorithm: str, kid: str | None, number: int = 0, **more) -> dict:
    """The entry of a key set."""
    maker = {"R": jwt.algorithms.RSAAlgorithm, "P": jwt.algorithms.RSAAlgorithm}.get(algorithm[0])
    maker = maker or (jwt.algorithms.OKPAlgorithm if algorithm == "EdDSA" else jwt.algorithms.ECAlgorithm)
    entry = maker.to_jwk(private(algorithm, number).public_key(), as_dict=True)
    return {**entry, "use": "sig", **({} if kid is None else {"kid": kid}), **more}


def public_pem(algorithm: str, number: int = 0) -> bytes:
    return private(algorithm, number).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_set(*entries: dict) -> bytes:
    return json.dumps({"keys": list(entries)}).encode()


def claims(now: float = NOW, **more) -> dict:
    """Good claims; None takes one away."""
    good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "tenant": "acme", "exp": int(now) + 600, "iat": int(now)}
    return {name: value for name, value in {**good, **more}.items() if value is not None}


def token(algorithm: str = "RS256", kid: str | None = "k1", number: int = 0, headers: dict | None = None, **changes) -> bytes:
    """A token signed as it should be."""
    head = {**({} if kid is None else {"kid": kid}), **(headers or {})}
    return jwt.encode(claims(**changes), private(algorithm, number), algorithm=algorithm, headers=head).encode()


def part(value: object) -> bytes:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def by_hand(header: object, payload: object, secret: bytes | None = None) -> bytes:
    """A token put together without a library: unsigned, or with an HMAC under `secret`."""
    signed = part(header) + b"." + part(payload)
    return signed + b"." + (part(hmac.new(secret, signed, hashlib.sha256).digest()) if secret is not None else b"")


class KeyServer:
    """`body` and `status` are what it answers; `asked` counts."""

    def __init__(self, body: bytes) -> None:
        self.body, self.status, self.asked, self.port = body, b"200 OK", 0, 0
        self.lines: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/jwks"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            head = [b"HTTP/1.1 " + self.status, b"content-length: %d" % len(self.body), b"connection: close", *self.lines]
            writer.write(b"\r\n".join(head) + b"\r\n\r\n" + self.body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()
