"""The breaker: every (state, event) of its table, what counts, late news, lost probes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import policy
from gateway.flow.breaker import TRANSITIONS, Breaker, Event, Result, State, TransitionError
from gateway.flow.demand import Closed
from gateway.flow.grant import Grant
from tests.flow.helpers import box, controller, demand

CONFIG = policy.Breaker(window_s=30, min_requests=10, failure_rate=0.5, consecutive_failures=5, cooldown_s=10, probes=1)


def breaker_in(state: State) -> Breaker:
    breaker = Breaker(CONFIG)
    for event in {State.CLOSED: [], State.OPEN: [Event.TRIPPED], State.HALF_OPEN: [Event.TRIPPED, Event.COOLED]}[state]:
        breaker.apply(event, 0.0)
    assert breaker.state is state
    return breaker


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_state_and_event_is_in_the_table_or_raises_and_changes_nothing(state: State, event: Event) -> None:
    breaker = breaker_in(state)
    generation = breaker.generation
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(TransitionError):
            breaker.apply(event, 1.0)
        assert (breaker.state, breaker.generation) == (state, generation)
    else:
        assert breaker.apply(event, 1.0) is breaker.state is after
        assert breaker.generation == generation + 1


def test_the_table_is_the_one_that_was_meant() -> None:
    flat = {(state, event): after for state, events in TRANSITIONS.items() for event, after in events.items()}
    assert flat == {
        (State.CLOSED, Event.TRIPPED): State.OPEN,
        (State.CLOSED, Event.HINTED): State.HALF_OPEN,
        (State.OPEN, Event.COOLED): State.HALF_OPEN,
        (State.HALF_OPEN, Event.PROBED): State.CLOSED,
        (State.HALF_OPEN, Event.FAILED): State.OPEN,
        **{(state, Event.RESET): State.CLOSED for state in State},
    }


def run(breaker: Breaker, *results: Result, now: float = 0.0) -> None:
    for result in results:
        permit = breaker.allow(now)
        assert permit is not None
        breaker.record(permit, result, now)


def test_bad_requests_and_a_busy_engine_never_open_it() -> None:
    breaker = Breaker(CONFIG)
    run(breaker, *[Result.IGNORED] * 15)
    assert breaker.state is State.CLOSED


def test_one_failure_of_one_is_below_the_sample() -> None:
    breaker = Breaker(CONFIG)
    run(breaker, Result.FAILURE)
    assert breaker.state is State.CLOSED


def test_consecutive_failures_open_it_and_a_success_between_starts_again() -> None:
    breaker = Breaker(CONFIG)
    run(breaker, *[Result.FAILURE] * 4, Result.SUCCESS, *[Result.FAILURE] * 4)
    assert breaker.state is State.CLOSED
    run(breaker, Result.FAILURE)
    assert breaker.state is State.OPEN


def test_the_failure_rate_counts_over_the_window_only() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(4):
        run(breaker, Result.FAILURE, Result.SUCCESS, now=0.0)
    run(breaker, Result.SUCCESS, now=31.0)
    assert breaker.state is State.CLOSED
    for _ in range(3):  # 3 of 7 in the window; with the forgotten ones it were 7 of 15
        run(breaker, Result.FAILURE, Result.SUCCESS, now=32.0)
    assert breaker.state is State.CLOSED
    run(breaker, Result.FAILURE, Result.FAILURE, Result.FAILURE, now=33.0)
    assert breaker.state is State.OPEN


def test_half_open_after_the_cool_down_with_one_probe() -> None:
    breaker = breaker_in(State.OPEN)
    assert breaker.allow(9.9) is None
    assert breaker.retry_after_s(4.0) == 6.0
    probe = breaker.allow(10.0)
    assert probe is not None and breaker.state is State.HALF_OPEN
    assert breaker.allow(10.0) is None
    breaker.record(probe, Result.SUCCESS, 11.0)
    assert breaker.state is State.CLOSED


@pytest.mark.parametrize("lost", [Result.IGNORED])
def test_a_probe_that_says_nothing_gives_its_place_back(lost: Result) -> None:
    breaker = breaker_in(State.OPEN)
    for _ in range(50):
        probe = breaker.allow(10.0)
        assert probe is not None, "a wedged half-open breaker rejects for ever"
        breaker.record(probe, lost, 10.0)
    run(breaker, Result.SUCCESS, now=10.0)
    assert breaker.state is State.CLOSED


def test_late_news_changes_nothing() -> None:
    breaker = Breaker(CONFIG)
    early = [breaker.allow(0.0) for _ in range(20)]
    run(breaker, *[Result.FAILURE] * 5)
    assert breaker.state is State.OPEN
    for permit in early:
        assert permit is not None
        assert not breaker.record(permit, Result.SUCCESS, 1.0)
    assert breaker.state is State.OPEN
    probe = breaker.allow(10.0)
    assert early[0] is not None and probe is not None
    breaker.record(early[0], Result.SUCCESS, 11.0)
    assert breaker.state is State.HALF_OPEN


@given(st.lists(st.tuples(st.sampled_from([*Result, "lose", "reset"]), st.floats(0, 5)), max_size=80))
def test_it_is_never_wedged(steps: list[tuple[object, float]]) -> None:
    """After any history: one cool-down, then one success, and traffic flows."""
    breaker, now = Breaker(CONFIG), 0.0
    out: list[int] = []
    for step, gap in steps:
        now += gap
        if step == "reset":
            breaker.apply(Event.RESET, now)
        elif (permit := breaker.allow(now)) is not None:
            out.append(permit)
            if isinstance(step, Result):
                breaker.record(out.pop(), step, now)
    for permit in out:
        breaker.record(permit, Result.IGNORED, now)
    now += CONFIG.cooldown_s
    permit = breaker.allow(now)
    assert permit is not None
    breaker.record(permit, Result.SUCCESS, now)
    assert breaker.state is State.CLOSED


def test_an_open_breaker_refuses_until_half_open_and_lets_one_probe_through() -> None:
    made = controller(box(concurrency=20), breaker=CONFIG)
    running = [made.request(demand(), 0.0) for _ in range(5)]
    for grant in running:
        assert isinstance(grant, Grant)
        grant.report(Result.FAILURE, 0.0)
        grant.settle(0.0)
    refusal = made.request(demand(), 4.0)
    assert not isinstance(refusal, Grant) and refusal.reason == "backend_unavailable" and refusal.retry_after_s == 6.0  # type: ignore[union-attr]
    probe = made.request(demand(), 10.0)
    assert isinstance(probe, Grant)
    behind = made.request(demand(), 10.1)
    assert not isinstance(behind, Grant | Closed)
    probe.settle(10.2)  # cancelled before it was sent: the place comes back to the one behind
    assert behind.phase.name == "GRANTED"  # type: ignore[union-attr]
    behind.result.report(Result.SUCCESS, 11.0)  # type: ignore[union-attr]
    assert isinstance(made.request(demand(), 11.0), Grant)


def test_requests_that_wait_are_refused_when_the_breaker_opens() -> None:
    made = controller(box(concurrency=1), breaker=policy.Breaker(consecutive_failures=1))
    running = made.request(demand(), 0.0)
    waiting = made.request(demand(), 0.0)
    assert isinstance(running, Grant)
    running.report(Result.FAILURE, 1.0)
    made.sweep(1.05)
    assert waiting.result.reason == "backend_unavailable"  # type: ignore[union-attr]
