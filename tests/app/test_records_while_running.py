"""Records that come while the gateway runs: by whichever way, the same checks and the same answer; what runs is not touched."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.evidence.record import dump, record_id, validate
from tests.evidence.builders import edited
from tests.support.client import ask, get, open_stream, within
from tests.support.gateway import KEYS, ROOT, Backend, GatewayProcess, configuration_of, record_of
from tests.support.raw import request, say
from tests.support.upstream import SSE_HEAD, STREAM, ScriptedUpstream, chunk

Json = dict[str, Any]


class Site:
    """A gateway with one backend, and the ways a record gets to it."""

    def __init__(self, gateway: GatewayProcess, upstream: ScriptedUpstream) -> None:
        self.gateway, self.upstream = gateway, upstream
        self.backend = gateway.backends["tiny"]
        self.folder = gateway.folder / "records"

    def record(self, **box: int) -> Json:
        """The backend's own record; with `box`, for other sizes."""
        sized = Backend(self.upstream, **{"concurrency": 4, "input_max": 256, "output_max": 32, **box})
        raw: Json = json.loads(record_of("tiny", sized)[1])
        # The configuration is the backend's, whatever the sizes.
        raw["configuration"] = configuration_of("tiny", self.backend)
        raw["identity"] = json.loads(record_of("tiny", self.backend)[1])["identity"]
        return raw

    def path(self, raw: Json) -> Path:
        return self.folder / f"{record_id(validate(raw))}.json"

    async def listed(self) -> list[Json]:
        return list((await get(self.gateway.admin_port, "/admin/records", KEYS["operator"])).json()["records"])

    async def known(self, identity: str) -> Json | None:
        return next((each for each in await self.listed() if each["id"] == identity), None)

    async def by_file(self, raw: Json) -> list[Json]:
        """Put it into the directory; the verdicts, once the gateway has seen it."""
        path = self.path(raw)
        path.with_suffix(".part").write_bytes(dump(validate(raw)))
        path.with_suffix(".part").rename(path)

        async def seen() -> bool:
            return await self.known(path.stem) is not None

        await within(10, seen, "the file is picked up")
        return list((await self.known(path.stem) or {})["verdicts"])

    async def by_api(self, raw: bytes) -> tuple[int, Json]:
        got = await say(self.gateway.admin_port, request("POST", "/admin/records", key=KEYS["operator"], body=raw))
        return got.status, json.loads(got.body)

    async def by_command(self, raw: Json, *more: str, code: int) -> str:
        """`records push` from another directory; its standard output. It must end with `code`."""
        elsewhere = self.gateway.folder / self.path(raw).name
        elsewhere.write_bytes(dump(validate(raw)))
        words = ["records", "push", str(elsewhere), "--gateway", f"http://127.0.0.1:{self.gateway.admin_port}", *more]
        command, env = [sys.executable, "-m", "gateway", *words], {**os.environ, "PLIMSOLL_KEY": KEYS["operator"]}
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stdout)

    async def removed(self, path: Path) -> None:
        path.unlink()

        async def gone() -> bool:
            return await self.known(path.stem) is None

        await within(10, gone, "the file's going is seen")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    upstream = ScriptedUpstream()
    await upstream.start()
    async with GatewayProcess(tmp_path, {"tiny": Backend(upstream, 4, 256, 32)}) as gateway:
        yield Site(gateway, upstream)
    await upstream.stop()


def deferring(site: Site) -> dict[str, tuple[Json, str, str]]:
    """Records that would DEFER: the field that says so, and a word of the details."""
    other = Backend(site.upstream, 16, 256, 32)  # measured with other batching limits
    return {
        "another configuration": (json.loads(record_of("tiny", other)[1]), "provenance_state", "scheduler.max_num_seqs"),
        "warm-up unknown": (edited(site.record(), "protocol.warmup_state", "unknown"), "measurement_state", "warm"),
        "errors": (edited(site.record(), "slices.0.levels.1.errors", 3), "service_state", "3 errors"),
    }


async def test_each_way_in_has_the_same_answer_and_names_the_field(site: Site) -> None:
    cases = deferring(site)
    answers = dict(zip(cases, await asyncio.gather(*(site.by_file(raw) for raw, _, _ in cases.values())), strict=True))
    for name, (raw, field, word) in cases.items():
        rows = answers[name]
        assert [(row["decision"], row["failed"], row["slices_open"]) for row in rows] == [("DEFER", field, 0)], name
        assert word in " ".join(rows[0]["details"]), name
        told = [line for line in site.gateway.log().splitlines() if record_id(validate(raw))[:16] in line and field in line]
        assert told and word in told[0], "a file has nobody to answer to but the log"
    await asyncio.gather(*(site.removed(site.path(raw)) for raw, _, _ in cases.values()))
    for name, (raw, _, _) in cases.items():
        assert await site.by_api(dump(validate(raw))) == (
            201,
            {"id": site.path(raw).stem, "new": True, "verdicts": answers[name]},
        )
    name = "another configuration"
    raw = cases[name][0]
    pushed = json.loads(await site.by_command(raw, "--json", code=1))
    assert (pushed["new"], pushed["verdicts"]) == (False, answers[name])
    shown = await site.by_command(raw, code=1)
    assert "provenance" in shown and "DEFER" in shown
    assert (await ask(site.gateway.port, model="tiny")).status == 200, "the record that holds stays in force"


async def test_each_way_in_has_the_same_checks(site: Site) -> None:
    falling = edited(site.record(), "slices.0.levels.0.e2e_ms.p95", "1")
    untrue = edited(site.record(), "configuration.scheduler.max_num_seqs", 99)
    for number, (raw, reason) in enumerate(((falling, "percentiles fall"), (untrue, "configuration"))):
        body, name = json.dumps(raw).encode(), f"{str(number) * 64}.json"
        status, answer = await site.by_api(body)
        words = answer["error"]["message"].removeprefix("This is not a usable record: ")
        assert status == 400 and reason in words
        (site.folder / name).write_bytes(body)

        async def refused(name: str = name, words: str = words) -> bool:
            return any(each["id"] is None and each["file"] == name and each["refused"] == words for each in await site.listed())

        await within(10, refused, f"the file is refused with the same words: {words}")
    assert len(list(site.folder.glob("*.json"))) == 3, "what was pushed in vain is not kept"
    site.gateway.model_options = {"target": {"conditional": "admit", "require_signature": ["ed25519:" + "0" * 64]}}
    await site.gateway.reload()
    unsigned = json.loads(await site.by_command(site.record(), "--json", code=1))
    assert [(row["failed"], row["slices_open"]) for row in unsigned["verdicts"]] == [("signature", 0)]


async def test_what_runs_keeps_its_envelope_and_what_is_new_has_the_new_one(site: Site) -> None:
    go_on = asyncio.Event()

    async def held(call: Any) -> None:
        await call.say(SSE_HEAD + chunk(STREAM[0]))
        await go_on.wait()
        await call.say(*(chunk(each) for each in STREAM[1:]), b"0\r\n\r\n")

    narrower = site.record(output_max=16)
    old = next(site.folder.glob("*.json"))
    site.upstream.script = held
    async with open_stream(site.gateway.port, model="tiny", max_tokens=30) as stream:
        assert old.stem[:16].encode() in stream.head
        site.upstream.script = ScriptedUpstream().script
        assert (await site.by_file(narrower))[0]["slices_open"] == 1
        await site.removed(old)
        beyond = await ask(site.gateway.port, model="tiny", max_tokens=30)
        assert (beyond.status, beyond.json()["error"]["code"]) == (400, "out_of_slice_output")
        # No slice of the new record holds what still runs, so that nothing joins it: it was never measured beside that.
        waits = asyncio.create_task(ask(site.gateway.port, model="tiny", max_tokens=16))
        await within(5, lambda: queued(site), "it waits")
        assert await site.gateway.in_flight() == 1
        go_on.set()
        body, whole = await stream.finish()
    assert whole and body.endswith(b"".join(STREAM))
    after = await waits
    assert after.status == 200
    assert after.fields["x-plimsoll-record"] == site.path(narrower).stem[:16]


async def queued(site: Site) -> bool:
    return await site.gateway.queued() == 1
