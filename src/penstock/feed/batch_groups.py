"""Batches as messages: those of one shape travel as one array, and are split where they arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.batching.backends import Backend, get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import BatchLayout, CompactBatch
from penstock.distributed.sharding import Sharding
from penstock.feed.protocol import (
    BATCH_COLUMNS,
    PREFERENCE_COLUMNS,
    Arrays,
    EncodedMessage,
    MalformedMessageError,
    Message,
    encode,
)
from penstock.files.states import parse_json, to_json
from penstock.loaders.preferences.batch import EXTRA, PreferenceBatch
from penstock.order.positions import Position
from penstock.order.states import position_facts, read_position

Made = tuple[TrainingBatch, Position]
_FACTS = ("sides", "chosen_tokens")
_NUMBERS = ("max_seqlen", "num_items_in_batch")
_ORIGIN = ("source", "row", "sample")


class FeedPosition(NamedTuple):
    """Position between two batches at a client; what the server needs to go on there is read only if it is wanted."""

    epoch: int
    step: int
    facts: str
    """`position_facts` as JSON."""

    @classmethod
    def of(cls, position: Position) -> FeedPosition:
        return cls(position.epoch, position.step, to_json(position_facts(position)).decode())

    def position(self) -> Position:
        return position_of(self.facts)


def position_of(facts: str) -> Position:
    """Position of a plan from `FeedPosition.facts`."""
    return read_position(parse_json(facts.encode()))


def columns_of(kind: str) -> tuple[str, ...]:
    """Columns of the messages of a kind of batches."""
    return PREFERENCE_COLUMNS if kind == "preference" else BATCH_COLUMNS


# -- at the server ---------------------------------------------------------------------------------------------------


def encode_batches(made: Sequence[Made]) -> list[EncodedMessage]:
    """Messages of batches in order; neighbours of one shape share a message."""
    messages: list[EncodedMessage] = []
    group: list[Made] = []
    for each in made:
        if group and not _alike(group[0][0].compact, each[0].compact):
            messages.append(_encode_group(group))
            group = []
        group.append(each)
    return [*messages, _encode_group(group)] if group else messages


def _alike(first: CompactBatch | None, other: CompactBatch | None) -> bool:
    """True if two batches can be split from one array again."""
    if first is None or other is None or first.layout.padding_free or first.layout.split:
        return False
    return (
        first.ids.shape == other.ids.shape
        and first.ids.dtype == other.ids.dtype
        and (first.supervised is None) == (other.supervised is None)
    )


def _encode_group(group: Sequence[Made]) -> EncodedMessage:
    batches = [batch for batch, _ in group]
    facts = [batch.metadata for batch in batches]
    notes: dict[str, Any] = {
        "type": "batches",
        "step": [each["step"] for each in facts],
        "epoch": [each["epoch"] for each in facts],
        "tokens": [batch.num_tokens for batch in batches],
        "parts": [len(each["row"]) for each in facts],
        "following": [[after.epoch, after.step, FeedPosition.of(after).facts] for _, after in group],
    }
    arrays = {name: _joined([each[name] for each in facts]) for name in _ORIGIN}
    compact = [found for batch in batches if (found := batch.compact) is not None]
    if len(compact) == len(batches):
        notes["items"] = [each.items for each in compact]
        return encode(notes, {**arrays, **_join_compact(compact)}, BATCH_COLUMNS)
    (batch,) = batches
    fields = {name: value for name, value in vars(batch).items() if name in PREFERENCE_COLUMNS and value is not None}
    fields |= {name: batch._others[name] for name in EXTRA if name in batch._others}
    notes["numbers"] = {name: value for name in _NUMBERS if (value := getattr(batch, name)) is not None}
    notes["facts"] = {name: batch.metadata[name] for name in _FACTS if name in batch.metadata}
    notes["packed"] = batch._packed
    return encode(notes, {**arrays, **fields}, PREFERENCE_COLUMNS)


def _join_compact(batches: Sequence[CompactBatch]) -> dict[str, npt.NDArray[Any]]:
    """Parts of several batches of one shape as those of a single one."""
    first, rows = batches[0], len(batches[0].ids)
    if len(batches) == 1:
        return first.parts()
    whole = first.whole
    places = range(first.first_row, first.first_row + rows * len(batches), rows)
    if all(each.whole is whole and each.first_row == place for each, place in zip(batches, places)):
        part = slice(first.first_row, first.first_row + rows * len(batches))  # collated as one: no copy
        joined = {"ids": whole.ids[part]}
        if whole.supervised is not None:
            joined["supervised"] = whole.supervised[part]
    else:
        joined = {"ids": np.concatenate([each.ids for each in batches])}
        if first.supervised is not None:
            joined["supervised"] = np.concatenate([each.supervised for each in batches if each.supervised is not None])
    if not all(each.grid.alike for each in batches):
        tokens = rows * first.grid.tokens
        joined["at"] = np.concatenate([each.grid.at + number * tokens for number, each in enumerate(batches)])
        joined["row_of"] = np.concatenate([each.grid.row_of + number * rows for number, each in enumerate(batches)])
        joined["lengths"] = np.concatenate([each.grid.lengths for each in batches])
    return joined


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# -- at the client ---------------------------------------------------------------------------------------------------


def layout_facts(layout: BatchLayout) -> dict[str, Any]:
    """Layout as plain values; the dtype of wide fields is that of the client's backend."""
    facts = asdict(layout)
    del facts["integer"]
    return facts | {"fields": sorted(layout.fields)}


def described_sharding(sharding: Sharding) -> str:
    """Sharding as text that is the same in every process, with the options that are not its defaults."""
    kind = type(sharding)
    name = kind.__name__.lower() if kind.__module__ == Sharding.__module__ else f"{kind.__module__}.{kind.__qualname__}"
    if not is_dataclass(sharding):
        return name
    values = {each.name: (getattr(sharding, each.name), each.default) for each in fields(sharding)}
    told = [f"{option}={_plain(value)}" for option, (value, default) in values.items() if value != default]
    return f"{name}({', '.join(told)})" if told else name


def _plain(value: Any) -> str:
    named = callable(value) and hasattr(value, "__qualname__")
    return f"{value.__module__}.{value.__qualname__}" if named else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


class BatchReader:
    """Batches of messages, as the local loader makes them."""

    def __init__(self, kind: str, layout: BatchLayout, backend: Backend, names: tuple[str, ...]) -> None:
        self._kind, self._layout, self._backend, self._names = kind, layout, backend, names

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, which import the framework themselves."""
        return self.__dict__ | {"_backend": self._backend.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _backend=get_backend(state["_backend"]))

    def read(self, message: Message) -> list[tuple[TrainingBatch, FeedPosition]]:
        """All batches of a message, each with the next position."""
        notes, arrays = message
        try:
            following = [FeedPosition(int(epoch), int(step), str(facts)) for epoch, step, facts in notes["following"]]
            metadata = list(self._metadata(notes, arrays))
            tokens = [int(count) for count in notes["tokens"]]
            if self._kind == "preference":
                batches = [self._preference(notes, arrays, metadata[0], tokens[0])]
            else:
                batches = list(self._compact(notes, arrays, metadata, tokens))
            return list(zip(batches, following, strict=True))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MalformedMessageError(f"batches that cannot be read: {error!r:.200}") from error

    def _compact(
        self, notes: Mapping[str, Any], arrays: Arrays, metadata: list[dict[str, Any]], tokens: list[int]
    ) -> Iterator[TrainingBatch]:
        parts = {name: arrays[name] for name in BATCH_COLUMNS if name in arrays and name not in _ORIGIN}
        whole = CompactBatch.from_parts(parts, self._layout)
        if len(whole.ids) % len(metadata):
            raise ValueError(f"{len(whole.ids)} rows of {len(metadata)} batches")
        batches = [whole] if len(metadata) == 1 else whole.split(len(metadata))
        for batch, facts, count, items in zip(batches, metadata, tokens, notes["items"], strict=True):
            batch.items = items
            yield TrainingBatch.of_compact(batch, facts, self._backend, count)

    def _preference(
        self, notes: Mapping[str, Any], arrays: Arrays, metadata: dict[str, Any], tokens: int
    ) -> TrainingBatch:
        wanted = {*self._layout.present, *EXTRA}
        # Fields of a trainer may be written to, received memory may not.
        fields: dict[str, Any] = {name: array.copy() for name, array in arrays.items() if name in wanted}
        fields |= {name: value for name, value in notes["numbers"].items() if name in wanted}
        packed = bool(notes["packed"])
        return PreferenceBatch.of_collated(fields | notes["facts"], metadata, self._backend, tokens, packed=packed)

    def _metadata(self, notes: Mapping[str, Any], arrays: Arrays) -> Iterator[dict[str, Any]]:
        cuts = offsets_of(np.asarray(notes["parts"], np.int64)).tolist()
        columns = {name: arrays[name].copy() for name in _ORIGIN}
        if any(len(column) != cuts[-1] for column in columns.values()):
            raise ValueError("origins of another number of rows")
        for step, epoch, (low, high) in zip(notes["step"], notes["epoch"], pairwise(cuts), strict=True):
            origin = {name: column[low:high] for name, column in columns.items()}
            yield {"step": step, "epoch": epoch, "sources": self._names, **origin}
