"""A record pushed to one replica opens the same slices at every other."""

from __future__ import annotations

import json

from gateway.evidence.record import validate
from gateway.evidence.signing import new_key, sign
from tests.cases.shared.conftest import Pair
from tests.edge_path.wire import post, wire
from tests.state.fleet import LARGE, SMALL, ReplicaProcess
from tests.support.attested import Box, record_from
from tests.support.client import within
from tests.support.gateway import KEYS

WIDER, SIGNED = 3000, 3100


async def _push(replica: ReplicaProcess, raw: bytes, *more: bytes) -> None:
    """Send a record to one replica, with `more` header lines."""
    async with wire(replica.admin_port) as client:
        head = post(None, path="/admin/records", key=KEYS["operator"]).split(b"\r\n\r\n")[0]
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
        await client.send(b"\r\n".join([*lines, *more, b"content-length: %d" % len(raw)]) + b"\r\n\r\n" + raw)
        assert (await client.response()).status in (200, 201)


async def _open_up_to(replica: ReplicaProcess, size: int) -> None:
    async def opened() -> bool:
        return await replica.value("plimsoll_envelope_limit", axis="input") == size

    await within(6, opened, f"slices up to {size} are open")


async def test_a_record_pushed_to_one_opens_all(pair: Pair) -> None:
    await _push(pair.x, record_from(pair.upstream.identity, (SMALL, LARGE, Box(WIDER, 256, 1))))
    await _open_up_to(pair.y, WIDER)


async def test_the_signature_travels_with_it(pair: Pair) -> None:
    """Where only signed records open a gate, one push of a signed one opens all, and a signature that comes later does too."""
    pem, public = new_key()
    first, later = (record_from(pair.upstream.identity, (SMALL, LARGE, Box(size, 256, 1))) for size in (SIGNED, SIGNED + 1))
    options = [replica.model_options for replica in (pair.x, pair.y)]
    try:
        for replica in (pair.x, pair.y):
            replica.model_options = {"target": {"conditional": "admit", "require_signature": [public]}}
            await replica.reload()
            assert not await replica.is_open("a")
        await _push(pair.x, later)
        for raw in (first, later):
            signature = sign(validate(json.loads(raw)), pem)
            await _push(pair.x, raw, f"x-plimsoll-signature: {signature.public_key} {signature.signature}".encode())
            size = max(each["input_tokens"]["max"] for each in json.loads(raw)["slices"])
            for replica in (pair.x, pair.y):
                await _open_up_to(replica, size)
    finally:
        for replica, before in zip((pair.x, pair.y), options, strict=True):
            replica.model_options = before
            await replica.reload()
    await pair.serving()
