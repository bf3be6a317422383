"""Rendered batch: the texts of a batch of chats with their supervised spans.

Rows of roles and text are filled into layouts that are proven of the template (`chat/compile`), all at once. The other
rows are rendered by the template, one by one (`chat/render.py`). The result is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import offsets_of
from penstock.arrays.text import arrow_of, flags
from penstock.chat.chosen_rows import chosen_rows
from penstock.chat.compile.layouts import Flat, flat_conversations, flat_messages
from penstock.chat.compile.prover import Layouts
from penstock.chat.formats import conversations, good_rows, sides_of
from penstock.chat.masks import NO_PROMPT, Flags, Ints, Spans, as_texts
from penstock.chat.messages import ROLES, Conversation
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer, Rendering, foreign_text


@dataclass(frozen=True, slots=True)
class RenderedBatch:
    """Texts with their spans."""

    spans: Spans
    foreign: dict[int, str] = field(default_factory=dict)
    """By row: the message that has the text of a special token in it."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of parts of each kind that are not in the texts, as `allow_lost` permits."""

    @classmethod
    def of(cls, rendered: Sequence[Rendering]) -> RenderedBatch:
        """Conversations that were rendered one by one."""
        spans = Spans.of([row.text for row in rendered], [row.turns for row in rendered])
        foreign = {i: row.foreign for i, row in enumerate(rendered) if row.foreign is not None}
        return cls(spans, foreign, Counter(kind for row in rendered for kind in row.lost))


def render_batch(
    layouts: Layouts, batch: pa.RecordBatch, name: str, columns: Mapping[str, str] | None = None
) -> Iterator[RenderedBatch]:
    """The texts of a batch, for each side of its rows. Raises the problem of the first row that has one."""
    if columns is None and layouts.possible:
        flat = flat_messages(batch, name)
        if flat is not None:
            yield _filled(layouts, flat, lambda rows: _conversations_of(batch, name, rows))
            return
    heading = layouts.renderer.template.input_heading
    converted = good_rows(conversations(batch, name, columns, input_heading=heading))
    sides = list(zip(*converted)) or [()] * len(sides_of(name))
    for side in sides:
        flat = flat_conversations(side) if layouts.possible else None
        if flat is None:
            yield _rendered(layouts.renderer, side, np.arange(len(side)))
        else:
            yield _filled(layouts, flat, lambda rows, side=side: [side[row] for row in rows.tolist()])  # type: ignore[misc]


def _filled(layouts: Layouts, flat: Flat, read: Callable[[Ints], Sequence[Conversation]]) -> RenderedBatch:
    """Rows with a layout, and the others as `read` gives them to the template."""
    fast, spans = layouts.fill(flat)
    others = np.ones(len(flat.kinds), np.bool_)
    others[fast] = False
    filled = RenderedBatch(spans, _foreign(layouts.renderer, flat, others))
    if not others.any():
        return filled
    slow = np.flatnonzero(others)
    by_template = _rendered(layouts.renderer, read(slow), slow)
    return _merged([(fast, filled), (slow, by_template)]) if len(fast) else by_template


def _foreign(renderer: Renderer, flat: Flat, others: Flags) -> dict[int, str]:
    """Messages that have the text of a special token in them, except in the rows that are `others`."""
    if not renderer.specials:
        return {}
    quoted = (text.replace("\\E", "\\E\\\\E\\Q") for text in renderer.specials)
    pattern = "|".join(f"\\Q{text}\\E" for text in quoted)
    found = np.flatnonzero(flags(pc.match_substring_regex(flat.contents, pattern)))
    rows = np.searchsorted(flat.offsets, found, side="right") - 1
    foreign: dict[int, str] = {}
    for row, at in zip(rows.tolist(), found.tolist()):
        kind, message = flat.kinds[row], at - int(flat.offsets[row])
        if row in foreign or others[row] or kind is None:
            continue
        match = renderer.special_text.search(flat.contents[at].as_py())
        foreign[row] = foreign_text(message, ROLES[kind[message]], match[0] if match else "")
    return foreign


def _conversations_of(batch: pa.RecordBatch, name: str, rows: Ints) -> list[Conversation]:
    """Some rows of a batch; a problem has the number of its row in the batch."""
    taken = batch if len(rows) == batch.num_rows else chosen_rows(batch, rows)
    converted = zip(conversations(taken, name), rows.tolist())
    numbered = [row.at(number) if isinstance(row, RowProblem) else row for row, number in converted]
    return [row[0] for row in good_rows(numbered)]


def _rendered(renderer: Renderer, given: Sequence[Conversation], rows: Ints) -> RenderedBatch:
    """Conversations that are these rows of a batch, by the template."""
    rendered = []
    for row, conversation in zip(rows.tolist(), given):
        try:
            rendered.append(renderer.render(conversation))
        except RowProblem as problem:
            raise problem.at(row) from problem
    batch = RenderedBatch.of(rendered)
    foreign = {int(rows[row]): where for row, where in batch.foreign.items()}
    return RenderedBatch(batch.spans, foreign, batch.lost)


def _merged(parts: Sequence[tuple[Ints, RenderedBatch]]) -> RenderedBatch:
    """Texts of different rows of a batch as one column in the order of the rows, with their spans."""
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    lengths = np.concatenate([np.diff(part.spans.offsets) for _, part in parts])[order]
    offsets = offsets_of(lengths)
    texts = pa.concat_arrays([part.spans.texts.cast(pa.large_string()) for _, part in parts]).take(arrow_of(order))
    moved = []
    foreign: dict[int, str] = {}
    lost: Counter[str] = Counter()
    for numbers, part in parts:
        spans = part.spans
        shift = (offsets[numbers] - spans.offsets[:-1])[spans.rows]
        prompts = np.where(spans.prompts < 0, NO_PROMPT, spans.prompts + shift)
        moved.append((numbers[spans.rows], spans.starts + shift, spans.stops + shift, prompts))
        foreign |= part.foreign
        lost += part.lost
    rows, starts, stops, prompts = (np.concatenate(values) for values in zip(*moved))
    by_row = np.argsort(rows, kind="stable")
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[: offsets[-1]]
    spans = Spans(as_texts(data, offsets), offsets, rows[by_row], starts[by_row], stops[by_row], prompts[by_row])
    return RenderedBatch(spans, foreign, lost)
