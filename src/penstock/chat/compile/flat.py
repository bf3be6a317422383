"""Conversations of nothing but roles and text as columns: `Flat`. Whatever has more to it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import plain
from penstock.chat.compile.layouts import Flat, says
from penstock.chat.compile.prover import FLAG_CODES, FLAGGED
from penstock.chat.formats import is_json_text
from penstock.chat.messages import FLAGS, ROLES, SAID, SPEAKER, Conversation, role_of
from penstock.chat.spans import Ints

__all__ = ["flat_conversations", "flat_messages"]

OTHER = 255
"""In place of a role, where there is more to a message, or less."""
COLUMNS = {"messages": ("messages",), "sharegpt": ("conversations", "conversation")}
_CODES = {role: code for code, role in enumerate(ROLES)}


def flat_messages(batch: pa.RecordBatch, name: str) -> Flat | None:
    """The rows of a batch with a column of messages, not touched row by row; None if it has no such column."""
    there = [column for column in COLUMNS.get(name, ()) if column in batch.schema.names]
    if len(there) != 1:
        return None
    lists = plain(batch.column(there[0]))
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
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
    if not (_is_text(speakers[0].type) and _is_text(said[0].type)):
        return None
    codes = _role_codes(speakers[0])
    for field in (said[0], messages):
        if field.null_count:
            codes[pc.is_null(field).to_numpy(zero_copy_only=False)] = OTHER
    flags = _flags([fields.pop(key) for key in FLAGS if key in fields], codes)
    for field in fields.values():
        if field.null_count < len(field):
            codes[pc.is_valid(field).to_numpy(zero_copy_only=False)] = OTHER
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    kinds = _kinds(codes, flags, bounds)
    for other in ("system", "tools"):
        if other in batch.schema.names:
            for row in np.flatnonzero(pc.is_valid(batch.column(other)).to_numpy(zero_copy_only=False)).tolist():
                kinds[row] = None
    return _flat(said[0], bounds, kinds)


def flat_conversations(conversations: Sequence[Conversation]) -> Flat | None:
    """The same of conversations that were read row by row."""
    kinds: list[bytes | None] = []
    contents: list[str] = []
    bounds = [0]
    for conversation in conversations:
        if conversation.simple:
            contents += [message["content"] for message in conversation.messages]
            roles = bytes(_CODES[message["role"]] for message in conversation.messages)
            flags = conversation.flags
            kinds.append(roles if flags is None else roles + FLAGGED + bytes(FLAG_CODES[flag] for flag in flags))
        else:
            kinds.append(None)
        bounds.append(len(contents))
    try:
        return _flat(pa.array(contents, pa.large_string()), np.array(bounds), kinds)
    except UnicodeEncodeError:  # a lone surrogate: which row has it, the template's text will show
        return None


def _flat(contents: pa.Array, bounds: Ints, kinds: list[bytes | None]) -> Flat:
    if contents.null_count:
        contents = pc.fill_null(contents, "")
    if pa.types.is_string(contents.type) and contents.nbytes > 1 << 28:  # what templates add must fit as well
        contents = contents.cast(pa.large_string())
    lengths = pc.binary_length(contents).to_numpy().astype(np.int64)
    return Flat(contents, lengths, says(contents, lengths), bounds, kinds)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _role_codes(speakers: pa.Array) -> npt.NDArray[np.uint8]:
    """The number of each role."""
    encoded = speakers.dictionary_encode()
    known = [_CODES.get(role_of(speaker), OTHER) for speaker in encoded.dictionary.to_pylist()]
    table = np.array([*known, OTHER], np.uint8)
    codes: npt.NDArray[np.uint8] = table[pc.fill_null(encoded.indices, len(known)).to_numpy()]
    return codes


def _flags(fields: list[pa.Array], codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The flag of each message, 0 for none; what is no flag is noted in `codes`."""
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
