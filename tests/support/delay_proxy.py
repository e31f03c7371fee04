"""A TCP proxy that hands everything on, as late as the test says: what a slow network to a shared service is like."""

from __future__ import annotations

import asyncio


class DelayProxy:
    """Each direction is delayed by `delay_s`; order is kept."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while data := await source.read(65536):
                due = max(due, loop.time() + self.delay_s)  # a shorter delay never lets later bytes pass
                if due > loop.time():
                    loop.call_at(due, sink.write, data)
                else:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            loop.call_at(max(due, loop.time() + self.delay_s) + 0.001, sink.transport.abort)
