from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st
from queues import PER_FILE, Maker, consumer, fill, ks, names, numbers, provider, take

from penstock.errors import DataError, ResumeError, StalledError
from penstock.files.states import with_checksum
from penstock.fsqueue import DatasetConsumer, Queue, purge
from penstock.fsqueue.layout import RankCursor, SplitDirectory, list_cursors


def ranks(path: Path, world: int, acknowledge: str = "delivered") -> list[DatasetConsumer]:
    return [
        consumer(path, order="strict", rank=rank, world_size=world, acknowledge=acknowledge) for rank in range(world)
    ]


def step(world: list[DatasetConsumer], count: int = 1) -> list[int]:
    """So many steps of all ranks, in the order of the whole."""
    return [k for _ in range(count) for rank in world for k in take(rank, 1)]


def close(world: list[DatasetConsumer]) -> None:
    for rank in world:
        rank.close()


def crashed(world: list[DatasetConsumer]) -> None:
    for rank in world:
        rank._member.leave()
        rank._readers.clear()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("batches", [24, 23, 30])
def test_ranks_together_read_everything_in_order_and_stop_after_the_same_step(
    world: int, batches: int, tmp_path: Path
) -> None:
    path = fill(tmp_path / "q", batches)
    readers, steps = ranks(path, world), batches // world
    assert step(readers, steps) == list(range(steps * world))
    assert [ks(reader) for reader in readers] == [[] for _ in readers]
    close(readers)
    with consumer(path, order="strict") as rest:
        assert ks(rest) == list(range(steps * world, batches)), "what was too little for a step is still there"
    assert names(path) == []


def test_ranks_in_threads_read_what_they_would_have_read_alone(tmp_path: Path) -> None:
    path, world = tmp_path / "q", 2
    source = provider(path, backlog_files=3)
    maker = Maker(path)
    maker.publisher.max_batches = 120
    maker.publisher.set_end()
    found: list[list[int]] = [[] for _ in range(world)]

    def read(rank: int) -> None:
        with consumer(path, order="strict", rank=rank, world_size=world) as reader:
            found[rank] += ks(reader)

    threads = [threading.Thread(target=read, args=[rank]) for rank in range(world)]
    threads.append(threading.Thread(target=source.run, kwargs={"max_batches": 120}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(rank, 120, world)) for rank in range(world)]


def test_an_end_that_is_set_while_a_rank_waits_is_the_same_for_all(tmp_path: Path) -> None:
    """The file that comes is shorter than a step."""
    path = tmp_path / "q"
    Maker(path)
    found: list[list[int]] = [[], []]
    readers = ranks(path, 2)
    threads = [threading.Thread(target=lambda r=r: found[r].extend(ks(readers[r]))) for r in range(2)]
    for thread in threads:
        thread.start()
    while len(list((path / "members").iterdir())) < 2:
        pass
    provider(path).run(max_batches=PER_FILE - 1)
    for thread in threads:
        thread.join()
    close(readers)
    assert found == [[0], [1]]


def test_the_state_is_one_place_the_same_on_every_rank(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    readers = ranks(path, 3)
    step(readers, 3)
    states = [json.dumps(reader.state_dict()) for reader in readers]
    assert len(set(states)) == 1
    assert json.loads(states[0])["splits"] == {"train": {"position": 9}}
    close(readers)


@settings(max_examples=15, deadline=None)
@given_that(
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    crash=st.booleans(),
    commit=st.booleans(),
)
def test_runs_of_any_number_of_ranks_go_on_from_each_other_s_states(
    tmp_path_factory: pytest.TempPathFactory, worlds: list[int], steps: list[int], crash: bool, commit: bool
) -> None:
    path = fill(tmp_path_factory.mktemp("q") / "q", 80)
    state, found = None, []
    for world, count in zip(worlds, steps):
        readers = ranks(path, world, "committed")
        if state is not None:
            for reader in readers:
                reader.load_state_dict(state)
        found += step(readers, count)
        for reader in readers:
            reader.counts()
        state = json.loads(json.dumps(readers[-1].state_dict()))
        if commit:
            for reader in readers:
                reader.commit(state)
        step(readers, 2)  # what a run does after its last checkpoint is forgotten
        (crashed if crash else close)(readers)
    assert found == list(range(len(found)))
    assert state["splits"]["train"]["position"] == len(found)


def test_every_state_since_the_last_commit_can_be_gone_back_to(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 20)
    with consumer(path, order="strict", acknowledge="committed") as reader:
        states = []
        for k in range(12):
            assert take(reader, 1) == [k]
            states.append(reader.state_dict())
        committed = 6
        reader.commit(states[committed - 1])
    assert numbers(path)[0] == committed // PER_FILE
    for position, state in enumerate(states, start=1):
        shutil.copytree(path, copy := tmp_path / str(position))
        with consumer(copy, order="strict", acknowledge="committed") as again:
            if position < committed:
                with pytest.raises(ResumeError, match=rf"{position}.*{committed}"):
                    again.load_state_dict(state)
            else:
                again.load_state_dict(state)
                assert ks(again) == list(range(position, 20))
    with consumer(path, order="strict") as stateless:
        assert ks(stateless) == list(range(committed, 20)), "without a state it goes on behind the last commit"


def test_files_stay_until_every_rank_has_committed(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    readers = ranks(path, 2, "committed")
    step(readers, 8)
    state = readers[0].state_dict()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    readers[0].commit(state)
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    readers[1].commit(state)
    assert numbers(path) == [4, 5]
    with pytest.raises(ResumeError, match="'train'"):
        readers[0].commit(with_checksum({**state, "splits": {"train": {"position": 18}}}))
    close(readers)


def test_delivered_files_stay_until_every_rank_is_past_them(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    readers = ranks(path, 2)
    step(readers, 1)
    take(readers[0], 7)
    assert numbers(path) == [0, 1, 2, 3, 4, 5], "rank 1 is in the first file still"
    take(readers[1], 5)
    assert numbers(path) == [2, 3, 4, 5]
    close(readers)


def test_a_rank_that_loads_its_state_again_has_still_committed_what_it_had(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    first, second = ranks(path, 2, "committed")
    take(second, 1)
    take(first, 8)
    ended = first.state_dict()
    first.commit(ended)
    first.close()
    with consumer(path, order="strict", acknowledge="committed", rank=0, world_size=2) as again:
        again.load_state_dict(ended)  # it has nothing more to do
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    take(second, 7)
    second.commit()
    second.close()
    assert numbers(path) == [4, 5]
    with consumer(path, order="strict") as stateless:
        assert ks(stateless) == list(range(16, 24))


def test_a_rank_that_goes_back_has_committed_nothing_that_it_reads_again(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    first, second = ranks(path, 2, "committed")
    step([first, second], 4)
    earlier = first.state_dict()
    take(first, 4)
    first.commit()
    crashed([first, second])
    readers = ranks(path, 2, "committed")
    for reader in readers:
        reader.load_state_dict(earlier)
    take(readers[1], 8)
    readers[1].commit()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    assert take(readers[0], 2) == [8, 10]
    close(readers)


def test_files_of_a_rank_that_went_on_alone_go_with_the_next_commit(tmp_path: Path) -> None:
    """A rank that was started again behind one that had ended, or that died between its state and its commit, leaves
    files that all ranks are beyond.
    """
    path = fill(tmp_path / "q", 24)
    first, second = ranks(path, 2, "committed")
    step([first, second], 4)
    saved = second.state_dict()
    take(first, 4)
    first.commit()
    first.close()
    crashed([second])
    with consumer(path, order="strict", acknowledge="committed", rank=1, world_size=2) as again:
        again.load_state_dict(saved)
        take(again, 4)
        ended = again.state_dict()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    readers = ranks(path, 2, "committed")
    for reader in readers:
        reader.load_state_dict(ended)
    assert numbers(path) == [0, 1, 2, 3, 4, 5], "loading does not commit"
    for reader in readers:
        reader.commit()
    assert numbers(path) == [4, 5]
    close(readers)


def test_a_rank_that_comes_late_finds_everything(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 24)
    first, second = ranks(path, 2)
    assert take(first, 12) == list(range(0, 24, 2))
    assert take(second, 3) == [1, 3, 5]
    assert numbers(path) == [0, 1, 2, 3, 4, 5], "the first one's cursor went when the second began"
    first.close()
    assert take(second, 9) == list(range(7, 24, 2))
    second.close()
    assert names(path) == []


def test_what_waits_is_what_has_not_been_read(tmp_path: Path) -> None:
    """With files that stay until the commit, the provider goes on all the same."""
    path = tmp_path / "q"
    maker = Maker(path, backlog_files=2)
    with consumer(path, order="strict", acknowledge="committed") as reader:
        for _ in range(2):
            maker.make()
        assert maker.publisher.reserve() is None
        take(reader, 9 - PER_FILE)
        assert maker.make() == 2
        assert maker.publisher.reserve() is None
        assert numbers(path) == [0, 1, 2]


def test_a_file_that_somebody_deleted_is_missed_by_name(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    (path / "train" / names(path)[1]).unlink()
    with consumer(path, order="strict") as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
        with pytest.raises(DataError, match="'train'"):
            reader.get_batch()


def test_a_file_that_was_renamed_between_two_looks_is_found(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    with consumer(path, order="strict", acknowledge="committed") as reader:
        take(reader, 1)
        target = path / "train" / names(path)[1]
        target.rename(target.with_name(target.name.replace("-r0-", "-r1-")))
        assert ks(reader) == list(range(1, 12))


def test_cursors_hold_the_position_of_every_rank(tmp_path: Path) -> None:
    directory = SplitDirectory(tmp_path)
    directory.cursors.mkdir()
    assert directory.read_floor() == 0
    (directory.cursors / RankCursor(0, 2, 12, 8).name).touch()
    assert directory.done_floor(2) == 0, "rank 1 has no cursor"
    (directory.cursors / RankCursor(1, 2, 9, 9).name).touch()
    assert (directory.read_floor(), directory.done_floor(2), directory.done_floor(3)) == (9, 8, 0)
    cursor = RankCursor(0, 2, 12, 8)
    assert RankCursor.parse(cursor.name) == cursor
    assert cursor.name == "r0of2~read12~done8"
    assert RankCursor.parse("r0of2~read12") is None
    (directory.cursors / RankCursor(0, 2, 11, 7).name).touch()
    assert directory.done_floor(2) == 7, "of two names of one rank the earlier counts"


def test_cursors_of_another_run_are_removed_and_those_of_this_run_come_back(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    cursors = path / "train" / "cursors"
    first, second = (consumer(path, order="strict", rank=rank, world_size=2) for rank in range(2))
    state = {"position": 4}
    with first, second:
        first._reader("train").load(state)
        second._reader("train").load({"position": 3})
        assert [cursor.rank for cursor in list_cursors(cursors)] == [1], "the other was past it: that is of another run"
        take(first, 1)
        take(first, 1)
        assert len(list_cursors(cursors)) == 2, "it comes back with its next file"
        second._reader("train").load({"position": 8})
        assert len(list_cursors(cursors)) == 2, "the other is not past that"
    with consumer(path, order="strict") as alone:
        take(alone, 1)
        assert [cursor.world for cursor in list_cursors(cursors)] == [1], "of another number of ranks"


@pytest.mark.parametrize(("world", "per_file", "backlog"), [(3, 8, 1), (8, 1, 4), (2, 1, 1), (5, 3, 1)])
def test_ranks_that_wait_for_each_other_get_the_files_of_a_step_however_small_the_backlog(
    world: int, per_file: int, backlog: int, tmp_path: Path
) -> None:
    path = tmp_path / "q"
    maker = provider(path, batches_per_file=per_file, backlog_files=backlog)
    at_work = threading.Thread(target=maker.run)
    at_work.start()
    try:
        while not path.exists():
            time.sleep(0.001)
        readers = [consumer(path, order="strict", rank=rank, world_size=world) for rank in range(world)]
        for step in range(7):  # all of them take a step before one takes the next, as training does
            assert [take(reader, 1) for reader in readers] == [[step * world + rank] for rank in range(world)]
    finally:
        maker.stop()
        at_work.join()


def test_a_name_without_a_file_is_waited_for_no_longer_than_was_asked(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    target = path / "train" / names(path)[0]
    target.unlink()
    target.symlink_to(tmp_path / "nowhere")
    with (
        consumer(path, order="strict", timeout_seconds=0.2) as reader,
        pytest.raises(StalledError, match=r"\b0\.2\b"),
    ):
        reader.get_batch()


def test_a_state_far_ahead_of_a_new_queue_has_only_what_it_needs_made(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path, order="strict", acknowledge="committed") as reader:
        state = reader.state_dict()
        take(reader, 1)
        state = reader.state_dict()
        state["splits"]["train"]["position"] = 4001
        purge(path)
        maker = provider(path, backlog_files=4)
        Queue.create(path, maker.description())
    with consumer(path, order="strict", acknowledge="committed") as reader:
        reader.load_state_dict(with_checksum(state))
        at_work = threading.Thread(target=maker.run)
        at_work.start()
        assert take(reader, 2) == [4001, 4002]
        maker.stop()
        at_work.join()
    assert min(numbers(path)) == 1000
    assert len(numbers(path)) <= 5
