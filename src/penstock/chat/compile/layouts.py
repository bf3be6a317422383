"""Layouts: fixed texts with holes for contents, one layout for all conversations of one kind.

`Flat` is a batch of conversations of roles and text as columns. A layout is proven of a template once (see `prover`);
`filled` fills it with Arrow and NumPy, a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import is_list
from penstock.arrays.text import arrow_of, flags, is_text, numbers_of, plain, text_array
from penstock.chat.formats import is_json_text
from penstock.chat.masks import NO_PROMPT, Ints, Spans, as_texts
from penstock.chat.messages import FLAGS, ROLES, SAID, SPEAKER, Conversation, role_of

Strip = tuple[str, str | None]
"""Side, "left" or "right", and characters; None for white space."""
Place = tuple[int, int]
"""Position in a text: the number of a fixed text, and the offset in it. Fixed text i stands before hole i."""

SAYS: tuple[Strip, ...] = (("left", None),)
"""Strip that leaves something of every content but white space."""

WHITE_SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Characters that Python strips; Arrow's own set differs."""

FLAGGED = b"\xff"
"""Separator of roles and flags in the kind of a conversation."""
FLAG_CODES = {None: 0, False: 1, True: 2}

QUESTIONS: dict[str, Callable[[str, str], bool]] = {
    "filled": lambda text, _: bool(text),
    "is": lambda text, given: text == given,
    "has": lambda text, given: given in text,
    "starts": lambda text, given: text.startswith(given),
    "ends": lambda text, given: text.endswith(given),
}
_OF_COLUMNS: dict[str, Callable[[pa.Array, str], pa.Array]] = {
    "filled": lambda texts, _: pc.not_equal(pc.binary_length(texts), 0),
    "is": lambda texts, given: pc.equal(texts, pa.scalar(given, texts.type)),
    "has": lambda texts, given: pc.match_substring(texts, given),
    "starts": lambda texts, given: pc.starts_with(texts, given),
    "ends": lambda texts, given: pc.ends_with(texts, given),
}


@dataclass(frozen=True, slots=True)
class Hole:
    """Place of the content of a message, stripped or unchanged."""

    message: int
    strips: tuple[Strip, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Fixed texts with holes between them: one more text than holes."""

    fixed: tuple[str, ...]
    holes: tuple[Hole, ...]

    @classmethod
    def of(cls, parts: Sequence[str | Hole]) -> Text:
        """One text of pieces that follow each other; neighbouring fixed pieces are joined."""
        fixed, holes = [""], []
        for part in parts:
            if isinstance(part, Hole):
                holes.append(part)
                fixed.append("")
            else:
                fixed[-1] += part
        return cls(tuple(fixed), tuple(holes))

    def begun_by(self, other: Text) -> Place | None:
        """End of `other` in this text, if this text begins with it for all contents."""
        n = len(other.holes)
        if n > len(self.holes) or other.holes != self.holes[:n] or other.fixed[:n] != self.fixed[:n]:
            return None
        return (n, len(other.fixed[n])) if self.fixed[n].startswith(other.fixed[n]) else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Text of one kind of conversation, its supervised spans, and the conditions under which it holds."""

    text: Text
    spans: tuple[tuple[Place, Place], ...]
    """In characters."""
    conditions: tuple[tuple[Hole, str, str, bool], ...]
    answers: bool = True
    """True if each span answers the prompt before it."""

    def holds(self, flat: Flat, rows: Ints) -> npt.NDArray[np.bool_]:
        """True for each of these rows that meets the conditions."""
        met = np.ones(len(rows), np.bool_)
        for hole, question, given, answer in self.conditions:
            at = flat.offsets[rows] + hole.message
            if question == "filled" and not hole.strips:
                found = flat.lengths[at] > 0
            elif question == "filled" and hole.strips == SAYS:
                found = flat.says[at]
            else:
                texts = strip_column(flat.contents.take(arrow_of(at)), hole.strips)
                found = flags(_OF_COLUMNS[question](texts, given))
            met &= found == answer
        return met


@dataclass(frozen=True, slots=True)
class Flat:
    """Conversations of roles and text as columns: the contents of all messages in one array."""

    contents: pa.Array
    lengths: Ints
    """Of the contents, in bytes."""
    says: npt.NDArray[np.bool_]
    """True for contents that are not only white space."""
    offsets: Ints
    """The messages of row i are `offsets[i]` to `offsets[i + 1]`."""
    kinds: list[bytes | None]
    """Roles and flags of each row as bytes; None for a row with more than roles and text."""


def stripped(text: str, strips: Sequence[Strip]) -> str:
    for side, characters in strips:
        text = text.lstrip(characters) if side == "left" else text.rstrip(characters)
    return text


def strip_column(texts: pa.Array, strips: Sequence[Strip]) -> pa.Array:
    """The same for a column."""
    for side, characters in strips:
        strip = pc.utf8_ltrim if side == "left" else pc.utf8_rtrim
        texts = strip(texts, WHITE_SPACE if characters is None else characters)
    return texts


def says(contents: pa.Array, lengths: Ints) -> npt.NDArray[np.bool_]:
    """True for texts that are not only white space. For most, the first byte shows it."""
    found: npt.NDArray[np.bool_] = lengths > 0
    _, offsets, data = contents.buffers()
    if data is None or not found.any():
        return found
    wide = pa.types.is_large_string(contents.type)
    starts = np.frombuffer(offsets, np.int64 if wide else np.int32)[contents.offset :][: len(contents)]
    first = np.frombuffer(data, np.uint8)[starts[found]]
    unsure = np.flatnonzero(found)[(first <= 0x20) | (first >= 0x80)]
    rest = strip_column(contents.take(arrow_of(unsure)), SAYS)
    found[unsure] = numbers_of(pc.binary_length(rest)) > 0
    return found


def filled(flat: Flat, chosen: Sequence[tuple[Layout, Ints]]) -> tuple[Ints, Spans]:
    """The rows that a layout was chosen for, in order, and their texts and spans.

    A slot is a fixed text and the hole after it; the last slot of a row has no hole. The slots of all rows, joined, are
    the texts of all rows, joined.
    """
    rows = len(flat.offsets) - 1
    slots, marked = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for layout, of in chosen:
        slots[of], marked[of] = len(layout.text.fixed), len(layout.spans)
    slot_at, span_at = _starts(slots), _starts(marked)
    fixed: dict[str, int] = {}
    strips: dict[tuple[Strip, ...], int] = {(): 0}
    codes, kinds = np.zeros(slot_at[-1], np.int32), np.zeros(slot_at[-1], np.int32)
    message = np.full(slot_at[-1], -1)
    starts, stops = np.zeros((2, span_at[-1]), np.int64), np.zeros((2, span_at[-1]), np.int64)
    prompts = np.zeros(span_at[-1], np.bool_)
    for layout, of in chosen:
        at = slot_at[of][:, None] + np.arange(len(layout.text.fixed))
        codes[at] = [fixed.setdefault(text, len(fixed)) for text in layout.text.fixed]
        kinds[at[:, :-1]] = [strips.setdefault(hole.strips, len(strips)) for hole in layout.text.holes]
        message[at[:, :-1]] = flat.offsets[of][:, None] + np.array([hole.message for hole in layout.text.holes], int)
        spans = span_at[of][:, None] + np.arange(len(layout.spans))
        for places, end in ((starts, 0), (stops, 1)):
            found = [span[end] for span in layout.spans]
            places[0, spans] = slot_at[of][:, None] + np.array([slot for slot, _ in found], int)
            places[1, spans] = [len(layout.text.fixed[slot][:n].encode()) for slot, n in found]
        prompts[spans] = layout.answers
    offsets, data = _joined(flat.contents, list(fixed), codes, message, list(strips), kinds)
    kept = np.flatnonzero(slots)
    bounds = offsets[np.append(slot_at[kept], slot_at[-1])]
    first, last = offsets[starts[0]] + starts[1], offsets[stops[0]] + stops[1]
    found_rows = np.repeat(np.arange(len(kept)), marked[kept])
    ends = np.where(prompts, first, NO_PROMPT)
    return kept, Spans(as_texts(data, bounds), bounds, found_rows, first, last, ends)


def _joined(
    contents: pa.Array,
    fixed: list[str],
    codes: npt.NDArray[np.int32],
    message: Ints,
    strips: list[tuple[Strip, ...]],
    kinds: npt.NDArray[np.int32],
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Offsets of all slots, and their bytes."""
    before = text_array(fixed, contents.type).take(arrow_of(codes))
    inside = contents.take(arrow_of(message, message >= 0))
    for kind, strip in enumerate(strips):
        if strip:
            inside = pc.if_else(arrow_of(kinds == kind), strip_column(inside, strip), inside)
    nothing = text_array([""], contents.type)[0]
    joined: Any = pc.binary_join_element_wise(before, inside, nothing, null_handling="replace", null_replacement="")
    wide = pa.types.is_large_string(joined.type)
    _, places, data = joined.buffers()
    offsets = np.frombuffer(places, np.int64 if wide else np.int32)[: len(joined) + 1].astype(np.int64)
    return offsets, np.frombuffer(data if data is not None else b"", np.uint8)[: offsets[-1]]


def _starts(counts: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(counts)))


OTHER = 255
"""Role code of a message that has more than role and text, or less."""
COLUMNS = {"messages": ("messages",), "sharegpt": ("conversations", "conversation")}
_CODES = {role: code for code, role in enumerate(ROLES)}


def flat_messages(batch: pa.RecordBatch, name: str) -> Flat | None:
    """The rows of a batch with a column of messages, without a Python object per row; None if it has no such column."""
    there = [column for column in COLUMNS.get(name, ()) if column in batch.schema.names]
    if len(there) != 1:
        return None
    lists = plain(batch.column(there[0]))
    if not is_list(lists.type):
        return None
    messages = lists.flatten()
    if not pa.types.is_struct(messages.type):
        return None
    read_as_they_are = (*SPEAKER, *SAID, *FLAGS)
    if any(is_json_text(field) and field.name in read_as_they_are for field in messages.type):
        return None
    fields = dict(zip((field.name for field in messages.type), map(plain, messages.flatten())))
    speakers = [fields.pop(key) for key in SPEAKER if key in fields]
    said = [fields.pop(key) for key in SAID if key in fields]
    if len(speakers) != 1 or len(said) != 1 or len(fields) + 2 != messages.type.num_fields:
        return None
    if not (is_text(speakers[0].type) and is_text(said[0].type)):
        return None
    codes = _role_codes(speakers[0])
    for field in (said[0], messages):
        if field.null_count:
            codes[flags(pc.is_null(field))] = OTHER
    marks = _flags([fields.pop(key) for key in FLAGS if key in fields], codes)
    for field in fields.values():
        if field.null_count < len(field):
            codes[flags(pc.is_valid(field))] = OTHER
    lengths = _numbers(pc.list_value_length(lists), 0).astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    kinds = _kinds(codes, marks, bounds)
    for other in ("system", "tools"):
        if other in batch.schema.names:
            for row in np.flatnonzero(flags(pc.is_valid(batch.column(other)))).tolist():
                kinds[row] = None
    return _flat(said[0], bounds, kinds)


def flat_conversations(conversations: Sequence[Conversation]) -> Flat | None:
    """The same for conversations that were read row by row."""
    kinds: list[bytes | None] = []
    contents: list[str] = []
    bounds = [0]
    for conversation in conversations:
        if conversation.simple:
            contents += [message["content"] for message in conversation.messages]
            roles = bytes(_CODES[message["role"]] for message in conversation.messages)
            marks = conversation.flags
            kinds.append(roles if marks is None else roles + FLAGGED + bytes(FLAG_CODES[mark] for mark in marks))
        else:
            kinds.append(None)
        bounds.append(len(contents))
    try:
        return _flat(text_array(contents, pa.large_string()), np.array(bounds), kinds)
    except UnicodeEncodeError:  # a lone surrogate: rendering by the template names the row
        return None


def _flat(contents: pa.Array, bounds: Ints, kinds: list[bytes | None]) -> Flat:
    if contents.null_count:
        contents = pc.fill_null(contents, "")
    if pa.types.is_string(contents.type) and contents.nbytes > 1 << 28:  # the texts of the template must fit too
        contents = contents.cast(pa.large_string())
    lengths = numbers_of(pc.binary_length(contents)).astype(np.int64)
    return Flat(contents, lengths, says(contents, lengths), bounds, kinds)


def _numbers(array: pa.Array, instead: int) -> Ints:
    """Numbers with another one for each null. Where there is none, pyarrow need not import pandas to make a scalar."""
    return numbers_of(pc.fill_null(array, instead) if array.null_count else array)


def _role_codes(speakers: pa.Array) -> npt.NDArray[np.uint8]:
    """Code of each role."""
    encoded = speakers.dictionary_encode()
    known = [_CODES.get(role_of(speaker), OTHER) for speaker in encoded.dictionary.to_pylist()]
    table = np.array([*known, OTHER], np.uint8)
    codes: npt.NDArray[np.uint8] = table[_numbers(encoded.indices, len(known))]
    return codes


def _flags(fields: list[pa.Array], codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Flag of each message, 0 for none; a value that is no flag makes its role OTHER in `codes`."""
    flags = np.zeros(len(codes), np.uint8)
    for field in fields:
        if field.null_count == len(field):
            continue
        there = pc.is_valid(field).to_numpy(zero_copy_only=False) & (flags == 0)
        kind = field.type
        if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            codes[there] = OTHER
            continue
        values = pc.fill_null(field, False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False)
        codes[there & (values != 0) & (values != 1)] = OTHER
        flags[there] = np.where(values[there] == 1, FLAG_CODES[True], FLAG_CODES[False])
    return flags


def _kinds(codes: npt.NDArray[np.uint8], flags: npt.NDArray[np.uint8], bounds: Ints) -> list[bytes | None]:
    data = codes.tobytes()
    usual = OTHER not in data
    places = list(pairwise(bounds.tolist()))
    kinds = (data[start:stop] for start, stop in places)
    made = [kind if kind and (usual or OTHER not in kind) else None for kind in kinds]
    if flags.any():
        flagged = flags.tobytes()
        for row, (start, stop) in enumerate(places):
            kind, own = made[row], flagged[start:stop]
            if kind is not None and any(own):
                made[row] = kind + FLAGGED + own
    return made
