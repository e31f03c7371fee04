"""Every route, with every method, by every role and by none, on both listeners: nothing answers more than it should.

The table is written out here from the documentation, not read from the program.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, dial, head_only, request, stranger

CLIENT, OPERATOR = {"client", "other"}, {"operator"}
SCRAPER, PROBER = {"scraper", "operator"}, {"prober", "scraper", "operator"}
PROXIED = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
    "/v1/audio/transcriptions", "/v1/audio/translations",
]  # fmt: skip
PUBLIC = {
    **{path: ({"POST"}, CLIENT) for path in [*PROXIED, "/tokenize", "/detokenize", "/v1/messages/count_tokens"]},
    "/v1/models": ({"GET"}, CLIENT),
    "/v1/models/bare": ({"GET"}, CLIENT),
    "/health/live": ({"GET"}, PROBER),
    "/health/ready": ({"GET"}, PROBER),
    "/metrics": ({"GET"}, SCRAPER),
}
ADMIN = {
    "/console": ({"GET"}, OPERATOR),
    "/openapi.json": ({"GET"}, OPERATOR),
    "/admin/status": ({"GET"}, OPERATOR),
    "/admin/records": ({"GET", "POST"}, OPERATOR),
    "/admin/retest": ({"GET"}, OPERATOR),
    "/admin/journal": ({"GET"}, OPERATOR),
    "/admin/audit": ({"GET"}, OPERATOR),
    "/admin/retest/plan": ({"POST"}, OPERATOR),
    "/admin/explain": ({"POST"}, OPERATOR),
    "/admin/reload": ({"POST"}, OPERATOR),
    "/admin/backends/none/drain": ({"POST"}, OPERATOR),
    "/admin/backends/none/undrain": ({"POST"}, OPERATOR),
    "/admin/backends/none/reset-breaker": ({"POST"}, OPERATOR),
}
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"]
WHO: dict[str, str | None] = {"nobody": None, "a wrong key": "sk-wrong", "an expired key": "sk-old", **KEYS}
TABLES = {"public": PUBLIC, "admin": ADMIN}


def expected(table, path: str, method: str, who: str) -> set[int]:
    """The statuses that are right."""
    if who not in KEYS:
        return {401}
    if path not in table:
        return {404}
    methods, roles = table[path]
    if method not in methods and not (method == "HEAD" and "GET" in methods):
        return {405} if who in roles else {403, 405}
    if who not in roles:
        return {403}
    if method != "POST":
        return {200}
    return {200} if path == "/admin/reload" else {404} if "/none/" in path else {415} if "audio" in path else {400}


class Asker:
    """Sends one request after the other; a new connection when the last was closed."""

    def __init__(self, port: int, source: str) -> None:
        self.port, self.source, self.client, self.context = port, source, None, None

    async def ask(self, raw: bytes):
        for fresh in (False, True):
            if self.client is None or fresh:
                await self.close()
                self.context = dial(self.port, self.source)
                self.client = await self.context.__aenter__()
            try:
                await self.client.send(raw)
                got = await (head_only(self.client) if raw.startswith(b"HEAD ") else self.client.response())
            except (asyncio.IncompleteReadError, ConnectionError):
                assert not fresh
                continue
            if got.fields.get("connection") == "close":
                await self.close()
            return got
        raise AssertionError

    async def close(self) -> None:
        if self.context is not None:
            await self.context.__aexit__(None, None, None)
        self.client = self.context = None


@pytest.mark.parametrize("listener", ["public", "admin"])
@pytest.mark.parametrize("who", WHO)
async def test_matrix(quay, listener, who):
    port = {"public": quay.port, "admin": quay.admin_port}[listener]
    table, key = TABLES[listener], WHO[who]
    paths = [*PUBLIC, *ADMIN, "/nothing", "/v1/models/unknown", "/v1/models/"]
    asker = Asker(port, stranger())
    wrong = []
    for path in paths:
        methods = METHODS if path in table else ["GET", "POST"]
        for method in methods:
            got = await asker.ask(
                request(method, path, "content-type: application/json", key=key, body=b"{}" if method == "POST" else b"")
            )
            right = expected(table, path, method, who)
            if path == "/v1/models/unknown" and listener == "public" and who in KEYS:
                right = {404} if who in CLIENT and method == "GET" else {403, 405}
            if got.status not in right:
                wrong.append((method, path, got.status, right))
            if method == "HEAD":
                assert got.body == b""
            elif got.status >= 400:
                dialect = "anthropic" if path.startswith("/v1/messages") and listener == "public" else "openai"
                assert_envelope(got, got.status, dialect=dialect)
            if got.status == 405:
                assert set(got.fields["allow"].replace(" ", "").split(",")) >= table[path][0] if path in table else True
    await asker.close()
    assert wrong == []
    assert quay.calls == []


async def test_a_forbidden_model_and_an_unknown_one_are_the_same_bytes(quay):
    asker = Asker(quay.port, stranger())
    seen = set()
    for name in ("keyed", "unknown"):
        body = b'{"model": "%b", "messages": [{"role": "user", "content": "x"}]}' % name.encode()
        for raw in (
            request("POST", "/v1/chat/completions", "content-type: application/json", key=KEYS["other"], body=body),
            request("POST", "/tokenize", "content-type: application/json", key=KEYS["other"], body=body),
            request("GET", f"/v1/models/{name}", key=KEYS["other"]),
        ):
            got = await asker.ask(raw)
            assert got.status == 404
            seen.add((raw.split(b" ")[1].replace(name.encode(), b""), got.body, frozenset(got.fields)))
    listed = (await asker.ask(request("GET", "/v1/models", key=KEYS["other"]))).json()
    await asker.close()
    assert len(seen) == 3
    assert [model["id"] for model in listed["data"]] == ["bare"]
    assert quay.calls == []
