"""Rows of a dataset in any container (pandas, Polars, Arrow, list of dicts), and their validation against the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock._suggest import did_you_mean
from penstock.arrays.text import is_text
from penstock.datasets.guesses import is_called_id
from penstock.datasets.spec import DatasetSpec
from penstock.errors import DataError, SchemaError

_NO_IDS = ("numeric", "categorical", "boolean", "date")


# -- containers ------------------------------------------------------------------------------------------------------


def column_names(data: Any) -> list[str]:
    """Names of the columns, in their order; empty if the rows have no columns."""
    if hasattr(data, "columns"):
        return [str(name) for name in (data.column_names if isinstance(data, pa.Table) else data.columns)]
    if isinstance(data, Sequence) and data and isinstance(data[0], dict):
        return [str(name) for name in dict.fromkeys(name for row in data for name in row)]
    return []


def column_of(data: Any, name: str) -> pa.Array:
    """One column as one Arrow array of plain values; NaN of pandas is null."""
    names = column_names(data)
    if name not in names:
        raise SchemaError(f"column {name!r} is not in the data; it has {names}{did_you_mean(name, names)}")
    if isinstance(data, pa.Table):
        column = plain_column(data.column(name))
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    values = [row.get(name) for row in data] if isinstance(data, Sequence) else data[name]
    if hasattr(values, "to_arrow"):  # Polars
        return plain_column(values.to_arrow())
    try:
        return plain_column(pa.array(values, from_pandas=True))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise DataError(f"column {name!r} has values of different types ({error}); convert them to one") from error


def plain_column(column: Any) -> Any:
    """The same values without dictionary encoding and views, which not every function can read."""
    kind = column.type
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        kind = pa.string() if pa.types.is_string_view(kind) else pa.binary()
    return column if kind == column.type else column.cast(kind)


def take_rows(data: Any, rows: npt.NDArray[np.int64]) -> Any:
    """These rows in this order, in the same container."""
    if isinstance(data, pa.Table):
        return data.take(pa.array(rows))
    if hasattr(data, "iloc"):
        return data.iloc[rows].reset_index(drop=True)
    return data[rows] if hasattr(data, "columns") else [data[row] for row in rows.tolist()]


def with_plain_targets(data: Any, targets: Sequence[str], *, as_floats: bool) -> Any:
    """Pandas frame whose integer targets are Python numbers: `mx.array([row["y"]])` refuses NumPy's.

    Targets of a regression become floats, others integers. Other containers are returned unchanged.
    """
    if not hasattr(data, "iloc"):
        return data
    whole = [name for name in targets if getattr(data[name].dtype, "kind", "") in "iu"]
    return data.assign(**{name: data[name].astype(float if as_floats else object) for name in whole}) if whole else data


def digest_of(columns: Mapping[str, pa.Array | npt.NDArray[Any] | None]) -> str:
    """32 hex digits of texts, ids and numbers: equal for equal values, however their arrays are sliced."""
    digest = xxhash.xxh3_128()
    for name, column in columns.items():
        if column is None:
            continue
        if isinstance(column, np.ndarray):
            digest.update(f"{name} {column.dtype} {column.shape}\n".encode())
            digest.update(np.ascontiguousarray(column).data)
            continue
        digest.update(f"{name} {column.type} {len(column)}\n".encode())
        wide = column.cast(pa.large_binary() if pa.types.is_binary(column.type) else pa.large_string())
        _, offsets, data = wide.buffers()
        bounds = (
            np.frombuffer(offsets, np.int64, len(wide) + 1, 8 * wide.offset) if len(wide) else np.zeros(1, np.int64)
        )
        digest.update((bounds - bounds[0]).data)
        digest.update(memoryview(data or b"")[bounds[0] : bounds[-1]])
        if wide.null_count:
            digest.update(np.packbits(np.asarray(wide.is_null())).data)
    return digest.hexdigest()


def content_of(data: Any) -> str | None:
    """Digest of rows that are a table; None for other rows and for nested values."""

    def values_of(name: str) -> pa.Array | npt.NDArray[Any]:
        column = column_of(data, name)
        number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        # Numbers as they are in memory: as text they take many times as long.
        return column.to_numpy(zero_copy_only=False) if number and not column.null_count else column

    names = column_names(data)
    try:
        return digest_of({name: values_of(name) for name in names}) if names else None
    except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


# -- validation ------------------------------------------------------------------------------------------------------


def check_data(data: Any, spec: DatasetSpec, split: str, *, test_columns: Callable[[], Sequence[str]] = tuple) -> None:
    """Raise for the first difference between the rows of a file and the spec.

    Rows that are not a table (a list of arrays, say) are only counted. A column of `test_columns` may be the id though
    the training file lacks it: its rows are numbered.
    """
    names = column_names(data)
    if split == "train" and spec.num_samples is not None and len(data) != spec.num_samples:
        raise SchemaError(
            f"the spec of {spec.competition_name!r} has num_samples={spec.num_samples}, and the training file "
            f"{len(data)} rows; correct the one that is wrong, or give num_samples=None"
        )
    if not names:
        return
    _check_names(names, spec, split, test_columns)
    for target in spec.targets if split != "test" else ():
        _check_target(column_of(data, target), target, spec, split)
    if spec.id_column is not None and spec.id_column in names:
        check_ids(column_of(data, spec.id_column), spec.id_column, split)
    if split == "train":
        ignored = spec.ignored
        empty = [name for name in names if name not in ignored and len(data) and _is_empty(data, name)]
        if empty:
            more = f" (and {empty[1:]} have none)" if len(empty) > 1 else ""
            raise DataError(
                f"column {empty[0]!r} has no value in any of the {len(data)} rows of the training file{more}; leave "
                f"it out with columns={{{empty[0]!r}: ColumnSpec(kind='ignore')}} in the spec, or correct the file"
            )
        _check_features(data, names, spec)


def refuse_missing_target(names: Sequence[str], spec: DatasetSpec, split: str) -> None:
    """Raise if a target is not among the columns of a file that must have it."""
    for target in spec.targets:
        if target not in names:
            raise SchemaError(
                f"the target column {target!r} is not in the {split} file, which has {list(names)}; correct "
                f"target_column{did_you_mean(target, names)}"
            )


def id_column_of(data: Any, spec: DatasetSpec) -> str | None:
    """Id column: that of the spec, or the first of the training file if its name is that of an id and it is unique.

    `data` must be the whole training file: a fold of it, or another file, may be unique by chance.
    """
    name = possible_id(column_names(data), spec)
    if name is None or spec.id_column is not None:
        return name
    values = column_of(data, name)
    return name if not _missing(values).any() and pc.count_distinct(values).as_py() == len(values) else None


def possible_id(names: Sequence[str], spec: DatasetSpec) -> str | None:
    """Column that may be the id: that of the spec, or the first if its name is that of an id and no kind forbids it."""
    if spec.id_column is not None or not names:
        return spec.id_column if spec.id_column in names else None
    column = spec.columns.get(names[0])
    other = names[0] in spec.targets or (column is not None and column.kind in _NO_IDS)
    return names[0] if is_called_id(names[0]) and not other else None


def check_ids(values: pa.Array, name: str, split: str) -> None:
    """Raise for the first row without an id, or with a duplicate."""
    missing = _missing(values)
    if missing.any():
        row = int(missing.argmax())
        raise DataError(f"the id {name!r} is missing in row {row} of the {split} file; every row needs one", row=row)
    codes = np.asarray(values.dictionary_encode().indices)
    _, first = np.unique(codes, return_index=True)
    if len(first) == len(codes):
        return
    again = np.ones(len(codes), np.bool_)
    again[first] = False
    row = int(np.argmax(again))
    before = int(np.argmax(codes == codes[row]))
    raise DataError(
        f"the id {values[row].as_py()!r} in {name!r} is in row {before} and in row {row} of the {split} file, and "
        f"{int(again.sum())} rows in all repeat an id; remove the duplicates, or give another id_column; if {name!r} "
        f"is not an id, give its kind in the spec, such as columns={{{name!r}: 'categorical'}}",
        row=row,
    )


def shared_ids(ours: pa.Array, theirs: pa.Array) -> pa.Array:
    """Ids that two files have in common; 7 and "7" are the same."""
    ours, theirs = (ids.cast(pa.string()) for ids in (ours, theirs))
    return ours.filter(pc.is_in(ours, theirs))


def _missing(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Flags of missing values; NaN, as in Parquet files, is missing."""
    return np.asarray(values.is_null(nan_is_null=True)).astype(np.bool_)


def _check_names(names: list[str], spec: DatasetSpec, split: str, test_columns: Callable[[], Sequence[str]]) -> None:
    if split != "test":
        refuse_missing_target(names, spec, split)
    needed = {"id_column": spec.id_column}
    if split != "test":
        if spec.id_column not in names and spec.id_column in test_columns():
            needed = {}
        needed |= {"group_column": spec.group_column, "time_column": spec.time_column}
    for option, name in needed.items():
        if name is not None and name not in names:
            raise SchemaError(
                f"{option}={name!r} is not in the {split} file, which has {names}{did_you_mean(name, names)}"
            )
    expected = {*names, *spec.targets, *spec.ignored}
    for name in spec.columns if split == "train" else ():
        if name not in expected:
            raise SchemaError(
                f"the spec describes column {name!r}, which is not in the training file; it has {names}"
                f"{did_you_mean(name, names)}"
            )


def _check_target(values: pa.Array, name: str, spec: DatasetSpec, split: str) -> None:
    missing = _missing(values)
    if missing.any():
        row = int(missing.argmax())
        raise DataError(
            f"the target {name!r} is missing in {int(missing.sum())} of the {len(values)} rows of the {split} file, "
            f"first in row {row}; remove these rows, or fill them",
            row=row,
        )
    flags = [given for given in spec.class_names or () if isinstance(given, bool)]
    if flags and len(values) and is_text(values.type):
        raise SchemaError(
            f"class_names has {flags[0]!r}, and the target {name!r} has text such as {values[0].as_py()!r}; YAML reads "
            "unquoted no, yes, off and on as false and true: write them in quotes"
        )


def _is_empty(data: Any, name: str) -> bool:
    if isinstance(data, pa.Table):
        column = data.column(name)
        if not pa.types.is_floating(column.type):
            return bool(column.null_count == len(data))
        return bool(pc.all(column.is_null(nan_is_null=True)).as_py())
    if hasattr(data, "iloc"):
        return bool(data[name].isna().all())
    return bool(_missing(column_of(data, name)).all())


def _check_features(data: Any, names: list[str], spec: DatasetSpec) -> None:
    if spec.num_features is None:
        return
    id_column = id_column_of(data, spec)
    features = [name for name in names if name != id_column and name not in spec.targets]
    if len(features) != spec.num_features:
        without = [f"the id {id_column!r}"] if id_column is not None else []
        without += [f"the target {target!r}" for target in spec.targets]
        raise SchemaError(
            f"the spec of {spec.competition_name!r} has num_features={spec.num_features}, and the training file "
            f"{len(features)} columns{' without ' if without else ''}{' and '.join(without)}; correct the one that is "
            "wrong, or give num_features=None"
        )


def check_same_columns(names: Mapping[str, Sequence[str]], spec: DatasetSpec) -> None:
    """Raise unless a file and the training file have the same columns, except target and ignored ones."""
    refuse_missing_target(names["train"], spec, "train")
    (first, ours), (second, theirs) = names.items()
    apart = {*spec.targets, *spec.ignored}
    if spec.id_column is not None and spec.id_column in names.get("test", ()):
        apart.add(spec.id_column)
    known = [apart.union(theirs), apart.union(ours)]
    only_first, only_second = (
        [name for name in side if name not in other] for side, other in zip((ours, theirs), known)
    )
    if not spec.targets:  # an unknown target is one of the columns that only the training file has
        only_first, only_second = (only_first, []) if first == "test" else ([], only_second)
    sides = [
        f"only the {file} file has {found}" for file, found in ((first, only_first), (second, only_second)) if found
    ]
    if sides:
        raise SchemaError(
            f"the files of {spec.competition_name!r} have different columns: {', and '.join(sides)}; give them the "
            "same columns, name the target in target_column, or mark columns with ColumnSpec(kind='ignore')"
        )


def seen_values(training: pa.Table | None, spec: DatasetSpec) -> dict[str, pa.Array]:
    """Allowed values of each categorical column: those of the spec, or else those of the training file."""
    seen, names = {}, set() if training is None else set(training.column_names)
    for name, column in spec.columns.items():
        if column.kind != "categorical" or name in spec.targets:
            continue
        if column.categories:
            seen[name] = pa.array([_text(value) for value in column.categories], pa.string())
        elif training is not None and name in names:
            seen[name] = _as_texts(training[name]).unique()
    return seen


def check_unseen(data: pa.Table, spec: DatasetSpec, seen: Mapping[str, pa.Array], split: str) -> None:
    """Raise for the first unknown value of a categorical column."""
    names = set(data.column_names)
    for name, known in seen.items():
        if name not in names:
            continue
        texts = _as_texts(data[name])
        new = np.asarray(pc.and_(pc.is_valid(texts), pc.invert(pc.is_in(texts, known)))).astype(np.bool_)
        if new.any():
            row = int(new.argmax())
            where = "the spec's categories" if spec.columns[name].categories else "the training file"
            listed = [value for value in known.to_pylist() if value is not None]
            raise DataError(
                f"column {name!r} of the {split} file has {data[name][row].as_py()!r} in row {row}, which is not in "
                f"{where}, and {int(new.sum())} such rows in all; known: {sorted(listed)[:20]}: add it to the "
                "categories in the spec, or pass unseen='keep'",
                row=row,
            )


def _as_texts(column: Any) -> pa.Array:
    """Values as text, so that 1, 1.0 and "1" are one category in every type."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    texts = array.cast(pa.string())
    return pc.replace_substring_regex(texts, r"\.0$", "") if pa.types.is_floating(array.type) else texts


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
