"""Fetching a backend's identity over HTTP, for the command line and for qualification.

Owns: which endpoints are asked and how much is read of each.
Promises: bounded bodies and one deadline for each call; redirects are not followed, so that the key goes nowhere else; every
failure is an `IdentityError` with a sentence for the operator.
Talks to: the backend, with httpx; `identity` and `stock` make sense of the bytes. The data path attests by itself, on its own
connections.
"""

import asyncio

import httpx

from gateway.evidence import stock
from gateway.evidence.identity import MAX_IDENTITY_BYTES, IdentityError, ObservedIdentity, parse_attested
from gateway.policy import DeclaredIdentity

IDENTITY_PATH = "/plimsoll/identity"
TOKENIZER_PATH = "/plimsoll/tokenizer"
FETCH_TIMEOUT_S = 20.0
MAX_TOKENIZER_BYTES = 192 * 1024 * 1024


async def fetch_attested(client: httpx.AsyncClient, base_url: str, api_key: str | None) -> ObservedIdentity:
    """GET /plimsoll/identity. Raises `IdentityError` when it is not there, refused, or not believable."""
    status, body = await fetch(client, base_url + IDENTITY_PATH, api_key, MAX_IDENTITY_BYTES)
    if status == 401:
        raise IdentityError(f"{base_url}: the backend refuses this API key")
    if status == 404:
        raise IdentityError(f"{base_url}: no identity endpoint; start vLLM with the IdentityMiddleware")
    if status != 200:
        raise IdentityError(f"{base_url}: the identity endpoint answered {status}")
    return parse_attested(body)


async def fetch_probed(client: httpx.AsyncClient, base_url: str, api_key: str | None) -> ObservedIdentity:
    """What the stock endpoints show. An endpoint that answers anything but 200 counts as not there."""
    bodies = []
    for path in ("/version", "/v1/models", "/metrics"):
        status, body = await fetch(client, base_url + path, api_key, stock.MAX_STOCK_BYTES)
        bodies.append(body if status == 200 else None)
    return stock.probed(*bodies)


async def fetch_declared(
    client: httpx.AsyncClient, base_url: str, api_key: str | None, stated: DeclaredIdentity
) -> ObservedIdentity:
    """The operator's declaration, held against the stock endpoints."""
    return stock.declared(stated, await fetch_probed(client, base_url, api_key))


async def fetch_tokenizer(client: httpx.AsyncClient, base_url: str, api_key: str | None) -> bytes:
    """The body of GET /plimsoll/tokenizer. Raises `IdentityError`."""
    status, body = await fetch(client, base_url + TOKENIZER_PATH, api_key, MAX_TOKENIZER_BYTES)
    if status != 200:
        raise IdentityError(f"{base_url}: the tokenizer endpoint answered {status}")
    return body


async def fetch(client: httpx.AsyncClient, url: str, api_key: str | None, limit: int) -> tuple[int, bytes]:
    """One GET: the status, and the body up to `limit` bytes. Raises `IdentityError` beyond it or without an answer."""
    headers = {"accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        async with (
            asyncio.timeout(FETCH_TIMEOUT_S),
            client.stream("GET", url, headers=headers, follow_redirects=False) as response,
        ):
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    raise IdentityError(f"{url}: more than {limit} bytes")
            return response.status_code, bytes(body)
    except TimeoutError as error:
        raise IdentityError(f"{url}: no whole answer within {FETCH_TIMEOUT_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise IdentityError(f"{url}: {str(error) or type(error).__name__}") from error
