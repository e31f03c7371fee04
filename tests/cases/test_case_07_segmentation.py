"""Case 07: events and characters cut across TCP segments: the same bytes, the same counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.cases.common import request_id, saying
from tests.support.client import ask, within
from tests.support.upstream import DONE, LAST_CHUNK, SSE_HEAD, Call, chunk, delta, usage

TEXT = b"".join((delta("日"), delta("本🚢"), delta("é", "stop"), usage(11, 5), DONE))
WIRE = SSE_HEAD + b"".join(chunk(part + b"\n\n") for part in TEXT.split(b"\n\n")[:-1]) + LAST_CHUNK


def cuts(data: bytes, *places: int) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges) if begin < end]


def inside_characters(data: bytes) -> list[int]:
    return [at for at, byte in enumerate(data) if byte & 0xC0 == 0x80]


FRAMINGS = {
    "one byte a segment": [WIRE[i : i + 1] for i in range(len(WIRE))],
    "inside each character": cuts(WIRE, *inside_characters(WIRE)),
    "inside usage": cuts(WIRE, WIRE.index(b'"usage"') + 4),
    "inside the numbers of usage": cuts(WIRE, WIRE.index(b'"prompt_tokens": 11') + 18),
    "inside DONE": cuts(WIRE, WIRE.index(b"[DONE]") + 3),
    "inside finish_reason": cuts(WIRE, WIRE.index(b'"stop"') + 2, WIRE.index(b'finish_reason": "stop"') + 6),
    "between the two line feeds": cuts(WIRE, *[at + 1 for at in range(len(WIRE)) if WIRE[at : at + 2] == b"\n\n"]),
    "inside a chunk's size": cuts(WIRE, len(SSE_HEAD) + 1),
    "all in one": [WIRE],
    "one chunk": [SSE_HEAD + chunk(TEXT) + LAST_CHUNK],
    "a byte a chunk": [SSE_HEAD + b"".join(chunk(TEXT[i : i + 1]) for i in range(len(TEXT))) + LAST_CHUNK],
}


@pytest.mark.parametrize("name", FRAMINGS)
async def test_the_same_bytes_and_the_same_counts(harbour, name):
    async def script(call: Call) -> None:
        if len(FRAMINGS[name]) > 100:
            for segment in FRAMINGS[name]:
                call.peer.transport.write(segment)
                await call.peer.drained()
        else:
            await saying(*FRAMINGS[name])(call)

    harbour["eight"].script = script
    got = await ask(harbour.port, model="eight", stream=True)
    assert (got.status, got.whole, got.body) == (200, True, TEXT)
    row = await harbour.gateway.account(request_id(got))
    assert (row["input_tokens"], row["output_tokens"], row["usage_estimated"]) == (11, 5, False)
    assert (row["outcome"], row["events"]) == ("served", 5)


async def test_the_counters_add_up_over_every_framing(harbour):
    async def counted(kind: str) -> float:
        return await harbour.gateway.value("plimsoll_tokens_total", tenant="acme", kind=kind)

    read, written = await counted("input"), await counted("output")
    for name in ("inside usage", "inside each character", "one chunk"):
        harbour["eight"].script = saying(*FRAMINGS[name], then="none")
        assert (await ask(harbour.port, model="eight", stream=True)).body == TEXT

    async def all_counted() -> bool:
        return (await counted("input") - read, await counted("output") - written) == (33, 15)

    await within(3, all_counted, "33 tokens read and 15 written")
