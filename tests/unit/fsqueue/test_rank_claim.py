"""Readers in strict order beside others: files that the dead had taken are waited for, and a rank has one reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import orjson
import pytest
from queues import PER_FILE, Clock, consumer, fill, ks, listed, take

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError, StalledError
from penstock.fsqueue import DatasetConsumer, Queue, members
from penstock.fsqueue.layout import Member
from penstock.fsqueue.members import QueueMember, is_running
from penstock.fsqueue.ordered_reader import RankClaim
from penstock.fsqueue.split_reader import SplitFiles

READ_ONE_AND_DIE = """
    import os, signal, sys
    from penstock.fsqueue import DatasetConsumer
    reader = DatasetConsumer(sys.argv[1], order=sys.argv[2], lease_seconds=float(sys.argv[3]), backend="numpy")
    reader.get_batch("train")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_reader(path: Path, order: str, lease_seconds: float) -> None:
    """A consumer in a process of its own that takes one batch, and is killed."""
    command = [sys.executable, "-c", textwrap.dedent(READ_ONE_AND_DIE), str(path), order, str(lease_seconds)]
    assert subprocess.run(command, timeout=600, check=False).returncode == -signal.SIGKILL


def dead_claim(path: Path, *, file: int, lease_seconds: float) -> str:
    """A file taken by a consumer that is listed, and of which nothing will be seen."""
    queue = Queue.open(path)
    owner = Member("c0123456789ab", lease_seconds)
    (queue.members / owner.name).write_bytes(b"{}")
    directory = queue.split("train")
    published = directory.files()[file]
    assert directory.move(published, published.claimed(owner.id))
    return owner.id


# -- Files that somebody has -------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_a_strict_reader_gets_everything_after_a_consumer_in_any_order_was_killed(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 32)
    killed_reader(path, "any", lease_seconds=0.5)
    with consumer(path, order="strict", timeout_seconds=120, lease_seconds=0.5) as reader:
        assert ks(reader.batches("train")) == list(range(32))


@pytest.mark.parametrize("file", [0, 1, 7])
def test_a_file_that_a_dead_consumer_had_taken_is_waited_for(file: int, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8 * PER_FILE)
    dead_claim(path, file=file, lease_seconds=0.2)
    with consumer(path, order="strict", lease_seconds=0.2) as reader:
        assert ks(reader) == list(range(8 * PER_FILE))


def test_a_file_that_does_not_come_back_in_time_is_told_by_name(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    owner = dead_claim(path, file=1, lease_seconds=600)
    with consumer(path, order="strict", timeout_seconds=0.2) as reader:
        assert take(reader, PER_FILE) == list(range(PER_FILE))
        with pytest.raises(StalledError, match=rf"\bfile\b.*{owner}"):
            reader.get_batch()


def test_a_file_that_a_living_consumer_used_up_is_missed_by_name(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as other:
        take(other, PER_FILE + 1)
    with consumer(path, order="strict") as reader:
        assert ks(reader) == list(range(PER_FILE + 1, 8)), "what was done with before is not waited for"
    path = fill(tmp_path / "r", 8)
    with consumer(path) as other:
        take(other, 1)
        reader = consumer(path, order="strict", timeout_seconds=0.1)
        with pytest.raises(StalledError, match="order="):
            reader.get_batch()
        take(other, PER_FILE)
        with pytest.raises(DataError, match="order="):
            reader.get_batch()
        reader.close()


# -- One reader of a rank ----------------------------------------------------------------------------------------------


def strict(path: Path, **options: Any) -> DatasetConsumer:
    return consumer(path, order="strict", **options)


@pytest.mark.parametrize("acknowledge", ["delivered", "committed"])
def test_a_second_reader_of_a_rank_is_refused_while_the_first_lives(acknowledge: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with strict(path, acknowledge=acknowledge) as first, strict(path, acknowledge=acknowledge) as second:
        assert take(first, 2) == [0, 1]
        state = first.state_dict()
        told = rf"rank 0 of 1\b.*'train'.*{first._member.id}.*\b{os.getpid()}\b"
        for enter in (second.get_batch, lambda: second.load_state_dict(state)):
            with pytest.raises(ConfigError, match=told):
                enter()
        assert ks(first) == list(range(2, 8))
        first.close()
        assert ks(second) == ([] if acknowledge == "delivered" else list(range(8)))


def test_readers_of_another_number_of_ranks_are_refused_too(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with (
        strict(path, rank=0, world_size=2) as first,
        strict(path, rank=1, world_size=2) as beside,
        strict(path) as all_,
    ):
        assert take(first, 1) + take(beside, 1) == [0, 1]
        with pytest.raises(ConfigError, match=r"rank 0\b.*\brank\b"):
            all_.get_batch()
    with strict(path) as all_:
        assert ks(all_) == list(range(2, 8))


@pytest.mark.skipif(sys.platform != "linux", reason="others wait for the lease")
def test_a_killed_reader_on_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    killed_reader(path, "strict", lease_seconds=600)
    with strict(path, lease_seconds=600) as reader:
        assert ks(reader) == list(range(8))


class Elsewhere:
    """A strict reader of rank 0 on another machine, and another one here; time passes when it is told."""

    def __init__(self, path: Path) -> None:
        self.queue, self.clock = Queue.open(fill(path, 8)), Clock()
        self.theirs, self.ours = self.reader("cthere"), self.reader("chere")

    def reader(self, name: str) -> RankClaim:
        member = QueueMember(self.queue, "c", {}, clock=self.clock)
        member.id = name
        member._enter()
        self.members = {**getattr(self, "members", {}), name: member}
        return RankClaim(SplitFiles(member, "train", 0.01), Rank(0, 1))

    @property
    def claims(self) -> list[str]:
        return [name for name in listed(self.queue.split("train").cursors) if ".by-" in name]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    monkeypatch.setattr(members, "_process_facts", dict)
    return Elsewhere(tmp_path / "q")


def test_a_reader_on_another_machine_that_moves_is_alive(elsewhere: Elsewhere) -> None:
    elsewhere.theirs.take(0.01)
    with pytest.raises(StalledError, match="cthere"):
        elsewhere.ours.take(0.01)
    elsewhere.clock.go(6)
    elsewhere.members["cthere"].beat()
    with pytest.raises(ConfigError, match="cthere"):
        elsewhere.ours.take(0.01)
    assert elsewhere.claims == ["r0of1.by-cthere"]


def test_a_reader_on_another_machine_that_died_is_followed_after_its_lease(elsewhere: Elsewhere) -> None:
    elsewhere.theirs.take(0.01)
    with pytest.raises(StalledError):
        elsewhere.ours.take(0.01)
    elsewhere.clock.go(31)
    elsewhere.ours.take(0.01)
    assert elsewhere.claims == ["r0of1.by-chere"]
    # It was not dead but asleep, and finds out before it delivers another batch.
    assert not elsewhere.theirs.held
    with pytest.raises(StalledError, match="lease_seconds"):
        elsewhere.theirs.check()
    elsewhere.theirs.release()
    elsewhere.ours.release()
    assert elsewhere.claims == []


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
def test_a_process_is_told_by_its_machine_its_number_and_its_start(tmp_path: Path) -> None:
    queue = Queue.open(fill(tmp_path / "q", 4))
    QueueMember(queue, "c", {})._enter()
    (name,) = listed(queue.members)
    facts = orjson.loads((queue.members / name).read_bytes())
    assert is_running(facts) is True
    assert is_running(facts | {"started": "1"}) is False, "another process has its number now"
    assert is_running(facts | {"machine": "another"}) is None
    assert is_running({"pid": os.getpid()}) is None, "written by an earlier version"


def test_a_strict_reader_that_is_dropped_lets_its_rank_go(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    reader = consumer(path, order="strict")
    take(reader, 1)
    reader = consumer(path, order="strict")  # a cell of a notebook that is run again: nobody can close the first one
    assert len(take(reader, 1)) == 1
    reader.close()
