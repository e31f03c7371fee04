"""Asking a running gateway: one HTTP call with a key, and every way it can fail as one clear sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer

from gateway.commands.output import CommandError
from gateway.credentials import secret

TIMEOUT_S = 10.0
Gateway = Annotated[str, typer.Option("--gateway", help="The gateway's admin address, for example http://127.0.0.1:8081.")]


def ask(method: str, gateway: str, path: str, key: str | None, **body: Any) -> Any:
    """The JSON answer of one call. Raises CommandError with the gateway's own words when it says no."""
    answer = send(method, gateway, path, key, **body)
    if answer.status_code >= 400:
        raise CommandError(f"{gateway} answered {answer.status_code}: {words(answer)}")
    try:
        return answer.json()
    except ValueError as error:
        raise CommandError(f"{gateway}{path} did not answer JSON: is this a Plimsoll gateway's address?") from error


def send(
    method: str, gateway: str, path: str, key: str | None, more: Sequence[tuple[str, str]] = (), **body: Any
) -> httpx.Response:
    """One call, with `more` headers; the answer whatever its status. Raises CommandError when there is none."""
    headers = [*([("authorization", f"Bearer {key}")] if key else ()), *more]
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            return client.request(method, gateway.rstrip("/") + path, headers=headers, **body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"{gateway} cannot be reached: {error or type(error).__name__}") from error


def words(answer: httpx.Response) -> str:
    """The message of an error answer, or the start of its body."""
    try:
        found = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or "(no body)"
    return str(found)


def operator_key(env: str, file: Any) -> str:
    """The operator's key. Raises CommandError saying where it is looked for."""
    found = secret(env, file)
    if found is None:
        raise CommandError(f"a key is needed: put it into the environment variable {env}, or name a file with --key-file")
    return found
