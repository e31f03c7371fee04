"""The guard of the live tests ends a server whose owner was killed, and only then."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

GUARD = Path(__file__).resolve().parents[1] / "live" / "guard.py"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
OWNER = f"""
import signal, subprocess, sys
server = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, start_new_session=True)
server.stdout.readline()
guard = subprocess.Popen([sys.executable, {str(GUARD)!r}, str(server.pid)], stdin=subprocess.PIPE, start_new_session=True)
print(server.pid, flush=True)
signal.pause()
"""


def test_a_server_dies_with_the_process_that_owned_it() -> None:
    """The owner is killed outright; its server, deaf to SIGTERM, ends. A pidfd tells, without polling."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, start_new_session=True)
    assert owner.stdout is not None
    server = os.pidfd_open(int(owner.stdout.readline()))
    try:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait(timeout=30)
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            assert selector.select(timeout=30), "the server outlived its owner"
    finally:
        os.close(server)
        owner.stdout.close()


def test_a_group_that_has_ended_is_left_alone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    gone.wait(timeout=30)
    guard = subprocess.run([sys.executable, str(GUARD), str(gone.pid)], stdin=subprocess.DEVNULL, timeout=30)
    assert guard.returncode == 0
