"""Plans: what ships, what is refused, and which sizes they send in which company."""

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.qualify import plan as plans
from gateway.qualify import sizes
from gateway.qualify.plan import Cell, Mix, PlanError, TokenRange
from tests.qualify.support import plan

ROOT = Path(__file__).parents[2]


def test_the_shipped_plans_are_the_files_under_policies() -> None:
    assert plans.shipped() == ("quick", "release", "standard")
    for name in plans.shipped():
        assert plans.load(name) == plans.load(str(ROOT / "policies" / "plans" / f"{name}.yaml"))


def test_quick_is_about_a_minute_and_release_is_long() -> None:
    assert sum(step.seconds for step in plans.steps(plans.load("quick"))) <= 70
    release = plans.load("release")
    assert release.repeats >= 3
    assert sum(step.seconds for step in plans.steps(release)) >= 600


@pytest.mark.parametrize("name", ["quick", "standard", "release"])
def test_every_shipped_level_can_support_a_bound_on_p95_even_in_lockstep(name: str) -> None:
    chosen = plans.load(name)
    for cell in chosen.cells:
        for level in cell.concurrency:
            assert cell.per_repeat(level, chosen.repeats) * chosen.repeats / level >= 59


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("schema: plimsoll-plan/v1\nname: x\ncells: []", "cells"),
        ("schema: plimsoll-plan/v1\nname: x\ncells: [{input_tokens: {min: 1, max: 2}, concurrency: [1]}]", "cells.0"),
        ("schema: plimsoll-plan/v2\nname: x\ncells: []", "schema"),
        ("[]", "plan"),
        ("{", "not YAML"),
        ("schema: plimsoll-plan/v1\nname: x\nrepeat: 3\ncells: []", "repeat"),
    ],
)
def test_a_bad_plan_is_refused_by_field(text: str, field: str) -> None:
    with pytest.raises(PlanError, match=field):
        plans.parse(text.encode())


@pytest.mark.parametrize(
    "cell",
    [
        {"concurrency": [4, 1]},
        {"concurrency": [0]},
        {"input_tokens": {"min": 5, "max": 4}},
        {"input_tokens": {"min": 0, "max": 4}},
        {"prefix_reuse": {"shared_prefix": 64}},
        {"body": {"max_tokens": 3}},
        {"min_seconds": 60},
        {"output_tokens": {"min": 0, "max": 4}},
    ],
)
def test_an_impossible_cell_is_refused(cell: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"validation error"):
        plan(cell=cell)


def test_a_missing_plan_names_the_shipped_ones() -> None:
    with pytest.raises(PlanError, match="quick, release, standard"):
        plans.load("nothing-of-that-name")


def test_features_follow_from_the_request_body() -> None:
    cell = plan(cell={"body": {"logprobs": 5, "presence_penalty": 0.5, "temperature": 0.2}, "features": ["lora"]}).cells[0]
    assert cell.all_features == ("logprobs", "lora", "penalties")
    assert plan(cell={"body": {"logprobs": 0, "top_logprobs": None}}).cells[0].all_features == ()


def test_the_digest_tells_plans_apart() -> None:
    assert plan().digest == plan().digest
    assert plan().digest != plan(seed=8).digest


@given(
    st.integers(1, 500), st.integers(0, 500), st.integers(1, 300), st.integers(0, 300), st.integers(1, 33), st.integers(0, 10_000)
)
def test_every_cycle_meets_the_corners_and_stays_in_the_box(
    low: int, wide: int, least: int, tall: int, concurrency: int, seed: int
) -> None:
    cell = Cell(
        input_tokens=TokenRange(min=low, max=low + wide), output_tokens=TokenRange(min=least, max=least + tall),
        concurrency=(concurrency,), mix=Mix(uniform=2, opposite=1, largest=1),
    )  # fmt: skip
    waves = list(islice(sizes.waves(cell, concurrency, seed), 4 * 4))
    assert all(len(wave) == concurrency for wave in waves)
    flat = [size for wave in waves for size in wave]
    assert all(low <= size.input_tokens <= low + wide and least <= size.output_tokens <= least + tall for size in flat)
    full = [wave for wave in waves if wave[0].kind == "largest"]
    assert len(full) == 4
    assert all((size.input_tokens, size.output_tokens) == (low + wide, least + tall) for wave in full for size in wave)
    corners = {(size.input_tokens, size.output_tokens) for size in flat if size.kind == "opposite"}
    assert corners == {(a, b) for a in (low, low + wide) for b in (least, least + tall)}


@given(st.integers(2, 16), st.integers(0, 1000))
def test_opposite_corners_run_beside_each_other(concurrency: int, seed: int) -> None:
    cell = plan(cell={"concurrency": [concurrency]}).cells[0]
    for wave in islice(sizes.waves(cell, concurrency, seed), 8):
        if wave[0].kind == "opposite":
            met = {(size.input_tokens, size.output_tokens) for size in wave}
            assert {(64, 1), (1, 8)} <= met or {(64, 8), (1, 1)} <= met


def test_the_same_seed_gives_the_same_sizes() -> None:
    cell = plan().cells[0]
    first, again, other = (list(islice(sizes.waves(cell, 4, seed), 12)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_trace_is_read_in_order_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"input_tokens": 10, "output_tokens": 4, "prefix": "a", "prefix_tokens": 6}\n\n{"input_tokens": 3, "output_tokens": 1}\n'
    )
    cell = plan().cells[0]
    first, second = sizes.trace(path, cell)
    assert (first.input_tokens, first.prefix, first.prefix_tokens) == (10, "a", 6)
    assert (second.input_tokens, second.output_tokens, second.prefix) == (3, 1, None)
    for bad in (
        '{"input_tokens": 65, "output_tokens": 1}',
        '{"output_tokens": 1}',
        "[]",
        '{"input_tokens": 3, "output_tokens": 1, "prefix_tokens": 3}',
    ):
        path.write_text(bad)
        with pytest.raises(PlanError, match="line 1"):
            sizes.trace(path, cell)


def test_a_shared_prefix_is_in_every_size() -> None:
    cell = plan(cell={"prefix_reuse": {"shared_prefix": 16}, "input_tokens": {"min": 20, "max": 64}}).cells[0]
    assert cell.reuse == "shared_prefix:16"
    assert {size.prefix_tokens for wave in islice(sizes.waves(cell, 4, 1), 8) for size in wave} == {16}
