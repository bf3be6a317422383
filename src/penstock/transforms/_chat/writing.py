"""The texts of a batch of chats with their spans: by layouts where these are proven, by the template where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from penstock.transforms._chat.conversion import good_rows
from penstock.transforms._chat.flattening import flat_conversations, flat_messages
from penstock.transforms._chat.formats import conversations, sides_of
from penstock.transforms._chat.layouts import Flat
from penstock.transforms._chat.messages import Conversation
from penstock.transforms._chat.problems import RowProblem
from penstock.transforms._chat.proofs import Layouts
from penstock.transforms._chat.rendering import Renderer, prompt_ends
from penstock.transforms._chat.spans import Ints, Spans, as_texts, read_marks

__all__ = ["Written", "merged", "written"]

Side = tuple[Conversation, ...]
Written = tuple[Spans, Ints]
"""Texts with their spans, and for each span where its prompt ends in the column; -1 where there is none."""


def written(
    layouts: Layouts, batch: pa.RecordBatch, name: str, columns: Mapping[str, str] | None = None
) -> Iterator[Written]:
    """The texts of a batch, for each side of its rows. Raises the problem of the first row that has one."""
    if columns is None and layouts.possible:
        flat = flat_messages(batch, name)
        if flat is not None:
            yield _written(layouts, flat, lambda rows: _read(batch, name, rows))
            return
    sides = list(zip(*good_rows(conversations(batch, name, columns)))) or [()] * len(sides_of(name))
    for side in sides:
        flat = flat_conversations(side) if layouts.possible else None
        if flat is None:
            yield _rendered(layouts.renderer, side, np.arange(len(side)))
        else:
            yield _written(layouts, flat, lambda rows, side=side: [side[row] for row in rows.tolist()])  # type: ignore[misc]


def _written(layouts: Layouts, flat: Flat, read: Callable[[Ints], Sequence[Conversation]]) -> Written:
    fast, spans, prompts = layouts.fill(flat)
    others = np.ones(len(flat.kinds), np.bool_)
    others[fast] = False
    if not others.any():
        return spans, prompts
    slow = np.flatnonzero(others)
    rendered = _rendered(layouts.renderer, read(slow), slow)
    return merged([(fast, (spans, prompts)), (slow, rendered)]) if len(fast) else rendered


def _read(batch: pa.RecordBatch, name: str, rows: Ints) -> list[Conversation]:
    """Some rows of a batch."""
    taken = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
    made = conversations(taken, name)
    return [row[0] for row in good_rows([_at(row, n) for row, n in zip(made, rows.tolist())])]


def _rendered(renderer: Renderer, given: Sequence[Conversation], rows: Ints) -> Written:
    """Conversations that are these rows of a batch, by the template."""
    marked = []
    for row, conversation in zip(rows.tolist(), given):
        try:
            marked.append(renderer.render(conversation))
        except RowProblem as problem:
            raise problem.at(row) from problem
    try:
        spans = read_marks([row.text for row in marked])
    except RowProblem as problem:
        raise problem.at(int(rows[problem.row or 0])) from problem
    return spans, prompt_ends(marked, spans)


def _at(row: Side | RowProblem, number: int) -> Side | RowProblem:
    return row.at(number) if isinstance(row, RowProblem) else row


def merged(parts: Sequence[tuple[Ints, Written]]) -> Written:
    """Texts of different rows of a batch as one column in the order of the rows, with their spans."""
    of_part = [rows for rows, _ in parts]
    order = np.argsort(np.concatenate(of_part))
    lengths = np.concatenate([np.diff(spans.bounds) for _, (spans, _) in parts])[order]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    texts = pa.concat_arrays([spans.texts.cast(pa.large_string()) for _, (spans, _) in parts]).take(pa.array(order))
    rows, starts, stops, ends = [], [], [], []
    for numbers, (spans, prompts) in parts:
        moved = bounds[numbers] - spans.bounds[:-1]
        shift = moved[spans.rows]
        rows.append(numbers[spans.rows])
        starts.append(spans.starts + shift)
        stops.append(spans.stops + shift)
        ends.append(np.where(prompts < 0, -1, prompts + shift))
    by_row = np.argsort(np.concatenate(rows), kind="stable")
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[: bounds[-1]]
    found = [np.concatenate(each)[by_row] for each in (rows, starts, stops, ends)]
    return Spans(as_texts(data, bounds), bounds, found[0], found[1], found[2]), found[3]
