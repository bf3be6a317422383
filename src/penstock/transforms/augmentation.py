"""More rows out of few: noise on numbers and text, and noisy copies of rows.

Randomness is a pure function of what a row holds, the seed and the number of the copy. It does not depend on how rows
were cut into batches, on threads, or on what was transformed before: the same row always comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays.hashes import as_seed, hash64, mix64
from penstock.arrays.ragged import offsets_of
from penstock.arrays.text import Utf8, flags, from_utf8, utf8
from penstock.errors import SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.columns import as_names, column, one_or_list, replace, take_rows
from penstock.transforms.text import rewrite, row_sums, word_bytes, word_starts

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


@runtime_checkable
class Augmenting(Protocol):
    """A transform that can make several different versions of the same rows."""

    def augment(self, batch: pa.RecordBatch, copy: int, /) -> pa.RecordBatch: ...


class Augment(Transform):
    """Each row, followed by `copies` versions of it that went through a transform.

    The versions differ if the transform is one of this module (or has `augment(batch, copy)`); any other transform
    gives one version. Rows and columns must come out of it as many as went in, and with the same types.
    """

    def __init__(self, transform: Transform, copies: int = 1) -> None:
        if copies < 1:
            raise ValueError(f"copies must be at least 1, got {copies}")
        if copies > 1 and not isinstance(transform, Augmenting):
            raise ValueError(f"{transform!r} has no augment(batch, copy), so all {copies} copies would be the same")
        self.inner = transform
        self.copies = copies

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        versions = [batch]
        for copy in range(1, self.copies + 1):
            made = (
                self.inner.augment(batch, copy) if isinstance(self.inner, Augmenting) else self.inner.transform(batch)
            )
            if made.num_rows != batch.num_rows:
                raise SchemaError(
                    f"{self.inner!r} made {made.num_rows} rows of {batch.num_rows}; Augment needs the same number"
                )
            if not made.schema.equals(batch.schema):
                raise SchemaError(f"{self.inner!r} changed the columns from {batch.schema} to {made.schema}")
            versions.append(made)
        # Version v of row r is at v * rows + r; the rows are to come out together.
        order = np.arange(batch.num_rows * len(versions)).reshape(len(versions), -1).T.ravel()
        return take_rows(pa.concat_batches(versions), order)

    def __repr__(self) -> str:
        return f"Augment({self.inner!r}, copies={self.copies})"


class Jitter(Transform):
    """Add Gaussian noise with standard deviation `scale` to floating-point columns. Null, NaN and infinity stay.

    Rows that hold the same values get the same noise; name a `key` column that tells them apart (an id) if there are
    such rows.
    """

    def __init__(self, columns: str | Iterable[str], scale: float, *, seed: int = 0, key: str | None = None) -> None:
        if not 0 <= scale < float("inf"):
            raise ValueError(f"scale must be a finite number, at least 0, got {scale}")
        self.columns = as_names(columns)
        self.scale = scale
        self.seed = as_seed(seed)
        self.key = key

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.augment(batch, 0)

    def augment(self, batch: pa.RecordBatch, copy: int, /) -> pa.RecordBatch:
        keys = row_keys(batch, self.key)
        for name in self.columns:
            array = column(batch, name)
            if not pa.types.is_floating(array.type):
                raise SchemaError(
                    f"column {name!r} is {array.type}, expected floats; put Cast({{{name!r}: 'float64'}}) before"
                )
            draws = Draws(keys, self.seed, f"Jitter/{name}/{copy}")
            values = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
            noisy = pa.array(values + self.scale * draws.gaussians(), mask=flags(array.is_null()))
            batch = replace(batch, name, noisy.cast(array.type))
        return batch

    def __repr__(self) -> str:
        return f"Jitter({one_or_list(self.columns)}, scale={self.scale}, seed={self.seed})"


class _TextNoise(Transform):
    """Random change of the texts of a column, each place with the same probability."""

    _name: ClassVar[str]

    def __init__(self, column: str, probability: float, *, seed: int = 0, key: str | None = None) -> None:
        (self.column,) = as_names([column])
        self.probability = _as_probability(probability)
        self.seed = as_seed(seed)
        self.key = key

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.augment(batch, 0)

    def augment(self, batch: pa.RecordBatch, copy: int, /) -> pa.RecordBatch:
        draws = Draws(row_keys(batch, self.key), self.seed, f"{self._name}/{self.column}/{copy}")
        return rewrite(batch, [self.column], lambda text: self._changed(text, draws))

    def _changed(self, text: pa.Array, draws: Draws) -> pa.Array:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self._name}({self.column!r}, probability={self.probability}, seed={self.seed})"


class DropWords(_TextNoise):
    """Leave out each word with this probability, together with the whitespace after it.

    A text that would lose all its words keeps one of them. Words are those of `str.split`. `key` as in `Jitter`.
    """

    _name = "DropWords"

    def _changed(self, text: pa.Array, draws: Draws) -> pa.Array:
        return _without_words(text, self.probability, draws)


class SwapChars(_TextNoise):
    """Swap neighbouring characters of a word, each pair with this probability, as fast typing does.

    A character takes part in one swap at most; whitespace does not move. `key` as in `Jitter`.
    """

    _name = "SwapChars"

    def _changed(self, text: pa.Array, draws: Draws) -> pa.Array:
        return _with_swaps(text, self.probability, draws)


def row_keys(batch: pa.RecordBatch, key: str | None = None) -> Words:
    """A 64-bit number for each row: a hash of its key column, or of all its values in any order."""
    names = batch.schema.names if key is None else [key]
    keys = np.zeros(batch.num_rows, np.uint64)
    for name in names:
        keys += mix64(hash64(column(batch, name), xxhash.xxh3_64_intdigest(name.encode())))
    return keys


class Draws:
    """Random numbers by counter: each depends only on the key of its row, the seed, the stream and its index.

    A stream is a name; numbers from different streams are independent.
    """

    def __init__(self, keys: Words, seed: int, stream: str) -> None:
        self._rows = mix64(keys ^ np.uint64(xxhash.xxh3_64_intdigest(stream.encode(), seed)))

    def uniforms(
        self, rows: np.ndarray[Any, Any] | slice = slice(None), index: np.ndarray[Any, Any] | int = 0
    ) -> Floats:
        """Numbers in [0, 1), one for each of these rows and indices."""
        counters = np.atleast_1d(np.asarray(index)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = mix64(self._rows[rows] + counters)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def gaussians(self) -> Floats:
        """One number of the standard normal distribution for each row (Box and Muller)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniforms(index=0)))
        return radius * np.cos(2.0 * np.pi * self.uniforms(index=1))


def _without_words(text: pa.Array, probability: float, draws: Draws) -> pa.Array:
    data, bounds = utf8(text)
    starts = word_starts(word_bytes(data), bounds)
    words = row_sums(starts, bounds)
    if not words.any():
        return text
    row, place = _spelled_out(words)
    chance = draws.uniforms(row, place)
    drop = chance < probability
    filled = words > 0
    firsts = (np.cumsum(words) - words)[filled]
    luckiest = np.repeat(np.maximum.reduceat(chance, firsts), words[filled])
    drop &= chance < luckiest
    if not drop.any():
        return text
    at = np.flatnonzero(starts)
    until = np.minimum(np.append(at[1:], data.size), bounds[1:][row])
    # +1 where a dropped word begins and -1 where the next begins, summed up, is 1 on every byte that goes.
    edges = np.zeros(data.size + 1, np.int8)
    edges[at[drop]] += 1
    edges[until[drop]] -= 1
    keep = np.cumsum(edges[:-1], dtype=np.int8) == 0
    return from_utf8(Utf8(np.compress(keep, data), offsets_of(row_sums(keep, bounds))), text)


def _with_swaps(text: pa.Array, probability: float, draws: Draws) -> pa.Array:
    data, bounds = utf8(text.fill_null("") if text.null_count else text)  # the bytes of a null may be no UTF-8
    # Characters of one to four bytes become numbers of four: positions are then characters.
    chars = np.frombuffer(data.tobytes().decode().encode("utf-32-le"), np.uint32).copy()
    first_bytes = (data & 0xC0) != 0x80
    lengths = row_sums(first_bytes, bounds)
    row, place = _spelled_out(lengths)
    word = word_bytes(data)[first_bytes]
    pair = word[:-1] & word[1:] & (row[:-1] == row[1:])
    swap = np.flatnonzero(pair & (draws.uniforms(row, place)[:-1] < probability))
    if not swap.size:
        return text
    # Of pairs that overlap, every other one is swapped, so no character moves twice.
    begins = np.append(True, np.diff(swap) > 1)
    run = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    swap = swap[(np.arange(swap.size) - run) % 2 == 0]
    chars[swap], chars[swap + 1] = chars[swap + 1], chars[swap]
    # The bytes of a row are the same ones in another order, so the bounds stay.
    swapped = np.frombuffer(chars.tobytes().decode("utf-32-le").encode(), np.uint8)
    return from_utf8(Utf8(swapped, bounds), text)


def _spelled_out(counts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For things of which row r has counts[r]: the row of each, and its place in the row."""
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _as_probability(probability: float) -> float:
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    return probability
