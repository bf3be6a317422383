"""The arrays of a batch against the same made token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.collate import FIELDS, IGNORE, BatchLayout, collate, width
from penstock.batching.supervision import supervised_tokens
from penstock.errors import ConfigError
from penstock.order.samples import Samples

Part = tuple[int, int, int, int]  # source, row, start, length


class Lists:
    """Tokens in lists."""

    def __init__(self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None) -> None:
        self.rows, self.masks = rows, masks

    @property
    def masked(self) -> bool:
        return self.masks is not None

    def copy(self, rows: Any, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        for row, start, length, target in zip(rows, starts, lengths, at):
            out[target : target + length] = self.rows[row][start : start + length]

    def copy_mask(self, rows: Any, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        assert self.masks is not None
        for row, start, length, target in zip(rows, starts, lengths, at):
            out[target : target + length] = self.masks[row][start : start + length]


TABLES = [
    Lists([[100 * row + token for token in range(9)] for row in range(1, 9)], None),
    Lists(
        [[10_000 + 100 * row + token for token in range(9)] for row in range(1, 9)],
        [[(row * token) % 3 != 0 for token in range(9)] for row in range(1, 9)],
    ),
]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    start = draw(st.integers(0, 8))
    return draw(st.integers(0, 1)), draw(st.integers(0, 7)), start, draw(st.integers(0, 9 - start))


samples_lists = st.lists(st.lists(parts(), max_size=3), min_size=1, max_size=5)


def build(samples: list[list[Part]]) -> tuple[Samples, np.ndarray]:
    flat = [part for sample in samples for part in sample]
    source, *rest = (np.array([part[i] for part in flat], np.int64) for i in range(4))
    offsets = np.cumsum([0, *(len(sample) for sample in samples)]).astype(np.int64)
    return Samples(offsets, *rest), source


def naive(samples: list[list[Part]], form: BatchLayout, tokens: int) -> dict[str, Any]:
    """Token by token: (id, label, position, document) for each place of each row."""
    rows: list[list[tuple[int, int, int, int]]] = []
    for sample in samples:
        row: list[tuple[int, int, int, int]] = []
        document = 0
        for source, number, start, length in sample:
            document += length > 0
            for i in range(length):
                token = TABLES[source].rows[number][start + i]
                masks = TABLES[source].masks
                learned = i > 0 and (masks is None or masks[number][start + i])
                row.append((token, token if learned else IGNORE, i, document))
        rows.append(row)
    if form.padding_free:
        flat: list[tuple[int, int, int, int]] = []
        for row in rows:
            before = flat[-1][3] if flat else 0
            flat += [(token, label, at, before + document) for token, label, at, document in row]
        tokens = -(-max(len(flat), 1) // form.multiple) * form.multiple
        rows = [flat]
    padded = []
    for row in rows:
        padding = [(form.pad_id, IGNORE, i, 0) for i in range(tokens - len(row))]
        padded.append(padding + row if form.side == "left" and not form.padding_free else row + padding)
    columns = [np.array([[cell[i] for cell in row] for row in padded]) for i in range(4)]
    found: dict[str, Any] = {"input_ids": columns[0], "labels": columns[1], "position_ids": columns[2]}
    found["loss_mask"] = columns[1] != IGNORE
    found["num_items_in_batch"] = int((columns[1] != IGNORE).sum())
    if form.packed or form.padding_free:
        found["document_ids"] = columns[3]
        begins = [i for i, at in enumerate(columns[2].reshape(-1)) if at == 0]
        found["cu_seqlens"] = np.array([*begins, columns[2].size])
        found["max_seqlen"] = int(np.diff(found["cu_seqlens"]).max())
    if not form.padding_free:
        mask = (columns[3] > 0).astype(int)
        mask[mask.sum(axis=1) == 0, 0 if form.side == "right" else -1] = 1
        found["attention_mask"] = mask
    return found


@given(
    samples_lists,
    st.booleans(),
    st.sampled_from([1, 4, 8]),
    st.sampled_from(["right", "left"]),
    st.sampled_from([None, 32]),
)
def test_a_batch_is_what_a_loop_over_tokens_makes(
    lists: list[list[Part]], padding_free: bool, multiple: int, side: Any, length: int | None
) -> None:
    form = BatchLayout(padding_free=padding_free, multiple=multiple, side=side, packed=True, pad_id=7, length=length)
    samples, sources = build(lists)
    tokens = width(samples, form)
    assert tokens % multiple == 0
    found = collate(samples, sources, TABLES, form, tokens)
    wanted = naive(lists, form, tokens)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    assert found["num_items_in_batch"] == supervised_tokens(samples, sources, TABLES)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.booleans())
def test_rows_of_one_length_take_the_short_way_to_the_same(rows: list[int], packed: bool) -> None:
    lists = [[(0, row, 0, 9)] for row in rows]
    samples, sources = build(lists)
    quick = Samples(samples.offsets, samples.rows, samples.starts, samples.lengths, single=True)
    form = BatchLayout(packed=packed)
    found, wanted = (collate(each, sources, TABLES[:1], form, 9) for each in (quick, samples))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
        assert np.asarray(found[name]).dtype == np.asarray(value).dtype


@given(samples_lists)
def test_what_was_not_asked_for_is_not_there_and_changes_nothing(lists: list[list[Part]]) -> None:
    samples, sources = build(lists)
    tokens = width(samples, BatchLayout(packed=True))
    everything = collate(samples, sources, TABLES, BatchLayout(packed=True), tokens)
    for name in FIELDS:
        form = BatchLayout(packed=True, fields=frozenset({"input_ids", name}))
        some = collate(samples, sources, TABLES, form, tokens)
        assert set(some) <= {"input_ids", name}
        assert np.array_equal(some[name], everything[name])


def test_parts_of_a_batch_by_tokens_are_rows_of_their_own() -> None:
    samples, sources = build([[(0, 1, 0, 3), (0, 2, 0, 5)]])
    form = BatchLayout(split=True)
    found = collate(samples, sources, TABLES, form, width(samples, form))
    assert found["input_ids"].tolist() == [[200, 201, 202, 0, 0], [300, 301, 302, 303, 304]]
    assert "cu_seqlens" not in found


def test_a_batch_without_samples_is_a_blank_row_that_attends_to_itself() -> None:
    empty = Samples(np.zeros(1, np.int64), *(np.zeros(0, np.int64) for _ in range(3)))
    found = collate(empty, np.zeros(0, np.int64), TABLES, BatchLayout(packed=True), 4)
    assert found["input_ids"].tolist() == [[0, 0, 0, 0]]
    assert found["attention_mask"].tolist() == [[1, 0, 0, 0]]
    assert found["num_items_in_batch"] == 0


def test_forms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'label'.*'labels'"):
        BatchLayout(fields=frozenset({"input_ids", "label"}))
    with pytest.raises(ConfigError, match="pad_to_multiple_of"):
        BatchLayout(multiple=0)
    with pytest.raises(ConfigError, match="padding_side"):
        BatchLayout(side="middle")  # type: ignore[arg-type]
