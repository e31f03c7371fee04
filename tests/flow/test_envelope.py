"""Envelope arithmetic against its definition, on generated boxes and shapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Axis
from gateway.flow.envelope import Box, Envelope
from gateway.flow.occupancy import Occupancy, OccupancyError
from gateway.flow.shape import NO_FEATURES, Shape
from tests.flow.helpers import box, envelope, shape

FEATURES = st.frozensets(st.sampled_from(["lora", "logprobs", "media"]))
TASKS = st.sampled_from(["generate", "pool"])


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    low_in, low_out = draw(st.integers(1, 20)), draw(st.integers(0, 10))
    return Box(
        draw(TASKS), draw(FEATURES), low_in, low_in + draw(st.integers(0, 60)), low_out, low_out + draw(st.integers(0, 40)),
        draw(st.integers(1, 6)), draw(st.sampled_from("abcd")) * 64,
    )  # fmt: skip


SHAPES = st.builds(Shape, TASKS, FEATURES, st.integers(1, 90), st.integers(0, 60), st.integers(1, 4))
ENVELOPES = st.builds(
    Envelope, st.lists(boxes(), max_size=5).map(tuple), st.one_of(st.none(), st.integers(16, 400)), st.sampled_from([1, 16])
)


def inside(each: Box, asked: Shape) -> bool:
    return (
        each.task == asked.task
        and asked.features <= each.features
        and each.input_min <= asked.input_tokens <= each.input_max
        and each.output_min <= asked.output_tokens <= each.output_max
    )


def allowed(what: Envelope, population: list[Shape]) -> bool:
    """The rule, as the design states it."""
    size = what.block_size
    reserved = sum(s.sequences * -(-(s.input_tokens + s.output_tokens) // size) for s in population)
    if what.kv_tokens is not None and reserved > what.kv_tokens // size:
        return False
    total = sum(s.sequences for s in population)
    return any(all(inside(each, s) for s in population) and total <= each.concurrency for each in what.boxes)


@given(ENVELOPES, st.lists(st.tuples(SHAPES, st.booleans()), max_size=25), ENVELOPES)
def test_occupancy_decides_as_the_rule_says(what: Envelope, steps: list[tuple[Shape, bool]], other: Envelope) -> None:
    occupancy = Occupancy(what)
    population: list[Shape] = []
    for asked, leave in steps:
        if leave and population:
            gone = population.pop(0)
            occupancy.remove(what.mask(gone), gone.sequences, what.blocks(gone))
        fits = occupancy.fits(what.mask(asked), asked.sequences, what.blocks(asked))
        assert fits == allowed(what, [*population, asked])
        if fits:
            occupancy.add(what.mask(asked), asked.sequences, what.blocks(asked))
            population.append(asked)
            record = occupancy.record_for(what.mask(asked))
            assert any(b.record == record and all(inside(b, s) for s in population) for b in what.boxes)
    occupancy.rebase(other, [(other.mask(s), s.sequences, other.blocks(s)) for s in population])
    for asked, _ in steps:
        fits = occupancy.fits(other.mask(asked), asked.sequences, other.blocks(asked))
        assert fits == allowed(other, [*population, asked])


@given(ENVELOPES, SHAPES)
def test_place_is_the_rule_on_an_idle_engine_and_explain_names_an_axis_that_is_really_out(what: Envelope, asked: Shape) -> None:
    assert bool(what.place(asked)) == allowed(what, [asked])
    if what.place(asked) or not what.boxes:
        return
    refusal = what.explain(asked)
    assert refusal.fits and refusal.message and refusal.retry_after_s is None
    same = [b for b in what.boxes if b.task == asked.task and asked.features <= b.features]
    assert (refusal.axis is Axis.FEATURE) == (not same)
    if refusal.axis is Axis.SEQUENCES:
        assert all(asked.sequences > b.concurrency for b in what.boxes if inside(b, asked))


@given(ENVELOPES, TASKS, FEATURES, st.integers(0, 60), st.integers(1, 4), st.integers(1, 90), st.integers(0, 30))
def test_settled_means_no_exact_count_could_change_the_decision(
    what: Envelope, task: str, features: frozenset[str], output: int, sequences: int, low: int, width: int
) -> None:
    if what.settled(task, features, output, sequences, low, low + width):
        shapes = [Shape(task, features, size, output, sequences) for size in range(low, low + width + 1)]  # type: ignore[arg-type]
        alone = {bool(what.place(s)) for s in shapes}
        assert len(alone) == 1
        if alone == {True}:
            wide = {tuple(b for b in what.boxes if inside(b, s) and s.sequences <= b.concurrency) for s in shapes}
            assert len(wide) == 1


def test_the_default_output_comes_from_the_widest_slice_that_holds_the_input() -> None:
    what = envelope(box(2048, 512, 8), box(2048, 4096, 2), box(8192, 1024, 2))
    assert what.default_output("generate", NO_FEATURES, 100, None) == 512
    assert what.default_output("generate", NO_FEATURES, 100, 200) == 200
    assert what.default_output("generate", NO_FEATURES, 4000, None) == 1024
    assert what.default_output("generate", NO_FEATURES, 9000, None) is None


def test_ranges_with_a_gap_are_told_as_such() -> None:
    what = envelope(box(100, 50), box(400, 50, input_min=300))
    assert what.explain(shape(200, 10)).fits == "input tokens: 1 to 100 or 300 to 400"


def test_taking_out_what_was_never_in_is_a_defect_that_changes_nothing() -> None:
    occupancy = Occupancy(envelope())
    occupancy.add(1, 2, 0)
    for mask, sequences, blocks in ((1, 3, 0), (1, 1, 5)):
        try:
            occupancy.remove(mask, sequences, blocks)
        except OccupancyError:
            assert (occupancy.requests, occupancy.sequences) == (1, 2)
        else:
            raise AssertionError("counts may not go below zero")
