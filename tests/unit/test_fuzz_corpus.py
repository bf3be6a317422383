"""The kept seeds of the fuzz targets and some mutations of them: a value or a PenstockError, nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
from fuzz.harness import TARGETS, check, mutations, seeds, target
from fuzz.target_states import SUBJECTS, own_state, signed, tried

from penstock.errors import PenstockError, ResumeError


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_or_raises_an_error_of_ours(name: str) -> None:
    module, kept = target(name), seeds(name)
    assert kept
    for data in [*kept, *mutations(name, 40)]:
        try:
            check(module, data)
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__} for {data!r}") from error


def test_every_subject_of_the_states_goes_on_from_a_kept_state() -> None:
    went_on = set()
    for subject, state in (pair for data in seeds("states") for pair in tried(data)):
        with subject() as one:
            try:
                one.load_state_dict(state)
            except ResumeError:
                continue  # another subject of the same kind
            went_on.add(subject)
            assert next(iter(one)) is not None
    assert went_on == set(SUBJECTS)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*above, key))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_signed_state_with_values_of_other_types_is_accepted_or_refused_by_name(subject: Callable[[], Any]) -> None:
    own = json.dumps(own_state(subject))
    wrong = cycle(["x", -1, {}, 1 << 63, [], None, {"a": 1}, 1.5])
    for place, value in ((place, next(wrong)) for place in places(json.loads(own)) for _ in range(3)):
        state = holder = json.loads(own)
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value
        with contextlib.suppress(PenstockError), subject() as one:
            one.load_state_dict(signed(state))
            next(iter(one), None)


def test_another_error_is_a_finding() -> None:
    class Broken:
        @staticmethod
        def run(data: bytes) -> None:
            raise KeyError(data)

    with pytest.raises(KeyError):
        check(Broken, b"")
