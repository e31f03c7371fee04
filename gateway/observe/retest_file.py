"""The retest ledger's file: read once at start, replaced whole.

Owns one path, and a lock beside it: of several gateways with one folder and one address (containers on one volume) each keeps
a file of its own, and finds one again when it is restarted. Promises: a reader sees the old document or the new one, never half
of either; a damaged file is set aside under another name and said so, it never keeps the gateway from starting. `save` may run
in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import orjson

from gateway.observe.retest import Ledger, LedgerError

log = logging.getLogger("plimsoll.retest")

MOST_FILES = 64
RETRY_S = 60.0  # after a failure: a full or read-only disk is told once a minute, not at every trigger


class LedgerFile:
    """The ledger in memory and its file. Without a file that can be written, triggers are kept until the process ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = _own(path)
        self.ledger = load(self._path)
        self._saved = 0
        self._again_at = 0.0

    def check(self) -> None:
        """Say so, once, when the folder cannot be written."""
        folder = self._path.parent
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            log.warning(
                "the folder of records %s cannot be written: requests are served, but retest triggers are forgotten at a restart "
                "and no record can be pushed",
                folder,
            )

    def release(self) -> None:
        """Let another gateway have the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def keep(self, now: float, *, last: bool = False) -> None:
        """Write what is new (`now`: monotonic seconds); `last`: at once, whatever failed before."""
        if self.ledger.version == self._saved or (now < self._again_at and not last):
            return
        version, document = self.ledger.version, self.ledger.document()
        if await asyncio.to_thread(save, self._path, document):
            self._saved = version
        else:
            self._again_at = now + RETRY_S


def _own(path: Path) -> tuple[Path, int | None]:
    """The path itself, or the first of its kind that no other process holds; and the lock (None where none can be had)."""
    for number in range(1, MOST_FILES + 1):
        mine = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            lock = os.open(mine.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # no folder, or one that cannot be written: nothing will be kept, which `check` tells
            return path, None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except OSError:  # a file system without locks
            os.close(lock)
            return mine, None
        else:
            return mine, lock
    return path.with_stem(f"{path.stem}-{os.getpid()}"), None


def load(path: Path) -> Ledger:
    """The ledger in `path`, or an empty one where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Ledger()
    except OSError as error:
        log.error("the retest ledger %s cannot be read: %s; starting an empty one", path, error)
        return Ledger()
    try:
        return Ledger.from_document(orjson.loads(data))
    except (orjson.JSONDecodeError, LedgerError) as error:
        aside = path.with_name(path.name + ".damaged")
        log.error("the retest ledger %s is damaged (%s); it is set aside as %s", path, error, aside.name)
        _set_aside(path, aside)
        return Ledger()


def save(path: Path, document: dict[str, Any]) -> bool:
    """Replace the file by `document` (from `Ledger.document`); False, and a log line, when the disk refuses."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(orjson.dumps(document))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        log.error("the retest ledger cannot be written to %s: %s", path, error)
        with contextlib.suppress(OSError):
            part.unlink()
        return False
    return True


def _set_aside(path: Path, aside: Path) -> None:
    try:
        path.replace(aside)
    except OSError as error:
        log.error("it cannot be set aside: %s", error)
