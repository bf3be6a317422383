"""Duplicates and near duplicates go, the first of each stays: whatever the batches, workers, budget, interruptions."""

from __future__ import annotations

import gc
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forked_programs import ForkedProgram

from penstock import MemoryBudget, Pipeline, PipelineConfig
from penstock.corpus.dedup.stages import Dedup, ExactDedup, MinHashDedup, dedup_stages, fingerprints
from penstock.errors import ConfigError, ResumeError, SchemaError, StageError
from penstock.files.states import with_checksum
from penstock.pipeline.chain import BrokenStageError
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource, MemorySource
from penstock.testing import FailingTransform, RowsSource, assert_resumes_exactly
from penstock.transforms.text import Lower

VOCABULARY = [f"word{i}" for i in range(3000)]


def documents(count: int, words: int = 120, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(VOCABULARY, k=words)) for _ in range(count)]


def edited(text: str, share: float, rng: random.Random) -> str:
    words = text.split()
    for at in rng.sample(range(len(words)), max(1, round(share * len(words)))):
        words[at] = rng.choice(VOCABULARY)
    return " ".join(words)


def corpus(count: int = 150) -> list[dict[str, Any]]:
    """Documents, some of them copied or slightly edited later on; `copy` tells which."""
    rng = random.Random(1)
    rows = [{"n": i, "text": text, "copy": False} for i, text in enumerate(documents(count))]
    for i, row in enumerate(rng.sample(rows, count // 3)):
        text = row["text"] if i % 2 else edited(row["text"], 0.01, rng)
        rows.insert(rng.randrange(row["n"] + i + 1, len(rows) + 1), {"n": count + i, "text": text, "copy": True})
    return rows


def kept(rows: list[dict[str, Any]], stages: list[Any], **options: Any) -> list[int]:
    pipeline = Pipeline(RowsSource(rows, batch_rows=options.pop("batch_rows", 16)), stages, **options)
    return [n for batch in pipeline for n in batch.column("n").to_pylist()]


values = st.lists(st.sampled_from(["", "a", "A", "b b", "b  b", "日本", "\0", "x" * 300]) | st.none(), max_size=20)


@given(values, st.integers(0, 3), st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]), st.booleans())
@settings(deadline=None)
def test_exact_keeps_the_first_of_each_value_and_every_null(
    rows: list[str | None], skip: int, dtype: pa.DataType, prepared: bool
) -> None:
    batch = pa.record_batch({"text": pa.array(rows, dtype), "n": list(range(len(rows)))})[skip:]
    dedup = ExactDedup("text")
    out = dedup.transform(dedup.preparation().transform(batch) if prepared else batch)
    rest = rows[skip:]
    wanted = [i for i, value in enumerate(rest) if value is None or rest.index(value) == i]
    assert out.schema == batch.schema
    assert out.column("n").to_pylist() == [i + skip for i in wanted]
    assert dedup.counts == ({"duplicate": len(rest) - len(wanted)} if len(wanted) < len(rest) else {})


@given(st.lists(st.binary(max_size=600), max_size=10), st.integers(0, 3))
@settings(deadline=None)
def test_fingerprints_are_xxh3_128(rows: list[bytes], skip: int) -> None:
    for dtype in (pa.binary(), pa.large_binary(), pa.binary_view()):
        words = fingerprints(pa.array(rows, dtype)[skip:])
        assert [(high << 64) | low for high, low in words.tolist()] == [
            xxhash.xxh3_128_intdigest(row) for row in rows[skip:]
        ]


def test_exact_compares_any_column() -> None:
    rows = [{"v": {"a": [1, 2]}}, {"v": {"a": [1]}}, {"v": {"a": [1, 2]}}, {"v": None}, {"v": None}]
    out = ExactDedup("v").transform(pa.RecordBatch.from_pylist(rows))
    assert out.to_pylist() == [rows[0], rows[1], rows[3], rows[4]]
    assert ExactDedup("v").transform(pa.record_batch({"v": [1, 2, 1]})).column(0).to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("normalize", "left"),
    [
        ((), ["A b", "a b", "a  B", "Å", "A\u030a"]),
        ("lower", ["A b", "a  B", "Å", "A\u030a"]),
        (("whitespace", "lower"), ["A b", "Å", "A\u030a"]),
        (["unicode"], ["A b", "a b", "a  B", "Å"]),
    ],
)
def test_exact_compares_normalized_text_and_leaves_rows_as_they_are(normalize: Any, left: list[str]) -> None:
    batch = pa.record_batch({"text": ["A b", "a b", "a  B", "Å", "A\u030a"]})
    assert ExactDedup("text", normalize=normalize).transform(batch).column(0).to_pylist() == left


def test_minhash_finds_edited_copies_and_leaves_the_others() -> None:
    rng = random.Random(3)
    originals = documents(400, words=300)
    copies = [edited(text, 0.02, rng) for text in originals]
    dedup = MinHashDedup("text")
    out = dedup.transform(pa.record_batch({"text": originals + copies}))
    assert out.column(0).to_pylist()[:400] == originals
    assert 0.95 * 400 < dedup.counts["near duplicate"] <= 400


def test_minhash_drops_what_is_near_a_row_that_went() -> None:
    """The third is near the second only; that the second went does not save it."""
    words = [f"word{i}" for i in range(200)]
    texts = [" ".join(words[start : start + 100]) for start in (0, 6, 12, 100)]
    assert MinHashDedup(rows=4).transform(pa.record_batch({"text": texts})).column(0).to_pylist() == [
        texts[0],
        texts[3],
    ]


def test_rows_without_words_always_stay() -> None:
    texts = ["", None, "...", "\n", "", None, "?!", "word", "WORD."]
    for stages in ([MinHashDedup()], dedup_stages(MinHashDedup())):
        batch = pa.record_batch({"text": texts})
        for stage in stages:
            batch = stage.transform(batch)
        assert batch.column(0).to_pylist() == texts[:-1]


def test_texts_shorter_than_a_shingle_go_if_their_words_are_the_same() -> None:
    texts = ["a b", "A, b.", "b a", "a", "a b c", "a"]
    assert MinHashDedup().transform(pa.record_batch({"text": texts})).column(0).to_pylist() == [
        "a b",
        "b a",
        "a",
        "a b c",
    ]


def test_exact_and_near_copies_go_and_the_first_of_each_stays() -> None:
    rows = corpus()
    stages = dedup_stages(ExactDedup(), MinHashDedup())
    assert kept(rows, stages) == [row["n"] for row in rows if not row["copy"]]


@pytest.mark.parametrize("kind", [ExactDedup, MinHashDedup])
def test_rows_that_stay_depend_on_no_batch_size_worker_count_or_budget(kind: type[Dedup], tmp_path: Path) -> None:
    rows = corpus()
    wanted = kept(rows, [kind()])
    assert len(wanted) < len(rows)
    for batch_rows in (1, 7, 1000):
        assert kept(rows, [kind()], batch_rows=batch_rows) == wanted
    for workers in (1, 4, "process"):
        config = PipelineConfig(workers=workers, max_workers=2)  # type: ignore[arg-type]
        assert kept(rows, dedup_stages(kind()), config=config) == wanted
    for directory in (None, tmp_path):
        assert kept(rows, dedup_stages(kind(directory=directory)), budget=MemoryBudget("64 KiB")) == wanted


def test_stages_of_two_deduplications_stand_in_the_right_order_and_count_apart() -> None:
    sink = MemorySink()
    rows = corpus()
    stages = [Lower("text"), *dedup_stages(ExactDedup(), MinHashDedup())]
    report = Pipeline(RowsSource(rows), stages, sink).run()
    assert report.rows_out == sum(not row["copy"] for row in rows)
    assert report.dropped == {"duplicate": 25, "near duplicate": 25}
    assert [str(stage) for stage in stages[1:3]] == [
        "keys of ExactDedup('text')",
        "keys of MinHashDedup('text', ngram=5, bands=14, rows=8, seed=0)",
    ]


def test_a_pipeline_that_runs_twice_begins_anew() -> None:
    pipeline = Pipeline(RowsSource(corpus()), dedup_stages(ExactDedup()))
    assert [b.to_pylist() for b in pipeline] == [b.to_pylist() for b in pipeline]


@pytest.mark.parametrize("budget", ["64 KiB", "64 MiB"])
def test_resumes_exactly(tmp_path: Path, budget: str) -> None:
    rows = corpus(60)
    assert_resumes_exactly(
        lambda: Pipeline(
            RowsSource(rows, batch_rows=9),
            dedup_stages(ExactDedup(directory=tmp_path), MinHashDedup(directory=tmp_path)),
            config=PipelineConfig(workers=2),
            budget=MemoryBudget(budget),
        )
    )


def test_resuming_without_a_directory_is_refused_with_the_remedy() -> None:
    pipeline = Pipeline(RowsSource(corpus(20)), [ExactDedup()])
    batches = iter(pipeline)
    next(batches)
    state = pipeline.state_dict()
    pipeline.stop()
    fresh = Pipeline(RowsSource(corpus(20)), [ExactDedup()])
    fresh.load_state_dict(state)
    with pytest.raises(ResumeError, match="directory="):
        next(iter(fresh))
    assert not ExactDedup().resumable
    assert ExactDedup(directory="somewhere").resumable


def test_a_bad_row_behind_it_is_skipped_and_no_other_is_lost() -> None:
    """Looking for the bad row runs batches again: what was seen in a failed attempt must be forgotten.

    The bad row itself was seen: which rows are copies does not depend on the stages behind.
    """
    rows = corpus()
    bad = {3, 40, 41, 99}
    for stages in (dedup_stages(ExactDedup(), MinHashDedup()), [ExactDedup(), MinHashDedup()]):
        config = PipelineConfig(on_error="skip")
        got = kept(rows, [*stages, FailingTransform("n", bad)], config=config)
        assert got == [n for n in kept(rows, stages) if n not in bad]


SCRIPT = """
import os, signal, sys
import pyarrow as pa
from penstock import Pipeline, PipelineConfig, MemoryBudget
from penstock.sources import ParquetSource
from penstock.sinks import ParquetSink
from penstock.corpus.dedup.stages import ExactDedup, MinHashDedup, dedup_stages

source, out, kept, kill_at = sys.argv[1:]

class Kill:
    def transform(self, batch):
        if int(kill_at) in batch.column("n").to_pylist():
            os.kill(os.getpid(), signal.SIGKILL)
        return batch
    def __repr__(self):
        return "Kill()"

stages = dedup_stages(ExactDedup(directory=kept + "/seen"), MinHashDedup(directory=kept + "/seen"))
config = PipelineConfig(workers=2, batch_rows=8, checkpoint_seconds=0)
report = Pipeline(ParquetSource(source), [*stages, Kill()], ParquetSink(out), config, MemoryBudget("256 KiB")).run(kept)
print(report.resumed, report.rows_out)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9")
def test_killed_and_run_again_every_row_that_stays_is_written_once(tmp_path: Path) -> None:
    rows = corpus()
    wanted = [row["n"] for row in rows if not row["copy"]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=16)
    (tmp_path / "job.py").write_text(SCRIPT)
    for kill_at in (wanted[70], wanted[110], -1):
        arguments = [str(tmp_path / name) for name in ("in.parquet", "out.parquet", "kept")]
        job = ForkedProgram(tmp_path / "job.py", *arguments, str(kill_at), said=tmp_path / "said")
        assert job.wait(170) == (0 if kill_at < 0 else -signal.SIGKILL), job.said.read_text()
    assert job.said.read_text().split() == ["True", str(len(wanted))]
    assert pq.read_table(tmp_path / "out.parquet").column("n").to_pylist() == wanted


MEMORY = """
import json, sys
from pathlib import Path
from penstock import MemoryBudget, Pipeline
from penstock.sources import ParquetSource
from penstock.corpus.dedup.stages import ExactDedup, MinHashDedup, dedup_stages

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def run(path, budget):
    stages = dedup_stages(ExactDedup(), MinHashDedup(directory=path + ".seen"))
    pipeline = Pipeline(ParquetSource(path), stages, budget=MemoryBudget(budget))
    rows = sum(batch.num_rows for batch in pipeline)
    return rows, stages[-1]._seen.spilled, pipeline.snapshot()["memory"]["peak"]

run(sys.argv[1], "4 MiB")
base = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
rows, spilled, charged = run(sys.argv[2], int(sys.argv[3]))
print(json.dumps({"grown": (status("VmHWM:") - base) * 1024, "rows": rows, "spilled": spilled, "charged": charged}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_five_budgets_of_text_stay_within_one(tmp_path: Path) -> None:
    budget, count, filling = 40 << 20, 90_000, " and then the same words again" * 60
    table = pa.table({"text": [f"{' '.join(str(i * k) for k in range(7919, 7975))}{filling}" for i in range(count)]})
    assert table.nbytes > 5 * budget
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=1000, compression="lz4")
    pq.write_table(table[:5000], tmp_path / "tiny.parquet", row_group_size=1000, compression="lz4")
    del table
    (tmp_path / "job.py").write_text(MEMORY)
    arguments = [str(tmp_path / name) for name in ("job.py", "tiny.parquet", "large.parquet")]
    grown: list[int] = []
    # Once in ten runs the allocator keeps a third more than it needs: then the median of three counts.
    while len(grown) < 3 and (not grown or grown[0] >= budget):
        for name in ("tiny", "large"):
            shutil.rmtree(tmp_path / f"{name}.parquet.seen", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, *arguments, str(budget)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["rows"] == count
        assert seen["spilled"]
        grown.append(seen["grown"])
    assert sorted(grown)[len(grown) // 2] < budget, grown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: ExactDedup(normalize="upper"), r"normalize.*'lower'"),
        (lambda path: MinHashDedup(rows=1), r"\brows\b"),
        (lambda path: MinHashDedup(directory=path / "file"), "directory"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_a_column_that_is_not_there_or_no_text_is_named() -> None:
    with pytest.raises(SchemaError, match="'text'"):
        ExactDedup().transform(pa.record_batch({"body": ["a"]}))
    with pytest.raises(SchemaError, match=r"\bint64\b"):
        MinHashDedup().transform(pa.record_batch({"text": [1]}))
    with pytest.raises(SchemaError, match=r"\bint64\b"):
        ExactDedup(normalize="lower").transform(pa.record_batch({"text": [1]}))


def test_preparations_travel_to_other_processes() -> None:
    batch = pa.record_batch({"text": documents(5)})
    for dedup in (ExactDedup(normalize=["lower"]), MinHashDedup(seed=3)):
        stage = dedup.preparation()
        assert cloudpickle.loads(cloudpickle.dumps(stage)).transform(batch).equals(stage.transform(batch))


def test_the_engine_makes_the_keys_of_a_plain_dedup_on_all_workers() -> None:
    exact, near = ExactDedup("text"), MinHashDedup("text")
    pipeline = Pipeline(MemorySource({"text": ["a", "b", "a"]}), [exact, near], MemorySink())
    assert [repr(stage) for stage in pipeline.transforms] == [repr(s) for s in dedup_stages(exact, near)]
    apart = Pipeline(MemorySource({"text": ["a"]}), dedup_stages(exact, near), MemorySink())
    assert len(apart.transforms) == 4, "parts that are there already are not put there again"


def test_a_checkpoint_asks_for_a_directory(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    pipeline = Pipeline(JsonlSource(source), [ExactDedup("text")], JsonlSink(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match=r"ExactDedup\('text'\)"):
        pipeline.run(tmp_path / "checkpoint")


def test_two_equal_dedups_with_one_directory_are_refused_before_anything_is_lost(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n{"text": "A"}\n')
    seen = tmp_path / "seen"

    def run(second: Path, **options: Any) -> Any:
        stages = [ExactDedup("text", directory=seen), Lower("text"), ExactDedup("text", directory=second)]
        pipeline = Pipeline(JsonlSource(source), stages, JsonlSink(tmp_path / "out.jsonl"), PipelineConfig(**options))
        return pipeline.run(tmp_path / f"checkpoint of {second.name}")

    for on_error in ("raise", "skip"):
        with pytest.raises(StageError, match=r"ExactDedup\('text'\).*directory="):
            run(seen, on_error=on_error)
    assert run(tmp_path / "other").rows_out == 1


def test_a_run_in_the_directory_of_another_process_is_refused_until_that_one_ends(tmp_path: Path) -> None:
    script = (
        "import sys, pyarrow as pa\n"
        "from penstock.corpus.dedup.stages import ExactDedup\n"
        "dedup = ExactDedup(directory=sys.argv[1])\n"
        "dedup.transform(pa.record_batch({'text': ['a', 'b']}))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "seen")]
    batch = pa.record_batch({"text": ["a", "a"]})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        pipeline = Pipeline(MemorySource(batch), [ExactDedup(directory=tmp_path / "seen")], MemorySink())
        with pytest.raises(ConfigError, match=rf"{other.pid}.*directory="):
            pipeline.run()
        dedup = ExactDedup(directory=tmp_path / "seen")
        state = with_checksum(dedup.state_dict() | {"keys": 2, "digest": "0"})
        with pytest.raises(ConfigError, match="directory="):
            dedup.load_state_dict(state)
        other.kill()
    assert pipeline.run().rows_out == 1
    pipeline.transforms.clear()


def test_a_state_of_another_rule_is_refused_by_name_and_its_keys_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.record_batch({"text": ["call(one, two)", "call(three, four)"]})
    with monkeypatch.context() as patch:
        patch.setattr(MinHashDedup, "version", 1)
        before = MinHashDedup(directory=tmp_path)
        before.transform(batch)
        state = before.state_dict()
        described = before.describe()
        (keys,) = tmp_path.glob("*.keys")
        written = keys.read_bytes()
        before.reset()
    del state["rule"]  # as in states from before there was a second rule
    now = MinHashDedup(directory=tmp_path)
    with pytest.raises(ResumeError, match=r"'text'.*version 1\b"):
        now.load_state_dict(state)
    now.transform(batch)
    assert keys.read_bytes() == written
    assert now.describe() != described
    again = MinHashDedup(directory=tmp_path)
    again.load_state_dict(now.state_dict())
    assert again.transform(batch).num_rows == 0


def test_the_directory_is_free_when_a_dedup_is_reset_or_gone(tmp_path: Path) -> None:
    batch = pa.record_batch({"text": ["a", "b"]})
    dedup = ExactDedup(directory=tmp_path / "seen")
    dedup.transform(batch)
    state = dedup.state_dict()
    (lock,) = (tmp_path / "seen").glob("*.lock")
    dedup.reset()
    assert not lock.exists()
    fresh = ExactDedup(directory=tmp_path / "seen")
    fresh.load_state_dict(state)
    assert fresh.transform(batch).num_rows == 0
    assert lock.exists()
    del fresh
    gc.collect()
    assert not lock.exists()


def test_a_fresh_dedup_goes_on_for_one_that_was_left_behind_and_that_one_stops(tmp_path: Path) -> None:
    batch = pa.record_batch({"text": ["a", "b"]})
    left = ExactDedup(directory=tmp_path)
    left.transform(batch)
    fresh = ExactDedup(directory=tmp_path)
    fresh.load_state_dict(left.state_dict())
    assert fresh.transform(pa.record_batch({"text": ["b", "c"]}))["text"].to_pylist() == ["c"]
    with pytest.raises(BrokenStageError, match="ExactDedup"):
        left.transform(pa.record_batch({"text": ["d"]}))
    with pytest.raises(BrokenStageError, match="ExactDedup"):
        left.sync()
    assert fresh.transform(pa.record_batch({"text": ["a", "c", "d"]}))["text"].to_pylist() == ["d"]


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    dedup = ExactDedup(directory="seen")
    dedup.transform(pa.record_batch({"text": ["a"]}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    dedup.transform(pa.record_batch({"text": ["b"]}))
    assert [path.stat().st_size for path in (tmp_path / "seen").glob("*.keys")] == [32]
    assert not any((tmp_path / "elsewhere").iterdir())


def test_equal_dedups_in_a_row_share_their_preparation() -> None:
    stages = dedup_stages(ExactDedup(), ExactDedup(), ExactDedup(normalize="lower"))
    assert len(stages) == 5
    assert kept([{"n": i, "text": text} for i, text in enumerate(["a", "a", "A", "b"])], stages) == [0, 3]
