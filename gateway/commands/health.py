"""`plimsoll health`: is a gateway ready? Made for exec probes, which run it every few seconds beside the gateway.

Owns one question over `http.client`. Promises: exit 0 ready, 1 not ready or no answer, 2 wrong use; it imports nothing that a
probe has no use for, because a probe's start-up time is taken from the gateway's own core.
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from gateway.commands.output import NEGATIVE, AsJson, CommandError, KeyEnv, KeyFile, emit_json
from gateway.credentials import secret

TIMEOUT_S = 10.0
_READ_BYTES = 65_536

CaFile = Annotated[
    Path | None, typer.Option(help="PEM file that a gateway with TLS is checked against: its authority, or its own certificate.")
]


def health(
    gateway: Annotated[str, typer.Option("--gateway", help="The gateway's address.")] = "http://127.0.0.1:8080",
    key_env: KeyEnv = "PLIMSOLL_KEY",
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    live: Annotated[bool, typer.Option("--live", help="Only whether the process answers, not whether it can admit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask whether a gateway is ready (for exec probes). Exit 1 when it is not, or does not answer."""
    key = secret(key_env, key_file)
    if key is None:
        raise CommandError(f"a key is needed: put it into the environment variable {key_env}, or name a file with --key-file")
    good, why = ask(gateway, "/health/live" if live else "/health/ready", key, ca_file)
    if as_json:
        emit_json({"ready": good, "why": why})
    else:
        typer.echo(why if good else f"not ready: {why}")
    if not good:
        raise typer.Exit(NEGATIVE)


def ask(gateway: str, path: str, key: str, ca_file: Path | None) -> tuple[bool, str]:
    """Whether `path` answers 200, and the reason in words. Raises CommandError for an address or a file that cannot be used."""
    connection = _connection(gateway, ca_file)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        body = answer.read(_READ_BYTES)
    except (OSError, http.client.HTTPException) as error:
        return False, f"{gateway} cannot be reached: {error or type(error).__name__}"
    finally:
        connection.close()
    return (True, "ready") if answer.status == 200 else (False, _words(body))


def _connection(gateway: str, ca_file: Path | None) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(gateway)
        host, port = parts.hostname, parts.port
        if parts.scheme == "http" and host:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        if parts.scheme == "https" and host:
            trust = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
            return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=trust)
    except OSError as error:
        raise CommandError(f"{ca_file}: cannot be used as an authority: {error}") from error
    except ValueError as error:
        raise CommandError(f"{gateway}: {error}") from error
    raise CommandError(f"{gateway}: an address is http://HOST:PORT or https://HOST:PORT")


def _words(body: bytes) -> str:
    """The message of an error answer, or the start of its body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "(no body)"
