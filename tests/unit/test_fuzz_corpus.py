"""The kept seeds of the fuzz targets and some mutations of them: a value or a PenstockError, nothing else."""

from __future__ import annotations

import pytest
from fuzz.harness import TARGETS, check, mutations, seeds, target


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_or_raises_an_error_of_ours(name: str) -> None:
    module, kept = target(name), seeds(name)
    assert kept
    for data in [*kept, *mutations(name, 40)]:
        try:
            check(module, data)
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__} for {data!r}") from error


def test_another_error_is_a_finding() -> None:
    class Broken:
        @staticmethod
        def run(data: bytes) -> None:
            raise KeyError(data)

    with pytest.raises(KeyError):
        check(Broken, b"")
