"""Samples of a dataset as one Arrow batch, and back: the values come out as what they went in as.

What each field of a sample becomes, over all samples of the batch:

    bool, int, float, str, bytes; lists of one of them      a column of that type
    arrays and scalars of NumPy, torch, MLX, JAX            their bytes, and their shapes if these differ
    anything else that is made of plain values              JSON, in which tuples, odd keys, dates, NaN ... are marked

None is null. Which keys a sample has, and in which order, is kept too. A mapping comes out as a dict, arrays come out
on the CPU and with memory of their own, times with the offset of their zone. The columns are for this module alone:
nobody else has to read them.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batching.backends.lookup import bits_of, from_bits, is_array
from penstock.errors import DataError

__all__ = ["is_packed", "pack", "unpack"]

_KEY = b"penstock.samples"
_MARK = "~"
_PLAIN: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.large_string(),
    bytes: pa.large_binary(),
}
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    float: (repr, float),
    dt.date: (dt.date.isoformat, dt.date.fromisoformat),
    dt.datetime: (dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.time: (dt.time.isoformat, dt.time.fromisoformat),
    dt.timedelta: (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: dt.timedelta(*map(int, text.split())),
    ),
    decimal.Decimal: (str, decimal.Decimal),
}
"""What JSON has no word for, as text; the types by their names."""
_FROM_TEXT = {kind.__name__: back for kind, (_, back) in _TEXTS.items()}


def pack(samples: Sequence[Any], *, where: str, rows: Sequence[int]) -> pa.RecordBatch:
    """The samples as one batch. Raises a DataError that names the field and the row if one cannot be held."""
    packer = _Packer(where, rows)
    layouts: dict[tuple[str, ...] | None, int] = {}
    which = [layouts.setdefault(packer.layout(i, sample), len(layouts)) for i, sample in enumerate(samples)]
    packer.add(pa.array(which, pa.int32()))
    fields: list[dict[str, Any]] = []
    alike = len(layouts) == 1 and None not in layouts
    for name in dict.fromkeys(chain.from_iterable(keys if keys is not None else (None,) for keys in layouts)):
        values = [sample[name] for sample in samples] if alike else [_value_of(sample, name) for sample in samples]
        fields.append(packer.field(name, values))
    recipe = {"layouts": list(layouts), "fields": fields}
    schema = pa.schema(
        [pa.field(str(i), column.type) for i, column in enumerate(packer.columns)],
        {_KEY: json.dumps(recipe).encode()},
    )
    return pa.RecordBatch.from_arrays(packer.columns, schema=schema)


def is_packed(batch: pa.RecordBatch) -> bool:
    return _KEY in (batch.schema.metadata or {})


def unpack(batch: pa.RecordBatch) -> list[Any]:
    """The samples again, of a batch of `pack` or of a slice of one."""
    recipe = json.loads(batch.schema.metadata[_KEY])
    columns = {field["name"]: _unpacked(batch, field) for field in recipe["fields"]}
    if len(recipe["layouts"]) == 1:
        keys = recipe["layouts"][0]
        if keys is None:
            return columns[None]
        if not keys:
            return [{} for _ in range(batch.num_rows)]
        return [dict(zip(keys, values, strict=True)) for values in zip(*(columns[key] for key in keys), strict=True)]
    return [
        columns[None][i] if (keys := recipe["layouts"][layout]) is None else {key: columns[key][i] for key in keys}
        for i, layout in enumerate(batch.column(0).to_pylist())
    ]


class _Packer:
    """Columns that are added one by one, and which sample each row is, for errors."""

    def __init__(self, where: str, rows: Sequence[int]) -> None:
        self.columns: list[pa.Array] = []
        self._where, self._rows = where, rows

    def add(self, column: pa.Array) -> int:
        self.columns.append(column)
        return len(self.columns) - 1

    def layout(self, index: int, sample: Any) -> tuple[str, ...] | None:
        """The keys of a sample; None if it is no mapping."""
        if not _is_mapping(sample):
            return None
        for key in sample:
            if type(key) is not str:
                raise self._refused(index, f"the keys of a sample are strings, got {key!r}")
        return tuple(sample)

    def field(self, name: str | None, values: list[Any]) -> dict[str, Any]:
        """Adds the columns of one field, and says how to read them."""
        kinds = set(map(type, values)) - {type(None)}
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        if not kinds:
            return {"name": name, "kind": "plain", "at": self.add(pa.nulls(len(values)))}
        if kind in _PLAIN and (column := _plain(values, _PLAIN[kind])) is not None:
            return {"name": name, "kind": "plain", "at": self.add(column)}
        if kind is list and (column := _lists(values)) is not None:
            return {"name": name, "kind": "plain", "at": self.add(column)}
        if kind is not None and all(value is None or is_array(value) for value in values):
            bits = [None if value is None else self._bits(i, name, value) for i, value in enumerate(values)]
            if len({each[:2] for each in bits if each is not None}) == 1:
                return {"name": name, "kind": "arrays", **self._arrays(bits)}
        return {"name": name, "kind": "tree", **self._trees(name, values)}

    def _arrays(self, bits: list[tuple[str, str, npt.NDArray[Any]] | None]) -> dict[str, Any]:
        framework, dtype, first = next(each for each in bits if each is not None)
        arrays = [None if each is None else each[2] for each in bits]
        shapes = [None if array is None else list(array.shape) for array in arrays]
        recipe: dict[str, Any] = {"framework": framework, "dtype": dtype, "bits": first.dtype.str}
        recipe["at"] = self.add(_binary(arrays))
        if all(shape is None or shape == shapes[0] for shape in shapes) and shapes[0] is not None:
            recipe["shape"] = shapes[0]
        else:
            recipe["shapes"] = self.add(pa.array(shapes, pa.list_(pa.int64())))
        return recipe

    def _trees(self, name: str | None, values: list[Any]) -> dict[str, Any]:
        texts: list[str | None] = []
        arrays: list[list[bytes]] = []
        for i, value in enumerate(values):
            aside: list[bytes] = []
            try:
                texts.append(None if value is None else json.dumps(self._tree(i, name, value, aside), allow_nan=False))
            except (RecursionError, ValueError) as error:
                if isinstance(error, DataError):
                    raise
                raise self._refused(i, f"{_called(name)} cannot be written down: {error}") from error
            arrays.append(aside)
        recipe = {"at": self.add(pa.array(texts, pa.large_string()))}
        if any(arrays):
            recipe["arrays"] = self.add(pa.array(arrays, pa.large_list(pa.large_binary())))
        return recipe

    def _tree(self, index: int, name: str | None, value: Any, aside: list[bytes]) -> Any:
        """The value in the words of JSON; arrays are put aside."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind in (list, tuple):
            items = [self._tree(index, name, item, aside) for item in value]
            return items if kind is list else {_MARK: "tuple", "v": items}
        if _is_mapping(value):
            pairs = [[self._tree(index, name, part, aside) for part in pair] for pair in value.items()]
            plain = all(type(key) is str for key in value) and _MARK not in value
            return dict(pairs) if plain else {_MARK: "dict", "v": pairs}
        if kind in _TEXTS:
            return {_MARK: kind.__name__, "v": _TEXTS[kind][0](value)}
        if is_array(value):
            framework, dtype, bits = self._bits(index, name, value)
            aside.append(bits.tobytes())
            facts = {"f": framework, "t": dtype, "b": bits.dtype.str, "s": list(bits.shape)}
            return {_MARK: "array", "v": len(aside) - 1, **facts}
        raise self._refused(
            index,
            f"{_called(name)} holds a {kind.__module__}.{kind.__qualname__}, which cannot travel in a batch; give "
            "numbers, strings, bytes, dates, None, arrays, or lists, tuples and dicts of them",
        )

    def _bits(self, index: int, name: str | None, value: Any) -> tuple[str, str, npt.NDArray[Any]]:
        try:
            return bits_of(value)
        except DataError as error:
            raise self._refused(index, f"{_called(name)}: {error.reason}") from None
        except RuntimeError as error:  # MLX: an array that another thread has described but not computed
            raise self._refused(
                index,
                f"{_called(name)} cannot be computed here ({error}); call mlx.core.eval on the arrays that the dataset "
                "keeps, when it is made",
            ) from error

    def _refused(self, index: int, reason: str) -> DataError:
        return DataError(reason, file=self._where, row=self._rows[index])


def _called(name: str | None) -> str:
    return "the sample" if name is None else f"field {name!r}"


def _is_mapping(value: object) -> bool:
    return type(value) is dict or isinstance(value, Mapping)  # the second alone takes a microsecond


def _value_of(sample: Any, name: str | None) -> Any:
    if _is_mapping(sample):
        return None if name is None else sample.get(name)
    return sample if name is None else None


def _plain(values: list[Any], arrow: pa.DataType) -> pa.Array | None:
    """A column of the type; None if a value does not fit, such as an integer of 70 bits."""
    try:
        return pa.array(values, arrow)
    except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
        return None


def _lists(values: list[list[Any] | None]) -> pa.Array | None:
    kinds = set(map(type, chain.from_iterable(value for value in values if value is not None)))
    if not kinds:
        return _plain(values, pa.large_list(pa.int64()))
    arrow = _PLAIN.get(kinds.pop())
    return None if kinds or arrow is None else _plain(values, pa.large_list(arrow))


def _binary(arrays: list[npt.NDArray[Any] | None]) -> pa.Array:
    """The bytes of arrays as one column, copied once."""
    parts = [_bytes_of(each) for each in arrays]
    offsets = np.fromiter(accumulate((len(part) for part in parts), initial=0), np.int64, len(parts) + 1)
    there = pa.array([each is not None for each in arrays]).buffers()[1] if None in map(_none, arrays) else None
    data = pa.py_buffer(np.concatenate(parts))
    return pa.Array.from_buffers(pa.large_binary(), len(parts), [there, pa.py_buffer(offsets), data])


def _bytes_of(array: npt.NDArray[Any] | None) -> npt.NDArray[np.uint8]:
    if array is None or not array.nbytes:
        return np.zeros(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _none(value: object) -> object:
    """Itself if it is None: `in` would compare arrays element by element."""
    return None if value is None else True


def _unpacked(batch: pa.RecordBatch, field: dict[str, Any]) -> list[Any]:
    column = batch.column(field["at"])
    if field["kind"] == "plain":
        return list(column.to_pylist())
    if field["kind"] == "tree":
        aside = batch.column(field["arrays"]).to_pylist() if "arrays" in field else [[]] * batch.num_rows
        return [
            None if text is None else json.loads(text, object_hook=partial(_leaf, aside=row))
            for text, row in zip(column.to_pylist(), aside, strict=True)
        ]
    shapes = [field["shape"]] * len(column) if "shape" in field else batch.column(field["shapes"]).to_pylist()
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    there = column.is_valid().to_pylist() if column.null_count else [True] * len(column)
    kind, framework, dtype = np.dtype(field["bits"]), field["framework"], field["dtype"]
    memory = data if data is not None else b""
    return [
        from_bits(framework, dtype, np.ndarray(shape, kind, memory, start)) if is_there else None
        for shape, start, is_there in zip(shapes, starts[:-1], there, strict=True)
    ]


def _leaf(found: dict[str, Any], aside: list[bytes]) -> Any:
    """What a marked object stands for; others are dicts."""
    mark = found.get(_MARK)
    if mark is None:
        return found
    if mark == "tuple":
        return tuple(found["v"])
    if mark == "dict":
        return dict(found["v"])
    if mark == "array":
        bits = np.ndarray(found["s"], np.dtype(found["b"]), aside[found["v"]])
        return from_bits(found["f"], found["t"], bits)
    return _FROM_TEXT[mark](found["v"])
