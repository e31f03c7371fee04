"""Random histories of the controller, checked after every step against an independent count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import Axis, Reason, Refusal
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed, Demand, Limits, Open
from gateway.flow.envelope import Envelope
from gateway.flow.grant import Grant
from gateway.flow.pool import choose
from gateway.flow.queue import OVERTAKINGS
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.flow.waiting import Phase, Waiting
from gateway.policy import Queue
from tests.flow.helpers import Clock, box
from tests.flow.scenarios.sim import holds_all

ENVELOPES = {
    "a": (box(100, 50, 6), box(400, 100, 2, name="b")),
    "b": (box(200, 50, 4), box(200, 200, 1, name="b")),
    "other a": (box(150, 60, 3, name="c"),),
}
SHAPES = st.sampled_from(
    [Shape("generate", NO_FEATURES, i, o, s) for i, o, s in
     [(10, 10, 1), (90, 50, 1), (90, 50, 3), (150, 50, 1), (150, 60, 1), (300, 90, 1), (300, 90, 2), (200, 200, 1), (999, 1, 1)]]
)  # fmt: skip
STEPS = st.one_of(
    st.tuples(
        st.just("send"), SHAPES, st.sampled_from("xyz"), st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]),
        st.sampled_from([0, 0, 1]), st.sampled_from([None, 2.0, 8.0]),
    ),
    st.tuples(st.just("settle"), st.integers(0, 20), st.floats(0, 1)),
    st.tuples(st.just("first token"), st.integers(0, 20)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("sweep"), st.floats(0, 3)),
    st.tuples(st.just("close"), st.sampled_from("ab")),
    st.tuples(st.just("open"), st.sampled_from([("a", "a"), ("b", "b"), ("a", "other a")])),
)  # fmt: skip


class History:
    """A controller, everything that was ever asked of it, and what must hold whatever happens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.controller = Controller(Queue(max_requests=12), self.clock, self.trigger)
        self.boxes = {name: ENVELOPES[name] for name in "ab"}
        self.running: list[Grant] = []
        self.waiting: list[Waiting] = []
        self.settled = self.granted = self.sent = self.refused = self.left = self.given_back = 0
        self.clocks: dict[tuple[int, int], float] = {}
        self.foreign_to_new_boxes: set[Grant] = set()
        for name in "ab":
            self.open(name, name)

    def trigger(self, model: str, backend: str, axis: Axis, asked: Shape) -> None:
        assert backend in "ab" and isinstance(axis, Axis)

    def open(self, name: str, envelope: str) -> None:
        self.boxes[name] = ENVELOPES[envelope]
        self.foreign_to_new_boxes |= {grant for grant in self.running if grant.backend == name}
        self.controller.set_backend(name, Open(Envelope(ENVELOPES[envelope]), "h"))

    def close(self, name: str) -> None:
        self.controller.set_backend(name, Closed(Refusal(Reason.BACKEND_UNAVAILABLE, "gone", retry_after_s=1)))

    def send(self, shape: Shape, tenant: str, backends: tuple[str, ...], priority: int, patience: float | None) -> None:
        now = self.clock.now
        limits = Limits(max_in_flight=8) if tenant == "z" else None
        caller = None if patience is None else now + patience
        level = ("interactive", "batch")[priority]
        answer = self.controller.request(
            Demand("m", backends, shape, tenant, 1.0, level, priority, now + 5, caller, 1, limits), now
        )
        self.sent += 1
        if isinstance(answer, Grant):
            self.granted += 1
            self.running.append(answer)
        elif isinstance(answer, Waiting):
            self.waiting.append(answer)
        else:
            self.refused += 1

    def step(self, step: tuple[object, ...]) -> None:
        match step:
            case ("send", shape, tenant, backends, priority, patience):
                self.send(shape, tenant, backends, priority, patience)  # type: ignore[arg-type]
            case ("settle", int(index), float(share)) if self.running:
                grant = self.running.pop(index % len(self.running))
                self.foreign_to_new_boxes.discard(grant)
                self.settled += 1
                grant.settle(self.clock.now, int(grant.tokens * share), 0)
            case ("first token", int(index)) if self.running:
                self.running[index % len(self.running)].prefill_done()
            case ("leave", int(index)) if self.waiting:
                waiting = self.waiting.pop(index % len(self.waiting))
                self.count_departure(waiting)
                self.controller.leave(waiting)
            case ("sweep", float(gap)):
                self.clock.now += gap
                self.controller.sweep(self.clock.now)
            case ("close", str(name)):
                self.close(name)
            case ("open", (str(name), str(envelope))):
                self.open(name, envelope)
        self.collect()

    def count_departure(self, waiting: Waiting) -> None:
        if waiting.phase is Phase.GRANTED:
            self.granted += 1
            self.given_back += 1
        elif waiting.phase is Phase.REFUSED:
            self.refused += 1
        else:
            self.left += 1

    def collect(self) -> None:
        """Take what the queue has decided, as `wait` would."""
        for waiting in self.waiting[:]:
            if waiting.phase is Phase.GRANTED:
                waiting.phase = Phase.TAKEN
                self.granted += 1
                self.running.append(waiting.result)
                self.waiting.remove(waiting)
            elif waiting.phase is Phase.REFUSED:
                assert isinstance(waiting.result, Refusal)
                self.refused += 1
                self.waiting.remove(waiting)

    def check(self) -> None:
        snapshot = self.controller.snapshot(self.clock.now)
        for backend in snapshot.backends:
            mine = [grant for grant in self.running if grant.backend == backend.name]
            assert backend.sequences == sum(grant.shape.sequences for grant in mine) >= 0
            assert backend.requests == len(mine)
            decoding = sum(grant.shape.sequences for grant in mine if grant.decoding)
            assert sum(count for (phase, _, _), count in backend.by_size.items() if phase == "decode") == decoding
            assert sum(backend.in_flight.values()) == sum(backend.by_size.values()) == backend.sequences
            if mine and not self.foreign_to_new_boxes & set(mine):
                assert any(holds_all(each, [grant.shape for grant in mine]) for each in self.boxes[backend.name])
        assert sum(each.requests for each in snapshot.classes.values()) == len(self.waiting)
        assert self.granted == self.settled + self.given_back + len(self.running)
        assert self.sent == self.granted + self.refused + self.left + len(self.waiting)
        self.check_queue()

    def check_queue(self) -> None:
        for pool in self.controller._topology.pools:
            for level in pool.ranked:
                key = (id(pool), level.priority)
                assert level.clock >= self.clocks.get(key, 0.0), "virtual time never runs backwards"
                self.clocks[key] = level.clock
                assert level.waiting == len(level.entries()) == sum(t.waiting for t in level.tenants.values())
                assert abs(level.cost - sum(entry.cost for entry in level.entries())) < 1e-3
            self.check_work_conserving(pool)

    def check_work_conserving(self, pool: object) -> None:
        """Who waits although there is room, waits for someone for whom room is held, or behind a more urgent class."""
        levels = [level for level in pool.ranked if level.waiting]  # type: ignore[attr-defined]
        if not levels:
            return
        urgent = levels[0].entries()
        idle = [entry for entry in urgent if choose(entry, self.clock.now, ()) is not None]
        held = any(entry.passed >= OVERTAKINGS for level in levels for entry in level.entries())
        assert held or not idle


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_the_counts_agree_and_the_rule_holds(steps: list[tuple[object, ...]]) -> None:
    history = History()
    for step in steps:
        history.step(step)
        history.check()
    while history.running:
        history.step(("settle", 0, 1.0))
        history.check()
    history.step(("sweep", 100.0))
    while history.running:
        history.step(("settle", 0, 1.0))
    history.check()
    assert not history.waiting and history.sent == history.settled + history.given_back + history.refused + history.left
