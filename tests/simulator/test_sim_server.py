"""The server's life: identity, keys, restarts, crash, metrics, the command, and that it repeats."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from gateway.simulator import model_build
from gateway.simulator.command import app
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.server import SimulatorServer
from gateway.simulator.tokens import MODEL_DIR, PromptError, TextAssembler, TokenModel

from .conftest import FAST

WHOLE = {"model": "tiny", "prompt": "ship", "max_tokens": 5, "ignore_eos": True}
BASE = SimulatorConfig(cost=FAST)


async def config_hash(config: SimulatorConfig, port: int = 0) -> str:
    async with SimulatorServer(config, port) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        document = (await http.get("/plimsoll/identity")).json()
        shown = (await http.get("/health")).headers["x-plimsoll-config"]
        assert document["server_configuration_hash"] == shown
        return str(shown)


async def test_identity_follows_every_setting_that_shapes_capacity_and_no_other() -> None:
    base = await config_hash(BASE)
    assert await config_hash(BASE) == base
    changes: list[dict[str, object]] = [
        {"max_num_seqs": 8},
        {"max_model_len": 2048},
        {"max_num_batched_tokens": 1024},
        {"block_size": 32},
        {"gpu_memory_utilization": 0.5},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"speed": 2.0},
        {"vllm_version": "0.33.0"},
        {"max_num_queued_reqs": 5},
    ]
    others = [await config_hash(replace(BASE, **change)) for change in changes]  # type: ignore[arg-type]
    assert len({base, *others}) == len(changes) + 1
    assert await config_hash(replace(BASE, served_model_names=("x",), api_keys=(), seed=5)) == base


async def test_identity_payload_tells_the_fields_of_a_record() -> None:
    async with SimulatorServer(replace(BASE, api_keys=("secret-key",))) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        assert (await http.get("/plimsoll/identity")).status_code == 401
        http.headers["authorization"] = "Bearer secret-key"
        reply = await http.get("/plimsoll/identity")
        assert "secret-key" not in reply.text
        document = reply.json()
        assert document["identity"]["vllm_version"] == "0.32.0+sim"
        assert "unknown" not in document["identity"].values()
        assert document["runtime"]["kv_cache_size_tokens"] == BASE.kv_cache_tokens
        bundle = (await http.get("/plimsoll/tokenizer")).json()
        assert bundle["tokenizer"] == (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")


async def test_the_key_guards_the_api_paths_only() -> None:
    async with SimulatorServer(replace(BASE, api_keys=("k1", "k2"))) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        for path in ("/v1/models", "/v1/nothing"):
            reply = await http.get(path)
            assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
            assert "x-plimsoll-config" in reply.headers
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "ship"})).status_code == 200
        assert (await http.get("/v1/models", headers={"authorization": "Bearer k2"})).status_code == 200


async def test_restart_keeps_the_port_and_brings_another_configuration(sim: SimulatorServer) -> None:
    async with httpx.AsyncClient(base_url=sim.url) as http:
        before = (await http.get("/plimsoll/identity")).json()
        running = asyncio.create_task(http.post("/v1/completions", json={**WHOLE, "max_tokens": 3000}))
        while not sim.stats.running:
            await asyncio.sleep(0.005)
        url = sim.url
        await sim.set_fault("restart;max_num_seqs=4")
        assert sim.url == url
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await running
    async with httpx.AsyncClient(base_url=sim.url) as http:
        after = (await http.get("/plimsoll/identity")).json()
        assert after["configuration"]["scheduler"]["max_num_seqs"] == 4
        assert after["server_configuration_hash"] != before["server_configuration_hash"]
        assert after["runtime"]["engine_start_id"] != before["runtime"]["engine_start_id"]
        assert (await http.post("/v1/completions", json=WHOLE)).status_code == 200
    assert [seen.path for seen in sim.requests].count("/v1/completions") == 2


async def test_crash_resets_and_refuses(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    running = asyncio.create_task(client.post("/v1/completions", json={**WHOLE, "max_tokens": 3000}))
    while not sim.stats.running:
        await asyncio.sleep(0.005)
    await sim.set_fault("crash")
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await running
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(sim.host, sim.port)


async def test_a_dead_engine_answers_500_and_ends_streams_with_error_and_done(
    sim: SimulatorServer, client: httpx.AsyncClient
) -> None:
    body = {**WHOLE, "max_tokens": 3000}
    whole = asyncio.create_task(client.post("/v1/completions", json=body))
    stream = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": True}))
    while sim.stats.generation_tokens < 10:
        await asyncio.sleep(0.005)
    await sim.simulation.driver.stop()
    assert (await whole).status_code == 500
    text = (await stream).text
    assert text.endswith("data: [DONE]\n\n")
    assert '"error"' in text
    assert (await client.post("/v1/completions", json=WHOLE)).status_code == 500


async def test_shedding_is_a_503_without_retry_after() -> None:
    async with SimulatorServer(replace(BASE, max_num_queued_reqs=2)) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        sim.freeze()
        held = [asyncio.create_task(http.post("/v1/completions", json=WHOLE)) for _ in range(2)]
        while sim.stats.in_flight < 2:
            await asyncio.sleep(0.005)
        shed = await http.post("/v1/completions", json=WHOLE)
        assert (shed.status_code, "retry-after" in shed.headers) == (503, False)
        assert 'reason="queue_full"} 1.0' in (await http.get("/metrics")).text
        sim.freeze(False)
        assert [reply.status_code for reply in await asyncio.gather(*held)] == [200, 200]


async def test_metrics_have_vllm_names_and_agree_with_the_engine(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await asyncio.gather(*(client.post("/v1/completions", json={**WHOLE, "prompt": f"{n} ship"}) for n in range(6)))
    text = (await client.get("/metrics")).text
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:generation_tokens_total{labels} 30.0" in text
    assert f"vllm:prompt_tokens_total{labels} {sim.stats.prompt_tokens}.0" in text
    assert f"vllm:iteration_tokens_total_count{labels} {sim.stats.iterations}.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 6.0' in text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert f"vllm:{name}_count{labels} 6.0" in text
    assert f"vllm:inter_token_latency_seconds_count{labels} 24.0" in text
    info = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in ('block_size="16"', 'num_gpu_blocks="4096"', 'gpu_memory_utilization="0.9"', 'enable_prefix_caching="True"'):
        assert label in info


async def test_what_was_seen_is_kept_for_tests(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=WHOLE, headers={"x-mark": "7"})
    seen = sim.requests[-1]
    assert (seen.method, seen.path, seen.headers["x-mark"]) == ("POST", "/v1/completions", "7")
    assert json.loads(seen.body) == WHOLE
    assert seen.connection_id == sim.connections_opened == 1


async def test_unknown_paths_and_methods_answer_as_the_framework_does(client: httpx.AsyncClient) -> None:
    missing, wrong = await client.get("/v1/nothing"), await client.get("/v1/chat/completions")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()) == (405, "POST", {"detail": "Method Not Allowed"})
    assert "x-plimsoll-config" in missing.headers


async def test_the_middleware_tells_a_gateway_from_a_stranger(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    async def counts() -> tuple[int, dict[str, int]]:
        runtime = (await client.get("/plimsoll/identity")).json()["runtime"]
        return runtime["foreign_in_flight"], runtime["gateway_in_flight"]

    sim.freeze()
    marked = {"x-plimsoll-gateway": "g1"}
    held = [asyncio.create_task(client.post("/v1/completions", json=WHOLE, headers=h)) for h in ({}, marked, marked)]
    while sim.stats.in_flight < 3:
        await asyncio.sleep(0.005)
    assert await counts() == (1, {"g1": 2})
    held[1].cancel()
    while sim.stats.aborted < 1:
        await asyncio.sleep(0.005)
    assert await counts() == (1, {"g1": 1})
    sim.freeze(False)
    await asyncio.gather(held[0], held[2])
    assert await counts() == (0, {})


async def test_a_slow_start_refuses_until_it_is_there() -> None:
    async with SimulatorServer(BASE) as first:
        port = first.port
    late = SimulatorServer(replace(BASE, start_delay_s=0.1), port)
    starting = asyncio.create_task(late.start())
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await starting
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await late.stop()


async def test_two_servers_with_one_seed_say_the_same() -> None:
    async def say(seed: int) -> str:
        async with SimulatorServer(replace(BASE, seed=seed)) as sim, httpx.AsyncClient(base_url=sim.url) as http:
            reply = await http.post("/v1/completions", json={**WHOLE, "max_tokens": 40, "ignore_eos": False})
            return str(reply.json()["choices"])

    assert await say(1) == await say(1)
    assert await say(1) != await say(2)


async def test_keep_alive_comments_come_on_a_silent_stream() -> None:
    async with SimulatorServer(replace(BASE, sse_keep_alive_s=0.02)) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        sim.freeze()
        async with http.stream("POST", "/v1/completions", json={**WHOLE, "stream": True}) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            sim.freeze(False)
            rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"


def test_the_model_directory_is_what_the_script_builds(tmp_path: Path) -> None:
    model_build.build(tmp_path)
    for built in tmp_path.iterdir():
        assert built.read_bytes() == (MODEL_DIR / built.name).read_bytes(), built.name
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 200_000


def test_tokens_go_there_and_back() -> None:
    model = TokenModel()
    for text in ("", "plain", "Ünïcode 日本語 🚢", "<|im_start|>user", "a\r\n\tb", "\x00"):
        assert model.decode(model.encode(text)) == text
    with pytest.raises(PromptError):
        model.decode([model.size])
    with pytest.raises(PromptError):
        model.decode([-1])
    assert len(model.words) > 200


def test_stop_strings_are_found_across_pieces_and_never_shown() -> None:
    pieces = (" a", "b", "c", " d")
    text = TextAssembler(pieces, stops=("bc d",))
    assert [text.push([token], False) for token in (0, 1, 2, 3)] == ["", "", " ", "a"]
    assert text.stopped_by == "bc d"
    assert text.push([0], True) == ""
    kept = TextAssembler(pieces, stops=("b",), keep_stop=True)
    assert kept.push([0, 1, 2], False) == " ab"
    late = TextAssembler(pieces, stops=("zzzz",))
    assert late.push([0, 1], False) + late.push([2], True) == " abc"


@contextlib.asynccontextmanager
async def command(*flags: str, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`python -m gateway.simulator`, and the URL that it printed."""
    argv = (sys.executable, "-m", "gateway.simulator", "--port", "0", *flags)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environment})
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            yield process, json.loads(await process.stdout.readline())["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_the_command_serves_with_its_flags_and_stops_on_a_signal() -> None:
    flags = ("--max-num-seqs", "3", "--served-model-name", "m", "--fault", "error500;times=1")
    async with command(*flags, VLLM_API_KEY="k") as (process, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer k"
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        document = (await http.get("/plimsoll/identity")).json()
        assert document["configuration"]["scheduler"]["max_num_seqs"] == 3
        assert (await http.post("/v1/completions", json={**WHOLE, "model": "m"})).status_code == 500
        assert (await http.post("/v1/completions", json={**WHOLE, "model": "m"})).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_crash_by_control_ends_the_process_with_1() -> None:
    async with command("--allow-control") as (process, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/sim/fault", content=b"crash")).status_code == 200
        assert await process.wait() == 1


def test_the_command_mounts_below_another() -> None:
    root = typer.Typer()
    root.add_typer(app, name="simulator")
    shown = CliRunner().invoke(root, ["simulator", "--help"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    assert "--max-num-seqs" in shown.output
    assert CliRunner().invoke(root, ["simulator", "--speed", "0"]).exit_code == 2


def test_the_command_explains_itself_and_refuses_nonsense() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    for flag in ("--max-num-seqs", "--api-key-file", "--fault", "--allow-control", "--speed"):
        assert flag in shown.output
    assert runner.invoke(app, ["--fault", "melt"]).exit_code == 2
    assert runner.invoke(app, ["--num-blocks", "1"]).exit_code == 2
    assert runner.invoke(app, ["--api-key-file", "/no/such/file"]).exit_code == 2
