"""Time for which a process was held by others does not count as that of a stage."""

from __future__ import annotations

from penstock.pipeline.control import AwakeTime


def test_time_for_which_the_process_was_held_does_not_count() -> None:
    awake = AwakeTime(0.0, 0.0)
    awake.look(0.05, 0.05)
    awake.look(600.0, 0.06)  # it was stopped for ten minutes
    awake.look(600.05, 0.1)
    assert awake.since(0.04) < 1.0
    assert awake.since(600.0) > 0.0


def test_time_in_which_c_code_kept_the_interpreter_counts() -> None:
    awake = AwakeTime(0.0, 0.0)
    awake.look(600.0, 590.0)
    assert awake.since(1.0) == 599.0


def test_time_in_which_the_process_waits_and_looks_counts() -> None:
    awake = AwakeTime(0.0, 0.0)
    for tick in range(1, 1001):
        awake.look(tick * 0.5, 0.0)
    assert awake.since(100.0) == 400.0
