"""As in the container: no privileges, nothing writable. Requests are served, the loss is said, nothing else is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
from pathlib import Path

import httpx
import pytest

from gateway.observe.retest import Change
from gateway.observe.retest_file import RETRY_S, LedgerFile, load
from tests.deploy.stand import Stand, until


@pytest.fixture
def unprivileged() -> tuple[str, ...]:
    """What stands before a command so that not even root may write where the mode forbids it (compose: cap_drop ALL)."""
    if os.geteuid() != 0:
        return ()
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "setpriv is part of util-linux"
    return (setpriv, "--bounding-set=-all", "--inh-caps=-all")


def test_the_gateway_serves_where_it_can_write_nothing(own_copy, tmp_path, unprivileged):
    stand = Stand(own_copy(tmp_path / "stand"))
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    closed = [nowhere, stand.records, stand.policy_file.parent]
    prefix = ("sh", "-c", f'chmod 0555 {" ".join(map(str, closed))} && cd {nowhere} && exec "$@"', "sh", *unprivileged)
    try:
        with stand.running(prefix, HOME=str(nowhere), TMPDIR=str(nowhere), MPLCONFIGDIR=str(nowhere)), httpx.Client() as client:
            assert "cannot be written" in stand.log("gateway")
            assert stand.chat(client) == 200
            assert stand.chat(client, words=2000) == 400  # a retest trigger, which the ledger would keep
            until(10, lambda: "the retest ledger cannot be written" in stand.log("gateway"), lambda: stand.log("gateway"))
            assert stand.chat(client) == 200 and stand.ready()
            assert open_for_writing(stand.gateway.pid) <= {stand.folder / "gateway.log"}
            stand.gateway.send_signal(signal.SIGTERM)
            assert stand.gateway.wait(10) == 0
    finally:
        for folder in closed:
            folder.chmod(0o755)
    assert list(nowhere.iterdir()) == []
    assert [path.suffix for path in stand.records.iterdir()] == [".json"]
    assert "Traceback" not in stand.log("gateway")


def open_for_writing(pid: int) -> set[Path]:
    """Regular files that a process has open for writing."""
    found = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        target = Path(f"/proc/{pid}/fd/{entry.name}")
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            flags = int(next(line.split()[1] for line in entry.read_text().splitlines() if line.startswith("flags:")), 8)
            if flags & os.O_ACCMODE != os.O_RDONLY and stat.S_ISREG(target.stat().st_mode):
                found.add(target.readlink())
    return found


async def test_a_failed_write_is_tried_again_later_and_at_the_end(tmp_path, caplog):
    blocked = tmp_path / "records"
    blocked.write_text("a file where the folder should be")
    keeper = LedgerFile(blocked / "retest.json")
    keeper.ledger.changed(Change(1.0, "tiny", "a", None, None, ("model.dtype",)))
    for now in (10.0, 11.0, 12.0):
        await keeper.keep(now)
    assert caplog.text.count("cannot be written") == 1
    blocked.unlink()
    await keeper.keep(10.0 + RETRY_S - 1)
    assert not blocked.exists()
    await keeper.keep(10.0 + RETRY_S)
    assert load(blocked / "retest.json").document() == keeper.ledger.document()


async def test_at_the_end_it_is_tried_whatever_failed_before(tmp_path):
    blocked = tmp_path / "records"
    blocked.write_text("")
    keeper = LedgerFile(blocked / "retest.json")
    keeper.ledger.changed(Change(1.0, "tiny", "a", None, None, ()))
    await keeper.keep(10.0)
    blocked.unlink()
    await keeper.keep(10.1, last=True)
    assert (blocked / "retest.json").is_file()
