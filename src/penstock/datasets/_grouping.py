"""Rows that belong together, as numbers, and whole groups dealt to folds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError

__all__ = ["codes_of", "deal_groups", "joined_groups"]

Rows = npt.NDArray[np.int64]

_WHOLE = 1 << 20
"""All rows of a class, when shares of it are compared."""


def codes_of(columns: Sequence[pa.Array]) -> Rows:
    """One number for each row, equal exactly where all the columns are; missing values are equal to each other."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = column.dictionary_encode() if not pa.types.is_dictionary(column.type) else column
        found = np.asarray(encoded.indices.fill_null(-1)).astype(np.int64) + 1
        joint = codes * (int(found.max()) + 1) + found
        codes = np.unique(joint, return_inverse=True)[1].astype(np.int64)
    return codes


def joined_groups(relations: Sequence[Rows]) -> Rows:
    """Groups in which every two rows that any of the relations puts together are together."""
    groups = relations[0]
    for other in relations[1:]:
        groups = _joined(groups, other)
    return groups


def deal_groups(groups: Rows, classes: Rows | None, places: Rows, count: int, names: Sequence[str] = ()) -> Rows:
    """The fold of each row, whole groups at a time: the largest first, each to the fold that has least of its classes.

    `places` decides between groups of one size. One step of Python for each group.
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
    # The classes of each group, one group after the other: most groups have few of the many classes there may be.
    pairs, amounts = np.unique(groups * kinds + classes, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(len(sizes) + 1) * kinds)
    which = pairs % kinds
    # Whole numbers, so that no machine rounds a near tie differently from another.
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
