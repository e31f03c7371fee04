"""Callers of every sort. Each sends one request (or less, or rubbish) and says how many the gateway has to account for.

Owns `Ledger`, the count from the callers' side, and the habits. Promises: an answer that looks finished is checked to be
so. A habit that leaves does so at a moment of its own choice.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.edge_path.wire import Response, Wire, post
from tests.support.raw import stranger

ANSWER_S = 30.0
RUBBISH = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 64, b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"\r\n\r\n:::\r\n\r\n",
)  # fmt: skip


class Ledger:
    """What the callers know: requests whose head was sent whole, by habit, and how they were answered."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.cut = 0  # streams that began and were cut, each after an error event
        self.whole = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class Caller:
    """One worker's connection and luck."""

    def __init__(self, port: int, ledger: Ledger, luck: random.Random) -> None:
        self.port, self.ledger, self.luck = port, ledger, luck
        self.wire: Wire | None = None

    async def go(self) -> None:
        """One request, of some habit."""
        habits = list(HABITS)
        habit = self.luck.choices(habits, [HABITS[each] for each in habits])[0]
        await habit(self)

    async def connection(self) -> Wire:
        """The connection that is kept alive, or a new one."""
        if self.wire is None:
            self.wire = await dial(self.port)
        return self.wire

    def hang_up(self, *, reset: bool = False) -> None:
        """Close it."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.reset() if reset else wire.writer.close()

    async def send(self, habit: str, *segments: bytes) -> Wire:
        """Send a request whose head is whole; it counts from here."""
        wire = await self.connection()
        self.ledger.sent[habit] += 1
        await wire.send(*segments)
        return wire

    async def answer(self) -> Response:
        """Read an answer to its end. A connection that the gateway closes is not used again."""
        assert self.wire is not None
        got = await self.wire.response(ANSWER_S)
        self.ledger.statuses[got.status] += 1
        if not got.whole or got.fields.get("connection") == "close":
            self.hang_up()
        return got

    def request(self, **fields: object) -> bytes:
        """A chat of some size, some with more words in it."""
        words = "ship " * self.luck.choice((1, 1, 1, 40, 400))
        fields = {"messages": [{"role": "user", "content": words}], "max_tokens": self.luck.randint(1, 24), **fields}
        return post({"model": "tiny", **fields})


async def dial(port: int, receive: int | None = None, source: str | None = None) -> Wire:
    """A connection; with `receive`, one that takes no more than about so many bytes before it is read."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    if source is not None:
        sock.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return Wire(*await asyncio.open_connection(sock=sock, limit=2**24 if receive is None else receive))


async def glance(wire: Wire, size: int) -> None:
    """Read a little, unless there is nothing to read: a short answer may have been read already, or be cut by now."""
    try:
        await asyncio.wait_for(wire.reader.read(size), 1)
    except (TimeoutError, ConnectionError):
        pass


# Habits


async def asks(caller: Caller) -> None:
    """Waits for the whole answer."""
    await caller.send("asks", caller.request())
    got = await caller.answer()
    assert got.whole, "an answer of known length was cut"
    if got.status == 200:
        assert got.json()["choices"][0]["finish_reason"], got.body
    else:
        assert got.json()["error"]["code"], got.body


async def listens(caller: Caller) -> None:
    """Reads a stream to its end."""
    await caller.send("listens", caller.request(stream=True))
    got = await caller.answer()
    if got.status != 200:
        assert got.json()["error"]["code"], got.body
        return
    events = got.events()
    error = any(b'"error"' in event for event in events)
    if got.whole and not error:
        assert events[-1] == b"[DONE]" and b'"finish_reason":"' in got.body, events[-3:]
        caller.ledger.whole += 1
    else:  # the backend's own error event may be followed by [DONE]; our own never is
        assert error, events[-3:]
        caller.ledger.cut += 1


async def leaves(caller: Caller) -> None:
    """Goes at some moment after asking."""
    wire = await caller.send("leaves", caller.request(stream=caller.luck.random() < 0.6))
    if caller.luck.random() < 0.5:
        await asyncio.sleep(caller.luck.expovariate(1 / 0.03))
    elif caller.luck.random() < 0.7:
        await glance(wire, caller.luck.randint(1, 2000))
    caller.hang_up(reset=caller.luck.random() < 0.5)


async def dawdles(caller: Caller) -> None:
    """Asks for much, reads nothing for a while, then a little, and is cut or goes."""
    wire = await dial(caller.port, receive=2048)
    caller.ledger.sent["dawdles"] += 1
    await wire.send(caller.request(stream=True, max_tokens=256))
    await asyncio.sleep(caller.luck.uniform(0.1, 0.8))
    for _ in range(caller.luck.randint(0, 4)):
        await glance(wire, 1024)
    wire.reset() if caller.luck.random() < 0.5 else wire.writer.close()


async def stammers(caller: Caller) -> None:
    """Sends in pieces; waits for the answer."""
    data, cuts = caller.request(), sorted(caller.luck.sample(range(1, 150), 3))
    await caller.send("stammers", *(data[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)))
    await caller.answer()


async def breaks_off(caller: Caller) -> None:
    """Goes in the middle of the body: a request, though nobody could know what it asks."""
    data = caller.request()
    body = data.index(b"\r\n\r\n") + 4
    await caller.send("breaks_off", data[: caller.luck.randint(body, len(data) - 1)])
    if caller.luck.random() < 0.5:
        await asyncio.sleep(0.01)
    caller.hang_up(reset=caller.luck.random() < 0.5)


async def mumbles(caller: Caller) -> None:
    """Goes in the middle of the head: not a request at all."""
    wire = await caller.connection()
    data = caller.request()
    await wire.send(data[: caller.luck.randint(1, data.index(b"\r\n\r\n") - 1)])
    caller.hang_up(reset=caller.luck.random() < 0.5)


async def babbles(caller: Caller) -> None:
    """Sends what is not HTTP, on a connection of its own, and is told so once."""
    caller.hang_up()
    await caller.send("babbles", caller.luck.choice(RUBBISH))
    got = await caller.answer()
    assert 400 <= got.status < 500, got
    caller.hang_up()


async def errs(caller: Caller) -> None:
    """Asks for what is not given."""
    mistakes = (
        post(b"{"), caller.request(model="nothing"), caller.request(max_tokens=100_000), post(path="/v1/nothing"),
        caller.request(seed={"no": 1}, stop=7), caller.request(n=1000), post({"model": "tiny"}), post(b"\xff\xfe"),
    )  # fmt: skip
    await caller.send("errs", caller.luck.choice(mistakes))
    got = await caller.answer()
    assert 400 <= got.status < 600, got


async def forgets_its_key(caller: Caller) -> None:
    """Has no key; comes from an address of its own, whose allowance of failures it does not use up."""
    wire = await dial(caller.port, source=stranger())
    caller.ledger.sent["forgets_its_key"] += 1
    await wire.send(post(key=None))
    got = await wire.response(ANSWER_S)
    assert got.status == 401, got
    wire.writer.close()


async def hurries(caller: Caller) -> None:
    """Gives little time."""
    patience = f"x-request-timeout: {caller.luck.uniform(0.05, 0.4):.3f}"
    document = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    await caller.send("hurries", post(document, patience))
    got = await caller.answer()
    assert got.whole and (got.status == 200 or got.json()["error"]["code"]), got


async def stacks(caller: Caller) -> None:
    """Sends two at once. The second counts when it is answered: behind an answer that closes it is not read."""
    await caller.send("stacks", caller.request() + caller.request())
    await caller.answer()
    if caller.wire is not None:
        caller.ledger.sent["stacks"] += 1
        await caller.answer()


HABITS: dict[Callable[[Caller], Awaitable[None]], float] = {
    asks: 30, listens: 20, leaves: 16, dawdles: 3, stammers: 5, breaks_off: 5, mumbles: 3, babbles: 4, errs: 7,
    forgets_its_key: 2, hurries: 3, stacks: 4,
}  # fmt: skip
