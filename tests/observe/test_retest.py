from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Axis
from gateway.flow.shape import Shape
from gateway.observe import live, retest_file
from gateway.observe.demand import Change
from gateway.observe.live import LiveTest
from gateway.observe.retest import MAX_CHANGES, MAX_GROUPS, Ledger, LedgerError
from gateway.observe.retest_plan import NoDemand, covering, levels, plan
from gateway.observe.sizes import Sizes, bucket, edge
from gateway.qualify import plan as plans

HASH = "sha256:" + "0" * 64


def shape(input_tokens: int, output_tokens: int = 16, sequences: int = 1, *features: str) -> Shape:
    return Shape("generate", frozenset(features), input_tokens, output_tokens, sequences)


@given(st.integers(0, 2**53))
def test_a_value_lies_in_its_bucket_and_no_other(value: int) -> None:
    index = bucket(value)
    assert value <= edge(index)
    assert value > edge(index - 1) or value == 0 or edge(index) == edge(index - 1)
    assert edge(index) <= max(value * 1.19, 2)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_covers_its_share_and_is_close(values: list[int], share: float) -> None:
    sizes = Sizes()
    for value in values:
        sizes.add(value)
    found = sizes.quantile(share)
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert found <= max(values)


@given(st.lists(st.integers(0, 10**9), max_size=50), st.lists(st.integers(0, 10**9), max_size=50))
def test_merging_is_counting_together(left: list[int], right: list[int]) -> None:
    one, two, both = Sizes(), Sizes(), Sizes()
    for value in left:
        one.add(value)
        both.add(value)
    for value in right:
        two.add(value)
        both.add(value)
    one.merge(two)
    assert one.to_json() == both.to_json() and one.count == both.count


def test_demand_is_kept_per_model_configuration_and_axis() -> None:
    ledger = Ledger()
    ledger.note("tiny", "a", HASH, Axis.INPUT, shape(3000), 100.0)
    ledger.note("tiny", "b", HASH, Axis.INPUT, shape(5000), 200.0)
    ledger.note("tiny", "a", HASH, Axis.CONCURRENCY, shape(10), 300.0, wanted=17)
    ledger.note("tiny", "a", None, Axis.INPUT, None, 150.0)
    rows = {(row["axis"], row["hash"]): row for row in ledger.list()["groups"]}
    found = rows[("input", HASH)]
    assert (found["count"], found["first"], found["last"]) == (2, 100.0, 200.0)
    assert found["backends"] == {"a": 1, "b": 1}
    assert found["asked"]["input"]["max"] == 5000
    assert rows[("concurrency", HASH)]["asked"]["concurrency"]["p95"] == 17
    assert rows[("input", "unknown")]["asked"] == {}


def test_memory_is_bounded_and_the_latest_stay() -> None:
    ledger = Ledger()
    for n in range(2_000):
        ledger.note(f"model-{n}", "a", HASH, Axis.INPUT, shape(10), float(n))
        ledger.changed(Change(float(n), "tiny", "a", f"h{n}", f"h{n + 1}", ("dtype",)))
        ledger.served(f"model-{n}", "a", HASH, False, float(n), float(n))
    listed = ledger.list()
    assert len(listed["groups"]) == MAX_GROUPS and len(listed["changes"]) == MAX_CHANGES
    assert listed["changes"][0]["after"] == "h2000"
    assert len(listed["live"]) <= MAX_GROUPS
    many = Ledger()
    for n in range(1_000):
        many.note("tiny", f"b{n}", HASH, Axis.FEATURE, shape(10, 16, 1, f"feature-{n}"), 1.0)
    (row,) = many.list()["groups"]
    assert len(row["backends"]) <= 32 and len(row["kinds"]) <= 32 and row["count"] == 1_000


def test_a_restart_reads_everything_back(tmp_path: Path) -> None:
    ledger, path = Ledger(), tmp_path / "state" / "retest.json"
    ledger.note("tiny", "a", HASH, Axis.OUTPUT, shape(10, 9000, 2, "logprobs"), 5.0, wanted=4)
    ledger.changed(Change(6.0, "tiny", "a", HASH, None, ("model.dtype",)))
    assert retest_file.save(path, ledger.document())
    again = retest_file.load(path)
    assert again.document() == ledger.document()
    assert [p.name for p in path.parent.iterdir()] == ["retest.json"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"format": "other"}', b'{"format": "plimsoll-retest-ledger/v1", "groups": [{}], "changes": []}'],
)
def test_a_damaged_ledger_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "retest.json"
    path.write_bytes(damage)
    assert retest_file.load(path).list()["groups"] == []
    assert (tmp_path / "retest.json.damaged").read_bytes() == damage and not path.exists()


def test_a_disk_that_refuses_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not retest_file.save(tmp_path / "file" / "retest.json", Ledger().document())


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "groups", "changes", "x"]), inner, max_size=4)
        ),
        max_leaves=10,
    )
)
def test_any_document_is_a_ledger_or_a_typed_error(document: object) -> None:
    try:
        Ledger.from_document(document)
    except LedgerError:
        pass


def test_the_plan_covers_the_share_it_was_asked_for() -> None:
    rng, ledger, asked = random.Random(3), Ledger(), []
    for n in range(4_000):
        one = shape(int(rng.lognormvariate(7, 1)), int(rng.lognormvariate(5, 1)), rng.choice((1, 1, 1, 2, 4)))
        asked.append(one)
        ledger.note("tiny", "a", HASH, (Axis.INPUT, Axis.OUTPUT)[n % 2], one, float(n))
    for share in (0.5, 0.95, 0.99):
        box = covering([row[3] for row in ledger.groups("tiny")], share)
        inside = sum(
            s.input_tokens <= box["input"] and s.output_tokens <= box["output"] and s.sequences <= box["concurrency"]
            for s in asked
        )
        assert inside / len(asked) >= share
    assert box["input"] < max(s.input_tokens for s in asked) * 1.01


def test_the_plan_is_one_that_qualify_reads() -> None:
    ledger = Ledger()
    ledger.note("tiny", "a", HASH, Axis.FEATURE, shape(900, 100, 2, "logprobs", "penalties", "media", "lora"), 1.0, wanted=12)
    made = plan([row[3] for row in ledger.groups("tiny")], 0.95, "tiny")
    read = plans.parse(json.dumps(made).encode())
    (cell,) = read.cells
    assert cell.concurrency == (1, 2, 4, 8, 12)
    assert (cell.input_tokens.max, cell.output_tokens.max) == (900, 100)
    assert set(cell.all_features) == {"logprobs", "penalties", "lora"}
    assert "media" in read.description


def test_without_demand_there_is_no_plan() -> None:
    ledger = Ledger()
    ledger.changed(Change(1.0, "tiny", "a", None, HASH, ()))
    with pytest.raises(NoDemand):
        plan([row[3] for row in ledger.groups("tiny")], 0.95, "tiny")


def test_levels_rise_to_the_highest() -> None:
    assert [levels(n) for n in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


def test_false_alarms_are_as_rare_as_stated() -> None:
    """4,000 windows at exactly 5 %: alarms of probability <= 0.001 each give more than 13 with probability < 1e-3."""
    rng = random.Random(11)
    alarms = 0
    for _ in range(4_000):
        test = LiveTest(0.0)
        alarms += any(test.observe(rng.random() < live.P0, 1.0) for _ in range(400))
    assert alarms <= 13


def test_a_real_drift_is_found_soon() -> None:
    rng = random.Random(5)
    test = LiveTest(0.0)
    needed = next(n for n in range(20_000) if test.observe(rng.random() < 0.2, 1.0))
    assert needed < 400


def test_an_alarm_is_given_once_a_window_and_again_in_the_next() -> None:
    test = LiveTest(0.0)
    assert sum(test.observe(True, 1.0) for _ in range(1_000)) == 1
    assert sum(test.observe(True, live.WINDOW_S + 2.0) for _ in range(1_000)) == 1


def test_a_good_past_hides_nothing_for_longer_than_a_window() -> None:
    test = LiveTest(0.0)
    for _ in range(live.WINDOW_REQUESTS):
        assert not test.observe(False, 1.0)
    assert any(test.observe(True, 1.0) for _ in range(10))


def test_the_ledger_turns_an_alarm_into_a_trigger() -> None:
    ledger = Ledger()
    assert any(ledger.served("tiny", "a", HASH, True, 1.0, 50.0) for _ in range(10))
    (row,) = ledger.list()["groups"]
    assert (row["axis"], row["count"]) == ("live_slo", 1)
