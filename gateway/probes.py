"""The gateway's own question to a backend: one token. Its answer, and nothing a client sent, decides about the breaker.

Owns no state. Promises: what is known of an earlier state of the breaker says nothing about the present one. Talks to: the
backend's watch, the controller.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from gateway.flow.breaker import Event, Result, State
from gateway.flow.controller import Controller
from gateway.forward.watch import Watch

PROBE_S = 10.0


async def broken(watch: Watch, model: str) -> bool:
    """Whether one token cannot be had within `PROBE_S` seconds."""
    body = {"model": model, "prompt": [100], "max_tokens": 1}
    answer = await watch.post("/v1/completions", orjson.dumps(body), PROBE_S)
    return answer is None or answer[0] >= 500


async def suspected(controller: Controller, watch: Watch, model: str, clock: Callable[[], float]) -> None:
    """It answered 500: a broken engine, or an odd request. Our own failure counts as one of a request."""
    generation = controller.breaker(watch.name).generation
    failed = await broken(watch, model)
    if controller.breaker(watch.name).generation == generation:
        controller.report(watch.name, Result.FAILURE if failed else Result.SUCCESS, clock())


async def forewarned(controller: Controller, watch: Watch, model: str, clock: Callable[[], float]) -> None:
    """Another replica's breaker has opened: nothing more is sent until we have asked for ourselves.

    That is half-open with the probe in our hands. What fails for us too opens our breaker; what answers closes it again, for
    then the trouble lies between the other replica and the backend.
    """
    breaker = controller.breaker(watch.name)
    if breaker.state is not State.CLOSED:
        return
    breaker.apply(Event.HINTED, clock())
    permit = breaker.allow(clock())
    assert permit is not None  # half-open has room for at least one probe
    result = Result.IGNORED
    try:
        result = Result.FAILURE if await broken(watch, model) else Result.SUCCESS
    finally:
        breaker.record(permit, result, clock())
        if result is Result.SUCCESS and breaker.generation == permit:  # the policy asks for more than one probe
            breaker.apply(Event.PROBED, clock())
        controller.sweep(clock())
