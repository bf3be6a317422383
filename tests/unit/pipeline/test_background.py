"""Work in the background: results, errors, an end."""

from __future__ import annotations

import threading

import pytest

from penstock.pipeline.prefetch import Background


def test_results_and_errors_reach_whoever_asks() -> None:
    background = Background(2)
    assert [background.submit(lambda n=n: n * n).result() for n in range(3)] == [0, 1, 4]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        background.submit(lambda: 1 / 0).result()
    background.close()


def test_closing_waits_for_what_has_begun_and_drops_the_rest() -> None:
    background = Background(1)
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(10)
        return "done"

    first, second = background.submit(work), background.submit(work)
    begun.wait(10)
    threading.Timer(0.05, go.set).start()
    background.close()
    background.close()
    assert first.result() == "done"
    assert second.cancelled()
    assert background.submit(lambda: "again").result() == "again"
    background.close()
