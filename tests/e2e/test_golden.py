"""Stores, states, queues and checkpoints that an earlier tree wrote are read by this one, byte for byte.

`tests/golden/write.py` made the material. A test that fails here says that somebody's run would go on with other
batches, or that somebody's prepared data would not be found again. The material is copied first, so that nothing hangs
on the directory it lies in, or on the times of its files. Paths in it are relative to that directory: states and
checkpoints of a pipeline name its files as they were given, and so does the metadata of streams and rollouts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden_digests import difference, digests, first_difference
from golden_keys import keys
from golden_loaders import BATCHES, LOADERS, SAVED_AFTER, raw_chats, raw_pairs, raw_text, table, take, titanic
from golden_runs import CONTINUED, END, FILES, READ, STREAMS, looped, provider, rows_of, stream
from penstock import open_store, prepare
from penstock.loaders import Recipe

MATERIAL = Path(__file__).parents[1] / "golden" / "material"
GOLDEN: dict[str, Any] = json.loads((MATERIAL / "golden.json").read_text("utf-8"))


def copy_material(target: Path) -> Path:
    shutil.copytree(MATERIAL, target)
    for name in GOLDEN["empty directories"]:  # which a checkout does not have
        (target / name).mkdir(parents=True, exist_ok=True)
    return target


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_material(tmp_path_factory.mktemp("golden") / "somewhere else")


@pytest.fixture
def shared(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, a copy that tests read from and write nothing to."""
    monkeypatch.chdir(copied)
    return Path()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, a copy of its own for a test that writes."""
    monkeypatch.chdir(copy_material(tmp_path / "material"))
    return Path()


def saved_state(root: Path, name: str) -> dict[str, Any]:
    file = name.replace(": ", "-").replace(", ", "-").replace(" ", "_") + ".json"
    state: dict[str, Any] = json.loads((root / "states" / file).read_text("utf-8"))
    return state


def snapshot(directory: Path) -> dict[str, bytes]:
    """What a directory holds, locks aside."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_every_golden_loader_is_still_looked_at() -> None:
    assert sorted(GOLDEN["loaders"]) == sorted(LOADERS)
    assert sorted(GOLDEN["loops"]) == sorted(FILES)
    assert sorted(GOLDEN["streams"]) == sorted(STREAMS)
    assert sorted(GOLDEN["continued"]) == sorted(CONTINUED)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_golden_loader(shared: Path, name: str) -> None:
    with LOADERS[name](shared) as loader:
        found = digests(take(loader, BATCHES))
    assert not difference(found, GOLDEN["loaders"][name])


@pytest.mark.parametrize("name", LOADERS)
def test_a_golden_state_goes_on_with_the_same_batches(shared: Path, name: str) -> None:
    with LOADERS[name](shared) as loader:
        loader.load_state_dict(saved_state(shared, name))
        found = digests(take(loader, BATCHES - SAVED_AFTER))
    assert not first_difference(found["batches"], GOLDEN["loaders"][name]["batches"][SAVED_AFTER:])


@pytest.mark.parametrize("name", FILES)
def test_a_loop_over_a_file_goes_on_from_a_golden_state(shared: Path, name: str) -> None:
    wanted = GOLDEN["loops"][name]
    assert not difference(digests(rows_of(iter(looped(shared, name)))), wanted)
    loop = looped(shared, name)
    loop.load_state_dict(saved_state(shared, f"loop: {name}"))
    assert not first_difference(digests(rows_of(iter(loop)))["batches"], wanted["batches"][2:])


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_samples_goes_on_from_a_golden_state(shared: Path, name: str) -> None:
    wanted = GOLDEN["streams"][name]
    assert not difference(digests(stream(shared, name)), wanted)
    pipeline = stream(shared, name)
    pipeline.load_state_dict(saved_state(shared, f"stream: {name}"))
    assert not first_difference(digests(pipeline)["batches"], wanted["batches"][10:])


@pytest.mark.parametrize("name", CONTINUED)
def test_what_was_stopped_on_the_way_goes_on_to_the_same_end(root: Path, name: str) -> None:
    assert CONTINUED[name](root) == GOLDEN["continued"][name]


def test_a_finished_split_of_the_golden_queue_has_the_batches_that_its_provider_makes(root: Path) -> None:
    maker = provider(root)
    rest = [{"split": "train", **maker.make_batch("train", k)} for k in range(READ, END)]
    rest += [{"split": "val", **maker.make_batch("val", k)} for k in range(1, END)]
    assert digests(rest)["batches"] == GOLDEN["continued"]["a queue"]["batches"]


def test_keys_and_fingerprints_are_the_golden_ones(shared: Path) -> None:
    assert keys(shared) == GOLDEN["keys"]


def test_loaders_find_the_stores_of_a_golden_cache(root: Path) -> None:
    before = snapshot(root / "cache/stores")
    for make in (raw_text, raw_chats, raw_pairs):
        os.utime(root / "raw/documents.jsonl", (1, 1))  # times are no part of a key
        make(root).close()
    assert snapshot(root / "cache/stores") == before


def test_tables_are_found_in_a_golden_cache(root: Path) -> None:
    before = snapshot(root / "cache/tables")
    for dataset in (titanic(root), table(root)):
        dataset.encoded()
    assert before
    assert snapshot(root / "cache/tables") == before


@pytest.mark.parametrize("name", ["text", "chats", "pairs", "labelled"])
def test_prepare_finds_a_golden_store(root: Path, name: str) -> None:
    recipes = {
        "text": Recipe(tokenizer=root / "tokenizer", keep=["id"]),
        "chats": Recipe(tokenizer=root / "tokenizer", template="chatml", max_length=256),
    }
    preference = Recipe(tokenizer=root / "tokenizer", template="chatml", max_length=128, preference=True)
    before = snapshot(root / f"stores/{name}.store")
    raw = root / "raw" / ("documents.jsonl" if name == "text" else f"{name}.jsonl")
    prepared = prepare(raw, root / f"stores/{name}.store", recipes.get(name, preference))
    assert prepared.report is None
    assert snapshot(root / f"stores/{name}.store") == before


@pytest.mark.parametrize("name", ["text", "chats", "pairs", "labelled"])
def test_a_store_that_is_made_anew_is_the_golden_one(root: Path, name: str) -> None:
    chat = {} if name == "text" else {"template": "chatml", "max_length": 256 if name == "chats" else 128}
    keep = {"keep": ["id"]} if name == "text" else {}
    preference = {"preference": True} if name in ("pairs", "labelled") else {}
    raw = root / "raw" / ("documents.jsonl" if name == "text" else f"{name}.jsonl")
    prepare(raw, root / "again.store", Recipe(tokenizer=root / "tokenizer", **chat, **keep, **preference))
    assert snapshot(root / "again.store/shards") == snapshot(root / f"stores/{name}.store/shards")


def test_the_command_finds_a_golden_store(root: Path) -> None:
    before = snapshot(root / "stores/text.store")
    command = [sys.executable, "-m", "penstock", "prepare", "raw/documents.jsonl", "--tokenizer", "tokenizer"]
    command += ["--keep", "id", "--out", "stores/text.store", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert snapshot(root / "stores/text.store") == before


def test_golden_stores_pass_a_full_check(shared: Path) -> None:
    for path in sorted((shared / "stores").iterdir()):
        with open_store(path, verify="full") as store:
            assert len(store) > 0
    with open_store(shared / "stores/versions.store", version=1) as first:
        assert len(first) == 35
    with open_store(shared / "stores/versions.store") as latest:
        assert len(latest) == 50
