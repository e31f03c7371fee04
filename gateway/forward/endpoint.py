"""Where a backend listens, and how to speak TLS with it. Pure but for reading the PEM files a policy names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from gateway.errors import PlimsollError
from gateway.policy import Backend, BackendTLS


class EndpointError(PlimsollError):
    """The files of a backend's TLS cannot be used; the message names the backend's url."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address: `host` and `port`, or `unix_path`. `prefix` is put before every path (no slash at its end)."""

    host: str
    port: int
    unix_path: str | None = None
    ssl: ssl.SSLContext | None = None
    server_name: str | None = None
    host_header: bytes = b"localhost"
    prefix: bytes = b""

    @classmethod
    def from_policy(cls, backend: Backend) -> Self:
        """The endpoint of `backend`. Raises EndpointError when a certificate cannot be loaded."""
        return cls.from_url(backend.url, backend.tls)

    @classmethod
    def from_url(cls, url: str, tls: BackendTLS | None = None) -> Self:
        """`http://`, `https://` or `http+unix://%2Fpath%2Fto.sock`, with an optional path prefix."""
        parts = urlsplit(url)
        prefix = parts.path.rstrip("/").encode("ascii")
        if parts.scheme == "http+unix":
            return cls("", 0, unix_path=unquote(parts.netloc), prefix=prefix)
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        return cls(
            host=host,
            port=parts.port or (443 if secure else 80),
            ssl=_context(url, tls or BackendTLS()) if secure else None,
            server_name=(tls.server_name if tls else None) or host,
            host_header=parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
            prefix=prefix,
        )


def _context(url: str, tls: BackendTLS) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=_text(tls.ca))
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, _text(tls.key))
    except OSError as error:
        raise EndpointError(f"the TLS files for {url} cannot be loaded: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
