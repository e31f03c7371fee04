"""Whatever is installed to run the gateway has a licence that lets an operator use it so: an allow-list, and no guessing."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

ALLOWED = {
    "MIT", "MIT-0", "BSD", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "APACHE-2.0", "ISC", "PSF-2.0", "PYTHON-2.0", "MPL-2.0", "0BSD",
    "ZLIB",    "UNLICENSE", "CC0-1.0", "HPND", "MIT-CMU", "OFL-1.1", "PSF", "FREETYPE", "APACHE-2.0 WITH LLVM-EXCEPTION",
}  # fmt: skip
# What people write where an identifier is meant.
MEANT = {
    "MIT LICENSE": "MIT", "THE MIT LICENSE": "MIT", "APACHE 2.0": "APACHE-2.0", "APACHE SOFTWARE LICENSE": "APACHE-2.0",
    "APACHE LICENSE 2.0": "APACHE-2.0", "APACHE LICENSE, VERSION 2.0": "APACHE-2.0", "BSD LICENSE": "BSD",
    "BSD-3": "BSD-3-CLAUSE",    "3-CLAUSE BSD LICENSE": "BSD-3-CLAUSE", "BSD 3-CLAUSE LICENSE": "BSD-3-CLAUSE",
    "APACHE": "APACHE-2.0",
    "APACHE-2": "APACHE-2.0",
    "PYTHON SOFTWARE FOUNDATION LICENSE": "PSF-2.0", "MOZILLA PUBLIC LICENSE 2.0 (MPL 2.0)": "MPL-2.0",
    "NEW BSD": "BSD-3-CLAUSE",
    "ISC LICENSE (ISCL)": "ISC", "ISC LICENSE": "ISC", "THE UNLICENSE (UNLICENSE)": "UNLICENSE",
}  # fmt: skip


def runtime(name: str = "plimsoll-gateway", extras: frozenset[str] = frozenset({"otel"})) -> dict[str, Distribution]:
    """All distributions that an installation without [dev] brings, by name."""
    found: dict[str, Distribution] = {}
    pending = [(name, extras)]
    while pending:
        current, wanted = pending.pop()
        for line in distribution(current).requires or ():
            need = Requirement(line)
            if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                continue
            key = re.sub(r"[-_.]+", "-", need.name).lower()
            if key in found:
                continue
            try:
                found[key] = distribution(need.name)
            except PackageNotFoundError:
                pytest.fail(f"{current} needs {need.name}, which is not installed")
            pending.append((need.name, frozenset(need.extras)))
    return found


def licences(dist: Distribution) -> set[str]:
    """The identifiers a distribution states: its expression, else its classifiers, else its one-line licence field."""
    meta = dist.metadata
    if expression := meta.get("License-Expression"):
        return _parts(expression)
    rows = [row.rpartition(" :: ")[2] for row in meta.get_all("Classifier") or () if row.startswith("License ::")]
    rows = [row for row in rows if row != "OSI Approved"] or [(meta.get("License") or "").strip()]
    return {MEANT.get(part, part) for row in rows for part in ({row.upper()} if row.upper() in MEANT else _parts(row))}


def _parts(expression: str) -> set[str]:
    """The identifiers of an SPDX expression. Of alternatives all have to be allowed: simpler, and on the safe side."""
    return {part.strip().upper() for part in re.split(r" AND | OR |[()]", expression, flags=re.IGNORECASE) if part.strip()}


FOUND = runtime()


@pytest.mark.parametrize("name", sorted(FOUND))
def test_its_licence_is_allowed(name):
    stated = licences(FOUND[name])
    assert stated and stated <= ALLOWED, f"{name} states {stated or 'nothing'}: look at it, and then at the list"


def test_the_list_of_what_is_installed_is_not_empty():
    assert {"uvicorn", "httptools", "pydantic", "pyjwt", "cryptography", "starlette"} <= set(FOUND)


def test_another_licence_is_noticed():
    assert not {"GPL-3.0-ONLY", "AGPL-3.0", "UNKNOWN", ""} & ALLOWED
