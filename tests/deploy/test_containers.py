"""The image, compose, the unit and the manifest: what they name exists, and nobody runs as root or holds a secret in the open."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway import policy
from gateway.cli import build
from tests.deploy.stand import DEPLOY, ROOT

MADE = {"secrets", "policy", "data"}  # by secrets.sh
SECRET = re.compile(r"(?i)(key|token|password|secret)")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def services() -> dict[str, Any]:
    return dict(compose()["services"])


# The image


def test_every_file_that_is_copied_exists_and_reaches_the_builder():
    kept_back = (ROOT / ".dockerignore").read_text().split()
    copied = [words for name, rest in instructions() if name == "COPY" for words in [shlex.split(rest)] if "--from" not in rest]
    assert len(copied) == 3
    for *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not any(source.removeprefix("./").split("/")[0] == entry for entry in kept_back), source


def test_the_package_needs_no_file_that_is_not_copied():
    project = (ROOT / "pyproject.toml").read_text()
    readme = re.search(r'^readme = "(.+)"', project, re.M)[1]
    copied = " ".join(rest for name, rest in instructions() if name == "COPY")
    assert readme in copied and "pyproject.toml" in copied and "constraints.txt" in copied


def test_the_image_ends_as_a_user_that_is_not_root():
    last_stage = instructions()[max(i for i, (name, _) in enumerate(instructions()) if name == "FROM") :]
    users = [rest for name, rest in last_stage if name == "USER"]
    assert users and users[-1].isdigit() and int(users[-1]) >= 1000
    assert f"--uid {users[-1]}" in next(rest for name, rest in last_stage if "useradd" in rest)


def test_no_secret_is_baked_in():
    assert not [rest for name, rest in instructions() if name == "ARG"]
    names = [word.split("=")[0] for name, rest in instructions() if name == "ENV" for word in shlex.split(rest)]
    assert names and not [name for name in names if SECRET.search(name)]


def commands() -> list[list[str]]:
    """Every `plimsoll …` that a file of deploy/ starts, as words after `plimsoll`."""
    found = [yaml.safe_load(rest) for name, rest in instructions() if name == "CMD"]
    health = next(rest for name, rest in instructions() if name == "HEALTHCHECK")
    found.append(yaml.safe_load(health.split("CMD ", 1)[1])[1:])
    found += [
        service["command"] for service in services().values() if service.get("image") == "plimsoll:0.1.0" and "command" in service
    ]
    gateway = container()
    found.append(gateway["args"])
    found += [gateway[probe]["exec"]["command"][1:] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    found.append(unit()["ExecStart"][0].split()[1:])
    return found


def test_every_command_that_is_started_is_one_that_exists():
    assert len(commands()) == 8
    for words in commands():
        text = CliRunner().invoke(build(words[0]), [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        options = [word for word in words if word.startswith("--")]
        assert "Usage" in text and all(option in text for option in options), (words, text)


# Compose


def test_every_network_volume_secret_and_service_that_is_named_is_there():
    document = compose()
    for name, service in services().items():
        assert set(service.get("networks", ())) <= set(document["networks"]), name
        assert set(service.get("secrets", ())) <= set(document["secrets"]), name
        assert set(service.get("depends_on", {})) <= set(services()), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists() or source.split("/")[1] in MADE, f"{name}: {source}"
            else:
                assert source in document["volumes"], f"{name}: {source}"


def test_what_a_service_waits_for_can_become_healthy():
    for name, service in services().items():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services()[other], name


def test_the_secrets_are_those_that_the_script_makes(made):
    folder, _ = made
    for secret in compose()["secrets"].values():
        assert (folder / secret["file"]).is_file()


def test_a_secret_that_a_command_or_a_file_names_is_given_to_its_service():
    texts = {name: str(service) for name, service in services().items()}
    texts["prometheus"] += (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    texts["gateway"] += (DEPLOY / "policy.template.yaml").read_text() + (DEPLOY / "Dockerfile").read_text()
    for name, text in texts.items():
        assert set(re.findall(r"/run/secrets/(\w+)", text)) <= set(services()[name].get("secrets", ())), name


def test_nothing_is_published_beyond_loopback_and_vllm_not_at_all():
    published = {name: port for name, service in services().items() for port in service.get("ports", ())}
    assert set(published) == {"gateway", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in published.values())
    assert compose()["networks"]["inside"]["internal"] and services()["vllm"]["networks"] == ["inside"]


def test_what_reads_keys_runs_as_their_owner_without_privileges():
    for name, service in services().items():
        if name in ("vllm", "fetch"):  # images that expect root; no port, and no way out while serving
            continue
        assert service["user"].startswith("${PLIMSOLL_UID:?"), name
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], name
    assert services()["gateway"]["read_only"] and services()["qualify"]["read_only"]


def test_no_secret_stands_in_an_environment_or_a_command():
    for name, service in services().items():
        named = [key for key in service.get("environment", {}) if SECRET.search(key) and not key.endswith("__FILE")]
        assert not named, name


def test_the_images_are_pinned():
    assert not [
        name for name, service in services().items() if ":" not in service["image"] or service["image"].endswith(":latest")
    ]


def test_a_running_answer_has_time_to_end():
    drain = policy.Server().drain_s
    assert float(services()["gateway"]["stop_grace_period"].removesuffix("s")) > drain
    assert float(unit()["TimeoutStopSec"][0]) > drain
    assert deployment()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain


def test_prometheus_scrapes_services_that_share_a_network_with_it():
    targets = re.findall(r'"(\w+):\d+"', (DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert set(targets) == {"gateway", "vllm"}
    for target in targets:
        assert set(services()[target]["networks"]) & set(services()["prometheus"]["networks"])


# systemd


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "plimsoll.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def analyze() -> str:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("systemd-analyze is not installed")
    return path


def test_systemd_takes_the_unit(tmp_path):
    program = tmp_path / "plimsoll"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / "plimsoll.service").read_text().replace("/opt/plimsoll/bin/plimsoll", str(program))
    (tmp_path / "plimsoll.service").write_text(text)
    done = subprocess.run([analyze(), "verify", str(tmp_path / "plimsoll.service")], capture_output=True, text=True)
    assert done.returncode == 0 and "plimsoll.service" not in done.stderr, done.stderr


def test_the_unit_is_exposed_to_little():
    command = [analyze(), "security", "--offline=true", "--threshold=20", str(DEPLOY / "systemd" / "plimsoll.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text()))


def deployment() -> dict[str, Any]:
    return next(each for each in manifests() if each["kind"] == "Deployment")


def container() -> dict[str, Any]:
    return dict(deployment()["spec"]["template"]["spec"]["containers"][0])


def test_the_pod_is_not_root_and_its_root_is_read_only():
    pod = deployment()["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_manifests_agree_with_each_other():
    pod = deployment()["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment()["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service = next(each for each in manifests() if each["kind"] == "Service")
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container()["ports"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    claim = next(each for each in manifests() if each["kind"] == "PersistentVolumeClaim")["metadata"]["name"]
    assert any(v.get("persistentVolumeClaim", {}).get("claimName") == claim for v in pod["spec"]["volumes"])


def test_the_paths_of_the_pod_are_those_that_its_commands_name():
    mounts = [mount["mountPath"] for mount in container()["volumeMounts"]]
    paths = [word for words in commands()[4:8] for word in words if word.startswith("/etc") or word.startswith("/run")]
    assert paths and all(any(path.startswith(mount + "/") for mount in mounts) for path in paths)


def test_one_gateway_at_a_time_fills_the_envelope():
    spec = deployment()["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
