from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from penstock.observe import closing_table
from penstock.pipeline import Report


def report(**changes: Any) -> Report:
    facts: dict[str, Any] = {
        "rows_in": 1_000_000,
        "rows_out": 900_000,
        "dropped": {},
        "changed": {},
        "quarantined": {},
        "skipped": {},
        "seconds": 20.0,
        "peak_bytes": 100 << 20,
        "bottleneck": "Lower('text') is the bottleneck",
        "stages": [
            {"kind": "source", "rows_in": 0, "bytes_in": 400_000_000},
            {"kind": "decode", "rows_in": 1_000_000, "bytes_in": 400_000_000},
            {"kind": "sink", "rows_in": 900_000, "bytes_in": 1},
        ],
    }
    return Report(**(facts | changes))


def lines(**changes: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(closing_table(report(**changes), budget_bytes=256 << 20))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_printed_report_is_for_people() -> None:
    assert str(report(dropped={"too short": 100_000})).splitlines() == [
        "rows in      1,000,000",
        "rows out       900,000",
        "dropped        100,000  too short",
        "time              20 s  50,000 rows/s, 20.0 MB/s",
        "peak memory  100.0 MiB",
        "bottleneck              Lower('text') is the bottleneck",
    ]


def test_the_table_has_rows_time_speed_memory_and_bottleneck() -> None:
    assert lines() == [
        "rows in 1,000,000",
        "rows out 900,000",
        "time 20 s 50,000 rows/s, 20.0 MB/s",
        "peak memory 100.0 MiB of a budget of 256.0 MiB",
        "bottleneck Lower('text') is the bottleneck",
    ]


def test_reasons_come_with_their_counts_the_most_frequent_first() -> None:
    table = lines(dropped={"b: null": 1, "[a]: null": 99_000}, changed={"c: clipped": 7}, quarantined={"no JSON": 3})
    assert table[2:6] == ["dropped 99,000 [a]: null", "1 b: null", "changed 7 c: clipped", "quarantined 3 no JSON"]


def test_skipped_rows_have_their_own_line() -> None:
    assert lines(skipped={"reading CSV: too few cells": 2})[2] == "skipped 2 reading CSV: too few cells"


def test_a_resumed_run_says_what_its_counts_include() -> None:
    assert "checkpoint" in lines(resumed=True)[0]


def test_a_run_of_no_time_has_no_speed() -> None:
    assert "time 0.0 s" in lines(seconds=0.0)
