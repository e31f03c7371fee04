"""A real redis-server of a test's own, on a free port of the loopback, that can be stopped, frozen, flushed and started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import redis


class RedisServer:
    """Nothing is written to disk, so that a restart loses everything, unless `options` say otherwise."""

    def __init__(self, program: str, folder: Path, *options: str) -> None:
        self.program, self.folder, self.options = program, folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(port=self.port, socket_timeout=5)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder),
                 *self.options],
                stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, (self.folder / "redis.log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
