"""A real vLLM as a test tool: start it with flags, wait for it, stop it, leave nothing behind.

Owns: the process group of each server it starts, and its log file. Promises: `stop` returns only when every process of
the group has ended; a server also ends when the test process is killed (guard.py sees to it). Talks to: the environment that
deploy/vllm-cpu/setup.sh builds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PLIMSOLL_CACHE", Path.home() / ".cache" / "plimsoll"))
ENVIRONMENT = CACHE / "vllm-0.32.0"
MODELS = CACHE / "models"
API_KEY = "sk-live-upstream"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message holds the end of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def installed() -> bool:
    """Whether the vLLM environment has been built, whole."""
    return (ENVIRONMENT / ".done").is_file()


@dataclass
class VllmServer:
    """One vLLM server. `flags` are those of `vllm serve`; `environment` adds to the process environment."""

    log: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    model: Path = MODELS / "none"
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = API_KEY
    middleware: bool = True
    process: subprocess.Popen[bytes] | None = None
    guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server is not running"
        return self.process.pid

    def command(self) -> list[str]:
        """The command line. A flag in `flags` wins over the same one here, for the last one counts."""
        middleware = ["--middleware", "gateway.evidence.attest.IdentityMiddleware"] if self.middleware else []
        return [
            *(str(ENVIRONMENT / "bin" / "vllm"), "serve", str(self.model)),
            *("--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "16"),
            *("--host", self.host, "--port", str(self.port), "--disable-uvicorn-access-log"),
            *middleware,
            *self.flags,
        ]

    def process_environment(self) -> dict[str, str]:
        """This process's environment without coverage's hooks, plus what an offline CPU server needs."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "PYTEST_", "VLLM_"))}
        return inherited | {
            "PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_API_KEY": self.api_key,
            **self.environment,
        }

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it serves. Raises ServerFailed when it is running already."""
        if self.process is not None:
            raise ServerFailed("already running")
        self.port = self.port or free_port(self.host)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self.process_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                start_new_session=True,
            )
        guard = [sys.executable, str(Path(__file__).with_name("guard.py")), str(self.process.pid)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when /health answers 200. Raises ServerFailed when the process ends first or time runs out."""
        assert self.process is not None, "start it first"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"vLLM ended with {self.process.returncode}\n{self.tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerFailed(f"vLLM was not ready in {timeout_s} s\n{self.tail()}")

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL. Returns when none of it is left."""
        process, self.process = self.process, None
        if process is None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        _signal_group(process.pid, signal.SIGTERM)
        while group_alive(process.pid) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(timeout=STOP_TIMEOUT_S)
        while group_alive(process.pid):
            if time.monotonic() > deadline + STOP_TIMEOUT_S:
                raise ServerFailed(f"processes of group {process.pid} outlived SIGKILL")
            time.sleep(0.05)
        if self.guard is not None:
            self.guard.communicate()
            self.guard = None

    def restart(self, *flags: str, environment: dict[str, str] | None = None, model: Path | None = None) -> None:
        """Stop, take other flags (and environment, and model, where given), start on the same port, wait until ready."""
        self.stop()
        self.flags = flags
        self.environment = self.environment if environment is None else environment
        self.model = self.model if model is None else model
        self.start()
        self.wait_ready()

    def get(self, path: str, *, key: bool = True) -> httpx.Response:
        """A GET with the server's key (or without)."""
        return httpx.get(self.url + path, headers=self.headers if key else {}, timeout=30)

    def post(self, path: str, body: dict[str, Any], *, key: bool = True) -> httpx.Response:
        """A POST of JSON with the server's key (or without)."""
        return httpx.post(self.url + path, json=body, headers=self.headers if key else {}, timeout=120)

    def identity(self) -> dict[str, Any]:
        """The payload of /plimsoll/identity."""
        answer = self.get("/plimsoll/identity")
        answer.raise_for_status()
        payload: dict[str, Any] = answer.json()
        return payload

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels. Raises KeyError when there is none."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        if not values:
            raise KeyError(name)
        return sum(values)

    def engine(self) -> list[int]:
        """Pids of the engine's processes; the API server is not among them."""
        names = {pid: _command_line(pid) for pid in _members(self.pid) if pid != self.pid}
        engine = [pid for pid, name in names.items() if "EngineCore" in name or "Worker" in name]
        assert engine, f"no engine among {names}"
        return engine

    @staticmethod
    def freeze(pids: list[int]) -> None:
        """Stop processes with SIGSTOP."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    @staticmethod
    def thaw(pids: list[int]) -> None:
        """Let stopped processes run on."""
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


def _members(group: int) -> list[int]:
    """Pids of the processes of a group."""
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _state_in(group)(stat)]


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def group_alive(group: int) -> bool:
    """Whether any process of this group still runs. A zombie that waits for its parent to look does not."""
    return any(state not in "ZX" for state in map(_state_in(group), Path("/proc").glob("[0-9]*/stat")) if state)


def _state_in(group: int) -> Callable[[Path], str]:
    """A reader of /proc/PID/stat: the state letter when the process belongs to `group`, else nothing."""

    def read(stat: Path) -> str:
        try:
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return fields[0] if int(fields[2]) == group else ""

    return read
