"""Requests that the data path does not answer, handed to the ASGI app through uvicorn's own cycle.

Owns: the scope of such a request. Talks to: uvicorn, which runs the app; the connection hears when the answer is whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, is_ssl
from uvicorn.server import ServerState

from gateway.edge.incoming import Incoming

_LOG = logging.getLogger("uvicorn.error")


class Handover:
    """What one connection needs to hand a whole request over: uvicorn's config and state, as it gave them to the connection."""

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._state = state
        self._app_state = app_state
        self._loop = loop

    def begin(
        self,
        incoming: Incoming,
        transport: asyncio.Transport,
        client: tuple[str, int] | None,
        flow: FlowControl,
        done: Callable[[], None],
    ) -> RequestResponseCycle:
        """Run the app on a whole request; it writes to the transport itself. `done` is called when the answer is whole."""
        cycle = RequestResponseCycle(
            scope=cast(Any, self._scope(incoming, transport, client)), transport=transport, flow=flow, logger=_LOG,
            access_logger=_LOG, access_log=False, default_headers=self._state.default_headers, message_event=asyncio.Event(),
            expect_100_continue=False, keep_alive=incoming.keep_alive and not incoming.http_1_0, on_response=done,
        )  # fmt: skip
        cycle.body = bytearray(incoming.take_body())
        cycle.more_body = False
        cycle.message_event.set()
        task = self._loop.create_task(cycle.run_asgi(self._config.loaded_app))
        task.add_done_callback(self._state.tasks.discard)
        self._state.tasks.add(task)
        return cycle

    def _scope(self, incoming: Incoming, transport: asyncio.Transport, client: tuple[str, int] | None) -> dict[str, Any]:
        path, _, query = incoming.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.3"},
            "http_version": "1.0" if incoming.http_1_0 else "1.1",
            "server": get_local_addr(transport),
            "client": client,
            "scheme": "https" if is_ssl(transport) else "http",
            "method": incoming.method.decode("ascii"),
            "root_path": self._config.root_path,
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": incoming.headers,
            "state": self._app_state.copy(),
        }
