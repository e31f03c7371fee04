"""Damaged bytes at every border: no exception, no 500, nothing that hangs, no slot that stays taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .mutations import SEEDS, inputs
from .targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"requests": 1500, "bodies": 2500, "headers": 4000, "events": 6000, "answers": 6000}
# Together more than a million, with what the guided fuzzer adds.
SOAK = {"requests": 60_000, "bodies": 120_000, "headers": 200_000, "events": 300_000, "answers": 300_000}
GUIDED = {"requests": 10_000, "bodies": 30_000, "headers": 50_000, "events": 60_000, "answers": 60_000}


def run(target: str, seed: int, count: int) -> None:
    play = TARGETS[target]
    for data in inputs(target, seed, count):
        try:
            play(data)
        except BaseException as error:
            error.add_note(f"{target} seed {seed}: {data!r}")
            raise


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_inputs(target):
    run(target, 1, QUICK[target])


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target):
    @settings(max_examples=60, deadline=None, database=None)
    @given(st.binary(max_size=200) | st.sampled_from(SEEDS[target]))
    def play(data: bytes) -> None:
        TARGETS[target](data)

    play()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_many_damaged_inputs(target):
    run(target, int(os.environ.get("FUZZ_SEED", "2")), SOAK[target])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_guided_by_coverage(target, tmp_path):
    """Atheris follows the branches of our own code; where it is not to be had, the fuzzer above has to do."""
    pytest.importorskip("atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [sys.executable, "-m", "tests.fuzz.guided", target, f"-runs={GUIDED[target]}", "-timeout=300", "-max_len=4096",
               f"-artifact_prefix={tmp_path}/", str(corpus)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Done {GUIDED[target]}" in done.stderr, done.stderr[-1000:]
