"""What replicas tell of their breakers: news once, again while it lasts, and forgotten in time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from gateway import breaker_hints, probes
from gateway.breaker_hints import AGAIN_S, KEPT_S, BreakerHints
from gateway.flow.breaker import Event, State
from gateway.flow.controller import Controller
from gateway.forward.watch import Watch
from gateway.policy import Breaker, Queue


def test_a_change_is_told_at_once_and_an_open_one_again() -> None:
    told: list[tuple[str, State]] = []
    hints = BreakerHints(lambda *what: told.append(what))
    for now, state in (
        (0.0, State.CLOSED),
        (1.0, State.OPEN),
        (2.0, State.OPEN),
        (1.0 + AGAIN_S, State.OPEN),
        (9.0, State.CLOSED),
    ):
        hints.look([("b", state)], now)
    assert told == [("b", State.OPEN), ("b", State.OPEN), ("b", State.CLOSED)]


def test_an_opening_is_news_once_and_is_forgotten_with_its_owner() -> None:
    hints = BreakerHints(lambda *_: None)
    assert hints.heard("A", "b", "open", 0.0) and not hints.heard("A", "b", "open", 1.0)
    assert not hints.heard("B", "b", "half_open", 1.0)
    assert hints.elsewhere("b", 1.0) == 2 and hints.elsewhere("c", 1.0) == 0
    assert not hints.heard("A", "b", "closed", 2.0) and hints.elsewhere("b", 2.0) == 1
    assert hints.elsewhere("b", 1.1 + KEPT_S) == 0
    assert hints.heard("B", "b", "open", 2.0 + KEPT_S)  # silent for so long: another opening


def test_hints_are_bounded() -> None:
    hints = BreakerHints(lambda *_: None)
    for number in range(breaker_hints.MOST_OWNERS + 5):
        hints.heard(f"o{number}", "b", "open", 0.0)
    assert hints.elsewhere("b", 0.0) == breaker_hints.MOST_OWNERS


async def test_forewarned_of_several_probes_one_answer_of_our_own_is_enough() -> None:
    controller = Controller(Queue(), lambda: 1.0, lambda *_: None, Breaker(probes=3))
    breaker, seen = controller.breaker("b"), []

    async def post(*_: object) -> tuple[int, bytes]:
        seen.append(breaker.state)
        return 200, b"{}"

    watch = cast(Watch, SimpleNamespace(name="b", post=post))
    await probes.forewarned(controller, watch, "m", lambda: 1.0)
    assert seen == [State.HALF_OPEN] and breaker.state is State.CLOSED
    breaker.apply(Event.TRIPPED, 1.0)
    await asyncio.wait_for(probes.forewarned(controller, watch, "m", lambda: 1.0), 1)  # ours is open: nothing is asked
    assert seen == [State.HALF_OPEN] and breaker.state is State.OPEN
