"""Links at hidden names that anybody can foresee: refused by name, and what they lead to stays as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError
from penstock.files.atomic import AtomicFile, _machine
from penstock.files.locks import FileLock
from penstock.fsqueue.batch_file import write
from penstock.fsqueue.queue import purge
from penstock.sinks import JsonlSink, ParquetSink, StoreSink
from penstock.sources import MemorySource
from penstock.store import StoreWriter, prune
from penstock.transforms import ExactDedup

ROWS = [{"n": n, "text": f"row {n}"} for n in range(20)]
SECRET = b"years of work\n"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="making links takes a privilege on Windows")


def fail(row: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(row["n"])


def write_file(home: Path) -> None:
    Pipeline(MemorySource(ROWS), [], ParquetSink(home / "o.parquet")).run(home / "cp")


def write_directory(home: Path) -> None:
    Pipeline(MemorySource(ROWS), [], JsonlSink(home / "o")).run()


def write_directory_again(home: Path) -> None:
    pipeline = Pipeline(MemorySource(ROWS), [], JsonlSink(home / "o"))
    hidden = home / ".o.penstock-old"
    kept = hidden.readlink() if hidden.is_symlink() else None
    hidden.unlink(missing_ok=True)
    pipeline.run()
    if kept is not None:
        hidden.symlink_to(kept)
    pipeline.run()


def write_store(home: Path) -> None:
    Pipeline(MemorySource(ROWS), [], StoreSink(home / "s", tokens=None)).run(home / "cp")


def append_to_store(home: Path) -> None:
    link = home / "s" / ".build"
    made = StoreWriter(home / "new", tokens=None)
    batch = MemorySource(ROWS).next_batch(20)
    assert batch is not None
    made.write(batch)
    made.publish()
    (home / "new").rename(home / "made")
    for part in (home / "made").iterdir():
        part.rename(home / "s" / part.name)
    assert link.is_symlink()
    Pipeline(MemorySource(ROWS), [], StoreSink(home / "s", mode="append", tokens=None)).run()


def prepare_store(home: Path) -> None:
    (home / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prepare(home / "in.jsonl", home / "s", Recipe(tokenizer="byte"))


def quarantine(home: Path) -> None:
    config = PipelineConfig(on_error="quarantine")
    Pipeline(MemorySource(ROWS), [fail], JsonlSink(home / "o.jsonl"), config).run()


def deduplicate(home: Path) -> None:
    Pipeline(MemorySource(ROWS), [ExactDedup("text", directory=home / "seen")], JsonlSink(home / "o.jsonl")).run()


@pytest.mark.parametrize(
    ("name", "work"),
    [
        (".o.parquet.penstock-parts", write_file),
        (".o.parquet.penstock-old", write_file),
        (".o.parquet.penstock-lock", write_file),
        ("cp/checkpoint.lock", write_file),
        (".o.penstock-parts", write_directory),
        (".o.penstock-lock", write_directory),
        (".o.penstock-old", write_directory_again),
        (".s.penstock-store", write_store),
        (".s.penstock-lock", write_store),
        ("s/.build", append_to_store),
        (".s.preparing", prepare_store),
        (".s.preparing.lock", prepare_store),
        (".s.penstock-store", prepare_store),
        (".s.penstock-lock", prepare_store),
        ("o.jsonl.quarantine.jsonl", quarantine),
        (".o.jsonl.quarantine.jsonl.penstock-lock", quarantine),
    ],
)
@pytest.mark.parametrize("kind", ["file", "directory", "nothing"])
def test_a_link_at_a_hidden_name_is_refused_and_what_it_leads_to_stays(
    tmp_path: Path, name: str, work: Callable[[Path], None], kind: str
) -> None:
    home, victim = tmp_path / "home", tmp_path / "precious"
    (home / name).parent.mkdir(parents=True)
    if kind == "file":
        victim.write_bytes(SECRET)
    elif kind == "directory":
        victim.mkdir()
        for own in ("part-000000.parquet", "run", "journal.jsonl", "thesis.md"):
            (victim / own).write_bytes(SECRET)
    (home / name).symlink_to(victim)
    with pytest.raises(ConfigError, match=str(Path(name).name)):
        work(home)
    assert (home / name).is_symlink()
    if kind == "file":
        assert victim.read_bytes() == SECRET
    elif kind == "directory":
        assert {file.name: file.read_bytes() for file in victim.iterdir()} == dict.fromkeys(
            ("part-000000.parquet", "run", "journal.jsonl", "thesis.md"), SECRET
        )
    else:
        assert not victim.exists()
    (home / name).unlink()
    if work not in (append_to_store, write_directory_again):
        work(home)


def test_the_log_of_a_deduplication_is_not_written_through_a_link(tmp_path: Path) -> None:
    deduplicate(tmp_path)
    (log,) = (file for file in (tmp_path / "seen").iterdir() if file.suffix != ".lock")
    victim = tmp_path / "precious"
    victim.write_bytes(SECRET)
    log.unlink()
    log.symlink_to(victim)
    with pytest.raises(Exception, match=r"\bseen\b"):
        deduplicate(tmp_path)
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize(
    ("name", "work"),
    [
        (".o.parquet.penstock-parts", write_file),
        (".o.penstock-parts", write_directory),
        (".s.penstock-store", write_store),
        (".s.penstock-store/.build", write_store),
        (".s.preparing", prepare_store),
    ],
)
def test_a_hidden_directory_with_something_else_in_it_is_left_alone(
    tmp_path: Path, name: str, work: Callable[[Path], None]
) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "part-000000.parquet.bak").mkdir()
    (tmp_path / name / "thesis.md").write_bytes(SECRET)
    with pytest.raises(ConfigError, match=r"'.*'"):
        work(tmp_path)
    assert (tmp_path / name / "thesis.md").read_bytes() == SECRET


@pytest.mark.parametrize("name", ["lock", "fifo", "second"])
def test_a_lock_is_taken_on_nothing_but_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    if name == "lock":
        (tmp_path / name).mkdir()
    elif name == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / "first").write_bytes(SECRET)
        (tmp_path / name).hardlink_to(tmp_path / "first")
    with pytest.raises((ConfigError, IsADirectoryError), match=name):
        FileLock(tmp_path / name).acquire()
    if name == "second":
        assert (tmp_path / "first").read_bytes() == SECRET


def test_a_file_in_the_making_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "00" * count)
    victim = tmp_path / "precious"
    victim.write_bytes(SECRET)
    (tmp_path / f".o.{os.getpid()}-{_machine()}0000.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        AtomicFile(tmp_path / "o")
    (tmp_path / "q").symlink_to(victim)
    write(tmp_path / "q", pa.py_buffer(b"batch"), durable=False, shown=tmp_path / "q")
    assert not (tmp_path / "q").is_symlink()
    assert victim.read_bytes() == SECRET


def test_an_output_path_that_is_a_link_to_a_file_is_replaced_and_one_to_a_directory_refused(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_bytes(SECRET)
    (tmp_path / "o.parquet").symlink_to(victim)
    write_file(tmp_path)
    assert not (tmp_path / "o.parquet").is_symlink()
    assert victim.read_bytes() == SECRET
    (tmp_path / "empty").mkdir()
    (tmp_path / "o").symlink_to(tmp_path / "empty")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        write_directory(tmp_path)


def test_files_that_somebody_put_into_an_output_directory_are_not_replaced_with_it(tmp_path: Path) -> None:
    pipeline = Pipeline(MemorySource(ROWS), [], JsonlSink(tmp_path / "o"))
    pipeline.run()
    (tmp_path / "o" / "README.md").write_bytes(SECRET)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        pipeline.run()
    assert (tmp_path / "o" / "README.md").read_bytes() == SECRET


def test_pruning_a_store_removes_shards_and_nothing_else(tmp_path: Path) -> None:
    write_store(tmp_path)
    shards = tmp_path / "s" / "shards"
    (shards / f"{'0' * 32}.arrow").write_bytes(b"of a run that was killed")
    (shards / "notes.txt").write_bytes(SECRET)
    assert prune(tmp_path / "s").files == 1
    assert (shards / "notes.txt").read_bytes() == SECRET


def test_a_queue_behind_a_link_is_purged_under_its_own_name_only(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "q")
    with pytest.raises(ConfigError, match=r"\blink\b"):
        purge(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "q").is_dir()
