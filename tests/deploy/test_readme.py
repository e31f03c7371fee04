"""deploy/README.md: what it tells people to type exists, and what it shows as YAML is taken."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import yaml
from typer.testing import CliRunner

from gateway import policy
from gateway.cli import MOUNTS, build
from tests.deploy.stand import DEPLOY, ROOT

README = (DEPLOY / "README.md").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def typed() -> list[list[str]]:
    """Every command line of the page, in words, comments left out; inline code that is a command too."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(docker compose -f [^`]+)`", README)
    return [shlex.split(line, comments=True) for line in lines]


def commands_of_ours() -> list[list[str]]:
    found = []
    for words in typed():
        for at, word in enumerate(words):
            ours = word in MOUNTS and (words[at - 1] in ("plimsoll", "gateway"))
            if ours:
                found.append(words[at:])
    return found


def test_every_command_of_ours_exists_with_its_options():
    assert len(commands_of_ours()) == 5
    for words in commands_of_ours():
        sub = [words[0], *(w for w in words[1:2] if re.fullmatch("[a-z]+", w))]
        text = CliRunner().invoke(build(words[0]), [*sub, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        options = [word for word in words if word.startswith("--")]
        assert "Usage" in text and all(option in text for option in options), (words, text)


def test_every_service_that_compose_is_asked_for_exists():
    asked = [
        re.findall(r"(?:run --rm (?:--no-deps )?|exec |up -d )(\w+)", " ".join(words)) for words in typed() if "compose" in words
    ]
    names = [name for found in asked for name in found]
    assert set(names) == {"fetch", "vllm", "qualify", "gateway"} and set(names) <= set(COMPOSE["services"])


def test_every_file_that_is_named_exists():
    for path in re.findall(r"\bdeploy/[\w./-]+", README):
        made = path.split("/")[1] in {"secrets", "policy", ".env", "compose.override.yaml"}
        assert made or (ROOT / path.rstrip(".")).exists(), path
    for path in re.findall(r"^\| (`[^|]+) \|", README, re.M):
        for name in re.findall(r"`([^`]+)`", path):
            assert (DEPLOY / name).exists(), name


def test_the_table_of_addresses_is_what_compose_publishes():
    for name, address in re.findall(r"^\| (\w+) \| (\S+) \|", README, re.M):
        if name in COMPOSE["services"]:
            ports = COMPOSE["services"][name].get("ports", ())
            assert [port.rsplit(":", 1)[0] for port in ports] == ([address] if address != "none" else []), name


def test_the_policy_with_tls_is_taken(made):
    text = (made[0] / "policy" / "policy.yaml").read_text()
    section = next(block for block in blocks("yaml") if block.startswith("server:"))
    changed = re.sub(r"^server:.*\n", section, text, flags=re.M)
    rules = policy.parse(changed, base=made[0])
    assert rules.server.tls is not None and rules.server.tls.key == (made[0] / "tls" / "gateway.key").resolve()


def test_the_override_changes_services_that_are_there():
    override = next(yaml.safe_load(block) for block in blocks("yaml") if block.startswith("services:"))
    assert set(override["services"]) <= set(COMPOSE["services"])
    words = override["services"]["gateway"]["healthcheck"]["test"]
    help_text = CliRunner().invoke(build("health"), ["health", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert all(word in help_text for word in words if word.startswith("--"))


@pytest.mark.parametrize("part", [block for block in blocks("yaml") if "scheme:" in block])
def test_prometheus_takes_the_lines_for_tls(service, tmp_path, part):
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    at = text.index("    authorization:")
    for name in ("/run/gateway-ca.pem", "/run/secrets/scraper_key"):
        file = tmp_path / name.rsplit("/", 1)[1]
        file.write_text("k")
        text, part = text.replace(name, str(file)), part.replace(name, str(file))
    (tmp_path / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())
    (tmp_path / "prometheus.yml").write_text(text[:at] + part + text[at:])
    done = subprocess.run(
        [service("promtool"), "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
