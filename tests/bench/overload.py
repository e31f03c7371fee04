"""Goodput under overload: `make bench-overload`, or `python -m tests.bench.overload [--backend vllm] [--seconds N]`.

Offered load at 0.5, 1, 2 and 4 times what was qualified, mixed sizes, Poisson arrivals that do not wait for answers. Each
system is measured in the same run over the same backend: direct, through this gateway, and through vllm-router and LiteLLM with
their defaults where they are installed. Goodput is the number of answers a second that arrive whole within `arrival_slo`,
counted from the intended arrival, for every system alike. Prints a table; writes JSON, PNG and SVG into tests/bench/results/.

The bar: through the gateway at 4 × load goodput is at least 90 % of its value at 1 ×, and the share of admitted requests over the
record's p95 bound is not significantly above 5 % (one-sided binomial, alpha 0.01).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import uvloop

from gateway.edge.keys import new_key
from gateway.evidence.record import Level, Record, load
from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import Upstream
from gateway.qualify.client import Job, Place
from gateway.qualify.load import Amount, Load
from gateway.qualify.plan import Cell, Limits
from gateway.qualify.prompts import Prompts, Vocabulary
from gateway.qualify.samples import RawSample
from gateway.qualify.sizes import Size

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache/gateway-peers"))
FACTORS = (0.5, 1.0, 2.0, 4.0)
INPUT, OUTPUT, CONCURRENCY = (16, 256), (1, 32), 8
BOUND_SHARE, ALPHA = 0.05, 0.01
PLAN = f"""\
schema: plimsoll-plan/v1
name: overload
route: chat
seed: 11
repeats: 3
warmup: {{requests: 8, window: 4, tolerance: 0.5, max_requests: 48}}
cells:
  - input_tokens: {{min: {INPUT[0]}, max: {INPUT[1]}}}
    output_tokens: {{min: {OUTPUT[0]}, max: {OUTPUT[1]}}}
    concurrency: [{CONCURRENCY}]
    requests: 480
    batches: 60
    max_seconds: 60
timeouts: {{connect_s: 5, first_token_s: 60, execution_s: 120}}
max_lag_ms: 250
"""
POLICY = """\
server: {{listen: "127.0.0.1:{port}", admin_listen: null}}
records: {records}
backends: {{a: {{url: "{backend}", api_key_env: VLLM_API_KEY}}}}
models:
  tiny:
    backends: [a]
    target: {{slo: {{e2e_ms_p95: 600000}}, arrival_slo: {{e2e_ms_p95: {slo}}}}}
queue: {{max_requests: 1000}}
tenants: {{bench: {{}}}}
keys: [{{id: bench, hash: "{hash}", role: client, tenant: bench}}]
journal: {{path: {journal}}}
"""
LITELLM = """\
model_list:
- model_name: tiny
  litellm_params: {{model: hosted_vllm/tiny, api_base: "{backend}/v1", api_key: os.environ/VLLM_API_KEY}}
general_settings: {{master_key: sk-bench}}
litellm_settings: {{telemetry: false}}
"""


@dataclass(frozen=True, slots=True)
class System:
    """One way to the backend: its command (None: nothing in between) and the key it wants."""

    name: str
    command: list[str] | None
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one load. Rates a second, times in milliseconds from the intended arrival; None: nothing to tell."""

    system: str
    factor: float
    offered_per_s: float
    goodput_per_s: float
    answered_per_s: float
    refused: int
    failed: int
    sent: int
    ttft_p95_ms: float | None
    e2e_p95_ms: float | None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(command: list[str] | None, log: Path) -> Iterator[None]:
    """A process of ours and everything it started, ended at the end."""
    if command is None:
        yield
        return
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, cwd=ROOT)
    try:
        yield
    finally:
        for sign in (15, 9):
            try:
                os.killpg(process.pid, sign)
                process.wait(20)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def until(what: str, seconds: float, ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    sys.exit(f"{what} did not get ready within {seconds:g} s; its log ends:\n{log.read_text()[-2000:]}")


def answers(port: int, key: str) -> bool:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ready? " * 8}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers=headers, timeout=10, trust_env=False)
    return answer.status_code == 200


def systems(folder: Path, backend: str, slo_ms: float, wanted: set[str]) -> list[System]:
    """What can be measured here."""
    api_key = os.environ["VLLM_API_KEY"]
    port, parts = free_port(), backend.rsplit(":", 1)
    key, digest = new_key()
    (folder / "policy.yaml").write_text(
        POLICY.format(
            port=port,
            records=folder / "records",
            backend=backend,
            slo=round(slo_ms),
            hash=digest,
            journal=folder / "journal.jsonl",
        )
    )
    (folder / "litellm.yaml").write_text(LITELLM.format(backend=backend))
    router, litellm = PEERS / "rust/bin/vllm-router", PEERS / "litellm/bin/litellm"
    listen = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    found = [
        System("direct", None, int(parts[1]), api_key),
        System("plimsoll", [sys.executable, "-m", "gateway", "serve", "--policy", str(folder / "policy.yaml")], port, key),
    ]
    if router.exists():
        command = [str(router), *listen, "--worker-urls", backend, "--prometheus-port", str(free_port()), "--api-key", api_key]
        found.append(System("vllm-router", command, port, api_key))
    if litellm.exists():
        found.append(System("litellm", [str(litellm), "--config", str(folder / "litellm.yaml"), *listen[:4]], port, "sk-bench"))
    return [system for system in found if not wanted or system.name in wanted]


class Jobs:
    """Requests of mixed sizes over the whole box, another prompt each."""

    def __init__(self, upstream: Upstream, vocabulary: Vocabulary, overhead: int, seed: str) -> None:
        cell = Cell.model_validate(
            {
                "input_tokens": {"min": INPUT[0], "max": INPUT[1]},
                "output_tokens": {"min": OUTPUT[0], "max": OUTPUT[1]},
                "concurrency": [CONCURRENCY],
            }
        )
        self._prompts = Prompts("chat", "tiny", cell, vocabulary, seed, overhead)
        self._upstream, self._random = upstream, Random(seed)

    def take(self, number: int) -> list[Job]:
        return [self._one(index) for index in range(number)]

    def _one(self, index: int) -> Job:
        size = Size("uniform", self._random.randint(*INPUT), self._random.randint(*OUTPUT))
        request = self._upstream.request(
            self._prompts.path, b"overload-%d" % index, b"application/json", self._prompts.body(size)
        )
        return Job(Place(0, CONCURRENCY, 0, index, index), size, request)


async def measure(
    system: System, factor: float, rate: float, seconds: float, slo_ms: float, vocabulary: Vocabulary, overhead: int
) -> Point:
    """One system at one load; everything still unanswered after three times the promise is given up."""
    endpoint = Endpoint.from_url(f"http://127.0.0.1:{system.port}")
    upstream = Upstream(
        endpoint, api_key=system.key.encode(), instance="overload", connect_timeout_s=10, attest=False, max_idle=2048
    )  # fmt: skip
    patience = 3 * slo_ms / 1000
    limits = Limits(connect_s=10, first_token_s=patience, execution_s=patience)
    offered = factor * rate
    jobs = Jobs(upstream, vocabulary, overhead, f"{system.name}/{factor}").take(math.ceil(offered * seconds * 1.3) + 20)
    load_ = Load(upstream, limits, began=time.perf_counter())
    samples = await load_.opened(jobs, offered, 4000, Amount(len(jobs), 0, seconds), seed=17)
    upstream.close()
    return point(system.name, factor, offered, samples, seconds, slo_ms)


def point(system: str, factor: float, offered: float, samples: list[RawSample], seconds: float, slo_ms: float) -> Point:
    good = [s for s in samples if s.e2e_ms is not None]
    refused = [s for s in samples if s.http_status in (429, 503)]
    return Point(
        system=system,
        factor=factor,
        offered_per_s=len(samples) / seconds,
        goodput_per_s=sum((s.e2e_ms or math.inf) <= slo_ms for s in good) / seconds,
        answered_per_s=len(good) / seconds,
        refused=len(refused),
        failed=len(samples) - len(good) - len(refused),
        sent=len(samples),
        ttft_p95_ms=p95([s.ttft_ms for s in good if s.ttft_ms is not None]),
        e2e_p95_ms=p95([s.e2e_ms for s in good if s.e2e_ms is not None]),
    )


def p95(values: list[float]) -> float | None:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None


def over_bound(journal: Path, bound_ms: float) -> tuple[int, int, bool]:
    """(admitted and served, over the record's bound from dispatch, significantly more than 5 %)."""
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    took = [row["e2e_ms"] - row["queue_ms"] for row in rows if row["outcome"] == "served" and row["backend"] is not None]
    over = sum(each > bound_ms for each in took)
    return len(took), over, binomial_tail(over, len(took), BOUND_SHARE) < ALPHA


def binomial_tail(over: int, total: int, share: float) -> float:
    """P(X >= over) for X ~ Binomial(total, share)."""
    logs = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(share)
        + (total - k) * math.log1p(-share)
        for k in range(over, total + 1)
    )
    return min(1.0, sum(math.exp(each) for each in logs))


async def idle(backend: str, key: str) -> None:
    """Wait until the backend has nothing left to do, so that no load inherits another's queue."""
    async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:
        for _ in range(600):
            text = (await client.get(f"{backend}/metrics")).text
            rows = [
                line
                for line in text.splitlines()
                if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
            ]
            if rows and all(float(line.rsplit(" ", 1)[1]) == 0 for line in rows):
                return
            await asyncio.sleep(0.2)
    sys.exit("the backend did not come to rest")


def backend_command(kind: str, port: int) -> list[str]:
    seats = ["--max-num-seqs", str(CONCURRENCY)]  # qualified to the brim: beyond it requests queue inside the server
    if kind == "vllm":
        return [str(ROOT / "deploy/vllm-cpu/serve.sh"), "--port", str(port), *seats]
    return [sys.executable, "-m", "gateway", "simulator", "--port", str(port), "--served-model-name", "tiny", *seats]


def qualified(folder: Path, backend: str) -> tuple[Record, Level]:
    """Measure the backend; the record and its one level."""
    (folder / "plan.yaml").write_text(PLAN)
    command = ["qualify", "--backend", backend, "--plan", str(folder / "plan.yaml"), "--out", str(folder / "records")]
    if subprocess.run([sys.executable, "-m", "gateway", *command], cwd=ROOT).returncode:
        sys.exit("the backend could not be qualified")
    record = load(next((folder / "records").glob("*.json")).read_bytes())
    return record, record.slices[0].levels[-1]


def chat_vocabulary(backend: str, key: str) -> tuple[Vocabulary, int]:
    """Words of the backend's own tokenizer, and what its template adds to one message."""
    headers = {"authorization": f"Bearer {key}"}
    vocabulary = Vocabulary.from_bundle(httpx.get(f"{backend}/plimsoll/tokenizer", headers=headers, trust_env=False).content)
    word = vocabulary.words[0].strip()
    body = {"model": "tiny", "messages": [{"role": "user", "content": word}]}
    answer = httpx.post(f"{backend}/tokenize", json=body, headers=headers, trust_env=False).json()
    return vocabulary, answer["count"] - vocabulary.count(word)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ["VLLM_API_KEY"] = secrets.token_hex(16)
    port = free_port()
    backend, key = f"http://127.0.0.1:{port}", os.environ["VLLM_API_KEY"]
    log = folder / "backend.log"
    with running(backend_command(args.backend, port), log):
        until("the backend", 180, lambda: httpx.get(f"{backend}/health", trust_env=False).status_code == 200, log)
        record, level = qualified(folder, backend)
        rate = float(level.requests_per_s_lower or level.requests_per_s or 0)
        bound_ms = float(level.e2e_ms.p95_upper or level.e2e_ms.p95 or 0)
        slo_ms = args.slo_factor * bound_ms
        vocabulary, overhead = chat_vocabulary(backend, key)
        points: list[Point] = []
        for system in systems(folder, backend, slo_ms, set(args.only.split(",")) - {""}):
            with running(system.command, folder / f"{system.name}.log"):
                if system.command is not None:
                    until(system.name, 120, lambda s=system: answers(s.port, s.key), folder / f"{system.name}.log")  # type: ignore[misc]
                for factor in FACTORS:
                    asyncio.run(idle(backend, key))
                    points.append(uvloop.run(measure(system, factor, rate, args.seconds, slo_ms, vocabulary, overhead)))
                    show(points[-1])
        admitted, over, significant = over_bound(folder / "journal.jsonl", bound_ms)
    return {
        "backend": args.backend,
        "qualified_per_s": rate,
        "concurrency": CONCURRENCY,
        "record_p95_bound_ms": bound_ms,
        "arrival_slo_ms": slo_ms,
        "seconds_per_point": args.seconds,
        "points": [{name: getattr(p, name) for name in Point.__dataclass_fields__} for p in points],
        "admitted": admitted,
        "over_bound": over,
        "significantly_over_5_percent": significant,
        "record": record.identity.model_dump(),
    }


def show(p: Point) -> None:
    times = f"e2e p95 {p.e2e_p95_ms or 0:8.0f} ms  ttft p95 {p.ttft_p95_ms or 0:8.0f} ms"
    print(
        f"{p.system:12} {p.factor:4.1f} x  offered {p.offered_per_s:6.1f}/s  goodput {p.goodput_per_s:6.2f}/s  {times}  "
        f"refused {p.refused:4d}  failed {p.failed:4d}", flush=True,
    )  # fmt: skip


def judge(result: dict[str, Any]) -> bool:
    """Print how the gateway stands to the bar."""
    goodput = {p["factor"]: p["goodput_per_s"] for p in result["points"] if p["system"] == "plimsoll"}
    if 1.0 not in goodput or not goodput[1.0]:
        return False
    kept = goodput[4.0] / goodput[1.0]
    share = result["over_bound"] / max(1, result["admitted"])
    print(f"\nplimsoll keeps {kept:.0%} of its goodput at 4 x load (bar 90 %)")
    verdict = "SIGNIFICANTLY" if result["significantly_over_5_percent"] else "not significantly"
    bound = f"the record's p95 bound of {result['record_p95_bound_ms']:.0f} ms"
    print(f"{result['over_bound']} of {result['admitted']} admitted ({share:.1%}) over {bound}: {verdict} above 5 %")
    return kept >= 0.9 and not result["significantly_over_5_percent"]


def draw(result: dict[str, Any], path: Path) -> None:
    """Goodput, and p95 from the intended arrival, against offered load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {"direct": "#888888", "plimsoll": "#1a6b3c", "vllm-router": "#c05a1c", "litellm": "#6a4c93"}
    for system, colour in colours.items():
        rows = [p for p in result["points"] if p["system"] == system]
        if not rows:
            continue
        style = {"marker": "o", "color": colour, "label": system, "linewidth": 2.4 if system == "plimsoll" else 1.5}
        left.plot([p["factor"] for p in rows], [p["goodput_per_s"] for p in rows], **style)
        timed = [p for p in rows if p["e2e_p95_ms"] is not None]
        right.plot([p["factor"] for p in timed], [p["e2e_p95_ms"] / 1000 for p in timed], **style)
    left.axhline(result["qualified_per_s"], color="#bbbbbb", linestyle=":", zorder=0)
    left.annotate("qualified rate", (FACTORS[-1], result["qualified_per_s"]), ha="right", va="bottom", color="#777777")
    right.axhline(result["arrival_slo_ms"] / 1000, color="#bb3333", linestyle=":", zorder=0)
    right.annotate("promise", (FACTORS[0], result["arrival_slo_ms"] / 1000), ha="left", va="bottom", color="#bb3333")
    left.set(xlabel="offered load, × qualified", ylabel="goodput, answers/s within the promise", ylim=(0, None), xticks=FACTORS)
    right.set(
        xlabel="offered load, × qualified", ylabel="p95 of what was answered, s from arrival", ylim=(0, None), xticks=FACTORS
    )
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for suffix in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=130, metadata={"Date": None} if suffix == "svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("simulator", "vllm"), default="simulator")
    parser.add_argument("--seconds", type=float, default=20, help="how long each load is offered")
    parser.add_argument("--slo-factor", type=float, default=2.0, help="the promise at arrival, in record bounds")
    parser.add_argument("--only", default="", help="systems, separated by commas")
    parser.add_argument("--draw", action="store_true", help="only draw again what was measured last")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"overload-{args.backend}.json"
    if args.draw:
        draw(json.loads(path.read_text()), path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, path)
    good = judge(result)
    print(f"written: {path.relative_to(ROOT)}, .png, .svg")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
