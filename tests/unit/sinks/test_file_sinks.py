"""What every sink that writes files does alike."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.pipeline import Sink
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, ParquetSink, open_sink
from penstock.sources import open_source
from penstock.testing import assert_sink_contract

CODECS = ["", ".gz", ".zst", ".bz2", ".lz4", ".xz"]
FILES = ["out.parquet", "out.arrow", *(f"out.{kind}{codec}" for kind in ("jsonl", "csv", "tsv") for codec in CODECS)]
KINDS: list[Any] = [ParquetSink, ArrowSink, JsonlSink, CsvSink]
TABLE = pa.table(
    {"n": range(12), "s": [f'row {i}, "é"\n' if i % 4 else None for i in range(12)], "x": [i / 4 for i in range(12)]}
)
BATCHES = TABLE.to_batches(max_chunksize=5)


def rows_at(path: Path) -> list[dict[str, Any]]:
    """What somebody else can see there."""
    if not path.exists():
        return []
    names = [part.name for part in path.iterdir()] if path.is_dir() else [path.name]
    is_text = any(kind in name for name in names for kind in (".jsonl", ".csv", ".tsv"))
    options: dict[str, Any] = {"allow_empty": True} if is_text else {}
    source = open_source(path, **options)
    rows = []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.to_pylist()
    return rows


def see(sink: Sink) -> list[dict[str, Any]]:
    return rows_at(sink.path)  # type: ignore[attr-defined]


def fill(sink: Sink, batches: list[pa.RecordBatch] | None = None) -> Any:
    for batch in BATCHES if batches is None else batches:
        sink.consume(batch)
    return sink


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_every_format_and_compression_keeps_the_contract_of_sinks(name: str) -> None:
    assert_sink_contract(lambda directory: open_sink(directory / name), see)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_file", [None, 4, 100])
def test_a_directory_of_every_format_keeps_the_contract_of_sinks(kind: Any, rows_per_file: int | None) -> None:
    assert_sink_contract(lambda directory: kind(directory / "out", rows_per_file=rows_per_file), see)


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_read_back_and_nothing_else_is_left(tmp_path: Path, name: str) -> None:
    sink = fill(open_sink(tmp_path / name))
    assert [path for path in left_in(tmp_path) if not path.startswith(".")] == []
    sink.flush()
    assert left_in(tmp_path) == [name]
    assert rows_at(tmp_path / name) == TABLE.to_pylist()


@pytest.mark.parametrize("name", FILES)
def test_aborting_leaves_nothing_and_an_older_file_as_it_was(tmp_path: Path, name: str) -> None:
    fill(open_sink(tmp_path / name)).flush()
    before = (tmp_path / name).read_bytes()
    sink = fill(open_sink(tmp_path / name), BATCHES[:1])
    sink.abort()
    sink.close()
    assert left_in(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_holds_parts_of_so_many_rows_and_appears_at_once(tmp_path: Path, kind: Any) -> None:
    sink = fill(kind(tmp_path / "out", rows_per_file=5))
    assert not (tmp_path / "out").exists()
    sink.flush()
    assert left_in(tmp_path) == ["out", *(f"out/part-{i:06d}{kind.suffix}" for i in range(3))]
    assert [len(rows_at(part)) for part in sorted((tmp_path / "out").iterdir())] == [5, 5, 2]
    assert see(sink) == TABLE.to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_a_killed_run_left_behind_are_not_published(tmp_path: Path, kind: Any) -> None:
    killed = fill(kind(tmp_path / "out", rows_per_file=2))  # neither flushed nor aborted
    os.close(killed._output._lock._handle)  # as the system does with what a dead process held
    killed._output._lock._handle = None
    sink = fill(kind(tmp_path / "out", rows_per_file=10), BATCHES[:1])
    sink.flush()
    assert see(sink) == TABLE.slice(0, 5).to_pylist()


def test_a_directory_that_is_not_empty_is_refused_and_an_empty_one_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    sink = fill(JsonlSink(tmp_path / "out"))
    sink.flush()
    assert see(sink) == TABLE.to_pylist()
    with pytest.raises(ConfigError, match=r"\bout\b"):
        fill(JsonlSink(tmp_path / "out"))
    assert left_in(tmp_path) == ["out", "out/part-000000.jsonl"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        fill(JsonlSink(tmp_path / "file"))


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_a_sink_that_has_published_refuses_more_until_it_is_reset_and_then_replaces(tmp_path: Path, name: str) -> None:
    sink = fill(JsonlSink(tmp_path / name))
    sink.flush()
    with pytest.raises(ConfigError, match="JsonlSink"):
        sink.consume(BATCHES[0])
    sink.reset()
    fill(sink, BATCHES[1:])
    assert see(sink) == TABLE.to_pylist()
    sink.flush()
    assert see(sink) == TABLE.slice(5).to_pylist()
    assert [path for path in left_in(tmp_path) if path.startswith(".")] == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("known", [False, True])
def test_no_rows_are_an_empty_file_with_its_columns_if_they_are_known(tmp_path: Path, name: str, known: bool) -> None:
    sink = open_sink(tmp_path / name)
    if known:
        sink.consume(BATCHES[0].slice(0, 0))
    sink.flush()
    assert left_in(tmp_path) == [name]
    if known and ".jsonl" not in name:
        source: Any = open_source(tmp_path / name)
        assert source.schema.names == TABLE.schema.names
        assert source.next_batch(5) is None
        source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_directory_holds_one_part_that_says_the_columns(tmp_path: Path, kind: Any) -> None:
    sink = kind(tmp_path / "out")
    sink.consume(BATCHES[0].slice(0, 0))
    sink.flush()
    assert left_in(tmp_path) == ["out", f"out/part-000000{kind.suffix}"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_schema_is_refused_and_says_what_differs(tmp_path: Path, kind: Any) -> None:
    sink = fill(kind(tmp_path / f"out{kind.suffix}"))
    with pytest.raises(SchemaError, match=r"'s'.*'x'"):
        sink.consume(pa.record_batch({"n": [1], "x": ["a"]}))
    sink.abort()
    sink = kind(tmp_path / f"out{kind.suffix}")
    sink.restore({})
    fill(sink)
    token = sink.checkpoint()
    resumed = kind(tmp_path / f"out{kind.suffix}")
    resumed.restore(token)
    with pytest.raises(SchemaError, match=r"'n'.*\bint64\b"):
        resumed.consume(pa.record_batch({"n": [0.5], "s": ["a"], "x": [1.0]}))
    resumed.abort()


# -- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow", "out.jsonl.gz", "out.csv.bz2", "out"])
def test_segments_written_after_the_checkpoint_are_removed(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        return open_sink(tmp_path / name) if "." in name else JsonlSink(tmp_path / name)

    lost = make()
    lost.restore({})
    lost.consume(BATCHES[0])
    token = lost.checkpoint()
    for batch in BATCHES[1:]:  # two checkpoints that never reached the checkpoint file, and an open segment
        lost.consume(batch)
        lost.checkpoint()
    lost.consume(BATCHES[0])
    sink = make()
    sink.restore(token)
    hidden = tmp_path / f".{name}.penstock-parts"
    assert sorted(path.name.partition(".")[0] for path in hidden.glob("[!.]*")) == ["part-000000"]
    fill(sink, BATCHES[1:])
    sink.flush()
    assert see(sink) == TABLE.to_pylist()
    assert left_in(tmp_path)[0] == name
    lost.abort()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.arrow", "out.jsonl.lz4"])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_crash_at_any_step_of_publishing_is_made_good_by_flushing_again(
    tmp_path: Path, name: str, pieces: int
) -> None:
    """Every system call that changes names is made to fail in its turn, as if the process had died right before it."""
    batches = BATCHES[:pieces] or [BATCHES[0].slice(0, 0)]
    wanted = [row for batch in batches for row in batch.to_pylist()]
    for is_directory in (False, True):
        step = 0
        while True:
            home = tmp_path / f"{is_directory}-{step}"
            home.mkdir()
            path = home / ("out" if is_directory else name)
            kind: Callable[..., Any] = type(open_sink(tmp_path / name))
            sink: Any = kind(path)
            sink.restore({})
            for batch in batches:
                sink.consume(batch)
                token = sink.checkpoint()
            with pytest.MonkeyPatch.context() as patch:
                steps = Dying(patch, step, home)
                with contextlib.suppress(KilledError):
                    sink.flush()
            fresh = kind(path)
            fresh.restore(token | {"finishing": True})
            fresh.flush()
            assert see(fresh) == wanted, f"died before step {step}: {steps.names}"
            assert [entry for entry in left_in(home) if entry.startswith(".") and ".tmp" not in entry] == []
            sink.abort()
            if not steps.died:
                break
            step += 1
        assert step >= (1 if is_directory else 2)


class KilledError(BaseException):
    pass


class Dying:
    """Lets so many changes happen in a directory, and none after them.

    Other threads of the process, as those of heartbeats, change files elsewhere.
    """

    def __init__(self, patch: pytest.MonkeyPatch, after: int, home: Path) -> None:
        self.names: list[str] = []
        self.died = False
        self.home = home
        for owner, name in ((os, "rename"), (os, "replace"), (os, "rmdir"), (os, "unlink"), (shutil, "rmtree")):
            patch.setattr(owner, name, self._wrapped(name, getattr(owner, name), after))

    def _wrapped(self, name: str, function: Any, after: int) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if Path(path).is_absolute() and not Path(path).is_relative_to(self.home):
                return function(path, *args, **options)
            if len(self.names) >= after:
                self.died = True
                raise KilledError(name)
            self.names.append(name)
            return function(path, *args, **options)

        return call


def test_a_segment_that_the_checkpoint_counts_on_and_is_gone_is_an_error(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out.jsonl")
    sink.restore({})
    fill(sink)
    token = sink.checkpoint()
    shutil.rmtree(tmp_path / ".out.jsonl.penstock-parts")
    with pytest.raises(ResumeError, match=r"part-000000\.jsonl"):
        JsonlSink(tmp_path / "out.jsonl").restore(token)


def test_a_checkpoint_of_a_plain_run_is_refused(tmp_path: Path) -> None:
    sink = fill(JsonlSink(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match=r"restore\(\{\}\)"):
        sink.checkpoint()
    sink.abort()


def test_aborting_a_durable_run_keeps_what_the_checkpoint_counts_on(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out.jsonl")
    sink.restore({})
    fill(sink, BATCHES[:1])
    token = sink.checkpoint()
    fill(sink, BATCHES[1:2])
    sink.abort()
    assert not (tmp_path / "out.jsonl").exists()
    again = JsonlSink(tmp_path / "out.jsonl")
    again.restore(token)
    fill(again, BATCHES[1:])
    again.flush()
    assert see(again) == TABLE.to_pylist()
    assert left_in(tmp_path) == ["out.jsonl"]


def test_a_durable_run_into_a_directory_shows_nothing_before_the_end(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "out", rows_per_file=3)
    sink.restore({})
    fill(sink)
    sink.checkpoint()
    assert not (tmp_path / "out").exists()
    sink.flush()
    assert see(sink) == TABLE.to_pylist()


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_a_missing_directory_is_named_and_not_made(tmp_path: Path, durable: bool) -> None:
    sink = JsonlSink(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(FileNotFoundError, match=r"'.*missing'.*out\.jsonl"):
        sink.restore({}) if durable else fill(sink)
    assert left_in(tmp_path) == []


def test_wrong_arguments_are_refused_when_the_sink_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows_per_file.*out\.csv"):
        CsvSink(tmp_path / "out.csv", rows_per_file=3)
    with pytest.raises(ConfigError, match="rows_per_file"):
        CsvSink(tmp_path / "out", rows_per_file=0)
    with pytest.raises(ConfigError, match=r"\bsink\b"):
        JsonlSink("hf://datasets/a/out.jsonl")
    for kind in (ParquetSink, ArrowSink):
        with pytest.raises(ConfigError, match=r"'\.gz'.*compression="):
            kind(tmp_path / f"out{kind.suffix}.gz")


def test_a_name_that_is_only_compressed_is_a_file(tmp_path: Path) -> None:
    fill(JsonlSink(tmp_path / "out.gz")).flush()
    assert (tmp_path / "out.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_the_suffix_picks_the_sink(tmp_path: Path) -> None:
    kinds = {".pq": ParquetSink, ".feather": ArrowSink, ".ipc": ArrowSink, ".ndjson": JsonlSink, ".tsv.gz": CsvSink}
    for suffix, kind in kinds.items():
        assert type(open_sink(tmp_path / f"out{suffix}")) is kind
    assert open_sink(tmp_path / "out.csv", delimiter=";")._delimiter == ";"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'\.xls'"):
        open_sink(tmp_path / "out.xls")
    with pytest.raises(ConfigError, match="'a path without a suffix'"):
        open_sink(tmp_path / "out")
