"""deploy/secrets.sh: what compose needs, made once, and never a second time."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path

import pytest

from gateway import policy
from tests.deploy.stand import DEPLOY, ROOT, make_secrets

KEYS = {"acme-1", "operator", "scraper", "prober", "vllm", "grafana"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_each_key_is_a_file_that_its_owner_alone_may_read(made):
    folder, _ = made
    files = {path.stem: path for path in (folder / "secrets").iterdir()}
    assert set(files) == KEYS
    owner = 10001 if os.getuid() == 0 else os.getuid()
    for path in (*files.values(), folder / "secrets"):
        status = path.stat()
        assert status.st_uid == owner
        assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o400)
    assert len({path.read_text().strip() for path in files.values()}) == len(KEYS)
    assert all(len(path.read_text().strip()) >= 43 for path in files.values())


def test_the_policy_names_the_digest_of_each_key_and_of_no_other(made):
    folder, _ = made
    rules = policy.load(folder / "policy" / "policy.yaml")
    named = {key.id: (key.hash, key.role, key.tenant) for key in rules.keys}
    roles = {
        "acme-1": ("client", "acme"),
        "operator": ("operator", None),
        "scraper": ("scraper", None),
        "prober": ("prober", None),
    }
    assert named == {
        name: ("sha256:" + hashlib.sha256((folder / "secrets" / f"{name}.key").read_text().strip().encode()).hexdigest(), *role)
        for name, role in roles.items()
    }
    text = (folder / "policy" / "policy.yaml").read_text()
    assert not [name for name in KEYS if (folder / "secrets" / f"{name}.key").read_text().strip() in text]


def test_the_environment_names_the_owner_of_the_keys(made):
    folder, _ = made
    named = dict(line.split("=") for line in (folder / ".env").read_text().split())
    owner = (folder / "secrets" / "vllm.key").stat()
    assert named == {"PLIMSOLL_UID": str(owner.st_uid), "PLIMSOLL_GID": str(owner.st_gid)}
    assert int(named["PLIMSOLL_UID"]) != 0


def test_a_second_run_changes_nothing_and_is_quiet(own_copy, tmp_path):
    own_copy(tmp_path)
    before = contents(tmp_path)
    again = make_secrets(tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert contents(tmp_path) == before


def test_a_policy_that_was_edited_stays_as_it_is_and_a_key_it_lacks_is_told(own_copy, tmp_path):
    own_copy(tmp_path)
    file = tmp_path / "policy" / "policy.yaml"
    edited = "".join(line for line in file.read_text().splitlines(keepends=True) if "id: scraper" not in line) + "# mine\n"
    file.write_text(edited)
    again = make_secrets(tmp_path)
    assert again.returncode == 0 and file.read_text() == edited
    assert "scraper.key" in again.stderr and "role: scraper" in again.stderr and "operator" not in again.stderr


def test_a_command_that_gives_no_key_leaves_none_behind(tmp_path):
    env = {"PATH": os.environ["PATH"], "PLIMSOLL": "true"}
    command = ["bash", str(DEPLOY / "secrets.sh"), str(tmp_path)]
    failed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert failed.returncode == 1 and "no key" in failed.stderr
    assert list((tmp_path / "secrets").iterdir()) == [] and not (tmp_path / "policy" / "policy.yaml").exists()


@pytest.mark.parametrize("made_file", ["secrets/scraper.key", "policy/policy.yaml", "data/records/x.json", ".env"])
def test_what_it_makes_is_neither_committed_nor_sent_to_the_image_builder(made_file):
    ignored = subprocess.run(["git", "check-ignore", "-q", f"deploy/{made_file}"], cwd=ROOT)
    assert ignored.returncode == 0
    context = (ROOT / ".dockerignore").read_text().split()
    assert any(f"deploy/{made_file}" == line or f"deploy/{made_file}".startswith(f"{line}/") for line in context)
