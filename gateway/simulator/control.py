"""The control routes `/sim/*`, present only when control was allowed at start.

Owns their shapes: POST /sim/fault sets a fault, DELETE /sim/fault lifts all, GET /sim/stats tells the engine's counters. Talks
to the server, which makes faults so.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Protocol

import orjson

from gateway.simulator.config import ConfigError, typed_changes
from gateway.simulator.errors import ApiError
from gateway.simulator.exchange import Exchange
from gateway.simulator.faults import SERVER_KINDS, Fault, FaultError, fault_from, parse_fault
from gateway.simulator.sequence import EngineStats
from gateway.simulator.simulation import Simulation

Handler = Callable[[Simulation, Exchange], Awaitable[None]]


class Controlled(Protocol):
    """What the control routes need of the server."""

    @property
    def stats(self) -> EngineStats:
        """Counters of truth."""

    async def set_fault(self, fault: Fault | str) -> None:
        """Set a fault."""

    def set_fault_soon(self, fault: Fault) -> None:
        """Set a fault when the present answer has left."""

    async def clear_faults(self) -> None:
        """Lift all."""


def control_routes(server: Controlled) -> tuple[tuple[str, str, Handler], ...]:
    """The routes, bound to `server`."""

    async def put(simulation: Simulation, exchange: Exchange) -> None:
        try:
            fault = _read(exchange.body)
            typed_changes(simulation.config, dict(fault.changes))
            if fault.kind in SERVER_KINDS:
                server.set_fault_soon(fault)
            else:
                await server.set_fault(fault)
        except (FaultError, ConfigError) as error:
            raise ApiError(400, str(error)) from error
        await exchange.json(200, {"fault": fault.kind})

    async def clear(simulation: Simulation, exchange: Exchange) -> None:
        await server.clear_faults()
        await exchange.json(200, {"fault": None})

    async def stats(simulation: Simulation, exchange: Exchange) -> None:
        await exchange.json(200, {**asdict(server.stats), "faults": [fault.kind for fault in simulation.faults.faults]})

    return (("POST", "/sim/fault", put), ("DELETE", "/sim/fault", clear), ("GET", "/sim/stats", stats))


def _read(raw: bytes) -> Fault:
    """A fault as JSON, or as its text. Raises FaultError."""
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return parse_fault(raw.decode("utf-8", "replace"))
    if not isinstance(values, dict):
        raise FaultError("a fault is an object or a text")
    return fault_from(values)
