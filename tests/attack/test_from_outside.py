"""An outsider with no key, and a client whose key is for another model: nothing gained, and nothing learnt."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time

import pytest
import yaml
from typer.testing import CliRunner

from gateway.edge.keys_command import app as keys_app
from tests.edge_local.issuer import by_hand, claims, public_pem, token
from tests.support.client import post, wire, within
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.raw import dial, request, say, stranger
from tests.support.upstream import ScriptedUpstream

OTHER = KEYS["other"]
PATHS = [
    "/", "/v1/models", "/v1/models/a", "/metrics", "/health/live", "/health/ready", "/admin/status", "/console", "/openapi.json",
    "/docs", "/invocations", "/tokenize", "/v1/chat/completions", "/plimsoll/identity", "/server_info", "/reset_prefix_cache",
    "/v1/load_lora_adapter", "/../v1/models", "//v1/models", "/v1/models%2fa", "/V1/MODELS", "/v1/models/", "/.git/config",
]  # fmt: skip


def plain(got) -> tuple:
    """An answer without what is different in each: ids, dates, and the time a limiter names."""
    lines = {name: value for name, value in got.fields.items() if name not in ("x-request-id", "date")}
    return got.status, tuple(sorted(lines.items())), got.body


async def test_no_key_no_answer(fort):
    for port in (fort.port, fort.gateway.admin_port):
        source, said = stranger(), set()
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS", "DELETE"):
                got = await say(port, request(method, path), source=source)
                assert got.status in (401, 429), (method, path, got)
                said.add(json.loads(got.body)["error"]["message"] if got.body else "")
        assert len(said) <= 3, "what exists shows in the words"
    assert fort.calls == 0


async def test_forged_tokens_are_nobody(fort):
    now = time.time()
    good = token(now=now)
    assert (await say(fort.port, post(model="a", key=good.decode()), source=stranger())).status == 200
    header, payload, _ = good.split(b".")
    forged = [
        by_hand({"alg": "none"}, claims(now)), by_hand({"alg": "HS256", "kid": "k1"}, claims(now), public_pem("RS256")),
        token(number=7, now=now), token(now=now, tenant="nobody"), token(now=now - 10_000), token(now=now, aud="x"),
        token(now=now, nbf=int(now) + 1000), header + b"." + payload + b".", good[:-3] + b"AAA", b"..", b"a.b.c",
        by_hand({"alg": "RS256", "kid": "k1", "jwk": {"k": [[[]]]}}, claims(now), b"x"),
    ]  # fmt: skip
    before = fort.calls
    source = stranger()
    for each in forged:
        assert (await say(fort.port, post(model="a", key=each.decode()), source=source)).status == 401, each
    admin = await say(fort.gateway.admin_port, request("GET", "/admin/status", key=good.decode()), source=source)
    assert admin.status == 403, "a client's token is no operator's"
    assert fort.calls == before


def asks_for(model: str) -> list[bytes]:
    """Every way to name a model."""
    message = [{"role": "user", "content": "hi"}]
    bodies = [
        ("/v1/chat/completions", {"model": model, "messages": message, "max_tokens": 5}),
        ("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 5}),
        ("/v1/responses", {"model": model, "input": "hi"}),
        ("/v1/messages", {"model": model, "messages": message, "max_tokens": 5}),
        ("/v1/embeddings", {"model": model, "input": "hi"}),
        ("/v1/score", {"model": model, "text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"model": model, "query": "a", "documents": ["b"]}),
        ("/tokenize", {"model": model, "prompt": "hi"}),
        ("/detokenize", {"model": model, "tokens": [1]}),
        ("/v1/messages/count_tokens", {"model": model, "messages": message}),
    ]
    return [
        *(post(document, path=path, key=OTHER) for path, document in bodies),
        request("GET", f"/v1/models/{model}", key=OTHER),
    ]


async def test_a_forbidden_model_is_as_unknown_as_one_that_is_not_there(fort):
    for forbidden, unknown in zip(asks_for("a"), asks_for("z"), strict=True):
        first, second = plain(await say(fort.port, forbidden)), plain(await say(fort.port, unknown))
        assert first[0] == 404 and first == tuple(
            tuple((n, v.replace("z", "a")) for n, v in part) if isinstance(part, tuple) else part for part in second
        ), (first, second)
    assert [each["id"] for each in (await say(fort.port, request("GET", "/v1/models", key=OTHER))).json()["data"]] == ["b"]
    assert fort.calls == 0


TRICKS = {
    "the name twice": b'{"model":"b","model":"a","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "the name twice, hidden": b'{"model":"b","\\u006dodel":"a","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "an escape": b'{"model":"\\u0061","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "a space": b'{"model":"a ","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "a NUL": b'{"model":"a\\u0000","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "a list": b'{"model":["b","a"],"messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "another field": b'{"model":"b","upstream_model":"a","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "an adapter": b'{"model":"b","lora_request":{"lora_name":"a"},"messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "a transfer": b'{"model":"b","kv_transfer_params":{"h":"a"},"messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    "another's cache": b'{"model":"b","cache_salt":"a","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
}


@pytest.mark.parametrize("name", TRICKS)
async def test_no_trick_with_a_name_reaches_another_model(fort, name):
    got = await say(fort.port, post(TRICKS[name], key=OTHER))
    assert got.status in (400, 404), (name, got)
    assert fort.calls == 0


async def test_nothing_smuggled_behind_a_request_reaches_a_backend_as_such(fort):
    inner = post(model="a", key="sk-nobody")
    smuggling = [
        post(model="b", key=OTHER).replace(b"host: g", b"host: g\r\ntransfer-encoding: chunked") + inner,
        post(model="b", key=OTHER).replace(b"content-length: ", b"content-length: 0\r\ncontent-length: ") + inner,
        post(model="b", key=OTHER).replace(b"host: g", b"host: g\r\ntransfer-encoding: xchunked") + inner,
        post(model="b", key=OTHER).replace(b"host: g", b"host: g\r\nTransfer-Encoding : chunked") + inner,
        post(model="b", key=OTHER).replace(b"host: g", b"host: g\r\n transfer-encoding: chunked") + inner,
    ]
    for raw in smuggling:
        async with dial(fort.port, stranger()) as client:
            await client.send(raw)
            out = await client.closed()
        assert not re.search(rb"HTTP/1\.1 200", out), out
    assert fort.calls == 0
    for each in fort.upstreams["b"].calls:
        assert b"sk-" not in each.head.replace(b"sk-upstream-0c2d-secret", b"")


CHUNKED = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {OTHER}\r\n"
           "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").encode()  # fmt: skip


@pytest.mark.parametrize("framing", [b"2\r\n{}\r\n0\r\nx: ", b"0\r\n" + b"a: b\r\n" * 30_000, b"2;x=", b"1\r\n{\r\n1;x="])
async def test_what_belongs_to_no_body_has_a_bound_too(fort, framing):
    """Trailers and extensions of chunks: the parser keeps a trailer as long as it goes on, and copies it at each read."""
    before = fort.gateway.rss_kb()
    async with dial(fort.port, stranger()) as client:
        sent = 0
        try:
            await client.send(CHUNKED + framing)
            while sent < 32_000_000:
                await client.send(b"a" * 1_000_000)
                sent += 1_000_000
        except ConnectionError:
            pass
        assert sent < 32_000_000, "it is read without end"
    assert fort.gateway.rss_kb() - before < 20_000


async def test_who_does_not_read_is_cut_off_though_there_is_another_request(tmp_path):
    """An answer of megabytes that is not read, and a request behind it: both were held as long as the caller liked."""
    upstream = ScriptedUpstream()
    await upstream.start()
    gateway = GatewayProcess(tmp_path, {"a": Backend(upstream, 8)}, timeouts={"client_write_s": 0.5})
    async with gateway:
        large = post({"model": "a", "prompt": "ab" * 500_000, "return_token_strs": True}, path="/tokenize")
        behind = (request("GET", "/v1/models", key=KEYS["client"]), post(model="a", stream=True), b"")
        files, writers = gateway.open_files(), []
        for raw in behind:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
            writer.transport.pause_reading()
            writer.write(large + raw)
            writers.append(writer)
        await within(10, lambda: gateway.open_files() >= files + len(behind), "they are connected")
        await within(20, lambda: gateway.open_files() <= files + 1, "they are cut off")
        await gateway.settled()
        for writer in writers:
            writer.transport.abort()
    await upstream.stop()


async def test_many_who_only_connect_leave_files_for_the_backends(tmp_path):
    """Started where only 256 files may be open unless it asks for more, as many shells have it (1,024 there)."""
    upstream = ScriptedUpstream()
    await upstream.start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    gateway = GatewayProcess(tmp_path, {"a": Backend(upstream, 8)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        await gateway.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_before)
    strangers = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(400)]
    assert (await say(gateway.port, post(model="a"))).status == 200
    for _, writer in strangers:
        writer.transport.abort()
    assert await gateway.stop() == 0
    await upstream.stop()


async def test_a_body_in_tiny_pieces_costs_no_more_than_its_size(fort):
    before = fort.gateway.rss_kb()
    async with dial(fort.port, stranger()) as client:
        await client.send(CHUNKED + b"2\r\n{ \r\n")
        for _ in range(10):
            await client.send(b"2\r\n  \r\n" * 100_000)
        await client.send(b"1\r\n}\r\n0\r\n\r\n")
        assert (await client.response()).code == "invalid_body"
    assert fort.gateway.rss_kb() - before < 30_000, "2 MB, held as a million pieces"


async def test_a_revoked_key_stops_on_a_connection_that_is_open(fort):
    """Made, used, rotated and revoked with the command, while one connection stays open throughout."""
    gateway, run = fort.gateway, CliRunner()
    file = str(gateway.folder / "policy.yaml")

    def keys(*words: str) -> dict:
        result = run.invoke(keys_app, [*words, "--policy", file, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    made = keys("new", "--id", "spy-1", "--tenant", "acme", "--write")
    assert made["hash"].startswith("sha256:") and made["key"] not in gateway.log()

    async def known(key: str, status: int) -> bool:
        return (await say(fort.port, post(model="a", key=key), source=stranger())).status == status

    await within(5, lambda: known(made["key"], 200), "the new key is taken without a restart")
    async with wire(fort.port) as client:
        for _ in range(3):
            await client.send(post(model="a", key=made["key"]))
            assert (await client.response()).status == 200
        fresh = keys("rotate", "spy-1")
        await within(5, lambda: known(fresh["key"], 200), "the successor is taken")
        await client.send(post(model="a", key=made["key"]))
        assert (await client.response()).status == 200, "both are good while they overlap"
        keys("revoke", "spy-1")
        await within(5, lambda: known(made["key"], 401), "the old key is nobody's")
        await client.send(post(model="a", key=made["key"]))
        assert (await client.response()).status == 401
    async with wire(fort.port) as client:
        await client.send(post(model="a", key=fresh["key"]))
        assert (await client.response()).status == 200
    listed = [each["id"] for each in yaml.safe_load((gateway.folder / "policy.yaml").read_text())["keys"]]
    assert "spy-1" not in listed and "spy-2" in listed
    gateway.write(gateway.policy())
    await within(5, lambda: known(fresh["key"], 401), "the policy is the old one again")
