"""Certificates for tests: an authority of one's own, what it signs, and a gateway that is reached over TLS."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.gateway import GatewayProcess
from tests.support.quay import Quay


class Authority:
    """Signs certificates into `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._sign(self.name, self.key, None)))

    def issue(self, name: str, hosts: list[x509.GeneralName], days: int = 1) -> tuple[Path, Path]:
        """Certificate and key files for `hosts`, good until so many days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, hosts, days)
        certificate, secret = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(_pem(made))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        secret.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        return certificate, secret

    def _sign(self, subject, key, hosts, days: int = 1) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(days=9))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )  # fmt: skip
        if hosts is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return builder.sign(self.key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class TlsGateway(GatewayProcess):
    """Its public listener speaks TLS, so that its gates are asked about on the other. `waits_for`: those that shall open."""

    waits_for: tuple[str, ...] = ()

    async def is_open(self, backend: str) -> bool:
        return await self.gate(backend) == "open"

    async def gate(self, backend: str) -> str:
        return next(each["gate"] for each in (await self.status())["backends"] if each["name"] == backend)

    settled = Quay.settled

    async def _all_open(self) -> bool:
        return all([await self.is_open(name) for name in self.waits_for])


def server_context(certificate: Path, key: Path, seen: list[str | None], client_ca: Path | None = None) -> ssl.SSLContext:
    """A server's side; the names it was asked for go to `seen`. With `client_ca` each client must show a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.sni_callback = lambda _, name, __: seen.append(name)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
