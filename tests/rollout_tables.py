"""Rollout tables for tests, made from lists or by a Hypothesis strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged
from penstock.rl.rollout import RolloutTable

TOKENWISE = {"logprobs": "old_log_probs", "ref_logprobs": "ref_log_probs", "values": "values"}


def objects(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def make_table(
    lengths: Sequence[tuple[int, int]],
    seed: int = 0,
    *,
    dtype: Any = np.int64,
    columns: Sequence[str] = tuple(TOKENWISE),
    all_learned: bool = False,
    per_group: int = 2,
) -> RolloutTable:
    """Rollouts with prompts and responses of these lengths; no token id is 0, nor any number."""
    rng = np.random.default_rng(seed)
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    count = len(lengths)

    def ids(sizes: list[int]) -> Ragged:
        return Ragged.of([rng.integers(1, 1000, size) for size in sizes], dtype)

    def numbers() -> Ragged:
        return Ragged.of([rng.normal(size=size) for size in responses], np.float32)

    masks = [rng.random(size) < 2 for size in responses] if all_learned else [rng.random(r) < 0.7 for r in responses]
    return RolloutTable(
        prompt_ids=ids(prompts),
        response_ids=ids(responses),
        loss_mask=Ragged.of(masks, np.bool_),
        rewards=rng.normal(size=count).astype(np.float32).astype(np.float64),
        groups=objects([f"g{row // per_group}" for row in range(count)]),
        versions=rng.integers(0, 5, count),
        tokenized=rng.random(count) < 0.5,
        ids=objects([f"r{row}" for row in range(count)]),
        finish_reasons=objects(["stop"] * count),
        metadata=objects([{}] * count),
        **{name: numbers() for name in columns},
    )


@st.composite
def tables(draw: st.DrawFn, *, max_rows: int = 6, dtype: Any = np.int64) -> RolloutTable:
    """Any table; prompts have a token at least, responses may be empty."""
    sizes = st.tuples(st.integers(1, 7), st.integers(0, 9))
    lengths = draw(st.lists(sizes, min_size=1, max_size=max_rows))
    columns = draw(st.sets(st.sampled_from([*TOKENWISE, "token_rewards"])))
    return make_table(lengths, draw(st.integers(0, 99)), dtype=dtype, columns=sorted(columns))
