"""Faults on demand.

Owns the fault language and the board of faults in force. A fault is written `kind;name=value;…`, the same on the command
line (`--fault`), in the header `x-sim-fault` and, as JSON, at `POST /sim/fault`. Pure: it says what should go wrong; the
request path and the server make it so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class FaultError(ValueError):
    """The fault's text is not understood."""


class FaultKind(StrEnum):
    """What can go wrong. The first group hits single requests, the second the whole server."""

    SLOW_PREFILL = "slow_prefill"
    STALL = "stall"
    RESET = "reset"
    FIN = "fin"
    ERROR_500 = "error500"
    BUSY_503 = "busy503"
    STREAM_ERROR = "stream_error"
    SILENT_TOOLS = "silent_tools"
    FREEZE = "freeze"
    REFUSE = "refuse"
    CRASH = "crash"
    RESTART = "restart"


SERVER_KINDS = frozenset({FaultKind.FREEZE, FaultKind.REFUSE, FaultKind.CRASH, FaultKind.RESTART})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    `after`: content events (stall, reset, fin, stream_error) or tokens (silent_tools) that still pass; None: before the answer
    begins. `seconds`: how long; None: until cleared. `times`: how many requests it hits; None: all. `factor`: of slow_prefill.
    `keepalive`: comments are sent during a stall. `changes`: settings of a restart.
    """

    kind: FaultKind
    after: int | None = None
    seconds: float | None = None
    times: int | None = None
    factor: float = 20.0
    keepalive: bool = False
    changes: tuple[tuple[str, str], ...] = ()


def parse_fault(text: str) -> Fault:
    """Read `kind;name=value;…`. Raises FaultError."""
    kind, _, rest = text.partition(";")
    pairs = (part.partition("=") for part in rest.split(";") if part.strip())
    return fault_from({"kind": kind.strip(), **{name.strip(): value.strip() for name, _, value in pairs}})


def fault_from(values: Mapping[str, object]) -> Fault:
    """Build a fault from names and values, text or JSON. Unknown names become `changes` of a restart. Raises FaultError."""
    named = {name: str(value) for name, value in values.items()}
    try:
        kind = FaultKind(named.pop("kind", ""))
        fault = Fault(
            kind,
            after=int(named.pop("after")) if "after" in named else None,
            seconds=float(named.pop("seconds")) if "seconds" in named else None,
            times=int(named.pop("times")) if "times" in named else None,
            factor=float(named.pop("factor", "20")),
            keepalive=named.pop("keepalive", "0").lower() in ("1", "true", "yes"),
        )
    except ValueError as error:
        raise FaultError(f"not a fault: {error}") from error
    if named and kind is not FaultKind.RESTART:
        raise FaultError(f"unknown names in a fault: {', '.join(sorted(named))}")
    return replace(fault, changes=tuple(sorted(named.items())))


class FaultBoard:
    """The request faults in force. The first one that is set hits first."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is in force."""
        return tuple(self._faults)

    def add(self, fault: Fault) -> None:
        """Put a request fault in force, in place of one of the same kind."""
        self.clear(fault.kind)
        self._faults.append(fault)

    def clear(self, kind: FaultKind | None = None) -> None:
        """Lift faults of one kind, or all."""
        self._faults = [fault for fault in self._faults if kind is not None and fault.kind is not kind]

    def draw(self) -> Fault | None:
        """The fault that hits the request arriving now; counts it."""
        if not self._faults:
            return None
        fault = self._faults[0]
        if fault.times is not None:
            self._faults[0] = replace(fault, times=fault.times - 1)
            if fault.times <= 1:
                del self._faults[0]
        return fault
