"""Ends a process group when its owner is gone: `python guard.py GROUP`, with the owner holding the other end of stdin.

Owns: the last word on a server whose test process was killed. Promises: standard library only; when stdin ends, the group
gets SIGKILL (a vLLM that is still starting does not heed SIGTERM), and a group that has ended already is left alone.
Talks to: `harness`, which starts it and closes its stdin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    group = int(sys.argv[1])
    while os.read(0, 4096):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
