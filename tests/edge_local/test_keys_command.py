from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway import policy
from gateway.edge import policy_edit
from gateway.edge.keys import KeyRing
from gateway.edge.keys_command import app
from gateway.policy import PolicyError

TEXT = """\
# The first line is a comment.
server: {listen: "127.0.0.1:8080"}   # beside a value
backends:
  a: {url: "http://127.0.0.1:8000", api_key_env: VLLM_API_KEY, identity: attested, tls: null, foreign: close}   # long
models:
  tiny:

    backends: [a]
tenants:
  acme: {weight: 1}
keys:                                  # who may come
  - {id: ops, hash: "sha256:0000000000000000000000000000000000000000000000000000000000000000", role: operator}   # the operators
"""
run = CliRunner()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(TEXT)
    file.chmod(0o640)
    return file


def find(path: Path, key: str) -> str | None:
    found = KeyRing.from_policy(policy.load(path)).find(key.encode())
    return None if found is None else found.id


def test_new_prints_the_key_alone_on_standard_output_and_writes_nothing(path: Path) -> None:
    result = run.invoke(app, ["new", "--id", "acme-1", "--tenant", "acme"])
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert key.startswith("plim_") and key not in result.stderr
    line = next(text for text in result.stderr.splitlines() if "hash:" in text)
    path.write_text(TEXT + line + "\n")
    assert find(path, key) == "acme-1"


def test_write_adds_one_line_and_keeps_every_other_byte(path: Path) -> None:
    result = run.invoke(app, ["new", "--id", "acme-1", "--tenant", "acme", "--expires", "90d", "--policy", str(path), "--write"])
    assert result.exit_code == 0, result.stderr
    old, new = TEXT.splitlines(), path.read_text().splitlines()
    assert new[:-1] == old and len(new) == len(old) + 1
    assert find(path, result.stdout.strip()) == "acme-1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in path.parent.iterdir()] == ["policy.yaml"]


def test_rotate_overlaps_and_names_the_successor(path: Path) -> None:
    first = run.invoke(app, ["new", "--id", "acme-1", "--tenant", "acme", "--policy", str(path), "--write"]).stdout.strip()
    second = run.invoke(app, ["rotate", "acme-1", "--policy", str(path), "--overlap", "24h"]).stdout.strip()
    assert (find(path, first), find(path, second)) == ("acme-1", "acme-2")
    rows = json.loads(run.invoke(app, ["list", "--policy", str(path), "--json"]).stdout)
    assert [(row["id"], row["state"], row["expires"] is None) for row in rows] == [
        ("ops", "live", True), ("acme-1", "live", False), ("acme-2", "live", True),
    ]  # fmt: skip
    assert run.invoke(app, ["rotate", "ops", "--policy", str(path), "--json"]).exit_code == 0
    assert "ops-2" in {key.id for key in policy.load(path).keys}


def test_a_rotation_never_lengthens_a_life(path: Path) -> None:
    soon = "2027-01-01T00:00:00Z"
    run.invoke(app, ["new", "--id", "k", "--tenant", "acme", "--expires", soon, "--policy", str(path), "--write"])
    run.invoke(app, ["rotate", "k", "--policy", str(path), "--overlap", "99999d"])
    (old,) = (key for key in policy.load(path).keys if key.id == "k")
    assert old.expires is not None and old.expires.isoformat() == "2027-01-01T00:00:00+00:00"


def test_revoke_takes_the_key_out(path: Path) -> None:
    key = run.invoke(app, ["new", "--id", "acme-1", "--tenant", "acme", "--policy", str(path), "--write"]).stdout.strip()
    assert run.invoke(app, ["revoke", "acme-1", "--policy", str(path)]).exit_code == 0
    assert find(path, key) is None and path.read_text() == TEXT


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["new", "--id", "x", "--role", "client"], 2),
        (["new", "--id", "x", "--role", "king"], 2),
        (["new", "--id", "bad id", "--role", "operator"], 2),
        (["new", "--id", "x", "--role", "operator", "--expires", "tomorrow"], 2),
        (["new", "--id", "x", "--role", "operator", "--expires", "2027-01-01"], 2),
        (["new", "--id", "x", "--role", "operator", "--write"], 2),
        (["new", "--id", "x", "--tenant", "nobody", "--policy", "{path}", "--write"], 1),
        (["new", "--id", "ops", "--role", "operator", "--policy", "{path}", "--write"], 1),
        (["revoke", "nobody", "--policy", "{path}"], 1),
        (["rotate", "nobody", "--policy", "{path}"], 1),
        (["list", "--policy", "{path}.absent"], 1),
    ],
)
def test_a_no_has_its_code_one_sentence_and_leaves_the_file(path: Path, arguments: list[str], code: int) -> None:
    result = run.invoke(app, [part.replace("{path}", str(path)) for part in arguments])
    assert result.exit_code == code
    assert result.stderr.startswith("plimsoll keys: ") and "Traceback" not in result.stderr
    assert path.read_text() == TEXT


def test_an_edit_by_someone_else_is_not_overwritten(path: Path) -> None:
    path.write_text(TEXT + "# more\n")
    with pytest.raises(PolicyError, match="someone else"):
        policy_edit.replace(path, TEXT, TEXT)
    assert path.read_text() == TEXT + "# more\n"


def test_a_symbolic_link_stays_one(path: Path) -> None:
    link = path.parent / "link.yaml"
    link.symlink_to(path)
    policy_edit.replace(link, TEXT, TEXT + "# more\n")
    assert link.is_symlink() and path.read_text().endswith("# more\n")


@pytest.mark.parametrize("text", ["", "x", "[", "keys: 3", "a: &a [*a]"])
def test_what_is_no_policy_is_a_typed_error(path: Path, text: str) -> None:
    path.write_text(text)
    result = run.invoke(app, ["new", "--id", "x", "--role", "operator", "--policy", str(path), "--write"])
    assert result.exit_code == 1 and path.read_text() == text


def test_a_policy_without_keys_gets_the_section() -> None:
    text = policy_edit.add_key("models: {}\n", policy_edit.key_line("x", "sha256:" + "0" * 64, "operator", None, None))
    assert text.splitlines() == ["models: {}", "keys:", f'  - {{id: x, hash: "sha256:{"0" * 64}", role: operator}}']


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_root_edits_stays_readable_for_the_gateway(path: Path) -> None:
    """Else a revoked key would stay good: the gateway could not read that it is gone."""
    os.chown(path, 65534, 65534)
    path.chmod(0o600)
    made = run.invoke(app, ["new", "--id", "acme-1", "--tenant", "acme", "--policy", str(path), "--write"])
    assert made.exit_code == 0, made.output
    assert run.invoke(app, ["rotate", "acme-1", "--policy", str(path)]).exit_code == 0
    assert run.invoke(app, ["revoke", "acme-1", "--policy", str(path)]).exit_code == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65534, 0o600)
