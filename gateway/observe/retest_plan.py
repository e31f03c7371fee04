"""From demand to a plan: which cells a qualification must measure so that a chosen share of what was refused would fit.

Owns the arithmetic. The plan is plain values in the schema of `plimsoll qualify`, which checks it again. Each of the d sizes
of a request is covered at 1 - (1 - share) / d, so that by the union bound all d together cover at least `share`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.observe.demand import Group
from gateway.observe.sizes import Sizes

_DIMENSIONS = 4  # input, output, sequences, concurrency
# For each feature, a request field that brings it about, with the smallest value that does.
FEATURE_BODIES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.1},
    "structured_output": {"structured_outputs": {"regex": "[a-z ]*"}},
}


class NoDemand(ValueError):
    """Nothing was asked for outside the slices, so there is nothing to plan."""


def covering(groups: Iterable[Group], share: float) -> dict[str, Any]:
    """The box that covers `share` (0..1) of the demand: task, features, input, output (tokens), concurrency (sequences).

    Features are the union of what was asked, for the commonest task. Raises NoDemand.
    """
    chosen = [group for group in groups if group.kinds]
    if not chosen:
        raise NoDemand("no request was turned away for its size, so there is no demand to cover")
    totals: dict[str, int] = {}
    for group in chosen:
        for (task, _), count in group.kinds.items():
            totals[task] = totals.get(task, 0) + count
    task = max(sorted(totals), key=lambda name: totals[name])
    features = sorted({f for group in chosen for (kind, names) in group.kinds if kind == task for f in names})
    each = 1 - (1 - share) / _DIMENSIONS
    return {
        "task": task,
        "features": features,
        "input": _covers([group.input for group in chosen], each) or 1,
        "output": _covers([group.output for group in chosen], each) or 0,
        "concurrency": max(
            _covers([group.sequences for group in chosen], each) or 1,
            _covers([group.concurrency for group in chosen], each) or 1,
        ),
        "requests_seen": sum(group.count for group in chosen),
    }


def plan(groups: Iterable[Group], share: float, model: str) -> dict[str, Any]:
    """A plan in the form that `plimsoll qualify --plan` reads, covering `share` of the demand. Raises NoDemand."""
    box = covering(groups, share)
    if box["task"] not in ("generate", "pool"):
        raise NoDemand(f"requests of task {box['task']} cannot be measured by a plan")
    features = [name for name in box["features"] if name in FEATURE_BODIES]
    left_out = [name for name in box["features"] if name not in FEATURE_BODIES and name != "lora"]
    cell: dict[str, Any] = {
        "task": box["task"],
        "features": ["lora"] if "lora" in box["features"] else [],
        "input_tokens": {"min": 1, "max": max(1, box["input"])},
        "concurrency": levels(box["concurrency"]),
        "body": {key: value for name in features for key, value in FEATURE_BODIES[name].items()},
    }
    if box["task"] == "generate":
        cell["output_tokens"] = {"min": 1, "max": max(1, box["output"])}
    text = f"Covers at least {share:.0%} of {box['requests_seen']} requests that left the measured slices of {model}."
    if left_out:
        text += f" Not covered, for a plan cannot make them: {', '.join(left_out)}."
    return {
        "schema": "plimsoll-plan/v1",
        "name": "retest",
        "description": text[:1000],
        "route": "completions" if box["task"] == "generate" else "embeddings",
        "cells": [cell],
    }


def levels(highest: int) -> list[int]:
    """Concurrency levels up to `highest`: powers of two, and the highest itself."""
    return [*(2**n for n in range(highest.bit_length()) if 2**n < highest), highest]


def _covers(sizes: Iterable[Sizes], share: float) -> int | None:
    merged = Sizes()
    for one in sizes:
        merged.merge(one)
    return merged.quantile(share)
