"""The end of preparing: input that has changed since it was hashed, and a kill right behind the manifest."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.corpus.prepare import EXAMPLES_NAME, losses_of, prepare_cached
from penstock.errors import ChangedFileError
from penstock.files.locks import FileLock
from penstock.loaders import Recipe, prepare
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.streamed.reader import StreamOptions
from penstock.store import open_store

RECIPE = Recipe(tokenizer="byte", dedup=["exact"])
STEPS = ["manifest", "shown", "published", "reported", "noted"]
KILLED = """
import os, secrets, sys, time
from pathlib import Path

import penstock.corpus.prepare as preparation
import penstock.pipeline.checkpoint as checkpoint
import penstock.store.build as build
import penstock.store.writer as writer
from penstock.loaders import Recipe

os.fsync = lambda handle: None
secrets.token_hex = lambda count: "ab" * count
time.strftime = lambda *_: "2025-01-01T00:00:00Z"

def dying(function, when=lambda *_, **__: True):
    def call(*args, **options):
        result = function(*args, **options)
        if when(*args, **options):
            os._exit(9)
        return result
    return call

home = Path(sys.argv[1])
for step in sys.argv[2:]:
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, step
        continue
    if step == "manifest":
        build.write_manifest = dying(build.write_manifest, lambda *_, current: current)
    elif step == "shown":
        build.sync_directory = dying(build.sync_directory, lambda path: (home / step / "s").exists())
    elif step == "published":
        writer.StoreWriter.publish = dying(writer.StoreWriter.publish)
    elif step == "reported":
        checkpoint.Checkpoint.save = dying(checkpoint.Checkpoint.save, lambda *_, report=None, **__: report is not None)
    else:
        preparation._write_losses = dying(preparation._write_losses)
    preparation.prepare(home / "in.jsonl", home / step / "s", Recipe(tokenizer="byte", dedup=["exact"]))
    os._exit(0)
"""


def write(path: Path, word: str = "row", rows: int = 40) -> None:
    lines = [json.dumps({"text": f"{word} {number % 30} " * 5}) + "\n" for number in range(rows)]
    path.write_text("".join(lines))


def tree(home: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes, hidden ones too; examples of dropped rows are of one process."""
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else None
        for path in sorted(home.rglob("*"))
        if path.name != EXAMPLES_NAME
    }


@pytest.fixture
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only two things in a store that differ from run to run: its time, and the name of the run."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    monkeypatch.setattr(time, "strftime", lambda *_: "2025-01-01T00:00:00Z")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.usefixtures("same_clock")
def test_killed_behind_the_manifest_the_next_call_makes_the_same_store_to_the_byte(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl")
    for step in [*STEPS, "whole"]:
        (tmp_path / step).mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *STEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prepare(tmp_path / "in.jsonl", tmp_path / "whole" / "s", RECIPE)
    whole = tree(tmp_path / "whole")
    assert "s/losses.json" in whole
    assert json.loads(whole["s/losses.json"] or b"")["rows"] == {"duplicate": 10}
    assert not [name for name in whole if "/." in f"/{name}"]
    for step in STEPS:
        assert tree(tmp_path / step) != whole, f"{step}: killed too late to show anything"
        prepare(tmp_path / "in.jsonl", tmp_path / step / "s", RECIPE)
        assert tree(tmp_path / step) == whole, step
    assert prepare(tmp_path / "in.jsonl", tmp_path / "noted" / "s", RECIPE).report is None, "it is ready now"
    assert tree(tmp_path / "noted") == whole
    with open_store(tmp_path / "published" / "s") as store:
        assert losses_of(store) == {}


@pytest.mark.parametrize("young", [False, True])
def test_input_that_is_rewritten_after_it_was_hashed_is_not_stored_under_its_old_key(
    tmp_path: Path, young: bool
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "s"
    write(path)
    before = path.read_bytes()
    stamp = path.stat()
    if not young:
        os.utime(path, (1_000_000_000, 1_000_000_000))

    @contextlib.contextmanager
    def rewritten(pipeline: Any) -> Iterator[Any]:
        write(path, "col")
        assert path.stat().st_size == len(before)
        if young:  # within one tick of the clock: nothing but the bytes tells
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        yield None

    with pytest.raises(ChangedFileError, match=r"in\.jsonl"):
        prepare(path, out, RECIPE, progress=rewritten)
    assert not out.exists()
    path.write_bytes(before)
    made = prepare(path, out, RECIPE)
    assert made.report is not None
    assert not made.report.resumed, "rows of the other state are not gone on with"
    fresh = prepare(path, tmp_path / "fresh", RECIPE)
    assert [entry.name for entry in made.manifest.shards] == [entry.name for entry in fresh.manifest.shards]


def test_input_that_changes_before_a_cached_store_is_begun_leaves_no_store_under_the_old_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    write(path)
    taken = FileLock.acquire

    def changing(lock: FileLock, *args: Any, **options: Any) -> bool:
        if lock.path.name.endswith(".preparing.lock") and not changed:
            changed.append(True)
            write(path, "col")
        return taken(lock, *args, **options)

    changed: list[bool] = []
    monkeypatch.setattr(FileLock, "acquire", changing)
    with pytest.raises(ChangedFileError, match=r"in\.jsonl"):
        prepare_cached([path], tmp_path / "cache", RECIPE)
    assert changed
    made = prepare_cached([path], tmp_path / "cache", RECIPE)
    assert made.path.name == made.manifest.key


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_file_that_is_rewritten_while_it_is_streamed_stops_the_loader(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    write(path, rows=4000)
    loader = PretrainDataLoader(
        path,
        tokenizer="byte",
        chunk_size=64,
        batch_size=2,
        streaming=StreamOptions(streams=1, shuffle_window=32, workers=1, worker_type="thread"),
        backend="numpy",
    )
    with loader:
        batches = iter(loader)
        next(batches)
        stat = path.stat()
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(ChangedFileError, match=str(tmp_path)):
            list(batches)
