"""One target under atheris: `python -m tests.fuzz.guided TARGET [libFuzzer options] CORPUS`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["gateway"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
