"""The registry of metrics: every exported key is in it, and every entry is documented."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import DatasetConsumer, MixedDataLoader, Pipeline, RolloutDataLoader
from penstock.engines.driver import JobOptions
from penstock.engines.executor import InProcess
from penstock.engines.run import JobEngine
from penstock.feed import FeedServer
from penstock.fsqueue import DataProviderBase
from penstock.loaders.streamed.reader import StreamOptions
from penstock.metrics import INSTRUMENTS, instrument_of, key_of, labels_of, name_of
from penstock.metrics.readings import logger_names
from penstock.pipeline import PipelineConfig
from penstock.rl import LiveBuffer, RolloutQueue
from penstock.tokenizers.simple import ByteTokenizer
from penstock.transforms import Filter, Tokenize
from token_stores import make_rows, make_store

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENTED = re.findall(r"^\| `(penstock_\w+)` \|", (DOCS / "metrics.md").read_text("utf-8"), re.M)


def check_known(found: dict[str, float], *subjects: str) -> None:
    """Every key is in the registry, with its labels, and each subject has some."""
    for key, value in found.items():
        instrument = instrument_of(name_of(key))
        assert instrument is not None, f"{key} is not in the registry"
        extra = ("le",) if instrument.kind == "histogram" and "_bucket" in key else ()
        assert set(labels_of(key)) == {*instrument.labels, *extra}, key
        assert isinstance(value, (int, float)), key
        assert np.isfinite(value), key
    for subject in subjects:
        assert any(key.startswith(f"penstock_{subject}_") for key in found), (subject, sorted(found))


def test_the_documentation_has_the_table_of_the_registry_in_its_order() -> None:
    assert list(INSTRUMENTS) == DOCUMENTED
    text = (DOCS / "metrics.md").read_text("utf-8")
    for each in INSTRUMENTS.values():
        labels = ", ".join(each.labels)
        assert f"| `{each.name}` | {each.kind} | {each.unit} | {labels} | {each.help} |" in text


def test_names_say_their_kind_and_unit() -> None:
    for each in INSTRUMENTS.values():
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert re.fullmatch(r"penstock_(pipeline|stage|loader|queue|rollouts|feed)_[a-z_]+", each.name)
        for unit in ("seconds", "bytes", "ratio"):
            if each.unit == unit:
                assert f"_{unit}" in each.name, each.name


def test_dashboard_and_alerts_use_names_of_the_registry() -> None:
    for path in sorted((DOCS / "monitoring").iterdir()):
        for name in set(re.findall(r"penstock_[a-z]+_[a-z_]+", path.read_text("utf-8"))):
            assert instrument_of(name) is not None, f"{path.name}: {name}"


@pytest.mark.parametrize("value", ["plain", 'a "b"', "back\\slash", "two\nlines", "{x=1,y}", "ünï", "\\n"])
def test_labels_come_back_as_they_were(value: str) -> None:
    key = key_of("penstock_stage_rows_in_total", stage=value, kind="transform")
    assert name_of(key) == "penstock_stage_rows_in_total"
    assert labels_of(key) == {"stage": value, "kind": "transform"}


def test_long_labels_and_lone_surrogates_can_be_sent() -> None:
    found = labels_of(key_of("penstock_stage_threads", stage="x" * 10_000 + "\ud800"))["stage"]
    assert len(found) == 200
    assert labels_of(key_of("penstock_stage_threads", stage="\ud800"))["stage"] == "?"


def test_loggers_get_names_without_braces_and_no_two_alike() -> None:
    names = logger_names({key_of("penstock_stage_threads", stage=stage): 1 for stage in ("a(b)", "a[b]", "ok")})
    assert list(names) == ["penstock_stage_threads/a_b", "penstock_stage_threads/a_b_2", "penstock_stage_threads/ok"]


def test_metrics_of_a_pipeline_are_in_the_registry(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"Hello {number}"}) for number in range(50)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    config = PipelineConfig(on_error="quarantine")
    tokenizer = ByteTokenizer()
    steps = [
        Filter("text != 'Hello 3'"),
        Filter("text != 'Hello 4'"),
        Tokenize(tokenizer, max_length=4, truncation="right"),
    ]
    pipeline = Pipeline(tmp_path / "in.jsonl", steps, tmp_path / "out.parquet", config)
    assert pipeline.metrics() == {}
    report = pipeline.run()
    found = pipeline.metrics()
    check_known(found, "pipeline", "stage")
    assert found["penstock_pipeline_rows_out_total"] == report.rows_out == 48
    (quarantined,) = (value for key, value in found.items() if "quarantined" in key)
    assert quarantined == 1
    assert sum(value for key, value in found.items() if "rows_dropped" in key) == 2


def test_two_stages_of_one_name_keep_their_own_series(tmp_path: Path) -> None:
    source = [{"text": "A"}, {"text": "b"}]
    pipeline = Pipeline(source, [lambda row: row, lambda row: row], tmp_path / "out.jsonl")
    pipeline.run()
    assert sum(name_of(key) == "penstock_stage_rows_in_total" for key in pipeline.metrics()) == 4


def test_metrics_of_a_mixture_are_in_the_registry_and_exact(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, make_rows(64, 12, shortest=3))
    sources = {"a": tmp_path / "a", "b": tmp_path / "b"}
    options = {"chunk_size": 8, "packing": None, "truncation": "right", "backend": "numpy", "budget": "64 MiB"}
    with MixedDataLoader(sources, {"a": 3, "b": 1}, batch_size=8, **options) as loader:  # type: ignore[arg-type]
        assert loader.metrics() == {}
        batches = list(loader)
        found = loader.metrics()
        lost = sum(
            int(np.maximum(loader.sources[number].inputs.table.lengths(batch.metadata["row"][of_source]) - 8, 0).sum())
            for batch in batches
            for number in range(2)
            for of_source in [batch.metadata["source"] == number]
        )
    check_known(found, "loader")
    places = sum(batch.input_ids.size for batch in batches)
    tokens = sum(
        int(batch.attention_mask.sum()) if batch.attention_mask is not None else batch.input_ids.size
        for batch in batches
    )
    assert found["penstock_loader_steps_total"] == len(batches)
    assert found["penstock_loader_tokens_total"] == tokens
    assert found["penstock_loader_places_total"] == places
    assert found["penstock_loader_padding_ratio"] == pytest.approx(1 - tokens / places)
    assert found["penstock_loader_truncated_tokens_total"] == lost > 0
    assert found["penstock_loader_samples_total"] == 8 * len(batches)
    assert found[key_of("penstock_loader_source_ratio", source="a")] == pytest.approx(0.75, abs=0.01)
    waited = found["penstock_loader_data_wait_seconds_total"] + found["penstock_loader_train_seconds_total"]
    assert 0 < waited <= found["penstock_loader_seconds"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_realised_mixture_counts_samples_as_weights_do(tmp_path: Path, streaming: bool) -> None:
    make_store(tmp_path / "short", make_rows(400, 4, shortest=2))
    make_store(tmp_path / "long", make_rows(100, 30, shortest=20))
    packed = {"chunk_size": 32, "packing": "best_fit"}
    streams = {
        name: penstock.PretrainDataLoader(tmp_path / name, streaming=True, backend="numpy", **packed)  # type: ignore[arg-type]
        for name in ("short", "long")
    }
    sources: Any = streams if streaming else {name: tmp_path / name for name in ("short", "long")}
    options: dict[str, Any] = {"batch_size": 1} if streaming else {"batch_size": 4, **packed}
    with MixedDataLoader(sources, {"short": 1, "long": 3}, backend="numpy", **options) as loader:
        batches = [loader.get_batch() for _ in range(8)]
        found = loader.metrics()
    for stream in streams.values():
        stream.close()
    drawn = [
        batch.metadata["sources"][source]
        for batch in batches
        for source, _ in dict.fromkeys(zip(batch.metadata["source"].tolist(), batch.metadata["sample"].tolist()))
    ]
    assert len(drawn) == 8 * options["batch_size"]
    for name, share in (("short", 0.25), ("long", 0.75)):
        assert found[key_of("penstock_loader_source_samples_total", source=name)] == drawn.count(name)
        assert found[key_of("penstock_loader_source_ratio", source=name)] == share


@pytest.mark.parametrize("asked_every", [1, 7, 1000])
def test_a_stream_counts_the_samples_of_each_file_whenever_it_is_asked(tmp_path: Path, asked_every: int) -> None:
    """Each batch names its own files, often one: the same number is another file in the next batch."""
    for number in range(3):
        texts = (f"{number}-{row} {'w' * 20}" for row in range(40 * (number + 1)))
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    drawn: list[str] = []
    lengths: set[int] = set()
    with penstock.PretrainDataLoader(
        [tmp_path / f"{number}.jsonl" for number in range(3)],
        ByteTokenizer(),
        chunk_size=24,
        batch_size=2,
        streaming=StreamOptions(streams=8, shuffle_window=16, worker_type="thread"),
        backend="numpy",
    ) as loader:
        for number, batch in enumerate(loader):
            if number % asked_every == 0:
                loader.metrics()
            sources, names = batch.metadata["source"], batch.metadata["sources"]
            lengths.add(len(names))
            drawn += [names[sources[part]] for part in np.unique(batch.metadata["sample"], return_index=True)[1]]
        found = loader.metrics()
    assert lengths >= {1, 2}
    counts = {labels_of(key)["source"]: value for key, value in found.items() if "source_samples" in key}
    assert counts == Counter(drawn)
    assert sum(counts.values()) == found["penstock_loader_samples_total"]
    for name, count in counts.items():
        assert found[key_of("penstock_loader_source_ratio", source=name)] == count / len(drawn)


def test_a_stream_of_one_file_has_no_mixture(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n")
    with penstock.PretrainDataLoader(
        tmp_path / "in.jsonl", ByteTokenizer(), chunk_size=16, streaming=True, backend="numpy"
    ) as loader:
        assert len(list(loader)) > 0
        assert not [key for key in loader.metrics() if "source" in key]


def test_a_stream_counts_what_it_cuts_off_and_sets_aside(tmp_path: Path) -> None:
    texts = [{"text": "x" * length} for length in (5, 20, 9, 31)]
    lines = [json.dumps(text) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:2], "{broken", *lines[2:]]) + "\n")
    tokenizer = ByteTokenizer()
    with penstock.PretrainDataLoader(
        tmp_path / "in.jsonl",
        tokenizer,
        chunk_size=16,
        packing="best_fit",
        truncation="right",
        streaming=True,
        on_error="quarantine",
        quarantine=tmp_path / "bad.jsonl",
        backend="numpy",
    ) as loader:
        kept = sum(batch.num_tokens for batch in loader)
        found = loader.metrics()
    check_known(found, "loader", "pipeline")
    with penstock.PretrainDataLoader(texts, tokenizer, chunk_size=64, packing="best_fit", backend="numpy") as whole:
        tokens = sum(batch.num_tokens for batch in whole)
    assert found["penstock_loader_truncated_tokens_total"] == tokens - kept > 0
    (cut,) = (value for key, value in found.items() if "tokens_dropped" in key)
    assert cut == tokens - kept
    (bad,) = (value for key, value in found.items() if "rows_quarantined" in key)
    assert bad == 1
    assert found["penstock_pipeline_rows_in_total"] == 4


def test_metrics_of_a_job_have_the_rows_by_reason(tmp_path: Path) -> None:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["text"].endswith("9"):
            raise ValueError("a nine")
        return row

    lines = [json.dumps({"text": f"Hello {number}"}) for number in range(50)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    config = PipelineConfig(on_error="quarantine", quarantine=tmp_path / "bad.jsonl")
    pipeline = Pipeline(
        tmp_path / "in.jsonl", [Filter("text != 'Hello 3'"), check], tmp_path / "out.parquet", config, "256 MiB"
    )
    engine = JobEngine(executor=InProcess, options=JobOptions())
    report = pipeline.run(tmp_path / "job", engine=engine, metrics=tmp_path / "m.jsonl")
    *_, last, end = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    found = last["metrics"]
    check_known(found, "pipeline", "stage")
    assert end["report"]["quarantined"] == report.quarantined
    assert (
        found["penstock_pipeline_rows_in_total"] == found["penstock_pipeline_rows_done_total"] == report.rows_in == 51
    )
    assert found["penstock_pipeline_rows_out_total"] == report.rows_out == 44
    by_reason = {labels_of(key)["reason"]: value for key, value in found.items() if "quarantined" in key}
    assert by_reason == report.quarantined
    assert sum(by_reason.values()) == 6
    assert sum(value for key, value in found.items() if "rows_dropped" in key) == 1
    # Peaks of tasks are no usage: an alert on a full budget would fire for ever.
    assert "penstock_pipeline_budget_used_bytes" not in found


def test_a_dataloader_of_torch_without_workers_is_counted(tmp_path: Path) -> None:
    data = pytest.importorskip("torch.utils.data")
    make_store(tmp_path / "a", make_rows(32, 12))
    with penstock.PretrainDataLoader(
        tmp_path / "a", chunk_size=8, batch_size=4, metrics=tmp_path / "m.jsonl"
    ) as loader:
        batches = list(data.DataLoader(loader, batch_size=None, sampler=loader.sampler()))
        found = loader.metrics()
    assert found["penstock_loader_steps_total"] == found["penstock_loader_step"] == len(batches)
    assert found["penstock_loader_places_total"] == sum(batch["input_ids"].numel() for batch in batches)
    assert (tmp_path / "m.jsonl").exists()


def test_counting_makes_no_field_of_a_batch(tmp_path: Path) -> None:
    make_store(tmp_path / "a", make_rows(32, 12))
    with penstock.PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy", prefetch=0) as loader:
        for batch in loader:
            assert batch.compact is not None  # it is None once a field was made
        assert loader.metrics()["penstock_loader_places_total"] > 0


class Digits(DataProviderBase):
    def build_meta(self) -> dict[str, object]:
        return {
            "training_type": "CLM",
            "batch_schema": [{"name": "x", "dtype": "int64", "shape": [4], "role": "input"}],
        }

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, object]:
        return {"x": rng.integers(10, size=(self.batch_size, 4))}


def test_metrics_of_queue_members_are_in_the_registry(tmp_path: Path) -> None:
    config = {"dataset": "digits", "batch_size": 2, "block_size": 4, "data_root": str(tmp_path)}
    provider = Digits(config, metrics=tmp_path / "provider.jsonl")
    assert provider.metrics() == {}
    provider.run(max_batches=40)
    check_known(provider.metrics(), "queue")
    assert provider.metrics()[key_of("penstock_queue_member_batches_total", split="train")] == 40
    with DatasetConsumer(
        tmp_path / "digits" / "queue", backend="numpy", metrics=tmp_path / "consumer.jsonl"
    ) as consumer:
        consumer.get_batch("train")
        found = consumer.metrics()
    check_known(found, "queue")
    assert found[key_of("penstock_queue_member_batches_total", split="train")] == 1
    assert found[key_of("penstock_queue_members", role="consumer", state="alive")] == 1
    assert found[key_of("penstock_queue_leased_files", split="train")] == 1
    for name, kind in (("provider", "provider"), ("consumer", "consumer")):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert f'"kind":"queue","name":"{kind}"' in text
        *_, last, end = map(json.loads, text.splitlines())
        assert end["end"] == "finished"
        wanted = 40 if kind == "provider" else 1
        assert last["metrics"][key_of("penstock_queue_member_batches_total", split="train")] == wanted


@pytest.mark.parametrize("kind", ["buffer", "queue"])
def test_metrics_of_rollouts_are_in_the_registry_and_exact(tmp_path: Path, kind: str) -> None:
    live = LiveBuffer(capacity=64) if kind == "buffer" else RolloutQueue(tmp_path / "queue", durable=False)
    rewards = [0.0, 1.0, 0.5, 1.0]
    for version in (0, 1):
        live.append(
            [
                {
                    "prompt_ids": [1, 2],
                    "response_ids": [3, 4],
                    "reward": reward,
                    "group": "g",
                    "policy_version": version,
                }
                for reward in rewards
            ]
        )
    with (
        live,
        RolloutDataLoader(
            live, rollout_batch_size=4, batch_size=4, policy_version=1, max_staleness=3, backend="numpy"
        ) as loader,
    ):
        loader.get_batch()
        found = loader.metrics()
    check_known(found, "loader", "rollouts")
    assert found["penstock_rollouts_used_total"] == 4
    assert found["penstock_rollouts_reward_sum"] == sum(rewards)
    assert found[key_of("penstock_rollouts_reward_bucket", le="0.0")] == 1
    assert found[key_of("penstock_rollouts_reward_bucket", le="0.5")] == 2
    assert found[key_of("penstock_rollouts_reward_bucket", le="+Inf")] == found["penstock_rollouts_reward_count"] == 4
    assert found["penstock_rollouts_staleness_max"] == 1
    assert found["penstock_rollouts_group_completion_ratio"] == 1.0
    assert found["penstock_rollouts_appends_total"] == 2
    if kind == "buffer":
        assert found["penstock_rollouts_waiting"] == 4


def test_metrics_of_a_feed_server_are_in_the_registry(tmp_path: Path) -> None:
    from penstock.feed import RemoteLoader

    make_store(tmp_path / "a", make_rows(32, 12))
    with (
        penstock.PretrainDataLoader(tmp_path / "a", chunk_size=8, backend="numpy") as loader,
        FeedServer(loader, metrics=tmp_path / "feed.jsonl") as server,
    ):
        with RemoteLoader(server.address, backend="numpy") as remote:
            batches = list(remote)
            check_known(remote.metrics(), "loader")
        found = server.metrics()
    check_known(found, "feed")
    assert found["penstock_feed_bytes_total"] > sum(batch.input_ids.nbytes for batch in batches) / 8
    assert '"kind":"feed"' in (tmp_path / "feed.jsonl").read_text()
