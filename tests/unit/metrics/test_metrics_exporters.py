"""Exporters: each with the real package or server, and none of them changes a batch or hurts a run."""

from __future__ import annotations

import http.server
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import free_ports
from tests.waits import wait_for

from penstock import DatasetConsumer, Pipeline, PretrainDataLoader
from penstock.errors import ConfigError, StageError
from penstock.feed import FeedServer
from penstock.fsqueue import DataProviderBase
from penstock.metrics import MetricsConfig, MetricsWatch, Reading, RunEnd, RunFacts, key_of, open_exporter, prometheus
from penstock.metrics.metrics_file import MetricsFile
from penstock.metrics.prometheus import PrometheusServer
from penstock.rl import LiveBuffer
from penstock.testing import FailingTransform, RowsSource
from token_stores import make_rows, make_store

ROWS = [{"text": f"row {number}"} for number in range(500)]
READINGS = {
    "penstock_loader_step": 7,
    "penstock_loader_tokens_total": 1234,
    key_of("penstock_loader_source_ratio", source="web"): 0.75,
    key_of("penstock_rollouts_reward_bucket", le="0.0"): 1,
    key_of("penstock_rollouts_reward_bucket", le="1.0"): 3,
    key_of("penstock_rollouts_reward_bucket", le="+Inf"): 4,
    "penstock_rollouts_reward_sum": 5.5,
    "penstock_rollouts_reward_count": 4,
}


def export(target: Any, readings: dict[str, float] = READINGS, **options: Any) -> None:
    """One run with these readings, from its beginning to its end."""
    config = MetricsConfig(target, job="job-1", **options)
    config.watch("loader", "train", lambda: readings, rank=2).end()


def fetch(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


# Targets


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("promethous://:9464", "did you mean 'prometheus'"),
        ("prometheus:9464", "expected prometheus://HOST:PORT"),
        ("prometheus://:x", "is no URL"),
        ("prometheus://:9464?a=1", "unknown option 'a'"),
        ("otlp://", "names no host"),
        ("otlp://host?trace=1", "did you mean 'traces'"),
        ("otlp://host?traces=2", "between 0 and 1"),
        ("wandb:", "names no place"),
        ("", "empty string"),
        (7, "got 7"),
        (["run.jsonl", "s4://x"], "unknown scheme 's4'"),
    ],
)
def test_a_bad_target_is_refused_before_anything_runs(target: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        Pipeline(ROWS, [], tmp_path / "out.jsonl").run(metrics=target)
    assert not list(tmp_path.iterdir())


def test_options_of_metrics_are_checked() -> None:
    with pytest.raises(ConfigError, match="interval_seconds must be positive, got 0"):
        MetricsConfig("x.jsonl", interval_seconds=0)
    with pytest.raises(ConfigError, match="trace_share must be between 0 and 1, got 2"):
        MetricsConfig("x.jsonl", trace_share=2)
    with pytest.raises(ConfigError, match="rank must be a number from 0 on, got -1"):
        MetricsConfig("x.jsonl", rank=-1)


def test_a_rank_of_the_config_is_the_label_whatever_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    MetricsConfig(tmp_path / "m.jsonl", rank=3).watch("feed", "FeedServer", dict, rank=1).end()
    assert lines_of(tmp_path / "m.rank3.jsonl")[0]["labels"]["rank"] == "3"


def test_a_file_url_is_a_metrics_file(tmp_path: Path) -> None:
    Pipeline(ROWS, [], tmp_path / "out.jsonl").run(metrics=(tmp_path / "m.jsonl").as_uri())
    assert lines_of(tmp_path / "m.jsonl")[-1]["end"] == "finished"
    with pytest.raises(ConfigError, match="three slashes"):
        open_exporter("file://elsewhere/m.jsonl")


def test_a_target_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.metrics.targets.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="penstock\\[metrics\\]"):
        open_exporter("wandb:x")


# The metrics file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_metrics_file_of_a_run_has_a_header_readings_and_the_report(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.metrics.jsonl"
    pipeline = Pipeline(ROWS, [], tmp_path / "out.jsonl")
    report = pipeline.run(metrics=f"jsonl:{path}")
    first, *readings, last = lines_of(path)
    assert first["penstock_metrics"] == 1
    assert (first["kind"], first["pid"], first["host"]) == ("pipeline", os.getpid(), socket.gethostname())
    assert first["labels"] == {"rank": "0", "pid": str(os.getpid())}
    assert first["description"] == str(pipeline)
    assert readings[-1]["metrics"]["penstock_pipeline_rows_out_total"] == len(ROWS)
    assert readings[-1]["note"] == pipeline.snapshot()["bottleneck"] or readings[-1]["note"]
    assert [reading["seconds"] for reading in readings] == sorted(reading["seconds"] for reading in readings)
    assert last["end"] == "finished"
    assert last["report"] == json.loads(json.dumps(report.to_dict()))


def test_the_metrics_file_of_a_failed_run_names_the_error(tmp_path: Path) -> None:
    pipeline = Pipeline(ROWS, [FailingTransform("text", ["row 100"])], tmp_path / "out.jsonl")
    with pytest.raises(StageError, match="failing as requested"):
        pipeline.run(metrics=tmp_path / "m.jsonl")
    last = lines_of(tmp_path / "m.jsonl")[-1]
    assert last["end"] == "failed"
    assert last["error"].startswith("StageError: ")


def test_a_run_that_is_stopped_says_so(tmp_path: Path) -> None:
    pipeline = Pipeline(RowsSource(ROWS), [], tmp_path / "out.jsonl")
    pipeline.start(metrics=tmp_path / "m.jsonl")
    pipeline.stop()
    assert lines_of(tmp_path / "m.jsonl")[-1]["end"] == "stopped"


def test_a_second_run_appends_a_part_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"penstock_metrics":1}\n{"seconds":1,"metr')
    Pipeline(ROWS, [], tmp_path / "out.jsonl").run(metrics=path)
    lines = path.read_bytes().splitlines()
    assert lines[1] == b'{"seconds":1,"metr'
    assert json.loads(lines[2])["penstock_metrics"] == 1
    assert json.loads(lines[-1])["end"] == "finished"


def test_ranks_write_files_of_their_own() -> None:
    run = RunFacts("loader", "train", labels={"rank": "3"})
    assert MetricsFile("a/run.metrics.jsonl").path_of(run) == Path("a/run.metrics.rank3.jsonl")
    assert MetricsFile("a/{rank}-{pid}.jsonl").path_of(run) == Path(f"a/3-{os.getpid()}.jsonl")
    assert MetricsFile("a/run.jsonl").path_of(RunFacts("loader", "train", labels={"rank": "0"})) == Path("a/run.jsonl")


def test_a_loader_that_is_never_closed_ends_its_file_when_the_process_does(tmp_path: Path) -> None:
    make_store(tmp_path / "a", make_rows(64, 12))
    program = (
        "import sys; from penstock import PretrainDataLoader\n"
        "loader = PretrainDataLoader(sys.argv[1], chunk_size=8, backend='numpy', metrics=sys.argv[2])\n"
        "next(iter(loader))\n"
    )
    path = tmp_path / "m.jsonl"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a"), str(path)], check=True)
    assert lines_of(path)[-1]["end"] == "stopped"
    assert lines_of(path)[-2]["metrics"]["penstock_loader_steps_total"] == 1


def test_a_loader_that_is_forgotten_is_not_kept_alive_by_its_watch(tmp_path: Path) -> None:
    make_store(tmp_path / "a", make_rows(64, 12))
    path = tmp_path / "m.jsonl"
    metrics = MetricsConfig(path, interval_seconds=0.02)
    loader = PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy", metrics=metrics)
    loader.get_batch()
    del loader
    wait_for(lambda: path.exists() and '"end":"stopped"' in path.read_text())


def test_the_end_of_a_loader_is_that_of_its_block(tmp_path: Path) -> None:
    make_store(tmp_path / "a", make_rows(64, 12))

    def train() -> None:
        with PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy", metrics=tmp_path / "m.jsonl") as loader:
            loader.get_batch()
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        train()
    last = lines_of(tmp_path / "m.jsonl")[-1]
    assert (last["end"], last["error"]) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("kind", ["loader", "consumer", "provider", "buffer", "feed"])
@pytest.mark.parametrize(
    ("error", "end", "said"),
    [(KeyboardInterrupt(), "stopped", "KeyboardInterrupt"), (OSError("no"), "failed", "OSError: no")],
)
def test_what_is_left_by_an_error_says_so_and_ctrl_c_is_no_failure(
    tmp_path: Path, kind: str, error: BaseException, end: str, said: str
) -> None:
    path = tmp_path / "m.jsonl"

    def work(stack: ExitStack) -> None:
        if kind in ("loader", "feed"):
            make_store(tmp_path / "a", make_rows(64, 12))
            metrics = path if kind == "loader" else None
            loader = PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy", metrics=metrics)
            stack.enter_context(loader).get_batch()
            if kind == "feed":
                stack.enter_context(FeedServer(loader, metrics=path))
        elif kind == "buffer":
            buffer = stack.enter_context(LiveBuffer(metrics=path))
            buffer.append({"prompt_ids": [1], "response_ids": [2], "reward": 1.0})
        else:
            settings = {"dataset": "a", "batch_size": 1, "block_size": 1, "data_root": str(tmp_path)}
            provider = Ones(settings, metrics=path if kind == "provider" else None)
            if kind == "provider":
                provider.error = error
            provider.run(max_batches=1)
            stack.enter_context(DatasetConsumer(provider.queue_dir, backend="numpy", metrics=path)).get_batch()
        raise error

    with pytest.raises(type(error)), ExitStack() as stack:
        work(stack)
    last = lines_of(path)[-1]
    assert (last["end"], last["error"]) == (end, said)


class Ones(DataProviderBase):
    """Provider that may fail."""

    error: BaseException | None = None

    def build_meta(self) -> dict[str, Any]:
        return {"training_type": "CLM", "vocab_size": 2, "batch_schema": [{"name": "x", "dtype": "int64", "shape": []}]}

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"x": np.ones(self.batch_size, np.int64)}


def test_metrics_of_a_provider_can_be_named_in_its_config(tmp_path: Path) -> None:
    config = {"dataset": "a", "batch_size": 1, "block_size": 1, "data_root": str(tmp_path)}
    Ones({**config, "metrics": str(tmp_path / "m.jsonl")}).run(max_batches=1)
    assert lines_of(tmp_path / "m.jsonl")[-1]["end"] == "finished"
    with pytest.raises(ConfigError, match="unknown scheme 'prometeus'; did you mean 'prometheus'"):
        Ones({**config, "metrics": "prometeus://:9464"})


# Exporters never hurt


class Broken:
    """Exporter that always fails."""

    def begin(self, run: RunFacts) -> None:
        raise OSError("the disk is full")

    def write(self, reading: Reading) -> None:
        raise OSError("the disk is full")

    def end(self, end: RunEnd) -> None:
        raise OSError("the disk is full")


def dead_targets(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a file").write_text("")
    return {
        "none": None,
        "exporter": Broken(),
        "collector that is down": f"otlp://127.0.0.1:{free_ports(1)[0]}?traces=1",
        "directory that is a file": str(tmp_path / "a file" / "m.jsonl"),
        "full disk": "/dev/full",
        "address of another machine": "prometheus://192.0.2.1:9464",
    }


def test_a_dead_exporter_is_said_once_and_changes_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_store(tmp_path / "a", make_rows(200, 12))
    seen: dict[str, list[Any]] = {}
    states = {}
    for name, target in dead_targets(tmp_path).items():
        caplog.clear()
        metrics = None if target is None else MetricsConfig(target, interval_seconds=0.01)
        with PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy", metrics=metrics) as loader:
            seen[name] = [batch.to_numpy() for batch in loader]
            states[name] = loader.state_dict()
        said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == (target is not None), [record.getMessage() for record in said]
        assert target is None or "the run goes on" in said[0].getMessage()
    for name, batches in seen.items():
        assert states[name] == states["none"], name
        for batch, expected in zip(batches, seen["none"], strict=True):
            assert batch.keys() == expected.keys()
            assert all(np.array_equal(batch[key], expected[key]) for key in batch), name


def test_a_dead_exporter_changes_no_row_of_a_pipeline(tmp_path: Path) -> None:
    outputs = {}
    for number, (name, target) in enumerate(dead_targets(tmp_path).items()):
        out = tmp_path / f"{number}.jsonl"
        Pipeline(ROWS, [], out).run(metrics=None if target is None else MetricsConfig(target, interval_seconds=0.01))
        outputs[name] = out.read_bytes()
    assert len(set(outputs.values())) == 1


def test_an_exporter_that_recovers_gets_a_beginning_and_further_readings() -> None:
    class Flaky:
        def __init__(self) -> None:
            self.calls: Counter[str] = Counter()

        def begin(self, run: RunFacts) -> None:
            self.calls["begin"] += 1
            if self.calls["begin"] < 2:
                raise ConnectionError("down")

        def write(self, reading: Reading) -> None:
            self.calls["write"] += 1

        def end(self, end: RunEnd) -> None:
            self.calls["end"] += 1

    flaky = Flaky()
    watch = MetricsWatch(RunFacts("loader", "x"), lambda: {"a": 1.0}, [flaky], interval_seconds=0.01).start()
    watch.end()
    assert flaky.calls["begin"] == 2
    assert flaky.calls["write"] >= 1
    assert flaky.calls["end"] == 1


def test_metrics_that_cannot_be_read_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reads = Counter[str]()

    def read() -> dict[str, float]:
        reads["all"] += 1
        raise OSError("the queue is gone")

    watch = MetricsWatch(RunFacts("queue", "q"), read, [], interval_seconds=0.001).start()
    wait_for(lambda: reads["all"] > 3)
    watch.end()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics of q cannot be read: OSError: the queue is gone"
    ]


# Prometheus


def test_prometheus_reads_the_last_readings_with_labels_of_the_process() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    port = free_ports(1)[0]
    watch = MetricsConfig(f"prometheus://:{port}", job="job-1").watch("loader", "train", lambda: READINGS, rank=2)
    text = wait_for(lambda: (found := fetch(port)) and "tokens" in found and found)
    families = {each.name: each for each in text_string_to_metric_families(text)}
    (tokens,) = families["penstock_loader_tokens"].samples
    assert (tokens.name, tokens.value) == ("penstock_loader_tokens_total", 1234)
    assert tokens.labels == {"rank": "2", "pid": str(os.getpid()), "job": "job-1", "run": "train"}
    assert families["penstock_rollouts_reward"].type == "histogram"
    (share,) = families["penstock_loader_source_ratio"].samples
    assert share.labels["source"] == "web"
    watch.end()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def test_two_loaders_of_a_process_share_a_server_and_have_series_of_their_own() -> None:
    port = free_ports(1)[0]
    config = MetricsConfig(f"prometheus://127.0.0.1:{port}")
    first = config.watch("loader", "train", lambda: {"penstock_loader_epoch": 1})
    second = config.watch("loader", "train", lambda: {"penstock_loader_epoch": 2})
    text = wait_for(lambda: (found := fetch(port)).count("penstock_loader_epoch{") == 2 and found)
    assert 'run="train"' in text
    assert 'run="train 2"' in text
    first.end()
    assert fetch(port).count("penstock_loader_epoch{") == 1
    second.end()


def test_a_run_that_begins_while_the_last_one_ends_keeps_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    first, second = PrometheusServer("127.0.0.1", port), PrometheusServer("127.0.0.1", port)
    run, end = RunFacts("loader", "train"), RunEnd(1.0, "finished")
    first.begin(run)
    ending = threading.Thread(target=first.end, args=(end,))
    board_of = prometheus._board_of

    def while_the_first_ends(host: str, port: int) -> Any:
        board = board_of(host, port)
        ending.start()
        ending.join(0.2)  # it cannot end now; without a lock it would
        return board

    monkeypatch.setattr(prometheus, "_board_of", while_the_first_ends)
    second.begin(run)
    ending.join()
    second.write(Reading(1.0, 1.0, {"penstock_loader_epoch": 3}))
    assert "penstock_loader_epoch" in fetch(port)
    second.end(end)


def test_a_taken_port_is_passed_over_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.metrics")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        watch = MetricsConfig(f"prometheus://:{port}").watch("loader", "x", lambda: {"penstock_loader_epoch": 3})
        said = wait_for(lambda: [each.getMessage() for each in caplog.records if "Prometheus" in each.getMessage()])
        other = int(said[0].split("127.0.0.1:")[1].split("/")[0])
        assert other > port
        assert f"since port {port} is taken" in said[0]
        assert wait_for(lambda: "penstock_loader_epoch" in fetch(other))
        watch.end()


# OpenTelemetry


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes, dict[str, str]]]]]:
    received: list[tuple[str, bytes, dict[str, str]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, body, dict(self.headers.items())))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"otlp://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def attributes_of(message: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in message.attributes}


def test_a_collector_gets_metrics_with_their_kinds_and_units(
    collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret, other=1")
    url, received = collector
    export(url)
    path, body, headers = received[-1]
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/x-protobuf"
    assert headers["Api-Key"] == "secret"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    facts = attributes_of(resource.resource)
    assert (facts["penstock.rank"], facts["penstock.job"], facts["process.pid"]) == ("2", "job-1", os.getpid())
    metrics = {each.name: each for each in resource.scope_metrics[0].metrics}
    tokens = metrics["penstock_loader_tokens_total"]
    assert tokens.sum.is_monotonic
    assert (tokens.sum.data_points[0].as_double, tokens.unit) == (1234, "{tokens}")
    (share,) = metrics["penstock_loader_source_ratio"].gauge.data_points
    assert (share.as_double, attributes_of(share)) == (0.75, {"source": "web"})
    (reward,) = metrics["penstock_rollouts_reward"].histogram.data_points
    assert (reward.count, reward.sum) == (4, 5.5)
    assert list(reward.explicit_bounds) == [0.0, 1.0]
    assert list(reward.bucket_counts) == [1, 2, 1]


def test_a_collector_gets_a_trace_of_each_batch_with_a_span_of_each_stage(
    collector: tuple[str, list[Any]], tmp_path: Path
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, received = collector
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Pipeline(tmp_path / "in.jsonl", [lambda row: row], tmp_path / "out.jsonl").run(metrics=f"{url}?traces=1")
    requests = [ExportTraceServiceRequest.FromString(body) for path, body, _ in received if path == "/v1/traces"]
    spans = [each for one in requests for each in one.resource_spans[0].scope_spans[0].spans]
    kinds: dict[bytes, set[str]] = {}
    for span in spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
        assert (len(span.trace_id), len(span.span_id)) == (16, 8)
        kinds.setdefault(span.trace_id, set()).add(attributes_of(span)["penstock.kind"])
    assert {"source", "decode", "transform", "sink"} in kinds.values()


def test_only_a_share_of_the_batches_is_traced_and_every_stage_agrees() -> None:
    from penstock.metrics.spans import SpanBuffer

    buffer = SpanBuffer(0.1)
    for number in range(2000):
        for stage in ("read", "write"):
            buffer.add(stage, f"batch {number}", 0.01)
    spans = buffer.take()
    assert 2 * 120 < len(spans) < 2 * 280
    assert set(Counter(span.trace for span in spans).values()) == {2}
    assert buffer.take() == []


# Loggers


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    export(f"tensorboard:{tmp_path}")
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert "train-rank2" in file.parent.name
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    found = {value.tag: value for value in events[-1].summary.value}
    assert events[-1].step == 7
    assert found["penstock_loader_source_ratio/web"].tensor.float_val[0] == 0.75
    assert found["penstock_loader_tokens_total"].tensor.float_val[0] == 1234


def test_mlflow_reads_the_metrics_back_from_its_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/runs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    export("mlflow:data")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("data").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["penstock_loader_source_ratio/web"] == 0.75
    assert run.data.tags["penstock.rank"] == "2"
    assert client.get_metric_history(run.info.run_id, "penstock_loader_tokens_total")[-1].step == 7


def test_weights_and_biases_writes_its_offline_run(tmp_path: Path) -> None:
    program = (
        "from penstock.metrics import MetricsConfig\n"
        "watch = MetricsConfig('wandb:data').watch('loader', 'train', lambda: {'penstock_loader_tokens_total': 1234})\n"
        "watch.end()\n"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path, timeout=150)
    (file,) = tmp_path.rglob("run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found: dict[str, str] = {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        found |= {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
    assert json.loads(found["penstock_loader_tokens_total"]) == 1234


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of an offline run: a log of LevelDB behind seven bytes, in blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
