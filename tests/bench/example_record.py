"""Measures the example record anew: `make example-record`, or `python -m tests.bench.example_record`.

A real vLLM with the tiny model, on this machine; by records/examples/plan.yaml. Replaces what it wrote before in
records/examples/: the record, its raw samples, and the report with its pictures. The model's directory has a relative name and
the library that vLLM would preload by its path is named already, so that no path of this machine gets into the record; if one
does, nothing is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.live.harness import ENVIRONMENT, MODELS, ROOT, VllmServer

EXAMPLES = ROOT / "records" / "examples"
MODEL = "tiny-llama"
BOUNDARY = "An example: nothing but the measurement reached this server, which listened on the loopback interface."
PATH_OF_A_MACHINE = re.compile(rb"(?<![\w.])/(?:home|root|tmp|Users|opt|usr|var|mnt|work|srv|etc|proc)/")
_WRITTEN = re.compile(r"[0-9a-f]{64}\.(json|jsonl\.zst)")


def plimsoll(*words: str, key: str = "") -> str:
    """Run the command; its standard output. Raises CalledProcessError."""
    environment = {**os.environ, "VLLM_API_KEY": key}
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *words], check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    return done.stdout


def measure(folder: Path, plan: Path) -> Path:
    """The record of a server that is started for it; its samples lie beside it."""
    shutil.copytree(MODELS / "none", folder / MODEL)
    libraries = next(ENVIRONMENT.glob("lib/python3.*/site-packages/torch/lib"))
    preload = {"LD_PRELOAD": "libgomp.so.1", "LD_LIBRARY_PATH": str(libraries)}
    server = VllmServer(folder / "vllm.log", model=Path(MODEL), environment=preload)
    try:
        server.start()
        server.wait_ready()
        words = ("--backend", server.url, "--plan", str(plan), "--out", str(folder / "out"), "--external-boundary", BOUNDARY)
        answer = json.loads(plimsoll("qualify", *words, "--json", key=server.api_key).splitlines()[-1])
    finally:
        server.stop()
    for note in answer["notes"]:
        print(f"note: {note}")
    record = Path(answer["path"])
    if found := PATH_OF_A_MACHINE.search(record.read_bytes()):
        sys.exit(f"the record holds a path of this machine, {found[0].decode()}...: nothing was replaced")
    return record


def replace(record: Path, examples: Path) -> Path:
    """Put the record and its samples where the last ones were."""
    for old in examples.iterdir():
        if _WRITTEN.fullmatch(old.name):
            old.unlink()
    for new in record.parent.iterdir():
        if _WRITTEN.fullmatch(new.name):
            shutil.copyfile(new, examples / new.name)
    return examples / record.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=EXAMPLES / "plan.yaml")
    parser.add_argument("--out", type=Path, default=EXAMPLES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plimsoll-example-") as name:
        record = replace(measure(Path(name), options.plan.resolve()), options.out.resolve())
    report = ("--out", str(record.parent / "report.html"), "--png", str(record.parent / "pictures"))
    plimsoll("records", "report", str(record), *report, "--policy", str(ROOT / "policies" / "example.yaml"))
    print(plimsoll("records", "verify", str(record)) + str(record))


if __name__ == "__main__":
    main()
