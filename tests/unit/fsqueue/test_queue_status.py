from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from queues import PAIR, Maker, consumer, fill, provider, take

from penstock.errors import ConfigError, QueueNotFoundError
from penstock.fsqueue import Queue
from penstock.fsqueue.status import MemberStatus, Status, find_queue, look


def seen(path: Path) -> Status:
    return look(Queue.open(path))


def test_a_filled_queue_shows_what_waits_and_what_was_made(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 14)
    status = seen(path)
    [train] = status.splits
    assert (train.name, train.ready_files, train.ready_batches, train.taken_files) == ("train", 4, 14, 0)
    assert (train.made_batches, train.end, train.gone_batches, train.finished) == (14, 14, 0, False)
    assert train.ready_bytes == sum(file.stat().st_size for file in path.glob("train/*.arrow"))
    assert train.oldest_seconds is not None
    assert (status.fingerprint, status.meta["batch_schema"]) == (Queue.open(path).fingerprint, PAIR)
    assert status.members == []


def test_the_oldest_file_is_the_one_that_waited_longest(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    first = min(path.glob("train/*.arrow"))
    os.utime(first, (0, time.time() - 3600))
    [train] = seen(path).splits
    assert train.oldest_seconds is not None
    assert 3599 < train.oldest_seconds < 3700


def test_what_a_consumer_has_taken_and_delivered_is_told_apart(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    with consumer(path) as reader:
        take(reader, 5)  # one file is done with, one begun
        status = seen(path)
        [train] = status.splits
        assert (train.ready_files, train.taken_files, train.taken_batches, train.gone_batches) == (1, 1, 4, 4)
        [member] = status.members
        assert (member.role, member.facts["pid"], member.lease_seconds) == ("consumer", os.getpid(), 30.0)
    [train] = seen(path).splits
    assert (train.ready_batches, train.taken_files, train.gone_batches) == (7, 0, 5)


def test_strict_readers_show_their_cursors(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 16)
    readers = [consumer(path, order="strict", rank=rank, world_size=2) for rank in range(2)]
    for reader in readers:
        take(reader, 3)
    for reader in readers:
        reader.close()
    [train] = seen(path).splits
    assert [(cursor.rank, cursor.world, cursor.read, cursor.done) for cursor in train.cursors] == [
        (0, 2, 6, 6),
        (1, 2, 6, 6),
    ]
    assert train.gone_batches == 6


def test_put_aside_half_written_and_returned_files_are_counted(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    directory = Queue.open(path).split("train")
    first, second, _ = directory.files()
    directory.reject(first)
    directory.move(second, second.expired())
    (directory.path / ".000000000003~pdead.tmp").touch()
    (directory.path / "README").touch()
    [train] = seen(path).splits
    assert (train.aside_files, train.being_written, train.returned_files, train.ready_files) == (1, 1, 1, 2)


def test_two_looks_give_rates(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    before = replace(seen(path), at=100.0)
    fill(path, 24)
    with consumer(path) as reader:
        take(reader, 9)
        after = replace(seen(path), at=104.0).since(before)
    [train] = after.splits
    assert (after.seconds, train.published_per_second, train.delivered_per_second) == (4.0, 4.0, 2.0)


@pytest.mark.parametrize(
    ("beats", "seconds", "alive"),
    [((3, 4), 1.0, True), ((3, 3), 1.0, None), ((3, 3), 11.0, False), ((None, 3), 1.0, True)],
)
def test_who_beat_between_two_looks_lives_and_who_did_not_for_its_lease_is_dead(
    tmp_path: Path, beats: tuple[int | None, int], seconds: float, alive: bool | None
) -> None:
    status = seen(fill(tmp_path / "q", 4))

    def at(beat: int | None, moment: float) -> Status:
        members = [] if beat is None else [MemberStatus("c1", "consumer", 10.0, beat, 0, None)]
        return replace(status, members=members, at=moment)

    [member] = at(beats[1], seconds).since(at(beats[0], 0.0)).members
    assert member.alive is alive


def test_without_a_second_look_the_clock_tells_who_seems_to_live() -> None:
    assert MemberStatus("c1", "consumer", 10.0, 3, 0, 9.0).seems_alive
    assert not MemberStatus("c1", "consumer", 10.0, 3, 0, 11.0).seems_alive
    assert MemberStatus("c1", "consumer", 10.0, 3, 0, 11.0, alive=True).seems_alive


PROVIDER = MemberStatus("p1", "provider", 30.0, 3, 0, 0.1)
CONSUMER = MemberStatus("c1", "consumer", 30.0, 3, 0, 0.1)


@pytest.mark.parametrize(
    ("members", "files", "rates", "said"),
    [
        ([PROVIDER, CONSUMER], 0, (1.0, 1.0), "provider is the bottleneck"),
        ([PROVIDER, CONSUMER], 3, (1.0, 2.0), "the provider is slower than the trainer"),
        ([PROVIDER, CONSUMER], 1, (1.0, 1.0), "equally fast"),
        ([PROVIDER, CONSUMER], 60, (1.0, 1.0), "trainer is the bottleneck"),
        ([CONSUMER], 0, (0.0, 0.0), "prepare.py"),
        ([CONSUMER], 2, (0.0, 1.0), "2 files"),
        ([PROVIDER], 5, (0.0, 0.0), "no trainer"),
        ([], 5, (0.0, 0.0), "5 files"),
        ([], 0, (0.0, 0.0), "no member"),
    ],
)
def test_a_sentence_says_who_waits_for_whom(
    tmp_path: Path, members: list[MemberStatus], files: int, rates: tuple[float, float], said: str
) -> None:
    Maker(tmp_path / "q")
    status = seen(tmp_path / "q")
    [train] = status.splits
    train = replace(
        train,
        ready_files=files,
        made_batches=400,
        published_per_second=rates[0],
        delivered_per_second=rates[1],
    )
    assert said in replace(status, members=members, splits=[train]).advice


def test_a_split_that_nobody_reads_does_not_hide_the_bottleneck(tmp_path: Path) -> None:
    provider(tmp_path / "q", split_proportions={"train": 1.0, "val": 1.0}, backlog_files=2).run(max_batches=8)
    status = seen(tmp_path / "q")
    train, val = status.splits
    assert val.ready_files == 2
    train = replace(train, ready_files=0, ready_batches=0)
    val = replace(val, end=None)
    advice = replace(status, members=[PROVIDER, CONSUMER], splits=[train, val]).advice
    assert "provider is the bottleneck" in advice


def test_a_queue_that_was_read_to_its_end_says_so(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 6)
    with consumer(path) as reader:
        assert len(list(reader)) == 6
    assert seen(path).advice == "every split has been read to its end"


def test_a_status_is_plain_values(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with consumer(path) as reader:
        take(reader, 1)
        facts = orjson.loads(orjson.dumps(seen(path).since(seen(path)).to_dict(), default=str))
    assert facts["splits"][0]["made_batches"] == 4
    assert facts["members"][0]["facts"]["pid"] == os.getpid()
    assert facts["advice"]


def test_looking_changes_nothing(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    before = sorted(path.rglob("*"))
    seen(path)
    assert sorted(path.rglob("*")) == before


def test_a_queue_that_is_removed_while_it_is_looked_at_is_named(tmp_path: Path) -> None:
    queue = Queue.open(fill(tmp_path / "q", 4))
    (tmp_path / "q").rename(tmp_path / "gone")
    with pytest.raises(QueueNotFoundError, match=str(tmp_path)):
        look(queue)


# -- which queue is meant --------------------------------------------------------------------------------------------


def test_a_queue_is_found_by_itself_by_its_dataset_and_by_a_config(tmp_path: Path) -> None:
    path = fill(tmp_path / "data" / "digits" / "queue", 4)
    config = tmp_path / "train.py"
    config.write_text(f"dataset = 'digits'\ndata_root = {str(tmp_path / 'data')!r}\nbatch_size = 1\nblock_size = 2\n")
    assert find_queue(path) == find_queue(path.parent) == find_queue(config) == path


def test_a_config_may_say_where_the_queue_is(tmp_path: Path) -> None:
    config = tmp_path / "train.py"
    config.write_text("dataset = 'digits'\nqueue_dir = '/somewhere/else'\n")
    assert find_queue(config) == Path("/somewhere/else")


def test_a_config_without_a_dataset_has_no_queue(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("batch_size = 1\n")
    with pytest.raises((QueueNotFoundError, ConfigError), match="dataset"):
        find_queue(tmp_path / "train.py")
