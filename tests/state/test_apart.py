"""Without agreement: whatever replicas do that lost the state together, one box holds all that runs, in size and number."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import policy
from gateway.apart import APART, SETTLE_AFTER_S, Apart
from gateway.errors import Reason, Refusal
from gateway.flow.demand import Closed, Demand, Open
from gateway.flow.envelope import Box, Envelope
from gateway.flow.grant import Grant
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.flow.shared import Part, SharedController, divided
from gateway.flow.waiting import Waiting
from gateway.forward.watch import Counted

SMALL = Box("generate", NO_FEATURES, 1, 100, 1, 100, 8, "r")
LARGE = Box("generate", NO_FEATURES, 1, 1000, 1, 1000, 3, "r")
ODD = Box("generate", NO_FEATURES, 50, 2000, 1, 1000, 5, "r")  # not all that SMALL holds
NESTED, CROSSED = Envelope((SMALL, LARGE), 64_000), Envelope((SMALL, LARGE, ODD), 64_000)


def together(envelope: Envelope, shapes: list[Shape]) -> bool:
    """Whether one box holds all of these at once, in size and number, and the budget does."""
    total = sum(shape.sequences for shape in shapes)
    mask = envelope.everything
    for shape in shapes:
        mask &= envelope.mask(shape)
    blocks = sum(envelope.blocks(shape) for shape in shapes)
    return not shapes or (total <= envelope.cap(mask) and blocks <= (envelope.budget_blocks or blocks))


@dataclass
class Site:
    """One replica: its controller, and what it runs."""

    name: str
    controller: SharedController
    running: list[Grant] = field(default_factory=list)
    apart: Apart | None = None
    agreed: set[Grant] = field(default_factory=set)

    def demand(self, shape: Shape) -> Demand:
        return Demand("m", ("b",), shape, "t", 1.0, "interactive", 0, 1e9)

    def try_it(self, shape: Shape, now: float) -> bool:
        answer = self.controller.request(self.demand(shape), now)
        if isinstance(answer, Waiting):
            self.controller.leave(answer)
        if isinstance(answer, Refusal):
            assert answer.reason is not Reason.OUT_OF_SLICE_INPUT
        if isinstance(answer, Grant):
            self.running.append(answer)
        return isinstance(answer, Grant)


SIZES = st.sampled_from([(10, 10), (80, 90), (500, 500), (10, 900), (1500, 10)])
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "end", "count"]), st.integers(0, 5), SIZES, st.integers(1, 2)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([NESTED, CROSSED]), st.integers(1, 5), STEPS, STEPS)
@example(  # one runs what only one box holds; the other's replacement must be in that box, too
    CROSSED, 2, [("ask", 0, (1500, 10), 1), ("ask", 1, (80, 90), 1)], [("end", 1, (10, 10), 1), ("ask", 1, (10, 10), 1)]
)
def test_one_box_holds_whatever_all_of_them_run(envelope: Envelope, count: int, before: list, after: list) -> None:
    clock = [100.0]
    sites = [Site(f"r{n}", SharedController(policy.Queue(), lambda: clock[0], lambda *_: None)) for n in range(count)]
    for site in sites:
        site.controller.resume()
        site.controller.set_backend("b", Open(envelope, "h"))

    def everything() -> list[Shape]:
        return [grant.shape for site in sites for grant in site.running]

    for kind, which, size, sequences in before:  # agreed: by the rule over all of them
        site, shape = sites[which % count], Shape("generate", NO_FEATURES, *size, sequences)
        if kind == "end" and site.running:
            site.running.pop(0).settle(clock[0])
        elif envelope.place(shape) and together(envelope, [*everything(), shape]):
            assert site.try_it(shape, clock[0])
    names = [site.name for site in sites]
    for site in sites:
        load = (sum(g.shape.sequences for g in site.running), sum(g.blocks for g in site.running))
        site.agreed = set(site.running)
        site.apart = Apart(names, site.name, {"b": load}, clock[0], clock[0] + 1e6)
        site.controller.divide(site.apart.part)
    for kind, which, size, sequences in after:
        clock[0] += 1.0
        site, shape = sites[which % count], Shape("generate", NO_FEATURES, *size, sequences)
        if kind == "end" and site.running:
            site.running.pop(0).settle(clock[0])
        elif kind == "count":
            assert site.apart is not None
            counts = {each.name: len(set(each.running) & each.agreed) for each in sites}
            counts |= {each.name + APART: len(set(each.running) - each.agreed) for each in sites}
            if site.apart.look("b", Counted(clock[0], counts), clock[0]):
                site.controller.divide(site.apart.part)
        elif envelope.place(shape):
            site.try_it(shape, clock[0])
        assert together(envelope, everything()), everything()


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 11])
def test_the_parts_add_up_to_the_limit_exactly(replicas: int) -> None:
    gates = [divided(Open(CROSSED, "h"), Part(replicas, rank)) for rank in range(replicas)]
    widest = [gate.envelope.caps[0] for gate in gates if isinstance(gate, Open)]
    assert sum(widest) == SMALL.concurrency and max(widest) - min(widest) <= 1
    if replicas > 1:
        assert {gate.envelope.boxes[0].input_max for gate in gates if isinstance(gate, Open)} == {SMALL.input_max}
    assert sum(isinstance(gate, Closed) for gate in gates) == max(0, replicas - SMALL.concurrency)
    assert sum(gate.envelope.kv_tokens or 0 for gate in gates if isinstance(gate, Open)) <= 64_000


def test_others_have_ended_when_each_was_seen_with_nothing_after_the_loss() -> None:
    apart = Apart("ABC", "A", {"b": (2, 4)}, 100.0, 700.0)
    assert apart.part("b") == Part(3, 0, 2, 4) and apart.part("other") == Part(3, 0, 0, 0)
    soon, later = 100.0 + SETTLE_AFTER_S / 2, 100.0 + SETTLE_AFTER_S
    assert not apart.look("b", Counted(soon, {"A": 2}), soon)  # what was granted may not have arrived yet
    assert not apart.look("b", Counted(later, {"A": 2, "B": 1, "X": 1}), later)
    assert not apart.look("b", Counted(later + 1, {"A": 2, "B~apart": 2, "C": 3, "X": 1}), later + 1)  # C had none before
    assert not apart.look("b", None, later + 2)
    assert apart.look("b", Counted(later + 3, {"A": 2, "B": 3}), later + 3)  # and now X, of whom nobody had told, has ended
    assert apart.part("b") == Part(3, 0) and not apart.look("b", None, 800.0)
    assert apart.look("other", None, 700.0) and apart.part("other") == Part(3, 0)
