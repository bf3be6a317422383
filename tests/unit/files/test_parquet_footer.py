"""Row groups that were encoded one by one and joined are the bytes of a file that was written in one go."""

from __future__ import annotations

import tracemalloc
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.files.parquet_footer import (
    MAGIC,
    PAGE_HEADER_BYTES,
    dictionary_entry_bytes,
    join_footers,
    split_file,
)

WIDE = pa.table({f"column {number}": [number, None, -number] for number in range(40)})
TABLES = {
    "flat": pa.table({"id": range(100), "text": [f"row {number % 7}" for number in range(100)]}),
    "nested": pa.table({"a": [[1, 2], None, []], "b": [{"x": 1.5, "y": "é"}, None, {"x": None, "y": ""}]}),
    "types": pa.table(
        {"d": [Decimal("1.50"), None], "t": pa.array([0, 1], pa.timestamp("ns", "UTC")), "f": [True, None]}
    ),
    "wide": WIDE,
    "nulls": pa.table({"n": pa.nulls(3), "e": pa.array(["a", "b", "a"]).dictionary_encode()}),
    "empty": pa.table({"x": pa.array([], pa.int64())}),
}


def whole(tables: list[pa.Table], **options: Any) -> bytes:
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, tables[0].schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    return out.getvalue().to_pybytes()


def joined(tables: list[pa.Table], **options: Any) -> bytes:
    data, footers, shifts = bytearray(MAGIC), [], []
    for table in tables:
        body, footer = split_file(memoryview(whole([table], **options)))
        shifts.append(len(data) - len(MAGIC))
        footers.append(footer)
        data += body
    return bytes(data) + join_footers(footers, shifts)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("groups", [1, 2, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "write_page_checksum": True},
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "use_dictionary": True, "data_page_size": 64},
    ],
)
def test_joined_row_groups_are_the_bytes_of_one_writer(name: str, groups: int, options: dict[str, Any]) -> None:
    tables = [TABLES[name].slice(0, max(0, TABLES[name].num_rows - number % 2)) for number in range(groups)]
    assert joined(tables, **options) == whole(tables, **options)


def test_what_is_joined_can_be_read() -> None:
    tables = [TABLES["flat"], TABLES["flat"].slice(50), TABLES["flat"].slice(0, 3)]
    read = pq.read_table(pa.BufferReader(joined(tables)), page_checksum_verification=False)
    assert read.equals(pa.concat_tables(tables))


def test_positions_beyond_four_gigabytes_are_written() -> None:
    _, footer = split_file(memoryview(whole([TABLES["flat"]])))
    made = join_footers([footer, footer], [0, 1 << 40])
    metadata = pq.ParquetFile(pa.BufferReader(MAGIC + made)).metadata
    first, second = (metadata.row_group(group).column(1) for group in range(2))
    assert second.data_page_offset - first.data_page_offset == 1 << 40
    assert metadata.num_rows == 200


def test_footers_of_many_columns_are_joined_in_little_more_memory_than_they_take() -> None:
    table = pa.table({f"c{number}": [number, number + 1] for number in range(1500)})
    _, footer = split_file(memoryview(whole([table])))
    tracemalloc.start()
    try:
        made = join_footers([footer] * 4, range(4))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # As Python values, the footers took thirty times their size.
    assert peak < 5 * len(made)


def dictionary_page(texts: list[str], **options: Any) -> bytes:
    data = whole([pa.table({"text": texts})], **options)
    start = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(0).dictionary_page_offset
    return data[start : start + PAGE_HEADER_BYTES]


@given(
    st.lists(st.text(max_size=300), min_size=1, max_size=50),
    st.sampled_from([{"compression": "none"}, {"compression": "zstd", "write_page_checksum": True}]),
)
def test_the_mean_text_of_a_dictionary_is_in_the_header_of_its_page(texts: list[str], options: dict[str, Any]) -> None:
    dictionary = pa.array(texts).dictionary_encode().dictionary
    lengths = sum(len(text.as_py().encode()) for text in dictionary)
    size = lengths + 4 * len(dictionary)
    assert dictionary_entry_bytes(dictionary_page(texts, **options)) == (size / len(dictionary), size)


@given(st.binary(max_size=PAGE_HEADER_BYTES))
def test_bytes_that_are_no_dictionary_page_have_no_mean(data: bytes) -> None:
    width, size = dictionary_entry_bytes(data)
    assert (width > 0) == (size > 0)
    page = dictionary_page(["a", "b"])
    assert dictionary_entry_bytes(page[:3]) == (0.0, 0)
    assert dictionary_entry_bytes(bytes([page[0], 0]) + page[2:]) == (0.0, 0), "that is a data page"


@pytest.mark.parametrize(
    "damaged",
    [
        b"\x19\xf7\xff\xff\xff\xff\x7f",  # a list of 34 billion numbers
        b"\x15\x04\x15\x28\x5c\x18\x00\x00\x00",  # the number of entries is a text
        b"\x15\x04\x15\x28\x5c\x11\x00\x00",  # or true
        b"\x15\x04\x11\x5c\x15\x02\x00\x00",  # the size is true
    ],
)
def test_a_damaged_header_of_a_page_has_no_mean(damaged: bytes) -> None:
    assert dictionary_entry_bytes(damaged) == (0.0, 0)
