"""Where lines go: a file that logrotate may move, or standard output that may be a blocked pipe.

Owns one file descriptor, used by one thread. Promises: lines are written whole or counted as lost; a failing sink raises
nothing, it is tried again with the next batch.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Protocol

log = logging.getLogger("plimsoll.sink")


class Sink(Protocol):
    """What a writing thread needs."""

    lost: int

    def write(self, lines: list[bytes]) -> None: ...
    def reopen(self) -> None: ...
    def close(self) -> None: ...


class FileSink:
    """Appends to `path` ("-": standard output). `lost` counts lines that could not be written."""

    def __init__(self, path: str) -> None:
        self._path = None if path == "-" else Path(path)
        self._fd: int | None = None
        self._stale = False
        self._failing = False
        self.lost = 0

    def write(self, lines: list[bytes]) -> None:
        """Write whole lines, blocking as long as the sink takes."""
        data = memoryview(b"".join(lines))
        try:
            descriptor = self._descriptor()
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            self._failed(error, lost=bytes(data).count(b"\n"))
        else:
            self._failing = False

    def reopen(self) -> None:
        """Use the file that bears the name now, from the next batch on."""
        self._stale = True

    def close(self) -> None:
        """Give the descriptor back; standard output stays open."""
        if self._fd is not None and self._path is not None:
            os.close(self._fd)
        self._fd = None

    def _descriptor(self) -> int:
        if self._path is None:
            return sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        if self._stale:
            self._stale = False
            self.close()
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return self._fd

    def _failed(self, error: OSError, lost: int) -> None:
        self.lost += lost
        self._stale = True
        if not self._failing:  # once per outage: a full disk must not fill the log as well
            log.error("the journal cannot be written: %s; lines are being lost", error)
        self._failing = True
