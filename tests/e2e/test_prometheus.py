"""A real Prometheus scrapes a real process of penstock: alerts fire, and the dashboard's questions are answered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waits import wait_for

from servers import free_ports

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"

# A pipeline whose source stops after some batches, a trainer that waits for rollouts which nobody makes any more, a
# pipeline that goes on and sets aside more and more rows, and the figures of one whose budget is full.
PROGRAM = """
import sys, threading, time
import pyarrow as pa
from penstock import Pipeline, PipelineConfig, RolloutDataLoader
from penstock.metrics import MetricsConfig
from penstock.rl import LiveBuffer

metrics = MetricsConfig(f"prometheus://:{sys.argv[1]}", interval_seconds=0.1)
buffer = LiveBuffer()
buffer.append([{"prompt_ids": [1], "response_ids": [2, 3], "reward": r, "group": "g"} for r in (0.0, 1.0)])
loader = RolloutDataLoader(buffer, rollout_batch_size=2, batch_size=2, backend="numpy", metrics=metrics)

def train():
    while True:
        for batch in loader:
            pass

class Source:
    number = 0
    def next_batch(self, max_rows):
        if self.number == 3:
            sys.stdin.read()
            return None
        self.number += 1
        return pa.RecordBatch.from_pylist([{"text": "good"}, {"text": "bad"}])
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def check(row):
    if row["text"] == "bad":
        raise ValueError("a bad row")
    return row

class Endless(Source):
    def next_batch(self, max_rows):
        time.sleep(0.1)
        return pa.RecordBatch.from_pylist([{"text": "good"}, {"text": "bad"}])

def quarantine():
    named = MetricsConfig(metrics.targets, interval_seconds=0.1, name="growing")
    config = PipelineConfig(on_error="quarantine", batch_rows=1, quarantine=sys.argv[2] + "/bad.jsonl")
    Pipeline(Endless(), [check], sys.argv[2] + "/endless.jsonl", config, budget="64 MiB").run(metrics=named)

threading.Thread(target=train, daemon=True).start()
threading.Thread(target=quarantine, daemon=True).start()
full = {"penstock_pipeline_budget_used_bytes": 99, "penstock_pipeline_budget_limit_bytes": 100}
metrics.watch("pipeline", "full", lambda: full)
config = PipelineConfig(on_error="quarantine", stall_seconds=None)
Pipeline(Source(), [check], sys.argv[2] + "/out.jsonl", config, budget="64 MiB").run(metrics=metrics)
"""


def binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            raise RuntimeError(f"{name} is not installed, and CI skips no test; install the package prometheus")
        pytest.skip(f"{name} is not installed")
    return found


def shortened(rules: str) -> str:
    """The same rules with seconds in place of minutes."""
    return re.sub(r"\[\d+m\]", "[3s]", re.sub(r"for: \d+m", "for: 1s", rules))


def test_the_alert_rules_pass_their_tests() -> None:
    command = [binary("promtool"), "test", "rules", "prometheus-alerts.test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = {
        check["alertname"]
        for test in yaml.safe_load((MONITORING / "prometheus-alerts.test.yml").read_text("utf-8"))["tests"]
        for check in test["alert_rule_test"]
        if check.get("exp_alerts")
    }
    rules = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    assert tested == {rule["alert"] for rule in rules}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Questions to a Prometheus that watches a process of penstock."""
    server, home = binary("prometheus"), tmp_path_factory.mktemp("prometheus")
    port, own = free_ports(2)
    (home / "rules.yml").write_text(shortened((MONITORING / "prometheus-alerts.yml").read_text("utf-8")))
    config = {
        "global": {"scrape_interval": "300ms", "scrape_timeout": "300ms", "evaluation_interval": "300ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = [f"--web.listen-address=127.0.0.1:{own}", f"--storage.tsdb.path={home}/data", "--log.level=error"]
    with (
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(port), str(home)], stdin=subprocess.PIPE) as process,
        subprocess.Popen([server, f"--config.file={home}/prometheus.yml", *arguments]) as scraper,
    ):

        def ask(path: str, **values: str) -> Any:
            url = f"http://127.0.0.1:{own}/api/v1/{path}?{urllib.parse.urlencode(values)}"
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                if error.code == 503:  # it listens before it is ready
                    return None
                raise AssertionError(f"{values}: {error.read().decode()}") from None
            except OSError:
                assert scraper.poll() is None
                return None

        try:
            wait_for(
                lambda: (found := ask("query", query="penstock_loader_steps_total")) and found["result"], "a scrape"
            )
            yield ask
        finally:
            scraper.terminate()
            process.kill()


def test_every_alert_fires_for_the_run_that_it_is_about(prometheus: Callable[..., Any]) -> None:
    def firing() -> set[tuple[str, str]]:
        labels = [each["labels"] for each in prometheus("alerts")["alerts"] if each["state"] == "firing"]
        return {(each["alertname"], each["run"]) for each in labels}

    wanted = {
        ("PenstockPipelineStalled", "pipeline"),
        ("PenstockLoaderStalled", "RolloutDataLoader"),
        ("PenstockTrainerStarving", "RolloutDataLoader"),
        ("PenstockBudgetFull", "full"),
        ("PenstockQuarantineGrowing", "growing"),
    }
    wait_for(lambda: wanted <= firing(), "alerts")
    assert firing() == wanted
    rules = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == {name for name, _ in wanted}


def test_prometheus_answers_every_question_of_the_dashboard(prometheus: Callable[..., Any]) -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text("utf-8"))
    questions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(questions) > 20
    answered = {
        question: prometheus("query", query=question.replace("$__rate_interval", "5s"))["result"]
        for question in questions
    }
    # What this process has: a pipeline with a quarantine, and a loader of rollouts.
    empty = [question for question, result in answered.items() if not result]
    others = re.compile("queue|feed|staleness|skipped|rows_dropped|rollouts_dropped|source_samples|latency")
    assert all(others.search(question) for question in empty), empty


def test_series_say_which_process_they_are_of(prometheus: Callable[..., Any]) -> None:
    (series,) = prometheus("query", query="penstock_loader_epoch")["result"]
    assert series["metric"]["run"] == "RolloutDataLoader"
    assert series["metric"]["rank"] == "0"
    assert int(series["metric"]["pid"]) > 0
    (bad,) = prometheus("query", query='penstock_pipeline_rows_quarantined_total{run="pipeline"}')["result"]
    assert float(bad["value"][1]) == 3
