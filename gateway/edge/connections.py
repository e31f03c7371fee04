"""The client connections of one listener: counted against the bounds, and swept by the clock.

Owns the set and the count per address. Promises: what was counted once is forgotten once. Talks to the connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.edge.protocol import PlimsollProtocol
    from gateway.edge.reader import Bounds


class Connections:
    """All open connections of a listener."""

    def __init__(self) -> None:
        self._open: set[PlimsollProtocol] = set()
        self._per_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[PlimsollProtocol]:
        return iter(list(self._open))

    def add(self, client: PlimsollProtocol, bounds: Bounds) -> bool:
        """Count a connection; False when there are too many, from everywhere or from its address."""
        self._open.add(client)
        address = client.address or ""
        self._per_address[address] = there = self._per_address.get(address, 0) + 1
        per_address = bounds.max_connections_per_address
        return len(self._open) <= bounds.max_connections and (per_address is None or there <= per_address)

    def discard(self, client: PlimsollProtocol) -> None:
        """Forget a connection."""
        if client not in self._open:
            return
        self._open.discard(client)
        address = client.address or ""
        left = self._per_address[address] - 1
        if left:
            self._per_address[address] = left
        else:
            del self._per_address[address]

    def sweep(self, now: float) -> None:
        """End what took too long (monotonic seconds)."""
        for client in self:
            client.sweep(now)
