"""Gather: tokens by row, copied from the mapped shards into the arrays of a batch.

    table = TokenTable([open_store("corpus.store")])
    rows, starts = np.array([7, 3]), np.array([0, 0])
    table.copy(rows, starts, table.lengths(rows), out, at)

Rows of several stores are numbered consecutively. Mapped shards are parts of one address space, so rows of one length
are gathered by a single indexing operation. Rows that are not requested cost nothing: a table of a billion rows opens
in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import offsets_of, owners_of
from penstock.errors import DataError, SchemaError
from penstock.memory.views import LONGEST_STRETCH, memory_as, place_of, stretches_of
from penstock.store.bucket_shards import BucketShard
from penstock.store.reader import Store
from penstock.store.shards import ShardReader, damaged

Ints = npt.NDArray[np.int64]
Held: TypeAlias = "dict[int, _Shard]"
"""Shards with addresses that are valid as long as this is referred to."""
_FEW_ROWS = 1 << 20
"""Tables of fewer rows know where every row begins, in 8 bytes for each."""
_GROUP_ROWS = 8
"""Rows whose tokens are summed up together, so that a token is found without knowing where every row begins."""
_MANY_ROWS, _MANY_GROUP_ROWS = 50_000_000, 64
"""From so many rows on, groups are larger: their sums take 8 bytes for each group."""
_STRETCH_TOKENS = 1 << 15
"""Tokens of rows of one length that are copied by one operation."""
_SHORT_TOKENS = 48
"""Parts of fewer tokens on average are copied token by token, longer ones slice by slice."""
_MOST_MAPPED = 1 << 15
"""Pieces of stores in buckets that are mapped at a time: a system allows a process some 65,000 mappings."""
_MOST_SHARDS = 1 << 14
"""Shards of stores on disk that a table maps at a time, two files each; the older half is let go of then."""
_RELEASE_SECONDS = 10.0
"""Time after which pieces that other processes have evicted are let go of."""


class TokenTable:
    """The rows of one or several stores with the same kind of tokens, numbered through.

    Safe to use from several threads. Shards are checked according to `verify` of `open_store`.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("a table of tokens needs at least one store")
        self.stores = tuple(stores)
        self.column, self.mask_column = self._columns()
        self.entries = [(store, number) for store in stores for number in range(len(store.manifest.shards))]
        entries = [store.manifest.shards[number] for store, number in self.entries]
        self.row_starts = offsets_of([entry.rows for entry in entries])
        self.token_starts = offsets_of([entry.tokens or 0 for entry in entries])
        self._shards: dict[int, _Shard] = {}
        self.in_bucket = any(store.bucket is not None for store in stores)
        """True if parts of the rows have to be fetched."""
        self._checked = 0
        """Number of the shard to begin with when some of them are checked."""
        self._evictions, self._released = 0, time.monotonic()
        self.dtype = self._dtype_of(self.column)
        self._memory = memory_as(self.dtype)
        mask = None if self.mask_column is None else stores[0].schema.field(self.mask_column).type.value_type
        self._mask_is_bits = mask is None or pa.types.is_boolean(mask)
        if self.mask_column is not None and not self._mask_is_bits:
            self._mask_memory = memory_as(self._dtype_of(self.mask_column))

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])

    @property
    def tokens(self) -> int:
        return int(self.token_starts[-1])

    @property
    def masked(self) -> bool:
        """True if the store has a mask of supervised tokens; without one, all tokens are supervised."""
        return self.mask_column is not None

    @property
    def supervised(self) -> int | None:
        """Number of supervised tokens; None if there is no mask, which means all of them."""
        if self.mask_column is None:
            return None
        return sum(store.manifest.supervised or 0 for store in self.stores)

    def lengths(self, rows: npt.ArrayLike) -> Ints:
        """Tokens of some rows."""
        wanted = np.asarray(rows, np.int64)
        found = np.empty(len(wanted), np.int64)
        for number, which, within in self._by_shard(wanted, self.row_starts, fetch=True):
            found[which] = self._shard(number).lengths[within]
        return found

    def find_tokens(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """The row that holds the n-th token of the table, and which of its tokens that is."""
        wanted = np.asarray(positions, np.int64)
        rows, starts = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
        for number, which, within in self._by_shard(wanted, self.token_starts, fetch=True):
            found, starts[which] = self._shard(number).find_tokens(within)
            rows[which] = found + self.row_starts[number]
        return rows, starts

    def locate(self, rows: Ints, starts: Ints, held: Held | None = None) -> Ints:
        """Addresses, for `copy_from`, of rows without their first `starts` tokens.

        Best called for many parts at once; the cost is by shard. They stay valid as long as `held`, which `held()`
        returned before, is referred to.
        """
        places = np.empty(len(rows), np.int64)
        found = self._by_shard(rows, self.row_starts, fetch=True)
        if self.in_bucket:
            self._request(found, held)
        for number, which, within in found:
            places[which] = self._shard(number, held).tokens.locate(within)
        return places + starts

    def locate_mask(self, rows: Ints, starts: Ints, held: Held | None = None) -> Ints:
        """The same for `copy_mask_from`; only for a table that has a mask."""
        places = np.empty(len(rows), np.int64)
        found = self._by_shard(rows, self.row_starts, fetch=True)
        if self.in_bucket:
            self._request(found, held)
        for number, which, within in found:
            mask = self._shard(number, held).mask
            if mask is None:
                raise SchemaError("these stores have no mask of supervised tokens")
            places[which] = mask.locate(within)
        return places + starts

    def by_shard(self, rows: Ints) -> list[tuple[int, Any, Ints]]:
        """(shard, which of the rows are in it, their numbers in it) for every shard that is touched."""
        return self._by_shard(rows, self.row_starts, fetch=True)

    def request(self, rows: Ints) -> int:
        """Begin to fetch the pieces of rows that are in buckets, and not here yet; the bytes of those not in use."""
        return self._request(self._by_shard(rows, self.row_starts, fetch=True), None) if self.in_bucket else 0

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy tokens `starts[j]` to `starts[j] + lengths[j]` of row `rows[j]` to `out[at[j]:]`, for every part j."""
        held = self.held()
        self.copy_from(self.locate(rows, starts, held), lengths, out, at)
        del held

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        """Copy the loss mask of these tokens to `out[at[j]:]`."""
        held = self.held()
        self.copy_mask_from(self.locate_mask(rows, starts, held), lengths, out, at)
        del held

    def copy_from(self, places: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy the `lengths[j]` tokens from `places[j]` on to `out[at[j]:]`, for every part j.

        `out` is flat, and as wide as it likes. The loop is over parts, not over tokens; of parts that are short on
        average, all tokens are one operation. The table has to be open, since places are addresses.
        """
        numbers, total = self._memory, int(lengths.sum())
        if len(lengths) > 8 and total < _SHORT_TOKENS * len(lengths):
            moves = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            out[np.repeat(at, lengths) + moves] = numbers[np.repeat(places, lengths) + moves]
            return
        if len(lengths) > 1:
            places, lengths, at = _joined(places, lengths, at)
        if (rows := _whole_rows(lengths, out, at)) is not None:
            stretches, step = stretches_of(self.dtype, rows.shape[1]), max(1, _STRETCH_TOKENS // rows.shape[1])
            for start in range(0, len(rows), step):  # what is copied twice stays in the cache of the core
                rows[start : start + step] = stretches[places[start : start + step]]
            return
        for place, length, target in zip(places.tolist(), lengths.tolist(), at.tolist()):
            out[target : target + length] = numbers[place : place + length]

    def rows_from(self, places: Ints, length: int) -> npt.NDArray[Any]:
        """Rows of `length` tokens, each from its place on, in the type of the store: one operation for all of them."""
        if length <= LONGEST_STRETCH:
            found: npt.NDArray[Any] = stretches_of(self.dtype, length)[places]
            return found
        out = np.empty((len(places), length), self.dtype)
        self.copy_from(places, np.full(len(places), length), out.reshape(-1), np.arange(len(places)) * length)
        return out

    def copy_mask_from(self, places: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        """As `copy_from`, with places of `locate_mask`: true where a token is supervised."""
        if not self._mask_is_bits:
            numbers = self._mask_memory
            for place, length, target in zip(places.tolist(), lengths.tolist(), at.tolist()):
                out[target : target + length] = numbers[place : place + length] != 0
            return
        # The bytes of all parts at once, unpacked at once; then each part without the bits before and after it.
        first = places >> 3
        counts = ((places + lengths + 7) >> 3) - first
        starts = np.cumsum(counts) - counts
        wanted = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
        bits = np.unpackbits(memory_as(np.dtype(np.uint8))[wanted], bitorder="little").view(np.bool_)
        begins = starts * 8 + (places & 7)
        for begin, length, target in zip(begins.tolist(), lengths.tolist(), at.tolist()):
            out[target : target + length] = bits[begin : begin + length]

    def row(self, row: int) -> dict[str, Any]:
        """One row as its store has it, with all its columns."""
        store, within = self.origin(row)
        return store[within]

    def origin(self, row: int) -> tuple[Store, int]:
        """The store that a row is from, and its number there."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a table with {self.rows} rows")
        for store in self.stores:
            if row < len(store):
                return store, row
            row -= len(store)
        raise AssertionError("unreachable")

    def _by_shard(self, numbers: Ints, starts: Ints, *, fetch: bool = False) -> list[tuple[int, Any, Ints]]:
        """(shard, which of the numbers lie in it, where in it) for every shard that is touched.

        With `fetch`, the indexes of those in buckets are fetched, all at once.
        """
        found = self._split(numbers, starts) if len(numbers) else []
        if fetch and self.in_bucket:
            shards = self._shards
            fresh = [self.entries[number] for number, _, _ in found if number not in shards]
            for store in {id(store): store for store, _ in fresh if store.bucket is not None}.values():
                assert store.bucket is not None
                store.bucket.fetch_layouts([shard for other, shard in fresh if other is store])
        return found

    def _request(self, found: list[tuple[int, Any, Ints]], held: Held | None) -> int:
        """Begin to fetch the pieces of rows of shards that have no address yet."""
        nbytes = 0
        for store in self.stores:
            if store.bucket is None:
                continue
            wanted: list[tuple[int, int]] = []
            for number, _, within in found:
                if self.entries[number][0] is store:
                    shard = self.entries[number][1]
                    tokens = self._shard(number, held).tokens
                    assert isinstance(tokens, _Flat)
                    wanted += [(shard, piece) for piece in tokens.missing(within)]
            if wanted:
                nbytes += store.bucket.request(wanted)
        return nbytes

    def _split(self, numbers: Ints, starts: Ints) -> list[tuple[int, Any, Ints]]:
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= starts[-1]:
            raise IndexError(f"{low} to {high} of a table that has {int(starts[-1])}")
        if len(starts) == 2:
            return [(0, slice(None), numbers)]
        owner = owners_of(starts, numbers)
        if len(starts) <= 1 << 16:
            owner = owner.astype(np.uint16)  # which is sorted by radix
        if (owner == owner[0]).all():
            return [(int(owner[0]), slice(None), numbers - starts[owner[0]])]
        order = np.argsort(owner, kind="stable")
        cuts = np.flatnonzero(np.diff(owner[order])) + 1
        groups = np.split(order, cuts)
        return [(int(owner[group[0]]), group, numbers[group] - starts[owner[group[0]]]) for group in groups]

    def _shard(self, number: int, held: Held | None = None) -> _Shard:
        shards = self._shards if held is None else held
        shard = shards.get(number)
        if shard is None:
            shard = shards[number] = self._open_shard(number)
            if shards is self._shards and len(shards) > _MOST_SHARDS:
                self._release_older()
        return shard

    def _release_older(self) -> None:
        """Let go of the shards that were opened first. Those who hold `held()` keep the addresses that they have."""
        shards = list(self._shards.items())
        kept = dict(shards[len(shards) // 2 :])
        for store in self.stores:
            store.release_shards([self.entries[number][1] for number in kept if self.entries[number][0] is store])
        self._shards = kept

    def _open_shard(self, number: int) -> _Shard:
        group = _GROUP_ROWS if self.rows < _MANY_ROWS else _MANY_GROUP_ROWS
        group = 1 if self.rows < _FEW_ROWS else group
        return _Shard(*self.entries[number], self.column, self.mask_column, group)

    def _columns(self) -> tuple[str, str | None]:
        first = self.stores[0].manifest
        for store in self.stores:
            manifest = store.manifest
            if manifest.tokens_column is None:
                raise SchemaError(f"{store.shown} holds no tokens; prepare it with a tokenizer")
            here, there = (manifest.tokens_column, manifest.mask_column), (first.tokens_column, first.mask_column)
            if here != there:
                raise SchemaError(
                    f"stores that are read together need the same columns: {self.stores[0].shown} has tokens and mask "
                    f"in {there}, {store.shown} in {here}"
                )
            if manifest.tokenizer != first.tokenizer:
                raise SchemaError(
                    f"stores that are read together need the same tokenizer: {self.stores[0].shown} was made with "
                    f"{first.tokenizer}, {store.shown} with {manifest.tokenizer}; prepare one of them again"
                )
        assert first.tokens_column is not None
        return first.tokens_column, first.mask_column

    def held(self) -> Held:
        """Object that keeps the addresses of this table valid while it is referred to."""
        return self._shards

    def check_unchanged(self, most: int | None = None) -> None:
        """Raise if a shard that is being read was changed or removed since: mapped memory does not show it.

        At most `most` shards are looked at; the next call looks at the next ones. Of stores in buckets, evicted pieces
        are let go of, since the disk keeps what is mapped.
        """
        if self.in_bucket:
            self._release_evicted()
            if all(store.bucket is not None for store in self.stores):
                return
        shards = list(self._shards.values())
        if most is not None and len(shards) > most:
            self._checked = (self._checked + most) % len(shards)
            shards = (shards * 2)[self._checked : self._checked + most]
        for shard in shards:
            shard.stamp.check()

    def _release_evicted(self) -> None:
        """Let go of pieces that are not in the cache any more, and of all if too many are mapped."""
        shards = self._shards
        many = sum(shard.mapped for shard in shards.values()) > _MOST_MAPPED
        caches = {id(store.bucket.cache): store.bucket.cache for store in self.stores if store.bucket is not None}
        evictions = sum(cache.evictions for cache in caches.values())
        now = time.monotonic()
        if many or evictions != self._evictions or now - self._released > _RELEASE_SECONDS:
            self._evictions, self._released = evictions, now
            # Other objects: addresses stay valid for those who hold the old ones.
            self._shards = {number: shard.released(everything=many) for number, shard in shards.items()}

    def _dtype_of(self, column: str) -> np.dtype[Any]:
        kinds = {store.schema.field(column).type for store in self.stores}
        if len(kinds) > 1:
            raise SchemaError(
                f"stores that are read together need the same types; {column!r} has {sorted(map(str, kinds))}"
            )
        values = next(iter(kinds)).value_type
        if not pa.types.is_integer(values):
            raise SchemaError(
                f"tokens are whole numbers, and the column {column!r} of {self.stores[0].shown} holds {values}"
            )
        return np.dtype(str(values))

    def close(self) -> None:
        """Release the shards."""
        self._shards = {}
        for store in self.stores:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TokenTable.__init__(self, state["stores"])


class Placed:
    """Parts of rows whose places are known already: row j of it is the j-th of them."""

    def __init__(self, table: TokenTable, places: Ints, mask_places: Ints | None, held: object = None) -> None:
        self._table, self._places, self._mask_places = table, places, mask_places
        # Places are addresses: what lies there has to stay, even if the table is closed.
        self._held = table.held() if held is None else held
        self.dtype = table.dtype

    @property
    def masked(self) -> bool:
        return self._table.masked

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        self._table.copy_from(self._places[rows] + starts, lengths, out, at)

    def take_rows(self, rows: Ints, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Rows of `length` tokens, each of one part, in the type of the store."""
        return self._table.rows_from(self._places[rows] + starts, length)

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        if self._mask_places is None:
            raise SchemaError("these stores have no mask of supervised tokens")
        self._table.copy_mask_from(self._mask_places[rows] + starts, lengths, out, at)


@runtime_checkable
class TokenPlaces(Protocol):
    """A column of tokens whose rows are found by address."""

    def locate(self, rows: Ints) -> Ints: ...


class _Shard:
    """One shard: the length of each row, and its columns of tokens and of the mask as flat arrays."""

    def __init__(self, store: Store, number: int, column: str, mask: str | None, group_rows: int = _GROUP_ROWS) -> None:
        self._store, self._number, self._group_rows = store, number, group_rows
        self._column, self._mask_column = column, mask
        self.stamp = store.stamp(number)
        self.lengths: npt.NDArray[np.int32] = store.map_lengths(number)
        self._groups: Ints | None = None
        self._tokens: TokenPlaces | None = None
        self._mask: _Flat | None = None

    @property
    def mapped(self) -> int:
        """Pieces that are mapped one by one."""
        return sum(len(flat.held) for flat in (self._tokens, self._mask) if isinstance(flat, _Flat))

    def released(self, *, everything: bool) -> _Shard:
        """The same shard without addresses of evicted pieces, or without any; itself if nothing changes."""
        shards = self._store.bucket
        if shards is None or not self.mapped:
            return self
        fresh = copy(self)
        if everything:
            fresh._tokens = fresh._mask = None
            return fresh
        tokens, mask = self._tokens, self._mask
        held = {piece for flat in (tokens, mask) if isinstance(flat, _Flat) for piece in flat.held}
        gone = {piece for piece in held if not shards.has(self._number, piece)}
        if not gone:
            return self
        fresh._tokens = tokens.without(gone) if isinstance(tokens, _Flat) else tokens
        fresh._mask = None if mask is None else mask.without(gone)
        return fresh

    # No cached_property: in Python 3.11 it holds one lock for all shards while a file is opened.

    @property
    def tokens(self) -> TokenPlaces:
        if self._tokens is None:
            reader: Any = self._store.open_shard(self._number)
            # Flat files of other programs know the places of their rows themselves.
            known: bool = isinstance(reader, TokenPlaces)
            found: TokenPlaces = reader if known else _Flat(reader, self._column, self.lengths)
            self._tokens = found
        return self._tokens

    @property
    def mask(self) -> _Flat | None:
        if self._mask is None and self._mask_column is not None:
            self._mask = _Flat(self._store.open_shard(self._number), self._mask_column)
        return self._mask

    def find_tokens(self, positions: Ints) -> tuple[Ints, Ints]:
        """The row of each token, and which of its tokens that is."""
        size = self._group_rows
        if self._groups is None:
            sums = np.add.reduceat(self.lengths, np.arange(0, len(self.lengths), size), dtype=np.int64)
            self._groups = offsets_of(sums)
        order = np.argsort(positions)  # a search for sorted numbers is several times as fast
        group = np.empty_like(order)
        group[order] = np.searchsorted(self._groups, positions[order], side="right") - 1
        left = positions - self._groups[group]
        if size == 1:
            if group.max(initial=0) >= len(self.lengths):
                raise self._short()
            return group, left
        ends = np.cumsum(self._lengths_of_groups(group), axis=1, dtype=np.int64)
        which = np.count_nonzero(ends <= left[:, None], axis=1)
        if (which >= size).any():
            raise self._short()
        before = np.where(which > 0, ends[np.arange(len(which)), which - 1], 0)
        return group * size + which, left - before

    def _short(self) -> DataError:
        path = self._store.shard_path(self._number)
        return damaged(path, "its index does not add up to the tokens that the manifest counts")

    def _lengths_of_groups(self, groups: Ints) -> npt.NDArray[np.int32]:
        """Lengths of the rows of some groups, one line a group; behind the last row they are 0."""
        size = self._group_rows
        whole = len(self.lengths) // size
        lines = self.lengths[: whole * size].reshape(whole, size)
        if groups.max(initial=0) < whole:
            return lines[groups]
        found = np.zeros((len(groups), size), np.int32)
        inside = groups < whole
        found[inside] = lines[groups[inside]]
        rest = self.lengths[whole * size :]
        found[~inside, : len(rest)] = rest
        return found


class _Flat:
    """A column of lists of numbers in a shard: where the values of a row begin, as a place in memory."""

    def __init__(
        self, reader: ShardReader | BucketShard, column: str, lengths: npt.NDArray[np.int32] | None = None
    ) -> None:
        self._lengths = lengths
        self.held: dict[int, pa.RecordBatch] = {}
        """Pieces of a shard in a bucket, whose addresses are valid as long as they are referred to."""
        self._reader, self._column = reader, reader.schema.get_field_index(column)
        kind = reader.schema.field(column).type
        self._fixed = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        self._offsets = memory_as(np.dtype(np.int64 if pa.types.is_large_list(kind) else np.int32))
        self._bits: int = kind.value_type.bit_width
        self._starts = np.asarray(reader.starts[:-1], np.int64)
        self._values_at = np.full(len(self._starts), -1, np.int64)
        self._offsets_at = np.full(len(self._starts), -1, np.int64)

    def locate(self, rows: Ints) -> Ints:
        """Address of the values of rows; for booleans, counted in bits."""
        pieces = owners_of(self._starts, rows)
        values = self._values_at[pieces]
        if values.min() < 0:
            for piece in np.unique(pieces[values < 0]).tolist():
                self._look_at(piece)
            values = self._values_at[pieces]
        within = rows - self._starts[pieces]
        if self._fixed is not None:
            return np.asarray(values + within * self._fixed)
        found: Ints = np.add(values, self._offsets[self._offsets_at[pieces] + within], dtype=np.int64)
        return found

    def missing(self, rows: Ints) -> list[int]:
        """Pieces of rows that have not been looked at."""
        pieces = np.unique(np.searchsorted(self._starts, rows, side="right") - 1)
        return pieces[self._values_at[pieces] < 0].tolist()  # type: ignore[no-any-return]

    def without(self, pieces: Collection[int]) -> _Flat:
        """The same column without the addresses of some pieces."""
        fresh = copy(self)
        fresh.held = {piece: batch for piece, batch in self.held.items() if piece not in pieces}
        fresh._values_at = self._values_at.copy()
        fresh._values_at[list(pieces)] = -1
        return fresh

    def _look_at(self, piece: int) -> None:
        batch = self._reader.batch(piece)
        if isinstance(self._reader, BucketShard):
            self.held[piece] = batch
        column = batch.column(self._column)
        try:
            if column.offset or column.values.offset:
                raise ValueError("a record batch begins in the middle of its buffers")
            values, width = column.values.buffers()[1], max(self._bits // 8, 1)
            place = 0 if values is None else place_of(values.address, width)
            if values is not None and len(column.values) * self._bits > values.size * 8:
                raise ValueError("a column ends before its values do")
            offsets = np.arange(len(column) + 1) * (self._fixed or 0)
            if self._fixed is None:
                at = place_of(column.buffers()[1].address, self._offsets.itemsize)
                offsets = self._offsets[at : at + len(column) + 1]
                self._offsets_at[piece] = at
            self._check_offsets(offsets, len(column.values), int(self._starts[piece]))
        except ValueError as error:
            raise damaged(self._reader.path, str(error), int(self._starts[piece])) from error
        self._values_at[piece] = place * 8 if self._bits == 1 else place

    def _check_offsets(self, offsets: npt.NDArray[Any], values: int, first: int) -> None:
        """Check offsets now: addresses are read unchecked, so none may lie outside the values."""
        sizes = offsets[1:] - offsets[:-1]
        if offsets[0] < 0 or offsets[-1] > values or (sizes < 0).any():
            raise ValueError("the offsets of rows lie outside the values")
        if self._lengths is not None and (self._lengths[first : first + len(sizes)] != sizes).any():
            raise ValueError("rows do not have the lengths of the index")


def _whole_rows(lengths: Ints, out: npt.NDArray[Any], at: Ints) -> npt.NDArray[Any] | None:
    """The parts in `out` as rows, if they have one length and follow one another."""
    length = int(lengths[0]) if len(lengths) > 1 else 0
    if not 0 < length <= LONGEST_STRETCH or (lengths != length).any() or (np.diff(at) != length).any():
        return None
    first = int(at[0])
    return out[first : first + len(at) * length].reshape(-1, length)


def _joined(places: Ints, lengths: Ints, at: Ints) -> tuple[Ints, Ints, Ints]:
    """Parts with those joined that are next to each other in memory and in the batch, as rows of a shard often are."""
    ends = lengths[:-1]
    apart = (places[1:] != places[:-1] + ends) | (at[1:] != at[:-1] + ends)
    heads = np.concatenate([[0], np.flatnonzero(apart) + 1])
    if len(heads) == len(places):
        return places, lengths, at
    return places[heads], np.add.reduceat(lengths, heads), at[heads]
