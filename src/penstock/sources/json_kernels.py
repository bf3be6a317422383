"""Kernels of JSON Lines, for numba: where the values of rows lie, and the values of a column.

They are compiled by another process (`files.machine_code`), which alone imports this module. A kernel gets addresses,
allocates nothing and raises nothing: bytes are examined 64 at a time, and whatever is not plain is left to Arrow's
parser. Grammar: one object a line, with keys of a tree that the caller gives.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from penstock._optional import require
from penstock.files.machine_code import Functions, intrinsic, kernel
from penstock.sources.plain_json import (
    BASE,
    BEGIN,
    DONE,
    END,
    ESCAPED,
    FACTS,
    FALSE,
    FILLED,
    FLOAT,
    FULL,
    HIGH,
    INTEGER,
    ITEMS,
    KEYS,
    LIST,
    MOST_DEPTH,
    NEW_ITEM,
    NEW_KEY,
    NODE,
    NULL,
    OBJECT,
    ODD,
    POSITION,
    ROOM,
    ROWS,
    SIZE,
    STACK,
    TEXT,
    TRUE,
    PlainRows,
    infer_plain,
)

KEY, ITEM, END_OF_ROW = range(3)

numba, ir = require("numba", "fast"), require("llvmlite.ir", "fast")
types = numba.types

_BLOCK = 64
_byte, _word = ir.IntType(8), ir.IntType(64)
_bytes = ir.VectorType(_byte, _BLOCK)
_HEX = ord("a") - 10


@intrinsic
def block_marks(typing: Any, data: Any, at: Any) -> Any:
    """Bits of those of 64 bytes that end a piece of text: quotes, backslashes and control characters."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _load(builder, *args)
        quote = builder.icmp_unsigned("==", block, _all(ord('"')))
        slash = builder.icmp_unsigned("==", block, _all(ord("\\")))
        control = builder.icmp_unsigned("<", block, _all(0x20))
        return builder.bitcast(builder.or_(builder.or_(quote, slash), control), _word)

    return types.uint64(types.CPointer(types.uint8), types.int64), emit


@intrinsic
def block_high(typing: Any, data: Any, at: Any) -> Any:
    """Bits of those of 64 bytes that are not ASCII."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _load(builder, *args)
        return builder.bitcast(builder.icmp_unsigned(">=", block, _all(0x80)), _word)

    return types.uint64(types.CPointer(types.uint8), types.int64), emit


@intrinsic
def count_newlines(typing: Any, data: Any, at: Any) -> Any:
    """Number of newlines among 64 bytes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        newline = builder.icmp_unsigned("==", _load(builder, *args), _all(0x0A))
        return builder.ctpop(builder.bitcast(newline, _word))

    return types.int64(types.CPointer(types.uint8), types.int64), emit


@intrinsic
def copy_block(typing: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
    """Copy 64 bytes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(builder.gep(args[0], [args[1]]), _bytes.as_pointer())
        builder.store(_load(builder, args[2], args[3]), place, align=1)
        return context.get_dummy_value()

    pointer = types.CPointer(types.uint8)
    return types.void(pointer, types.int64, pointer, types.int64), emit


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """Number of the lowest bit that is set, of a word that is not 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit


def _load(builder: Any, data: Any, at: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(data, [at]), _bytes.as_pointer()), align=1)


def _all(value: int) -> Any:
    return ir.Constant(_bytes, [ir.Constant(_byte, value)] * _BLOCK)


@kernel
def _text_end(data: Any, at: Any, size: Any, state: Any) -> Any:
    """Position of the quote that ends a text, -1 if there is none or the text is odd; notes escapes, and what is not
    ASCII."""
    while True:
        if at + _BLOCK <= size:
            marks = block_marks(data, at)
            high = block_high(data, at)
            if marks == 0:
                if high != 0:
                    state[HIGH] = 1
                at += _BLOCK
                continue
            step = lowest_bit(marks)
            if high != 0 and lowest_bit(high) < step:
                state[HIGH] = 1
            at += step
        else:
            while at < size and data[at] >= 0x20 and data[at] != 0x22 and data[at] != 0x5C:
                if data[at] >= 0x80:
                    state[HIGH] = 1
                at += 1
            if at == size:
                return -1
        if data[at] == 0x22:
            return at
        if data[at] != 0x5C:
            return -1
        state[FACTS] = 1
        at = _escape_end(data, at, size)
        if at < 0:
            return -1


@kernel
def _escape_end(data: Any, at: Any, size: Any) -> Any:
    """Position behind an escape, -1 if it is odd: no escape of JSON, NUL, or half of a surrogate pair."""
    if at + 1 >= size:
        return -1
    if data[at + 1] != 0x75:
        return at + 2 if _escaped(data[at + 1]) != 0 else -1
    code = _hex_code(data, at, size)
    if code <= 0:
        return -1
    if code < 0xD800 or code > 0xDFFF:
        return at + 6
    if code >= 0xDC00 or at + 12 > size or data[at + 6] != 0x5C or data[at + 7] != 0x75:
        return -1
    low = _hex_code(data, at + 6, size)
    return at + 12 if low >= 0xDC00 and low <= 0xDFFF else -1


@kernel
def _escaped(letter: Any) -> Any:
    """The character that an escape of one letter stands for, 0 if there is none."""
    if letter == 0x6E:
        return 0x0A
    if letter == 0x22 or letter == 0x5C or letter == 0x2F:
        return np.int64(letter)
    if letter == 0x74:
        return 0x09
    if letter == 0x72:
        return 0x0D
    if letter == 0x62:
        return 0x08
    if letter == 0x66:
        return 0x0C
    return 0


@kernel
def _hex_code(data: Any, at: Any, size: Any) -> Any:
    """Number of an escape with four hexadecimal digits, -1 if it does not have them."""
    if at + 6 > size:
        return -1
    code = 0
    for i in range(at + 2, at + 6):
        digit: Any = np.int64(data[i])
        if digit >= 0x30 and digit <= 0x39:
            digit -= 0x30
        else:
            digit |= 0x20
            if digit < 0x61 or digit > 0x66:
                return -1
            digit -= _HEX
        code = code * 16 + digit
    return code


@kernel
def _digits_end(data: Any, at: Any, size: Any) -> Any:
    while at < size and data[at] >= 0x30 and data[at] <= 0x39:
        at += 1
    return at


@kernel
def _number_end(data: Any, at: Any, size: Any, state: Any) -> Any:
    """Position behind a number, -1 if it is odd: no JSON, -0, more than 18 digits or an exponent of more than two.
    Notes a float."""
    first = at + 1 if data[at] == 0x2D else at
    end = _digits_end(data, first, size)
    if end == first or end - first > 18 or (data[first] == 0x30 and end - first > 1):
        return -1
    is_float = False
    if end < size and data[end] == 0x2E:
        is_float = True
        decimals = end + 1
        end = _digits_end(data, decimals, size)
        if end == decimals or end - decimals > 25:
            return -1
    if end < size and (data[end] == 0x65 or data[end] == 0x45):
        is_float = True
        exponent = end + 1
        if exponent < size and (data[exponent] == 0x2D or data[exponent] == 0x2B):
            exponent += 1
        end = _digits_end(data, exponent, size)
        if end == exponent or end - exponent > 2:
            return -1
    if is_float:
        state[FACTS] = 1
    elif first > at and data[first] == 0x30:
        return -1
    return end


@kernel
def _is_word(data: Any, at: Any, size: Any, second: Any, third: Any, fourth: Any) -> Any:
    return at + 4 <= size and data[at + 1] == second and data[at + 2] == third and data[at + 3] == fourth


@kernel
def _after_space(data: Any, at: Any, size: Any) -> Any:
    while at < size and (data[at] == 0x20 or data[at] == 0x09):
        at += 1
    return at


@kernel
def _key_entry(data: Any, begin: Any, end: Any, keys: Any, table: Any, first: Any, last: Any, expected: Any) -> Any:
    """Number of a key among those of an object, -1 if it is not there; that of `expected` is compared first."""
    entry = expected
    for _ in range(first, last):
        if entry >= last:
            entry = first
        key = table[entry]
        if table[entry + 1] - key == end - begin:
            i = 0
            while i < end - begin and keys[key + i] == data[begin + i]:
                i += 1
            if i == end - begin:
                return entry
        entry += 1
    return -1


@kernel
def _put(spans: Any, kinds: Any, place: Any, kind: Any, begin: Any, end: Any) -> Any:
    kinds[place] = kind
    spans[2 * place] = begin
    spans[2 * place + 1] = end


@kernel
def find_values(
    data: Any, size: Any, keys: Any, table: Any, nodes: Any, skip: Any, writes: Any,
    spans: Any, kinds: Any, found: Any, facts: Any, state: Any,
) -> Any:  # fmt: skip
    """Find the values of whole lines.

    Places of values form a tree of nodes: the row is node 0, fields of objects and items of lists are its branches.
    `table` has the ends of the keys of all nodes, the node of each, the first key of each node, and the node of the
    items of each. A node has room for values from a base on, both in `facts` (`ROOM`, `BASE`); `spans` gets where each
    of them begins and ends, in the data or among the items, and `kinds` its kind, all NULL before. `found` gets the
    kinds of a node as bits, `facts` the number of its values that are not null, the bytes of its texts and numbers, and
    its items. What is not in the tree is passed over if `skip`; otherwise it is reported, and the row comes again.
    Without `writes` nothing but `found` and `facts` is written.
    """
    key_count = state[KEYS]
    key_nodes = key_count + 1
    first_keys = key_nodes + key_count
    item_nodes = first_keys + nodes + 1
    bases, rooms, filled, sizes, items, stack = (
        BASE * nodes,
        ROOM * nodes,
        FILLED * nodes,
        SIZE * nodes,
        ITEMS * nodes,
        STACK * nodes,
    )
    at = state[POSITION]
    row = state[ROWS]
    one = np.int64(1)
    while at < size:
        line = at
        at = _after_space(data, at, size)
        if at < size and data[at] == 0x0D:
            at += 1
        if at == size:
            break
        if data[at] == 0x0A:
            at += 1
            continue
        if data[at] != 0x7B:
            return ODD
        at += 1
        depth = 0
        node, index, expected, seen, in_list = np.int64(0), row, np.int64(0), np.int64(0), False
        step = KEY
        while True:
            value = np.int64(-1)
            value_index = index
            if step == KEY:
                at = _after_space(data, at, size)
                if at >= size or data[at] != 0x22:
                    return ODD
                key = at + 1
                state[FACTS] = 0
                at = _text_end(data, key, size, state)
                if at < 0 or state[FACTS] != 0:
                    return ODD
                if node >= 0:
                    first, last = np.int64(table[first_keys + node]), np.int64(table[first_keys + node + 1])
                    entry = _key_entry(data, key, at, keys, table, first, last, first + expected)
                    if entry >= 0:
                        bit = one << (entry - first)
                        if seen & bit != 0:
                            return ODD
                        seen |= bit
                        expected = entry + 1 - first
                        value = np.int64(table[key_nodes + entry])
                    elif skip == 0:
                        state[POSITION], state[ROWS], state[NODE], state[BEGIN], state[END] = line, row, node, key, at
                        return NEW_KEY
                at = _after_space(data, at + 1, size)
                if at >= size or data[at] != 0x3A:
                    return ODD
                at += 1
            elif node >= 0:
                value = np.int64(table[item_nodes + node])
                value_index = facts[items + value]
                facts[items + value] += 1
            at = _after_space(data, at, size)
            if at >= size:
                return ODD
            letter = data[at]
            kind = NULL
            begin = at
            end = at
            state[FACTS] = 0
            if letter == 0x22:
                begin = at + 1
                end = _text_end(data, begin, size, state)
                kind = TEXT if state[FACTS] == 0 else ESCAPED
                at = end + 1
            elif letter == 0x7B:
                kind = OBJECT
            elif letter == 0x5B:
                kind = LIST
                if value >= 0:
                    item = np.int64(table[item_nodes + value])
                    if item < 0:
                        if writes != 0:
                            return ODD
                        state[POSITION], state[ROWS], state[NODE], state[END] = line, row, value, at
                        return NEW_ITEM
                    begin = facts[items + item]
            elif letter == 0x6E:
                end = at if _is_word(data, at, size, 0x75, 0x6C, 0x6C) else np.int64(-1)
                at += 4
            elif letter == 0x74:
                end = at if _is_word(data, at, size, 0x72, 0x75, 0x65) else np.int64(-1)
                kind = TRUE
                at += 4
            elif letter == 0x66:
                is_false = at + 1 < size and data[at + 1] == 0x61 and _is_word(data, at + 1, size, 0x6C, 0x73, 0x65)
                end = at if is_false else np.int64(-1)
                kind = FALSE
                at += 5
            else:
                end = _number_end(data, at, size, state)
                kind = INTEGER if state[FACTS] == 0 else FLOAT
                at = end
            if end < 0:
                return ODD
            if value >= 0:
                if writes != 0 and value_index >= facts[rooms + value]:
                    state[NODE] = value
                    return FULL
                if kind != NULL:
                    found[value] |= np.uint8(1 << (kind - 1))
                    facts[filled + value] += 1
                    if writes != 0:
                        _put(spans, kinds, facts[bases + value] + value_index, kind, begin, end)
                        facts[sizes + value] += end - begin
            if kind >= OBJECT:
                if depth == MOST_DEPTH:
                    return ODD
                level = stack + 5 * depth
                facts[level], facts[level + 1], facts[level + 2], facts[level + 3] = node, index, expected, seen
                facts[level + 4] = 1 if in_list else 0
                depth += 1
                node, index, expected, seen, in_list = value, value_index, np.int64(0), np.int64(0), kind == LIST
                at = _after_space(data, at + 1, size)
                if at >= size:
                    return ODD
                step = ITEM if in_list else KEY
                if data[at] != (0x5D if in_list else 0x7D):
                    continue
            while True:
                at = _after_space(data, at, size)
                if at >= size:
                    return ODD
                letter = data[at]
                at += 1
                if letter == 0x2C:
                    step = ITEM if in_list else KEY
                    break
                if letter != (0x5D if in_list else 0x7D):
                    return ODD
                if depth == 0:
                    step = END_OF_ROW
                    break
                if in_list and node >= 0 and writes != 0:
                    spans[2 * (facts[bases + node] + index) + 1] = facts[items + np.int64(table[item_nodes + node])]
                depth -= 1
                level = stack + 5 * depth
                node, index, expected, seen = facts[level], facts[level + 1], facts[level + 2], facts[level + 3]
                in_list = facts[level + 4] != 0
            if step == END_OF_ROW:
                break
        at = _after_space(data, at, size)
        if at < size and data[at] == 0x0D:
            at += 1
        if at < size:
            if data[at] != 0x0A:
                return ODD
            at += 1
        row += 1
    state[ROWS] = row
    return DONE


@kernel
def _copy(target: Any, to: Any, source: Any, begin: Any, end: Any, size: Any) -> Any:
    """Copy bytes; up to 63 behind them are overwritten."""
    while begin < end and begin + _BLOCK <= size:
        copy_block(target, to, source, begin)
        begin += _BLOCK
        to += _BLOCK
    while begin < end:
        target[to] = source[begin]
        begin += 1
        to += 1


@kernel
def _copy_unescaped(target: Any, to: Any, source: Any, begin: Any, end: Any, size: Any) -> Any:
    """Copy a text with its escapes as what they stand for; position behind it. As `_copy` it overwrites up to 63."""
    at = begin
    while at < end:
        if at + _BLOCK <= size:
            copy_block(target, to, source, at)
            marks = block_marks(source, at)
            step = lowest_bit(marks) if marks != 0 else np.int64(_BLOCK)
            if step > end - at:
                step = end - at
            at += step
            to += step
            if marks == 0 or at >= end:
                continue
        elif source[at] != 0x5C:
            target[to] = source[at]
            at += 1
            to += 1
            continue
        if source[at + 1] != 0x75:
            target[to] = _escaped(source[at + 1])
            at += 2
            to += 1
            continue
        code = _hex_code(source, at, size)
        at += 6
        if code >= 0xD800 and code <= 0xDFFF:
            code = 0x10000 + ((code - 0xD800) << 10) + (_hex_code(source, at, size) - 0xDC00)
            at += 6
        to = _put_character(target, to, code)
    return to


@kernel
def _put_character(target: Any, to: Any, code: Any) -> Any:
    """Write a character as UTF-8; position behind it."""
    if code < 0x80:
        target[to] = code
        return to + 1
    if code < 0x800:
        target[to] = 0xC0 | (code >> 6)
        target[to + 1] = 0x80 | (code & 0x3F)
        return to + 2
    if code < 0x10000:
        target[to] = 0xE0 | (code >> 12)
        target[to + 1] = 0x80 | ((code >> 6) & 0x3F)
        target[to + 2] = 0x80 | (code & 0x3F)
        return to + 3
    target[to] = 0xF0 | (code >> 18)
    target[to + 1] = 0x80 | ((code >> 12) & 0x3F)
    target[to + 2] = 0x80 | ((code >> 6) & 0x3F)
    target[to + 3] = 0x80 | (code & 0x3F)
    return to + 4


@kernel
def take_texts(data: Any, size: Any, spans: Any, kinds: Any, rows: Any, offsets: Any, target: Any) -> Any:
    """Texts, or numbers as texts, of a column one after the other; how many bytes. `target` has 64 bytes more than they
    need."""
    to: Any = 0
    for row in range(rows):
        offsets[row] = to
        kind = kinds[row]
        if kind != NULL:
            begin = np.int64(spans[2 * row])
            end = np.int64(spans[2 * row + 1])
            if kind == ESCAPED:
                to = _copy_unescaped(target, to, data, begin, end, size)
            else:
                _copy(target, to, data, begin, end, size)
                to += end - begin
    offsets[rows] = to
    return to


@kernel
def take_lists(spans: Any, kinds: Any, rows: Any, offsets: Any) -> Any:
    """Offsets of the lists of a column among their items."""
    last: Any = 0
    for row in range(rows):
        offsets[row] = last
        if kinds[row] != NULL:
            last = spans[2 * row + 1]
    offsets[rows] = last
    return last


@kernel
def take_bits(kinds: Any, rows: Any, kind: Any, bits: Any) -> Any:
    """Bits of the values of a kind, or of all that are not NULL where the kind is NULL; `bits` begins as zeros."""
    for row in range(rows):
        if kinds[row] == kind if kind != NULL else kinds[row] != NULL:
            bits[row >> 3] |= np.uint8(1 << (row & 7))
    return 0


@kernel
def count_lines(data: Any, size: Any, end: Any) -> Any:
    """Number of whole lines; `end` gets the position behind the last of them."""
    stop = size
    while stop > 0 and data[stop - 1] != 0x0A:
        stop -= 1
    end[0] = stop
    found: Any = 0
    at = 0
    while at + _BLOCK <= stop:
        found += count_newlines(data, at)
        at += _BLOCK
    while at < stop:
        if data[at] == 0x0A:
            found += 1
        at += 1
    return found


_u8, _i32, _i64 = types.CPointer(types.uint8), types.CPointer(types.int32), types.CPointer(types.int64)
_count = types.int64
SIGNATURES: dict[str, tuple[Any, Any]] = {
    "find_values": (
        find_values, _count(_u8, _count, _u8, _i32, _count, _count, _count, _i32, _u8, _u8, _i64, _i64)
    ),
    "count_lines": (count_lines, _count(_u8, _count, _i64)),
    "take_texts": (take_texts, _count(_u8, _count, _i32, _u8, _count, _i32, _u8)),
    "take_lists": (take_lists, _count(_i32, _u8, _count, _i32)),
    "take_bits": (take_bits, _count(_u8, _count, _count, _u8)),
}  # fmt: skip

_LONG = "long text, " * 9
_TURN = {"role": "user", "is_first": True}
_SAMPLE = [
    {"text": f"{_LONG}\u00e9\n\U0001f600", "count": -17, "score": 2.5e-3, "turns": [_TURN], "no": None},
    {"text": None, "count": 123456789012345678, "score": 4.0, "turns": [], "no": None},
    {"text": "", "count": 0, "score": -0.0, "turns": [None, {"role": _LONG, "is_first": False}], "no": None},
]


def check(functions: Functions) -> None:
    """Raise unless the functions infer and decode a sample as they should."""
    lines = [json.dumps(row, ensure_ascii=number == 0) for number, row in enumerate(_SAMPLE)]
    data = pa.py_buffer("\n".join(lines).encode())
    end = np.zeros(1, np.int64)
    counted = functions["count_lines"](data.address, data.size, end.ctypes.data), int(end[0])
    inferred = infer_plain(functions, data)
    found = PlainRows(pa.schema(inferred or []), others=False).decode(functions, data, len(lines))
    if counted != (2, data.size - len(lines[2])) or found is None or found[0].to_pylist() != _SAMPLE:
        raise ValueError("the code of the kernels does not decode a sample as it should")
