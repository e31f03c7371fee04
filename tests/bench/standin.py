"""A server that costs almost nothing, to measure what stands in front of it. `python -m tests.bench.standin PORT [INTERVAL_MS]`

It answers a POST with one completion, or with `max_tokens` events (INTERVAL_MS apart) when the body asks for a stream, and
shows what a declared backend is checked against.
"""

from __future__ import annotations

import asyncio
import sys

import httptools
import orjson
import uvloop

DELTA = {"index": 0, "delta": {"content": "knot"}, "logprobs": None, "finish_reason": None}
CHUNK = {"id": "bench", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [DELTA]}
STOP = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
ANSWER = {
    "id": "bench",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "knot " * 50}, "finish_reason": "length"}],
    "usage": USAGE,
}


def whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def event(document: object) -> bytes:
    data = b"data: %b\n\n" % (document if isinstance(document, bytes) else orjson.dumps(document))
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN, END = event(CHUNK), event(STOP) + event({**STOP, "choices": [], "usage": USAGE}) + event(b"[DONE]") + b"0\r\n\r\n"
COMPLETION = whole(orjson.dumps(ANSWER))
MODELS = {"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": 4096}]}
KNOWN = {
    b"/version": whole(b'{"version":"0.32.0"}'),
    b"/v1/models": whole(orjson.dumps(MODELS)),
    b"/metrics": whole(b'vllm:iteration_tokens_total_count{engine="0"} 1.0\n', b"text/plain"),
    b"/health": whole(b"", b"text/plain"),
}


class StandIn(asyncio.Protocol):
    interval_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.target, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        asked = orjson.loads(self.body) if self.body else {}
        if not asked.get("stream"):
            self.transport.write(KNOWN.get(self.target, COMPLETION))
            return
        self.transport.write(HEAD)
        self.left = asked.get("max_tokens") or 16
        self.tick()

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        if not self.left:
            self.transport.write(END)
            return
        self.left -= 1
        self.transport.write(TOKEN)
        if self.interval_s:
            self.loop.call_later(self.interval_s, self.tick)
        else:
            self.loop.call_soon(self.tick)


async def main(port: int, interval_ms: float) -> None:
    StandIn.interval_s = interval_ms / 1000
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
