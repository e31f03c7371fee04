"""Writes at the end of the round: in order, before the loop waits again, and never for what was dropped meanwhile."""

from __future__ import annotations

import asyncio

from gateway.forward.outbox import Outbox
from gateway.forward.upstream import FailureKind
from tests.forward.scripted import Peer, response, serving
from tests.forward.test_upstream import Recorder, ask, post, upstream_to


class Notes:
    """Writers by name, and the order in which they were flushed."""

    def __init__(self) -> None:
        self.flushed: list[str] = []

    def named(self, name: str, then=lambda: None):
        class Writer:
            def flush(writer) -> None:
                self.flushed.append(name)
                then()

        return Writer()


async def test_all_of_a_round_is_flushed_in_order_before_the_loop_waits_again():
    outbox, notes, loop = Outbox(), Notes(), asyncio.get_running_loop()
    for name in "abc":
        outbox.post(notes.named(name))
    assert notes.flushed == []
    next_round = loop.create_future()
    loop.call_soon(next_round.set_result, None)
    await next_round
    assert notes.flushed == ["a", "b", "c"]


async def test_what_a_flush_posts_is_flushed_in_the_next_round():
    outbox, notes = Outbox(), Notes()
    outbox.post(notes.named("a", then=lambda: outbox.post(notes.named("c"))))
    outbox.post(notes.named("b"))
    while len(notes.flushed) < 3:
        await asyncio.sleep(0)
    assert notes.flushed == ["a", "b", "c"]


async def test_a_request_that_is_dropped_in_its_own_round_is_never_sent():
    heard = []

    async def script(peer: Peer) -> None:
        heard.append(await peer.reader.read())

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        connection, sink = await upstream.connect(), Recorder()
        connection.send(post(upstream), sink)
        connection.abort()
        while not heard:
            await asyncio.sleep(0.001)
        assert heard == [b""]
        assert not sink.over.is_set()


async def test_a_request_whose_connection_breaks_before_the_end_of_the_round_is_known_to_be_unsent():
    async def script(peer: Peer) -> None:
        await peer.gone()

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        connection, sink = await upstream.connect(), Recorder()
        connection.send(post(upstream), sink)
        connection.eof_received()  # as the loop calls it, in the same round of reads
        assert [(failure.kind, failure.before_written) for failure in sink.failures] == [(FailureKind.RESET, True)]
        sink, connection = Recorder(), await upstream.connect()
        connection.send(post(upstream), sink)
        await asyncio.sleep(0)
        connection.eof_received()
        assert [(failure.kind, failure.before_written) for failure in sink.failures] == [(FailureKind.RESET, False)]


async def test_who_speaks_before_it_was_asked_has_answered_nothing():
    """A backend's 408 for an idle connection meets the next request, which has not left yet: it may be tried elsewhere."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(response(b"ok"))
        await peer.gone()

    async with serving(script) as server:
        upstream = upstream_to(server.port)
        connection, sink = await upstream.connect(), Recorder()
        connection.send(post(upstream), sink)
        connection.data_received(response(b"early", status=b"408 Request Timeout"))
        assert [(failure.kind, failure.before_written) for failure in sink.failures] == [(FailureKind.RESET, True)]
        assert (sink.heads, upstream.idle) == ([], 0)
        assert bytes((await ask(upstream)).body) == b"ok"


async def test_what_goes_wrong_with_one_loses_no_other_write():
    outbox, notes, told = Outbox(), Notes(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(type(context["exception"])))

    def breaks():
        raise ZeroDivisionError

    for name, then in (("a", lambda: None), ("b", breaks), ("c", lambda: None), ("d", breaks), ("e", lambda: None)):
        outbox.post(notes.named(name, then=then))
    while len(notes.flushed) < 5:
        await asyncio.sleep(0)
    assert notes.flushed == list("abcde")
    assert told == [ZeroDivisionError] * 2
