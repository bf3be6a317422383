"""Micro-batches of ranks: each row once, within the limit, the same number on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.distributed.sharding import Balanced
from penstock.errors import ConfigError
from penstock.rl.collate import RolloutForm, assemble
from penstock.rl.minibatches import micro_batches_of
from rollout_tables import make_table

SIDES, FREE = RolloutForm(), RolloutForm(padding="free")


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=24),
    world=st.integers(1, 4),
    form=st.builds(RolloutForm, padding=st.sampled_from(["sides", "free"]), pad_to_multiple_of=st.sampled_from([1, 8])),
    max_tokens=st.integers(48, 200),
    at_least=st.integers(1, 3),
)
def test_micro_batches_fit_are_complete_and_equally_many(
    lengths: list[tuple[int, int]], world: int, form: RolloutForm, max_tokens: int, at_least: int
) -> None:
    lengths = lengths if len(lengths) >= world else lengths * world
    table = make_table(lengths, columns=())
    prompts, responses = table.prompt_ids.lengths, table.response_ids.lengths
    shards = Balanced().shares(table.lengths, world)
    cut = micro_batches_of(prompts, responses, max_tokens, form=form, shards=shards, at_least=at_least)
    assert len({len(batches) for batches in cut}) == 1
    assert len(cut[0]) >= at_least
    for rows, batches in zip(shards, cut, strict=True):
        filled = [batch for batch in batches if len(batch)]
        assert len(filled) == min(len(rows), len(batches))  # nothing is left empty that could have been split
        assert all(len(batch) for batch in batches[: len(filled)])
        assert sorted(np.concatenate(batches).tolist()) == rows.tolist()
        sizes = [assemble(table, form, rows=batch)[0]["input_ids"].size for batch in filled]
        assert max(sizes) <= max_tokens
        assert sizes == sorted(sizes, reverse=True) or form.padding == "free"


def test_a_rank_with_little_to_do_makes_as_many_micro_batches_as_the_others() -> None:
    prompts, responses = np.full(8, 10), np.array([90, 90, 90, 90, 1, 1, 1, 1])
    shards = [np.arange(4), np.arange(4, 8)]
    for form in (SIDES, FREE):
        cut = micro_batches_of(prompts, responses, 100, form=form, shards=shards)
        assert [[len(rows) for rows in batches] for batches in cut] == [[1, 1, 1, 1], [1, 1, 1, 1]]
        alone = micro_batches_of(prompts[4:], responses[4:], 100, form=form)
        assert len(alone[0]) == 1


@pytest.mark.parametrize("form", [SIDES, FREE])
def test_a_rank_with_fewer_rows_than_micro_batches_has_some_with_nothing_in_them(form: RolloutForm) -> None:
    lengths = np.full(3, 10)
    cut = micro_batches_of(lengths, lengths, 20, form=form, shards=[np.array([0, 2]), np.array([1])])
    assert [[rows.tolist() for rows in batches] for batches in cut] == [[[0], [2]], [[1], []]]
    (one,) = micro_batches_of(lengths[:2], lengths[:2], 20, form=form, at_least=4)
    assert sorted(map(len, one)) == [0, 0, 1, 1]


def test_padding_counts_where_there_is_padding() -> None:
    """A long prompt and a long response of two rollouts make a wide batch of both."""
    prompts, responses = [90, 10], [10, 90]
    assert len(micro_batches_of(prompts, responses, 200, form=FREE)[0]) == 1
    assert len(micro_batches_of(prompts, responses, 200, form=SIDES)[0]) == 2
    assert len(micro_batches_of(prompts, responses, 360, form=SIDES)[0]) == 1
    fixed = RolloutForm(max_prompt_length=100, max_response_length=100, fixed=True)
    assert len(micro_batches_of(prompts, responses, 399, form=fixed)[0]) == 2
    assert len(micro_batches_of(prompts, responses, 400, form=fixed)[0]) == 1


def test_a_row_that_is_rounded_up_counts_as_what_it_is_rounded_to() -> None:
    form = RolloutForm(padding="free", pad_to_multiple_of=8)
    assert len(micro_batches_of([5, 5], [5, 5], 24, form=form)[0]) == 1
    assert len(micro_batches_of([5, 5], [5, 5], 23, form=form)[0]) == 2


@pytest.mark.parametrize("form", [SIDES, FREE])
def test_what_no_micro_batch_can_hold_says_so(form: RolloutForm) -> None:
    long = r".*\b5\b.*\b6\b.*\b11\b.*max_tokens=10"
    with pytest.raises(ConfigError, match="row 1" + long):
        micro_batches_of([1, 5], [1, 6], 10, form=form)
    with pytest.raises(ConfigError, match="rollout 'b'" + long):
        micro_batches_of([1, 5], [1, 6], 10, form=form, names=["a", "b"])
    with pytest.raises(ConfigError, match=r"\b0 rollouts"):
        micro_batches_of([1, 1], [1, 1], 10, form=form, shards=[np.arange(2), np.arange(0)])
    with pytest.raises(ConfigError, match="max_tokens"):
        micro_batches_of([1], [1], 0, form=form)
