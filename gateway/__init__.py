"""Plimsoll, an OpenAI-compatible gateway in front of vLLM.

In a checkout, deploy/compile.py translates the data path to C (mypyc) beside the sources, in build/compiled. That build is
used while it was made from just these sources; otherwise, and with PLIMSOLL_INTERPRETED=1, the interpreter runs the same code.
"""

import hashlib
import os
import sys
from pathlib import Path


def digest_of(package: Path) -> str:
    """SHA-256 over the names and bytes of the Python files of a package."""
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        found.update(b"%b\0%b\0" % (str(file.relative_to(package)).encode(), file.read_bytes()))
    return found.hexdigest()


def _compiled(package: Path) -> Path | None:
    """The compiled build of this checkout's package; None where there is none, or one of other sources."""
    built = package.parent / "build" / "compiled" / "gateway"
    stamp = built / "sources.sha256"
    if os.environ.get("PLIMSOLL_INTERPRETED") == "1" or not stamp.is_file():
        return None
    return built if stamp.read_text().strip() == digest_of(package) else None


if (_build := _compiled(Path(__file__).resolve().parent)) is not None:
    __path__ = [str(_build)]
    sys.path.append(str(_build.parent))  # where the modules' shared code lies
