"""The texts of a batch of chats with their spans: by layouts where these are proven, by the template where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.chat.compile.flat import flat_conversations, flat_messages
from penstock.chat.compile.layouts import Flat
from penstock.chat.compile.prover import Layouts
from penstock.chat.formats import conversations, sides_of
from penstock.chat.messages import ROLES, Conversation
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer, foreign_text
from penstock.chat.rendered import Marked, prompt_ends
from penstock.chat.spans import Flags, Ints, Spans, as_texts, read_marks
from penstock.chat.to_messages import good_rows

__all__ = ["RenderedBatch", "as_written", "merged", "written"]

Side = tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class RenderedBatch:
    """Texts with their spans."""

    spans: Spans
    prompts: Ints
    """For each span where its prompt ends in the column; -1 where there is none."""
    foreign: dict[int, str] = field(default_factory=dict)
    """For rows in which a message has the text of a special token, where that is."""
    lost: Counter[str] = field(default_factory=Counter)
    """How many parts of each kind are not in the texts, though they were allowed to be lost."""


def written(
    layouts: Layouts, batch: pa.RecordBatch, name: str, columns: Mapping[str, str] | None = None
) -> Iterator[RenderedBatch]:
    """The texts of a batch, for each side of its rows. Raises the problem of the first row that has one."""
    if columns is None and layouts.possible:
        flat = flat_messages(batch, name)
        if flat is not None:
            yield _written(layouts, flat, lambda rows: _read(batch, name, rows))
            return
    heading = layouts.renderer.template.input_heading
    made = good_rows(conversations(batch, name, columns, input_heading=heading))
    sides = list(zip(*made)) or [()] * len(sides_of(name))
    for side in sides:
        flat = flat_conversations(side) if layouts.possible else None
        if flat is None:
            yield _rendered(layouts.renderer, side, np.arange(len(side)))
        else:
            yield _written(layouts, flat, lambda rows, side=side: [side[row] for row in rows.tolist()])  # type: ignore[misc]


def _written(layouts: Layouts, flat: Flat, read: Callable[[Ints], Sequence[Conversation]]) -> RenderedBatch:
    fast, spans, prompts = layouts.fill(flat)
    others = np.ones(len(flat.kinds), np.bool_)
    others[fast] = False
    filled = RenderedBatch(spans, prompts, _foreign(layouts.renderer, flat, others))
    if not others.any():
        return filled
    slow = np.flatnonzero(others)
    by_template = _rendered(layouts.renderer, read(slow), slow)
    return merged([(fast, filled), (slow, by_template)]) if len(fast) else by_template


def _foreign(renderer: Renderer, flat: Flat, others: Flags) -> dict[int, str]:
    """Where a message has the text of a special token, for all rows but the others."""
    if not renderer.specials:
        return {}
    quoted = (text.replace("\\E", "\\E\\\\E\\Q") for text in renderer.specials)
    pattern = "|".join(f"\\Q{text}\\E" for text in quoted)
    found = np.flatnonzero(pc.match_substring_regex(flat.contents, pattern).to_numpy(zero_copy_only=False))
    rows = np.searchsorted(flat.offsets, found, side="right") - 1
    foreign: dict[int, str] = {}
    for row, at in zip(rows.tolist(), found.tolist()):
        kind, message = flat.kinds[row], at - int(flat.offsets[row])
        if row in foreign or others[row] or kind is None:
            continue
        said = renderer.special_text.search(flat.contents[at].as_py())
        foreign[row] = foreign_text(message, ROLES[kind[message]], said[0] if said else "")
    return foreign


def _read(batch: pa.RecordBatch, name: str, rows: Ints) -> list[Conversation]:
    """Some rows of a batch."""
    taken = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
    made = conversations(taken, name)
    return [row[0] for row in good_rows([_at(row, n) for row, n in zip(made, rows.tolist())])]


def _rendered(renderer: Renderer, given: Sequence[Conversation], rows: Ints) -> RenderedBatch:
    """Conversations that are these rows of a batch, by the template."""
    marked = []
    for row, conversation in zip(rows.tolist(), given):
        try:
            marked.append(renderer.render(conversation))
        except RowProblem as problem:
            raise problem.at(row) from problem
    try:
        made = as_written(marked)
    except RowProblem as problem:
        raise problem.at(int(rows[problem.row or 0])) from problem
    foreign = {int(rows[row]): where for row, where in made.foreign.items()}
    return RenderedBatch(made.spans, made.prompts, foreign, made.lost)


def as_written(marked: Sequence[Marked]) -> RenderedBatch:
    """Rendered conversations as a column of texts. Raises the problem of the first whose marks cannot be read."""
    spans = read_marks([row.text for row in marked])
    foreign = {i: row.foreign for i, row in enumerate(marked) if row.foreign is not None}
    lost = Counter(kind for row in marked for kind in row.lost)
    return RenderedBatch(spans, prompt_ends(marked, spans), foreign, lost)


def _at(row: Side | RowProblem, number: int) -> Side | RowProblem:
    return row.at(number) if isinstance(row, RowProblem) else row


def merged(parts: Sequence[tuple[Ints, RenderedBatch]]) -> RenderedBatch:
    """Texts of different rows of a batch as one column in the order of the rows, with their spans."""
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    lengths = np.concatenate([np.diff(part.spans.offsets) for _, part in parts])[order]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    texts = pa.concat_arrays([part.spans.texts.cast(pa.large_string()) for _, part in parts]).take(pa.array(order))
    rows, starts, stops, ends = [], [], [], []
    foreign: dict[int, str] = {}
    lost: Counter[str] = Counter()
    for numbers, part in parts:
        spans, prompts = part.spans, part.prompts
        moved = bounds[numbers] - spans.offsets[:-1]
        shift = moved[spans.rows]
        rows.append(numbers[spans.rows])
        starts.append(spans.starts + shift)
        stops.append(spans.stops + shift)
        ends.append(np.where(prompts < 0, -1, prompts + shift))
        foreign |= part.foreign
        lost += part.lost
    by_row = np.argsort(np.concatenate(rows), kind="stable")
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[: bounds[-1]]
    found = [np.concatenate(each)[by_row] for each in (rows, starts, stops, ends)]
    return RenderedBatch(Spans(as_texts(data, bounds), bounds, found[0], found[1], found[2]), found[3], foreign, lost)
