from __future__ import annotations

import threading
from pathlib import Path

import pytest
from queues import listed

from penstock.fsqueue.layout import Lane, Lanes


@pytest.fixture
def lanes(tmp_path: Path) -> Lanes:
    made = Lanes(tmp_path / "lanes", 4)
    made.create()
    return made


def test_numbers_are_handed_out_from_the_lowest_and_each_once(lanes: Lanes) -> None:
    made = []
    for _ in range(10):
        lane = next(lane for lane in lanes.all() if lane.owner is None)
        assert lanes.take(lane, "p1")
        assert not lanes.take(lane, "p2")
        assert lanes.holds(lane.number, "p1")
        assert lanes.advance(lane.number, "p1")
        assert not lanes.advance(lane.number, "p1")
        made.append(lane.number)
    assert made == list(range(10))


def test_a_number_that_was_given_up_is_made_by_another(lanes: Lanes) -> None:
    assert lanes.take(Lane(0), "p1")
    assert lanes.release(0, "p1")
    assert not lanes.release(0, "p1")
    assert lanes.take(lanes.all()[0], "p2")
    assert lanes.all()[0] == Lane(0, "p2")


def test_a_lane_is_seen_to_be_past_a_number_only_when_it_is(lanes: Lanes) -> None:
    assert not lanes.advanced(2)
    assert lanes.take(Lane(2), "p1")
    assert not lanes.advanced(2)
    assert lanes.advance(2, "p1")
    assert [number for number in range(10) if lanes.advanced(number)] == [2]
    assert lanes.take(Lane(6), "p2")
    assert not lanes.advanced(2)  # a listing says so
    assert lanes.passed(2)


def test_a_listing_with_more_than_the_lanes_gives_each_lane_once_and_the_end(lanes: Lanes) -> None:
    (lanes.path / Lane(5).name).touch()  # as during a rename, when both names may be seen
    (lanes.path / "notes").touch()
    lanes.set_end(7)
    assert lanes.all() == [Lane(0), Lane(2), Lane(3), Lane(5)]
    assert lanes.end() == 7
    assert not lanes.ended(1)
    (lanes.path / Lane(1).name).unlink()
    for number in (0, 2, 3, 4, 5, 6):
        lanes.advance(number, None)
    assert lanes.ended(1)


def test_a_lane_that_the_file_system_cannot_look_at_is_not_taken_for_lost(lanes: Lanes) -> None:
    assert not lanes.holds(0, "p1")
    with pytest.raises(OSError, match="too long"):
        lanes.holds(0, "p" * 5000)


def test_many_threads_make_every_number_once(lanes: Lanes) -> None:
    made: list[int] = []

    def work(owner: str) -> None:
        while len(made) < 200:
            for lane in lanes.all():
                if lane.owner is None and lanes.take(lane, owner):
                    made.append(lane.number)
                    assert lanes.advance(lane.number, owner)
                    break

    threads = [threading.Thread(target=work, args=[f"p{n}"]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(set(made))
    for place in range(4):
        mine = sorted(number for number in made if number % 4 == place)
        assert mine == list(range(place, place + 4 * len(mine), 4)), "none is left out"


def test_a_split_has_ended_when_every_lane_is_past_the_end(lanes: Lanes) -> None:
    assert lanes.end() is None
    assert not lanes.ended(2)
    lanes.set_end(5)  # files 0, 1 and, with one batch, 2
    for number in range(3):
        assert not lanes.ended(2)
        assert lanes.take(Lane(number), "p1")
        assert not lanes.ended(2)
        assert lanes.advance(number, "p1")
    assert lanes.ended(2)
    lanes.set_end(9)
    assert lanes.end() == 9
    assert not lanes.ended(2)
    lanes.set_end(None)
    assert lanes.end() is None


def test_a_lane_that_a_listing_missed_is_no_end(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes.set_end(4)
    for number in (1, 2, 3):
        assert lanes.take(Lane(number), "p1")
        assert lanes.advance(number, "p1")
    whole, missed = listed(lanes.path), []

    def listing(path: Path) -> list[str]:
        missed.append(path)
        return [name for name in whole if name != Lane(0).name] if len(missed) < 3 else whole

    monkeypatch.setattr("penstock.fsqueue.layout.os.listdir", listing)
    assert [lane.number for lane in lanes.all()] == [0, 5, 6, 7]
    missed.clear()
    assert not lanes.ended(1)


def test_a_lane_that_is_gone_for_good_is_no_end_either(lanes: Lanes) -> None:
    lanes.set_end(0)
    assert lanes.ended(1)
    (lanes.path / Lane(0).name).unlink()
    assert not lanes.ended(1)
