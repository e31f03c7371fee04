"""A million inputs in one bounded run: `make fuzz`, or `python -m tests.fuzz.campaign --inputs N --seed N`.

Owns: what part of the inputs each way and each target gets, the count of what was really played, and the table at the end.
Four ways: the seeded fuzzer (`mutations`) and hypothesis in this process, atheris in one of its own, and a real gateway over
real sockets (`wire`), there with schemathesis on the gateway's own document. A finding ends the run with its input, its
target and the seed that makes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from tests.edge import test_fuzz as documents

from . import wire
from .mutations import SEEDS, inputs
from .targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
INPUTS = 1_000_000
WAYS = ("seeded", "hypothesis", "atheris", "sockets")
SEEDED = {"requests": 0.08, "repeats": 0.02, "bodies": 0.20, "counting": 0.12, "headers": 0.18, "events": 0.12, "answers": 0.14}
HYPOTHESIS = 0.004  # of each target
GUIDED = {
    "requests": 0.006,
    "repeats": 0.002,
    "bodies": 0.02,
    "counting": 0.014,
    "headers": 0.02,
    "events": 0.01,
    "answers": 0.02,
}
SOCKETS = {"requests": 0.014, "bodies": 0.012, "answers": 0.008, "admin": 0.004}
Counts = dict[tuple[str, str], int]


def seeded(target: str, seed: int, count: int) -> int:
    """Play damaged inputs of one target in this process; how many."""
    play, played = TARGETS[target], 0
    for data in inputs(target, seed, count):
        try:
            play(data)
        except BaseException as error:
            error.add_note(f"{target} seed {seed}: {data!r}")
            raise
        played += 1
    return played


def by_hypothesis(target: str, seed: int, count: int) -> int:
    """Play what hypothesis makes: any bytes, spliced seeds, and for bodies whole documents; how many."""
    played = 0

    def property_of(strategy: st.SearchStrategy, play: Callable[..., None], examples: int) -> None:
        @hypothesis_seed(seed)
        @settings(
            max_examples=max(1, examples), deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def check(made: object) -> None:
            nonlocal played
            played += 1
            play(made)

        check()

    spliced = st.builds(
        lambda one, patch, at, two: one[: at % (len(one) + 1)] + patch + two[at % (len(two) + 1) :],
        st.sampled_from(SEEDS[target]), st.binary(max_size=12), st.integers(0, 2000), st.sampled_from(SEEDS[target]),
    )  # fmt: skip
    half = count // 2 if target in ("bodies", "counting") else 0
    property_of(st.binary(max_size=200) | spliced, TARGETS[target], count - half)
    if target == "counting":
        property_of(st.tuples(st.integers(0, 2), documents.LOOKS), question, half)
    elif half:
        made = st.tuples(st.sampled_from(documents.PROXIED), documents.LOOKS, st.dictionaries(documents.KEYS, documents.TREES))
        property_of(made, document, half)
    return played


def document(made: tuple[str, dict, dict]) -> None:
    """One document on one route, under a tight and an open policy."""
    path, found, more = made
    raw = documents.json.dumps({**more, **found}).encode()
    for lookup in (documents.LOOKUP, documents.OPEN):
        documents.check(path, raw, lookup)


def question(made: tuple[int, dict]) -> None:
    """One document on one of the routes about tokens."""
    TARGETS["counting"](bytes((made[0], 0)) + documents.json.dumps(made[1]).encode())


def by_atheris(target: str, seed: int, count: int) -> int:
    """Let atheris follow the branches of our own code; how many runs. 0 where it is not to be had."""
    if importlib.util.find_spec("atheris") is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(SEEDS[target]):
            (corpus / f"seed-{number}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.guided", target, f"-runs={count}", f"-seed={seed}", "-timeout=300",
                   "-max_len=4096", f"-artifact_prefix={folder}/", str(corpus)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{target} seed {seed}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert f"Done {count}" in done.stderr, done.stderr[-1000:]
    return count


def run(total: int, seed: int, say: Callable[[str], None] = print) -> Counts:
    """Play `total` inputs or a few more; the counts by way and target. Raises what a finding raises."""
    counts: Counts = {}
    started = time.monotonic()

    def note(way: str, target: str, played: int, since: float) -> None:
        counts[way, target] = played
        say(f"{way:11} {target:9} {played:>9,} in {time.monotonic() - since:6.1f} s")

    for target, share in GUIDED.items():
        since, wanted = time.monotonic(), max(1, int(total * share))
        note("atheris", target, by_atheris(target, seed, wanted), since)
    for target, share in SEEDED.items():
        since = time.monotonic()
        missing = max(1, int(total * GUIDED[target])) - counts["atheris", target]
        note("seeded", target, seeded(target, seed, max(1, round(total * share)) + missing), since)
        since = time.monotonic()
        note("hypothesis", target, by_hypothesis(target, seed, max(1, int(total * HYPOTHESIS))), since)
    since = time.monotonic()
    for target, played in asyncio.run(wire.run({t: max(1, int(total * s)) for t, s in SOCKETS.items()}, seed)).items():
        note("sockets", target, played, since)
    rest = total - sum(counts.values())  # hypothesis ends early where there is nothing new
    if rest > 0:
        since = time.monotonic()
        note("seeded", "headers", counts["seeded", "headers"] + seeded("headers", seed + 1, rest), since)
    say(f"seed {seed}, {time.monotonic() - started:.0f} s")
    return counts


def table(counts: Counts) -> str:
    """The counts by target and way, with their sums."""
    targets = sorted({target for _, target in counts})
    lines = [f"{'target':12}" + "".join(f"{way:>12}" for way in (*WAYS, "all"))]
    for target in targets:
        row = [counts.get((way, target), 0) for way in WAYS]
        lines.append(f"{target:12}" + "".join(f"{number:>12,}" for number in (*row, sum(row))))
    sums = [sum(number for (way, _), number in counts.items() if way == each) for each in WAYS]
    lines.append(f"{'all':12}" + "".join(f"{number:>12,}" for number in (*sums, sum(sums))))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=int(os.environ.get("PLIMSOLL_FUZZ_INPUTS", INPUTS)))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PLIMSOLL_FUZZ_SEED", "1")))
    asked = parser.parse_args()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # as `plimsoll serve` does
    counts = run(asked.inputs, asked.seed, lambda line: print(line, flush=True))
    print(table(counts))
    assert sum(counts.values()) >= asked.inputs


if __name__ == "__main__":
    main()
