"""Case 33: a bad policy file changes nothing and says so; the next good one applies; streams that run are not touched."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import AsyncExitStack

import pytest_asyncio
import yaml

from tests.support.client import KEY, Stream, post, wire, within
from tests.support.gateway import KEYS, Backend, GatewayProcess, hash_of
from tests.support.raw import request, say
from tests.support.upstream import SSE_HEAD, STREAM, ScriptedUpstream, chunk

STREAMS = 5


@pytest_asyncio.fixture(loop_scope="session")
async def site(tmp_path):
    """A gateway with a policy file of its own, and its backend."""
    upstream = ScriptedUpstream()
    await upstream.start()
    async with GatewayProcess(tmp_path, {"a": Backend(upstream)}, timeouts={"queue_s": 1}) as gateway:
        yield gateway, upstream
    await upstream.stop()


class Reloads:
    """Counts what the metric says, and puts text into the file."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway, self.file = gateway, gateway.folder / "policy.yaml"
        self.good = self.file.read_text()

    async def count(self, result: str) -> float:
        return await self.gateway.value("plimsoll_policy_reloads_total", result=result)

    async def put(self, text: str, result: str, *, signalled: bool = True) -> None:
        """Write, and wait until the gateway has looked at it and come to `result`."""
        before = await self.count(result)
        self.file.write_text(text)
        if signalled:
            self.gateway.signal(signal.SIGHUP)

        async def counted() -> bool:
            return await self.count(result) > before

        await within(5, counted, f"the file is {result}")

    async def stale(self) -> bool:
        return (await self.gateway.status())["policy_error"] is not None

    def changed(self, **sections) -> str:
        return yaml.safe_dump({**yaml.safe_load(self.good), **sections}, sort_keys=False)


async def served(gateway: GatewayProcess, key: str = KEY, **fields) -> int:
    return (await say(gateway.port, post(model="a", key=key, **fields))).status


def broken(reloads: Reloads) -> dict[str, str]:
    """Files that must not be taken up."""
    document = yaml.safe_load(reloads.good)
    twice = {"a": document["backends"]["a"], "b": document["backends"]["a"]}
    return {
        "no yaml": "backends: {a: [",
        "broken json": '{"server": {',
        "nothing": "",
        "a list": "- a\n- b\n",
        "a NUL": "server: \x00",
        "an unknown field": reloads.changed(colour="blue"),
        "an unknown field inside": reloads.changed(queue={"max_requests": 5, "max_request": 6}),
        "a limit of -1": reloads.changed(queue={"max_requests": -1}),
        "a timeout of 0": reloads.changed(timeouts={"queue_s": 0}),
        "a backend twice": reloads.changed(backends=twice),
        "a key in yaml twice": reloads.good + "\ntenants: {}\n",
        "a model without a backend": reloads.changed(models={"a": {"backends": ["nobody"]}}),
        "a key twice": reloads.changed(keys=[*document["keys"], document["keys"][0]]),
        "a key of no tenant": reloads.changed(keys=[{**document["keys"][0], "tenant": "nobody"}]),
        "a backend's key that is not there": reloads.changed(
            backends={"a": {**document["backends"]["a"], "api_key_env": "NOT_SET_ANYWHERE"}}
        ),
        "a yaml tag": "!!python/object/apply:os.system ['true']",
        "a bomb of aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(5)),
    }


async def test_bad_files_change_nothing_and_streams_run_on(site):
    gateway, upstream = site
    reloads = Reloads(gateway)
    go_on = asyncio.Event()

    async def long(call):
        await call.say(SSE_HEAD + chunk(STREAM[0]))
        await go_on.wait()
        await call.say(*(chunk(each) for each in STREAM[1:]), b"0\r\n\r\n")

    upstream.script = long
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(STREAMS):
            client = await stack.enter_async_context(wire(gateway.port))
            await client.send(post(model="a", stream=True))
            streams.append(Stream(client, await client.until(b"\r\n\r\n")))
        upstream.script = ScriptedUpstream().script
        for name, text in broken(reloads).items():
            await reloads.put(text, "refused")
            assert await reloads.stale(), name
            assert await served(gateway) == 200, name
        await reloads.put(reloads.good, "applied")
        assert not await reloads.stale()
        # Limits for new requests only: the five keep their places, a sixth is refused, then a seventh is let in.
        limits = {"acme": {"max_in_flight": STREAMS}, "other": {}}
        await reloads.put(reloads.changed(tenants=limits), "applied")
        assert await served(gateway) == 200  # those five were not counted by a quota that was not there
        await reloads.put(reloads.changed(keys=yaml.safe_load(reloads.good)["keys"][1:]), "applied")
        assert await served(gateway) == 401
        assert await served(gateway, KEYS["other"]) == 200
        await reloads.put(reloads.good, "applied")
        assert await served(gateway) == 200
        assert await gateway.in_flight() == STREAMS
        go_on.set()
        for stream in streams:
            assert stream.status == 200
            await stream.read_past(b"[DONE]")
    await gateway.settled()
    assert "Traceback" not in gateway.log()


async def test_however_the_file_is_replaced_it_is_seen(site):
    gateway, _ = site
    reloads = Reloads(gateway)
    file, folder = reloads.file, gateway.folder
    new = {"id": "new", "role": "client", "tenant": "acme"}

    def with_key(number: int) -> str:
        entry = {**new, "hash": hash_of(f"sk-new-{number}")}
        return reloads.changed(keys=[*yaml.safe_load(reloads.good)["keys"], entry])

    async def known(number: int) -> bool:
        return await served(gateway, f"sk-new-{number}") == 200

    async def in_force(number: int, how: str) -> None:
        await within(6, lambda: known(number), f"the policy is in force: {how}")
        assert not await reloads.stale(), how

    await reloads.put(with_key(1), "applied", signalled=False)
    await in_force(1, "written in place")

    with file.open("w") as handle:  # truncated, then written in two steps
        text = with_key(2)
        handle.write(text[: len(text) // 2])
        handle.flush()
        await asyncio.sleep(1.3)
        assert await known(1) and not await known(2)
        handle.write(text[len(text) // 2 :])
    await in_force(2, "in two steps")

    other = folder / "policy.new"
    other.write_text(with_key(3))
    other.rename(file)
    await in_force(3, "renamed")

    file.unlink()
    await asyncio.sleep(1.3)
    assert await known(3)
    file.write_text(with_key(4))
    await in_force(4, "deleted and restored")

    # As a ConfigMap is mounted: policy.yaml -> ..data/policy.yaml, ..data -> ..1; a new folder, then one rename.
    for number in (5, 6):
        (folder / f"..{number}").mkdir()
        (folder / f"..{number}" / "policy.yaml").write_text(with_key(number))
    (folder / "..data").symlink_to("..5")
    (folder / "policy.link").symlink_to("..data/policy.yaml")
    (folder / "policy.link").rename(file)
    await in_force(5, "a link")
    (folder / "..data.new").symlink_to("..6")
    (folder / "..data.new").rename(folder / "..data")
    shutil.rmtree(folder / "..5")
    await in_force(6, "the folder behind the link")
    assert await gateway.is_open("a")
    assert "cannot be read" not in gateway.log(), "paths are relative to the file, not to where its link leads"
    assert "cannot be changed" not in gateway.log()

    applied = await reloads.count("applied")
    (folder / "..6" / "policy.yaml").touch()
    await asyncio.sleep(1.3)
    assert await known(6)
    assert await reloads.count("applied") - applied <= 1
    got = await say(gateway.admin_port, request("POST", "/admin/reload", key=KEYS["operator"]))
    assert got.status == 200
    assert await known(6)
