"""The rules and the dashboard, checked by the programs that read them, and against the metrics that exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from gateway.errors import Outcome, Reason
from gateway.evidence.states import ReasonClass
from gateway.observe.exposition import COUNTERS, GAUGES, HISTOGRAMS
from tests.deploy.stand import DEPLOY, alerts, dashboard, dashboard_queries

SCENARIOS = DEPLOY.parent / "tests" / "deploy" / "alerts.yml"
OF_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules(service):
    assert f"SUCCESS: {len(alerts())} rules found" in run(
        service("promtool"), "check", "rules", str(DEPLOY / "prometheus/alerts.yml")
    )


def test_promtool_takes_the_scrape_configuration(service, tmp_path):
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    key = tmp_path / "scraper.key"
    key.write_text("k")
    (tmp_path / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/scraper_key", str(key)))
    run(service("promtool"), "check", "config", str(tmp_path / "prometheus.yml"))


def test_each_scenario_of_the_alerts_holds(service):
    assert "SUCCESS" in run(service("promtool"), "test", "rules", str(SCENARIOS))


@pytest.mark.parametrize("change", [("for: 1m", "for: 0m"), ("> 0.05", "> 0.5")])
def test_a_changed_rule_breaks_a_scenario(service, tmp_path, change):
    """The scenarios can fail: a rule that says something else does not pass."""
    changed = (DEPLOY / "prometheus" / "alerts.yml").read_text().replace(*change)
    (tmp_path / "alerts.yml").write_text(changed)
    (tmp_path / "scenarios.yml").write_text(SCENARIOS.read_text().replace("../../deploy/prometheus/alerts.yml", "alerts.yml"))
    failed = subprocess.run([service("promtool"), "test", "rules", "scenarios.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode != 0 and "FAILED" in failed.stdout + failed.stderr


def test_each_alert_has_a_scenario_in_which_it_is_silent_and_one_in_which_it_fires():
    seen: dict[str, set[bool]] = {}
    for scenario in yaml.safe_load(SCENARIOS.read_text())["tests"]:
        for check in scenario["promql_expr_test"]:
            name = re.search(r'alertname="(\w+)"', check["expr"])[1]
            seen.setdefault(name, set()).add(bool(check["exp_samples"]))
    assert seen == {rule["alert"]: {True, False} for rule in alerts()}


def test_each_alert_says_what_it_means_and_where_to_look():
    for rule in alerts():
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_the_dashboard_is_what_its_source_says():
    done = subprocess.run([sys.executable, str(DEPLOY / "grafana" / "build.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def expressions() -> list[str]:
    return [expr for _, expr in dashboard_queries()] + [rule["expr"] for rule in alerts()]


def test_every_metric_that_is_asked_for_exists():
    known = set(COUNTERS) | set(GAUGES) | {f"{name}_bucket" for name in HISTOGRAMS} | OF_THE_PROCESS
    asked = {name for expr in expressions() for name in re.findall(r"\b(?:plimsoll|process)_\w+", expr)}
    assert asked <= known


def test_every_label_that_is_asked_for_belongs_to_its_metric():
    labels = {name: set(of) for family in (COUNTERS, GAUGES) for name, (of, _) in family.items()}
    labels |= {f"{name}_bucket": {*of, "le"} for name, (of, _) in HISTOGRAMS.items()}
    for expr in expressions():
        for name, selector in re.findall(r"\b(plimsoll_\w+)\{([^}]*)\}", expr):
            assert set(re.findall(r"(\w+)[=!]~?\"", selector)) <= labels[name], expr


def test_every_value_that_is_asked_for_can_occur():
    for name, words in (("outcome", set(Outcome)), ("reason", set(Reason) | set(ReasonClass))):
        for expr in expressions():
            for pattern in re.findall(rf'\b{name}=~?"([^"]*)"', expr):
                assert all(any(re.fullmatch(part, word) for word in words) for part in pattern.split("|")), (name, pattern)


def test_every_panel_says_what_it_shows_and_fits_the_grid():
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"


def test_grafana_is_told_of_the_data_source_and_of_the_folder_that_compose_mounts():
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert source["type"] == "prometheus" and source["url"].removeprefix("http://").split(":")[0] in compose
    provider = yaml.safe_load((provisioning / "dashboards" / "plimsoll.yaml").read_text())["providers"][0]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["grafana"]["volumes"]
