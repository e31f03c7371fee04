"""The journal: one JSON line a request, and the last refusals for whoever asks at three in the morning.

Owns the line's fields, the buffer and the writing thread. Promises: `write` never waits for the sink; the buffer is bounded
and what does not fit is dropped and counted; a line never holds a prompt, an answer or a key; a sink that fails is
opened again later. Talks to a file descriptor, from its own thread alone.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from gateway.errors import Outcome, Reason
from gateway.observe.exchange import Exchange
from gateway.observe.sink import FileSink, Sink

MAX_LINES = 20_000
RECENT = 500
_FLUSH_S = 0.1
_TEXT_LIMIT = 300
_KEPT = 1024
_OK, _SERVED = Reason.OK, Outcome.SERVED
K = TypeVar("K")


class Journal:
    """`path` is a file, "-" for standard output, or None to keep only the recent refusals in memory."""

    def __init__(self, path: str | None, *, max_lines: int = MAX_LINES, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._max_lines = max_lines
        self._plain = PlainLines()
        self._lines: deque[bytes] = deque()
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self._wake = threading.Event()
        self._closing = False
        self._sink: Sink | None = None if path is None else FileSink(path)
        self._dropped = 0
        self._writer: threading.Thread | None = None
        if self._sink is not None:
            self._writer = threading.Thread(target=self._run, args=(self._sink,), name="journal", daemon=True)
            self._writer.start()

    @property
    def dropped(self) -> int:
        """Lines lost since the start, because the buffer was full or the sink failed."""
        return self._dropped + (self._sink.lost if self._sink is not None else 0)

    def write(self, exchange: Exchange) -> None:
        """Take one ended request. Never blocks; the line reaches the sink within about 100 ms."""
        wall = self._wall()
        line = self._plain.line(exchange, wall) or _encode(_row(exchange, wall))
        if exchange.outcome is not Outcome.SERVED:
            self._recent.append(line)
        if self._sink is None:
            return
        if len(self._lines) >= self._max_lines:
            self._dropped += 1
            return
        self._lines.append(line)

    def recent(self, limit: int = 50, *, reason: str | None = None, tenant: str | None = None) -> list[dict[str, Any]]:
        """The latest requests that were not served, newest first, filtered by reason or tenant."""
        rows: list[dict[str, Any]] = []
        for line in reversed(self._recent):
            row = orjson.loads(line)
            if reason in (None, row["reason"]) and tenant in (None, row["tenant"]):
                rows.append(row)
            if len(rows) >= limit:
                break
        return rows

    def reopen(self) -> None:
        """Open the file by its name again before the next line (after logrotate moved it)."""
        if self._sink is not None:
            self._sink.reopen()
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write out what is buffered; False when the sink did not take it in time (the process may end all the same)."""
        self._closing = True
        self._wake.set()
        if self._writer is None:
            return True
        self._writer.join(timeout_s)
        return not self._writer.is_alive()

    def _run(self, sink: Sink) -> None:
        while True:
            self._wake.wait(_FLUSH_S)
            self._wake.clear()
            closing = self._closing  # read before the buffer: a line written before close() is never left behind
            self._flush(sink)
            if closing:
                sink.close()
                return

    def _flush(self, sink: Sink) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), 500))]
            sink.write(batch)


_PLAIN = (
    b'{"time":"%b.%06dZ","request_id":"%b","client_request_id":%b,%b,"outcome":"served","reason":"ok","status":%d,'
    b'"message":null,"stream":%b,%b,"asked_input":%d,"asked_output":%d,"sequences":%d,"input_tokens":%d,"output_tokens":%d,'
    b'"usage_estimated":false,"queue_ms":%.3f,"ttft_ms":%.3f,"backend_ms":%.3f,"e2e_ms":%.3f,"attempts":%d,"events":%d,'
    b'"bytes":%d,%b,"composition":%b}\n'
)


class PlainLines:
    """The line of a request that was served as it should, by one format: the same document as `_row` at a third of its price.

    What names the caller and the place comes from the policy, so that it is encoded once for each combination.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str | None, ...], bytes] = {}
        self._peers: dict[str | None, bytes] = {}
        self._kinds: dict[tuple[str, frozenset[str]], bytes] = {}
        self._second = -1
        self._second_text = b""

    def line(self, x: Exchange, wall: float) -> bytes | None:
        """The line, or None where `_row` has to be asked."""
        shape, dispatched, first, last, ended = x.shape, x.dispatched_at, x.first_at, x.last_at, x.ended_at
        found, written, composition = x.input_tokens, x.output_tokens, x.composition
        if x.reason is not _OK or x.outcome is not _SERVED or x.usage_estimated or x.message is not None:
            return None
        if shape is None or dispatched is None or first is None or last is None or ended is None or composition is None:
            return None
        if found is None or written is None:
            return None
        total = ended - x.received_at
        began = wall - total
        second = int(began)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        names = (x.key_id, x.tenant, x.priority_class, x.route, x.model, x.backend, x.record)
        named = self._names.get(names)
        if named is None:
            keys = ("key", "tenant", "class", "route", "model", "backend", "record")
            named = _kept(self._names, names, _inner(dict(zip(keys, names, strict=True))))
        kind = (shape.task, shape.features)
        kinds = self._kinds.get(kind)
        if kinds is None:
            features = sorted(shape.features) if shape.features else None
            kinds = _kept(self._kinds, kind, _inner({"task": shape.task, "features": features}))
        peer = self._peers.get(x.peer)
        if peer is None:
            peer = _kept(self._peers, x.peer, _inner({"peer": x.peer}))
        client = x.client_request_id
        return _PLAIN % (
            self._second_text, int((began - second) * 1e6), x.request_id.encode(),
            b"null" if client is None else orjson.dumps(client), named, x.status, b"true" if x.stream else b"false", kinds,
            shape.input_tokens, shape.output_tokens, shape.sequences, found, written, x.queue_s * 1e3, (first - dispatched) * 1e3,
            (last - dispatched) * 1e3, total * 1e3, x.attempts, x.events, x.response_bytes, peer, orjson.dumps(composition),
        )  # fmt: skip


def _inner(fields: dict[str, Any]) -> bytes:
    """The members of an object, without its braces."""
    return orjson.dumps(fields)[1:-1]


def _kept(cache: dict[K, bytes], key: K, value: bytes) -> bytes:
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = value
    return value


def _row(x: Exchange, wall: float) -> dict[str, Any]:
    """A line's fields. Durations in milliseconds, null where the moment never came."""
    ended = x.received_at if x.ended_at is None else x.ended_at
    total = ended - x.received_at
    shape, dispatched = x.shape, x.dispatched_at
    task, features, asked_input, asked_output, sequences = (None,) * 5 if shape is None else shape
    return {
        "time": dt.datetime.fromtimestamp(wall - total, dt.UTC),
        "request_id": x.request_id,
        "client_request_id": x.client_request_id,
        "key": x.key_id,
        "tenant": x.tenant,
        "class": x.priority_class,
        "route": x.route,
        "model": x.model,
        "backend": x.backend,
        "record": x.record,
        "outcome": x.outcome,
        "reason": x.reason,
        "status": x.status,
        "message": x.message if x.message is None else x.message[:_TEXT_LIMIT],
        "stream": x.stream,
        "task": task,
        "features": sorted(features) if features else None,
        "asked_input": asked_input,
        "asked_output": asked_output,
        "sequences": sequences,
        "input_tokens": x.input_tokens,
        "output_tokens": x.output_tokens,
        "usage_estimated": x.usage_estimated,
        "queue_ms": int(x.queue_s * 1e6) / 1e3,
        "ttft_ms": None if dispatched is None or x.first_at is None else int((x.first_at - dispatched) * 1e6) / 1e3,
        "backend_ms": None if dispatched is None else int(((x.last_at or ended) - dispatched) * 1e6) / 1e3,
        "e2e_ms": int(total * 1e6) / 1e3,
        "attempts": x.attempts,
        "events": x.events,
        "bytes": x.response_bytes,
        "peer": x.peer,
        "composition": x.composition,
    }


def _encode(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)
    except orjson.JSONEncodeError:  # a lone surrogate: text that came from outside and is no Unicode
        clean = {key: _readable(value) if isinstance(value, str) else value for key, value in row.items()}
        return orjson.dumps(clean, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)


def _readable(value: str) -> str:
    return str(value).encode("utf-8", "replace").decode()
