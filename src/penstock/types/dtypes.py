"""Data types as text: `list<int64>`, `sparse<float32>[10000]`, and the Arrow type each spelling means.

    name        int64, float16, bool, string, large_binary, date32, uuid, null, ...
    with units  timestamp[us], timestamp[us, UTC], time32[s], time64[us], duration[ms]
    with sizes  fixed_size_binary[16], decimal128<10, 2>
    nested      list<T>, large_list<T>, list_view<T>, fixed_size_list<T>[768], map<K, V>, struct<a: T, "b c": T>
    encoded     dictionary<int32, string>, run_end_encoded<int32, string>
    arrays      tensor<float32>[3, 224, 224], tensor<float32>[?, 64], sparse<float32>[10000]

A part inside another type may be followed by `not null`; a map by `, sorted`, a dictionary by `, ordered`.

Two spellings say more than an Arrow type can hold, so they live in a field's metadata: the size of a sparse vector, and
the shape of a tensor with `?` in it. The latter has the storage of Arrow's canonical `arrow.variable_shape_tensor`, but
is not that extension type: pyarrow 26 reads it from a file, yet can neither make one nor pickle a batch that has one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.errors import SchemaError

Shape = tuple[int | None, ...]

_SHAPE_KEY = b"penstock.shape"
_SPARSE_KEY = b"penstock.sparse"
_EXTENSION_KEY, _EXTENSION_META_KEY = b"ARROW:extension:name", b"ARROW:extension:metadata"
_VARIABLE_TENSOR = "arrow.variable_shape_tensor"

_NUMBERS = {
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(pa, f"float{bits}")() for bits in (16, 32, 64)},
}
_NAMED = {
    "bool": pa.bool_(),
    **_NUMBERS,
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "date32": pa.date32(),
    "date64": pa.date64(),
    "month_day_nano_interval": pa.month_day_nano_interval(),
    "null": pa.null(),
    "bool8": pa.bool8(),
    "json": pa.json_(),
    "uuid": pa.uuid(),
}
_NAME_OF = {arrow: name for name, arrow in _NAMED.items()}
_LISTS: dict[str, Callable[[pa.Field], pa.DataType]] = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "list_view": pa.list_view,
    "large_list_view": pa.large_list_view,
}
_DECIMALS = {f"decimal{bits}": getattr(pa, f"decimal{bits}") for bits in (32, 64, 128, 256)}
_CLOCKS = {"timestamp": pa.timestamp, "time32": pa.time32, "time64": pa.time64, "duration": pa.duration}
_PYTHON: dict[Any, str] = {bool: "bool", int: "int64", float: "float64", str: "string", bytes: "binary"}
_OTHER_NAMES = {kind.__name__: name for kind, name in _PYTHON.items()} | {"double": "float64", "half": "float16"}


@lru_cache(maxsize=1024)
def parse(text: str) -> pa.Field:
    """A nameless Arrow field of the type that `text` spells, with the metadata the type needs."""
    reader = _Reader(text)
    try:
        field = reader.type("")
    except SchemaError:
        raise
    except (pa.ArrowException, OverflowError, RecursionError, TypeError, ValueError) as e:  # such as time32[us]
        raise SchemaError(f"cannot read the type {text!r}: {e}") from None
    if reader.rest:
        reader.fail("the end")
    return field


def spell(field: pa.Field) -> str:
    """The spelling of an Arrow field's type; `parse` gives the type back.

    Not kept, because they say nothing about the values: names of list items, and names of a tensor's dimensions.
    """
    arrow = field.type
    if (size := sparse_size(field)) is not None:
        return f"sparse<{spelling_of(arrow.field('values').type.value_type)}>[{size}]"
    if (tensor := tensor_parts(field)) is not None:
        return f"tensor<{spelling_of(tensor[0])}>{shape_text(tensor[1])}"
    if isinstance(arrow, pa.JsonType) and arrow.storage_type != pa.string():
        _unsupported(arrow, f"it is stored as {arrow.storage_type}, only string is known")
    return _NAME_OF.get(arrow) or _spell_parameters(arrow)


def spelling_of(dtype: object) -> str:
    """The spelling of what may be given as a dtype: a spelling, an Arrow type, a NumPy dtype or a Python type."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, pa.DataType):
        return spell(pa.field("", dtype))
    if isinstance(dtype, type) and dtype in _PYTHON:
        return _PYTHON[dtype]
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        try:
            return spell(pa.field("", pa.from_numpy_dtype(dtype)))
        except pa.ArrowNotImplementedError as e:
            raise SchemaError(f"Arrow has no type for the NumPy dtype {dtype!r}: {e}") from None
    raise SchemaError(
        f"not a type: {dtype!r}; give a spelling such as 'int64' or 'list<string>', a pyarrow.DataType, a NumPy dtype, "
        f"or one of {', '.join(kind.__name__ for kind in _PYTHON)}"
    )


def sparse_size(field: pa.Field) -> int | None:
    """Length of the sparse vectors of a field; None if they are not sparse vectors."""
    size = (field.metadata or {}).get(_SPARSE_KEY)
    if size is None or not _has_parts(field.type, indices="list", values="list"):
        return None
    # Metadata may outlive the column it described: the type has to agree.
    return int(size) if field.type == _sparse_storage(field.type.field("values").type.value_type) else None


def tensor_parts(field: pa.Field) -> tuple[pa.DataType, Shape] | None:
    """Element type and shape (None where it varies) of the tensors of a field; None if they are not tensors."""
    arrow, metadata = field.type, field.metadata or {}
    name = getattr(arrow, "extension_name", metadata.get(_EXTENSION_KEY, b"").decode())
    if isinstance(arrow, pa.FixedShapeTensorType):
        if arrow.permutation not in (None, list(range(len(arrow.shape)))):
            _unsupported(arrow, "its dimensions are permuted; store it in row-major order")
        return arrow.value_type, tuple(arrow.shape)
    storage = arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow
    if not is_tensor_storage(storage):
        return None
    if _SHAPE_KEY in metadata:
        shape = json.loads(metadata[_SHAPE_KEY])
    elif name == _VARIABLE_TENSOR:
        shape = _foreign_shape(arrow, metadata) or [None] * storage.field("shape").type.list_size
    else:
        return None
    return storage.field("data").type.value_type, tuple(shape)


def is_tensor_storage(arrow: pa.DataType) -> bool:
    """True for the storage type of tensors of variable shape."""
    return _has_parts(arrow, data="list", shape="fixed_size_list")


def shape_text(shape: Iterable[int | None]) -> str:
    """`[?, 64]`: a shape as the spellings have it."""
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


class _Reader:
    """A cursor over a spelling."""

    def __init__(self, text: str) -> None:
        self.text, self.rest = text, text.strip()

    def type(self, name: str) -> pa.Field:
        word = self.match(r"\w+", "a type")
        if word in _NAMED:
            return pa.field(name, _NAMED[word])
        if word in _LISTS:
            return pa.field(name, _LISTS[word](self.inside(lambda: self.part("item"))))
        if word in _DECIMALS:
            return pa.field(name, _DECIMALS[word](*self.inside(lambda: (self.number(), self.comma(self.number)))))
        if word in _CLOCKS:
            unit, _, zone = self.match(r"\[[^\]]*\]", "a unit such as [us]")[1:-1].partition(",")
            return pa.field(name, _CLOCKS[word](unit.strip(), *([zone.strip()] if zone else [])))
        if word not in _COMPOUND:
            everything = [*_NAMED, *_LISTS, *_DECIMALS, *_CLOCKS, *_COMPOUND]
            near = _OTHER_NAMES.get(word, word)
            hint = did_you_mean(near, everything) or f"; known types: {', '.join(everything)}"
            raise SchemaError(f"unknown type {word!r}" + (f" in {self.text!r}" if word != self.text else "") + hint)
        arrow, metadata = _COMPOUND[word](self)
        return pa.field(name, arrow, metadata=metadata)

    def part(self, name: str) -> pa.Field:
        """A type inside another one, which may be `not null`."""
        field = self.type(name)
        return field.with_nullable(False) if self.skip("not null") else field

    def struct_part(self) -> pa.Field:
        word = self.match(r'"(?:[^"\\]|\\.)*"|\w+', "a field name")
        name = json.loads(word) if word.startswith('"') else word
        self.match(":", "':'")
        return self.part(name)

    def plain(self, allowed: dict[str, pa.DataType], what: str) -> pa.Field:
        field = self.type("item")
        if field.type not in allowed.values():
            raise SchemaError(f"cannot read the type {self.text!r}: {what}, got {spell(field)}")
        return field

    def inside(self, read: Callable[[], Any]) -> Any:
        self.match("<", "'<'")
        found = read()
        self.match(">", "'>'")
        return found

    def comma(self, read: Callable[[], Any]) -> Any:
        self.match(",", "','")
        return read()

    def several(self, read: Callable[[], Any], closing: str) -> list[Any]:
        found: list[Any] = []
        while not self.rest.startswith(closing):
            found.append(self.comma(read) if found else read())
        return found

    def flag(self, word: str) -> bool:
        if not self.skip(","):
            return False
        self.match(word, repr(word))
        return True

    def number(self) -> int:
        return int(self.match(r"-?\d+", "a number"))

    def sizes(self, read: Callable[[], int | None]) -> list[Any]:
        self.match(r"\[", "'['")
        found = self.several(read, "]")
        self.match(r"\]", "']'")
        return found

    def size(self) -> int:
        found = self.sizes(self.dimension)
        if len(found) != 1 or found[0] is None:
            raise SchemaError(f"cannot read the type {self.text!r}: expected one size, got {shape_text(found)}")
        return int(found[0])

    def dimension(self) -> int | None:
        return None if self.skip("?") else int(self.match(r"\d+", "a size or '?'"))

    def match(self, pattern: str, what: str) -> str:
        found = re.match(pattern, self.rest)
        if found is None:
            self.fail(what)
        self.rest = self.rest[found.end() :].lstrip()
        return found[0]

    def skip(self, word: str) -> bool:
        if not self.rest.startswith(word):
            return False
        self.rest = self.rest[len(word) :].lstrip()
        return True

    def fail(self, what: str) -> NoReturn:
        got = repr(self.rest) if self.rest else "the end"
        raise SchemaError(f"cannot read the type {self.text!r}: expected {what}, got {got}")


Parsed = tuple[pa.DataType, dict[bytes, bytes] | None]


def _fixed_size_list(reader: _Reader) -> Parsed:
    item = reader.inside(lambda: reader.part("item"))
    return pa.list_(item, reader.size()), None


def _fixed_size_binary(reader: _Reader) -> Parsed:
    return pa.binary(reader.size()), None


def _map(reader: _Reader) -> Parsed:
    def parts() -> pa.DataType:
        key, value = reader.type("key"), reader.comma(lambda: reader.part("value"))
        return pa.map_(key.with_nullable(False), value, keys_sorted=reader.flag("sorted"))

    return reader.inside(parts), None


def _struct(reader: _Reader) -> Parsed:
    fields = reader.inside(lambda: reader.several(reader.struct_part, ">"))
    names = [field.name for field in fields]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SchemaError(f"cannot read the type {reader.text!r}: a struct has two fields named {min(twice)!r}")
    return pa.struct(fields), None


def _dictionary(reader: _Reader) -> Parsed:
    def parts() -> pa.DataType:
        index, value = reader.type("").type, reader.comma(lambda: reader.type("").type)
        return pa.dictionary(index, value, ordered=reader.flag("ordered"))

    return reader.inside(parts), None


def _run_end_encoded(reader: _Reader) -> Parsed:
    ends, values = reader.inside(lambda: (reader.type("").type, reader.comma(lambda: reader.type("").type)))
    return pa.run_end_encoded(ends, values), None


def _tensor(reader: _Reader) -> Parsed:
    numbers = _NUMBERS | {"bool": pa.bool_()}
    item = reader.inside(lambda: reader.plain(numbers, "a tensor holds numbers or bools")).type
    shape: Shape = tuple(reader.sizes(reader.dimension))
    if not shape:
        raise SchemaError(f"cannot read the type {reader.text!r}: a tensor has at least one dimension")
    if None not in shape:
        if (count := math.prod(dim for dim in shape if dim is not None)) >= 2**31:
            raise SchemaError(f"cannot read the type {reader.text!r}: {count} values are more than a tensor can have")
        return pa.fixed_shape_tensor(item, shape), None
    storage = pa.struct([("data", pa.list_(item)), ("shape", pa.list_(pa.int32(), len(shape)))])
    return storage, {_SHAPE_KEY: json.dumps(shape).encode()}


def _sparse(reader: _Reader) -> Parsed:
    item = reader.inside(lambda: reader.plain(_NUMBERS, "a sparse vector holds numbers")).type
    if (size := reader.size()) >= 2**31:
        raise SchemaError(f"cannot read the type {reader.text!r}: a sparse vector is shorter than 2**31")
    return _sparse_storage(item), {_SPARSE_KEY: str(size).encode()}


_COMPOUND: dict[str, Callable[[_Reader], Parsed]] = {
    "fixed_size_list": _fixed_size_list,
    "fixed_size_binary": _fixed_size_binary,
    "map": _map,
    "struct": _struct,
    "dictionary": _dictionary,
    "run_end_encoded": _run_end_encoded,
    "tensor": _tensor,
    "sparse": _sparse,
}


def _sparse_storage(item: pa.DataType) -> pa.DataType:
    return pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(item))])


def _spell_parameters(arrow: pa.DataType) -> str:
    kind, known = pa.types, _kind(arrow)
    if known in _LISTS:
        return f"{known}<{_spell_part(arrow.value_field)}>"
    if known in _DECIMALS:
        return f"{known}<{arrow.precision}, {arrow.scale}>"
    if known in _CLOCKS:
        zone = getattr(arrow, "tz", None)
        return f"{known}[{arrow.unit}{f', {zone}' if zone else ''}]"
    if kind.is_fixed_size_list(arrow):
        return f"fixed_size_list<{_spell_part(arrow.value_field)}>[{arrow.list_size}]"
    if kind.is_fixed_size_binary(arrow):
        return f"fixed_size_binary[{arrow.byte_width}]"
    if kind.is_map(arrow):
        ends = ", sorted" if arrow.keys_sorted else ""
        return f"map<{spell(arrow.key_field)}, {_spell_part(arrow.item_field)}{ends}>"
    if kind.is_struct(arrow):
        return f"struct<{', '.join(f'{_spell_name(field.name)}: {_spell_part(field)}' for field in arrow)}>"
    if kind.is_dictionary(arrow):
        ends = ", ordered" if arrow.ordered else ""
        return f"dictionary<{spelling_of(arrow.index_type)}, {spelling_of(arrow.value_type)}{ends}>"
    if kind.is_run_end_encoded(arrow):
        return f"run_end_encoded<{spelling_of(arrow.run_end_type)}, {spelling_of(arrow.value_type)}>"
    return _unsupported(arrow, "cast the column to one of the types penstock can spell")


def _foreign_shape(arrow: pa.DataType, metadata: dict[bytes, bytes]) -> Sequence[int | None] | None:
    """The shape of a canonical variable-shape tensor that another program wrote, as far as it is fixed."""
    if isinstance(arrow, pa.BaseExtensionType):
        # pyarrow 26 knows the type but not its parameters; they are only to be had from how it prints.
        known = {
            key: json.loads(value) for key, value in re.findall(r"(uniform_shape|permutation)=(\[.*?\])", str(arrow))
        }
    else:
        known = json.loads(metadata.get(_EXTENSION_META_KEY) or b"{}")
    if known.get("permutation", []) != sorted(known.get("permutation", [])):
        _unsupported(arrow, "its dimensions are permuted; store it in row-major order")
    return known.get("uniform_shape")


def _spell_part(field: pa.Field) -> str:
    return spell(field) + ("" if field.nullable else " not null")


def _spell_name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else json.dumps(name, ensure_ascii=False)


def _has_parts(arrow: pa.DataType, **parts: str) -> bool:
    """True for a struct of exactly these parts, each the right kind of list."""
    return pa.types.is_struct(arrow) and {part.name: _kind(part.type) for part in arrow} == parts


def _kind(arrow: pa.DataType) -> str:
    """`timestamp`, `list`, `decimal128`: what Arrow prints before the parameters."""
    return re.split(r"[<(\[]", str(arrow))[0]


def _unsupported(arrow: pa.DataType, remedy: str) -> NoReturn:
    raise SchemaError(f"Arrow type {arrow} is not supported: {remedy}")
