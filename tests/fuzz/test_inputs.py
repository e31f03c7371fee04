"""Damaged bytes at every border: no exception, no 500, nothing that hangs, no slot that stays taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .campaign import run, seeded
from .mutations import SEEDS
from .targets import TARGETS

QUICK = {"requests": 1200, "repeats": 300, "bodies": 2500, "counting": 1500, "headers": 4000, "events": 6000, "answers": 6000}
ASKS = b'\x02\x00{"model":"tiny","messages":[{"role":"user","content":"x"}],"thinking":%b}'
FOUND = [("counting", ASKS % value) for value in (b'"x"', b"[1]", b"5", b'{"type":[]}')]  # inputs that broke a promise once


@pytest.mark.parametrize(("target", "data"), FOUND)
def test_what_was_found_before(target, data):
    TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_inputs(target):
    seeded(target, 1, QUICK[target])


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target):
    @settings(max_examples=60, deadline=None, database=None)
    @given(st.binary(max_size=200) | st.sampled_from(SEEDS[target]))
    def play(data: bytes) -> None:
        TARGETS[target](data)

    play()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_small_campaign():
    """Every way on every target, as `make fuzz` does with a million."""
    counts = run(20_000, 3)
    assert sum(counts.values()) >= 20_000
    assert all(count > 0 for (way, _), count in counts.items() if way != "atheris")
