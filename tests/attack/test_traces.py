"""Traces, as a collector receives them: what happened, and nothing of what was said or of whoever's key."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest_asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.client import KEY, post
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.raw import dial, request, say
from tests.support.upstream import DONE, SSE_HEAD, Call, ScriptedUpstream, chunk, delta, response, usage

from .conftest import UPSTREAM_KEY

CANARY = "canary-93b7"
ATTRIBUTES = {
    "plimsoll.request_id", "plimsoll.tenant", "plimsoll.class", "plimsoll.backend", "plimsoll.record", "plimsoll.outcome",
    "plimsoll.reason", "plimsoll.attempts", "plimsoll.reserved_tokens", "http.response.status_code", "gen_ai.request.model",
    "gen_ai.request.max_tokens", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
}  # fmt: skip
PARENT = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    """An OTLP/HTTP collector: the heads and bodies it was sent, and the spans in them."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
                body = await reader.readexactly(int(fields[b"content-length"]))
                self.heads.append(head)
                self.bodies.append(gzip.decompress(body) if fields.get(b"content-encoding") == b"gzip" else body)
                writer.write(response(b"", b"content-type: application/x-protobuf"))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def exports(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list:
        return [
            span for each in self.exports() for resource in each.resource_spans for scope in resource.scope_spans
            for span in scope.spans
        ]  # fmt: skip


@pytest_asyncio.fixture(loop_scope="session")
async def traced(tmp_path):
    """A gateway that traces every request, its backend and its collector."""
    collector, upstream = Collector(), ScriptedUpstream()
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    collector.port = server.sockets[0].getsockname()[1]
    await upstream.start()
    gateway = GatewayProcess(
        tmp_path, {"a": Backend(upstream, 8, extra={"api_key_env": "UPSTREAM_KEY"})}, env={"UPSTREAM_KEY": UPSTREAM_KEY},
        tracing={"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces", "sample_ratio": 1.0},
        timeouts={"queue_s": 1, "first_token_s": 1, "stall_s": 1, "execution_s": 3},
        breaker={"min_requests": 1_000_000, "consecutive_failures": 1_000_000},
    )  # fmt: skip
    async with gateway:
        yield gateway, upstream, collector
    server.close()
    await upstream.stop()


async def test_no_canary_is_in_a_trace(traced):
    gateway, upstream, collector = traced
    said = [{"role": "user", "content": f"prompt {CANARY}"}]
    lines = [
        f"cookie: a={CANARY}", f"x-request-id: {CANARY}", f"user-agent: {CANARY}", f"baggage: a={CANARY}",
        f"tracestate: a={CANARY}",
        f"traceparent: 00-{PARENT}-b7ad6b7169203331-01",
    ]  # fmt: skip

    async def answers(call: Call) -> None:
        if b'"stream":true' in call.body:
            pieces = (delta(f"answer {CANARY}"), delta("", "stop"), usage(), DONE)
            await call.say(SSE_HEAD + b"".join(chunk(each) for each in pieces) + b"0\r\n\r\n")
        else:
            await call.answer(json.dumps({"choices": [{"message": {"content": f"answer {CANARY}"}}]}).encode())

    async def refuses(call: Call) -> None:
        body = json.dumps({"error": {"message": f"no {CANARY} {UPSTREAM_KEY}"}}).encode()
        await call.answer(body, f"x-{CANARY}: {CANARY}".encode(), status=b"400 Bad Request")

    async def breaks(call: Call) -> None:
        await call.say(SSE_HEAD + chunk(delta(f"answer {CANARY}")))
        call.reset()

    upstream.script = answers
    good = {"model": "a", "messages": said, "max_tokens": 8, "user": CANARY, "stop": [CANARY], "metadata": {"a": CANARY}}
    assert (await say(gateway.port, post(good, *lines))).status == 200
    assert (await say(gateway.port, post({**good, "stream": True}, *lines))).status == 200
    upstream.script = refuses
    assert (await say(gateway.port, post(good, *lines))).status == 400
    upstream.script = breaks
    assert not (await say(gateway.port, post({**good, "stream": True}, *lines))).whole
    refused = [
        post({**good, CANARY: 1}, *lines), post({**good, "model": CANARY}, *lines), post(good, *lines, key=f"sk-{CANARY}"),
        post(CANARY.encode(), *lines), post({**good, "max_tokens": 2**30}, *lines), post(good, f"x-api-key: {CANARY}", *lines),
        request("POST", f"/v1/{CANARY}?key={CANARY}", *lines, key=KEY), request("GET", f"/v1/models/{CANARY}", *lines, key=KEY),
        post({"model": "a", "prompt": CANARY}, *lines, path="/tokenize"),
        request("GET", f"/v1/models?{CANARY}", f"traceparent: 00-{CANARY}", key=KEY),
    ]  # fmt: skip
    for raw in refused:
        assert (await say(gateway.port, raw)).status in (200, 400, 401, 404), raw
    async with dial(gateway.port) as client:  # a caller that leaves before its body is whole
        await client.send(post(good, *lines)[:-5])
    assert (await say(gateway.admin_port, request("GET", f"/admin/{CANARY}", *lines, key=KEYS["operator"]))).status == 404
    assert await gateway.stop() == 0  # which exports what is left

    spans = collector.spans()
    names = [span.name for span in spans]
    assert names.count("chat") >= 9 and "backend" in names and "unknown" in names, names
    assert {span.trace_id.hex() for span in spans} >= {PARENT}, "the caller's trace is gone on with"
    for span in spans:
        assert {each.key for each in span.attributes} <= ATTRIBUTES, span
        assert not span.trace_state and not span.events and not span.links, span
    outcomes = {each.value.string_value for span in spans for each in span.attributes if each.key == "plimsoll.outcome"}
    assert outcomes >= {"served", "refused", "failed"}, outcomes
    sent = b"\n".join((*collector.heads, *collector.bodies))
    for secret in (CANARY, KEY, UPSTREAM_KEY, *KEYS.values()):
        assert secret.encode() not in sent, secret
    assert CANARY not in gateway.log()
