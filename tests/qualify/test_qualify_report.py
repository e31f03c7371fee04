"""The report is one page that needs nothing else, escapes what it shows, and says what it does not cover."""

import datetime as dt
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from gateway.evidence.canonical import digest
from gateway.evidence.record import ALL_TRIGGERS, SCHEMA, BoundaryNote, Protocol, Record, RecordIdentity, Samples
from gateway.evidence.store import RecordStore
from gateway.evidence.target import Limits, Target
from gateway.qualify import samples as raw
from gateway.qualify.levels import Measured, slice_of
from gateway.qualify.plots import middles
from gateway.qualify.report import Report, report
from gateway.qualify.report_command import report as report_command
from gateway.qualify.samples import RawSample
from tests.qualify.support import plan, sample

NOW = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def samples() -> list[RawSample]:
    return [
        sample(
            concurrency=c, repeat=r, wave=i // c, index=i, start=float(i), first_at=i + 0.01 + 0.0001 * (i % 13), in_flight=c,
            last_at=i + 0.05 * c + 0.001 * (i % 29), input_tokens=1 + i % 64, output_tokens=1 + i % 8,
            kind=("uniform", "largest")[i // c % 2],
        )
        for c in (1, 4)
        for r in range(3)
        for i in range(60 * c)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def record(samples: list[RawSample]) -> Record:
    measured = [Measured(c, tuple(s for s in samples if s.concurrency == c)) for c in (1, 4)]
    one = slice_of(plan().cells[0], measured, 0.95)
    assert one is not None
    configuration = {"model": {"id": HOSTILE, "max_model_len": 128}}
    return Record(
        schema_=SCHEMA,
        identity=RecordIdentity(
            model_revision="r1", vllm_version="0.32.0", server_configuration_hash=digest(configuration), hardware_profile=HOSTILE
        ),
        configuration=configuration,
        capabilities={"prefix_caching": True},
        protocol=Protocol(
            tool="test", started_at="2026-11-30T12:00:00Z", warmup_state="completed", arrival="closed_loop", dataset="d",
            repeats=3, path="direct", confidence="0.95",
        ),
        slices=(one,),
        security_boundary_note=BoundaryNote(api_key_covers=HOSTILE, external_boundary="loopback"),
        retest_triggers=ALL_TRIGGERS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(record: Record, samples: list[RawSample]) -> Report:
    return report(record, samples, Target(limits=Limits(e2e_ms_p95=Decimal(100), ttft_ms_p95=Decimal(900))), NOW, png=True)


@pytest.fixture(scope="module")
def bare(record: Record) -> Report:
    """Without raw samples and without a target."""
    return report(record, [], None, NOW)


def test_the_page_refers_to_nothing_outside(made: Report) -> None:
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:image/png;base64,)[^\"']*", made.html)
    assert "@import" not in made.html
    assert not re.findall(r"url\((?!#)", made.html)


def test_what_a_record_says_is_escaped(made: Report) -> None:
    assert HOSTILE not in made.html
    assert made.html.count("&lt;script&gt;") >= 3


def test_every_part_is_there(made: Report) -> None:
    for heading in ("Verdict", "What was measured", "How it behaves", "What it does not cover", "Errors", "How it was measured"):
        assert f"<h2>{heading}</h2>" in made.html
    assert {picture.name for picture in made.pictures} == {
        "slices", "latency-e2e", "latency-ttft", "latency-tpot", "throughput", "ttft-input", "distribution",
    }  # fmt: skip
    assert all((picture.png or b"").startswith(b"\x89PNG") and picture.svg.startswith("<svg") for picture in made.pictures)
    assert made.html.count("<svg") == 7


def test_a_line_of_medians_goes_through_a_crowded_corner_once() -> None:
    x = np.array([1.0] * 30 + list(range(2, 40)) + [64.0] * 30)
    points = middles(x, x * 2)
    assert [place for place, _ in points] == sorted({place for place, _ in points})
    assert points[0] == (1, 2)
    assert points[-1] == (64, 128)
    assert middles(np.array([]), np.array([])) == []


def test_the_limit_and_the_verdict_are_shown(made: Report) -> None:
    assert "DEFER" in made.html
    assert "slo missed" in made.html
    assert "limit on p95: 100 ms" in made.html
    assert "limit on p95: 900 ms" in made.html


def test_without_a_policy_no_limit_is_judged(bare: Report) -> None:
    page = bare.html
    assert "no limit is judged" in page
    assert "limit on p95" not in page
    assert "PASS" in page


def test_what_is_not_covered_has_the_numbers_of_the_record(made: Report, record: Record) -> None:
    assert f"inputs beyond {record.slices[0].input_tokens.max} tokens" in made.html
    assert "more than 4 sequences at once" in made.html
    assert "structured output" in made.html


def test_a_record_without_samples_has_a_report_too(bare: Report) -> None:
    assert {picture.name for picture in bare.pictures} >= {"slices", "latency-e2e", "throughput"}
    assert "raw samples were not at hand" in bare.html


def test_what_fell_short_of_the_plan_is_said(record: Record, bare: Report) -> None:
    note = "cell 1, 4 at once: 12 of 192 requests were sent within max_seconds (1)"
    short = record.model_copy(update={"protocol": record.protocol.model_copy(update={"notes": (note,)})})
    assert note in report(short, [], None, NOW).html
    assert "Short of its plan" not in bare.html


def test_failures_are_listed(record: Record) -> None:
    bad = sample(status="error", error="status", detail="503: busy")
    assert "503: busy" in report(record, [bad], None, NOW).html


def test_the_same_record_gives_the_same_page(record: Record, bare: Report) -> None:
    assert report(record, [], None, NOW).html == bare.html


def test_the_command_writes_page_and_pictures_and_tells_of_changed_samples(
    tmp_path: Path, record: Record, samples: list[RawSample]
) -> None:
    store = RecordStore(tmp_path)
    name, packed = raw.encode(samples)
    kept = record.model_copy(update={"samples": Samples(file=name, sha256=store.put_samples(name, packed))})
    path = tmp_path / f"{store.put(kept)}.json"
    app = Typer()
    app.command()(report_command)
    result = CliRunner().invoke(app, [str(path), "--png", str(tmp_path / "png")])
    assert result.exit_code == 0, result.output
    assert path.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert len(list((tmp_path / "png").glob("*.png"))) == 7
    (tmp_path / name).write_bytes(packed + b"x")
    changed = CliRunner().invoke(app, [str(path), "--out", str(tmp_path / "second.html")])
    assert "digest differs" in changed.stderr
    assert "raw samples were not at hand" in (tmp_path / "second.html").read_text()
