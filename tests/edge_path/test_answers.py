"""Answers that are not streamed: relayed whole, or a clean error."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.errors import Outcome, Reason
from tests.edge_path.site import KEY, Site, policy_for, running
from tests.edge_path.wire import ask, post, until, wire
from tests.forward.scripted import Peer, response, serving

COMPLETION = orjson.dumps(
    {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
)


def answering(*answers: bytes, seen=None):
    """An upstream that gives these answers in turn, whatever connection they are asked on; the last one for ever."""
    left = list(answers)

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if seen is not None:
                seen.append(request)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer == b"RST":
                peer.reset()
                return
            await peer.say(answer)
            if b"connection: close" in answer.lower() or answer == b"":
                return

    return script


async def test_an_answer_is_relayed_and_accounted():
    seen = []
    async with serving(
        answering(response(COMPLETION, b"content-type: application/json", b"server: uvicorn", b"date: x"), seen=seen)
    ) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port)
    assert (got.status, got.body) == (200, COMPLETION)
    names = [name.lower() for name, _ in got.lines]
    assert names.count("date") == names.count("server") == names.count("x-request-id") == 1
    assert got.fields["server"] == "plimsoll"
    assert got.fields["x-plimsoll-record"] == "r" * 16
    assert got.fields["content-type"] == "application/json"
    [account] = site.accounts
    assert (account.outcome, account.reason, account.status) == (Outcome.SERVED, Reason.OK, 200)
    assert (account.input_tokens, account.output_tokens, account.tenant, account.model) == (5, 3, "acme", "tiny")
    assert site.in_flight() == 0


async def test_upstream_sees_nothing_of_the_clients_headers():
    seen = []
    secrets = (
        "cookie: canary=1",
        "x-goog-api-key: canary",
        "x-vllm-priority: canary",
        "x-request-id: canary",
        "x-anything: canary",
    )
    async with serving(answering(response(COMPLETION), seen=seen)) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, None, *secrets)
    assert got.status == 200
    assert got.fields["x-request-id"] == "canary"  # short and printable: echoed to its own client
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert b"canary" not in seen[0] and KEY.encode() not in seen[0]
    names = [line.split(b":")[0] for line in head.split(b"\r\n")[1:]]
    assert names == [
        b"host", b"accept-encoding", b"x-plimsoll-gateway", b"authorization", b"x-request-id", b"content-type", b"content-length",
    ]  # fmt: skip
    assert b"authorization: Bearer backend-key" in head
    assert orjson.loads(body)["max_tokens"] == 8


async def test_an_output_limit_is_written_and_told():
    seen = []
    async with (
        serving(answering(response(COMPLETION), seen=seen)) as up,
        running(Site(policy_for(up.port), output_max=77)) as port,
    ):
        got = await ask(port, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert got.fields["x-plimsoll-max-tokens"] == "77"
    assert orjson.loads(seen[0].partition(b"\r\n\r\n")[2])["max_completion_tokens"] == 77


@pytest.mark.parametrize("bad", ["x" * 5000, "", "a b", "ü"])
async def test_unusable_request_ids_are_replaced(bad):
    seen = []
    async with serving(answering(response(COMPLETION), seen=seen)) as up, running(Site(policy_for(up.port))) as port:
        first = await ask(port, None, f"x-request-id: {bad}")
        second = await ask(port, None, f"x-request-id: {bad}")
    assert first.fields["x-request-id"].startswith("req-")
    assert first.fields["x-request-id"] != second.fields["x-request-id"]
    ids = [line for request in seen for line in request.split(b"\r\n") if line.startswith(b"x-request-id")]
    assert len(set(ids)) == 2


ERRORS = {
    "400": (response(b'{"error":{"message":"m"}}', b"content-type: application/json", status=b"400 Bad Request"), Outcome.SERVED),
    "429": (response(b"slow", b"retry-after: 7", status=b"429 Too Many Requests"), Outcome.SERVED),
    "503 html": (response(b"<html>", b"content-type: text/html", status=b"503 Service Unavailable"), Outcome.FAILED),
    "500": (response(b"boom", status=b"500 Internal Server Error"), Outcome.FAILED),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
async def test_errors_of_the_backend_keep_status_type_and_body(name, stream):
    answer, outcome = ERRORS[name]
    async with serving(answering(answer)) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port, stream=stream)
    assert str(got.status) == name[:3]
    assert got.body == answer.partition(b"\r\n\r\n")[2]
    assert got.fields.get("retry-after") == ("7" if name == "429" else None)
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (outcome, Reason.UPSTREAM_ERROR)
    assert site.yard.suspected == (["a"] if name == "500" else [])
    assert site.controller.breaker("a").state == "closed"


async def test_a_200_that_is_an_error_is_relayed_and_counted_as_failed():
    async with serving(answering(response(b'{"error": {"message": "m", "code": 500}}'))) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port)
    assert got.status == 200
    assert site.accounts[0].outcome is Outcome.FAILED


async def test_a_redirect_is_never_followed_nor_shown():
    async with serving(answering(response(b"", b"location: http://evil/", status=b"302 Found"))) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port)
    assert (got.status, got.code) == (502, "upstream_error")
    assert "location" not in got.fields


async def test_204_does_not_hang():
    async with serving(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, stream=True)
    assert (got.status, got.body) == (204, b"")
    assert "content-length" not in got.fields


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"x-unknown"])
async def test_a_coded_answer_is_relayed_as_it_is(coding):
    answer = response(b"\x1f\x8bcoded", b"content-encoding: " + coding)
    async with serving(answering(answer)) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port)
    assert (got.body, got.fields["content-encoding"]) == (b"\x1f\x8bcoded", coding.decode())


BROKEN = {
    "rst": [b"RST"],
    "fin before the head": [b""],
    "too short": [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{}"],
    "no last chunk": [b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"],
    "not http": [b"nonsense\r\n\r\n"],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_a_502_that_must_not_be_sent_again(name):
    async with serving(answering(*BROKEN[name])) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port)
            assert (got.status, got.code) == (502, "upstream_reset")
            assert got.fields["x-should-retry"] == "false"
            assert up.peers == 1
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (Outcome.FAILED, Reason.UPSTREAM_RESET)
    assert site.in_flight() == 0


async def test_nothing_listening_is_a_502_that_may_be_sent_again():
    async with serving(answering(b"")) as up:
        port_of_nobody = up.port
    site = Site(policy_for(port_of_nobody))
    async with running(site) as port:
        got = await ask(port)
        assert (got.status, got.code) == (502, "upstream_unreachable")
        assert got.fields["x-should-retry"] == "true"
        assert int(got.fields["retry-after-ms"]) in range(1000, 1251)
    assert site.accounts[0].attempts == 2
    assert site.in_flight() == 0


async def test_a_large_body_cut_before_it_was_written_is_sent_once_more():
    async def script(peer: Peer) -> None:
        if up.peers == 1:
            await peer.reader.read(1000)
            peer.reset()
            return
        await peer.request()
        await peer.say(response(COMPLETION))
        await peer.gone()

    async with serving(script) as up:
        site = Site(policy_for(up.port), input_max=10_000_000)
        async with running(site) as port:
            got = await ask(port, {"model": "tiny", "messages": [{"role": "user", "content": "x" * 8_000_000}], "max_tokens": 4})
    assert got.status == 200
    assert site.accounts[0].attempts == 2
    assert len(site.accounts) == 1


async def test_two_requests_on_one_connection_and_one_to_the_backend():
    async with serving(answering(response(COMPLETION))) as up:
        async with running(Site(policy_for(up.port))) as port, wire(port) as client:
            for _ in range(3):
                await client.send(post())
                assert (await client.response()).status == 200
        assert up.peers == 1


async def test_a_full_backend_makes_the_next_one_wait_and_says_for_how_long():
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await release.wait()
            await peer.say(response(COMPLETION))

    async with serving(script) as up:
        site = Site(policy_for(up.port), concurrency=1)
        async with running(site) as port:
            first = asyncio.create_task(ask(port))
            await until(lambda: site.in_flight() == 1)
            second = asyncio.create_task(ask(port))
            await until(lambda: site.waiting() == 1)
            await asyncio.sleep(0.02)
            release.set()
            assert (await first).status == (await second).status == 200
            assert int((await second).fields["x-plimsoll-queue-ms"]) >= 15


async def test_a_refusal_names_axis_and_fit():
    async with serving(answering(response(COMPLETION))) as up:
        site = Site(policy_for(up.port), output_max=50)
        async with running(site) as port:
            got = await ask(port, max_tokens=51)
    assert (got.status, got.code) == (400, "out_of_slice_output")
    assert "50" in got.json()["error"]["message"]
    assert got.fields["x-plimsoll-reason"] == "out_of_slice_output"
    assert got.fields["x-should-retry"] == "false"
    assert up.peers == 0
    assert [trigger[2] for trigger in site.triggers] == ["output"]


async def test_a_backend_that_left_the_policy_between_grant_and_dispatch():
    """Nothing was sent: it is tried once more, and no defect."""
    async with serving(answering(response(COMPLETION))) as up:
        site = Site(policy_for(up.port))
        upstream, left = site.upstreams["a"], iter([None, None])
        site.yard.upstream = lambda backend: next(left, upstream)
        async with running(site) as port:
            got = await ask(port)
    assert (got.status, got.body) == (200, COMPLETION)
    [account] = site.accounts
    assert (account.attempts, account.outcome, account.reason) == (2, Outcome.SERVED, Reason.OK)
    assert site.in_flight() == 0
