"""What the server's API key covers, as seen from outside.

Owns: the list of paths that are tried and the sentences made of the answers. Promises: only GET is sent, without a key, so that
nothing is changed: a path that wants another method answers 405 once the key check is behind it.
Talks to: the backend over httpx.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx

from gateway.evidence.identity import IdentityError
from gateway.evidence.identity_client import fetch
from gateway.evidence.record import BoundaryNote

PATHS = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/plimsoll/identity", "/invocations", "/tokenize",
    "/detokenize", "/metrics", "/version", "/load", "/health", "/ping", "/kv_event_sources", "/generative_scoring",
    "/scale_elastic_ep", "/docs", "/openapi.json", "/server_info", "/collective_rpc", "/sleep", "/wake_up", "/is_sleeping",
    "/reset_prefix_cache", "/reset_mm_cache", "/pause", "/update_weights",
)  # fmt: skip
MAX_BODY_BYTES = 4 * 1024 * 1024
_REFUSED = frozenset({401, 403})


async def observe(client: httpx.AsyncClient, base_url: str, api_key: str | None) -> BoundaryNote:
    """Try every path without the key, and say what answered. `api_key` is only asked whether there is one."""
    statuses = {path: await _status(client, base_url + path) for path in PATHS}
    return BoundaryNote(api_key_covers=describe(statuses, keyed=api_key is not None), external_boundary=_outer(base_url))


def describe(statuses: Mapping[str, int | None], *, keyed: bool) -> str:
    """The sentences, from the status of each path (None: no answer)."""
    covered = [path for path, status in statuses.items() if status in _REFUSED]
    open_ = [f"{path} ({status})" for path, status in statuses.items() if status is not None and status not in (*_REFUSED, 404)]
    parts = []
    if covered:
        parts.append("Refused without the key: " + ", ".join(covered) + ".")
    elif keyed:
        parts.append("A key was used, but nothing that was tried is refused without it.")
    else:
        parts.append("The server was measured without a key, and asks for none.")
    parts.append("Answered without a key: " + ", ".join(open_) + "." if open_ else "Nothing else answered without a key.")
    parts.append("Tried with GET only; 405 means that the path is there and past the key check. Other paths were not tried.")
    return " ".join(parts)


async def _status(client: httpx.AsyncClient, url: str) -> int | None:
    try:
        status, _ = await fetch(client, url, None, MAX_BODY_BYTES)
    except IdentityError:
        return None
    return status


def _outer(base_url: str) -> str:
    host = urlsplit(base_url).hostname or ""
    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = base_url.startswith("http+unix")
    seen = "over the loopback interface" if loopback else f"at {host}, over a network"
    return (
        f"Expected, not checked: only the gateway reaches this server, which listens on loopback or a private network. "
        f"It was measured {seen}."
    )
