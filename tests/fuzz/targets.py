"""What is fuzzed: each target takes any bytes, and raises AssertionError (or whatever it met) when a promise is broken."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable

from gateway.edge import body, fields, routes, tokenize
from gateway.edge.incoming import Incoming, Known
from gateway.edge.job import retries_of
from gateway.edge.keys import KeyRing, credentials
from gateway.edge.oidc import header_of
from gateway.edge.responses import Cors, acceptable_id
from gateway.errors import Reason, Refusal, Refused
from gateway.flow.deadlines import caller_deadline, patience
from gateway.forward.connection import Connection, Headers, UpstreamFailure
from gateway.forward.outbox import Outbox
from gateway.forward.sse import MAX_PENDING, Dialect, Scanner
from gateway.policy import MediaRules
from tests.edge.building import counter, rules

from .mutations import SEEDS
from .stage import STATUS, Stage, Transport

READ = sorted(path for path, route in routes.ROUTES.items() if route.kind == "proxy")
COUNTING = sorted(path for path, route in routes.ROUTES.items() if route.parser in ("tokenize", "detokenize", "count_tokens"))
DIALECTS: tuple[Dialect, ...] = ("openai", "anthropic", "responses")
TYPES = (b"application/json", b"multipart/form-data; boundary=x", b"application/json; charset=utf-8", None)
CODINGS = (None, None, b"gzip", b"deflate", b"br", b"zstd", b"identity", b"gzip, br")
LOOKUP = {"tiny": rules(media=MediaRules(image_tokens=5, audio_tokens_per_s=5)), "": rules()}
NAMES = sorted({name for table in fields.TABLE.values() for name in table})
OPEN = {"tiny": rules(allow_fields=tuple(NAMES), media=LOOKUP["tiny"].media)}
LIMIT = 1_000_000


def cut(data: bytes) -> list[bytes]:
    """Segments whose sizes follow from the data, so that a finding can be repeated."""
    pieces, at, step = [], 0, 1 + sum(data[:7]) % 61
    while at < len(data):
        pieces.append(data[at : at + step])
        at, step = at + step, 1 + (step * 31 + 7) % 97
    return pieces


@functools.cache
def stage() -> Stage:
    return Stage()


def requests(data: bytes) -> None:
    """Bytes of a client: typed answers only, nothing stuck, and the same served however they were cut.

    A refusal may have another reason: what is wrong with a head is seen before what is wrong with a body not yet there.
    """
    served = []
    for segments in ([data], cut(data)):
        statuses = [int(status) for status in STATUS.findall(stage().play(segments)) if status != b"100"]
        served.append((statuses.count(200), any(status >= 400 for status in statuses)))
    assert served[0] == served[1], (served, data)


def repeats(data: bytes) -> None:
    """A request among others that are all but the same, on one connection: each is read as it would be in one stream."""
    served = []
    good = SEEDS["repeats"][0]
    for segments, one_by_one in (([good, good, data, data, good], True), (cut(good + good + data + data + good), False)):
        statuses = [int(found) for found in STATUS.findall(stage().play(segments, one_by_one=one_by_one)) if found != b"100"]
        served.append((statuses.count(200), any(status >= 400 for status in statuses)))
    assert served[0] == served[1], (served, data)


def bodies(data: bytes) -> None:
    """A body on any route: refused with a reason, or understood, measured and forwardable."""
    if len(data) < 3:
        return
    route = routes.ROUTES[READ[data[0] % len(READ)]]
    raw = body.decode(CODINGS[data[2] % len(CODINGS)], data[3:], LIMIT)
    if isinstance(raw, Refusal):
        assert raw.message
        return
    assert len(raw) <= LIMIT
    found = body.parse(route, TYPES[data[1] % len(TYPES)], raw, LOOKUP.get)
    if isinstance(found, Refusal) and found.reason is Reason.FIELD_NOT_ALLOWED:  # a policy may open each
        found = body.parse(route, TYPES[data[1] % len(TYPES)], raw, OPEN.get)
    if isinstance(found, Refusal):
        assert found.message
        return
    assert found.sequences >= 1 and (found.output_tokens is None or 0 <= found.output_tokens < 2**63)
    low, high = tokens().bound(found)
    sent = found.forward(cache_salt="s", output_limit=3, user_key=b"k")
    if route.parser not in ("transcription", "translation"):
        once = json.loads(sent, object_pairs_hook=_no_twins)
        assert once["model"] == "tiny" and once["cache_salt"] == "s" and "kv_transfer_params" not in once
    try:
        count = found.content.tokens or tokens().count_now(found)
    except Refused as refused:
        assert refused.refusal.message
        return
    assert high is None or count <= high
    assert low <= max(count, 1)


def counting(data: bytes) -> None:
    """A body about tokens: refused with a reason, or answered in the shape of its route, with what the tokenizer says."""
    if len(data) < 2:
        return
    route = routes.ROUTES[COUNTING[data[0] % len(COUNTING)]]
    raw = body.decode(CODINGS[data[1] % len(CODINGS)], data[2:], LIMIT)
    if isinstance(raw, Refusal):
        assert raw.message
        return
    question = tokenize.read(route, TYPES[0], raw, LOOKUP.get)
    found = question if isinstance(question, Refusal) else tokenize.answer(question, tokens(), 4096)
    if isinstance(found, Refusal):
        assert found.message
        return
    assert json.loads(json.dumps(found)) == found
    if route.parser == "tokenize":
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 4096
        assert found["token_strs"] is None or len(found["token_strs"]) == found["count"]
    elif route.parser == "detokenize":
        assert isinstance(found["prompt"], str)
    else:
        assert found["input_tokens"] >= 0


@functools.cache
def tokens():
    return counter()


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def headers(data: bytes) -> None:
    """Headers as a client may write them: read without an exception, and never as a key that is not there."""
    lines = [line.partition(b":") for line in data.split(b"\n")]
    found = [(name.lower(), value) for name, _, value in lines]
    credentials(found)
    assert ring().identify(found) is None
    incoming = Incoming(0.0)
    incoming.headers, incoming.fields = found, dict(found)
    assert Known().principal(ring(), incoming) is None
    incoming.repeats(), incoming.websocket, incoming.head_size()
    for value in (data, *incoming.fields.values()):
        given = patience([value, None])
        assert given is None or 0 < given < math.inf
        due = caller_deadline(1.0, given)
        assert due is None or due < math.inf
        name = acceptable_id(value)
        assert name is None or (name.isascii() and name.isprintable())
        header_of(value)
        assert 0 <= retries_of({b"x-stainless-retry-count": value}) < 1000
        for cors in CORS:
            assert all(b"\r\n" not in line for line in cors.lines(value).split(b"\r\n"))


CORS = (Cors(()), Cors(("https://a.test",)))


@functools.cache
def ring() -> KeyRing:
    return KeyRing([], tokens=lambda digest, token: None)


def events(data: bytes) -> None:
    """An event stream: the same findings however it was cut, and bounded memory."""
    if not data:
        return
    dialect, stream = DIALECTS[data[0] % 3], data[1:]
    results = []
    for pieces in ([stream], cut(stream), [stream[i : i + 1] for i in range(len(stream))] if len(stream) < 300 else [stream]):
        scanner = Scanner(dialect)
        for piece in pieces:
            scanner.feed(piece)
            assert len(scanner._pending) <= MAX_PENDING
        scanner.close()
        assert scanner.content_events <= scanner.events + 1
        for known in (scanner.input_tokens, scanner.output_tokens):
            assert known is None or known >= 0
        results.append((scanner.events, scanner.error, scanner.done, scanner.whole, scanner.input_tokens, scanner.output_tokens))
    assert len(set(results)) == 1, (results, data)


class Owner:
    """The pool of one connection."""

    outbox = Outbox(lambda flush: flush())  # where there is no loop, a round has one event

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def release(self, connection: Connection) -> None: ...
    def check_config(self, connection: Connection) -> None: ...


class Record:
    """A sink that holds its caller to the protocol: a head, data, and exactly one end."""

    def __init__(self) -> None:
        self.status, self.body, self.ended = 0, b"", ""

    def head(self, status: int, headers: Headers) -> None:
        assert not self.status and not self.ended and 200 <= status <= 999
        assert len(headers) <= 200
        assert all(b"\r" not in v and b"\n" not in v and b"\0" not in v for _, v in headers), headers
        self.status = status

    def data(self, data: bytes) -> None:
        assert self.status and not self.ended
        self.body += data

    def end(self) -> None:
        assert self.status and not self.ended
        self.ended = "end"

    def lost(self, failure: UpstreamFailure) -> None:
        assert not self.ended
        self.ended = "lost"


class Loopless:
    """A loop for transports that close at once."""

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)


def answers(data: bytes) -> None:
    """Bytes of a backend: one answer or one failure, the same however cut and after another answer; a body only as framed."""
    results = []
    for before, pieces in ((b"", [data]), (b"", cut(data)), (SEEDS["answers"][0], [data])):
        connection = Connection(Owner())
        transport = Transport(Loopless(), ("127.0.0.1", 1))  # type: ignore[arg-type]
        transport.protocol = connection
        connection.connection_made(transport)
        if before:
            connection.send(b"GET / HTTP/1.1\r\n\r\n", Record())
            connection.data_received(before)
        sink = Record()
        connection.send(b"GET / HTTP/1.1\r\n\r\n", sink)
        for piece in pieces:
            if transport.closed:
                break
            connection.data_received(piece)
        if not transport.closed:
            connection.eof_received()
        assert sink.ended, "neither an end nor a failure"
        results.append((sink.status, sink.ended, sink.body if sink.ended == "end" else b""))
    assert results[0][1:] == results[1][1:] and results[0] == results[2], (results, data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "requests": requests, "repeats": repeats, "bodies": bodies, "counting": counting, "headers": headers,
    "events": events, "answers": answers,
}  # fmt: skip
