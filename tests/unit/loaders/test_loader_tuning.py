"""What a tuner tries and keeps, by a clock of our own; and work done ahead by threads, which it tunes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import MemoryBudget
from penstock.loaders.mlx_loader import MLXDataLoader
from penstock.loaders.tuner import LoaderTuner, LoaderTuning, TunerSetting
from penstock.pipeline.prefetch import ReadAhead, WorkAhead

START = TunerSetting(workers=4, prefetch=4, chunk=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    tuner: LoaderTuner, clock: Clock, cost: Callable[[TunerSetting], float], train: float = 0.01, most: int = 5000
) -> int:
    """Batches until it is done, if making one costs so much that the trainer waits for it."""
    for number in range(most):
        if tuner.done:
            return number
        waited = cost(tuner.setting)
        clock.now += waited + train
        tuner.saw(waited)
    raise AssertionError("the tuner does not come to an end")


def make(clock: Clock, **more: Any) -> LoaderTuner:
    return LoaderTuner(START, clock=clock, **more)


def test_the_number_of_workers_that_waits_least_is_kept() -> None:
    clock = Clock()
    tuner = make(clock)
    run(tuner, clock, lambda setting: 0.1 / max(min(setting.workers, 4), 0.5))
    assert tuner.setting.workers == 4
    assert {trial.setting.workers for trial in tuner.result.trials} == {0, 1, 2, 4, 8}


def test_of_equally_good_settings_the_cheapest_is_kept() -> None:
    clock = Clock()
    tuner = make(clock)
    run(tuner, clock, lambda setting: 0.05)
    assert tuner.setting == TunerSetting(workers=0, prefetch=4, chunk=1)


def test_where_the_trainer_does_not_wait_nothing_more_is_tried() -> None:
    clock = Clock()
    tuner = make(clock)
    batches = run(tuner, clock, lambda setting: 0.0 if setting.workers >= 2 else 0.05, train=0.1)
    assert tuner.setting.workers == 2
    assert tuner.done
    assert batches < 100
    assert [trial.setting.workers for trial in tuner.result.trials] == [0, 1, 2]


def test_prefetch_and_chunk_are_tried_with_the_best_workers() -> None:
    clock = Clock()
    tuner = make(clock)
    best = TunerSetting(2, 8, 4)

    def cost(setting: TunerSetting) -> float:
        wrong = (setting.workers != 2) + (setting.prefetch != 8) + (setting.chunk != 4)
        return 0.05 * (1 + wrong)

    run(tuner, clock, cost)
    assert tuner.setting == best
    assert tuner.result.done
    assert str(tuner.result).startswith("found workers=2, prefetch=8, chunk=4 after")


def test_slow_batches_do_not_make_it_take_long() -> None:
    clock = Clock()
    tuner = make(clock)
    run(tuner, clock, lambda setting: 2.0 / (1 + setting.workers))
    assert clock.now < 60


def test_a_loop_that_is_left_does_not_spoil_a_trial() -> None:
    clock = Clock()
    tuner = make(clock)
    tuner.saw(0.01)
    clock.now += 3600
    tuner.resume()
    assert not tuner.saw(0.01)
    assert not tuner.result.trials


def test_trials_go_on_over_epochs_that_are_shorter_than_one() -> None:
    clock = Clock()
    tuner = make(clock)
    for _ in range(100):
        clock.now += 3600
        tuner.resume()
        for _ in range(7):
            clock.now += 0.02
            tuner.saw(0.01)
    assert tuner.done
    assert all(trial.seconds < 60 for trial in tuner.result.trials)


def test_nothing_is_tried_where_there_is_one_choice() -> None:
    tuner = make(Clock(), workers=(4,), prefetches=(4,), chunks=(1,))
    assert tuner.done
    assert tuner.setting == START
    assert not tuner.saw(9.0)


SAMPLES = [{"input_ids": [1 + n] * (n % 7 + 1), "labels": n % 2} for n in range(300)]


class Asked:
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return SAMPLES[row]


def rows_of(loader: MLXDataLoader, epochs: int = 3) -> list[list[int]]:
    with loader:
        return [batch.metadata["row"].tolist() for _ in range(epochs) for batch in loader]


def test_a_loader_that_is_tuned_gives_the_same_batches_and_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loaders.tuner._LEAST_SECONDS", 0.0)
    for data in (Asked(), SAMPLES):
        wanted = rows_of(MLXDataLoader(data, batch_size=2))
        loader = MLXDataLoader(data, batch_size=2, tune="auto")
        assert not loader.tuning.done
        assert rows_of(loader) == wanted
        assert loader.tuning.done
        assert len(loader.tuning.trials) >= 2
        assert len({trial.setting for trial in loader.tuning.trials}) >= 2
        assert loader.tuning.setting == loader._engine.setting


def test_a_loader_that_is_not_tuned_says_what_it_uses() -> None:
    with MLXDataLoader(Asked(), batch_size=2, num_workers=3, prefetch_size=5) as loader:
        assert loader.tuning == LoaderTuning(TunerSetting(3, 5, 1), done=True)


# Work done ahead


class Working:
    """Gives back what it is given, and remembers how many were in work at once."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> int:
        with self._lock:
            self.begun.append(number)
            self.now += 1
            self.most = max(self.most, self.now)
        threading.Event().wait(0.002)
        with self._lock:
            self.now -= 1
        return number


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_results_come_in_the_order_of_the_items(count: int, threads: int, most: int, budgeted: bool) -> None:
    budget = MemoryBudget(50) if budgeted else None
    work = WorkAhead(lambda n: n * n, iter(range(count)), threads, most, budget=budget, size=lambda n: n)
    assert list(work) == [n * n for n in range(count)]
    assert budget is None or budget.used == 0


def test_no_more_is_begun_than_is_asked_for() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    work = WorkAhead(lambda n: n, items(), 2, 5)
    assert next(work) == 0
    assert len(taken) == 5
    assert [next(work) for _ in range(3)] == [1, 2, 3]
    assert len(taken) == 8
    work.finish()
    assert list(work) == [4, 5, 6, 7]
    work.close()


def test_an_exception_comes_in_its_place_whether_of_the_work_or_of_the_items() -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise KeyError(number)
        return number

    work = WorkAhead(fail, iter(range(9)), 2, 4)
    assert [next(work) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(work)
    work.close()

    def items() -> Iterator[int]:
        yield from range(2)
        raise OSError("gone")

    work = WorkAhead(lambda n: n, items(), 2, 4)
    assert [next(work), next(work)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(work)
    assert list(work) == []


def test_a_budget_that_is_full_leaves_one_item_in_work() -> None:
    budget, working = MemoryBudget(100), Working()
    work = WorkAhead(working, iter(range(9)), 2, 8, budget=budget, size=lambda n: 90)
    assert list(work) == list(range(9))
    assert working.most == 1
    assert budget.peak == 90
    assert budget.used == 0


def test_one_item_is_in_work_alone_until_it_is_known_how_large_results_are() -> None:
    budget, leave = MemoryBudget(1000), threading.Event()
    begun: list[int] = []

    def work_on(number: int) -> int:
        begun.append(number)
        assert leave.wait(5)
        return number

    work = WorkAhead(work_on, iter(range(40)), 4, 8, budget=budget, size=lambda n: 400, extra=lambda: 50)
    work._begin_more()
    work._begin_more()
    assert len(work._working) == 1
    leave.set()
    assert list(work) == sorted(begun) == list(range(40))
    assert budget.peak <= 1000


def test_items_of_several_things_count_for_as_many_and_none_is_lost_when_it_ends() -> None:
    groups = ([number] * 3 for number in range(20))
    work = WorkAhead(lambda group: group, groups, 2, 8, weight=len)
    assert next(work) == [0, 0, 0]
    work.finish()
    assert list(work) == [[1, 1, 1], [2, 2, 2]]
    assert next(groups) == [3, 3, 3]


def test_a_result_of_several_things_is_charged_until_the_next_is_asked_for() -> None:
    budget = MemoryBudget(1000)
    work = WorkAhead(lambda group: group, iter([[1, 2], [3]]), 1, 2, weight=len, budget=budget, size=lambda _: 100)
    next(work)
    assert budget.used == 100
    next(work)
    assert budget.used == 0
    assert list(work) == []


def test_a_large_item_is_in_work_alone() -> None:
    working = Working()
    work = WorkAhead(working, iter(range(6)), 3, 2, weight=lambda n: 5)
    assert list(work) == list(range(6))
    assert working.most == 1


def test_a_paused_user_of_a_budget_does_not_keep_another_from_its_first_item() -> None:
    budget = MemoryBudget(100)
    paused = WorkAhead(lambda n: n, iter(range(9)), 1, 2, budget=budget, size=lambda n: 90)
    other = WorkAhead(lambda n: n, iter(range(9)), 1, 2, budget=budget, size=lambda n: 90)
    reading = ReadAhead(iter(range(9)), 2, budget=budget, size=lambda n: 90)
    assert next(paused) == 0
    paused._begin_more()
    assert list(other) == list(range(9))
    assert list(reading) == list(range(9))
    assert list(paused) == list(range(1, 9))
    assert budget.used == 0


def test_stopping_does_not_wait_and_what_is_in_work_is_given_back_when_it_is_done() -> None:
    budget, entered, leave = MemoryBudget(1000), threading.Event(), threading.Event()

    def work_on(number: int) -> int:
        entered.set()
        assert leave.wait(5)
        return number

    work = WorkAhead(work_on, iter(range(20)), 1, 4, budget=budget, size=lambda n: 10, extra=lambda: 5)
    work._begin_more()
    assert entered.wait(5)
    work.stop()
    assert budget.used == 5
    leave.set()
    work.close()
    assert budget.used == 0
    assert list(work) == []


def test_closing_waits_for_what_is_in_work_and_gives_the_budget_back() -> None:
    budget, entered, leave = MemoryBudget(1000), threading.Event(), threading.Event()

    def work_on(number: int) -> int:
        entered.set()
        leave.wait(5)
        return number

    work = WorkAhead(work_on, iter(range(20)), 1, 4, budget=budget, size=lambda n: 10)
    work._begin_more()
    assert entered.wait(5)
    leave.set()
    work.close()
    assert budget.used == 0
    assert list(work) == []
