"""A deployment without containers: the keys and the policy that secrets.sh makes, a simulator, a gateway, a real Prometheus.

Owns: the processes it starts (each is ended, whatever happens) and one folder. What differs from deploy/ is addresses and paths.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.evidence.lab import record_for
from gateway.evidence.record import dump, record_id, validate

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PLIMSOLL = [sys.executable, "-m", "gateway"]
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
CONCURRENCY = 4


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def until(seconds: float, ready: Callable[[], Any], what: Callable[[], str]) -> Any:
    """Ask until the answer is true; a connection that is refused is a no. Fails saying `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if found := ready():
                return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.02)


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended with the block."""
    with log.open("ab") as out:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**ENV, **env}, cwd=log.parent)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def make_secrets(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run deploy/secrets.sh in `folder`."""
    command = ["bash", str(DEPLOY / "secrets.sh"), str(folder)]
    env = {"PATH": os.environ["PATH"], "PLIMSOLL": " ".join(PLIMSOLL), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


class Stand:
    """A simulator and a gateway before it. Started with `with stand.running():`; `folder` is one that secrets.sh filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend_port, self.port = free_port(), free_port()
        self.backend, self.url = f"http://127.0.0.1:{self.backend_port}", f"http://127.0.0.1:{self.port}"
        self.policy_file = folder / "policy" / "policy.yaml"
        self.records = folder / "data" / "records"
        self.gateway: subprocess.Popen[bytes] | None = None

    def key(self, name: str) -> str:
        return (self.folder / "secrets" / f"{name}.key").read_text().strip()

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key(name)}"}

    @contextlib.contextmanager
    def running(self, prefix: tuple[str, ...] = (), **env: str) -> Iterator[Stand]:
        """Both processes, the gate open. `prefix` stands before the gateway's command; `env` is added to its environment."""
        key = self.key("vllm")
        simulator = [*PLIMSOLL, "simulator", "--port", str(self.backend_port), "--speed", "10", "--allow-control"]
        serve = [*prefix, *PLIMSOLL, "serve", "--policy", str(self.policy_file)]
        with process(simulator, self.folder / "simulator.log", VLLM_API_KEY=key):
            until(20, self._backend_up, lambda: self.log("simulator"))
            self.measure()
            self._adapt_policy()
            with process(serve, self.folder / "gateway.log", **env) as self.gateway:
                until(30, self.ready, lambda: self.log("gateway"))
                yield self

    def measure(self) -> None:
        """A record of the configuration that the simulator shows, instead of a measurement."""
        identity = httpx.get(f"{self.backend}/plimsoll/identity", headers=self.headers("vllm")).raise_for_status().json()
        raw = record_for(identity["configuration"], 512, 64, CONCURRENCY)
        raw["protocol"] |= {"warmup_state": "omitted", "warmup_requests": None, "kv_cache_tokens": None}
        raw["valid_until"] = None
        record = validate(raw)
        part = self.records / "part"
        part.write_bytes(dump(record))
        part.replace(self.records / f"{record_id(record)}.json")

    def _adapt_policy(self) -> None:
        """The container's addresses and paths become those of this machine."""
        text = self.policy_file.read_text()
        for here, there in (
            ("0.0.0.0:8080", f"127.0.0.1:{self.port}"),
            ("127.0.0.1:8081", "127.0.0.1:0"),
            ("/var/lib/plimsoll/records", str(self.records)),
            ("http://vllm:8000", self.backend),
            ("/run/secrets/vllm_key", str(self.folder / "secrets" / "vllm.key")),
        ):
            assert here in text, f"the policy of compose no longer names {here}"
            text = text.replace(here, there)
        self.policy_file.chmod(0o640)
        self.policy_file.write_text(text + "timeouts: {queue_s: 10}\nbreaker: {consecutive_failures: 2, cooldown_s: 1}\n")

    def _backend_up(self) -> bool:
        return httpx.get(f"{self.backend}/health", timeout=2).status_code == 200

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/health/ready", headers=self.headers("prober"), timeout=2).status_code == 200

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")[-4000:]

    def fault(self, **fault: Any) -> None:
        """Set a fault of the simulator, as soon as it can be reached."""

        def told() -> bool:
            return httpx.post(f"{self.backend}/sim/fault", json=fault, headers=self.headers("vllm")).is_success

        until(10, told, lambda: f"the simulator does not take {fault}")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """The simulator refuses connections; it is told to stop that over the one that was open before."""
        with httpx.Client(base_url=self.backend, headers=self.headers("vllm"), timeout=5) as control:
            control.post("/sim/fault", json={"kind": "refuse", "seconds": 5}).raise_for_status()
            until(4, lambda: not listening(self.backend_port), lambda: "the simulator still listens")
            yield
            control.delete("/sim/fault").raise_for_status()

    def chat(self, client: httpx.Client, words: int = 5, **fields: Any) -> int:
        """One chat as a client sends it; its status, 0 when the answer broke."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 16, **fields}
        try:
            return client.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers("acme-1")).status_code
        except httpx.HTTPError:
            return 0


class Prometheus:
    """A real Prometheus with the configuration of deploy/, scraping a stand every second."""

    def __init__(self, stand: Stand, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        for here, there in (
            ("gateway:8080", f"127.0.0.1:{stand.port}"),
            ("vllm:8000", f"127.0.0.1:{stand.backend_port}"),
            ("/run/secrets/scraper_key", str(stand.folder / "secrets" / "scraper.key")),
        ):
            assert here in text
            text = text.replace(here, there)
        text, count = re.subn(r"_interval: 15s", "_interval: 1s", text)
        assert count == 2
        folder.mkdir()
        (folder / "prometheus.yml").write_text(text)
        (folder / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())

    @contextlib.contextmanager
    def running(self, binary: str) -> Iterator[Prometheus]:
        command = [
            binary, f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ]  # fmt: skip
        with process(command, self.folder / "log"):
            until(20, lambda: httpx.get(f"{self.url}/-/ready").status_code == 200, lambda: (self.folder / "log").read_text())
            yield self

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Fails when Prometheus does not take it."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        return list(answer["data"]["result"])

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}").raise_for_status().json()
        return answer["data"]


def dashboard() -> dict[str, Any]:
    """The committed dashboard."""
    return dict(json.loads((DEPLOY / "grafana" / "dashboards" / "plimsoll.json").read_text()))


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel's title, expression) with the variables filled in as Grafana does for "All"."""
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets") or ():
            expr = target["expr"]
            for variable, value in (("$model", ".*"), ("$backend", ".*"), ("$__rate_interval", "20s")):
                expr = expr.replace(variable, value)
            assert "$" not in expr, f"{panel['title']} uses a variable that the tests do not know"
            found.append((panel["title"], expr))
    return found


def alerts() -> list[dict[str, Any]]:
    """The committed alert rules."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
