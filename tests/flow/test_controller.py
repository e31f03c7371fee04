"""The controller as the request path sees it: grants, waiting, refusals, departures."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import Axis, Reason, Refusal, Refused
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed, Demand, Limits, Open, SettledTwice
from gateway.flow.grant import Grant
from gateway.flow.waiting import Phase, Waiting
from tests.flow.helpers import Clock, Triggers, box, controller, demand, envelope, shape


def granted(made: Controller, what: Demand, now: float = 0.0) -> Grant:
    answer = made.request(what, now)
    assert isinstance(answer, Grant), answer
    return answer


def waits(made: Controller, what: Demand, now: float = 0.0) -> Waiting:
    answer = made.request(what, now)
    assert isinstance(answer, Waiting), answer
    return answer


def refused(made: Controller, what: Demand, now: float = 0.0) -> Refusal:
    answer = made.request(what, now)
    assert isinstance(answer, Refusal), answer
    return answer


def test_room_is_granted_without_waiting() -> None:
    made = controller(box(concurrency=2))
    grant = granted(made, demand())
    assert (grant.backend, grant.record, grant.queue_s, grant.hash) == ("b", "a" * 64, 0.0, "sha256:" + "0" * 64)


def test_limit_one_queue_zero_refuses_for_as_long_as_the_first_runs() -> None:
    triggers = Triggers()
    made = controller(box(concurrency=1), max_requests=0, triggers=triggers)
    running = granted(made, demand())
    for now in (0.4, 2.0, 4.0):
        assert refused(made, demand(), now).reason is Reason.QUEUE_FULL
    running.settle(6.0, 10, 10)
    granted(made, demand(), 6.1)
    assert [axis for _, _, axis, _ in triggers] == [Axis.CONCURRENCY] * 3


def test_one_runs_two_wait_three_are_refused_at_once() -> None:
    made = controller(box(concurrency=1), max_requests=2)
    answers = [made.request(demand(), 0.0) for _ in range(6)]
    assert [type(answer) for answer in answers] == [Grant, Waiting, Waiting, Refusal, Refusal, Refusal]


async def test_a_settled_grant_wakes_the_next_with_its_waiting_time() -> None:
    clock = Clock()
    made = controller(box(concurrency=1), clock=clock)
    first = granted(made, demand())
    task = asyncio.create_task(made.wait(waits(made, demand(), 1.0)))
    await asyncio.sleep(0)
    first.settle(3.5, 1, 1)
    grant = await task
    assert grant.queue_s == 2.5
    grant.settle(4.0, 1, 1)
    assert made.snapshot(4.0).backends[0].sequences == 0


async def test_waiting_ends_at_the_queue_deadline() -> None:
    triggers = Triggers()
    made = controller(box(concurrency=1), triggers=triggers)
    granted(made, demand())
    task = asyncio.create_task(made.wait(waits(made, demand(until=5.0))))
    await asyncio.sleep(0)
    made.sweep(4.99)
    await asyncio.sleep(0)
    assert not task.done()
    made.sweep(5.0)
    with pytest.raises(Refused) as caught:
        await task
    assert caught.value.refusal.reason is Reason.QUEUE_TIMEOUT
    assert caught.value.refusal.retry_after_s is not None
    assert triggers[-1][2] is Axis.CONCURRENCY


async def test_the_callers_patience_ends_the_wait_with_its_own_reason() -> None:
    made = controller(box(concurrency=1))
    granted(made, demand())
    waiting = waits(made, demand(until=5.0, caller=2.0))
    made.sweep(2.0)
    with pytest.raises(Refused) as caught:
        await made.wait(waiting)
    assert caught.value.refusal.reason is Reason.CALLER_DEADLINE


def test_nothing_is_granted_to_a_caller_that_is_gone() -> None:
    made = controller(box(concurrency=1))
    assert refused(made, demand(caller=1.0), 1.0).reason is Reason.CALLER_DEADLINE
    running = granted(made, demand())
    late = waits(made, demand(until=3.0))
    running.settle(3.0, 1, 1)  # the ticker has not run yet, but the deadline is over
    assert late.phase is Phase.REFUSED
    assert made.snapshot(3.0).backends[0].requests == 0


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    made = controller(box(concurrency=1))
    first = granted(made, demand())
    task = asyncio.create_task(made.wait(waits(made, demand())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.snapshot(0.0).classes == {}
    first.settle(1.0, 1, 1)
    granted(made, demand(), 1.0)


async def test_a_grant_in_the_instant_of_the_cancel_is_given_back() -> None:
    made = controller(box(concurrency=1))
    first = granted(made, demand())
    leaver = asyncio.create_task(made.wait(waits(made, demand())))
    follower = asyncio.create_task(made.wait(waits(made, demand())))
    await asyncio.sleep(0)
    first.settle(1.0, 1, 1)  # grants the leaver, whose task has not run yet
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    grant = await follower
    grant.settle(2.0, 1, 1)
    assert made.snapshot(2.0).backends[0].requests == 0


async def test_leaving_before_waiting_after_the_grant_gives_it_back() -> None:
    made = controller(box(concurrency=1))
    first = granted(made, demand())
    waiting = waits(made, demand())
    first.settle(1.0, 1, 1)
    made.leave(waiting)
    made.leave(waiting)
    granted(made, demand(), 1.0)


def test_settling_twice_is_an_error_that_changes_nothing() -> None:
    made = controller(box(concurrency=2))
    grant = granted(made, demand())
    granted(made, demand())
    grant.settle(1.0, 1, 1)
    with pytest.raises(SettledTwice):
        grant.settle(1.0, 1, 1)
    assert made.snapshot(1.0).backends[0].sequences == 1


@pytest.mark.parametrize(
    ("asked", "reason", "axis", "fits"),
    [
        (shape(inputs=3000), Reason.OUT_OF_SLICE_INPUT, Axis.INPUT, "input tokens: 1 to 2048"),
        (shape(outputs=513), Reason.OUT_OF_SLICE_OUTPUT, Axis.OUTPUT, "output tokens: 1 to 512"),
        (shape(sequences=9), Reason.OUT_OF_SLICE_SEQUENCES, Axis.SEQUENCES, "sequences: 1 to 8"),
        (shape(features=frozenset({"lora"})), Reason.OUT_OF_SLICE_FEATURE, Axis.FEATURE, "features: none"),
    ],
)
def test_what_never_fits_is_refused_at_once_and_counted(asked: object, reason: Reason, axis: Axis, fits: str) -> None:
    triggers = Triggers()
    made = controller(triggers=triggers)
    refusal = refused(made, demand(asked))  # type: ignore[arg-type]
    assert (refusal.reason, refusal.axis, refusal.fits, refusal.retry_after_s) == (reason, axis, fits, None)
    assert triggers == [("m", "b", axis, asked)]


def test_an_unknown_backend_is_no_qualified_record() -> None:
    assert refused(controller(backends=()), demand()).reason is Reason.NO_QUALIFIED_RECORD


def test_a_closed_backend_refuses_what_waits_and_what_comes_and_opens_again() -> None:
    made = controller(box(concurrency=1))
    running = granted(made, demand())
    waiting = waits(made, demand())
    gone = Refusal(Reason.CONFIGURATION_CHANGED, "another hash", retry_after_s=30)
    made.set_backend("b", Closed(gone))
    assert waiting.phase is Phase.REFUSED and waiting.result is gone
    assert refused(made, demand()) is gone
    made.set_backend("b", Open(envelope(box(concurrency=1)), "sha256:" + "1" * 64))
    assert isinstance(made.request(demand(), 1.0), Waiting)  # what ran before still runs
    running.settle(1.0, 1, 1)


def test_a_swapped_record_counts_what_is_in_flight_by_its_own_boxes() -> None:
    made = controller(box(inputs=2048, concurrency=4))
    large = granted(made, demand(shape(inputs=2000)))
    made.set_backend("b", Open(envelope(box(inputs=500, concurrency=4, name="c")), "h"))
    small = waits(made, demand(shape(inputs=100)))  # no box of the new record holds what is in flight
    assert refused(made, demand(shape(inputs=2000))).reason is Reason.OUT_OF_SLICE_INPUT
    large.settle(1.0, 1, 1)
    assert small.phase is Phase.GRANTED and small.result.record == "c" * 64


def test_draining_refuses_all_but_what_runs() -> None:
    made = controller(box(concurrency=1))
    running = granted(made, demand())
    waiting = waits(made, demand())
    bye = Refusal(Reason.DRAINING, "shutting down", retry_after_s=1)
    made.drain(bye)
    assert waiting.result is bye
    assert refused(made, demand()) is bye
    running.settle(1.0, 1, 1)


def test_most_room_first_and_affinity_on_ties() -> None:
    made = controller(box(concurrency=4), backends=("x", "y"))
    both = ("x", "y")
    assert {granted(made, demand(backends=both)).backend for _ in range(2)} == set(both)
    fresh = controller(box(concurrency=4), backends=both)
    chosen = granted(fresh, demand(backends=both, affinity=7)).backend
    for _ in range(3):
        again = controller(box(concurrency=4), backends=both)
        assert granted(again, demand(backends=both, affinity=7)).backend == chosen
    spread = {granted(controller(box(), backends=both), demand(backends=both, affinity=n)).backend for n in range(64)}
    assert spread == set(both)


def test_kv_budget_is_kept_in_whole_blocks() -> None:
    made = controller(box(concurrency=8), kv_tokens=320)  # 20 blocks of 16
    granted(made, demand(shape(inputs=100, outputs=50)))  # 150 tokens: 10 blocks
    granted(made, demand(shape(inputs=100, outputs=45)))  # 145 tokens: 10 blocks
    waits(made, demand(shape(inputs=1, outputs=1)))
    assert refused(made, demand(shape(inputs=400, outputs=1))).reason is Reason.OUT_OF_SLICE_INPUT
    refusal = refused(made, demand(shape(inputs=100, outputs=400)))
    assert (refusal.reason, refusal.fits) == (Reason.OUT_OF_SLICE_OUTPUT, "output tokens: up to 220")


def test_quota_is_burnt_by_what_runs_and_not_by_what_is_refused() -> None:
    made = controller(box(concurrency=1), max_requests=0)
    limits = Limits(requests_per_minute=2)
    running = granted(made, demand(limits=limits))
    for _ in range(5):
        assert refused(made, demand(limits=limits)).reason is Reason.QUEUE_FULL
    running.settle(0.0, 1, 1)
    granted(made, demand(limits=limits)).settle(0.0, 1, 1)
    refusal = refused(made, demand(limits=limits))
    assert (refusal.reason, refusal.retry_after_s) == (Reason.RATE_LIMITED, 30.0)
    assert refused(made, demand(limits=limits), 29.9).reason is Reason.RATE_LIMITED
    granted(made, demand(limits=limits), 30.0)


def test_aborted_streams_use_up_the_token_quota() -> None:
    made = controller(box(concurrency=8))
    limits = Limits(tokens_per_minute=1000)
    served = 0
    for _ in range(20):
        answer = made.request(demand(shape(inputs=50, outputs=450), limits=limits), 0.0)
        if isinstance(answer, Grant):
            served += 1
            answer.settle(0.0, 50, 200)
    assert served == 3  # 250 each; the fourth would need 500 of the 250 left
    refusal = refused(made, demand(shape(inputs=600, outputs=500), limits=limits))
    assert (refusal.reason, refusal.retry_after_s) == (Reason.TOKENS_LIMITED, None)  # never fits
