"""Case 23: every legal form of server-sent events passes unchanged, and its usage is read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.cases.common import request_id, saying
from tests.support.client import ask
from tests.support.upstream import DONE, LAST_CHUNK, SSE_HEAD, Call, chunk, delta, event, usage

LF = delta("é🚢") + delta("b", "stop") + usage(11, 5) + DONE
CR, CRLF = LF.replace(b"\n", b"\r"), LF.replace(b"\n", b"\r\n")
FIRST, *MIDDLE, LAST = [part + b"\n\n" for part in LF.split(b"\n\n")[:-1]]
TWO_LINES = usage(11, 5).replace(b', "choices"', b',\ndata: "choices"')
FORMS = {
    "LF": LF,
    "CRLF": CRLF,
    "CR": CR,
    "LF inside, CRLF between": LF.replace(b"\n\n", b"\n\r\n"),
    "CRLF inside, LF between": LF.replace(b"\n\n", b"\r\n\n"),
    "no space after the colon": LF.replace(b"data: ", b"data:"),
    "comments between": b": ping\n\n".join([FIRST, *MIDDLE, LAST]),
    "comments inside events": LF.replace(b"data: ", b": ping\ndata: "),
    "a comment first": b": hello\n\n" + LF,
    "event, id and retry lines": LF.replace(b"data: ", b"event: chunk\nid: 7\nretry: 1000\ndata: "),
    "a data line between other lines": LF.replace(b"\n\n", b"\nid: 7\n\n"),
    "usage over two data lines": delta("a", "stop") + TWO_LINES + DONE,
    "no newline after the last DONE": LF.removesuffix(b"\n\n"),
    "one newline after the last DONE": LF.removesuffix(b"\n"),
    "a BOM first": b"\xef\xbb\xbf" + LF,
    "a BOM and CRLF": b"\xef\xbb\xbf" + CRLF,
    "empty events": b"\n\n\n" + LF.replace(b"\n\n", b"\n\n\n\n"),
    "a field without a colon": LF.replace(b"data: ", b"data\ndata: ", 1),
    "unknown fields": LF.replace(b"data: ", b"note: x\ndata: "),
    "no DONE": LF.removesuffix(DONE),
    "a comment after DONE": LF + b": bye\n\n",
}


@pytest.mark.parametrize("cut", ["whole", "each byte", "around every line's end"])
@pytest.mark.parametrize("name", FORMS)
async def test_unchanged_and_read(harbour, name, cut):
    stream = FORMS[name]
    if cut == "whole":
        segments = [chunk(stream)]
    elif cut == "each byte":
        segments = [b"".join(chunk(stream[at : at + 1]) for at in range(len(stream)))]
    else:  # a CR ends one read, its LF begins the next
        edges = [0, *[at + 1 for at, byte in enumerate(stream) if byte in b"\r\n"], len(stream)]
        segments = [chunk(stream[begin:end]) for begin, end in pairwise(edges) if begin < end]
    harbour["eight"].script = saying(SSE_HEAD, *segments, LAST_CHUNK, then="none")
    got = await ask(harbour.port, model="eight", stream=True)
    assert (got.status, got.whole, got.body) == (200, True, stream)
    row = await harbour.gateway.account(request_id(got))
    assert (row["input_tokens"], row["output_tokens"], row["usage_estimated"]) == (11, 5, False)
    assert (row["outcome"], row["reason"]) == ("served", "ok")


async def test_heartbeats_of_the_backend_are_kept_and_none_are_added(harbour):
    async def script(call: Call) -> None:
        await call.say(SSE_HEAD, chunk(delta("a")), chunk(b": ping\n\n"), chunk(delta("b", "stop") + DONE), LAST_CHUNK)

    harbour["eight"].script = script
    got = await ask(harbour.port, model="eight", stream=True)
    assert got.body == delta("a") + b": ping\n\n" + delta("b", "stop") + DONE


async def test_an_error_is_said_in_a_frame_of_its_own_whatever_the_line_ends(harbour):
    for ends in (b"\n", b"\r\n", b"\r"):
        stream = (delta("a") + delta("b")).replace(b"\n", ends)
        harbour["eight"].script = saying(SSE_HEAD, chunk(stream), LAST_CHUNK, then="none")
        got = await ask(harbour.port, model="eight", stream=True)
        assert got.body.startswith(stream + b'data: {"error"') and not got.whole
    harbour["eight"].script = saying(SSE_HEAD, chunk(delta("a") + event({"choices": []})[:-9]), LAST_CHUNK, then="none")
    got = await ask(harbour.port, model="eight", stream=True)
    assert b'\n\ndata: {"error"' in got.body
