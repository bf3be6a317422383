from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queues import PAIR, consumer, fill, given, ks, names, provider

from penstock.errors import ConfigError, PenstockError, QueueNotFoundError, SchemaError, StaleQueueError
from penstock.fsqueue import DatasetConsumer, Queue, purge
from penstock.fsqueue.queue import Description

SETTINGS = {"batches_per_file": 4, "lanes": 8}


def described(splits: Any = ("train",), **meta: Any) -> Description:
    return Description({"batch_schema": PAIR, **meta}, SETTINGS, splits)


def test_a_queue_holds_what_it_was_made_for(tmp_path: Path) -> None:
    made = Queue.create(tmp_path / "deep" / "q", described(["train", "val"], vocab_size=np.int64(65)))
    opened = Queue.open(tmp_path / "deep" / "q")
    assert opened.fingerprint == made.fingerprint
    assert opened.meta["vocab_size"] == 65
    assert list(opened.description.splits) == ["train", "val"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["q"], "nothing is left beside it"
    with pytest.raises(TypeError):
        opened.meta["vocab_size"] = 1  # type: ignore[index]


def test_the_fingerprint_follows_from_meta_and_settings_and_not_from_their_order() -> None:
    one = Description({"a": 1, "b": [1, 2]}, SETTINGS, ["train"])
    assert one.fingerprint == Description({"b": (1, 2), "a": 1}, dict(reversed(SETTINGS.items())), ["val"]).fingerprint
    assert one.fingerprint != Description({"a": 1, "b": [2, 1]}, SETTINGS, ["train"]).fingerprint
    assert one.fingerprint != Description({"a": 1, "b": [1, 2]}, {**SETTINGS, "seed": 1}, ["train"]).fingerprint


def test_of_many_who_make_it_at_once_one_does_and_all_have_it(tmp_path: Path) -> None:
    found: list[Queue] = []
    threads = [
        threading.Thread(target=lambda: found.append(Queue.create(tmp_path / "q", described()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({queue.fingerprint for queue in found}) == 1
    assert len(found) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_an_empty_directory_becomes_the_queue_and_any_other_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Queue.create(tmp_path / "empty", described())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(QueueNotFoundError, match=r"queue\.json"):
        Queue.create(tmp_path / "photos", described())
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_no_queue_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(QueueNotFoundError, match=r"nowhere.*`python prepare\.py <config>`"):
        DatasetConsumer(tmp_path / "nowhere", backend="numpy")
    with pytest.raises(FileNotFoundError):
        DatasetConsumer(tmp_path / "nowhere", backend="numpy")
    with pytest.raises(QueueNotFoundError, match=r"queue\.json.*`python prepare\.py <config>`"):
        DatasetConsumer(tmp_path, backend="numpy")


def edited(path: Path, **changes: Any) -> None:
    facts = json.loads((path / "queue.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            facts[key].update(value)
        else:
            facts[key] = value
    (path / "queue.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "changes",
    [
        {"meta": {"vocab_size": 70}},
        {"meta": {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [9]}]}},
        {"meta": {"batch_schema": [{"name": "x", "dtype": "no such"}]}},
        {"meta": {"batch_schema": None}},
        {"settings": {"batches_per_file": 1}},
        {"settings": {"lanes": "many"}},
        {"fingerprint": "0"},
        {"fingerprint": None},
        {"splits": []},
        {"splits": ["train", "test"]},
        {"splits": "train"},
        {"splits": ["../.."]},
        {"splits": None},
        {"meta": None},
        {"settings": 5},
        {"version": 99},
        {"version": None},
    ],
)
def test_metadata_that_was_edited_by_hand_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    edited(path, **changes)
    with pytest.raises(StaleQueueError, match=rf"queue\.json.*{path}"):
        Queue.open(path)
    with pytest.raises(StaleQueueError):
        provider(path).run(max_batches=4)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 1}'])
def test_metadata_that_was_cut_short_is_refused(content: bytes, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    (path / "queue.json").write_bytes(content)
    with pytest.raises(StaleQueueError, match=r"queue\.json"):
        Queue.open(path)


def test_a_provider_with_another_vocabulary_is_refused_saying_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "q"

    def make(**meta: Any) -> Any:
        source = given(path, lambda k, rng: {name: rng.integers(9, size=(2, 3)) for name in "xy"})
        source.meta = meta
        return source

    make(vocab_size=65, stoi={"a": 0}).run(max_batches=4)
    make(stoi={"a": 0}, vocab_size=65).run(max_batches=4)
    with pytest.raises(
        StaleQueueError,
        match=rf"vocab_size.*{path}",
    ):
        make(vocab_size=66, stoi={"a": 0}, new=1).run(max_batches=4)
    with pytest.raises(StaleQueueError, match=r"\bseed\b"):
        given(path, lambda k, rng: {}, seed=1).run()
    assert len(names(path)) == 1, "nothing was thrown away unasked"
    purge(path)
    make(vocab_size=66).run(max_batches=4)
    with consumer(path) as reader:
        assert reader.meta["vocab_size"] == 66


def test_a_queue_of_a_provider_that_failed_at_its_first_batch_takes_the_corrected_one(tmp_path: Path) -> None:
    path = tmp_path / "q"
    wrong = [{**entry, "dtype": "float32"} for entry in PAIR]

    def sample(k: int, rng: np.random.Generator) -> dict[str, Any]:
        return {name: np.full((2, 3), k) for name in "xy"}

    with pytest.raises(SchemaError, match="float32"):
        given(path, sample, wrong).run(max_batches=4)
    made = given(path, sample, split_proportions={"train": 1.0, "val": 1.0}).run(max_batches=4)
    assert dict(made.batches) == {"train": 4, "val": 4}
    with consumer(path) as reader:
        assert ks(reader) == [0, 1, 2, 3]
    with pytest.raises(StaleQueueError, match="batch_schema"):
        given(path, sample, wrong).run(max_batches=4)


def test_a_queue_that_somebody_waits_for_keeps_its_description(tmp_path: Path) -> None:
    path = tmp_path / "q"
    Queue.create(path, described(vocab_size=1))
    with consumer(path, timeout_seconds=0.01) as reader:
        with pytest.raises(PenstockError, match=r"0\.01"):
            reader.get_batch()
        with pytest.raises(StaleQueueError, match="vocab_size"):
            Queue.create(path, described(vocab_size=2))
    assert Queue.create(path, described(vocab_size=2)).meta["vocab_size"] == 2


def test_a_split_that_the_queue_does_not_have_is_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with pytest.raises(StaleQueueError, match=r"'train'.*'test'"):
        provider(path, split_proportions={"train": 1.0, "test": 1.0}).run()
    with consumer(path) as reader, pytest.raises(ConfigError, match=r"'trian'.*'train'"):
        reader.get_batch("trian")


@pytest.mark.parametrize("split", ["", "../up", "a/b", ".hidden", "members", "queue.json", 3, "a b", "lanes\n"])
def test_a_split_has_a_name_that_a_directory_can_have(split: Any) -> None:
    with pytest.raises(ConfigError, match="split"):
        described([split])


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "'batch_schema'"),
        ({"batch_schema": []}, "'batch_schema'"),
        ({"batch_schema": "x"}, "'batch_schema'"),
        ({"batch_schema": [{"dtype": "int64"}]}, "name"),
        ({"batch_schema": [{"name": "x"}]}, "dtype"),
        ({"batch_schema": ["x"]}, "'x'"),
        ({"batch_schema": [{"name": "x", "dtype": "int65"}]}, "int65"),
        ({"batch_schema": [{"name": "x", "dtype": "int64", "shape": [-1]}]}, "-1"),
        ({"batch_schema": [{"name": "x", "dtype": "int64", "shape": 8}]}, "shape"),
        ({"batch_schema": [{"name": "x", "dtype": "int64", "sahpe": [8]}]}, "sahpe"),
        ({"batch_schema": [{"name": "x", "dtype": "int64"}] * 2}, "x"),
        ({"batch_schema": [{"name": 1, "dtype": "int64"}]}, "1"),
    ],
)
def test_a_wrong_batch_schema_is_named(meta: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = given(tmp_path / "q", lambda k, rng: {})
    source.build_meta = lambda: meta
    with pytest.raises((ConfigError, SchemaError), match=words):
        source.run(max_batches=1)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("value", [{1, 2}, object(), {1: "int keys"}, 1 << 70, b"bytes"])
def test_meta_that_json_cannot_hold_is_refused(value: Any, tmp_path: Path) -> None:
    source = given(tmp_path / "q", lambda k, rng: {})
    source.meta = {"stoi": value}
    with pytest.raises(ConfigError, match=r"\bJSON\b"):
        source.run(max_batches=1)
    assert list(tmp_path.iterdir()) == []


def test_purge_removes_a_queue_and_nothing_else(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert purge(path) == size
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(QueueNotFoundError, match=str(tmp_path)):
        purge(path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match="--force"):
        purge(tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_files_of_other_programs_are_not_looked_at(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    for name in ("000000000000.arrow", "notes.txt", ".nfs01", "000000000001-n4-s0-r0.arrow.part"):
        (path / "train" / name).write_bytes(b"half a fi")
    (path / "train" / "lanes" / "notes.txt").touch()
    (path / "members" / "notes.txt").touch()
    with consumer(path) as reader:
        assert ks(reader) == list(range(8))
    assert len(names(path)) == 4
    assert issubclass(QueueNotFoundError, PenstockError)


@pytest.mark.parametrize("name", ["members", "train/cursors"])
def test_empty_directories_that_git_dropped_are_made_again(tmp_path: Path, name: str) -> None:
    path = fill(tmp_path / "q", 4)
    (path / name).rmdir()
    with consumer(path, order="strict") as reader:
        assert ks(reader) == [0, 1, 2, 3]
    assert (path / name).is_dir()
