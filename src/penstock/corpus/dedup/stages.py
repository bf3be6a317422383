"""Deduplication stages: `ExactDedup` drops copies, `MinHashDedup` near copies. The first in the input stays.

    Pipeline(source, dedup_stages(ExactDedup("text"), MinHashDedup("text")), sink)

What was seen is kept as hashes, in a share of the memory budget; what does not fit there goes to disk. Which rows go
depends on the rows and their order alone: not on workers, batches, the budget, or where a run was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays.hashes import Words
from penstock.arrays.text import Utf8, flags, plain, utf8
from penstock.corpus.dedup.kernel_calls import KERNELS, Flags, check_offsets, hash_texts
from penstock.corpus.dedup.minhash import MinHash
from penstock.corpus.dedup.seen_keys import SeenKeys
from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.states import with_checksum
from penstock.pipeline.stages import State, Transform
from penstock.transforms.columns import append, as_names, column, keep_rows
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import Lower, NormalizeUnicode, NormalizeWhitespace, as_text

__all__ = ["Dedup", "ExactDedup", "MinHashDedup", "dedup_stages", "fingerprints"]

_STEPS = {"lower": Lower, "whitespace": NormalizeWhitespace, "unicode": NormalizeUnicode}
_BUDGET_SHARE = 6  # a sixth of the budget is for the keys seen
_TEXT_OR_BYTES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_ROWS = 2048  # digests that exist as Python objects at a time


class Dedup(CountingTransform):
    """Drops every row with a key that an earlier row had, and counts it under `reason`.

    The base of `ExactDedup` and `MinHashDedup`. Making the keys is most of the work and needs no order:
    `preparation()` is a stage that does it beforehand, on all workers, and leaves them in a column that this one takes
    off again. Without it the keys are made here.
    """

    reason: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when a change of the code drops other rows than before, so that prepared data is made again, and no run
    resumes from keys of the other kind."""

    def __init__(self, maker: KeyMaker, name: str, directory: str | Path | None) -> None:
        super().__init__()
        self.directory = None if directory is None else require_local(directory, "directory")
        if self.directory is not None and self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(f"directory= must be a directory, and {self.directory} is a file")
        self._maker, self._name = maker, name
        log = None
        if self.directory is not None:
            # One name for one file, also after a change of directory and for paths through links.
            directory = Path(os.path.realpath(self.directory))
            rule = name if self.version == 1 else self.describe()
            log = directory / f"{type(self).__name__}-{xxhash.xxh3_64_hexdigest(rule.encode())}.keys"
        self._seen = SeenKeys(maker.width, log, name=name)

    @property
    def resumable(self) -> bool:
        """True if another process can load a state: with a `directory`, which keeps the keys seen."""
        return self.directory is not None

    def describe(self) -> str:
        """Equal texts drop equal rows."""
        return f"{self._name}/{self.version}"

    def preparation(self) -> Transform:
        """The part that runs in parallel, placed anywhere before this stage, with only filters in between."""
        return KeyColumn(self._maker, self._name)

    def row_keys(self, batch: pa.RecordBatch) -> tuple[Words, Flags | None]:
        """Row by key by word, from the column of `preparation` if it is there; and which rows have keys, if not all."""
        if self._name in batch.schema.names:
            return _from_column(batch.column(self._name), self._maker)
        return self._maker.keys(batch)

    def without_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch without the column of `preparation`."""
        return batch.drop_columns([self._name]) if self._name in batch.schema.names else batch

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys, valid = self.row_keys(batch)
        batch = self.without_keys(batch)
        if valid is None or valid.all():
            duplicate = self._seen.add(keys)
        else:
            duplicate = np.zeros(batch.num_rows, np.bool_)
            duplicate[valid] = self._seen.add(keys[valid])
        if not duplicate.any():
            return batch
        self.count({self.reason: int(np.count_nonzero(duplicate))})
        self.dropped_examples.add(self.reason, batch, duplicate)
        return keep_rows(batch, ~duplicate)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process makes keys, and has seen none."""
        return {name: value for name, value in self.__dict__.items() if name != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._seen = SeenKeys(self._maker.width, None, name=self._name)

    def state_dict(self) -> State:
        return with_checksum({**self._seen.state_dict(), "rule": self.version})

    def load_state_dict(self, state: State) -> None:
        if (rule := state.get("rule", 1)) != self.version:
            raise ResumeError(
                f"the state of {self._name} was saved by a release that has version {rule!r} of its rule, and this "
                f"release has version {self.version}, which drops other rows; start again without the state, or resume "
                "with that release"
            )
        self._seen.load_state_dict(state)

    def sync(self) -> None:
        """Make the seen keys survive a power failure. A killed process loses nothing without it."""
        self._seen.sync()

    def fit_budget(self, nbytes: int) -> None:
        """Take at most a sixth of the budget; what was seen before that goes to disk. A run begins with this, so it
        is also where the directory of another run is refused."""
        self._seen.claim()
        self._seen.fit(nbytes // _BUDGET_SHARE)

    def memory_usage(self) -> int:
        return self._seen.nbytes

    def reset(self) -> None:
        """Forget every row, count from zero, and leave the directory to others."""
        super().reset()
        self._seen.forget()

    def __repr__(self) -> str:
        return self._name


class ExactDedup(Dedup):
    """Drop rows whose value in a column was there before, compared by xxh3-128 of its bytes.

        ExactDedup("text")
        ExactDedup("text", normalize=("lower", "whitespace"))     # compared without case and spacing; rows stay as is

    Null is no value: such rows stay. Columns that are neither text nor bytes are compared as Python prints them, which
    is slower. Costs 16 bytes for each row that stays, in memory or on disk.

    `directory` keeps the hashes of the rows that were seen, so that a run with a checkpoint can be resumed. It
    belongs to one run at a time, and two equal stages need one each.
    """

    reason = "duplicate"

    def __init__(
        self,
        column: str = "text",
        *,
        normalize: str | Iterable[str] = (),
        directory: str | Path | None = None,
    ) -> None:
        steps = (normalize,) if isinstance(normalize, str) else tuple(normalize)
        for step in steps:
            if step not in _STEPS:
                raise ConfigError(f"normalize takes any of {', '.join(map(repr, _STEPS))}, got {step!r}")
        (self.column,) = as_names([column])
        options = f", normalize={steps!r}" if steps else ""
        super().__init__(Fingerprints(self.column, steps), f"ExactDedup({self.column!r}{options})", directory)


class MinHashDedup(Dedup):
    """Drop rows whose text is nearly that of an earlier row, by MinHash signatures and locality-sensitive hashing.

    Texts are compared as sets of shingles, `ngram` words in a row, without case and punctuation. Words are runs of
    letters and digits; in languages without spaces every character is one. A signature has `bands * rows` minima; a
    row goes if all minima of any band are those of an earlier row, whether that one stayed or went. For a share s of
    common shingles the probability is 1 - (1 - s**rows)**bands: with 14 bands of 8 rows 0.5 at s = 0.68. More bands
    find more, more rows are stricter.

    A text of fewer than `ngram` words is one shingle: it goes if it has the same words in the same order. Rows without
    any word, and null, always stay: `ExactDedup` removes repeated empty texts. Costs 8 bytes for each band of each
    row, in memory or on disk.

    `directory` keeps the keys of the rows that were seen, so that a run with a checkpoint can be resumed. It
    belongs to one run at a time, and two equal stages need one each.
    """

    reason = "near duplicate"
    version = 2

    def __init__(
        self,
        column: str = "text",
        *,
        ngram: int = 5,
        bands: int = 14,
        rows: int = 8,
        seed: int = 0,
        directory: str | Path | None = None,
    ) -> None:
        minhash = MinHash(ngram, bands, rows, seed)
        (self.column,) = as_names([column])
        name = f"MinHashDedup({self.column!r}, ngram={ngram}, bands={bands}, rows={rows}, seed={seed})"
        super().__init__(Signatures(self.column, minhash), name, directory)


def dedup_stages(*dedups: Dedup) -> list[Transform]:
    """The stages for some deduplications in a row: first, in parallel, what needs no order; then the rest, in order.

    Pipeline(source, [*dedup_stages(ExactDedup(), MinHashDedup())], sink)
    """
    preparations = {repr(dedup): dedup.preparation() for dedup in dedups}  # equal ones are made once
    return [*preparations.values(), *dedups]


class KeyMaker(Protocol):
    """Makes the keys of rows: the same keys for the same rows, with any rows before them."""

    @property
    def each(self) -> int:
        """Keys for each row."""
        ...

    @property
    def width(self) -> int:
        """64-bit words of a key."""
        ...

    def keys(self, batch: pa.RecordBatch) -> tuple[Words, Flags | None]:
        """Row by key by word; and which rows have keys, if not all."""
        ...


class Fingerprints:
    """One 128-bit key for each value."""

    each, width = 1, 2

    def __init__(self, name: str, normalize: tuple[str, ...]) -> None:
        self._column = name
        self._steps = [_STEPS[step](name) for step in normalize]

    def keys(self, batch: pa.RecordBatch) -> tuple[Words, Flags | None]:
        values = column(batch, self._column)
        if self._steps:
            alone = pa.record_batch([as_text(values, self._column)], names=[self._column])
            for step in self._steps:
                alone = step.transform(alone)
            values = alone.column(0)
        keys = fingerprints(values)[:, None]
        return keys, flags(values.is_valid()) if values.null_count else None


def fingerprints(array: pa.Array) -> Words:
    """xxh3-128 of each value as two words, the first never 0. Anything but text and bytes is hashed as printed."""
    array = plain(array)
    text = utf8(array) if array.type in _TEXT_OR_BYTES else None
    kernels = KERNELS.loaded
    if text is not None and kernels is not None:
        words = hash_texts(kernels, text.data, text.offsets)
    else:
        words = _digests(array, text)
    np.maximum(words[:, 0], 1, out=words[:, 0])
    return words


def _digests(array: pa.Array, text: Utf8 | None) -> Words:
    if text is not None:
        check_offsets(*text)
    words: Words = np.empty((len(array), 2), np.uint64)
    digest = xxhash.xxh3_128_digest
    for start in range(0, len(array), _ROWS):
        if text is not None:
            bounds, view = text.offsets[start : start + _ROWS + 1].tolist(), text.data.data
            digests = [digest(view[begin:end]) for begin, end in pairwise(bounds)]
        else:
            rows = array[start : start + _ROWS].to_pylist()
            digests = [digest(repr(value).encode("utf-8", "surrogatepass")) for value in rows]
        words[start : start + _ROWS] = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    return words


class Signatures:
    """One 64-bit key for each band of a MinHash signature."""

    width = 1

    def __init__(self, name: str, minhash: MinHash) -> None:
        self._column, self._minhash = name, minhash
        self.each = minhash.bands

    def keys(self, batch: pa.RecordBatch) -> tuple[Words, Flags | None]:
        text = as_text(column(batch, self._column), self._column)
        keys, worded = self._minhash.keys(utf8(text))
        if text.null_count:
            worded &= flags(text.is_valid())  # the bytes below a null may be anything
        return keys[:, :, None], worded


class KeyColumn(Transform):
    """Adds the keys as a column of bytes; null for rows that have none."""

    def __init__(self, maker: KeyMaker, name: str) -> None:
        self._maker, self._name = maker, name

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys, valid = self._maker.keys(batch)
        validity = None
        if valid is not None and not valid.all():
            validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
        dtype = pa.binary(8 * self._maker.each * self._maker.width)
        data = pa.py_buffer(np.ascontiguousarray(keys))
        return append(batch, self._name, pa.Array.from_buffers(dtype, batch.num_rows, [validity, data]))

    def __repr__(self) -> str:
        return f"keys of {self._name}"


def _from_column(array: pa.Array, maker: KeyMaker) -> tuple[Words, Flags | None]:
    words = maker.each * maker.width
    if array.type != pa.binary(8 * words):
        raise SchemaError(
            f"a column of keys is {array.type}, expected {pa.binary(8 * words)}; drop it before this stage"
        )
    if not len(array):
        return np.zeros((0, maker.each, maker.width), np.uint64), None
    data: Any = np.frombuffer(array.buffers()[1], np.uint64)[array.offset * words : (array.offset + len(array)) * words]
    valid = flags(array.is_valid()) if array.null_count else None
    return data.reshape(len(array), maker.each, maker.width), valid
