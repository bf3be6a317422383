from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queues import PAIR, ROWS, Maker, consumer, fill, given, k_of, ks, names, provider, take

from penstock.errors import ConfigError, DataError, QueueNotFoundError, ResumeError, StalledError
from penstock.files.states import with_checksum
from penstock.fsqueue import DatasetConsumer, Queue, purge
from penstock.fsqueue.members import Backoff

LABELLED = [*PAIR, {"name": "label", "dtype": "int64", "role": "label"}]


def test_a_pair_comes_as_a_pair_and_anything_else_as_a_dict(tmp_path: Path) -> None:
    with consumer(fill(tmp_path / "pair", 1)) as reader:
        x, y = reader.get_batch("train")
        assert x.shape == y.shape == (ROWS, 3)
        assert reader.schema("train") == PAIR
        assert reader.meta["vocab_size"] == 65
        assert reader.splits == ["train"]
    swapped, renamed, roles = PAIR[::-1], [PAIR[0], {**PAIR[1], "name": "z"}], [{**e, "role": "input"} for e in PAIR]
    for number, schema in enumerate((LABELLED, PAIR[:1], swapped, renamed, roles)):
        path = tmp_path / str(number)
        source = {"label": np.zeros(ROWS, np.int64), **{name: np.zeros((ROWS, 3), np.int64) for name in "xyz"}}
        given(path, lambda k, rng, s=schema, v=source: {e["name"]: v[e["name"]] for e in s}, schema).run(max_batches=1)
        with consumer(path) as reader:
            assert list(reader.get_batch()) == [entry["name"] for entry in schema]


def test_batches_are_torch_tensors_unless_told_otherwise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with DatasetConsumer(fill(tmp_path / "q", 8)) as reader:
        x, _ = reader.get_batch()
        assert isinstance(x, torch.Tensor)
        assert x.dtype == torch.int64
        x += 1
        for _ in range(4):
            reader.get_batch()
        assert x.tolist() == [[1] * 3] * ROWS, "it is still there when its file is not"
    with DatasetConsumer(tmp_path / "q", device="cpu", pin_memory=True) as reader:
        assert reader.get_batch()[0].device.type == "cpu", "asking for pinned memory does no harm without a GPU"


def test_the_end_of_a_split_ends_the_loop(tmp_path: Path) -> None:
    with consumer(fill(tmp_path / "q", 6)) as reader:
        assert ks(reader.batches()) == list(range(6))
        assert ks(reader.batches()) == []
        assert reader.get_arrays() is None
        with pytest.raises(StopIteration, match="'train'"):
            reader.get_batch()
        assert reader.counts().delivered == 6
        assert reader.counts().files == 2
    assert names(tmp_path / "q") == []
    assert list((tmp_path / "q" / "members").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "sorted"}, r"\border\b.*'sorted'"),
        ({"acknowledge": "never"}, "acknowledge"),
        ({"on_error": "ignore"}, "on_error"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"poll_seconds": -1}, "poll_seconds"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"rank": 2, "world_size": 2}, r"rank 2\b"),
        ({"rank": 0}, r"rank=0.*world_size"),
        ({"backend": "tensorfire"}, "tensorfire"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with pytest.raises(ConfigError, match=words):
        consumer(path, **options)


@pytest.mark.parametrize("order", ["any", "strict"])
def test_at_the_deadline_it_is_said_what_is_missing(order: str, tmp_path: Path) -> None:
    path = tmp_path / "q"
    maker = Maker(path)
    expected = rf"0\.05 s.*'train'.*{path}.*"
    with consumer(path, order=order, timeout_seconds=0.05) as reader:
        with pytest.raises(StalledError, match=expected + r"prepare\.py"):
            reader.get_batch()
        maker.member.join()
        with pytest.raises(TimeoutError, match=expected + "1 provider"):
            reader.get_batch()
        maker.make()
        assert k_of(reader.get_batch()) == 0, "a deadline is no end"
        maker.member.leave()


def test_a_consumer_waits_until_a_file_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, found, waits, pause = Maker(tmp_path / "q"), [], threading.Event(), Backoff.pause

    def pausing(patience: Backoff) -> None:
        pause(patience)
        waits.set()

    monkeypatch.setattr(Backoff, "pause", pausing)
    with consumer(tmp_path / "q") as reader:
        thread = threading.Thread(target=lambda: found.append(k_of(reader.get_batch())))
        thread.start()
        assert waits.wait(20)
        assert found == []
        maker.make()
        thread.join()
        assert found == [0]
        assert reader.counts().waited_seconds > 0


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_queue_that_is_removed_under_a_waiting_consumer_is_said_to_be(order: str, tmp_path: Path) -> None:
    path, caught = tmp_path / "q", []
    Queue.create(path, provider(path).description())
    with consumer(path, order=order) as reader:

        def wait() -> None:
            try:
                reader.get_batch()
            except QueueNotFoundError as error:
                caught.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        while not list((path / "members").iterdir()):
            pass
        path.rename(tmp_path / "gone")
        thread.join()
    assert caught == [
        f"Queue directory not found: {path} was removed while it was in use; run `python prepare.py <config>` again "
        "(same config), then this"
    ]
    shutil.rmtree(tmp_path / "gone")


def broken(path: Path, number: int = 1) -> None:
    target = next((path / "train").glob(f"{number:012d}-*"))
    target.write_bytes(target.read_bytes()[:-8])


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_file_that_cannot_be_read_is_an_error_with_the_remedy(order: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    broken(path)
    with consumer(path, order=order) as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(DataError, match=rf"{path}.*--repair"):
                reader.get_batch()
    assert len(names(path)) == 2, "it is still there to be looked at"


@pytest.mark.parametrize("order", ["any", "strict"])
def test_or_it_is_put_aside_and_counted(order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = fill(tmp_path / "q", 12)
    broken(path)
    with caplog.at_level(logging.WARNING), consumer(path, order=order, on_error="skip") as reader:
        assert ks(reader) == [0, 1, 2, 3, 8, 9, 10, 11]
        assert reader.counts().skipped == 4
        assert reader.counts().delivered == 8
        assert reader.counts().lost == 0
    assert "4 batches" in caplog.text
    (left,) = names(path)
    assert left.startswith("000000000001-")
    assert left.endswith(".bad")


def test_every_rank_counts_its_own_batches_of_a_bad_file(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    broken(path)
    ranks = [consumer(path, order="strict", rank=rank, world_size=2, on_error="skip") for rank in range(2)]
    assert [ks(rank) for rank in ranks] == [[0, 2, 8, 10], [1, 3, 9, 11]]
    assert [rank.counts().skipped for rank in ranks] == [2, 2]
    for rank in ranks:
        rank.close()
    with consumer(fill(tmp_path / "r", 12), order="strict") as reader:
        file = reader._queue.split("train").files()[1]
        reader._queue.split("train").reject(file)
        assert take(reader, 4) == [0, 1, 2, 3]
        with pytest.raises(DataError, match=r"\border\b.*on_error="):
            reader.get_batch()


@pytest.mark.parametrize("count", [1, 2])
def test_strict_order_needs_the_first_files_too_if_they_were_set_aside(tmp_path: Path, count: int) -> None:
    path = fill(tmp_path / "q", 16)
    with consumer(path, order="strict") as reader:
        split = reader._queue.split("train")
        for _ in range(count):
            split.reject(split.files()[0])
        with pytest.raises(DataError, match=r"file 0 .*on_error="):
            reader.get_batch()
    with consumer(path, order="strict", on_error="skip") as reader:
        assert take(reader, 1) == [4 * count]
        assert reader.counts().skipped == 4 * count
    with consumer(path, order="strict", on_error="skip") as reader:
        assert take(reader, 2) == [4 * count + 1, 4 * count + 2], "a run goes on where the last one stopped"
        assert reader.counts().skipped == 0


def test_a_state_of_another_queue_order_or_version_is_refused(tmp_path: Path) -> None:
    path, other = fill(tmp_path / "q", 4), fill(tmp_path / "other", 4, seed=1)
    with consumer(path) as reader:
        reader.get_batch()
        state = reader.state_dict()
        assert json.loads(json.dumps(state)) == state
        for wrong, words in (
            ({**state, "version": 2}, "version 2"),
            ({**state, "order": "strict"}, "checksum"),
            (with_checksum({**state, "order": "strict"}), r"order='strict'.*order='any'"),
            (with_checksum({**state, "fingerprint": "0"}), "fingerprint 0"),
            ({}, "DatasetConsumer"),
            (None, "DatasetConsumer"),
        ):
            with pytest.raises(ResumeError, match=words):
                reader.load_state_dict(wrong)  # type: ignore[arg-type]
        with consumer(other) as stranger, pytest.raises(ResumeError, match="fingerprint"):
            stranger.load_state_dict(state)
        with pytest.raises(ConfigError, match=r'acknowledge=.*"committed"'):
            reader.commit()


def test_closing_twice_does_nothing_and_a_closed_consumer_delivers_no_more(tmp_path: Path) -> None:
    reader = consumer(fill(tmp_path / "q", 8))
    assert take(reader, 2) == [0, 1]
    reader.close()
    reader.close()
    with pytest.raises(ConfigError):
        reader.get_batch()


def test_splits_are_read_by_themselves(tmp_path: Path) -> None:
    provider(tmp_path / "q", split_proportions={"train": 1.0, "val": 1.0}).run(max_batches=4)
    with consumer(tmp_path / "q") as reader:
        assert take(reader, 2) == [0, 1]
        assert take(reader, 3, "val") == [0, 1, 2]
        assert take(reader, 2) == [2, 3]
        state = reader.state_dict()
        assert set(state["splits"]) == {"train", "val"}
        x = reader.get_batch("val")[1]
    assert x.tobytes() != provider(tmp_path / "n").make_batch("train", 3)["y"].tobytes()


def test_a_device_that_is_not_there_is_refused_before_a_batch_is_gone(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with pytest.raises(ConfigError, match="device='nowhere'"):
        DatasetConsumer(path, device="nowhere")
    assert ks(consumer(path)) == [0, 1, 2, 3]


def test_a_consumer_that_was_sent_to_another_process_is_another_one(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as reader:
        assert take(reader, 1) == [0]
        with pickle.loads(pickle.dumps(reader)) as other:  # noqa: S301 - it is ours
            assert take(other, 4) == [4, 5, 6, 7]
            assert repr(other) == repr(reader)


FORKING = """
import os, sys
from queues import ConfigError, consumer, take

path = sys.argv[1]
with consumer(path) as working, consumer(path) as idle:
    assert take(working, 1) == [0]
    child = os.fork()
    if child == 0:
        try:
            working.get_batch()
        except ConfigError as error:
            assert "make one in each process" in str(error)
            take(idle, 1)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    take(idle, 1)
    print(len({name.partition(".by-")[2] for name in os.listdir(path + "/train") if ".by-" in name}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_consumer_at_work_does_not_go_on_in_a_forked_process_and_one_that_is_not_is_another_there(
    tmp_path: Path,
) -> None:
    path = fill(tmp_path / "q", 16)
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)], capture_output=True, text=True, env=here, check=False, timeout=600
    )
    assert done.stdout == "3\n", f"the child's is another: {done.stderr}"


def test_a_state_of_a_queue_that_was_purged_holds_in_strict_order_only(tmp_path: Path) -> None:
    path, states = fill(tmp_path / "q", 12), {}
    for order in ("strict", "any"):
        with consumer(path, order=order) as reader:
            take(reader, 3)
            states[order] = reader.state_dict()
    purge(path)
    fill(path, 12)
    with consumer(path) as reader, pytest.raises(ResumeError, match=str(tmp_path)):
        reader.load_state_dict(states["any"])
    with consumer(path, order="strict") as reader:
        reader.load_state_dict(states["strict"])
        assert ks(reader) == list(range(3, 12)), "its batches follow from their numbers"


def test_one_that_reads_in_any_order_takes_nothing_from_a_strict_run(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    with consumer(path, order="strict", acknowledge="committed") as reader:
        take(reader, 6)
        state = reader.state_dict()
    with consumer(path) as other, pytest.raises(ConfigError, match=r"strict.*\border\b"):
        other.get_batch()
    with consumer(path, order="strict") as reader:
        reader.load_state_dict(state)
        assert ks(reader) == list(range(6, 12))
