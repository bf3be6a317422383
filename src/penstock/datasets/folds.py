"""Folds: division of rows into training and validation without leaks, the same in every process.

plain                  random rows
stratified             each class, or each bin of a number, evenly
grouped                rows of one group (a patient, a query) never on both sides
stratified_grouped     whole groups, classes as even as groups allow
time                   validation strictly later than training, which grows from fold to fold; a validated group is
                       not trained on either

    fold = Folds(5).split(table, spec, 0)
    fold.train, fold.val        # row numbers, ascending
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.arrays.text import is_text
from penstock.datasets.dates import date_remedy, find_dates, read_dates
from penstock.datasets.rows import column_of
from penstock.datasets.spec import DatasetSpec, plain
from penstock.errors import ConfigError, DataError
from penstock.order.permutation import Permutation, derive_key

Rows = npt.NDArray[np.int64]

_WHOLE = 1 << 20
"""Share of all rows of a class, as an integer."""


def codes_of(columns: Sequence[pa.Array]) -> Rows:
    """Number for each row, equal exactly if all columns are equal; missing values are equal."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = column.dictionary_encode() if not pa.types.is_dictionary(column.type) else column
        found = np.asarray(encoded.indices.fill_null(-1)).astype(np.int64) + 1
        joint = codes * (int(found.max()) + 1) + found
        codes = np.unique(joint, return_inverse=True)[1].astype(np.int64)
    return codes


def joined_groups(relations: Sequence[Rows]) -> Rows:
    """Groups that join all rows that any of the relations joins."""
    groups = relations[0]
    for other in relations[1:]:
        groups = _joined(groups, other)
    return groups


def assign_groups(groups: Rows, classes: Rows | None, places: Rows, count: int, names: Sequence[str] = ()) -> Rows:
    """Fold of each row: whole groups, the largest first, each to the fold with the fewest rows of its classes.

    `places` decides between groups of one size.
    """
    sizes = np.bincount(groups)
    if len(sizes) < count:
        by = f" of {list(names)}" if names else ""
        raise ConfigError(f"{len(sizes)} groups{by} cannot be divided into {count} folds; use fewer folds")
    first = np.full(len(sizes), len(places), np.int64)
    np.minimum.at(first, groups, places)
    if classes is None:
        classes = np.zeros(len(groups), np.int64)
    kinds = int(classes.max()) + 1
    # Classes of each group, group after group: most groups have few of the classes.
    pairs, amounts = np.unique(groups * kinds + classes, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(len(sizes) + 1) * kinds)
    which = pairs % kinds
    # Integers, so that no machine rounds a near tie differently.
    share = amounts * np.maximum(_WHOLE // np.maximum(np.bincount(classes, minlength=kinds), 1), 1)[which]
    held = np.zeros((count, kinds), np.int64)
    rows_in = np.zeros(count, np.int64)
    fold_of = np.empty(len(sizes), np.int64)
    for group in np.lexsort((first, -sizes)).tolist():
        part = slice(bounds[group], bounds[group + 1])
        crowding = held[:, which[part]] @ amounts[part]
        fold = int(np.lexsort((rows_in, crowding))[0])
        held[fold, which[part]] += share[part]
        rows_in[fold] += sizes[group]
        fold_of[group] = fold
    return fold_of[groups]


def _joined(first: Rows, second: Rows) -> Rows:
    """Connected components of rows, each row being an edge between its two groups."""
    offset = int(first.max()) + 1
    parent = list(range(offset + int(second.max()) + 1))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    edges = np.unique(np.stack([first, second + offset]), axis=1)
    for a, b in zip(*edges.tolist()):
        parent[root(b)] = root(a)
    roots = np.array([root(node) for node in range(offset)])
    return np.unique(roots[first], return_inverse=True)[1].astype(np.int64)


log = logging.getLogger(__name__)

_warned: set[tuple[Folds, bytes]] = set()
"""Folds and class counts that were warned of, so that each is logged once."""

FoldKind = Literal["auto", "plain", "stratified", "grouped", "stratified_grouped", "time"]


class Fold(NamedTuple):
    """Rows of one fold, as ascending numbers; no row is in both."""

    train: Rows
    val: Rows


@dataclass(frozen=True)
class Folds:
    """Division of the rows of a training file, `count` times, into training and validation.

    Every row is validated in exactly one fold; with "time", rows of the first part never are. "auto" follows the spec:
    "time" with a time column, "grouped" with a group column ("stratified_grouped" for classes), "stratified" for
    classes, else "plain". With both columns, training excludes the groups that the fold validates; their number of rows
    is logged. The same rows, spec and arguments give the same folds on every machine.
    """

    count: int = 5
    _: KW_ONLY
    kind: FoldKind = "auto"
    seed: int = 0
    by: str | None = None
    """Column that replaces the spec's group, time or (stratified) target column."""
    gap: int = 0
    """With "time": number of distinct times before validation that training excludes."""
    keep_together: tuple[str, ...] = ()
    """Columns whose equal rows stay on one side: copies of a row would leak."""
    bins: int = 10
    """Number of bins of equal size for folds that are stratified by a number."""

    def __post_init__(self) -> None:
        for name in ("count", "seed", "gap", "bins"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.kind not in get_args(FoldKind):
            known = get_args(FoldKind)
            raise ConfigError(f"kind must be one of {list(known)}, got {self.kind!r}{did_you_mean(self.kind, known)}")
        for name, least in (("count", 2), ("gap", 0), ("bins", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        together = (self.keep_together,) if isinstance(self.keep_together, str) else tuple(self.keep_together)
        object.__setattr__(self, "keep_together", together)
        if self.by is not None and self.kind == "auto":
            raise ConfigError(
                f"by={self.by!r} needs a kind: one of 'grouped', 'stratified_grouped', 'stratified' and 'time'"
            )
        if self.kind != "auto":
            self._refuse_misfits(self.kind)

    def kind_for(self, spec: DatasetSpec) -> FoldKind:
        """Kind for this spec: the meaning of "auto", else the kind itself."""
        if self.kind != "auto":
            return self.kind
        classes = spec.competition_type.is_classification or spec.competition_type.has_classes
        if spec.time_column is not None:
            return "time"
        if spec.group_column is not None:
            return "stratified_grouped" if classes and spec.targets else "grouped"
        return "stratified" if classes and spec.targets else "plain"

    def assign(self, table: Any, spec: DatasetSpec) -> Rows:
        """Fold in which each row is validated; -1 for rows of no fold (the first part of "time")."""
        count = len(table)
        if count < self.count:
            raise ConfigError(f"{count} rows cannot be divided into {self.count} folds; use fewer folds")
        kind = self.kind_for(spec)
        self._refuse_misfits(kind)
        if kind == "time":
            return self._parts(self._times(table, spec)) - 1
        places = Permutation(count, derive_key(self.seed, "folds"))(np.arange(count))
        groups = self._groups(table, spec, kind)
        classes = self._classes(table, spec) if kind in ("stratified", "stratified_grouped") else None
        if groups is not None:
            return assign_groups(groups, classes, places, self.count, self._group_names(spec, kind))
        if classes is None:
            return np.asarray(places % self.count)
        self._warn_of_rare(classes)
        # Round robin, class after class and random within a class: folds differ by at most one row of each class, and
        # by at most one row in all.
        order = np.lexsort((places, classes))
        folds = np.empty(count, np.int64)
        folds[order] = np.arange(count) % self.count
        return folds

    def split(self, table: Any, spec: DatasetSpec, fold: int) -> Fold:
        """Rows of one fold, from 0 to `count - 1`."""
        fold = plain(fold)
        if isinstance(fold, bool) or not isinstance(fold, int) or not 0 <= fold < self.count:
            raise ConfigError(f"fold must be from 0 to {self.count - 1}, got {fold!r}")
        folds = self.assign(table, spec)
        if self.kind_for(spec) != "time":
            return Fold(np.flatnonzero(folds != fold), np.flatnonzero(folds == fold))
        times = self._times(table, spec)
        val = np.flatnonzero(folds == fold)
        last = int(times[val].min()) - self.gap
        train = np.flatnonzero(times < last)
        if not len(train):
            raise ConfigError(
                f"gap={self.gap} leaves no rows to train on in fold {fold}, which validates from the "
                f"{int(times[val].min()) + 1}th of {int(times.max()) + 1} different times; use a smaller gap"
            )
        return Fold(self._without_groups(train, val, table, spec, fold), val)

    def _without_groups(self, train: Rows, val: Rows, table: Any, spec: DatasetSpec, fold: int) -> Rows:
        """Training rows whose group is not validated."""
        name = spec.group_column
        if name is None or name == self.by:
            return train
        groups = codes_of([_filled(column_of(table, name), name, "group")])
        kept = train[~np.isin(groups[train], groups[val])]
        if not len(kept):
            raise ConfigError(
                f"every training row of fold {fold} is of a group of {name!r} that is validated later; remove "
                "group_column from the spec if a group may be in both, or pass kind='grouped' to ignore time"
            )
        if len(kept) < len(train):
            log.info(
                "fold %d: %d of %d rows are excluded from training, since their group of %r is validated",
                fold, len(train) - len(kept), len(train), name,
            )  # fmt: skip
        return kept

    def _refuse_misfits(self, kind: FoldKind) -> None:
        if self.gap and kind != "time":
            raise ConfigError(f"gap={self.gap} is for kind='time', got {kind!r}")
        if self.keep_together and kind == "time":
            raise ConfigError(
                f"keep_together={list(self.keep_together)} does not work with kind='time'; remove one of them"
            )

    # -- columns ------------------------------------------------------------------------------------------------------

    def _times(self, table: Any, spec: DatasetSpec) -> Rows:
        """Times as ranks 0, 1, 2, ...; equal times have equal ranks."""
        name = self.by or spec.time_column
        if name is None:
            raise ConfigError("kind='time' needs a column: give the spec a time_column, or pass by=...")
        column = _filled(column_of(table, name), name, "time")
        if is_text(column.type):
            column = _as_times(column, name, spec.date_formats.get(name))
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        return np.unique(np.asarray(column), return_inverse=True)[1].astype(np.int64)

    def _parts(self, times: Rows) -> Rows:
        """`count + 1` consecutive parts of about equal size, cut between different times."""
        there = np.cumsum(np.bincount(times))
        different, parts = len(there), self.count + 1
        if different < parts:
            raise ConfigError(
                f"{self.count} folds in time need {parts} different times, and there are {different}; use fewer folds"
            )
        ends = np.searchsorted(there, len(times) * np.arange(1, parts) / parts - 0.5)
        ends = np.maximum.accumulate(ends - np.arange(self.count)) + np.arange(self.count)  # each part has one time
        ends = np.minimum(ends, different - parts + np.arange(self.count))
        return np.searchsorted(ends, times, side="left").astype(np.int64)

    def _group_names(self, spec: DatasetSpec, kind: FoldKind) -> list[str]:
        own = []
        if kind in ("grouped", "stratified_grouped"):
            name = self.by or spec.group_column
            if name is None and not self.keep_together:
                raise ConfigError(f"kind={kind!r} needs a column: give the spec a group_column, or pass by=...")
            own = [name] if name is not None else []
        return own

    def _groups(self, table: Any, spec: DatasetSpec, kind: FoldKind) -> Rows | None:
        relations = [
            codes_of([_filled(column_of(table, name), name, "group")]) for name in self._group_names(spec, kind)
        ]
        if self.keep_together:
            relations.append(codes_of([column_of(table, name) for name in self.keep_together]))
        return joined_groups(relations) if relations else None

    def _classes(self, table: Any, spec: DatasetSpec) -> Rows:
        """Class of each row: of the target, of all targets together, or the bin of a number."""
        by_target = self.by is None or self.kind == "stratified_grouped"
        names: Sequence[str] = spec.targets if by_target else (str(self.by),)
        if not names:
            raise ConfigError("stratified folds need a column: give the spec a target_column, or pass by=...")
        columns = [_filled(column_of(table, name), name, "target") for name in names]
        kind = spec.competition_type
        if by_target and not (kind.is_classification or kind.has_classes):
            return codes_of([pa.array(self._bins(column)) for column in columns])
        if not by_target and pa.types.is_floating(columns[0].type):
            return self._bins(columns[0])
        return codes_of(columns)

    def _bins(self, column: pa.Array) -> Rows:
        values = np.asarray(column.cast(pa.float64()))
        first = np.searchsorted(np.sort(values), values)
        return first * self.bins // len(values)

    def _warn_of_rare(self, classes: Rows) -> None:
        counts = np.bincount(classes)
        rare, key = int((counts < self.count).sum()), (self, counts.tobytes())
        if rare and key not in _warned:
            _warned.add(key)
            log.warning(
                "%d of %d classes have fewer rows than the %d folds (the rarest %d): some folds validate none of them",
                rare, len(counts), self.count, int(counts.min()),
            )  # fmt: skip


def _filled(column: pa.Array, name: str, what: str) -> pa.Array:
    missing = np.asarray(column.is_null(nan_is_null=True))
    if missing.any():
        row = int(missing.argmax())
        raise DataError(
            f"the {what} column {name!r} is missing in {int(missing.sum())} of {len(column)} rows, first in row {row}; "
            "fill it, or remove these rows",
            row=row,
        )
    return column


def _as_times(column: pa.Array, name: str, written: str | None) -> pa.Array:
    if written is None:
        with contextlib.suppress(pa.ArrowInvalid):
            return pc.cast(column, pa.timestamp("us"))
        found = find_dates(column)
        if found is None or found.format is None:
            why = "" if found is None else f": {found.doubt}"
            raise DataError(
                f"the time column {name!r} is text that cannot be read as dates, such as {column[0].as_py()!r}{why}; "
                f"{date_remedy(name)}, or write times as numbers"
            )
        written = found.format
    dates = read_dates(column, written)
    if dates.wrong.any():
        row = int(dates.wrong.argmax())
        raise DataError(
            f"the time column {name!r} has {column[row].as_py()!r} in row {row}, which is not a date of the form "
            f"{written}; correct it, or give another date_format in the spec",
            row=row,
        )
    return dates.values
