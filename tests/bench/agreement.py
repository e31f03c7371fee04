"""`plimsoll qualify` beside `vllm bench serve` on one real vLLM: `make bench-agreement`, or `python -m tests.bench.agreement`.

Both commands measure the same shapes on the same server, in turns (A B, B A, A B, ...). Compared are the medians over the
turns of request and token throughput and of p50 and p95 of TTFT, TPOT and e2e. They agree when they differ by no more than 5 %,
or than a tool differs from itself: the median difference between two of its own runs, of the tool where it is larger. Prints a
table, writes tests/bench/results/agreement-vllm.json; the exit code is 1 when a line does not agree.

What it takes for both to send the same load, and where they would differ otherwise:
- The prefix cache is off: `vllm bench` draws prompts that overlap, sends its first one again and again before it begins, and the
  same ones in every run.
- Both are told min_tokens and ignore_eos, and a bias towards one whole word: half a character is a token without text, which is
  the first token for `vllm bench` and not yet content for `qualify`.
- The closed loop has no bursts (`burst_every: null`), because `vllm bench` knows none; each begins with C requests at once.
- The model is wider than the one of the live tests, and the engine has its core for itself: with a step of 2 ms the measuring
  process takes a third of two cores, and each tool would measure its own price.
- A run with a failed request, or with other lengths than were asked for, is no run: `vllm bench` counts both as success.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.evidence.record import Level, load
from tests.live.harness import ENVIRONMENT, MODELS, VllmServer

RESULTS = Path(__file__).resolve().parent / "results"
TOOLS = ("plimsoll qualify", "vllm bench")
WITHIN = 0.05
WIDER = {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 5,
         "head_dim": 64}  # fmt: skip
BODY = {"logit_bias": {"300": 100}}
WARMUP = 8
RUN_TIMEOUT_S = 300
INPUT_TOLERANCE = 0.03  # `vllm bench` sends text, which does not always come back as the tokens it was made of
METRICS = ("requests/s", "output tokens/s", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "e2e p50", "e2e p95")

Run = dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one size, `concurrency` at once."""

    input: int
    output: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.input} in, {self.output} out, {self.concurrency} at once"


SHAPES = (Shape(64, 32, 1, 48), Shape(64, 32, 4, 96), Shape(96, 16, 8, 96))


class NoRun(Exception):
    """A tool failed, or did not send what it was asked for; the message holds its last words."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one shape. `spread` is by how much runs of one tool differ, as a share, for the tool where it is larger."""

    metric: str
    ours: float
    theirs: float
    difference: float
    spread: float

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= max(WITHIN, self.spread)


def spread(values: Sequence[float]) -> float:
    """The median difference between two of the values, as a share of their median."""
    return statistics.median(abs(a - b) for a, b in combinations(values, 2)) / statistics.median(values)


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> list[Line]:
    """Every metric, medians of the runs."""
    lines = []
    for metric in METRICS:
        one, other = ([run[metric] for run in runs] for runs in (ours, theirs))
        a, b = statistics.median(one), statistics.median(other)
        lines.append(Line(metric, a, b, (a - b) / b, max(spread(one), spread(other))))
    return lines


def plan(shape: Shape) -> dict[str, Any]:
    """The plan of `qualify` for a shape: one repeat, and the warm-up of the other tool."""
    sides = {side: {"min": size, "max": size} for side, size in (("input_tokens", shape.input), ("output_tokens", shape.output))}
    cell = {**sides, "concurrency": [shape.concurrency], "requests": shape.requests, "batches": 1, "burst_every": None}
    return {
        "schema": "plimsoll-plan/v1", "name": "agreement", "repeats": 1, "max_lag_ms": 1000,
        "warmup": {"requests": WARMUP, "window": WARMUP, "tolerance": 1, "max_requests": 16 * WARMUP},
        "cells": [{**cell, "max_seconds": RUN_TIMEOUT_S, "body": BODY}],
    }  # fmt: skip


def ours(server: VllmServer, shape: Shape, folder: Path, seed: int) -> Run:
    """One run of `plimsoll qualify`. Raises `NoRun`."""
    (folder / "plan.json").write_text(json.dumps({**plan(shape), "seed": seed}), encoding="utf-8")
    words = ("qualify", "--backend", server.url, "--plan", str(folder / "plan.json"), "--out", str(folder / "records"), "--json")
    answer = _run([sys.executable, "-m", "gateway", *words], {**os.environ, "VLLM_API_KEY": server.api_key}, folder)
    record = load(Path(json.loads(answer.splitlines()[-1])["path"]).read_bytes())
    (slice_,) = record.slices
    (level,) = slice_.levels
    seen = (slice_.observed_input_tokens, slice_.observed_output_tokens)
    asked = ((shape.input, shape.input), (shape.output, shape.output))
    failed = level.errors + level.timeouts + level.cancelled
    if tuple((each.min, each.max) for each in seen if each is not None) != asked or failed or level.void:
        raise NoRun(f"qualify: {failed} failed, sizes {seen}, void: {level.void}")
    return _of_level(level)


def _of_level(level: Level) -> Run:
    rates = {"requests/s": level.requests_per_s, "output tokens/s": level.output_tokens_per_s}
    times = {"TTFT": level.ttft_ms, "TPOT": level.tpot_ms, "e2e": level.e2e_ms}
    found = {**rates, **{f"{name} {p}": getattr(each, p) for name, each in times.items() for p in ("p50", "p95")}}
    return {name: float(value) for name, value in found.items() if value is not None}


def theirs(server: VllmServer, shape: Shape, folder: Path, seed: int) -> Run:
    """One run of `vllm bench serve`. Raises `NoRun`."""
    command = [
        str(ENVIRONMENT / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", "tiny",
        "--tokenizer", str(MODELS / "none"), "--dataset-name", "random", "--seed", str(seed),
        "--random-input-len", str(shape.input), "--random-output-len", str(shape.output), "--ignore-eos",
        "--extra-body", json.dumps({"min_tokens": shape.output, **BODY}),
        "--num-prompts", str(shape.requests), "--max-concurrency", str(shape.concurrency), "--num-warmups", str(WARMUP),
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,95", "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "bench.json",
    ]  # fmt: skip
    _run(command, {**server.process_environment(), "OPENAI_API_KEY": server.api_key, "NO_PROXY": "127.0.0.1"}, folder)
    return of_result(json.loads((folder / "bench.json").read_bytes()), shape)


def of_result(result: Mapping[str, Any], shape: Shape) -> Run:
    """The metrics of a result of `vllm bench serve --save-detailed`. Raises `NoRun` when it did not send what was asked."""
    lengths, failures = set(result["output_lens"]), [error for error in result["errors"] if error]
    mean_input = result["total_input_tokens"] / shape.requests
    whole = result["completed"] == shape.requests and not failures and lengths == {shape.output}
    if not whole or abs(mean_input / shape.input - 1) > INPUT_TOLERANCE:
        raise NoRun(f"vllm bench: {result['completed']} of {shape.requests}, {failures[:1]}, out {lengths}, in {mean_input}")
    times = {"TTFT": "ttft", "TPOT": "tpot", "e2e": "e2el"}
    found = {f"{name} {p}": result[f"{p}_{key}_ms"] for name, key in times.items() for p in ("p50", "p95")}
    return {"requests/s": result["request_throughput"], "output tokens/s": result["output_throughput"], **found}


def _run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """On the core that the engine does not have. Raises `NoRun` with the last lines of both streams."""
    cores = os.cpu_count() or 1
    pinned = ["taskset", "-c", str(cores - 1)] if shutil.which("taskset") and cores > 1 else []
    environment = environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [*pinned, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NoRun(f"{command[:4]} ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def wider_model(folder: Path) -> Path:
    """A model of the live tests' kind with more to compute in each step; relative to `folder`, as the server is started there."""
    shutil.copytree(MODELS / "none", folder / "wide")
    path = folder / "wide" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | WIDER), encoding="utf-8")
    return Path("wide")


def measure(server: VllmServer, shapes: Sequence[Shape], turns: int, folder: Path) -> dict[Shape, dict[str, list[Run]]]:
    """Every shape `turns` times by each tool; who goes first changes from turn to turn, and the prompts with it."""
    found: dict[Shape, dict[str, list[Run]]] = {shape: {tool: [] for tool in TOOLS} for shape in shapes}
    for turn in range(turns):
        for shape in shapes:
            order = TOOLS if turn % 2 == 0 else TOOLS[::-1]
            for tool in order:
                run = (ours if tool == TOOLS[0] else theirs)(server, shape, folder, turn)
                found[shape][tool].append(run)
                print(f"turn {turn + 1}, {shape.name}, {tool}: e2e p50 {run['e2e p50']:.1f} ms", file=sys.stderr, flush=True)
    return found


def show(shape: Shape, lines: Sequence[Line]) -> None:
    """One table, times in milliseconds."""
    table = Table(title=f"{shape.name}; {shape.requests} requests a run")
    for name in ("", *TOOLS, "difference", "spread of a tool", ""):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(line.metric, f"{line.ours:.2f}", f"{line.theirs:.2f}", f"{line.difference:+.1%}", f"{line.spread:.1%}",
                      "agrees" if line.agrees else "DIFFERS")  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="alternations; at least 5 for a result that counts")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--out", type=Path, default=RESULTS / "agreement-vllm.json")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("a spread needs two turns")
    cores = os.cpu_count() or 1
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 2}" if cores > 2 else "0"}
    with tempfile.TemporaryDirectory(prefix="plimsoll-agreement-") as name:
        folder = Path(name)
        server = VllmServer(folder / "vllm.log", ("--no-enable-prefix-caching",), environment=bind, model=wider_model(folder))
        try:
            server.start()
            server.wait_ready()
            found = measure(server, SHAPES[: options.shapes], options.turns, folder)
            configuration = server.identity()["configuration"]
        finally:
            server.stop()
    tables = {shape: compare(*(runs[tool] for tool in TOOLS)) for shape, runs in found.items()}
    for shape, lines in tables.items():
        show(shape, lines)
    agree = all(line.agrees for lines in tables.values() for line in lines)
    document = {
        "vllm": configuration["versions"]["vllm"], "hardware": configuration["hardware"], "model": WIDER, "turns": options.turns,
        "within": WITHIN, "agree": agree,
        "shapes": [
            {"shape": asdict(shape), "lines": [asdict(line) | {"agrees": line.agrees} for line in lines], "runs": found[shape]}
            for shape, lines in tables.items()
        ],
    }  # fmt: skip
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{'All lines agree' if agree else 'Not all lines agree'}; {options.turns} turns, {options.out.name}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
