"""A whole qualification against the simulator: the record it writes, and when it writes none."""

import asyncio
import dataclasses
import datetime as dt
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from gateway import policy
from gateway.evidence.identity_client import fetch_attested
from gateway.evidence.record import Record
from gateway.evidence.store import RecordStore
from gateway.evidence.target import Target
from gateway.evidence.verdict import evaluate
from gateway.qualify import samples
from gateway.qualify.boundary import describe
from gateway.qualify.plan import Plan
from gateway.qualify.run import QualifyResult, Request, qualify
from gateway.qualify.search import Limits
from gateway.qualify.session import Guard, IdentityChanged, QualifyError
from gateway.simulator.server import SimulatorServer
from tests.qualify.support import FAST, Quiet, plan

NOW = dt.datetime.now(dt.UTC)
TARGET = policy.Target.model_validate(
    {"slo": {"e2e_ms_p95": 60_000, "ttft_ms_p95": 60_000, "output_tokens_per_s_min": 0}, "confidence": 0.8}
)


async def measure(sim: SimulatorServer, out: Path, chosen: Plan | None = None, **changes: object) -> QualifyResult:
    return await qualify(Request(policy.Backend(url=sim.url), chosen or plan(), out, **changes), Quiet())  # type: ignore[arg-type]


async def observed(sim: SimulatorServer):  # type: ignore[no-untyped-def]
    async with httpx.AsyncClient() as client:
        return await fetch_attested(client, sim.url, None)


def written(out: Path) -> list[Path]:
    return list(out.rglob("*")) if out.exists() else []


async def test_the_record_passes_for_the_server_it_was_measured_on(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        result = await measure(sim, tmp_path)
        verdict = evaluate(result.record, await observed(sim), Target.from_policy(TARGET), NOW)
    assert verdict.final_decision == "PASS", verdict.details
    assert RecordStore(tmp_path).load().records == {result.record_id: result.record}
    assert RecordStore(tmp_path).check_samples(result.record) is None
    one = result.record.slices[0]
    assert (one.input_tokens.min, one.input_tokens.max, one.output_tokens.min, one.output_tokens.max) == (1, 64, 1, 8)
    assert [level.concurrency for level in one.levels] == [1, 4]
    raw = samples.read(result.samples, result.record.samples.sha256 if result.record.samples else None)
    assert len(raw) == sum(level.requests for level in one.levels)
    assert all(level.queue_source == "vllm_metrics" and level.preemptions == 0 for level in one.levels)
    protocol = result.record.protocol
    assert (protocol.warmup_state, protocol.arrival, protocol.repeats, protocol.identity_source) == (
        "completed",
        "closed_loop",
        3,
        "attested",
    )
    assert protocol.kv_cache_tokens == FAST.kv_cache_tokens


async def test_no_record_when_the_configuration_changes_in_the_middle(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        quiet = Quiet()
        task = asyncio.create_task(qualify(Request(policy.Backend(url=sim.url), plan(), tmp_path), quiet))
        while len(quiet.stages) < 3:
            await asyncio.sleep(0.002)
        await sim.restart(max_num_seqs=8)
        with pytest.raises(IdentityChanged, match=r"no record|could not be checked"):
            await task
    assert written(tmp_path) == []


async def test_no_record_when_the_engine_was_only_started_again(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        quiet = Quiet()
        task = asyncio.create_task(qualify(Request(policy.Backend(url=sim.url), plan(), tmp_path), quiet))
        while len(quiet.stages) < 3:
            await asyncio.sleep(0.002)
        await sim.restart()
        with pytest.raises(IdentityChanged):
            await task
    assert written(tmp_path) == []


async def test_a_response_with_another_hash_ends_the_run() -> None:
    async with SimulatorServer(FAST) as sim:
        guard = Guard(await observed(sim))
    assert not guard.seen("sha256:" + "0" * 64, None)
    assert guard.changed is not None
    assert "0" * 16 in guard.changed
    first = guard.changed
    assert not guard.seen(None, b"{}")
    assert guard.changed == first


async def test_a_backend_that_others_load_is_not_measured(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim, httpx.AsyncClient() as client:
        await sim.set_fault("stall;after=1")
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "stream": True}
        async with client.stream("POST", sim.url + "/v1/completions", json=body):
            with pytest.raises(QualifyError, match="measured alone"):
                await measure(sim, tmp_path)
    assert written(tmp_path) == []


async def test_a_plan_beyond_the_context_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        with pytest.raises(QualifyError, match="max_model_len is 4096"):
            await measure(sim, tmp_path, plan(cell={"input_tokens": {"min": 1, "max": 4090}}))
        assert sim.stats.started == 0


async def test_a_server_that_fails_everything_gives_no_record(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        await sim.set_fault("error500")
        with pytest.raises(QualifyError, match="warm-up requests failed"):
            await measure(sim, tmp_path)
    assert written(tmp_path) == []


async def test_warm_up_that_never_settles_gives_no_record(tmp_path: Path) -> None:
    unsteady = plan(warmup={"requests": 4, "window": 4, "tolerance": 0.000001, "max_requests": 40})
    async with SimulatorServer(FAST) as sim:
        with pytest.raises(QualifyError, match="not steady"):
            await measure(sim, tmp_path, unsteady)


async def test_warm_up_may_be_omitted_and_is_then_said_to_be(tmp_path: Path) -> None:
    chosen = plan(warmup=None, repeats=1, cell={"requests": 8, "batches": 2})
    async with SimulatorServer(FAST) as sim:
        result = await measure(sim, tmp_path, chosen)
    assert (result.record.protocol.warmup_state, result.record.protocol.warmup_requests) == ("omitted", 0)
    assert any("bound on p95" in note for note in result.notes)


async def test_a_run_that_time_cut_short_says_what_it_claims_less(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        display = Quiet()
        chosen = plan(cell={"concurrency": [4], "max_seconds": 0.001})
        result = await qualify(Request(policy.Backend(url=sim.url), chosen, tmp_path), display)
    (one,) = result.record.slices
    assert (one.input_tokens.min, one.input_tokens.max) != (1, 64)
    cut, claim = (
        next(n for n in result.record.protocol.notes if part in n) for part in ("max_seconds", "input tokens are claimed")
    )
    assert cut == "cell 1, 4 at once: 12 of 192 requests were sent within max_seconds (0.001)"
    assert f"from {one.input_tokens.min} to {one.input_tokens.max}, the plan asked for 1 to 64" in claim
    assert {cut, claim} <= set(result.notes)
    assert any("ended by max_seconds after 4 of 64 requests" in note for note in display.notes)
    assert RecordStore(tmp_path).load().records == {result.record_id: result.record}


async def test_levels_with_no_size_in_common_give_no_record_and_the_reason(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        chosen = plan(repeats=1, cell={"concurrency": [1, 2, 3, 4], "max_seconds": 0.001})
        with pytest.raises(QualifyError, match="sizes that all of its levels hold"):
            await measure(sim, tmp_path, chosen)
    assert written(tmp_path) == []


@pytest.mark.parametrize("route", ["chat", "embeddings"])
async def test_other_routes_are_measured_as_they_are(tmp_path: Path, route: str) -> None:
    cell: dict[str, object] = {"requests": 12, "batches": 4, "concurrency": [2], "input_tokens": {"min": 40, "max": 80}}
    if route == "embeddings":
        cell |= {"task": "pool", "output_tokens": {"min": 0, "max": 0}}
    async with SimulatorServer(FAST) as sim:
        result = await measure(sim, tmp_path, plan(route=route, cell=cell))
    one = result.record.slices[0]
    assert one.task == ("generate" if route == "chat" else "pool")
    assert one.input_tokens.min >= 40 - 5
    assert one.input_tokens.max <= 80
    assert one.input_tokens.max >= 70
    assert all(level.errors == 0 and level.e2e_ms.p95 is not None for level in one.levels)


async def test_a_search_records_the_level_it_found_and_only_that(tmp_path: Path) -> None:
    """The server turns away what is more than four at once, so that five is a miss whatever the clock says."""
    cell = {"concurrency": [1], "requests": 90, "batches": 45}
    async with SimulatorServer(dataclasses.replace(FAST, max_num_queued_reqs=4)) as sim:
        result = await measure(sim, tmp_path, plan(cell=cell), search=Limits(e2e_ms=60_000), most=16)
    levels = result.record.slices[0].levels
    assert [(level.concurrency, level.errors) for level in levels] == [(4, 0)]
    assert {each.concurrency for each in samples.read(result.samples)} == {4}


async def test_an_open_loop_is_recorded_as_one(tmp_path: Path) -> None:
    cell = {"arrival": {"poisson_per_s": 200}, "concurrency": [8], "requests": 90, "batches": 8}
    async with SimulatorServer(FAST) as sim:
        result = await measure(sim, tmp_path, plan(cell=cell))
    assert result.record.protocol.arrival == "open_loop_poisson"
    assert 1 <= result.record.slices[0].levels[0].concurrency <= 8


async def test_a_shared_prefix_is_named_and_opens_no_gate_by_itself(tmp_path: Path) -> None:
    cell = {"prefix_reuse": {"shared_prefix": 32}, "input_tokens": {"min": 40, "max": 64}, "concurrency": [4], "batches": 16}
    async with SimulatorServer(FAST) as sim:
        result = await measure(sim, tmp_path, plan(cell=cell))
        verdict = evaluate(result.record, await observed(sim), Target.from_policy(TARGET), NOW)
    assert result.record.slices[0].prefix_reuse == "shared_prefix:32"
    assert verdict.final_decision == "DEFER"


async def test_a_declared_identity_is_kept_as_declared(tmp_path: Path) -> None:
    async with SimulatorServer(FAST) as sim:
        seen = await observed(sim)
        stated = policy.DeclaredIdentity(
            model_revision="r1", vllm_version=seen.identity.vllm_version, hardware_profile="one of these",
            server_configuration_hash=seen.hash, configuration=dict(seen.document),
        )  # fmt: skip
        backend = policy.Backend(url=sim.url, identity=stated)
        chosen = plan(repeats=1, model="tiny", cell={"requests": 8, "batches": 2})
        result = await qualify(Request(backend, chosen, tmp_path), Quiet())
    assert result.record.protocol.identity_source == "declared"
    assert result.record.identity.model_revision == "r1"


async def test_a_declaration_that_the_server_contradicts_is_refused(tmp_path: Path) -> None:
    stated = policy.DeclaredIdentity(
        model_revision="r1", vllm_version="0.1", hardware_profile="x", server_configuration_hash="sha256:" + "0" * 64
    )
    async with SimulatorServer(FAST) as sim:
        with pytest.raises(QualifyError, match="contradicted"):
            await qualify(Request(policy.Backend(url=sim.url, identity=stated), plan(), tmp_path), Quiet())


def test_the_boundary_note_says_what_answered_without_a_key() -> None:
    text = describe({"/v1/models": 401, "/metrics": 200, "/tokenize": 405, "/sleep": 404, "/docs": None}, keyed=True)
    assert "Refused without the key: /v1/models." in text
    assert "/metrics (200), /tokenize (405)" in text
    assert "/sleep" not in text
    assert "asks for none" in describe({"/v1/models": 200}, keyed=False)


def test_an_interrupt_leaves_no_file_and_a_full_run_prints_json(tmp_path: Path) -> None:
    """The command itself, as an operator runs it: Ctrl-C in the middle, then to the end."""
    file = tmp_path / "plan.yaml"
    value = plan(repeats=1, cell={"requests": 8, "batches": 2}).model_dump(mode="json", by_alias=True)
    file.write_text(json.dumps(value))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    simulator = [sys.executable, "-m", "gateway.simulator", "--port", "0", "--speed", "20"]
    run = [sys.executable, "-c", "import typer; from gateway.qualify.command import qualify; typer.run(qualify)"]
    with subprocess.Popen(simulator, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            out = tmp_path / "records"
            long = [*run, "--backend", url, "--plan", "standard", "--out", str(out)]
            # A shell gives its background jobs a SIGINT that is ignored, and children inherit that.
            heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            with subprocess.Popen(long, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heard) as running:
                assert running.stderr is not None
                while "at once" not in (line := running.stderr.readline()):
                    assert line, "the run ended before its first level"
                running.send_signal(signal.SIGINT)
                assert "no record was written" in running.stderr.read()
                assert running.wait(10) != 0
            assert written(out) == []
            short = [*run, "--backend", url, "--plan", str(file), "--out", str(out), "--json"]
            done = subprocess.run(short, capture_output=True, text=True, env=environment, timeout=60, check=True)
            answer = json.loads(done.stdout)
            assert isinstance(RecordStore(out).get(answer["record"]), Record)
        finally:
            server.terminate()
