"""The same head again and again on one connection, as clients send it: what followed from the first is not taken for the next.

A gateway that remembers what a head meant can be wrong about whose body follows it, about a key that ended meanwhile, and about
a policy that changed. Each test sends bytes that repeat exactly, or all but exactly.
"""

from __future__ import annotations

import copy
import datetime as dt
import gzip
import json
import time

import pytest

from tests.edge_local.issuer import token
from tests.fuzz.stage import STATUS
from tests.support.client import KEY, post, within
from tests.support.gateway import KEYS, hash_of
from tests.support.raw import dial, request, say, stranger
from tests.support.upstream import Call, chunk

SPARE = "sk-spare"
LENGTH = 12  # of each text, so that heads repeat to the byte


async def echo(call: Call) -> None:
    """Answers with the text that it was sent."""
    said = call.json()["messages"][0]["content"]
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    document = {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
    await call.answer(json.dumps({**document, "usage": usage}).encode())


def chat(text: str, model: str = "a", key: str = KEY, *lines: str) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text.ljust(LENGTH, ".")}], "max_tokens": 8}
    return post(body, *lines, key=key)


def head(raw: bytes) -> bytes:
    return raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def text_of(got) -> str:
    return got.json()["choices"][0]["message"]["content"].rstrip(".")


async def put(gateway, document: dict) -> None:
    """Have this policy in force when it returns, whatever the watch over the file does meanwhile."""
    gateway.write(document)
    got = await say(gateway.admin_port, request("POST", "/admin/reload", key=KEYS["operator"]))
    assert got.status == 200, got


async def warm(client, raw: bytes, times: int = 3) -> None:
    """Have these bytes known to the connection."""
    for _ in range(times):
        await client.send(raw)
        assert (await client.response()).status == 200


@pytest.fixture
def echoing(fort):
    for upstream in fort.upstreams.values():
        upstream.script = echo
    return fort


# Whose body it is


async def test_each_body_is_its_own_however_the_bytes_come(echoing):
    texts = [f"text {number}" for number in range(12)]
    raws = [chat(text) for text in texts]
    assert len({head(raw) for raw in raws}) == 1, "the heads are the same to the byte"
    stream = b"".join(raws)
    for size in (len(stream), len(raws[0]), len(head(raws[0])), len(raws[0]) - 1, len(raws[0]) + 1, 100, 7):
        async with dial(echoing.port) as client:
            await client.send(*[stream[at : at + size] for at in range(0, len(stream), size)])
            answers = [await client.response() for _ in texts]
        assert [text_of(got) for got in answers] == texts, size
        assert len({got.fields["x-request-id"] for got in answers}) == len(texts)
    assert echoing.calls == 7 * len(texts)
    ids = [call.fields["x-request-id"] for call in echoing.upstreams["a"].calls]
    assert len(set(ids)) == len(ids), "each attempt has an id of its own"


async def test_a_body_that_is_the_head_again_is_a_body(echoing):
    """The bytes of a known head, as the body of a request with the same head: one refusal, and none of it is a request."""
    good = chat("first")
    body = head(good) + b" " * 1000
    size = len(good) - len(head(good))
    for data in (body[:size], good[:size], (b"\r\n\r\n" + head(good))[:size]):
        assert len(data) == size
        async with dial(echoing.port) as client:
            await warm(client, good)
            await client.send(head(good) + data + chat("after"))
            refused, after = await client.response(), await client.response()
            assert refused.status == 400 and text_of(after) == "after"
            await client.send(
                b"GET /v1/models HTTP/1.1\r\nhost: g\r\nconnection: close\r\nauthorization: Bearer sk-bench\r\n\r\n"
            )
            rest = await client.closed()
            assert rest.count(b"HTTP/1.1 ") == 1, rest


async def test_chunked_bodies_under_one_head_end_where_they_say(echoing):
    def chunked(text: str, cuts: int, trailer: bytes = b"") -> bytes:
        body = chat(text).partition(b"\r\n\r\n")[2]
        lines = [f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}".encode(),
                 b"content-type: application/json", b"transfer-encoding: chunked"]  # fmt: skip
        step = -(-len(body) // cuts)
        pieces = b"".join(chunk(body[at : at + step]) for at in range(0, len(body), step))
        return b"\r\n".join(lines) + b"\r\n\r\n" + pieces + b"0\r\n" + trailer + b"\r\n"

    trailer = b"authorization: Bearer sk-other\r\nx: y\r\n"
    raws = [chunked("one", 1), chunked("a longer two", 3), chunked("3", 50), chunked("four", 2, trailer), chunked("five", 1)]
    texts = ["one", "a longer two", "3", "four", "five"]
    for segments in ([b"".join(raws)], raws, [raws[0], b"".join(raws[1:])]):
        async with dial(echoing.port) as client:
            await client.send(*segments)
            assert [text_of(await client.response()) for _ in texts] == texts
    for call in echoing.upstreams["a"].calls:
        assert "transfer-encoding" not in call.fields and b"sk-other" not in call.head


async def test_a_coded_body_is_decoded_each_time(echoing):
    def packed(text: str) -> bytes:
        body = gzip.compress(chat(text).partition(b"\r\n\r\n")[2], mtime=0)
        lines = ("content-encoding: gzip", "content-type: application/json")
        return request("POST", "/v1/chat/completions", *lines, key=KEY, body=body)

    async with dial(echoing.port) as client:
        for text in ("one", "two", "one", "three"):
            await client.send(packed(text))
            assert text_of(await client.response()) == text


NEARLY = {
    "another key": (lambda raw: raw.replace(KEY.encode(), b"sk-wrong"), 401),
    "another key of the same tenant's model": (lambda raw: raw.replace(KEY.encode(), b"sk-other"), 404),
    "another path": (lambda raw: raw.replace(b"/v1/chat/completions", b"/v1/chat/completionz"), 404),
    "another method": (lambda raw: raw.replace(b"POST ", b"PUT  ").replace(b"PUT  ", b"PUT ", 1), 405),
    "a query": (lambda raw: raw.replace(b"completions HTTP", b"completions?a HTTP"), 200),
    "another type": (lambda raw: raw.replace(b"application/json", b"application/jsom"), 415),
    "a header more": (lambda raw: raw.replace(b"\r\n\r\n", b"\r\nx-api-key: sk-wrong\r\n\r\n", 1), 401),
    "a second length": (lambda raw: raw.replace(b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\n", 1), 400),
    "a coding of the transfer": (lambda raw: raw.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n", 1), 400),
    "no host": (lambda raw: raw.replace(b"host: g\r\n", b"hosu: g\r\n", 1), 400),
    "two hosts": (lambda raw: raw.replace(b"\r\n\r\n", b"\r\nhost: g\r\n\r\n", 1), 400),
    "an upgrade": (lambda raw: raw.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 1), 404),
    "another version": (lambda raw: raw.replace(b"HTTP/1.1", b"HTTP/1.2", 1), 400),
    "a line folded": (lambda raw: raw.replace(b"host: g\r\n", b"host: g\r\n b\r\n", 1), 400),
    "line ends of another system": (lambda raw: raw.replace(b"\r\n", b"\n"), 400),
}


@pytest.mark.parametrize("name", NEARLY)
async def test_all_but_the_same_head_is_another(echoing, name):
    change, status = NEARLY[name]
    raw = chat("known")
    changed = change(raw)
    assert changed != raw
    for together in (False, True):
        async with dial(echoing.port, stranger()) as client:
            await warm(client, raw)
            before = echoing.calls
            await client.send(*([raw + changed] if together else [raw, changed]))
            assert (await client.response()).status == 200
            assert (await client.response()).status == status
        assert echoing.calls - before == (2 if status == 200 else 1)


async def test_a_length_that_differs_in_one_digit_is_read_as_it_stands(echoing):
    short, long = chat("x" * LENGTH), chat("x" * (LENGTH + 1))
    assert len(head(short)) == len(head(long)) and head(short) != head(long)
    async with dial(echoing.port) as client:
        await client.send(b"".join((short, short, long, short, long, long)))
        found = [text_of(await client.response()) for _ in range(6)]
    assert [len(each) - LENGTH for each in found] == [0, 0, 1, 0, 1, 1]


async def test_a_wrong_length_under_a_known_head_smuggles_nothing(echoing):
    """One byte too many belongs to the next request and breaks it; one too few takes it from the next."""
    good = chat("known")
    for wrong in (good + b"X", good[:-1]):
        async with dial(echoing.port) as client:
            await warm(client, good)
            before = echoing.calls
            await client.send(wrong + chat("inner", key="sk-nobody") + chat("inner", "b"))
            out = await client.closed()
        assert STATUS.findall(out) in ([b"200", b"400"], [b"400"], [b"400", b"400"]), out
        assert echoing.calls - before <= 1 and b"inner" not in out


# Whose key it is, and for how long


async def served_until(echoing, ends: float, raw: bytes) -> None:
    """The same request again and again on one connection: served before `ends` (Unix seconds), refused and closed after it."""
    served = 0
    async with dial(echoing.port) as client:
        while True:
            asked = time.time()
            await client.send(raw)
            got = await client.response()
            if got.status == 401:
                break
            assert got.status == 200 and asked < ends, "served after its end"
            served += 1
        assert time.time() >= ends and served > 3
        assert await client.closed() == b""


async def test_a_key_ends_at_its_time_on_a_connection_that_is_open(echoing):
    gateway = echoing.gateway
    document = copy.deepcopy(gateway.policy())
    ends = time.time() + 2
    moment = dt.datetime.fromtimestamp(ends, dt.UTC).isoformat()
    document["keys"].append({"id": "spare", "hash": hash_of(SPARE), "role": "client", "tenant": "acme", "expires": moment})
    await put(gateway, document)
    await served_until(echoing, ends, chat("known", key=SPARE))
    await put(gateway, gateway.policy())


async def test_a_token_ends_at_its_time_on_a_connection_that_is_open(echoing):
    gateway = echoing.gateway
    document = copy.deepcopy(gateway.policy())
    document["oidc"]["leeway_s"] = 0
    await put(gateway, document)
    ends = int(time.time()) + 2
    await served_until(echoing, ends, chat("known", key=token(now=time.time(), exp=ends).decode()))
    await put(gateway, gateway.policy())


def changed(document: dict, what: str) -> dict:
    """The policy with one thing changed that concerns the spare key."""
    document = copy.deepcopy(document)
    key = next(each for each in document["keys"] if each["id"] == "spare")
    match what:
        case "the key is gone":
            document["keys"].remove(key)
        case "the key is another":
            key["hash"] = hash_of("sk-rotated")
        case "the key has ended":
            key["expires"] = "2020-01-01T00:00:00Z"
        case "the key has another role":
            key["role"], key["tenant"] = "scraper", None
        case "the key has another tenant":
            key["tenant"] = "other"
        case "the tenant has another model":
            document["tenants"]["acme"]["models"] = ["b"]
        case "the model is gone":
            del document["models"]["a"]
        case "bodies are bounded":
            document["server"]["max_body_bytes"] = 20
    return document


STALE = {
    "the key is gone": 401, "the key is another": 401, "the key has ended": 401, "the key has another role": 403,
    "the key has another tenant": 404, "the tenant has another model": 404, "the model is gone": 404, "bodies are bounded": 413,
}  # fmt: skip


@pytest.mark.parametrize("what", STALE)
async def test_a_new_policy_holds_for_the_next_request_of_an_open_connection(echoing, what):
    gateway = echoing.gateway
    document = copy.deepcopy(gateway.policy())
    document["keys"].append({"id": "spare", "hash": hash_of(SPARE), "role": "client", "tenant": "acme"})
    await put(gateway, document)
    raw = chat("known", key=SPARE)
    async with dial(echoing.port) as one, dial(echoing.port) as two:
        for client in (one, two):
            await warm(client, raw)
        await two.send(raw[:-1])  # its head is judged before the change: only what is looked up later may differ
        before = echoing.calls
        await put(gateway, changed(document, what))
        await one.send(raw)
        got = await one.response()
        assert got.status == STALE[what], (what, got)
        assert echoing.calls == before
        await two.send(raw[-1:])
        assert (await two.response()).status in (200, STALE[what])
    await put(gateway, gateway.policy())
    assert (await say(echoing.port, raw)).status == 401


async def test_a_quota_counts_each_request_of_an_open_connection(echoing):
    gateway = echoing.gateway
    document = copy.deepcopy(gateway.policy())
    document["tenants"]["spare"] = {"requests_per_minute": 4}
    document["keys"].append({"id": "spare", "hash": hash_of(SPARE), "role": "client", "tenant": "spare"})
    await put(gateway, document)
    async with dial(echoing.port) as client:
        await client.send(chat("known", key=SPARE) * 10)
        statuses = [(await client.response()).status for _ in range(10)]
    assert statuses.count(200) in (4, 5) and set(statuses) == {200, 429}, statuses
    await put(gateway, gateway.policy())


async def test_a_deadline_is_counted_from_each_request(echoing):
    """x-request-timeout in a head that is known: the second request has its whole second, though the first is long over."""
    raw = chat("known", "a", KEY, "x-request-timeout: 1")
    async with dial(echoing.port) as client:
        first = time.monotonic()
        while time.monotonic() < first + 1.2:
            await client.send(raw)
            assert text_of(await client.response()) == "known"


async def test_what_tenants_are_told_of_caches_stays_apart(echoing):
    """The salt of a prefix cache is the tenant's, whatever the connection carried before."""
    async with dial(echoing.port) as client:
        for key in (KEY, KEYS["other"], KEY, KEYS["other"]):
            await client.send(chat("known", "b", key))
            assert (await client.response()).status == 200
    salts = [call.json()["cache_salt"] for call in echoing.upstreams["b"].calls]
    assert salts[0] == salts[2] and salts[1] == salts[3] and salts[0] != salts[1]


async def test_a_known_head_whose_body_does_not_come_holds_nothing(echoing):
    raw = chat("known")
    async with dial(echoing.port) as client:
        await warm(client, raw)
        before = echoing.calls
        await client.send(raw[:-3])
    await within(5, lambda: _left(echoing, before), "it is counted as a departure")
    await echoing.gateway.settled()


async def _left(fort, before: int) -> bool:
    rows = fort.gateway.journal()
    return bool(rows) and rows[-1]["reason"] == "client_closed" and fort.calls == before
