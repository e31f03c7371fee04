"""The plan that a DEFER comes with: what it has to hold, when there is none, and that its record does settle the matter."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import policy
from gateway.evidence import lab
from gateway.evidence.record import Record, validate
from gateway.evidence.store import RecordStore
from gateway.evidence.target import Limits, Target, TargetSlice
from gateway.evidence.verdict import evaluate
from gateway.qualify import plan as plans
from gateway.qualify.plan import Plan
from gateway.qualify.run import Request, qualify
from gateway.qualify.settle import NoPlan, settling
from gateway.simulator.server import SimulatorServer
from tests.evidence.builders import CONFIG_A, edited, observed_for, raw_record
from tests.qualify.support import FAST, Quiet, plan

NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
LIMITS = Limits(e2e_ms_p95=Decimal(1800))


def offered(raw: dict[str, Any], document: dict[str, Any] = CONFIG_A, wanted: TargetSlice | None = None, **seen: Any) -> Plan:
    """The plan for the lab's record, changed, before a backend with that configuration."""
    record, target = validate(raw), Target(slice=wanted, limits=LIMITS)
    observed = observed_for(document, **seen)
    verdict = evaluate(record, observed, target, NOW)
    return settling(record, observed, target, verdict, "tiny")


def boxes(found: Plan) -> list[tuple[int, int, int]]:
    return [(cell.input_tokens.max, cell.output_tokens.max, cell.concurrency[-1]) for cell in found.cells]


def test_what_lies_outside_is_measured_and_nothing_else() -> None:
    found = offered(raw_record(), wanted=TargetSlice(1024, 256, 12))
    assert boxes(found) == [(1024, 256, 12)]
    assert found.cells[0].concurrency == (1, 2, 4, 8, 12)
    assert (found.model, found.confidence, found.repeats) == ("tiny", 0.95, 3)
    assert "OUT_OF_SLICE" in found.description


def test_another_configuration_rebuilds_the_slices_that_the_target_does_not_hold() -> None:
    larger = offered(raw_record(), lab.config_b(), TargetSlice(4096, 1024, 12))
    assert boxes(larger) == [(4096, 1024, 12)]
    beside = offered(raw_record(), lab.config_b(), TargetSlice(64, 16, 12))
    assert boxes(beside) == [(64, 16, 12), (2048, 512, 8)]
    assert boxes(offered(raw_record(), lab.config_b())) == [(2048, 512, 8)]


@pytest.mark.parametrize(
    ("path", "value"),
    [("protocol.warmup_state", "unknown"), ("valid_until", "2026-01-31T00:00:00Z"), ("slices.0.levels.1.e2e_ms", {})],
)
def test_what_was_not_measured_well_enough_is_measured_again(path: str, value: object) -> None:
    found = offered(edited(raw_record(), path, value))
    assert boxes(found) == [(2048, 512, 8)]
    cell = found.cells[0]
    assert cell.per_repeat(8, found.repeats) * found.repeats >= 8 * 59, "in lockstep too there is a bound on p95"


def test_features_are_in_the_requests_and_reuse_only_where_the_target_has_it() -> None:
    raw = edited(raw_record(), "slices.0.features", ["logprobs", "lora"])
    raw = edited(raw, "slices.0.prefix_reuse", "shared_prefix:256")
    raw["slices"][0]["input_tokens"]["min"] = 300
    record, observed = validate(raw), observed_for(CONFIG_A)
    for regimes, reuse in ((("shared_prefix:256",), "shared_prefix:256"), ((), "none")):
        target = Target(limits=Limits(e2e_ms_p95=Decimal(1)), prefix_reuse=regimes)
        found = settling(record, observed, target, evaluate(record, observed, target, NOW), "tiny")
        assert found.cells[0].reuse == reuse
        assert found.cells[0].all_features == ("logprobs", "lora")


def test_a_slice_that_the_server_no_longer_holds_is_left_out_and_said() -> None:
    raw = raw_record()
    raw["slices"].append(edited(raw["slices"][0], "input_tokens.max", 128))
    shorter = edited(CONFIG_A, "model.max_model_len", 1024)
    found = offered(raw, shorter)
    assert boxes(found) == [(128, 512, 8)]
    assert "max_model_len is 1024" in found.description


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "verdict is PASS"),
        ({"wanted": TargetSlice(8192, 512, 4)}, "max_model_len is 8192"),
        ({"document": lab.config_b(), "source": "probed"}, "attest or declare"),
    ],
)
def test_no_plan_where_no_measurement_would_settle_it(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoPlan, match=reason):
        offered(raw_record(), **changes)


def test_no_plan_for_a_backend_that_was_not_reached_or_a_task_that_no_plan_has() -> None:
    record = validate(edited(raw_record(), "slices.0.task", "transcribe"))
    for observed, reason in ((None, "has to be reached"), (observed_for(lab.config_b()), "task transcribe")):
        verdict = evaluate(record, observed, Target(), NOW)
        with pytest.raises(NoPlan, match=reason):
            settling(record, observed, Target(), verdict, "tiny")


class Operator:
    """Types commands, in a folder with a policy for one backend."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        target = {"slo": {"e2e_ms_p95": 60_000, "ttft_ms_p95": 60_000, "output_tokens_per_s_min": 1}, "confidence": 0.8}
        rules = {"backends": {"a": {"url": url}}, "models": {"tiny": {"backends": ["a"], "target": target}}}
        (folder / "policy.yaml").write_text(yaml.safe_dump(rules))

    async def types(self, *words: str, code: int = 0) -> Any:
        """The JSON that a command prints, which must end with `code`."""
        command = [sys.executable, "-m", "gateway", *words, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        run = asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=self.folder, env=environment)
        done = await run
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    async def evaluates(self, record: Path, shape: TargetSlice, *more: str, code: int = 0) -> Any:
        """The verdict on a record for a shape."""
        wanted = [f"--{name}={getattr(shape, name)}" for name in ("input", "output", "concurrency")]
        return await self.types("evaluate", str(record), "--policy", "policy.yaml", *wanted, *more, code=code)


def calmed(file: Path) -> Path:
    """The plan as it was offered, but for what the noise of a busy test machine would void: its lag, and the warm-up's pace."""
    value = yaml.safe_load(file.read_text())
    assert plans.load(str(file)).cells, "it is a plan as it stands"
    value |= {"max_lag_ms": 10_000, "warmup": {"requests": 8, "window": 4, "tolerance": 1.0, "max_requests": 400}}
    file.write_text(yaml.safe_dump(value, sort_keys=False))
    return file


def of(out: Path, answer: dict[str, Any]) -> Record:
    return RecordStore(out).get(answer["record"])


async def test_the_transfer_task(tmp_path: Path) -> None:
    """The same revision with a larger context and more at once: DEFER with the plan that settles it; measured by that: PASS."""
    out, shape = tmp_path / "records", TargetSlice(160, 4, 6)
    async with SimulatorServer(dataclasses.replace(FAST, speed=8.0, max_model_len=128, max_num_seqs=4)) as sim:
        operator = Operator(tmp_path, sim.url)
        measured = plan(cell={"concurrency": [4]})
        before = await qualify(Request(policy.Backend(url=sim.url), measured, out), Quiet())
        await sim.restart(max_model_len=512, max_num_seqs=16)
        verdict = await operator.evaluates(before.path, shape, "--plan=settle.yaml", code=1)
        assert (verdict["final_decision"], verdict["reason_class"]) == ("DEFER", "IDENTITY_CHANGED")
        assert {"max_model_len", "batching_limits"} <= set(verdict["triggers"])
        assert verdict["plan"] == "settle.yaml"
        calmed(tmp_path / "settle.yaml")
        words = ("--backend", sim.url, "--plan", "settle.yaml", "--out", "records")
        after = of(out, answer := await operator.types("qualify", *words))
        settled = await operator.evaluates(Path(answer["path"]), shape)
        assert (settled["final_decision"], settled["reason_class"]) == ("PASS", "QUALIFIED"), settled
        unnoted = RecordStore(tmp_path / "unnoted").put(after.model_copy(update={"security_boundary_note": None}))
        seen_now = await operator.evaluates(tmp_path / "unnoted" / f"{unnoted}.json", shape)
        assert (seen_now["final_decision"], seen_now["security_boundary_state"]) == ("PASS", "RECORDED")
        assert "Tried with GET only" in seen_now["security_boundary_now"]["api_key_covers"]
    assert after.identity.model_revision == before.record.identity.model_revision
    assert after.supersedes is not None and after.supersedes.record == before.record_id
    assert {"model.max_model_len", "scheduler.max_num_seqs"} <= set(after.supersedes.changed)
    assert after.supersedes.rebuilt
