"""`enforcement: observe` lets everything real through and decides all the same; `explain` says what would be decided."""

from __future__ import annotations

from gateway import policy
from gateway.errors import Reason, Refusal
from gateway.flow.breaker import Result
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed, Demand, Limits
from gateway.flow.grant import Grant
from gateway.flow.waiting import Waiting
from tests.flow.helpers import Clock, box, controller, demand, shape


def observing(made: Controller) -> Controller:
    made.set_enforcement(observe=True)
    return made


def let_through(made: Controller, what: Demand, now: float = 0.0) -> Grant:
    answer = made.request(what, now)
    assert isinstance(answer, Grant), answer
    return answer


def test_everything_is_sent_and_what_would_have_been_refused_is_counted() -> None:
    made = observing(controller(box(concurrency=1), max_requests=1))
    grants = [let_through(made, demand()) for _ in range(3)]
    too_long = let_through(made, demand(shape(inputs=9000)))
    assert [grant.would.reason if grant.would else None for grant in grants] == [None, None, Reason.QUEUE_FULL]
    assert too_long.would is not None and too_long.would.reason is Reason.OUT_OF_SLICE_INPUT
    assert made.snapshot(0.0).observed == {"admitted": 1, "queue_full": 1, "out_of_slice_input": 1}
    for grant in [*grants, too_long]:
        grant.settle(1.0, 10, 10)
    assert made.snapshot(1.0).observed["waited"] == 1
    assert made.snapshot(1.0).backends[0].requests == 0


def test_the_virtual_set_holds_only_what_would_have_been_admitted() -> None:
    made = observing(controller(box(concurrency=2)))
    grants = [let_through(made, demand()) for _ in range(5)]
    assert made.snapshot(0.0).backends[0].sequences == 2
    grants[0].settle(1.0)  # one of the virtual queue moves up, as it would have
    assert made.snapshot(1.0).backends[0].sequences == 2
    for grant in grants[1:]:
        grant.settle(2.0)
    snapshot = made.snapshot(2.0)
    assert snapshot.backends[0].sequences == 0 and snapshot.classes == {}


def test_a_virtual_wait_ends_as_a_timeout_without_touching_the_real_request() -> None:
    made = observing(controller(box(concurrency=1)))
    let_through(made, demand())
    second = let_through(made, demand(until=5.0))
    made.sweep(5.0)
    assert second.would is not None and second.would.reason is Reason.QUEUE_TIMEOUT
    second.settle(6.0)
    assert made.snapshot(6.0).observed["queue_timeout"] == 1


def test_quotas_deadlines_draining_and_dead_backends_always_hold() -> None:
    made = observing(controller(box(concurrency=8)))
    limits = Limits(max_in_flight=1)
    let_through(made, demand(limits=limits))
    assert reason(made, demand(limits=limits)) is Reason.CONCURRENCY_LIMITED
    assert reason(made, demand(caller=0.0)) is Reason.CALLER_DEADLINE
    made.set_backend("b", Closed(Refusal(Reason.CONFIGURATION_CHANGED, "another hash", retry_after_s=30)))
    assert let_through(made, demand()).would is not None
    made.set_backend("b", Closed(Refusal(Reason.BACKEND_UNAVAILABLE, "gone", retry_after_s=1)))
    assert reason(made, demand()) is Reason.BACKEND_UNAVAILABLE
    made.drain(Refusal(Reason.DRAINING, "bye", retry_after_s=1))
    assert reason(made, demand()) is Reason.DRAINING


def reason(made: Controller, what: Demand) -> Reason:
    answer = made.request(what, 0.0)
    assert isinstance(answer, Refusal)
    return answer.reason


def test_the_breaker_is_real_when_observing() -> None:
    made = observing(controller(box(concurrency=1), breaker=policy.Breaker(consecutive_failures=2)))
    for _ in range(2):
        let_through(made, demand(shape(inputs=9000))).report(Result.FAILURE, 0.0)
    assert reason(made, demand()) is Reason.BACKEND_UNAVAILABLE


def test_explain_says_what_request_then_does_and_changes_nothing() -> None:
    made = controller(box(concurrency=1), max_requests=1)
    before = made.snapshot(0.0)
    told = made.explain(demand(), 0.0)
    assert (told.decision, told.backend, told.record) == ("admit", "b", "a" * 64)
    assert made.snapshot(0.0) == before
    assert isinstance(made.request(demand(), 0.0), Grant)
    assert (told := made.explain(demand(), 0.0)).decision == "wait" and told.ahead == 0
    assert isinstance(made.request(demand(), 0.0), Waiting)
    told = made.explain(demand(), 0.0)
    assert told.decision == "refuse" and told.refusal is not None and told.refusal.reason is Reason.QUEUE_FULL
    told = made.explain(demand(shape(outputs=600)), 0.0)
    assert told.refusal is not None and told.refusal.fits == "output tokens: 1 to 512"


def test_a_full_queue_loses_the_flood_and_not_the_newcomer() -> None:
    made = controller(box(concurrency=1), max_requests=4, clock=Clock())
    made.request(demand(tenant="flood"), 0.0)
    flood = [made.request(demand(tenant="flood", level="batch"), 0.0) for _ in range(4)]
    live = made.request(demand(tenant="live"), 1.0)
    assert isinstance(live, Waiting)
    assert [entry.phase.name for entry in flood] == ["WAITING"] * 3 + ["REFUSED"]  # type: ignore[union-attr]
    assert made.request(demand(tenant="flood", level="batch"), 1.0).reason is Reason.QUEUE_FULL  # type: ignore[union-attr]
    other = made.request(demand(tenant="small", level="batch"), 1.0)
    assert isinstance(other, Waiting), "a tenant with nothing waiting displaces one with much"


def test_pools_that_a_new_model_connects_become_one_with_all_that_waits() -> None:
    made = controller(box(concurrency=1), backends=("a", "b"))
    running = [made.request(demand(backends=(name,)), 0.0) for name in "ab"]
    waiting = [made.request(demand(backends=(name,)), 0.0) for name in "ab"]
    both = made.request(demand(backends=("a", "b")), 0.0)
    for grant in running:
        assert isinstance(grant, Grant)
        grant.settle(1.0, 1, 1)
    assert [entry.phase.name for entry in waiting] == ["GRANTED", "GRANTED"]  # type: ignore[union-attr]
    assert both.phase.name == "WAITING"  # type: ignore[union-attr]
    waiting[0].result.settle(2.0, 1, 1)  # type: ignore[union-attr]
    assert both.result.backend == "a"  # type: ignore[union-attr]
