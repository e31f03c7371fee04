"""What stands before a backend: open inside an envelope, or closed for a reason. One pure decision.

Owns the step from evidence to admission: an observation of a backend, the records in the store and what the models that
use the backend ask of them become a `Gate`. Promises: nothing opens that the verdict does not carry; the first of the rules
below that holds decides; what is unknown closes. Talks to: `evidence.verdict` for the verdicts, `envelope` for the boxes.

1. Nothing listens, or no identity was ever learned: backend_unavailable.
2. Two configurations were alive at once behind the URL: mixed_identity.
3. It answers, but attests nothing: configuration_changed when it was open before, else no_qualified_record.
4. No record is of its configuration hash: configuration_changed, naming the fields that differ from the record that was in
   force before (or, at the start, from a record of the same model); no_qualified_record when there is none to compare with.
5. No slice qualifies for every model that uses it: no_qualified_record, with the first reason.
6. Requests of others are in flight and the policy closes on that: backend_not_exclusive.
7. An operator has taken it out: backend_unavailable.
8. The engine has started since and is not ready yet (tokenizer, the record's warm-up): backend_unavailable.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gateway.errors import Reason, Refusal
from gateway.evidence.identity import FieldChange, ObservedIdentity, diff, triggers_of
from gateway.evidence.record import Record
from gateway.evidence.signing import SignatureError, require
from gateway.evidence.states import Verdict
from gateway.evidence.store import StoreReport
from gateway.evidence.target import Target
from gateway.evidence.verdict import QualifiedSlice, envelope_slices, evaluate
from gateway.flow.demand import Closed, Gate, Open
from gateway.flow.envelope import Box, Envelope
from gateway.forward.watch import Observation

CLOSED_RETRY_S = 30.0
SOON_S = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """What one model asks of a backend's evidence. `token_budget`: a number of tokens, what is attested, or no budget."""

    target: Target
    require_signature: tuple[str, ...] | None = None
    token_budget: Literal["attested"] | int | None = "attested"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One record held against one backend for one model; `opens` is the number of slices that open the gate."""

    model: str
    record: str
    verdict: Verdict
    opens: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The gate, and what led to it: the judgement on every record of this hash, the fields that changed, their triggers."""

    gate: Gate
    judgements: tuple[Judgement, ...] = ()
    changes: tuple[FieldChange, ...] = ()
    triggers: tuple[str, ...] = ()
    record: Record | None = None  # of this hash, where there is one; the warm-up and later comparisons follow it
    needs_preparation: bool = False  # nothing else keeps the gate closed
    detail: str | None = None  # for operators: what callers are not told, such as addresses and values


def decide(
    seen: Observation,
    store: StoreReport,
    views: Mapping[str, View],
    *,
    previous: Record | None,
    foreign_closes: bool,
    ready: bool,
    drained: bool,
    now: dt.datetime,
) -> GateDecision:
    """The gate of one backend at wall time `now`. `previous`: the record in force when it was last open, None when never."""
    if seen.identity is None and not seen.reachable:
        return _closed(Reason.BACKEND_UNAVAILABLE, "the backend cannot be reached", SOON_S, detail=seen.problem)
    if seen.mixed:
        text = f"{len(seen.mixed)} different configurations answer as one backend"
        return _closed(Reason.MIXED_IDENTITY, text, detail=", ".join(seen.mixed))
    if seen.identity is None:
        reason = Reason.CONFIGURATION_CHANGED if previous is not None else Reason.NO_QUALIFIED_RECORD
        triggers = ("server_configuration_hash",) if previous is not None else ()
        return _closed(reason, "the backend shows no usable identity", triggers=triggers, detail=seen.problem)
    of_hash = {name: record for name, record in store.records.items() if _hash(record) == seen.identity.hash is not None}
    if not of_hash:
        return _no_record(seen, store, previous)
    judgements, qualified = _judge(seen, store, of_hash, views, now)
    record = next(iter(of_hash.values()))
    if not qualified:
        text = "no slice of its records qualifies: " + _reasons(judgements)
        changes = judgements[0].verdict.changes if judgements else ()
        return _closed(
            Reason.NO_QUALIFIED_RECORD, text, judgements=judgements, changes=changes, record=record, detail=_why(judgements)
        )
    if seen.foreign and foreign_closes:
        text = f"{seen.foreign} requests that no gateway sent are in flight on the backend: it is not measured with them"
        return _closed(Reason.BACKEND_NOT_EXCLUSIVE, text, SOON_S, judgements=judgements, record=record)
    if drained:
        text = "an operator has taken the backend out of service"
        return _closed(Reason.BACKEND_UNAVAILABLE, text, judgements=judgements, record=record)
    if not ready:
        text = "the engine is new here: its tokenizer is fetched and the warm-up of its record is run"
        closed = _closed(Reason.BACKEND_UNAVAILABLE, text, SOON_S, judgements=judgements, record=record)
        return replace(closed, needs_preparation=True)
    envelope = Envelope(qualified, _budget(seen, views), seen.identity.block_size or 16)
    return GateDecision(Open(envelope, seen.identity.hash or ""), judgements, record=record)


def _judge(
    seen: Observation, store: StoreReport, records: Mapping[str, Record], views: Mapping[str, View], now: dt.datetime
) -> tuple[tuple[Judgement, ...], tuple[Box, ...]]:
    """Every record for every model, and the boxes that qualify for all of them: what is in flight belongs to the backend."""
    judgements: list[Judgement] = []
    common: set[Box] | None = None
    for model, view in views.items():
        boxes: set[Box] = set()
        for name, record in records.items():
            judgement, slices = judged(model, view, name, record, seen.identity, store, now)
            judgements.append(judgement)
            boxes.update(_box(each) for each in slices)
        common = boxes if common is None else common & boxes
    return tuple(judgements), tuple(common or ())


def judged(
    model: str, view: View, name: str, record: Record, identity: ObservedIdentity | None, store: StoreReport, now: dt.datetime
) -> tuple[Judgement, tuple[QualifiedSlice, ...]]:
    """One record held against a backend seen as `identity` (None: not known) for one model, and its slices that open the gate."""
    problem = _signature_problem(record, store, name, view)
    slices = () if problem else envelope_slices(record, identity, view.target, now)
    return Judgement(model, name, evaluate(record, identity, view.target, now), len(slices), problem), slices


def _signature_problem(record: Record, store: StoreReport, name: str, view: View) -> str | None:
    if view.require_signature is None:
        return None
    try:
        require(record, store.signatures.get(name, ()), view.require_signature)
    except SignatureError as error:
        return str(error)
    return None


def _no_record(seen: Observation, store: StoreReport, previous: Record | None) -> GateDecision:
    identity = seen.identity
    if identity is None:  # the caller has looked
        raise ValueError("an identity is needed")
    shown = (identity.hash or "an unknown hash")[:23]
    before = previous or next(
        (r for r in store.records.values() if r.identity.model_revision == identity.identity.model_revision is not None), None
    )
    if identity.hash is None:
        text = "the configuration hash is not known from stock endpoints alone: unknown " + ", ".join(identity.unknown[:6])
        return _closed(Reason.NO_QUALIFIED_RECORD, text)
    if before is None:
        return _closed(Reason.NO_QUALIFIED_RECORD, f"no record was measured on the configuration {shown}")
    changes = diff(before.configuration, identity.document)
    named = ", ".join(change.field for change in changes[:6]) or "the documents cannot be compared"
    text = f"the backend's configuration is not the measured one; what differs: {named}"
    detail = f"{shown}: " + "; ".join(str(change) for change in changes)
    triggers = triggers_of(changes) or ("server_configuration_hash",)
    return _closed(Reason.CONFIGURATION_CHANGED, text, changes=changes, triggers=triggers, detail=detail)


def _closed(
    reason: Reason,
    message: str,
    retry_after_s: float = CLOSED_RETRY_S,
    *,
    judgements: tuple[Judgement, ...] = (),
    changes: tuple[FieldChange, ...] = (),
    triggers: tuple[str, ...] = (),
    record: Record | None = None,
    detail: str | None = None,
) -> GateDecision:
    refusal = Refusal(reason, message, retry_after_s=retry_after_s)
    return GateDecision(Closed(refusal), judgements, changes, tuple(triggers), record, detail=detail)


def _reasons(judgements: tuple[Judgement, ...]) -> str:
    """In the words of the verdict, without names or numbers: what a caller may know."""
    found = {"SIGNATURE" if j.problem else str(j.verdict.reason_class) for j in judgements}
    return ", ".join(sorted(found)) or "it serves no model"


def _why(judgements: tuple[Judgement, ...]) -> str:
    reasons = [
        f"{j.model}, record {j.record[:16]}: {j.problem or '; '.join((str(j.verdict.reason_class), *j.verdict.details[:3]))}"
        for j in judgements
    ]
    return " | ".join(reasons[:4]) or "no model of the policy uses it"


def _box(each: QualifiedSlice) -> Box:
    bound = float(each.e2e_p95_ms) / 1000 if each.e2e_p95_ms is not None else None
    return Box(
        each.task, each.features, each.input_min, each.input_max, each.output_min, each.output_max,
        each.concurrency, each.record, bound, each.prefix_reuse,
    )  # fmt: skip


def _budget(seen: Observation, views: Mapping[str, View]) -> int | None:
    """The tightest of the models' budgets, in tokens; None when none is known or wanted."""
    attested = seen.identity.kv_cache_tokens if seen.identity is not None else None
    wanted = [attested if view.token_budget == "attested" else view.token_budget for view in views.values()]
    return min((budget for budget in wanted if budget is not None), default=None)


def _hash(record: Record) -> str | None:
    return record.identity.server_configuration_hash
