"""Plain rows of JSON Lines, decoded by kernels; whatever is not plain is left to Arrow's parser.

A block is taken as a whole or not at all, so that its rows, errors and types are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.files.machine_code import Functions, MachineCode
from penstock.files.records import JsonLines

NULL, TEXT, ESCAPED, INTEGER, FLOAT, TRUE, FALSE, OBJECT, LIST = range(9)
"""Kinds of values; what was found at a node is a set of bits, `1 << kind - 1`."""
DONE, ODD, FULL, NEW_KEY, NEW_ITEM = range(5)
"""Results of the kernel that finds values."""
POSITION, ROWS, HIGH, NODE, BEGIN, END, KEYS, FACTS = range(8)
"""Its state: where it begins or has stopped, rows so far, whether a text is not ASCII, what is new, keys in all."""
BASE, ROOM, FILLED, SIZE, ITEMS, STACK = range(6)
"""Its facts, each of them for all nodes."""
MOST_DEPTH = 16

KERNELS = MachineCode("penstock.sources.json_kernels", __file__)
LOAD_BYTES, COMPILE_BYTES = 32 << 20, 128 << 20
"""Bytes of input for which the kernels are loaded, and compiled."""
_MOST_KEYS, _MOST_NODES = 63, 1000
_MOST_BYTES = 1 << 30
_MOST_AGAIN = 8
"""Times that a block is gone through again for keys that are new."""
_SLACK = 64
_LEAST_ROOM = 1 << 17
_FEW_ITEMS, _MOST_ITEMS = 4, 1 << 12
"""Items in a row that there is room for at first, and at most."""


def _bits(*kinds: int) -> int:
    return sum(1 << kind - 1 for kind in kinds)


_TEXTS, _BOOLEANS, _INTEGERS, _NUMBERS = _bits(TEXT, ESCAPED), _bits(TRUE, FALSE), _bits(INTEGER), _bits(INTEGER, FLOAT)
_OBJECTS, _LISTS = _bits(OBJECT), _bits(LIST)
_INFERRED = {
    0: pa.null(),
    _INTEGERS: pa.int64(),
    _bits(FLOAT): pa.float64(),
    _NUMBERS: pa.float64(),
    **dict.fromkeys((_bits(TEXT), _bits(ESCAPED), _TEXTS), pa.string()),
    **dict.fromkeys((_bits(TRUE), _bits(FALSE), _BOOLEANS), pa.bool_()),
}


class CountedLines(JsonLines):
    """JSON Lines that a kernel counts, if the kernels are loaded."""

    def cut(self, data: npt.NDArray[np.uint8]) -> tuple[int, int]:
        kernels = KERNELS.loaded
        if kernels is None:
            return super().cut(data)
        end = np.zeros(1, np.int64)
        count = kernels["count_lines"](data.ctypes.data, len(data), end.ctypes.data)
        return int(end[0]), count


class PlainRows:
    """Decoder of blocks whose rows have the columns of a schema, with other fields passed over or not."""

    def __init__(self, schema: pa.Schema, *, others: bool) -> None:
        self.schema, self._others = schema, others
        self._tree = _Tree()
        self._allowed = [_OBJECTS]
        self._in_lists = [False]
        self.is_possible = len(schema) > 0 and self._add_fields(0, list(schema), in_list=False)
        self._tables = self._tree.tables()
        self._items = _FEW_ITEMS
        """Items of a list in a row that there is room for, as in the block before."""

    def _add_fields(self, node: int, fields: Sequence[pa.Field], *, in_list: bool) -> bool:
        names = [field.name for field in fields]
        if not 0 < len(set(names)) == len(names) <= _MOST_KEYS:
            return False
        return all(self._add(self._tree.add_key(node, field.name.encode()), field, in_list) for field in fields)

    def _add(self, node: int, field: pa.Field, in_list: bool) -> bool:
        """Add what is below a field; False if it is not plain."""
        allowed = _allowed(field)
        self._allowed.append(allowed)
        self._in_lists.append(in_list)
        if len(self._allowed) > _MOST_NODES:
            return False
        if allowed == _OBJECTS:
            return self._add_fields(node, list(field.type), in_list=in_list)
        if allowed == _LISTS:
            return self._add(self._tree.add_item(node), field.type.value_field, True)
        return allowed >= 0

    def decode(self, kernels: Functions, data: pa.Buffer, records: int) -> tuple[pa.RecordBatch, bool] | None:
        """The rows of a block of at most so many records, and whether all of it is ASCII; None if it is not plain."""
        if data.size > _MOST_BYTES:
            return None
        values = self._find(kernels, data, records)
        if values is None or not values.rows:
            return None
        for node, allowed in enumerate(self._allowed):
            if int(values.found[node]) & ~allowed:
                return None
        columns = [values.array(self._tree, self._tree.key(0, field), field.type, values.rows) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema), values.is_ascii

    def _find(self, kernels: Functions, data: pa.Buffer, records: int) -> _Values | None:
        items = self._items
        while True:
            rooms = [records * items if in_list else records for in_list in self._in_lists]
            if sum(rooms) > _LEAST_ROOM + data.size // 2:
                if items == self._items > _FEW_ITEMS:  # lists of the block before were longer
                    self._items = items = _FEW_ITEMS
                    continue
                return None  # columns that few rows have
            values = _Values(kernels, data, rooms)
            result = values.find(self._tables, skip=self._others)
            if result == DONE:
                self._items = items
                return values
            if result != FULL or not self._in_lists[values.node] or items > _MOST_ITEMS:
                return None
            items *= 4


def infer_plain(kernels: Functions, data: pa.Buffer) -> list[tuple[str, pa.DataType]] | None:
    """Names and types of the columns of a block, in order of first appearance; None if it is not plain."""
    if data.size > _MOST_BYTES:
        return None
    tree = _Tree()
    values, again = _Values(kernels, data, None), 0
    while (result := values.find(tree.tables(), skip=False)) in (NEW_KEY, NEW_ITEM):
        again += values.again
        if again > _MOST_AGAIN * data.size + _LEAST_ROOM:  # a long row with many new keys or lists
            return None
        if result == NEW_ITEM:
            tree.add_item(values.node)
        elif len(tree.keys[values.node]) == _MOST_KEYS:
            return None
        else:
            tree.add_key(values.node, values.key)
        if len(tree.keys) > _MOST_NODES:
            return None
    try:
        kind = tree.type_of(0, values.found.tolist()) if result == DONE else None
    except UnicodeDecodeError:  # of a key
        return None
    return [(field.name, field.type) for field in kind] if kind is not None else None


class _Tree:
    """Nodes at which values may lie: the row is node 0, and branches are fields of objects and items of lists."""

    def __init__(self) -> None:
        self.keys: list[dict[bytes, int]] = [{}]
        self._items = [-1]

    def add_key(self, node: int, key: bytes) -> int:
        self.keys[node][key] = len(self.keys)
        return self._add()

    def add_item(self, node: int) -> int:
        self._items[node] = len(self.keys)
        return self._add()

    def _add(self) -> int:
        self.keys.append({})
        self._items.append(-1)
        return len(self.keys) - 1

    def key(self, node: int, field: pa.Field) -> int:
        """Node of a field."""
        return self.keys[node][field.name.encode()]

    def item(self, node: int) -> int:
        """Node of the items of a list."""
        return self._items[node]

    def tables(self) -> _Tables:
        entries = [entry for keys in self.keys for entry in keys.items()]
        ends = np.cumsum([0, *(len(key) for key, _ in entries)])
        firsts = np.cumsum([0, *map(len, self.keys)])
        table = np.concatenate([ends, [node for _, node in entries], firsts, self._items]).astype(np.int32)
        keys = np.frombuffer(b"".join(key for key, _ in entries) + b"\0", np.uint8)
        return _Tables(keys, table, len(self.keys), len(entries))

    def type_of(self, node: int, found: Sequence[int]) -> pa.DataType | None:
        """Type of what was found at a node and below, None if no type holds it or it has objects without fields."""
        if found[node] == _LISTS:
            item = self.type_of(self._items[node], found)
            return pa.list_(item) if item is not None else None
        if found[node] == _OBJECTS or not node:
            kinds = [(key.decode(), self.type_of(child, found)) for key, child in self.keys[node].items()]
            return pa.struct(kinds) if kinds and all(kind is not None for _, kind in kinds) else None
        return _INFERRED.get(found[node])


class _Tables(NamedTuple):
    """A tree as the kernel takes it."""

    keys: npt.NDArray[np.uint8]
    table: npt.NDArray[np.int32]
    nodes: int
    key_count: int


class _Values:
    """Values of a block, where the kernel has found them."""

    def __init__(self, kernels: Functions, data: pa.Buffer, rooms: Sequence[int] | None) -> None:
        self._kernels, self._data = kernels, data
        self._rooms = rooms
        self._bases = np.cumsum([0, *(rooms or [])])
        self._spans = np.empty(2 * self._bases[-1], np.int32)
        self._kinds = np.zeros(self._bases[-1], np.uint8)
        self.found = np.zeros(len(rooms) if rooms is not None else _MOST_NODES + 1, np.uint8)
        self._state = np.zeros(8, np.int64)
        self._facts = np.zeros(0, np.int64)

    def find(self, tables: _Tables, *, skip: bool) -> int:
        """Result of the kernel."""
        nodes = tables.nodes
        self._facts = np.zeros((STACK + 1) * nodes + 5 * MOST_DEPTH, np.int64)
        self._state[KEYS] = tables.key_count
        if self._rooms is not None:
            self._facts[BASE * nodes : (BASE + 1) * nodes] = self._bases[:-1]
            self._facts[ROOM * nodes : (ROOM + 1) * nodes] = self._rooms
        return self._kernels["find_values"](
            *(self._data.address, self._data.size, tables.keys.ctypes.data, tables.table.ctypes.data, nodes),
            *(skip, self._rooms is not None, self._spans.ctypes.data, self._kinds.ctypes.data),
            *(self.found.ctypes.data, self._facts.ctypes.data, self._state.ctypes.data),
        )

    @property
    def rows(self) -> int:
        return int(self._state[ROWS])

    @property
    def is_ascii(self) -> bool:
        return not self._state[HIGH]

    @property
    def node(self) -> int:
        """The node where the kernel has stopped."""
        return int(self._state[NODE])

    @property
    def again(self) -> int:
        """Bytes of the row before the last new key or list, which the kernel goes through again."""
        return int(self._state[END] - self._state[POSITION])

    @property
    def key(self) -> bytes:
        """The key that is new."""
        begin, end = self._state[BEGIN : END + 1].tolist()
        return self._data.slice(begin, end - begin).to_pybytes()  # type: ignore[no-any-return]

    def array(self, tree: _Tree, node: int, kind: pa.DataType, count: int) -> pa.Array:
        """The values at a node, `count` with those that are null."""
        nodes = len(self.found)
        filled, size = (int(self._facts[fact * nodes + node]) for fact in (FILLED, SIZE))
        if not filled:
            return pa.nulls(count, kind)
        base = int(self._bases[node])
        spans, kinds = self._spans.ctypes.data + 8 * base, self._kinds.ctypes.data + base
        valid = self._bits(kinds, count, NULL) if filled < count else None
        if pa.types.is_struct(kind):
            children = [self.array(tree, tree.key(node, field), field.type, count) for field in kind]
            return pa.Array.from_buffers(kind, count, [valid], children=children)
        if pa.types.is_boolean(kind):
            return pa.Array.from_buffers(kind, count, [valid, self._bits(kinds, count, TRUE)])
        offsets = np.empty(count + 1, np.int32)
        if pa.types.is_list(kind):
            items = self._kernels["take_lists"](spans, kinds, count, offsets.ctypes.data)
            child = self.array(tree, tree.item(node), kind.value_type, items)
            return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(offsets)], children=[child])
        target = pa.allocate_buffer(size + _SLACK, resizable=True)
        used = self._kernels["take_texts"](
            *(self._data.address, self._data.size, spans, kinds, count, offsets.ctypes.data, target.address)
        )
        if used < size - size // 8:  # escapes are longer than what they stand for, and nobody counts what is not used
            target.resize(used, shrink_to_fit=True)
        texts = pa.Array.from_buffers(pa.string(), count, [valid, pa.py_buffer(offsets), target.slice(0, used)])
        # Numbers were found as texts; Arrow's parser of JSON converts them by the same function.
        return texts if kind == pa.string() else texts.cast(kind)

    def _bits(self, kinds: int, count: int, kind: int) -> pa.Buffer:
        bits = np.zeros(-(-count // 8), np.uint8)
        self._kernels["take_bits"](kinds, count, kind, bits.ctypes.data)
        return pa.py_buffer(bits)


def _allowed(field: pa.Field) -> int:
    """Kinds of values that a field may have beside null, as bits; -1 for a field that is not plain."""
    kind = field.type
    if not field.nullable:
        return -1
    if kind == pa.string():
        return _TEXTS
    if pa.types.is_boolean(kind):
        return _BOOLEANS
    if pa.types.is_integer(kind):
        return _INTEGERS
    if kind in (pa.float32(), pa.float64()):
        return _NUMBERS
    if pa.types.is_struct(kind):
        return _OBJECTS
    if pa.types.is_list(kind):
        return _LISTS
    return 0 if pa.types.is_null(kind) else -1
