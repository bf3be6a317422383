from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.files import records
from penstock.files.records import CsvRecords, Cutter, JsonItems, JsonLines, Lines, WholeFile, first_newline


def array(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def pieces(cutter: Cutter, data: bytes) -> list[bytes]:
    starts, stops = cutter.spans(array(data))
    return [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist())]


# -- lines -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line)), st.binary(max_size=5))
def test_lines_are_cut_where_bytes_split_says(lines: list[bytes], tail: bytes) -> None:
    tail = tail.replace(b"\n", b"")
    data = b"".join(line + b"\n" for line in lines)
    assert Lines().cut(array(data + tail)) == (len(data), len(lines))
    whole = [line + b"\n" for line in lines]
    assert pieces(Lines(), data) == whole
    assert pieces(Lines(), data + tail) == whole + ([tail] if tail else [])


@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_the_first_and_the_last_newline_are_found_at_any_distance(before: int, after: int) -> None:
    data = array(b"x" * before + b"\n" + b"y" * after)
    assert first_newline(data) == before + 1
    assert Lines().cut(data) == (before + 1, 1)


def test_without_a_newline_nothing_is_whole() -> None:
    assert Lines().cut(array(b"abc")) == (0, 0)
    assert first_newline(array(b"abc")) == 0
    assert first_newline(array(b"x" * (3 << 20) + b"\n")) == (3 << 20) + 1


def test_a_whole_file_is_one_record_that_only_its_end_ends() -> None:
    assert WholeFile().cut(array(b"a\nb\n")) == (0, 0)
    assert pieces(WholeFile(), b"a\nb\n") == [b"a\nb\n"]
    assert WholeFile().leftover(array(b"a\nb\n")) == 1


# -- JSON lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"null\n", b" \t null\n", b'{"a":1}\nnull\n', b'{"a":1}\r\n \r\n\t[1]', b'{"a":\n1}\n']
)
def test_a_line_that_is_no_object_never_reaches_the_parser(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\bJSON\b"):
        JsonLines().prepare(array(data))


@pytest.mark.parametrize(
    ("data", "rows"), [(b'{"a":null}\n', 1), (b'{"a": "x\\nnull"}\n', 1), (b' \n {"null":1}', 1), (b" \n \r\n", 0)]
)
def test_blank_lines_are_no_rows_and_null_inside_an_object_is_fine(data: bytes, rows: int) -> None:
    ready, count = JsonLines().prepare(array(data))
    assert (ready.tobytes(), count) == (data, rows)


# -- CSV -------------------------------------------------------------------------------------------------------------

cells = st.text(st.sampled_from('ab,";\n\r\t é'), max_size=6)


def reference_records(text: str, delimiter: str = ",") -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]


@given(st.lists(st.lists(cells, min_size=1, max_size=4), max_size=8), st.sampled_from(",;\t"), st.booleans())
def test_what_the_csv_module_writes_is_cut_where_it_says(rows: list[list[str]], delimiter: str, crlf: bool) -> None:
    out = io.StringIO()
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in rows for cell in row) else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\r\n" if crlf else "\n", quoting=quoting)
    ends = []
    for row in rows:
        writer.writerow(row)
        ends.append(len(out.getvalue().encode()))
    data = out.getvalue().encode()
    assert CsvRecords(delimiter).cut(array(data)) == ((ends[-1], len(rows)) if rows else (0, 0))
    found = pieces(CsvRecords(delimiter), data)
    assert len(found) == len(rows)
    assert [reference_records(piece.decode(), delimiter)[0] for piece in found] == rows


@given(st.text(st.sampled_from('a",\n'), max_size=40))
@example('5" disk,1\n6" disk,2\n')
@example('"abc"x"y,1\n2,3\n')
@example('""\n"\n')
@example('a""b\n"c""\n"\n')
def test_quotes_in_odd_places_are_cut_as_the_csv_module_cuts_them(text: str) -> None:
    if text.count("\n") == 0:
        return
    data = text.encode()
    end, count = CsvRecords().cut(array(data))
    whole = text[:end]
    # The reference: feed it line by line and see after which lines it has yielded a record.
    boundaries, position = [], 0
    lines = text.splitlines(keepends=True)
    while position < len(lines):
        stop = position + 1
        while stop <= len(lines):
            piece = "".join(lines[position:stop])
            if piece.endswith("\n") and is_whole(piece):
                break
            stop += 1
        else:
            break
        position = stop
        boundaries.append(sum(len(line) for line in lines[:position]))
    assert (end, count) == ((boundaries[-1], len(boundaries)) if boundaries else (0, 0)), whole


def is_whole(piece: str) -> bool:
    """Whether a CSV parser is outside of quotes at the end: then a marker behind it begins a record of its own."""
    return list(csv.reader(io.StringIO(piece + "marker\n", newline="")))[-1] == ["marker"]


def test_a_quote_that_is_not_closed_is_half_a_record() -> None:
    with pytest.raises(ValueError, match="quote"):
        CsvRecords().leftover(array(b'1,"two'))
    assert CsvRecords().leftover(array(b'1,"two"')) == 1
    assert CsvRecords().leftover(array(b'5" disk')) == 1


def test_blank_csv_lines_hold_no_row_but_spaces_do() -> None:
    assert CsvRecords().prepare(array(b"\r\na\n\n\r\n  \nb"))[1] == 3
    data = array(b"\r\na\n\n\r\n  \nb")
    assert CsvRecords().blank(data, CsvRecords().spans(data)[0]).tolist() == [True, False, True, True, False, False]


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \t\n", b"\n\n\n"])
def test_blank_lines_of_json_hold_no_row_wherever_they_stand(blank: bytes) -> None:
    for repeated in (1, 100):
        data = array(blank * repeated + b'{"a":1}\n' + blank * repeated + b' {"a":2}\n' + blank + b'{"a":3}')
        ready, rows = JsonLines().prepare(data)
        assert rows == 3
        assert [json.loads(line) for line in ready.tobytes().split(b"\n") if line.strip()] == [
            {"a": 1},
            {"a": 2},
            {"a": 3},
        ]
        starts, _ = JsonLines().spans(data)
        assert (~JsonLines().blank(data, starts)).sum() == 3
    assert JsonLines().prepare(array(blank * 50))[1] == 0
    with pytest.raises(ValueError, match="not a JSON object"):
        JsonLines().prepare(array(blank * 50 + b" null\n"))


# -- JSON items ------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(st.sampled_from('ab"\\[]{},é\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.sampled_from('a"\\{]'), max_size=3), inner),
    max_leaves=6,
)
objects = st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=6)
layouts = st.sampled_from([None, 1, 4])


@settings(max_examples=60)
@given(objects, layouts, st.booleans())
def test_the_items_of_a_json_array_are_those_the_json_module_finds(rows: list[Any], indent: Any, ascii: bool) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii).encode()
    data = text[text.index(b"[") + 1 :]
    cutter = JsonItems(in_array=True)
    found = pieces(cutter, data)
    assert [json.loads(piece) for piece in found] == rows
    assert cutter.cut(array(data))[1] == len(rows)
    assert cutter.leftover(array(data[cutter.cut(array(data))[0] :])) == 0
    assert [
        json.loads(piece) for piece in pieces(JsonItems(in_array=False), cutter.prepare(array(data))[0].tobytes())
    ] == rows


@settings(max_examples=60)
@given(objects, layouts, st.sampled_from([b"\n", b" ", b"", b",\n"]))
def test_objects_one_after_the_other_are_found_whatever_is_between_them(
    rows: list[Any], indent: Any, between: bytes
) -> None:
    data = between.join(json.dumps(row, indent=indent).encode() for row in rows)
    assert [json.loads(piece) for piece in pieces(JsonItems(in_array=False), data)] == rows


@settings(max_examples=60)
@given(objects, layouts, st.data())
def test_cutting_anywhere_finds_a_prefix_of_the_items(rows: list[Any], indent: Any, data: st.DataObject) -> None:
    text = json.dumps(rows, indent=indent).encode()[1:]
    half = text[: data.draw(st.integers(0, len(text)))]
    end, count = JsonItems(in_array=True).cut(array(half))
    assert [json.loads(piece) for piece in pieces(JsonItems(in_array=True), half[:end])] == rows[:count]
    # And the rest, read on from there, holds the others: no matter where the first buffer ended.
    assert [json.loads(piece) for piece in pieces(JsonItems(in_array=True), text[end:])] == rows[count:]


@pytest.mark.parametrize(
    ("in_array", "rest", "message"),
    [
        (True, b"", "array"),
        (True, b" , ", "array"),
        (True, b',{"a": [1, ', '"a"'),
        (True, b"] trailing", "b'trailing'"),
        (True, b"1, 2, 3]", r"\b1\b.*\b2\b"),
        (False, b'{"a"', "object"),
        (False, b"]", "array"),
        (False, b"5", r"\bJSON\b.*\b5\b"),
    ],
)
def test_a_file_that_is_cut_short_or_holds_no_objects_says_so(in_array: bool, rest: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonItems(in_array=in_array).leftover(array(rest))


def test_something_strange_between_two_items_belongs_to_the_second() -> None:
    data = b'{"a":1}, null, {"a":2}, "x{", {"a":3}]'
    assert pieces(JsonItems(in_array=True), data) == [b'{"a":1}', b'null, {"a":2}', b'"x{", {"a":3}']
    with pytest.raises(ValueError, match=r"\bJSON\b"):
        JsonItems(in_array=True).prepare(array(data))


@pytest.mark.parametrize(
    ("data", "second"),
    [(b'{"a":1} {"a":2}]', b'} {"a":2}'), (b'{"a":1},\n,{"a":2}]', b'},\n,{"a":2}')],
    ids=["missing", "doubled"],
)
def test_a_missing_or_doubled_comma_in_an_array_spoils_the_item_after_it(data: bytes, second: bytes) -> None:
    cutter = JsonItems(in_array=True)
    assert pieces(cutter, data) == [b'{"a":1}', second]
    with pytest.raises(ValueError, match="one comma"):
        cutter.prepare(array(data))
    assert pieces(JsonItems(in_array=False), data[:-1])[1].strip() == b'{"a":2}'


def test_two_items_without_a_comma_stay_in_one_piece() -> None:
    assert JsonItems(in_array=True).cut(array(b'{"a":0},{"a":1} {"a":')) == (7, 1)


def test_a_comma_at_the_end_of_an_array_is_an_error() -> None:
    with pytest.raises(ValueError, match="comma at the end"):
        JsonItems(in_array=True).leftover(array(b",\n]"))


@given(
    blocks=st.lists(st.sampled_from([b"\n" * 80, b'{"a":1}\n', b'{"a":"' + b"x" * 200 + b'"}\n', b" \n", b"\r\n"])),
    stride=st.sampled_from([1, 2, 61, 10**6]),
)
def test_rows_of_json_lines_do_not_depend_on_the_bytes_that_tell_their_length(blocks: list[bytes], stride: int) -> None:
    data = b"".join(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_STRIDE", stride)
        ready, rows = JsonLines().prepare(array(data))
    assert [json.loads(line) for line in ready.tobytes().splitlines() if line.strip()] == [
        json.loads(line) for line in data.splitlines() if line.strip()
    ]
    assert rows == sum(bool(line.strip()) for line in data.splitlines())


def test_preparing_blanks_what_separates_items_and_nothing_else() -> None:
    data = b'{"a":[1,2],"b":"},{"},\n{"a":[]} ,{} ]\n'
    ready, rows = JsonItems(in_array=True).prepare(array(data))
    assert rows == 3
    assert ready.tobytes() == b'{"a":[1,2],"b":"},{"}\n\n{"a":[]} \n{} \n\n'


@given(st.integers(0, 6), st.booleans())
def test_backslashes_before_a_quote_are_counted(slashes: int, bracket: bool) -> None:
    text = b'{"a": "' + b"\\" * slashes + b'"' + (b"}" if bracket else b"") + b'"}'
    stop = JsonItems(in_array=False).cut(array(text))[0]
    if slashes % 2:
        assert stop == len(text)
    elif bracket:
        assert stop == len(text) - 2
    else:
        assert stop == 0
