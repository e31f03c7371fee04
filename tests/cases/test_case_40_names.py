"""Case 40: every id that is listed can be fetched, slashes and all; a path is served or 404, never a redirect."""

from __future__ import annotations

import pytest

from tests.support.client import KEY, post
from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, request, say


async def test_every_listed_id_can_be_fetched(quay):
    listed = (await say(quay.port, request("GET", "/v1/models", key=KEY))).json()["data"]
    assert {model["id"] for model in listed} == {"keyed", "bare", "images", "speech", "pool", "org/name", "alias"}
    for model in listed:
        for path in (model["id"], model["id"].replace("/", "%2F"), model["id"].replace("/", "%2f")):
            got = await say(quay.port, request("GET", f"/v1/models/{path}", key=KEY))
            assert (got.status, got.json()) == (200, model), path
    assert next(model for model in listed if model["id"] == "bare")["max_input_tokens"] == 8192
    assert "upstream/name" not in str(listed)


ODD = [
    "org/name/", "org//name", "org%252Fname", "org", "name", "org/name;x", "org%2Fname%00", "./org/name", "org/name%20",
    "ORG/name", "org%5Cname", "%zz", "%", "%ff", "upstream/name", "upstream%2Fname",
]  # fmt: skip
FORWARDED = [
    (),
    ("x-forwarded-proto: https",),
    ("x-forwarded-proto: http", "x-forwarded-host: evil.example"),
    ("x-forwarded-prefix: /v1", "x-original-url: /metrics", "x-rewrite-url: /metrics"),
]


@pytest.mark.parametrize("path", ODD)
async def test_nothing_else_is_found(quay, path):
    got = await say(quay.port, request("GET", f"/v1/models/{path}", key=KEY))
    assert_envelope(got, 404, "model_not_found")
    assert got.body == (await say(quay.port, request("GET", "/v1/models/unknown", key=KEY))).body


@pytest.mark.parametrize("lines", FORWARDED)
async def test_no_redirects(quay, lines):
    for raw in (
        post(None, *lines, path="/v1/chat/completions/", model="bare"),
        post(None, *lines, path="//v1/chat/completions", model="bare"),
        request("GET", "//v1/models", *lines, key=KEY), request("GET", "/v1/models/", *lines, key=KEY),
        request("GET", "/health/live/", *lines, key=KEYS["prober"]), request("GET", "/metrics/", *lines, key=KEYS["scraper"]),
    ):  # fmt: skip
        got = await say(quay.port, raw)
        assert_envelope(got, 404, "unknown_route")
        assert "location" not in got.fields
    for path in ("/console/", "/admin/status/", "/admin"):
        got = await say(quay.admin_port, request("GET", path, *lines, key=KEYS["operator"]))
        assert_envelope(got, 404, "unknown_route")
    assert quay.calls == []


async def test_a_query_changes_nothing(quay):
    plain = await say(quay.port, request("GET", "/v1/models", key=KEY))
    for query in ("?x=1", "?", "?/../metrics", "?a?b", "?%00", "?beta=true"):
        got = await say(quay.port, request("GET", f"/v1/models{query}", key=KEY))
        assert (got.status, got.body) == (200, plain.body)
    got = await say(quay.port, post(model="org/name", path="/v1/chat/completions?beta=true"))
    assert got.status == 200
    assert quay["keyed"].calls[0].path == "/v1/chat/completions"


@pytest.mark.parametrize(("asked", "sent"), [("org/name", "org/name"), ("alias", "upstream/name"), ("keyed", "keyed")])
async def test_the_name_behind(quay, asked, sent):
    assert (await say(quay.port, post(model=asked))).status == 200
    assert quay["keyed"].calls[0].json()["model"] == sent
