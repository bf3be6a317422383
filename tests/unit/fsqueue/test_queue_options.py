"""Options of the members of a queue: defaults of each kind, and options that have no effect on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.fsqueue import QueueOptions, QueueSink


@pytest.mark.parametrize(
    "options", [{"durable": True}, {"options": {"durable": True}}, {"options": QueueOptions(durable=True)}]
)
def test_a_sink_waits_without_a_limit_however_its_options_are_given(tmp_path: Path, options: dict) -> None:  # type: ignore[type-arg]
    sink = QueueSink(tmp_path / "queue", **options)
    assert sink.options == QueueOptions(durable=True, timeout_seconds=None)


def test_a_limit_that_is_given_counts_also_where_it_is_the_usual_one(tmp_path: Path) -> None:
    given = QueueOptions(timeout_seconds=float("600"))
    assert given == QueueOptions()
    assert QueueSink(tmp_path / "queue", options=given).options.timeout_seconds == 600
    assert QueueSink(tmp_path / "queue", options=QueueOptions()).options.timeout_seconds is None
