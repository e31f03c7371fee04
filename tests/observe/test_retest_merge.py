"""The ledgers of several replicas as one: demand adds up, facts do not."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Axis
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.observe.demand import Change
from gateway.observe.retest import IDENTITY, MAX_CHANGES, MAX_GROUPS, Ledger
from gateway.observe.retest_merge import SAME_S, distinct, merged
from gateway.observe.retest_plan import plan


def asked(ledger: Ledger, size: int, at: float, model: str = "tiny", backend: str = "a") -> None:
    ledger.note(model, backend, "h", Axis.INPUT, Shape("generate", NO_FEATURES, size, 10, 1), at)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100_000), st.sampled_from("ab")), max_size=40))
def test_it_is_the_ledger_that_one_replica_alone_would_have(requests: list[tuple[int, int, str]]) -> None:
    whole, parts = Ledger(), [Ledger() for _ in range(3)]
    for at, (part, size, backend) in enumerate(requests):
        for ledger in (whole, parts[part]):
            asked(ledger, size, float(at), backend=backend)
    before = [orjson.dumps(part.document()) for part in parts]
    found, wanted = merged(parts).list(), whole.list()
    for listed in (found, wanted):
        for group in listed["groups"]:
            group["backends"] = dict(sorted(group["backends"].items()))
    assert found == wanted
    assert [orjson.dumps(part.document()) for part in parts] == before
    if requests:
        assert plan((row[3] for row in merged(parts).groups("tiny")), 0.95, "tiny") == plan(
            (row[3] for row in whole.groups("tiny")), 0.95, "tiny"
        )


def test_a_change_that_all_have_seen_is_one() -> None:
    parts = [Ledger() for _ in range(3)]
    for number, part in enumerate(parts):
        part.changed(Change(100.0 + number, "tiny", "a", "h1", "h2", ("dtype",)))
    parts[0].changed(Change(500.0, "tiny", "a", "h1", "h2", ("dtype",)))  # and once more, which the others slept through
    parts[1].changed(Change(101.0, "tiny", "b", "h1", "h2", ("dtype",)))
    found = merged(parts)
    assert [(change.at, change.backend) for change in found.changes] == [(100.0, "a"), (101.0, "b"), (500.0, "a")]
    (group,) = [row[3] for row in found.groups() if row[2] == IDENTITY]
    assert (group.count, group.backends) == (3, {"a": 2, "b": 1})


def test_a_change_that_comes_back_is_another_one() -> None:
    first = Change(0.0, "m", "a", "h1", "h2", ())
    assert distinct([Change(SAME_S, "m", "a", "h1", "h2", ()), first]) == [first, Change(SAME_S, "m", "a", "h1", "h2", ())]
    assert distinct([Change(SAME_S - 1, "m", "a", "h1", "h2", ()), first]) == [first]


def test_what_is_merged_is_bounded_too() -> None:
    parts = [Ledger() for _ in range(3)]
    for number, part in enumerate(parts):
        for n in range(MAX_GROUPS):
            asked(part, 10, float(n), model=f"m{number}-{n}")
            part.changed(Change(1000.0 * n, "tiny", "a", f"{number}", f"{n}", ()))
    found = merged(parts)
    assert len(found.groups()) == MAX_GROUPS and len(found.changes) == MAX_CHANGES
