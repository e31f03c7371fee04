"""From a DEFER to a plan: what `plimsoll qualify` has to measure so that the same question can be answered.

Owns: which boxes are the evidence that is missing, and how many samples their verdict needs.
Promises: pure; nothing is planned where no measurement of the backend could settle the matter, and the reason is said.
Talks to: `evidence.verdict` for what failed, `plan` for the schema.

1. The target slice is always measured, from the smallest sizes up to its own, at rising concurrency.
2. Where the record as a whole is no evidence (another configuration, unknown provenance or warm-up, expired), or the policy
   names no target slice, its slices are rebuilt too, but for those that lie inside the target slice.
3. A slice is rebuilt with the prefix reuse it had only where the target names that regime, else without reuse.

Measuring settles the question, not in whose favour: a server that misses its limits misses them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.errors import PlimsollError
from gateway.evidence.identity import ObservedIdentity
from gateway.evidence.record import Record, Slice, instant
from gateway.evidence.states import Decision, Measurement, Provenance, Verdict
from gateway.evidence.target import Target
from gateway.observe.retest_plan import FEATURE_BODIES, levels
from gateway.qualify.plan import Plan
from gateway.qualify.stats import MIN_REPEATS, order_rank

_ROUTES = {"generate": ("completions", "chat"), "pool": ("embeddings",)}
_LEAST, _MOST = 0.8, 0.999  # the confidences a plan may ask
_USUAL = 0.95
_SHARED = re.compile(r"shared_prefix:[0-9]{1,9}")
_MAX_SECONDS = 600


class NoPlan(PlimsollError):
    """No measurement would settle it; the message says why."""


@dataclass(frozen=True, slots=True)
class Box:
    """Sizes in tokens to be measured as a mix, and the levels of concurrency."""

    task: str
    features: tuple[str, ...]
    reuse: str
    input: tuple[int, int]
    output: tuple[int, int]
    levels: tuple[int, ...]

    def contains(self, other: Box) -> bool:
        """Whether a population inside `other` is one inside this box."""
        same = (self.task, self.reuse) == (other.task, other.reuse) and set(other.features) <= set(self.features)
        ranges = ((self.input, other.input), (self.output, other.output))
        inside = all(mine[0] <= theirs[0] and theirs[1] <= mine[1] for mine, theirs in ranges)
        return same and inside and other.levels[-1] <= self.levels[-1]

    @property
    def text(self) -> str:
        """As people read it."""
        return f"{self.input[1]} in, {self.output[1]} out, {self.levels[-1]} at once"


def settling(record: Record, observed: ObservedIdentity | None, target: Target, verdict: Verdict, model: str) -> Plan:
    """The plan whose record would settle `verdict`, for the backend as `observed`, where `model` is the name it serves.

    Raises `NoPlan`.
    """
    found = _identified(observed, verdict)
    asked = _of_target(target)
    boxes: list[Box] = []
    left_out: list[str] = []
    for box in _wanted(record, target, verdict):
        problem = _problem(box, found)
        if problem is None and boxes and box.task != boxes[0].task:
            problem = f"task {box.task} is measured by a plan of its own"
        if problem is not None and box == asked:
            raise NoPlan(f"the target slice cannot be measured on this backend: {problem}")
        if problem is not None:
            left_out.append(f"{box.text} ({problem})")
        elif not any(other.contains(box) for other in boxes):
            boxes = [*(other for other in boxes if not box.contains(other)), box]
    if not boxes:
        raise NoPlan("none of the record's slices can be measured on this backend: " + "; ".join(left_out))
    try:
        return Plan.model_validate(_document(record, target, verdict, model, boxes, left_out))
    except ValidationError as error:
        raise NoPlan("no plan can hold it: " + "; ".join(e["msg"] for e in error.errors(include_url=False)[:3])) from error


def _identified(observed: ObservedIdentity | None, verdict: Verdict) -> ObservedIdentity:
    if verdict.final_decision is not Decision.DEFER:
        raise NoPlan(f"the verdict is {verdict.final_decision}: no measurement is missing")
    if observed is None:
        raise NoPlan("the backend's identity is not known: it has to be reached before it can be measured")
    if observed.source == "probed" or observed.identity.missing:
        raise NoPlan("what is measured on a backend whose identity is not known is evidence for nothing: attest or declare it")
    if observed.contradictions:
        raise NoPlan("the server contradicts its declared identity: correct the declaration first")
    return observed


def _wanted(record: Record, target: Target, verdict: Verdict) -> list[Box]:
    """The boxes by rules 1 to 3; one may lie inside another."""
    void = verdict.provenance_state is not Provenance.COMPLETE or verdict.measurement_state in (
        Measurement.WARMUP_UNKNOWN,
        Measurement.EXPIRED,
    )
    asked = _of_target(target)
    rebuilt = [_of_slice(each, target) for each in record.slices] if asked is None or void else []
    return rebuilt if asked is None else [asked, *rebuilt]


def _of_target(target: Target) -> Box | None:
    wanted = target.slice
    if wanted is None:
        return None
    output = (1, wanted.output) if target.task == "generate" else (0, 0)
    return Box(target.task, tuple(sorted(target.features)), "none", (1, wanted.input), output, tuple(levels(wanted.concurrency)))


def _of_slice(each: Slice, target: Target) -> Box:
    return Box(
        each.task,
        tuple(each.features),
        each.prefix_reuse if each.prefix_reuse in target.prefix_reuse else "none",
        (max(1, each.input_tokens.min), each.input_tokens.max),
        (each.output_tokens.min, each.output_tokens.max),
        tuple(level.concurrency for level in each.levels),
    )


def _problem(box: Box, observed: ObservedIdentity) -> str | None:
    """Why a plan cannot have this box on this backend."""
    if box.task not in _ROUTES:
        return f"requests of task {box.task} cannot be measured by a plan"
    if box.task == "generate" and box.output[1] < 1:
        return "a generation has at least one token"
    if strange := [name for name in box.features if name not in FEATURE_BODIES and name != "lora"]:
        return f"a plan cannot make requests with {', '.join(strange)}"
    if box.reuse != "none" and not _SHARED.fullmatch(box.reuse):
        return f"the requests of {box.reuse} are not in the record"
    model = observed.document.get("model")
    length = model.get("max_model_len") if isinstance(model, Mapping) else None
    if isinstance(length, int) and box.input[1] + box.output[1] > length:
        return f"{box.input[1] + box.output[1]} tokens, the server's max_model_len is {length}"
    return None


def _document(
    record: Record, target: Target, verdict: Verdict, model: str, boxes: list[Box], left_out: list[str]
) -> dict[str, Any]:
    task, confidence = boxes[0].task, min(_MOST, max(_LEAST, float(target.confidence or _USUAL)))
    route = record.protocol.route if record.protocol.route in _ROUTES[task] else _ROUTES[task][0]
    text = f"Would settle {verdict.reason_class}: " + "; ".join(box.text for box in boxes) + "."
    if left_out:
        text += f" Left out: {'; '.join(left_out)}."
    document: dict[str, Any] = {
        "schema": "plimsoll-plan/v1",
        "name": "settle",
        "description": text[:1000],
        "route": route,
        "model": model,
        "repeats": max(MIN_REPEATS, min(record.protocol.repeats, 100)),
        "confidence": confidence,
        "cells": [dict(_cell(box, confidence)) for box in boxes],
    }
    if record.valid_until is not None:
        life = instant(record.valid_until) - instant(record.protocol.started_at)
        document["valid_days"] = min(3650, max(1, round(life.total_seconds() / 86_400)))
    return document


def _cell(box: Box, confidence: float) -> Iterator[tuple[str, Any]]:
    least = _samples_for_p95(confidence)
    yield "task", box.task
    if "lora" in box.features:
        yield "features", ["lora"]
    if box.reuse != "none":
        yield "prefix_reuse", {"shared_prefix": int(box.reuse.removeprefix("shared_prefix:"))}
    yield "input_tokens", {"min": box.input[0], "max": box.input[1]}
    if box.task == "generate":
        yield "output_tokens", {"min": max(1, box.output[0]), "max": box.output[1]}
    yield "concurrency", list(box.levels)
    # Requests in lockstep are worth one a wave; half as many again, for the waves' own kinds and for failures.
    yield "requests", 3 * least
    yield "batches", math.ceil(1.5 * least)
    yield "max_seconds", _MAX_SECONDS
    body = {key: value for name in box.features for key, value in FEATURE_BODIES.get(name, {}).items()}
    if body:
        yield "body", body


def _samples_for_p95(confidence: float) -> int:
    """The least number of independent samples whose largest bounds their p95."""
    return next(n for n in range(1, 100_000) if order_rank(n, 0.95, confidence) is not None)
