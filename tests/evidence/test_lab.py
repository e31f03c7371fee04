"""The lab's verdicts, the files it is shipped as, and the task that ends the lesson: transfer."""

import datetime as dt
import json
from pathlib import Path

import pytest

from gateway.evidence import lab, schema
from gateway.evidence import record as records
from gateway.evidence.signing import supersede
from gateway.evidence.target import Limits, Target, TargetSlice
from gateway.evidence.verdict import evaluate
from tests.evidence.builders import CONFIG_A, edited, make_record, observed_for

RECORDS = Path(__file__).parents[2] / "records"
NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize("fixture", lab.fixtures(), ids=lambda fixture: fixture["name"])
def test_a_fixture_has_its_verdict(fixture):
    row = lab.run_fixture(fixture)
    assert row.verdict.fields == row.expected
    assert row.agrees


def test_there_are_eight_and_they_differ():
    rows = lab.run_lab(RECORDS / "lab")
    assert len(rows) == 8
    assert all(row.agrees for row in rows)
    assert {row.verdict.final_decision for row in rows} == {"PASS", "CONDITIONAL", "DEFER"}


def test_the_shipped_fixtures_are_the_ones_that_are_made():
    shipped = {path.name: path.read_text("utf-8") for path in (RECORDS / "lab").glob("*.json")}
    assert shipped == {f"{fixture['name']}.json": lab.fixture_text(fixture) for fixture in lab.fixtures()}


def test_a_fixture_that_expects_something_else_is_told_apart():
    fixture = edited(lab.fixtures()[0], "expected.final_decision", "DEFER")
    assert not lab.run_fixture(fixture).agrees


@pytest.mark.parametrize("damage", [{"record": 1}, {"target": {"slo": {"typo": 1}}}, {"observed": {}}, {"now": "later"}])
def test_a_broken_fixture_is_a_typed_error(damage):
    with pytest.raises(lab.LabError, match="01-valid-baseline"):
        lab.run_fixture({**lab.fixtures()[0], **damage})


def test_a_folder_without_fixtures_is_a_typed_error(tmp_path):
    with pytest.raises(lab.LabError, match="no fixtures"):
        lab.run_lab(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(lab.LabError, match=r"x\.json"):
        lab.run_lab(tmp_path)


def test_the_shipped_json_schema_is_current():
    assert (RECORDS / "schema" / schema.FILE_NAME).read_text("utf-8") == schema.schema_text()


def test_the_schema_asks_for_text_where_a_decimal_stands():
    text = json.loads(schema.schema_text())
    assert text["additionalProperties"] is False
    assert {branch["type"] for branch in text["$defs"]["Statistics"]["properties"]["p95"]["anyOf"]} == {"string", "null"}


def test_transfer_is_deferred_until_the_other_server_is_measured():
    """The revision stays; context and concurrency grow. The old record answers nothing; a new one, measured there, does."""
    target = Target(slice=TargetSlice(4096, 1024, 12), limits=Limits())
    old, server_b = make_record(), observed_for(lab.config_b())

    deferred = evaluate(old, server_b, target, NOW)
    assert (deferred.final_decision, deferred.reason_class, deferred.retest_state) == ("DEFER", "IDENTITY_CHANGED", "REQUIRED")
    assert {"max_model_len", "parallelism", "batching_limits"} <= set(deferred.triggers)
    assert old.identity.model_revision == server_b.identity.model_revision

    # The old server, asked for the new shape, is outside its slice: no extrapolation either way.
    outside = evaluate(old, observed_for(CONFIG_A), target, NOW)
    assert (outside.slice_state, outside.reason_class, outside.triggers) == ("OUTSIDE", "OUT_OF_SLICE", ("target_slice",))

    measured = make_record(document=lab.config_b(), tokens_in=4096, tokens_out=1024, concurrency=12)
    new = supersede(measured, old)
    assert evaluate(new, server_b, target, NOW).final_decision == "PASS"
    assert new.supersedes.record == records.record_id(old)
    assert {"model.max_model_len", "parallelism.tensor_parallel_size", "scheduler.max_num_seqs"} <= set(new.supersedes.changed)
    assert new.supersedes.rebuilt == ("generate 1-4096 in 1-1024 out, concurrency 12, reuse none",)
    # The new record says nothing about the old server.
    assert evaluate(new, observed_for(CONFIG_A), target, NOW).final_decision == "DEFER"
