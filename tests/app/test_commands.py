"""The command as an operator meets it: tables, JSON, exit codes and errors, before a real gateway and a scripted backend."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.evidence import lab
from gateway.evidence.record import dump, record_id, validate
from gateway.evidence.store import RecordStore
from tests.support.client import ask
from tests.support.gateway import KEYS, Backend, GatewayProcess
from tests.support.upstream import ScriptedUpstream

ROOT = Path(__file__).resolve().parents[2]


def plimsoll(*words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must end with `code`; what went wrong is in the assertion."""
    command, environment = [sys.executable, "-m", "gateway", *words], {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code != 2 else done.stderr


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, str]:
    """A directory with one sound record, and its id."""
    directory = RecordStore(tmp_path / "records")
    return directory.directory, directory.put(validate(lab.fixtures()[0]["record"]))


def test_without_words_it_says_what_there_is():
    text = plimsoll("--help")
    for name in (
        "serve",
        "qualify",
        "evaluate",
        "lab",
        "records",
        "explain",
        "retest",
        "health",
        "top",
        "keys",
        "policy",
        "simulator",
        "identity",
    ):
        assert name in text, name


def test_a_wrong_word_is_a_usage_error():
    assert "No such command" in plimsoll("frobnicate", code=2)


def test_the_lab_agrees_and_shows_every_field():
    rows = json.loads(plimsoll("lab", "--json"))
    assert len(rows) == 8 and all(row["agrees"] for row in rows)
    assert {"provenance_state", "final_decision", "reason_class"} <= set(rows[0])
    assert "IDENTITY_CHANGED" in plimsoll("lab")


def test_records_are_listed_shown_and_verified(store: tuple[Path, str]):
    directory, identity = store
    assert identity[:16] in plimsoll("records", "list", "--store", str(directory))
    assert json.loads(plimsoll("records", "show", identity[:8], "--store", str(directory), "--json"))["identity"]
    assert json.loads(plimsoll("records", "verify", identity, "--store", str(directory), "--json"))["good"]
    (directory / f"{'0' * 64}.json").write_bytes((directory / f"{identity}.json").read_bytes())
    assert "refused" in plimsoll("records", "list", "--store", str(directory), code=1)
    assert "no such file" in plimsoll("records", "show", "nothing", "--store", str(directory), code=2)


def test_records_are_signed_and_the_signer_is_checked(store: tuple[Path, str], tmp_path: Path):
    directory, identity = store
    public = plimsoll("records", "new-key", "--out", str(tmp_path / "signer.pem")).strip()
    assert (tmp_path / "signer.pem").stat().st_mode & 0o777 == 0o600
    plimsoll("records", "sign", identity, "--key-file", str(tmp_path / "signer.pem"), "--store", str(directory))
    plimsoll("records", "verify", identity, "--store", str(directory), "--trusted", public)
    plimsoll("records", "verify", identity, "--store", str(directory), "--trusted", "ed25519:" + "0" * 64, code=1)
    assert "exists" in plimsoll("records", "new-key", "--out", str(tmp_path / "signer.pem"), code=2)


def test_a_difference_between_records_names_fields_and_triggers(store: tuple[Path, str], tmp_path: Path):
    directory, identity = store
    other = validate(lab.record_for(lab.config_b(), 4096, 1024, 12))
    (directory / f"{record_id(other)}.json").write_bytes(dump(other))
    found = json.loads(plimsoll("records", "diff", identity, record_id(other), "--store", str(directory), "--json", code=1))
    assert "parallelism" in found["triggers"]
    assert "model.max_model_len" in {change["field"] for change in found["changes"]}
    plimsoll("records", "diff", identity, identity, "--store", str(directory))


def test_the_example_policy_is_usable_and_a_broken_one_is_refused(tmp_path: Path):
    assert json.loads(plimsoll("policy", "check", "policies/example.yaml", "--json"))["usable"]
    (tmp_path / "policy.yaml").write_text("backends: {a: {url: 'http://x:1'}}\nmodels: {m: {backends: [b]}}\n")
    assert not json.loads(plimsoll("policy", "check", str(tmp_path / "policy.yaml"), "--json", code=1))["usable"]


def test_evaluate_without_a_backend_defers_and_says_why(store: tuple[Path, str], tmp_path: Path):
    directory, identity = store
    (tmp_path / "policy.yaml").write_text("backends: {a: {url: 'http://127.0.0.1:9'}}\nmodels: {m: {backends: [a]}}\n")
    words = ["evaluate", str(directory / f"{identity}.json"), "--policy", str(tmp_path / "policy.yaml")]
    found = json.loads(plimsoll(*words, "--json", code=1))
    assert found["reason_class"] == "PROVENANCE_INCOMPLETE" and "127.0.0.1:9" in found["backend_problem"]
    assert "go together" in plimsoll(*words, "--input", "5", code=2)


def test_health_of_nobody_is_not_ready(tmp_path: Path):
    assert "not ready" in plimsoll("health", "--gateway", "http://127.0.0.1:9", code=1, env={"PLIMSOLL_KEY": "k"})
    assert "a key is needed" in plimsoll("health", "--gateway", "http://127.0.0.1:9", code=2, env={"PLIMSOLL_KEY": ""})


async def test_a_running_gateway_answers_for_itself(tmp_path: Path):
    """One gateway for every question, as one operator would ask them in a row."""
    upstream = ScriptedUpstream()
    await upstream.start()
    async with GatewayProcess(tmp_path, {"tiny": Backend(upstream, 4, 256, 32)}) as gateway:
        await ask(gateway.port, max_tokens=4000)

        async def remote(*words: str, code: int = 0, public: bool = False, key: str = "operator") -> Any:
            url = f"http://127.0.0.1:{gateway.port if public else gateway.admin_port}"
            env = {"PLIMSOLL_KEY": KEYS[key]}
            return json.loads(await asyncio.to_thread(plimsoll, *words, "--gateway", url, "--json", code=code, env=env))

        assert (await remote("health", public=True, key="prober"))["ready"]
        asked = ("explain", "--model", "tiny", "--input", "100")
        assert (await remote(*asked, "--output", "16"))["decision"] == "admit"
        refused = await remote(*asked, "--output", "900", code=1)
        assert (refused["decision"], refused["refusal"]["reason"]) == ("refuse", "out_of_slice_output")
        ledger = await remote("retest", "list")
        assert [group["axis"] for group in ledger["groups"]] == ["output"]
        plan = await remote("retest", "plan", "--model", "tiny")
        assert plan["cells"][0]["output_tokens"]["max"] >= 4000
        status = await remote("top")
        assert [backend["gate"] for backend in status["backends"]] == ["open"]
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        screen = await asyncio.to_thread(plimsoll, "top", "--once", "--gateway", admin, env={"PLIMSOLL_KEY": KEYS["operator"]})
        assert "out_of_slice_output" in screen and "open" in screen
        record = next((tmp_path / "records").glob("[0-9a-f]*.json"))
        pushed = await remote("records", "push", str(record))
        assert not pushed["new"] and pushed["verdicts"][0]["decision"] == "CONDITIONAL"
        client = {"PLIMSOLL_KEY": KEYS["client"]}
        assert "403" in await asyncio.to_thread(plimsoll, "top", "--json", "--gateway", admin, code=2, env=client)
    await upstream.stop()
