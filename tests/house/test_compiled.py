"""The compiled build: what goes into it, and that only a build of these very sources is used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import digest_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import compile as build  # noqa: E402  (deploy/compile.py)

FILES = [ROOT / "gateway" / part / f"{name}.py" for part, names in build.MODULES.items() for name in names]


def generators(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions with a yield of their own."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f for f in functions if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(f))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_waits_for_a_generator_to_be_thrown_away(file: Path) -> None:
    """The interpreter runs a generator's `finally` as soon as nobody holds it; compiled, it never runs."""
    for function in generators(ast.parse(file.read_text())):
        guarded = [node for node in ast.walk(function) if isinstance(node, ast.Try | ast.With) and _yields(node)]
        assert not guarded, f"{file.name}: {function.name} cleans up around a yield"


def _yields(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))


def copied(tmp_path: Path) -> Path:
    """A checkout with a build of its sources beside it, as far as importing goes."""
    package = tmp_path / "gateway"
    shutil.copytree(ROOT / "gateway", package, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path / "build" / "compiled" / "gateway"
    shutil.copytree(package, built)
    (built / "sources.sha256").write_text(digest_of(package) + "\n")
    return package


def where(package: Path, interpreted: str = "0") -> Path:
    """The folder that `gateway.errors` comes from."""
    code = "import gateway.errors as e; print(e.__file__)"
    environment = {**os.environ, "PLIMSOLL_INTERPRETED": interpreted}
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, env=environment, capture_output=True, text=True)
    return Path(done.stdout.strip()).parent


def test_a_build_of_these_sources_is_used_and_can_be_declined(tmp_path: Path) -> None:
    package = copied(tmp_path)
    assert where(package) == tmp_path / "build" / "compiled" / "gateway"
    assert where(package, interpreted="1") == package


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_a_build_of_other_sources_is_not_used(tmp_path: Path, change: str) -> None:
    package = copied(tmp_path)
    if change == "edit":
        (package / "errors.py").write_text((package / "errors.py").read_text() + "\n")
    elif change == "add":
        (package / "edge" / "more.py").write_text("")
    else:
        (package / "edge" / "corpus.py").unlink()
    assert where(package) == package


def test_nothing_interpreted_inherits_from_what_is_compiled() -> None:
    """That is a TypeError when such an object is made. Exceptions and enumerations are never compiled to native classes."""
    native: set[str] = set()
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            foreign = {"Protocol", "NamedTuple", "StrEnum", "Enum", "PlimsollError", "Exception", "ValueError", "OSError"}
            if isinstance(node, ast.ClassDef) and not bases & foreign:
                native.add(node.name)
    others = [file for file in (ROOT / "gateway").rglob("*.py") if file not in FILES]
    assert {"Controller", "Grant", "Job", "Connection"} <= native
    for file in others:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found = {ast.unparse(base) for base in node.bases} & native
                assert not found, f"{file.relative_to(ROOT)}: {node.name} inherits from {found}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_compares_says_how_it_hashes(file: Path) -> None:
    """The interpreter keeps the hash of identity beside a `__lt__`; compiled, the class cannot be put into a set any more."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            assert "__hash__" in names or not names & {"__lt__", "__le__", "__gt__", "__ge__"}, node.name
