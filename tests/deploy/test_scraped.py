"""A real Prometheus scrapes a real gateway: every query of the dashboard and of the alerts is answered, and says something."""

from __future__ import annotations

import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.stand import Prometheus, Stand, alerts, dashboard, dashboard_queries, until

IDLE_S = 3.0  # a connection that was idle for longer is not used again


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, service, own_copy):
    """A stand with traffic of every kind on it, and the Prometheus that watches it."""
    binary = service("prometheus")
    folder = own_copy(tmp_path_factory.mktemp("stand"))
    stand = Stand(folder)
    with stand.running(), Prometheus(stand, folder / "prometheus").running(binary) as prometheus, Traffic(stand) as traffic:
        yield stand, prometheus, traffic


class Traffic:
    """Rounds of requests that are served, wait, are refused, break, and find nobody; until `stop`."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(self._run)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._pool.shutdown()

    def check(self) -> None:
        """Raise what broke it, where something did."""
        if self._running.done():
            self._running.result()

    def stop(self) -> None:
        self._done.set()
        self._running.result()

    def _run(self) -> None:
        with httpx.Client(timeout=15) as client, ThreadPoolExecutor(8) as pool:
            while not self._done.is_set():
                self._round(client, pool)

    def _round(self, client: httpx.Client, pool: ThreadPoolExecutor) -> None:
        stand = self._stand
        list(pool.map(lambda _: stand.chat(client, stream=True), range(12)))
        stand.chat(client, words=2000)
        stand.chat(client, max_tokens=999)
        one_that_leaves(stand, client)
        self._done.wait(IDLE_S + 0.1)  # a new connection is needed from here on, and refused
        with stand.refusing():
            stand.chat(client)
        self._done.wait(1.5)  # the breaker lets one through again
        stand.fault(kind="reset", after=2, times=3)
        for _ in range(3):
            stand.chat(client, stream=True)
        stand.gateway.send_signal(signal.SIGHUP)
        self._done.wait(1.5)


def one_that_leaves(stand: Stand, client: httpx.Client) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 64}
    url = f"{stand.url}/v1/chat/completions"
    try:
        with client.stream("POST", url, json=body, headers=stand.headers("acme-1")) as answer:
            next(answer.iter_bytes(1), None)
    except httpx.HTTPError:
        return


def numbers(samples: list[dict]) -> list[float]:
    return [value for sample in samples if not math.isnan(value := float(sample["value"][1]))]


def test_both_targets_are_scraped_with_the_configuration_of_the_deployment(scraped):
    _, prometheus, _ = scraped

    def up() -> bool:
        return {s["metric"]["job"] for s in prometheus.query("up == 1")} == {"plimsoll", "vllm"}

    until(20, up, lambda: str(prometheus.query("up")))


def test_every_query_of_the_dashboard_has_data(scraped):
    _, prometheus, traffic = scraped
    queries = dashboard_queries()
    assert len(queries) > 40
    empty = dict.fromkeys(queries)

    def all_filled() -> bool:
        traffic.check()
        for title, expr in tuple(empty):
            if numbers(prometheus.query(expr)):
                del empty[title, expr]
        return not empty

    until(40, all_filled, lambda: "no data in " + "; ".join(f"{title}: {expr}" for title, expr in empty))


def test_the_choices_of_the_dashboard_are_the_names_in_the_policy(scraped):
    _, prometheus, _ = scraped
    until(20, lambda: prometheus.query("plimsoll_verdict"), lambda: "no verdict")
    choices = [v["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    assert choices == ["label_values(plimsoll_verdict, model)", "label_values(plimsoll_verdict, backend)"]
    assert prometheus.get("label/model/values?match[]=plimsoll_verdict") == ["tiny"]
    assert prometheus.get("label/backend/values?match[]=plimsoll_verdict") == ["vllm"]


def test_every_alert_is_evaluated_without_an_error(scraped):
    _, prometheus, _ = scraped

    def evaluated() -> bool:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return len(rules) == len(alerts()) and all(rule["health"] == "ok" for rule in rules)

    until(20, evaluated, lambda: str(prometheus.get("rules")))
    for rule in alerts():
        prometheus.query(rule["expr"])


def test_a_changed_configuration_and_a_refused_policy_are_seen(scraped):
    """Last: it takes the backend away from those above."""
    stand, prometheus, traffic = scraped
    traffic.stop()
    expr = {rule["alert"]: rule["expr"] for rule in alerts()}
    assert prometheus.query(expr["PlimsollConfigurationChanged"]) == []
    stand.fault(kind="restart", max_num_seqs=8)
    replace(stand.policy_file, stand.policy_file.read_text() + "unknown: 1\n")
    for name in ("PlimsollConfigurationChanged", "PlimsollGateClosed", "PlimsollPolicyRefused"):
        until(20, lambda name=name: prometheus.query(expr[name]), lambda name=name: f"{name}\n{stand.log('gateway')}")
    demand = "input|output|sequences|feature|concurrency|live_slo"
    assert numbers(prometheus.query(f'plimsoll_retest_triggers_total{{axis!~"{demand}"}}')) == [1.0]


def replace(path: Path, text: str) -> None:
    """As an editor does: the new file under another name, then over the old one."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
