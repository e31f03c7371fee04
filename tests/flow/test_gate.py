"""From evidence to admission: every way a gate closes, and the one way it opens."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import Reason
from gateway.evidence import lab, signing
from gateway.evidence.canonical import digest
from gateway.evidence.identity import ObservedIdentity, identity_of
from gateway.evidence.record import Record, record_id, validate
from gateway.evidence.store import RefusedFile, StoreReport
from gateway.evidence.target import Target
from gateway.flow.demand import Closed, Open
from gateway.flow.gate import GateDecision, View, decide
from gateway.forward.watch import Observation

NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
LAB = lab.fixtures()[0]
RECORD = validate(LAB["record"])
DOCUMENT: dict[str, Any] = LAB["observed"]["configuration"]
VIEWS = {"tiny": View(Target(confidence=None))}


def identity(document: dict[str, Any] = DOCUMENT, **changes: Any) -> ObservedIdentity:
    values: dict[str, Any] = {
        "source": "attested", "identity": identity_of(document, digest(document)), "document": document,
        "kv_cache_tokens": 65536, "block_size": 16, "engine_start_id": "e1",
    } | changes  # fmt: skip
    return ObservedIdentity(**values)


def seen(who: ObservedIdentity | None = None, **changes: Any) -> Observation:
    base = Observation("attested", who if who is not None else identity(), reachable=True, foreign=0, engine="e1", problem=None)
    return replace(base, **changes)


def store(*records: Record, signatures: Any = None) -> StoreReport:
    return StoreReport({record_id(r): r for r in records}, signatures or {}, (RefusedFile("x.json", "no"),), {})


def gate(observation: Observation, report: StoreReport, **changes: Any) -> GateDecision:
    values: dict[str, Any] = {"previous": None, "foreign_closes": True, "ready": True, "drained": False, "now": NOW} | changes
    views = values.pop("views", VIEWS)
    return decide(observation, report, views, **values)


def refused(decision: GateDecision) -> Reason:
    assert isinstance(decision.gate, Closed)
    return decision.gate.refusal.reason


def test_it_opens_inside_what_qualifies():
    decision = gate(seen(), store(RECORD))
    assert isinstance(decision.gate, Open)
    assert decision.gate.hash == RECORD.identity.server_configuration_hash
    (box,) = decision.gate.envelope.boxes
    measured = RECORD.slices[0]
    assert (box.input_max, box.output_max, box.concurrency) == (
        measured.input_tokens.max, measured.output_tokens.max, measured.levels[-1].concurrency,
    )  # fmt: skip
    assert box.record == record_id(RECORD)
    assert decision.gate.envelope.kv_tokens == 65536
    assert decision.record == RECORD


@pytest.mark.parametrize(
    ("observation", "changes", "reason"),
    [
        (Observation("attested"), {}, Reason.BACKEND_UNAVAILABLE),
        (Observation("attested", reachable=True, problem="404"), {}, Reason.NO_QUALIFIED_RECORD),
        (Observation("attested", reachable=True, problem="404"), {"previous": RECORD}, Reason.CONFIGURATION_CHANGED),
        (seen(mixed=("sha256:a", "sha256:b")), {}, Reason.MIXED_IDENTITY),
        (seen(foreign=1), {}, Reason.BACKEND_NOT_EXCLUSIVE),
        (seen(), {"drained": True}, Reason.BACKEND_UNAVAILABLE),
        (seen(), {"ready": False}, Reason.BACKEND_UNAVAILABLE),
        (seen(identity(kv_cache_tokens=60_000)), {}, Reason.NO_QUALIFIED_RECORD),
        (seen(), {"now": dt.datetime(2026, 7, 15, tzinfo=dt.UTC)}, Reason.NO_QUALIFIED_RECORD),
        (seen(), {"views": {}}, Reason.NO_QUALIFIED_RECORD),
    ],
)
def test_each_way_it_closes(observation: Observation, changes: dict[str, Any], reason: Reason):
    assert refused(gate(observation, store(RECORD), **changes)) is reason


def test_foreign_load_is_only_added_where_the_policy_says_so():
    assert isinstance(gate(seen(foreign=3), store(RECORD), foreign_closes=False).gate, Open)


def test_preparation_is_asked_for_only_when_nothing_else_keeps_it_closed():
    assert gate(seen(), store(RECORD), ready=False).needs_preparation
    assert not gate(seen(foreign=1), store(RECORD), ready=False).needs_preparation
    assert not gate(seen(), store(), ready=False).needs_preparation


def changed(group: str, **values: Any) -> dict[str, Any]:
    return {**DOCUMENT, group: {**DOCUMENT[group], **values}}


def test_another_configuration_names_its_fields_and_tells_callers_no_values():
    document = changed("scheduler", max_num_seqs=99)
    decision = gate(seen(identity(document)), store(RECORD), previous=RECORD)
    assert refused(decision) is Reason.CONFIGURATION_CHANGED
    assert isinstance(decision.gate, Closed)
    assert "scheduler.max_num_seqs" in decision.gate.refusal.message
    assert "99" not in decision.gate.refusal.message
    assert decision.detail is not None and "99" in decision.detail
    assert decision.triggers == ("batching_limits",)


def test_an_address_is_for_operators():
    decision = gate(Observation("attested", problem="http://10.1.2.3:8000: connection refused"), store(RECORD))
    assert isinstance(decision.gate, Closed)
    assert "10.1.2.3" not in decision.gate.refusal.message
    assert decision.detail is not None and "10.1.2.3" in decision.detail


def test_a_new_record_for_the_new_hash_opens_it_again():
    document = changed("scheduler", max_num_seqs=99)
    who = seen(identity(document))
    other = validate(lab.record_for(document, 1024, 256, 4))
    assert refused(gate(who, store(RECORD), previous=RECORD)) is Reason.CONFIGURATION_CHANGED
    assert isinstance(gate(who, store(RECORD, other), previous=RECORD).gate, Open)


def test_without_anything_to_compare_with_there_is_no_record():
    document = changed("model", revision="sha256:" + "9" * 64)
    assert refused(gate(seen(identity(document)), store(RECORD))) is Reason.NO_QUALIFIED_RECORD


def test_probed_is_never_enough():
    who = replace(
        identity(),
        source="probed",
        identity=replace(identity().identity, server_configuration_hash=None),
        unknown=("model.dtype",),
    )
    decision = gate(seen(who, source="probed"), store(RECORD))
    assert refused(decision) is Reason.NO_QUALIFIED_RECORD


def test_declared_opens_only_where_conditional_is_admitted():
    who = replace(identity(), source="declared")
    assert refused(gate(seen(who, source="declared"), store(RECORD))) is Reason.NO_QUALIFIED_RECORD
    views = {"tiny": View(Target(confidence=None, admit_conditional=True))}
    assert isinstance(gate(seen(who, source="declared"), store(RECORD), views=views).gate, Open)


def test_a_signature_is_asked_for_where_the_policy_does():
    pem, public = signing.new_key()
    views = {"tiny": View(Target(confidence=None), require_signature=(public,))}
    assert refused(gate(seen(), store(RECORD), views=views)) is Reason.NO_QUALIFIED_RECORD
    signed = store(RECORD, signatures={record_id(RECORD): (signing.sign(RECORD, pem),)})
    assert isinstance(gate(seen(), signed, views=views).gate, Open)


def test_a_budget_of_the_policy_is_the_tighter_one():
    views = {"a": View(Target(confidence=None)), "b": View(Target(confidence=None), token_budget=4096)}
    found = gate(seen(), store(RECORD), views=views).gate
    assert isinstance(found, Open)
    assert found.envelope.kv_tokens == 4096
