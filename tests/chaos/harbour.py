"""Backends that die, and come back where they were: simulator processes on ports of their own.

Owns the processes. Promises: `start` returns when it listens, on the same port each time; `end` leaves nothing running,
whatever was done to the process before.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tests.support.attested import UPSTREAM_KEY
from tests.support.raw import request, say

START_S = 60.0


class SimulatorProcess:
    """One simulated backend. `flags` are those of `plimsoll simulator`."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log, self.flags = log, flags
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start it, on the port it had."""
        with self.log.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "simulator", "--port", str(self.port), "--allow-control", *self.flags),
                stdout=asyncio.subprocess.PIPE, stderr=errors, env={**os.environ, "VLLM_API_KEY": UPSTREAM_KEY},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        assert line, self.log.read_text("utf-8", "replace")
        self.port = int(json.loads(line)["url"].rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, when it runs."""
        if self.runs:
            assert self.process is not None
            self.process.send_signal(number)

    async def end(self) -> None:
        """Kill it: its connections are reset."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    async def fault(self, text: str) -> None:
        """Put a fault in force."""
        await self._control("POST", text)

    async def well(self) -> None:
        """Make it run, with no fault in force."""
        self.signal(signal.SIGCONT)
        if not self.runs:
            await self.start()
        await self._control("DELETE")

    async def _control(self, method: str, text: str = "") -> None:
        message = request(method, "/sim/fault", key=UPSTREAM_KEY, body=text.encode())
        for _ in range(600):
            try:
                got = await say(self.port, message, timeout=START_S)
            except (OSError, EOFError):  # refusing or restarting just now
                await asyncio.sleep(0.05)
            else:
                assert got.status == 200, got
                return
        raise AssertionError(f"{self.url} cannot be told {text!r}")
