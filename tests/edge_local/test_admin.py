from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.edge import openapi
from gateway.edge.admin import admin_app
from gateway.edge.shell import Rules
from gateway.errors import Reason, Refusal
from gateway.observe.audit import AuditLog
from gateway.qualify import plan as plans

from .world import World, raw, serving, with_history


@pytest.fixture
def world() -> World:
    return with_history(World())


@pytest.fixture
def audit_path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
async def url(world: World, audit_path: Path) -> AsyncIterator[str]:
    app = admin_app(
        world,
        lambda: Rules(world.keys, body_limit=100_000, body_timeout_s=0.5),
        world.account,
        AuditLog(audit_path),
        lambda: 1.7e9,
    )
    async with serving(app) as address:
        yield address


@pytest.fixture
async def ops(world: World, url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {world.tokens['ops']}"}) as client:
        yield client


def audited(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


EVERYTHING = [
    ("GET", "/console"), ("GET", "/openapi.json"), ("GET", "/admin/status"), ("GET", "/admin/records"),
    ("POST", "/admin/records"), ("GET", "/admin/retest"), ("POST", "/admin/retest/plan"), ("POST", "/admin/explain"),
    ("POST", "/admin/reload"), ("GET", "/admin/journal"), ("GET", "/admin/audit"), ("POST", "/admin/backends/a/drain"),
    ("POST", "/admin/backends/a/undrain"), ("POST", "/admin/backends/a/reset-breaker"),
]  # fmt: skip


async def test_operators_alone(world: World, url: str, audit_path: Path) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for method, path in EVERYTHING:
            assert (await client.request(method, path)).status_code == 401
            for who in ("acme-1", "prom", "kube"):
                answer = await client.request(method, path, headers={"authorization": f"Bearer {world.tokens[who]}"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_permitted")
    assert audited(audit_path) == [] and world.pushed == [] and not world.backends[0].draining


async def test_the_table_is_exact(ops: httpx.AsyncClient) -> None:
    for path in ("/admin", "/admin/", "/admin/status/", "/console/", "/admin/backends/a", "/admin/backends/a/explode",
                 "/admin/backends//drain", "/admin/backends/{name}", "/v1/models", "/metrics", "/docs", "/"):  # fmt: skip
        assert (await ops.post(path)).status_code == 404, path
        assert (await ops.get(path)).status_code == 404, path
    wrong = await ops.delete("/admin/records")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST, HEAD")
    assert (await ops.get("/admin/reload")).status_code == 405


async def test_status_tells_gates_loads_and_queues(ops: httpx.AsyncClient) -> None:
    status = (await ops.get("/admin/status")).json()
    a, b = status["backends"]
    assert (a["gate"], a["in_flight_sequences"], a["limits"]["concurrency"]) == ("open", 6, 8)
    assert (b["gate"], b["verdicts"][0]["decision"]) == ("configuration_changed", "DEFER")
    assert status["queues"][1] == {"name": "batch", "requests": 41, "tokens": 90_112, "oldest_s": 38.0}


async def test_why_was_it_refused(ops: httpx.AsyncClient) -> None:
    rows = (await ops.get("/admin/journal", params={"reason": "queue_timeout", "limit": "2"})).json()["requests"]
    assert [row["reason"] for row in rows] == ["queue_timeout"] * 2
    assert rows[0]["message"].startswith("No room within 10 s")
    assert (await ops.get("/admin/journal", params={"tenant": "nobody"})).json()["requests"] == []
    for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "501"}, {"colour": "red"}):
        answer = await ops.get("/admin/journal", params=query)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")


async def test_actions_are_taken_and_audited_with_before_and_after(
    ops: httpx.AsyncClient, world: World, audit_path: Path
) -> None:
    answer = await ops.post("/admin/backends/a/drain")
    assert answer.json() == {"before": {"draining": False}, "after": {"draining": True}}
    assert world.backends[0].draining
    assert (await ops.post("/admin/backends/a/undrain")).status_code == 200
    assert (await ops.post("/admin/backends/a/reset-breaker")).status_code == 200
    assert (await ops.post("/admin/backends/nobody/drain")).status_code == 404
    assert (await ops.post("/admin/reload")).json() == {"before": {"digest": "a"}, "after": {"digest": "b"}}
    world.reload_result = Refusal(Reason.INVALID_BODY, "policy.yaml: queue.max_requests: Input should be a valid integer")
    refused = await ops.post("/admin/reload")
    assert refused.status_code == 400 and "queue.max_requests" in refused.json()["error"]["message"]
    assert (await ops.post("/admin/records", content=b'{"schema": "x"}')).status_code == 201
    rows = audited(audit_path)
    assert [(row["who"], row["what"], row["result"]) for row in rows] == [
        ("ops", "drain a", "done"), ("ops", "undrain a", "done"), ("ops", "reset-breaker a", "done"),
        ("ops", "drain nobody", "refused: unknown_route"), ("ops", "policy reload", "done"),
        ("ops", "policy reload", "refused: invalid_body"), ("ops", f"record push {'cd' * 32}", "done"),
    ]  # fmt: skip
    assert (rows[0]["before"], rows[0]["after"], rows[0]["peer"]) == ({"draining": False}, {"draining": True}, "127.0.0.1")
    assert [row["what"] for row in (await ops.get("/admin/audit")).json()["entries"]][-1] == "drain a"


async def test_a_name_may_hold_slashes_and_escapes(ops: httpx.AsyncClient, world: World) -> None:
    import dataclasses

    world.backends.append(dataclasses.replace(world.backends[0], name="eu/a:1"))
    assert (await ops.post("/admin/backends/eu/a:1/drain")).status_code == 200
    assert (await ops.post("/admin/backends/eu%2Fa%3A1/undrain")).status_code == 200


async def test_explain_and_its_bounds(ops: httpx.AsyncClient) -> None:
    assert (await ops.post("/admin/explain", json={"model": "tiny", "input_tokens": 9})).json()["reason"] == "ok"
    wrong = [{"input_tokens": -1}, {"input_tokens": 2**53}, {"input_tokens": "1"}, {"sequences": 0}, {"extra": 1}, {"model": ""},
             {"features": ["x"] * 17}, {"task": "sing"}]  # fmt: skip
    bad = [{}, {"model": "tiny"}, *({"model": "tiny", "input_tokens": 1, **fields} for fields in wrong)]
    for body in bad:
        answer = await ops.post("/admin/explain", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body"), body
    assert (await ops.post("/admin/explain", json={"model": "x", "input_tokens": 1})).status_code == 404


async def test_the_retest_plan_can_be_measured(ops: httpx.AsyncClient) -> None:
    made = await ops.post("/admin/retest/plan", json={"model": "tiny", "share": 0.99})
    (cell,) = plans.parse(made.content).cells
    assert cell.concurrency[-1] >= 31 and cell.input_tokens.max >= 9_000
    assert (await ops.post("/admin/retest/plan", json={"model": "tiny", "share": 1.5})).status_code == 400
    assert (await ops.post("/admin/retest/plan", json={"model": "no-demand"})).status_code == 400
    listed = (await ops.get("/admin/retest")).json()
    assert {group["axis"] for group in listed["groups"]} == {"input", "concurrency", "identity"}
    assert listed["changes"][0]["fields"] == ["scheduler.max_num_seqs", "model.dtype"]


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


async def test_a_browser_may_look_but_no_other_site_may_act(world: World, url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        asked = await client.get("/console")
        assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
        assert (await client.get("/admin/status")).headers["www-authenticate"] == "Bearer"
        me = basic(world.tokens["ops"])
        assert (await client.get("/console", headers=me)).status_code == 200
        assert (await client.get("/admin/status", headers=me)).status_code == 200
        assert (await client.post("/admin/backends/a/drain", headers=me)).status_code == 401
        assert not world.backends[0].draining
        assert (await client.post("/admin/backends/a/drain", headers={**me, "x-plimsoll-console": "1"})).status_code == 200
        preflight = {
            "origin": "https://evil.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-plimsoll-console",
        }
        assert (await client.options("/admin/backends/a/drain", headers=preflight)).status_code == 401
        for value in (
            "Basic",
            "Basic !!!",
            "Basic " + base64.b64encode(b"me").decode(),
            "Basic " + base64.b64encode(b"\xff:\xff").decode(),
        ):
            assert (await client.get("/console", headers={"authorization": value})).status_code == 401
        assert (await client.get("/console", headers=basic(world.tokens["acme-1"]))).status_code == 403


async def test_the_console_is_whole_in_itself_under_a_strict_policy(ops: httpx.AsyncClient) -> None:
    page = await ops.get("/console")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["cache-control"] == "no-store"
    for outside in ("http://", "https://", "//cdn", "innerHTML", " style=", "onclick="):
        assert outside not in page.text, outside


async def test_the_document_names_what_exists_and_nothing_else(ops: httpx.AsyncClient) -> None:
    document = (await ops.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    operator = {(m.upper(), p) for p, methods in document["paths"].items() for m, o in methods.items() if "operator" in o["tags"]}
    assert operator == {(m, p.replace("/a/", "/{name}/")) for m, p in EVERYTHING}
    identifiers = [o["operationId"] for methods in document["paths"].values() for o in methods.values()]
    assert len(identifiers) == len(set(identifiers))
    assert document == json.loads(json.dumps(openapi.document("0.1.0")))


async def test_odd_bytes_after_the_backends_prefix_are_harmless(world: World, url: str) -> None:
    key = world.tokens["ops"].encode()
    for name in (b"%ff", b"%zz", b"%00", b"..", b"a%2fdrain", b"%7Bname%7D", b"{name}"):
        head = b"POST /admin/backends/" + name + b"/drain HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n"
        answer = await raw(url, head + b"authorization: Bearer " + key + b"\r\n\r\n")
        assert answer.split(b" ", 2)[1] in (b"400", b"404"), name
