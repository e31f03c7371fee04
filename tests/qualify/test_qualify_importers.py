"""Other tools' results: what is taken over, what is corrected, what is refused."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from gateway.evidence.record import load
from gateway.evidence.target import Target
from gateway.evidence.verdict import evaluate
from gateway.qualify.import_command import import_results
from gateway.qualify.importers import ImportFailed, guidellm_run, runs, slice_of_runs, vllm_run
from gateway.qualify.report import as_measured

NOW = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)


def vllm(n: int = 101, concurrency: int = 4, **changes: Any) -> dict[str, Any]:
    """A result of vllm bench serve: `concurrency` at once, each 0.2 s long with 8 tokens, the first after 50 ms."""
    return {
        "date": "20261130-120000", "backend": "openai", "model_id": "tiny", "num_prompts": n, "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": 64, "duration": n * 0.05, "completed": n, "failed": 0, "request_throughput": 20.0,
        "max_concurrent_requests": 999, "input_lens": [16] * n, "output_lens": [8] * n, "ttfts": [0.05] * n,
        "itls": [[0.15 / 7] * 7 for _ in range(n)], "start_times": [1000 + (i // concurrency) * 0.21 for i in range(n)],
        "latencies": [0.2] * n, "errors": [""] * n, "generated_texts": ["x"] * n, **changes,
    }  # fmt: skip


def guidellm(n: int = 60, **changes: Any) -> dict[str, Any]:
    """One benchmark of a GuideLLM report: two at once."""
    rows = [
        {
            "request_start_time": 1_795_000_000 + (i // 2) * 0.3, "request_end_time": 1_795_000_000 + (i // 2) * 0.3 + 0.25,
            "request_latency": 0.25, "prompt_tokens": 32, "output_tokens": 6, "time_to_first_token_ms": 40.0,
        }
        for i in range(n)
    ]  # fmt: skip
    cut = [{"request_start_time": None, "request_end_time": 1_795_000_100.0}]
    return {
        "config": {"strategy": {"type_": "concurrent", "streams": 2}}, "start_time": 1_795_000_000.0,
        "metrics": {"request_totals": {"successful": n, "errored": 0, "incomplete": 1, "total": n + 1}},
        "requests": {"successful": rows, "errored": [], "incomplete": cut}, **changes,
    }  # fmt: skip


def test_concurrency_is_what_was_held_not_what_was_asked_for() -> None:
    run = vllm_run(vllm(concurrency=4))
    assert run.concurrency == 4
    assert run.arrival == "closed_loop"
    assert guidellm_run(guidellm()).concurrency == 2


def test_the_first_request_of_vllm_bench_is_left_out() -> None:
    run = vllm_run(vllm(101))
    assert len(run.samples) == 100
    assert any("first request" in note for note in run.notes)


def test_latencies_are_the_same_as_ours() -> None:
    one = vllm_run(vllm()).samples[0]
    assert one.ttft_ms == pytest.approx(50)
    assert one.e2e_ms == pytest.approx(200)
    assert one.tpot_ms == pytest.approx(150 / 7)
    assert len(one.itl_ms) == 7
    without = vllm()
    del without["latencies"]
    assert vllm_run(without).samples[0].e2e_ms == pytest.approx(200)
    other = guidellm_run(guidellm()).samples[0]
    assert (other.ttft_ms, other.e2e_ms) == (pytest.approx(40, abs=1e-3), pytest.approx(250, abs=1e-3))


def test_an_error_in_the_middle_of_a_stream_is_not_a_success() -> None:
    lengths = [8] * 101
    lengths[50] = 3  # vllm bench calls this one completed
    run = vllm_run(vllm(output_lens=lengths))
    assert [sample.status for sample in run.samples].count("error") == 1
    assert any("shorter than asked" in note for note in run.notes)
    mixed = [5 + i % 4 for i in range(101)]
    assert all(sample.status == "ok" for sample in vllm_run(vllm(output_lens=mixed)).samples)
    told = vllm_run(vllm(output_lens=mixed), least_output=6)
    assert [sample.status for sample in told.samples].count("error") == 25


def test_failed_requests_are_errors_with_their_last_line() -> None:
    errors = [""] * 101
    errors[7] = "Traceback ...\nConnectionResetError: gone"
    run = vllm_run(vllm(errors=errors, output_lens=[8] * 7 + [0] + [8] * 93))
    bad = [sample for sample in run.samples if sample.status == "error"]
    assert [sample.detail for sample in bad] == ["ConnectionResetError: gone"]


def test_what_a_run_cut_off_is_cancelled() -> None:
    made, _ = slice_of_runs([guidellm_run(guidellm())], confidence=0.95, prefix_reuse="none")
    assert (made.levels[0].requests, made.levels[0].cancelled, made.levels[0].errors) == (61, 1, 0)


def test_a_slice_claims_exactly_what_was_sent() -> None:
    made, samples = slice_of_runs([vllm_run(vllm()) for _ in range(3)], confidence=0.95, prefix_reuse="none")
    assert (made.input_tokens.min, made.input_tokens.max, made.output_tokens.min, made.output_tokens.max) == (16, 16, 8, 8)
    assert made.levels[0].e2e_ms.p95_upper is not None
    assert len(samples) == 300
    alone, _ = slice_of_runs([vllm_run(vllm())], confidence=0.95, prefix_reuse="none")
    assert alone.levels[0].e2e_ms.p95_upper is None  # one run says nothing of the next


def test_levels_of_several_runs_become_one_slice() -> None:
    found = [vllm_run(vllm(concurrency=c)) for c in (2, 4, 8)]
    made, _ = slice_of_runs(found, confidence=0.95, prefix_reuse="none")
    assert [level.concurrency for level in made.levels] == [2, 4, 8]
    unlike = [vllm_run(vllm(concurrency=2)), vllm_run(vllm(concurrency=4, input_lens=[900] * 101))]
    with pytest.raises(ImportFailed, match="no sizes are common"):
        slice_of_runs(unlike, confidence=0.95, prefix_reuse="none")


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"request_throughput": 1.0}, "--save-detailed"),
        (vllm(ramp_up_strategy="linear"), "ramped"),
        (vllm(ttfts=[0.1]), "do not belong together"),
        ({"benchmarks": [guidellm(metrics={"request_totals": {"successful": 5000}})]}, "only some of the successful"),
        ({"benchmarks": [{"requests": {"successful": [{}]}}]}, "cannot be read"),
        ({"benchmarks": [3]}, "not an object"),
        ({}, "neither"),
        ([], "neither"),
    ],
)
def test_what_cannot_become_a_record_is_refused_with_the_reason(document: object, why: str) -> None:
    with pytest.raises(ImportFailed, match=why):
        runs(document)


def test_the_command_makes_a_record_that_is_honest_about_what_it_does_not_know(tmp_path: Path) -> None:
    configuration = {"model": {"id": "tiny"}}
    from gateway.evidence.canonical import digest

    identity = tmp_path / "identity.json"
    identity.write_text(json.dumps({
        "model_revision": "r1", "vllm_version": "0.32.0", "hardware_profile": "one",
        "server_configuration_hash": digest(configuration), "configuration": configuration,
    }))  # fmt: skip
    files = []
    for place in range(3):
        files.append(tmp_path / f"result-{place}.json")
        files[-1].write_text(json.dumps(vllm()))
    app = Typer()
    app.command()(import_results)
    common = [*map(str, files), "--out", str(tmp_path / "records"), "--identity", str(identity)]
    first = CliRunner().invoke(app, common)
    assert first.exit_code == 0, first.output
    record = load(Path(first.stdout.splitlines()[0]).read_bytes())
    assert (record.protocol.warmup_state, record.slices[0].prefix_reuse, record.protocol.repeats) == ("unknown", "unknown", 3)
    assert record.protocol.identity_source == "declared"
    verdict = evaluate(record, as_measured(record), Target(confidence=None), NOW)
    assert verdict.final_decision == "DEFER"
    stated = CliRunner().invoke(app, [*common, "--warmup", "completed", "--prefix-reuse", "none"])
    good = load(Path(stated.stdout.splitlines()[0]).read_bytes())
    better = evaluate(good, as_measured(good), Target(confidence=None), NOW)
    assert better.final_decision == "CONDITIONAL"  # declared, and without a note on the boundary
    assert CliRunner().invoke(app, [*common, "--warmup", "probably"]).exit_code == 2
    assert CliRunner().invoke(app, common[:-2]).exit_code == 2
