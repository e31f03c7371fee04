"""What the comparison with `vllm bench serve` calls agreement, and which of its results it takes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.qualify import plan as plans
from tests.bench.agreement import METRICS, SHAPES, NoRun, Run, Shape, compare, of_result, plan, spread

SHAPE = Shape(input=64, output=8, concurrency=2, requests=3)


def run(value: float) -> Run:
    return dict.fromkeys(METRICS, value)


def result(**changes: Any) -> dict[str, Any]:
    percentiles = {f"{p}_{name}_ms": 10.0 for p in ("p50", "p95") for name in ("ttft", "tpot", "e2el")}
    rates = {"request_throughput": 4.0, "output_throughput": 32.0}
    lists = {"output_lens": [8, 8, 8], "errors": ["", "", ""]}
    return {"completed": 3, "total_input_tokens": 193, **percentiles, **rates, **lists, **changes}


def test_the_spread_is_the_usual_difference_between_two_runs() -> None:
    assert spread([100, 100, 100]) == 0
    assert spread([100, 110]) == pytest.approx(10 / 105)
    assert spread([100, 100, 100, 100, 200]) == 0, "one odd run excuses nothing"


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [
        ([100, 100, 100], [104, 104, 104], True),
        ([100, 100, 100], [94, 94, 94], False),
        ([100, 100, 100], [80, 94, 108], True),  # that tool differs from itself by more
        ([100, 100, 100], [80, 81, 82], False),
    ],
)
def test_within_five_per_cent_or_the_spread(ours: list[float], theirs: list[float], agrees: bool) -> None:
    lines = compare([run(each) for each in ours], [run(each) for each in theirs])
    assert [line.metric for line in lines] == list(METRICS)
    assert {line.agrees for line in lines} == {agrees}


def test_a_result_has_every_metric() -> None:
    assert set(of_result(result(), SHAPE)) == set(METRICS)


@pytest.mark.parametrize(
    "changes",
    [
        {"errors": ["", "broken off", ""]},
        {"output_lens": [8, 5, 8]},
        {"completed": 2},
        {"total_input_tokens": 220},
    ],
)
def test_a_run_that_did_not_send_what_was_asked_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(NoRun):
        of_result(result(**changes), SHAPE)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_sends_as_many_as_the_other_tool(shape: Shape) -> None:
    (step,) = plans.steps(plans.Plan.model_validate(plan(shape)))
    assert (step.requests, step.concurrency) == (shape.requests, shape.concurrency)
    assert step.output_tokens == shape.requests * shape.output
