"""Case 32: what clients write never becomes a label: thousands of names later /metrics has the series it had."""

from __future__ import annotations

import json

from tests.support.client import KEY, post
from tests.support.gateway import KEYS
from tests.support.raw import dial, request, say, stranger

UNKNOWN = 5000


async def series(quay) -> dict[str, float]:
    """Every series of the gateway's own metrics, with its value."""
    got = await say(quay.port, request("GET", "/metrics", key=KEYS["scraper"]))
    lines = [line for line in got.body.decode().splitlines() if line.startswith("plimsoll_")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def once_of_each(quay, number: int, source: str) -> None:
    """One request of every kind that is refused, its words all new."""
    word = f"word{number}"
    await say(quay.port, request("GET", "/v1/models", key=f"sk-{word}"), source=source)
    await say(quay.port, request("GET", f"/{word}", key=KEY))
    await say(quay.port, request("GET", f"/v1/models/{word}", key=KEY))
    await say(quay.port, request(("GET", "PUT", "PATCH", "LOCK", "PROPFIND")[number % 5], "/v1/chat/completions", key=KEY))
    await say(quay.port, post(None, f"x-request-id: {word}", f"user-agent: {word}", model="bare", user=word))
    await say(quay.port, post(None, model="bare", **{word: 1}))
    await say(quay.port, post(None, f"content-encoding: {word}", model="bare"))


async def test_series_are_as_many_after_thousands_of_names(quay):
    source = stranger()
    for number in range(5):
        await once_of_each(quay, number, source)
    async with dial(quay.port) as client:
        await client.send(post({"model": "first-unknown", "messages": []}))
        assert (await client.response()).status == 404
        before = await series(quay)
        for start in range(0, UNKNOWN, 50):
            bodies = [json.dumps({"model": f"unknown-{start + n}", "messages": []}).encode() for n in range(50)]
            for body in bodies:
                client.writer.write(post(body))
            for _ in bodies:
                assert (await client.response()).status == 404
    for number in range(5, 105):
        await once_of_each(quay, number, source)
    after = await series(quay)
    assert set(after) == set(before)
    assert len(after) < 2000
    text = "\n".join(after)
    assert "unknown-" not in text and "word" not in text
    refused = 'plimsoll_requests_total{class="interactive",model="other",outcome="refused",reason="model_not_found"}'
    found = [name for name in after if "plimsoll_requests_total" in name and "model_not_found" in name]
    assert found, refused
    assert sum(after[name] - before[name] for name in found) == UNKNOWN + 100
    assert all('model="other"' in name for name in found)
    await quay.gateway.settled()


async def test_known_names_keep_their_own(quay):
    for model in ("bare", "org/name", "alias"):
        assert (await say(quay.port, post(model=model))).status == 200
    names = await series(quay)
    for model in ("bare", "org/name", "alias"):
        assert any(f'model="{model}"' in name and "requests_total" in name for name in names)
    assert not any("upstream/name" in name for name in names)
