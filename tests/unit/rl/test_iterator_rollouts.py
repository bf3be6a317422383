"""Rollouts of an iterator that has no end: batches come as it makes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import ConfigError, ResumeError
from penstock.loaders.rollout import RolloutDataLoader


def rollout(prompt: int, number: int, **more: Any) -> dict[str, Any]:
    ids = {"prompt_ids": [prompt, 8], "response_ids": list(range(1, 3 + number))}
    return {**ids, "reward": float(number), "id": f"{prompt}.{number}", **more}


class Endless:
    """Four rollouts of each prompt, prompt after prompt."""

    def __init__(self, named: bool = False) -> None:
        self.named, self.made = named, 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        for prompt in itertools.count():
            for number in range(4):
                self.made += 1
                yield rollout(prompt, number, **({"group": prompt} if self.named else {}))


def make(source: Any, **more: Any) -> RolloutDataLoader:
    given = {"rollout_batch_size": 8, "batch_size": 8, "backend": "numpy", "estimator": "grpo", "shuffle": False}
    return RolloutDataLoader(source, **{**given, **more})


def names(batches: Any) -> list[str]:
    return sorted(name for batch in batches for name in batch.ids)


def prompts(*numbers: int) -> list[str]:
    return sorted(f"{prompt}.{number}" for prompt in numbers for number in range(4))


@pytest.mark.parametrize("named", [False, True])
def test_batches_come_while_an_endless_generator_makes_rollouts(named: bool) -> None:
    endless = Endless(named)
    loader = make(endless())
    assert names(loader) == prompts(0, 1)
    assert endless.made == 9, "one more says that the last group is complete"
    assert names(loader) == prompts(2, 3)
    assert not loader.ended


def test_the_advantages_are_those_of_a_list() -> None:
    endless = Endless()
    listed = make(list(itertools.islice(Endless()(), 8)))
    live, known = next(iter(make(endless()))), next(iter(listed))
    assert live.metadata["advantages"].tolist() == known.metadata["advantages"].tolist()


def test_a_group_of_a_known_size_needs_no_further_rollout() -> None:
    endless = Endless(named=True)
    loader = make(endless(), group_size=4)
    assert names(loader) == prompts(0, 1)
    assert endless.made == 8


def test_items_may_be_whole_groups_and_the_end_is_an_end() -> None:
    groups = ([rollout(prompt, number) for number in range(4)] for prompt in range(3))
    loader = make(groups)
    assert [names(loader) for _ in range(3)] == [prompts(0, 1), prompts(2), []]
    assert loader.ended


def test_a_function_that_makes_the_iterator_resumes_anywhere() -> None:
    endless = Endless()
    loader = make(endless, batch_size=4)
    assert names(loader) == prompts(0, 1)
    batches = iter(loader)
    first = next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    again = make(Endless(), batch_size=4)
    again.load_state_dict(state)
    assert names([first, *again]) == prompts(2, 3)
    with pytest.raises(ResumeError, match="ended after 1"):
        make(lambda: itertools.islice(Endless()(), 4), batch_size=4).load_state_dict(state)
    again.reset()
    assert names(again) == prompts(0, 1)


def test_a_bare_iterator_with_rollouts_left_gives_no_state() -> None:
    loader = make(Endless()())
    assert names(loader) == prompts(0, 1)
    assert names(loader) == prompts(2, 3)
    with pytest.raises(ConfigError, match="pass a function"):
        loader.state_dict()
    loader.reset()
    with pytest.raises(ResumeError, match="pass a function"):
        next(iter(loader))


def test_ranks_do_not_share_an_iterator() -> None:
    with pytest.raises(ConfigError, match="RolloutQueue"):
        make(Endless()(), rank=0, world_size=2)


def test_without_a_size_an_iterator_is_read_to_its_end_and_repeats() -> None:
    for rollouts in (itertools.islice(Endless()(), 12), lambda: itertools.islice(Endless()(), 12)):
        loader = make(rollouts, rollout_batch_size=None, batch_size=12)
        assert names(loader) == names(loader) == prompts(0, 1, 2)
