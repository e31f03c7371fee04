"""A record pushed to one replica opens the same slices at every other."""

from __future__ import annotations

from tests.cases.shared.conftest import Pair
from tests.edge_path.wire import post, wire
from tests.state.fleet import LARGE, SMALL
from tests.support.attested import Box, record_from
from tests.support.client import within
from tests.support.gateway import KEYS

WIDER = 3000


async def test_a_record_pushed_to_one_opens_all(pair: Pair) -> None:
    raw = record_from(pair.upstream.identity, (SMALL, LARGE, Box(WIDER, 256, 1)))
    async with wire(pair.x.admin_port) as client:
        head = post(None, path="/admin/records", key=KEYS["operator"]).split(b"\r\n\r\n")[0]
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
        await client.send(b"\r\n".join([*lines, b"content-length: %d" % len(raw)]) + b"\r\n\r\n" + raw)
        assert (await client.response()).status in (200, 201)

    async def opened() -> bool:
        return await pair.y.value("plimsoll_envelope_limit", axis="input") == WIDER

    await within(6, opened, "the other replica has the wider slice")
