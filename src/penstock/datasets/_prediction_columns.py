"""Predictions of several columns by the names of these columns, whatever order they were given in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.datasets.predictions import ClassNames
from penstock.errors import DataError, SchemaError

__all__ = ["as_ids", "columns_of", "in_order", "matched", "places", "refuse_copies", "told", "without_ids"]

Array = npt.NDArray[Any]


def columns_of(predictions: Any) -> dict[str, Array] | None:
    """The columns of a frame or a mapping; None for what has no names."""
    if isinstance(predictions, Mapping):
        names: Sequence[Any] = list(predictions)
    elif isinstance(predictions, pa.Table | pa.RecordBatch):
        names = predictions.schema.names
    elif hasattr(predictions, "columns"):
        names = list(predictions.columns)
    else:
        return None
    columns = {str(name): _array(predictions[name]) for name in names}
    if len(columns) != len(names):
        raise SchemaError(f"predictions have the columns {[str(name) for name in names]}, some of them twice")
    return columns


def matched(given: Sequence[Any], wanted: Sequence[str]) -> list[int] | None:
    """For each wanted name its place among the given; all may begin alike (`Class_a` is `a`). None if they differ."""
    texts = [str(name) for name in given]
    if len(texts) != len(wanted) or len(set(texts)) != len(texts):
        return None
    longer, rest = divmod(sum(map(len, wanted)) - sum(map(len, texts)), len(texts) or 1)
    if rest or longer < 0:
        return None
    start = wanted[0][:longer] if wanted else ""
    place = {start + name: number for number, name in enumerate(texts)}
    return [place[name] for name in wanted] if set(place) == set(wanted) else None


def in_order(columns: Mapping[str, Array], wanted: Sequence[Any], what: str) -> Array:
    """The columns as one array (rows, columns), in the wanted order."""
    places = matched(list(columns), [str(name) for name in wanted])
    if places is None:
        raise SchemaError(
            f"predictions have the columns {list(columns)}, and {what} are {[str(one) for one in wanted]}"
        )
    arrays = list(columns.values())
    return np.stack([arrays[place] for place in places], axis=1)


def without_ids(columns: Mapping[str, Array], names: Sequence[str | None], ids: pa.Array) -> dict[str, Array]:
    """The columns for the rows of `ids`: found by the column of ids if there is one among them, else as they are."""
    found = next((name for name in names if name is not None and name in columns), None)
    if found is None:
        return dict(columns)
    what = f"the column {found!r} of the predictions"
    given = as_ids(pa.array(columns[found]), ids.type, what)
    order, missing, foreign = places(given, ids, what)
    if missing or foreign:
        raise DataError(
            f"{what} has {len(given)} ids, and there are {len(ids)} rows: "
            + told(f"{len(missing)} rows are not there", missing, f"{len(foreign)} ids are of no row", foreign)
        )
    return {name: values[order] for name, values in columns.items() if name != found}


def as_ids(given: pa.Array, kind: pa.DataType, what: str) -> pa.Array:
    """Ids of one type, so that they can be compared."""
    try:
        return given if given.type == kind else given.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"{what} is {given.type}, and it should be {kind}") from None


def places(given: pa.Array, wanted: pa.Array, what: str) -> tuple[npt.NDArray[np.int64], list[Any], list[Any]]:
    """For each wanted id its row among the given; and the wanted ones that are not there, and those nobody wants."""
    refuse_copies(given, what)
    place = {value: row for row, value in enumerate(given.to_pylist())}
    listed = wanted.to_pylist()
    missing = [value for value in listed if value not in place]
    foreign = sorted(set(place) - set(listed), key=str)
    return np.array([place.get(value, -1) for value in listed], np.int64), missing, foreign


def told(first: str, missing: Sequence[Any], second: str, foreign: Sequence[Any]) -> str:
    """`1 ids have none (first [8]), 2 predictions are for others (first [7, 9])`, without what there is none of."""
    return ", ".join(f"{said} (first {list(ids[:3])})" for said, ids in ((first, missing), (second, foreign)) if ids)


def refuse_copies(ids: pa.Array, what: str) -> None:
    """Raise if an id is missing or there twice."""
    if ids.null_count:
        raise DataError(f"{ids.null_count} of the {len(ids)} ids in {what} are missing; every row needs one")
    counts = ids.value_counts()
    places = np.asarray(counts.field("counts"))
    if len(places) and places.max() > 1:
        twice = counts.field("values")[int(places.argmax())].as_py()
        raise DataError(
            f"the id {twice!r} is there {int(places.max())} times in {what}; a submission has every id once"
        )


def _array(values: Any) -> Array:
    return values if isinstance(values, ClassNames) else np.asarray(values)
