"""One connection of the simulator: uvicorn's, with a way to break it and to hear that the peer has gone.

Owns what ASGI cannot say: RST, FIN before the response has ended, and news of a lost peer without a waiting task. Talks to the
exchange, which finds it in the scope.
"""

import contextlib
import socket
import struct
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.simulator.exchange import CONNECTION_KEY

_LINGER_ZERO = struct.pack("ii", 1, 0)


class SimulatorConnection(HttpToolsProtocol):
    """uvicorn's connection, with a way to break it and to hear that the peer has gone."""

    number = 0
    _lost_callback: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        """Make this connection known to the handlers."""
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION_KEY: self}  # type: ignore[dict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler in progress."""
        super().connection_lost(exc)
        callback, self._lost_callback = self._lost_callback, None
        if callback is not None:
            callback()

    def on_lost(self, callback: Callable[[], None] | None) -> None:
        """Whom to tell when the peer has gone; at once when it already has."""
        self._lost_callback = callback
        if callback is not None and self.transport.is_closing():
            callback()

    def reset(self) -> None:
        """Close with RST."""
        handle = self.transport.get_extra_info("socket")
        if handle is not None:
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self._give_up()
        self.transport.abort()

    def finish(self) -> None:
        """Send what is buffered, then FIN, whatever the response still owes."""
        self._give_up()
        self.transport.close()

    def _give_up(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
