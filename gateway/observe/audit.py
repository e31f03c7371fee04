"""The audit log: who did what to the gateway, with the state before and after.

Owns one append-only file of JSON lines. Promises: an entry is on disk when `record` returns; one that cannot be written is an
`AuditError`, which the operator sees. Called for operator actions alone, which are rare, so it waits for the disk in a
thread. Never holds a key.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.errors import PlimsollError

log = logging.getLogger("plimsoll.audit")


class AuditError(PlimsollError):
    """The audit log cannot be written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action. `who` is a key's id or what stood in for it (signal, file); `what` is the action and its object."""

    who: str
    what: str
    result: str
    before: Any = None
    after: Any = None
    peer: str | None = None


class AuditLog:
    """Appends to `path`; None writes to the process's log instead. The latest entries stay readable in memory."""

    def __init__(self, path: Path | None, *, keep: int = 200) -> None:
        self._path = path
        self._recent: deque[dict[str, Any]] = deque(maxlen=keep)
        self._lock = asyncio.Lock()

    async def record(self, entry: Entry, wall: float) -> None:
        """Write one entry (`wall`: Unix seconds). Raises AuditError when it cannot be kept."""
        row: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(wall, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        }
        row |= {"who": entry.who, "what": entry.what, "result": entry.result}
        row |= {"before": entry.before, "after": entry.after, "peer": entry.peer}
        line = orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE)
        if self._path is None:
            log.info("audit %s", line.decode().rstrip())
        else:
            async with self._lock:
                await asyncio.to_thread(_append, self._path, line)
        self._recent.append(row)

    def recent(self, limit: int = 50) -> list[dict[str, Any]]:
        """The latest entries of this process, newest first."""
        return list(reversed(self._recent))[:limit]


def _append(path: Path, line: bytes) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise AuditError(f"the audit log {path} cannot be written: {error}") from error
