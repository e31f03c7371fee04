"""Print what a vLLM wheel needs, leaving out the builds that a CPU text server can do without.

Owns: reading `Requires-Dist` of one wheel. Promises: one requirement a line, markers evaluated for this interpreter,
extras and the packages in SKIP left out. Talks to: setup.sh, which gives the lines to pip.
"""

from __future__ import annotations

import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

SKIP = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def requirements(wheel: str) -> list[str]:
    """The wheel's own requirements, as pip reads them. Raises KeyError when the file has no METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise KeyError(f"{wheel}: expected one METADATA, found {len(names)}")
        metadata = Parser().parsestr(archive.read(names[0]).decode())
    parsed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    wanted = [req for req in parsed if req.name.lower() not in SKIP and _applies(req)]
    return [str(req).split(";")[0].strip() for req in wanted]


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
