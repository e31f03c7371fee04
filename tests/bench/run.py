"""The benchmark of this project alone: `make bench`, or `python -m tests.bench.run [--rounds N] [--seconds S]`.

The gateway runs on one core with everything on (tests/bench/policy.yaml); the stand-in server and the load share the other.
What is measured: requests/s of calls that are not streamed (32 and 256 connections), events/s of 32 streams as fast as the
path takes them, the time added over the direct path at 300 requests/s, resident memory, and CPU per event of 400 streams at
20 ms, there beside nginx and Envoy where they are installed. Medians of the rounds; a table, and tests/bench/results.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

HERE = Path(__file__).resolve().parent
KEY = "sk-bench"
DIRECT, GATEWAY = 9100, 9200
ROOT = HERE.parent.parent
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":4}'
NGINX = """worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
server {{ listen 127.0.0.1:9200;
  location / {{ proxy_pass http://127.0.0.1:9100; proxy_http_version 1.1; proxy_buffering off; }} }} }}
"""
_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


def _socket(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def envoy_config() -> dict[str, object]:
    """The least Envoy that proxies one port to another."""
    route = {
        "virtual_hosts": [
            {"name": "v", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "c", "timeout": "0s"}}]}
        ]
    }
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "b",
        "route_config": route,
        "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
    }
    chain = [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]
    endpoints = {"cluster_name": "c", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket(DIRECT)}}]}]}
    return {
        "static_resources": {
            "listeners": [{"address": _socket(GATEWAY), "filter_chains": chain}],
            "clusters": [{"name": "c", "type": "STATIC", "load_assignment": endpoints}],
        }
    }


def proxies(folder: Path) -> dict[str, list[str]]:
    """Commands of what can be measured here, by name."""
    found = {"gateway": [str(Path(sys.executable).with_name("plimsoll")), "serve", "--policy", str(HERE / "policy.yaml")]}
    if nginx := shutil.which("nginx"):
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder), encoding="utf-8")
        found["nginx"] = [nginx, "-c", str(folder / "nginx.conf")]
    if envoy := shutil.which("envoy") or os.environ.get("ENVOY"):
        (folder / "envoy.json").write_bytes(orjson.dumps(envoy_config()))
        found["envoy"] = [envoy, "-c", str(folder / "envoy.json"), "--concurrency", "1", "--log-level", "error"]
    return found


@contextmanager
def running(command: list[str], core: int) -> Iterator[int]:
    """A process of ours on one core, ended with its children."""
    pinned = ["taskset", "-c", str(core), *command] if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else command
    process = subprocess.Popen(pinned, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def until_it_answers(port: int) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", BODY, headers)
    for _ in range(300):
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"nothing answers 200 on port {port}")


def load(port: int, mode: str, connections: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.load", str(port), mode, str(connections), str(seconds)]
    pinned = ["taskset", "-c", "0", *command] if shutil.which("taskset") else command
    row: dict[str, float] = orjson.loads(subprocess.run(pinned, cwd=ROOT, capture_output=True, check=True).stdout)
    return row


def family(pid: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [pid, *[each for child in children for each in family(int(child))]]


def cpu_s(pid: int) -> float:
    ticks = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    lines = [line for each in family(pid) for line in Path(f"/proc/{each}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def throughput(command: list[str], seconds: float) -> dict[str, float]:
    """One round of everything that is not paced."""
    with running([sys.executable, "-m", "tests.bench.standin", str(DIRECT)], 0), running(command, 1) as pid:
        until_it_answers(GATEWAY)
        row = {}
        for connections in (32, 256):
            direct, through = load(DIRECT, "once", connections, seconds), load(GATEWAY, "once", connections, seconds)
            row[f"requests/s, {connections} connections"] = through["count"] / through["seconds"]
            row[f"  of the bare upstream's, {connections}"] = through["count"] / direct["count"]
            row["answers that were not 200"] = row.get("answers that were not 200", 0) + through["bad"]
        streams = load(GATEWAY, "stream", 32, seconds)
        row["events/s, 32 streams"] = streams["events"] / streams["seconds"]
        direct, through = load(DIRECT, "paced", 300, seconds), load(GATEWAY, "paced", 300, seconds)
        for percentile in ("p50", "p99"):
            row[f"added ms at 300/s, {percentile}"] = through[percentile] - direct[percentile]
        row["resident MB"] = rss_mb(pid)
    return row


def paced_cpu(command: list[str]) -> float:
    """Microseconds of CPU per event: 400 streams of 200 events, 20 ms apart."""
    with running([sys.executable, "-m", "tests.bench.standin", str(DIRECT), "20"], 0), running(command, 1) as pid:
        until_it_answers(GATEWAY)
        before = cpu_s(pid)
        streams = load(GATEWAY, "stream", 400, 0.5)
        if streams["bad"]:
            sys.exit(f"{streams['bad']} streams were not answered whole")
        return 1e6 * (cpu_s(pid) - before) / streams["events"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    flags = sysconfig.get_config_var("CONFIG_ARGS") or ""
    stated = "stated" if "--enable-optimizations" in flags else "not stated (nor is it by Debian, whose builds are optimised)"
    with tempfile.TemporaryDirectory() as folder:
        commands = proxies(Path(folder))
        rounds = [throughput(commands["gateway"], arguments.seconds) for _ in range(arguments.rounds)]
        paced = {name: statistics.median(paced_cpu(c) for _ in range(arguments.rounds)) for name, c in commands.items()}
    table = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    table |= {f"CPU µs per paced event, {name}": value for name, value in paced.items()}
    print(f"Python {sys.version.split()[0]}, {sys.executable}, --enable-optimizations: {stated}")
    for name, value in table.items():
        print(f"{name:44}{value:14.2f}")
    (HERE / "results.json").write_bytes(orjson.dumps({"medians": table, "rounds": rounds}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
