"""Short ways to write envelopes, demands and controllers in the tests of flow."""

from __future__ import annotations

from gateway import policy
from gateway.errors import Axis
from gateway.flow.controller import Controller
from gateway.flow.demand import Demand, Limits, Open
from gateway.flow.envelope import Box, Envelope
from gateway.flow.shape import NO_FEATURES, Shape


def box(inputs: int = 2048, outputs: int = 512, concurrency: int = 8, *, name: str = "a", **more: object) -> Box:
    values: dict[str, object] = {
        "task": "generate", "features": NO_FEATURES, "input_min": 1, "input_max": inputs, "output_min": 1,
        "output_max": outputs, "concurrency": concurrency, "record": name * 64,
    }  # fmt: skip
    return Box(**(values | more))  # type: ignore[arg-type]


def envelope(*boxes: Box, kv_tokens: int | None = None, block_size: int = 16) -> Envelope:
    return Envelope(boxes or (box(),), kv_tokens, block_size)


def shape(inputs: int = 100, outputs: int = 50, sequences: int = 1, features: frozenset[str] = NO_FEATURES) -> Shape:
    return Shape("generate", features, inputs, outputs, sequences)


def demand(
    asked: Shape | None = None,
    *,
    tenant: str = "t",
    backends: tuple[str, ...] = ("b",),
    until: float = 1e9,
    level: str = "interactive",
    weight: float = 1.0,
    caller: float | None = None,
    limits: Limits | None = None,
    affinity: int | None = None,
) -> Demand:
    priority = {"interactive": 0, "batch": 1}[level]
    return Demand("m", backends, asked or shape(), tenant, weight, level, priority, until, caller, affinity, limits)


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Triggers(list[tuple[str, str, Axis, Shape]]):
    def __call__(self, model: str, backend: str, axis: Axis, asked: Shape) -> None:
        self.append((model, backend, axis, asked))


def controller(
    *boxes: Box, clock: Clock | None = None, max_requests: int = 1000, max_tokens: int | None = None,
    triggers: Triggers | None = None, backends: tuple[str, ...] = ("b",), kv_tokens: int | None = None,
    breaker: policy.Breaker | None = None,
) -> Controller:  # fmt: skip
    made = Controller(
        policy.Queue(max_requests=max_requests, max_tokens=max_tokens),
        clock or Clock(),
        triggers if triggers is not None else Triggers(),
        breaker,
    )
    for name in backends:
        made.set_backend(name, Open(envelope(*boxes, kv_tokens=kv_tokens), "sha256:" + "0" * 64))
    return made
