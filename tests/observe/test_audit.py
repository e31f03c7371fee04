from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from gateway.observe.audit import AuditError, AuditLog, Entry


async def test_entries_are_on_disk_in_order_and_private(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    await asyncio.gather(
        *(log.record(Entry("ops", f"drain b{n}", "done", {"draining": False}, {"draining": True}), 1.7e9) for n in range(20))
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["what"] for row in rows] == [f"drain b{n}" for n in range(20)]
    assert rows[0] == {"time": "2023-11-14T22:13:20.000Z", "who": "ops", "what": "drain b0", "result": "done",
                       "before": {"draining": False}, "after": {"draining": True}, "peer": None}  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [row["what"] for row in log.recent(2)] == ["drain b19", "drain b18"]


async def test_an_entry_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)  # a folder
    with pytest.raises(AuditError):
        await log.record(Entry("ops", "reload", "done"), 1.0)
    assert log.recent() == []


async def test_without_a_file_the_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="plimsoll.audit")
    await AuditLog(None).record(Entry("ops", "reload", "done"), 1.0)
    assert '"what":"reload"' in caplog.text
