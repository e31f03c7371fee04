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
        """Read as it comes, write in order: a shorter delay never lets later bytes pass."""
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = asyncio.create_task(self._write(late, sink))
        try:
            while data := await source.read(65536):
                late.put_nowait((loop.time() + self.delay_s, data))
        except ConnectionError:
            pass
        finally:
            late.put_nowait((loop.time() + self.delay_s, b""))
            self._tasks.add(writing)
            writing.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _write(late: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await late.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                sink.transport.abort()
                return
            sink.write(data)
