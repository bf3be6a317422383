from __future__ import annotations

import threading
from pathlib import Path

import pytest
from queues import PER_FILE, Clock, Maker, consumer, fill, ks, names, numbers, provider, reaper_of, take

from penstock.errors import ConfigError
from penstock.fsqueue import Queue
from penstock.fsqueue.layout import Lanes
from penstock.fsqueue.publisher import Limits


def buried(maker: Maker) -> None:
    """The provider has died, and its lease is out."""
    clock = Clock()
    reaper = reaper_of(maker.queue.path, clock)
    reaper.reap()
    clock.go(31.0)
    reaper.reap()


def test_files_are_made_from_the_first_number_on_and_no_more_than_may_wait(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "q", backlog_files=3)
    assert [maker.make() for _ in range(3)] == [0, 1, 2]
    assert maker.publisher.reserve() is None
    with consumer(tmp_path / "q") as reader:
        assert take(reader, 1) == [0]  # a file that is taken waits no more
        assert maker.make() == 3
        assert maker.publisher.reserve() is None
        assert take(reader, 2 * PER_FILE) == list(range(1, 9))
        assert [maker.make() for _ in range(2)] == [4, 5]
        assert maker.publisher.reserve() is None


def test_several_providers_together_keep_to_the_limit(tmp_path: Path) -> None:
    makers = [Maker(tmp_path / "q", backlog_files=10) for _ in range(3)]
    assert makers[0].make() == 0  # the first of them had looked when it was alone
    for _ in range(100):
        for maker in makers:
            number = maker.publisher.reserve()
            if number is not None:
                maker.publish(number)
    assert numbers(tmp_path / "q") == list(range(10))


def test_providers_that_all_look_at_once_exceed_the_limit_by_one_each_at_most(tmp_path: Path) -> None:
    makers = [Maker(tmp_path / "q", backlog_files=4) for _ in range(5)]
    for _ in range(6):
        reserved = [(maker, maker.publisher.reserve()) for maker in makers]
        for maker, number in reserved:
            if number is not None:
                maker.publish(number)
    assert 4 <= len(numbers(tmp_path / "q")) <= 4 + len(makers) - 1


def test_providers_in_threads_and_a_consumer_never_let_more_wait_than_the_limit_and_one_each(tmp_path: Path) -> None:
    path, limit = tmp_path / "q", 5
    providers = [provider(path, backlog_files=limit) for _ in range(3)]
    threads = [threading.Thread(target=each.run, kwargs={"max_batches": 50 * PER_FILE}) for each in providers]
    Queue.create(path, providers[0].description())
    most, found = 0, []
    for thread in threads:
        thread.start()
    with consumer(path) as reader:
        for batch in reader:
            found.append(batch)
            most = max(most, sum(".by-" not in name and name.endswith(".arrow") for name in names(path)))
    for thread in threads:
        thread.join()
    assert sorted(ks(iter(found))) == list(range(50 * PER_FILE))
    assert 1 < most <= limit + len(providers) - 1


def test_bytes_are_limited_as_files_are(tmp_path: Path) -> None:
    probe = Maker(tmp_path / "probe")
    probe.make()
    size = probe.publisher.bytes
    maker = Maker(tmp_path / "q", backlog_files=100, backlog_bytes=int(size * 3.5))
    assert [maker.make() for _ in range(3)] == [0, 1, 2]
    assert maker.publisher.reserve() is None
    fresh = Maker(tmp_path / "q", backlog_files=100, backlog_bytes=int(size * 3.5))
    assert fresh.publisher.reserve() is None, "one that has made nothing yet goes by what is there"
    with consumer(tmp_path / "q") as reader:
        take(reader, 1)
        assert fresh.make() == 3
        assert fresh.publisher.reserve() is None


def test_one_file_is_let_in_whatever_its_size(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "q", backlog_files=100, backlog_bytes=1)
    assert maker.make() == 0
    assert maker.publisher.reserve() is None


def test_a_number_that_a_strict_reader_waits_for_is_made_though_enough_waits(tmp_path: Path) -> None:
    dead, maker = Maker(tmp_path / "q", backlog_files=3), Maker(tmp_path / "q", backlog_files=3)
    assert dead.reserve() == 0
    while (number := maker.publisher.reserve()) is not None:
        maker.publish(number)
    assert 0 not in numbers(tmp_path / "q")
    buried(dead)
    assert maker.make() == 0
    assert maker.publisher.reserve() is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_limits_are_positive_whole_numbers(value: int) -> None:
    with pytest.raises(ConfigError, match="backlog_files"):
        Limits(backlog_files=value)
    with pytest.raises(ConfigError, match="backlog_bytes"):
        Limits(backlog_bytes=value)


def test_a_provider_that_dies_before_it_says_that_a_file_is_published_has_made_it_once(tmp_path: Path) -> None:
    path = tmp_path / "q"
    dead, other = Maker(path), Maker(path)
    number = dead.reserve()
    dead.publisher.lanes.advance = lambda *_: False  # type: ignore[method-assign]
    dead.publish(number)
    assert dead.publisher.lanes.holds(0, dead.member.id), "it is published, and its lane says it is being made"
    buried(dead)
    assert [other.make() for _ in range(3)] == [1, 2, 3]
    assert numbers(path) == [0, 1, 2, 3]
    with consumer(path) as reader:
        assert take(reader, 16) == list(range(16))


def test_what_it_had_published_may_even_be_read_before_it_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "q"
    dead, other = Maker(path), Maker(path)
    number = dead.reserve()
    dead.publisher.lanes.advance = lambda *_: False  # type: ignore[method-assign]
    dead.publish(number)
    other.make()
    with consumer(path) as reader:
        assert take(reader, 5) == [0, 1, 2, 3, 4]
    assert numbers(path) == [1], "file 0 is read and deleted, and so cannot be found"
    buried(dead)
    assert other.make() == 2, "and yet is not made again"


def test_a_number_that_was_not_published_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "q"
    dead, other = Maker(path), Maker(path)
    dead.reserve()
    (path / "train" / f".000000000000~{dead.member.id}.tmp").write_bytes(b"half a fi")
    other.make()
    buried(dead)
    assert names(path) == [name for name in names(path) if name.startswith("000000000001-")], "nothing half made stays"
    made = [other.make() for _ in range(8)]  # one listing serves eight files
    assert sorted(made) == [0, *range(2, 9)]


def test_one_that_was_taken_for_dead_publishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "q"
    late, other = Maker(path), Maker(path)
    number = late.reserve()
    buried(late)
    assert other.make() == 0
    with consumer(path) as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
        assert not late.publish(number)
        assert late.publisher.late == 1
        assert late.publisher.files == 0
    assert names(path) == []
    assert late.make() == 1, "it goes on with the next"


def test_one_that_is_taken_for_dead_in_the_last_moment_publishes_nothing_either(tmp_path: Path) -> None:
    """It has made sure that the number is its own, and falls asleep; when it wakes up, others have seen to it."""
    path = tmp_path / "q"
    late, other = Maker(path), Maker(path)
    number, holds = late.reserve(), late.publisher.lanes.holds

    def held(*given: object) -> bool:
        assert holds(*given)  # type: ignore[arg-type]
        buried(late)
        assert other.make() == 0
        return True

    late.publisher.lanes.holds = held  # type: ignore[method-assign]
    assert not late.publish(number)
    with consumer(path) as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
    assert names(path) == []


def test_one_that_wakes_up_while_others_tidy_up_makes_no_second_file(tmp_path: Path) -> None:
    """Whoever tidies up has looked for the file, and does not know that it is published that moment."""
    path = tmp_path / "q"
    late, other = Maker(path), Maker(path)
    late_number, clock = late.reserve(), Clock()
    reaper = reaper_of(path, clock)
    reaper.reap()
    clock.go(31.0)
    published, release = [], Lanes.release

    half = path / "train" / f".{late_number:012d}~{late.member.id}.tmp"
    half.touch()

    def releasing(lanes: Lanes, number: int, owner: str) -> bool:
        assert not half.exists(), "nor can it end what it had begun"
        published.append(late.publish(late_number))
        return release(lanes, number, owner)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lanes, "release", releasing)
        reaper.reap()
    assert published == [False]
    assert other.make() == 0


def test_an_interrupted_provider_makes_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between publishing and saying so."""
    path, advance, calls = tmp_path / "q", Lanes.advance, []

    def interrupted(lanes: Lanes, number: int, owner: str) -> bool:
        calls.append(number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return advance(lanes, number, owner)

    monkeypatch.setattr(Lanes, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        provider(path).run(max_batches=12)
    assert calls == [0, 1, 1]
    assert numbers(path) == [0, 1]
    assert provider(path).run(max_batches=12).files == {"train": 1}


def test_the_end_of_a_split_cuts_the_last_file_short(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "q", max_batches=6)
    maker.publisher.set_end()
    assert [maker.make() for _ in range(2)] == [0, 1]
    assert list(maker.publisher.batches_in(1)) == [4, 5]
    assert maker.publisher.reserve() is None
    assert maker.publisher.ended
    longer = Maker(tmp_path / "q", max_batches=8)
    with pytest.raises(ConfigError, match=r"\b6\b.*\b4\b"):
        longer.publisher.set_end()


def test_an_end_that_was_not_reached_can_be_moved(tmp_path: Path) -> None:
    first = Maker(tmp_path / "q", max_batches=6)
    first.publisher.set_end()
    assert first.make() == 0
    longer = Maker(tmp_path / "q", max_batches=8)
    longer.publisher.set_end()
    assert longer.make() == 1
    assert longer.publisher.ended
    with consumer(tmp_path / "q") as reader:
        assert ks(reader) == list(range(8))


def test_a_member_counts_what_it_published(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "q")
    maker.make()
    assert maker.member.done == PER_FILE


def test_an_end_below_what_was_made_is_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 40)
    with pytest.raises(ConfigError, match="max_batches=8"):
        provider(path).run(max_batches=8)
    assert provider(path, backlog_files=1000).run(max_batches=40).batches == {"train": 0}
    assert provider(path, backlog_files=1000).run(max_batches=44).batches == {"train": 4}


def test_a_number_that_another_provider_has_taken_since_the_listing_is_not_made_twice(tmp_path: Path) -> None:
    first, second = Maker(tmp_path / "q"), Maker(tmp_path / "q")
    assert [first.make(), second.make(), second.make()] == [0, 1, 2]
    assert [maker.make() for maker in (first, second, first, second)] == [3, 4, 5, 6]
    assert numbers(tmp_path / "q") == list(range(7))


def test_eight_providers_that_listed_at_once_do_not_exceed_the_limit(tmp_path: Path) -> None:
    makers = [Maker(tmp_path / "q", backlog_files=40) for _ in range(8)]
    first = [maker.reserve() for maker in makers]  # each of them knows more numbers now
    for maker, number in zip(makers, first):
        maker.publish(number)
    for maker in makers:
        while (number := maker.publisher.reserve()) is not None:
            maker.publish(number)
    assert numbers(tmp_path / "q") == list(range(40))


def test_a_durable_file_is_on_disk_under_its_name_before_its_lane_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    maker = Maker(tmp_path / "q", durable=True)
    advance = maker.publisher.lanes.advance

    def advancing(number: int, owner: str | None) -> bool:
        events.append("lane")
        return advance(number, owner)

    monkeypatch.setattr("os.fsync", lambda handle: events.append(f"sync of {len(numbers(tmp_path / 'q'))} files"))
    monkeypatch.setattr(maker.publisher.lanes, "advance", advancing)
    maker.make()
    assert events == ["sync of 0 files", "sync of 1 files", "lane"]
