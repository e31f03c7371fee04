"""The retest ledger's file: read once at start, replaced whole.

Owns one path. Promises: a reader sees the old document or the new one, never half of either; a damaged file is set
aside under another name and said so, it never keeps the gateway from starting. `save` may run in any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import orjson

from gateway.observe.retest import Ledger, LedgerError

log = logging.getLogger("plimsoll.retest")


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
