"""The main job in a minute: measure a server, load the record, and watch what is admitted, what waits and what is refused.

    make demo           the simulator as the backend: nothing but this repository is needed
    make demo-vllm      the same on a real vLLM on this CPU

Everything it writes is in .demo/ (policy, keys, records, journal). It leaves the gateway running until Ctrl-C; with
`--exit` it ends when the last decision was shown. Every line that is printed is what a real request was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
PLIMSOLL = [sys.executable, "-m", "gateway"]
HOME = ROOT / ".demo"
out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)

POLICY = """\
# Written by the demonstration. `plimsoll policy check` explains what is in force.
server: {{listen: "127.0.0.1:{port}", admin_listen: "127.0.0.1:{admin}"}}
records: records
backends:
  a: {{url: "{backend}", api_key_env: VLLM_API_KEY}}
models:
  tiny:
    backends: [a]
    target: {{slo: {{e2e_ms_p95: {slo}}}}}
timeouts: {{queue_s: 5}}
queue: {{max_requests: 8}}
tenants: {{demo: {{weight: 1}}}}
keys:
"""


class DemoFailed(Exception):
    """A step did not go as it must; the message says which."""


@dataclass
class Backend:
    """The server that is measured. `start(changed=True)` starts it with another configuration on the same port."""

    kind: str
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    slow: float = field(init=False)

    def __post_init__(self) -> None:
        self.slow = 120 if self.kind == "vllm" else 20

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, changed: bool) -> list[str]:
        extra = ["--max-num-seqs", "8"] if changed else []
        if self.kind == "vllm":
            return [str(ROOT / "deploy/vllm-cpu/serve.sh"), "--port", str(self.port), *extra]
        return [*PLIMSOLL, "simulator", "--port", str(self.port), "--served-model-name", "tiny", *extra]

    def start(self, changed: bool = False) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(changed), stdout=log, stderr=log, start_new_session=True)
        wait_for(f"the {self.kind} at {self.url}", self.slow, self.answers)

    def answers(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise DemoFailed(f"the backend ended at once; its log is {self.log}")
        return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200

    def stop(self) -> None:
        if self.process is not None:
            end(self.process)
            self.process = None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and everything it started."""
    for sign, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        return


def wait_for(what: str, seconds: float, ready: Any) -> None:
    """Ask again and again until it is so. Raises DemoFailed when it never is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise DemoFailed(f"{what} did not get ready within {seconds:g} s")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def plimsoll(*words: str, check: bool = True) -> None:
    """Run a command of ours, its output shown."""
    shown = " ".join(word.replace(str(ROOT) + "/", "") for word in words)
    out.print(f"[dim]$ plimsoll {shown}[/]", soft_wrap=True)
    code = subprocess.run([*PLIMSOLL, *words], cwd=ROOT).returncode
    if check and code:
        raise DemoFailed(f"`plimsoll {words[0]}` ended with exit code {code}")


def step(number: int, title: str) -> None:
    out.print(f"\n[bold cyan]{number}. {title}[/]")


def write_policy(backend: Backend, port: int, admin: int) -> dict[str, str]:
    """The policy, and one key of each role. Returns the keys by role."""
    text = POLICY.format(port=port, admin=admin, backend=backend.url, slo=60_000 if backend.kind == "vllm" else 2_000)
    keys = {}
    for role in ("client", "operator", "scraper", "prober"):
        tenant = ["--tenant", "demo"] if role == "client" else []
        words = ["keys", "new", "--id", role, "--role", role, *tenant, "--json"]
        key = subprocess.run([*PLIMSOLL, *words], capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(key.stdout)
        keys[role] = found["key"]
        text += f"  {found['line']}\n"
        (HOME / f"{role}.key").write_text(found["key"])
        (HOME / f"{role}.key").chmod(0o600)
    (HOME / "policy.yaml").write_text(text)
    return keys


class Caller:
    """Sends requests and prints one line for each decision."""

    def __init__(self, port: int, key: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, what: str, expect: str, *, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> str:
        """One request; prints what came of it and returns its reason. Raises DemoFailed when it is not in `expect`."""
        started = time.monotonic()
        document = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How deep may a ship be loaded?"}],
            "max_tokens": 16,
        } | body
        answer = await self._client.post(path, json={k: v for k, v in document.items() if v is not None}, headers=headers)
        return self._show(what, expect, answer, time.monotonic() - started)

    def _show(self, what: str, expect: str, answer: httpx.Response, seconds: float) -> str:
        reason = answer.headers.get("x-plimsoll-reason", "ok")
        if answer.status_code == 200:
            usage = {} if answer.headers["content-type"].startswith("text/event-stream") else answer.json().get("usage") or {}
            waited = int(answer.headers.get("x-plimsoll-queue-ms", 0))
            verdict = "[green]admitted[/]" if waited < 5 else "[yellow]waited  [/]"
            tokens = f"{usage['prompt_tokens']} in, {usage['completion_tokens']} out, " if usage else "streamed, "
            detail = (
                f"{tokens}{waited} ms in the queue, {seconds * 1000:.0f} ms in all, record {answer.headers['x-plimsoll-record']}"
            )
            if "x-plimsoll-max-tokens" in answer.headers:
                detail += f", output limited to {answer.headers['x-plimsoll-max-tokens']}"
        else:
            verdict, detail = "[red]refused [/]", answer.json()["error"]["message"]
            again = answer.headers.get("retry-after")
            detail += f" (retry after {again} s)" if again else ""
        out.print(f"  {verdict} {answer.status_code} [bold]{reason:<22}[/] {what}: [dim]{detail}[/]", soft_wrap=True)
        if reason not in expect.split("|"):
            raise DemoFailed(f"{what}: expected {expect}, got {reason}")
        return str(reason)

    async def burst(self, number: int) -> None:
        """More at once than were measured: some wait, and those for whom the queue has no place are refused."""
        words = [f"request {n} of {number} at once" for n in range(1, number + 1)]
        reasons = await asyncio.gather(*(self.ask(w, "ok|queue_full|queue_timeout", max_tokens=24) for w in words))
        if "ok" not in reasons or set(reasons) == {"ok"}:
            raise DemoFailed(f"{number} at once: expected some to be refused, got {sorted(set(reasons))}")


async def decisions(caller: Caller, stranger: Caller) -> None:
    """Requests inside the slice, outside of it on each axis, and from someone unknown."""
    await caller.ask("inside the slice", "ok")
    await caller.ask("the same, streamed", "ok", stream=True)
    await caller.ask("no output limit named", "ok", max_tokens=None)
    await caller.ask(
        "a longer input than was measured", "out_of_slice_input", messages=[{"role": "user", "content": "load " * 2000}]
    )
    await caller.ask("a longer output than was measured", "out_of_slice_output", max_tokens=4000)
    await caller.ask("more sequences than were measured", "out_of_slice_sequences", n=64)
    await caller.ask("a feature that was not measured", "out_of_slice_feature", logprobs=True)
    await caller.ask("a field that is not allowed", "field_not_allowed", kv_transfer_params={})
    await caller.ask("a model that does not exist", "model_not_found", model="large")
    await stranger.ask("a caller without a valid key", "invalid_api_key")


async def until_reason(port: int, key: str, reason: str, seconds: float) -> None:
    """Wait until the gateway's own account of the backend says `reason`. Raises DemoFailed."""
    headers, deadline = {"authorization": f"Bearer {key}"}, time.monotonic() + seconds
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < deadline:
            status = (await client.get(f"http://127.0.0.1:{port}/admin/status", headers=headers)).json()
            if status["backends"][0]["gate"] == reason:
                return
            await asyncio.sleep(0.1)
    raise DemoFailed(f"the gate did not come to {reason} within {seconds:g} s")


async def drift(backend: Backend, caller: Caller, admin: int, key: str) -> None:
    """Another configuration behind the same URL closes the gate; the measured one opens it again."""
    await asyncio.to_thread(backend.stop)
    await asyncio.to_thread(backend.start, True)
    await until_reason(admin, key, "configuration_changed", 30)
    await caller.ask("the backend runs with --max-num-seqs 8 now", "configuration_changed")
    await asyncio.to_thread(backend.stop)
    await asyncio.to_thread(backend.start)
    await until_reason(admin, key, "open", backend.slow)
    await caller.ask("the measured configuration is back", "ok")


NEXT = """
[bold green]The gateway is running.[/]

  URL        http://127.0.0.1:{port}/v1      model tiny      key in .demo/client.key
  try        curl -s http://127.0.0.1:{port}/v1/chat/completions -H "authorization: Bearer $(cat .demo/client.key)" \\
                  -H 'content-type: application/json' \\
                  -d '{{"model": "tiny", "messages": [{{"role": "user", "content": "Ahoy"}}], "max_tokens": 16}}'
  console    {admin}/console      any user name; the password is in .demo/operator.key
  why?       .venv/bin/plimsoll explain --gateway {admin} --key-file .demo/operator.key \\
                  --model tiny --input 900 --output 16
  top        .venv/bin/plimsoll top --gateway {admin} --key-file .demo/operator.key
  metrics    curl -s http://127.0.0.1:{port}/metrics -H "authorization: Bearer $(cat .demo/scraper.key)"
  report     .demo/report.html: the measurement as a page
  journal    .demo/journal.jsonl: one line a request; logs are beside it
  yours      vllm serve MODEL --middleware gateway.evidence.attest.IdentityMiddleware, then README.md, "Your own server"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("simulator", "vllm"), default="simulator")
    parser.add_argument("--exit", action="store_true", help="end when everything was shown")
    parser.add_argument("--port", type=int, default=0, help="the gateway's port; 0 takes a free one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if HOME.exists():
        shutil.rmtree(HOME)
    HOME.mkdir()
    os.environ["VLLM_API_KEY"] = secrets.token_hex(16)
    backend = Backend(args.backend, free_port(), HOME / "backend.log")
    gateway: subprocess.Popen[bytes] | None = None
    try:
        gateway = show(backend, args.port or free_port(), free_port())
        if not args.exit:
            out.print("Ctrl-C ends it.")
            gateway.wait()
        return 0
    except DemoFailed as failure:
        out.print(f"[bold red]The demonstration stopped:[/] {failure}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        if gateway is not None:
            end(gateway)
        backend.stop()


def show(backend: Backend, port: int, admin: int) -> subprocess.Popen[bytes]:
    """Every step. Returns the running gateway."""
    records = HOME / "records"
    step(1, f"A server: {'vLLM 0.32 on this CPU' if backend.kind == 'vllm' else 'the simulator, a stand-in for vLLM'}")
    backend.start()
    out.print(f"  {backend.url} answers. That proves nothing about its capacity yet.")
    step(2, "Measure it: the record binds what was measured to exactly this configuration")
    plimsoll("qualify", "--backend", backend.url, "--plan", str(ROOT / "deploy/demo/plan.yaml"), "--out", str(records))
    record = next(path for path in records.glob("*.json"))
    plimsoll("records", "report", str(record), "--out", str(HOME / "report.html"))
    step(3, "Judge it: eight fields, in order")
    keys = write_policy(backend, port, admin)
    plimsoll(
        "evaluate", str(record), "--policy", str(HOME / "policy.yaml"), "--input", "256", "--output", "24", "--concurrency", "4"
    )
    step(4, "Serve it, and ask")
    with (HOME / "journal.jsonl").open("wb") as journal, (HOME / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(
            [*PLIMSOLL, "serve", "--policy", str(HOME / "policy.yaml")], stdout=journal, stderr=log, start_new_session=True
        )
    try:
        wait_for("the gateway", 30 + backend.slow, lambda: ready(gateway, port, keys["prober"]))
        asyncio.run(conversation(backend, port, admin, keys))
        step(7, "What was asked for outside the slice is the next measurement plan")
        plimsoll("retest", "list", "--gateway", f"http://127.0.0.1:{admin}", "--key-file", str(HOME / "operator.key"))
    except BaseException:
        end(gateway)
        raise
    out.print(NEXT.format(port=port, admin=f"http://127.0.0.1:{admin}"), soft_wrap=True)
    return gateway


def ready(gateway: subprocess.Popen[bytes], port: int, key: str) -> bool:
    if gateway.poll() is not None:
        raise DemoFailed(f"the gateway ended at once; its log is {HOME / 'gateway.log'}")
    answer = httpx.get(f"http://127.0.0.1:{port}/health/ready", headers={"authorization": f"Bearer {key}"}, trust_env=False)
    return answer.status_code == 200


async def conversation(backend: Backend, port: int, admin: int, keys: dict[str, str]) -> None:
    caller, stranger = Caller(port, keys["client"]), Caller(port, "plim_somebody-else")
    try:
        await decisions(caller, stranger)
        step(5, "Sixteen at once, where four were measured and eight may wait")
        await caller.burst(16)
        step(6, "The backend restarts with another configuration behind the same URL")
        await drift(backend, caller, admin, keys["operator"])
    finally:
        await caller.close()
        await stranger.close()


if __name__ == "__main__":
    sys.exit(main())
