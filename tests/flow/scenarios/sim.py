"""A world on virtual time: clients, engines and the real controller, driven by one heap of events.

No asyncio: a waiting request gets a bell in place of its future, which the controller rings. Every grant is checked
against the rule by an independent count: one box holds everything in flight on its backend. Seeded; `World.seed` is in
every assertion message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from gateway import policy
from gateway.errors import Axis, Reason, Refusal
from gateway.flow.controller import Controller
from gateway.flow.demand import Demand, Gate, Open
from gateway.flow.envelope import Box, Envelope
from gateway.flow.grant import Grant
from gateway.flow.shape import Shape
from gateway.flow.waiting import Phase, Waiting

Service = Callable[[Shape], float]
Sizes = Callable[[random.Random], Shape]


@dataclass
class Request:
    """One request's whole life. Times are virtual seconds."""

    demand: Demand
    arrived: float
    granted: float | None = None
    ended: float | None = None
    backend: str | None = None
    outcome: str = "open"  # then served, left, or a refusal's reason
    on_end: Callable[[], None] | None = None

    @property
    def wait(self) -> float:
        assert self.granted is not None
        return self.granted - self.arrived


class Bell:
    """Stands where the waiter's future stands."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring, self._rung = ring, False

    def done(self) -> bool:
        return self._rung

    def set_result(self, _: None) -> None:
        self._rung = True
        self._ring()


@dataclass
class World:
    seed: int
    service: Service = field(default=lambda shape: 0.01 + 0.001 * shape.tokens)
    queue: policy.Queue = field(default_factory=lambda: policy.Queue(max_requests=100_000))
    patience: float = 1e6
    used_share: Callable[[str], float] = field(default=lambda tenant: 1.0)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.rng = random.Random(self.seed)
        self.controller = Controller(self.queue, lambda: self.now, self._trigger)
        self.requests: list[Request] = []
        self.live: dict[str, set[Grant]] = {}
        self.boxes: dict[str, tuple[Box, ...]] = {}
        self.triggers: list[tuple[str, str, Axis, Shape]] = []
        self.grants: list[Request] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.at(0.05, self._sweep)

    def _trigger(self, *what: Any) -> None:
        self.triggers.append(what)

    # time

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (when, self._order, do))

    def after(self, delay: float, do: Callable[[], None]) -> None:
        self.at(self.now + delay, do)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heappop(self._heap)
            self.events += 1
            do()
        self.now = until

    def _sweep(self) -> None:
        self.controller.sweep(self.now)
        self.after(0.05, self._sweep)

    # backends

    def backend(self, name: str, *boxes: Box, kv_tokens: int | None = None) -> None:
        self.boxes[name] = boxes
        self.live.setdefault(name, set())
        self.controller.set_backend(name, Open(Envelope(boxes, kv_tokens), "sha256:" + name))

    def gate(self, name: str, gate: Gate) -> None:
        self.controller.set_backend(name, gate)

    # requests

    def send(self, demand: Demand, on_end: Callable[[], None] | None = None, leaves_after: float | None = None) -> Request:
        request = Request(demand, self.now, on_end=on_end)
        self.requests.append(request)
        answer = self.controller.request(demand, self.now)
        if isinstance(answer, Grant):
            self._start(request, answer)
        elif isinstance(answer, Refusal):
            self._over(request, answer.reason.value)
        else:
            answer.future = Bell(lambda: self._rung(request, answer))  # type: ignore[assignment]
            if leaves_after is not None:
                self.after(leaves_after, lambda: self._leave(request, answer))
        return request

    def _rung(self, request: Request, waiting: Waiting) -> None:
        self.at(self.now, lambda: self._answered(request, waiting))

    def _answered(self, request: Request, waiting: Waiting) -> None:
        if request.outcome != "open":
            return  # it left in this very instant
        if isinstance(waiting.result, Refusal):
            self._over(request, waiting.result.reason.value)
        else:
            waiting.phase = Phase.TAKEN
            self._start(request, waiting.result)

    def _leave(self, request: Request, waiting: Waiting) -> None:
        if request.outcome == "open" and request.granted is None:
            request.outcome = "left"
            self.controller.leave(waiting)
            self._over(request, "left")

    def _start(self, request: Request, grant: Grant) -> None:
        request.granted, request.backend = self.now, grant.backend
        self.grants.append(request)
        self.live[grant.backend].add(grant)
        self.after(self.service(grant.shape), lambda: self._finish(request, grant))

    def _finish(self, request: Request, grant: Grant) -> None:
        self.live[grant.backend].discard(grant)
        used = int(grant.shape.tokens * self.used_share(request.demand.tenant))
        grant.settle(self.now, used, 0)
        self._over(request, "served")

    def _over(self, request: Request, outcome: str) -> None:
        request.outcome, request.ended = outcome, self.now
        if request.on_end is not None:
            request.on_end()

    # load

    def demand(
        self, shape: Shape, tenant: str, backends: tuple[str, ...], level: str = "interactive", weight: float = 1
    ) -> Demand:
        priority = {"interactive": 0, "batch": 1}[level]
        return Demand("m", backends, shape, tenant, weight, level, priority, self.now + self.patience)

    def closed_loop(
        self, clients: int, sizes: Sizes, *, tenant: str = "t", backends: tuple[str, ...] = ("b",), level: str = "interactive",
        weight: float = 1, think: float = 0.0, until: float = 1e9,
    ) -> None:  # fmt: skip
        def again() -> None:
            if self.now < until:
                self.after(self.rng.expovariate(1 / think) if think else 0.0, send)

        def send() -> None:
            self.send(self.demand(sizes(self.rng), tenant, backends, level, weight), again)

        for _ in range(clients):
            self.at(self.now, send)

    def open_loop(
        self, rate: float, sizes: Sizes, *, tenant: str = "t", backends: tuple[str, ...] = ("b",), level: str = "interactive",
        weight: float = 1, until: float = 1e9, start: float = 0.0, leaves: Callable[[random.Random], float | None] | None = None,
    ) -> None:  # fmt: skip
        def send() -> None:
            if self.now < until:
                leaves_after = leaves(self.rng) if leaves is not None else None
                self.send(self.demand(sizes(self.rng), tenant, backends, level, weight), leaves_after=leaves_after)
                self.after(self.rng.expovariate(rate), send)

        self.at(start, send)

    # what was promised

    def check_rule(self) -> None:
        """At this instant one box of each backend holds everything in flight there."""
        snapshot = self.controller.snapshot(self.now)
        for backend in snapshot.backends:
            shapes = [grant.shape for grant in self.controller._topology.bay(backend.name).live]
            assert sum(shape.sequences for shape in shapes) == backend.sequences, f"seed {self.seed}"
            assert not shapes or any(holds_all(box, shapes) for box in self.boxes[backend.name]), f"seed {self.seed}"

    def check_ends(self) -> None:
        """Everything has ended, once, and nothing is left anywhere."""
        assert not [request for request in self.requests if request.outcome == "open"], f"seed {self.seed}"
        snapshot = self.controller.snapshot(self.now)
        assert snapshot.classes == {}, f"seed {self.seed}"
        assert all(backend.sequences == backend.requests == 0 for backend in snapshot.backends), f"seed {self.seed}"

    def served(self, tenant: str, since: float = 0.0, until: float = 1e9) -> int:
        """Tokens of the tenant's requests granted in the interval."""
        return sum(r.demand.shape.tokens for r in self.grants if r.demand.tenant == tenant and since <= r.granted < until)  # type: ignore[operator]

    def waits(self, wanted: Callable[[Request], bool]) -> list[float]:
        return sorted(request.wait for request in self.grants if wanted(request))


def holds_all(box: Box, shapes: list[Shape]) -> bool:
    inside = all(
        shape.task == box.task
        and shape.features <= box.features
        and box.input_min <= shape.input_tokens <= box.input_max
        and box.output_min <= shape.output_tokens <= box.output_max
        for shape in shapes
    )
    return inside and sum(shape.sequences for shape in shapes) <= box.concurrency


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


REFUSED_BY_LOAD = {Reason.QUEUE_FULL.value, Reason.QUEUE_TIMEOUT.value}
