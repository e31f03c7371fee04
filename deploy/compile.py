"""Translates the data path to C with mypyc, so that a request costs about half: the same sources, the same behaviour.

    deploy/compile.py                    into build/compiled, which `plimsoll` in this checkout then uses
    deploy/compile.py --in PACKAGE_DIR   in place, in an installed package (the container image)

Needs mypy, a C compiler and Python's headers; on Debian, as root, the latter two are installed when they are missing. Without
them nothing is built and the interpreter runs the sources as they are. A build of other sources is never used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a request passes through.
MODULES = {
    "": ("counting", "errors", "fleet", "ledgers"),
    "edge": (
        "agreement", "body", "checks", "content", "dispatch", "door", "features", "incoming", "intake", "job", "keys", "path",
        "protocol", "reader", "responses", "retry_budget", "strict_json", "tokens",
    ),
    "flow": (
        "bay", "breaker", "controller", "demand", "envelope", "grant", "lanes", "observed", "occupancy", "pool", "queue",
        "quotas", "shape", "shared", "topology", "waiting",
    ),
    "forward": ("account", "connection", "outbox", "relay", "sse", "upstream"),
    "observe": ("cells", "exchange", "histogram", "journal", "live", "metrics", "retest"),
}  # fmt: skip
SETUP = """
from setuptools import setup
from mypyc.build import mypycify
setup(name="gateway", packages=[], ext_modules=mypycify({modules!r}, opt_level="1", debug_level="0", multi_file=True))
"""
MYPY = "[mypy]\nplugins = pydantic.mypy\nignore_missing_imports = True\n"


def can_compile() -> bool:
    """Whether a C compiler and Python's headers are there."""
    return shutil.which("gcc") is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def install_compiler() -> None:
    """From Debian, where that may be done."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    # The headers of this very interpreter, where it is Debian's own.
    packages = ["gcc", "libc6-dev", f"python{sys.version_info.major}.{sys.version_info.minor}-dev"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
        if subprocess.run(["apt-get", *command], env=environment, capture_output=True).returncode:  # noqa: S607
            return


def compile_in(package: Path) -> bool:
    """Put the extension modules beside the sources of `package`. False, with the compiler's words, when that fails."""
    modules = [str(Path("gateway") / part / f"{name}.py") for part, names in MODULES.items() for name in names]
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        shutil.copytree(package, place / "gateway", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (place / "setup.py").write_text(SETUP.format(modules=modules))
        (place / "mypy.ini").write_text(MYPY)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        if done.returncode:
            print(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
            return False
        for built in (*place.glob("*.so"), *(place / "gateway").rglob("*.so")):
            relative = built.relative_to(place)
            shutil.copy2(built, package.parent / relative)
    return True


def main() -> int:
    """0 when it was built, need not be, or cannot be here, so that the sources are run; 1 when `--in` fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="package", type=Path, help="an installed package to compile in place")
    asked = parser.parse_args()
    os.environ["PLIMSOLL_INTERPRETED"] = "1"  # for the import below: the sources, whatever was built before
    sys.path.insert(0, str(ROOT))
    from gateway import digest_of

    sources = ROOT / "gateway"
    built = ROOT / "build" / "compiled" / "gateway"
    stamp, recipe = built / "sources.sha256", built / "recipe.py"
    same = stamp.is_file() and stamp.read_text().strip() == digest_of(sources)
    if asked.package is None and same and recipe.is_file() and recipe.read_bytes() == Path(__file__).read_bytes():
        return 0
    if not can_compile():
        install_compiler()
    if not can_compile():
        print("compile: no C compiler or no Python headers here; the gateway runs interpreted, at about half the speed")
        return 0
    started = time.monotonic()
    if asked.package is not None:
        return 0 if compile_in(asked.package.resolve()) else 1
    shutil.rmtree(built.parent, ignore_errors=True)
    shutil.copytree(sources, built, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if not compile_in(built):
        shutil.rmtree(built.parent)
        print("compile: the data path could not be compiled, see above; the gateway runs interpreted, at about half the speed")
        return 0
    shutil.copy2(__file__, recipe)
    stamp.write_text(digest_of(sources) + "\n")
    print(f"compile: the data path is compiled ({time.monotonic() - started:.0f} s); PLIMSOLL_INTERPRETED=1 runs the sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
