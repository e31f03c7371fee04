"""Case 29: the id a backend sees is ours and unique; a client's id is echoed only where it is short and printable."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from tests.support.client import post
from tests.support.raw import assert_envelope, say
from tests.support.upstream import COMPLETION


async def test_the_same_id_twice_at_once(quay):
    async def slowly(call):
        await asyncio.sleep(0.1)
        await call.answer(COMPLETION)

    quay["bare"].script = slowly
    first, second = await asyncio.gather(*(say(quay.port, post(None, "x-request-id: same", model="bare")) for _ in range(2)))
    assert first.fields["x-request-id"] == second.fields["x-request-id"] == "same"
    sent = [call.fields["x-request-id"] for call in quay.calls]
    assert len(set(sent)) == 2 and "same" not in sent and all(len(name) <= 64 for name in sent)


IDS = {
    "short": ("abc-DEF_1.2:3/4", True),
    "64 characters": ("a" * 64, True),
    "65 characters": ("a" * 65, False),
    "60 KB": ("a" * 60_000, False),
    "empty": ("", False),
    "blanks": ("a b", False),
    "percent escapes": ("a%0d%0ax-evil:%20b", False),
    "backslash escapes": ("a\\r\\nx-evil: b", False),
    "not ascii": ("\xe9\xff", False),
    "quotes": ('a"b', False),
    "braces": ("{}", False),
    "a format": ("%s%n", False),
    "a terminal escape": ("\x1b[31m", False),
    "a tab": ("a\tb", False),
    "markup": ("<script>", False),
}


@pytest.mark.parametrize("name", IDS)
async def test_what_is_echoed(quay, name):
    value, echoed = IDS[name]
    for raw in (post(None, f"x-request-id: {value}", model="bare"), post(None, f"x-request-id: {value}", model="nothing"),
                post(None, f"x-request-id: {value}", key="sk-wrong")):  # fmt: skip
        got = await say(quay.port, raw)
        if got.status == 400 and "escape" in name and "terminal" in name:
            continue  # a control character is no header at all
        assert (got.fields["x-request-id"] == value) == echoed
        assert len(got.fields["x-request-id"]) <= 64
        assert "x-evil" not in got.fields
        row = await quay.gateway.account(got.fields["x-request-id"])
        assert row["client_request_id"] == (value if echoed else None)
    for call in quay.calls:
        assert value not in call.fields["x-request-id"] or value == ""


async def test_an_id_of_a_megabyte(quay):
    assert_envelope(await say(quay.port, post(None, "x-request-id: " + "a" * 1_000_000, model="bare")), 431)


@pytest.mark.parametrize("value", ["a\rb", "a\r\n x-evil: b", "a\x00b", "a\nx-evil: b\r"])
async def test_control_characters_are_refused_or_end_the_value(quay, value):
    got = await say(quay.port, post(None, f"x-request-id: {value}", model="bare"))
    assert got.status in (400, 200) and "x-evil" not in got.fields
    assert "x-evil" not in "".join(str(row) for row in quay.gateway.journal())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
async def test_a_body_does_not_name_its_request(quay, path):
    document = {
        "model": "bare",
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "max_tokens": 3,
        "request_id": "x",
    }
    wanted = {"/v1/chat/completions": {"messages"}, "/v1/completions": {"prompt"}, "/v1/messages": {"messages"}}.get(
        path, {"input"}
    )
    body = {
        k: v
        for k, v in document.items()
        if k in wanted | {"model", "request_id"} or (k == "max_tokens" and "input" not in wanted)
    }
    got = await say(quay.port, post(body, path=path))
    assert got.status == 400 and got.fields["x-plimsoll-reason"] == "field_not_allowed"
    assert quay.calls == []


async def test_a_retried_request_bears_another_id(quay):
    """The backend closes while the body is still on its way: the one case in which a request is sent again."""
    heads, good = [], quay["images"].accept

    async def once(peer):
        head = await peer.read_until(b"\r\n\r\n")
        if head.startswith(b"GET"):
            peer.transport.abort()
            return
        heads.append(head)
        quay["images"].accept = good
        peer.transport.abort()

    await quay["images"].reset()  # no connection is left that would not notice
    quay["images"].accept = once
    url = "data:image/png;base64," + base64.b64encode(bytes(12_000_000)).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    body = json.dumps({"model": "images", "messages": messages, "max_tokens": 4}).encode()
    got = await say(quay.port, post(body, "x-request-id: again"), timeout=20)
    assert (got.status, got.fields["x-request-id"]) == (200, "again")
    first = heads[0].decode().lower().partition("x-request-id: ")[2].partition("\r")[0]
    assert first and first != quay.calls[0].fields["x-request-id"]
    row = await quay.gateway.account("again")
    assert row["attempts"] == 2
