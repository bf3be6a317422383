from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pytest

from penstock.sources import JsonlSource
from penstock.sources.record_source import RecordSource


def parses(source: RecordSource, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of the parser, which costs far more than a row does."""
    calls: list[int] = []
    parse = source._parse

    def counted(data: Any, layout: Any) -> Any:
        calls.append(data.size)
        return parse(data, layout)

    monkeypatch.setattr(source, "_parse", counted)
    return calls


@pytest.mark.parametrize("bad", ["{'id': 1", "[1, 2]", '"text"', '{"id": 1}}', '{"id": "\\ud800"}'])
def test_rows_that_are_no_json_do_not_cost_a_call_of_the_parser_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    lines = [json.dumps({"id": row}) if row % 2 else bad for row in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = JsonlSource(tmp_path / "a.jsonl")
    assert source.schema.names == ["id"]
    calls = parses(source, monkeypatch)
    block = source.next_block(1 << 20)
    assert block is not None
    decoded = source.decode(block)
    assert len(calls) <= 3
    assert decoded.batch["id"].to_pylist() == list(range(1, 2000, 2))
    assert list(decoded.rows or ()) == list(range(1, 2000, 2))
    assert [one.row for one in decoded.rejected] == list(range(0, 2000, 2))


@pytest.mark.parametrize("odd", ["Inf", "-NaN", "NaN", "-Infinity"])
def test_numbers_that_only_the_parser_knows_are_kept_beside_bad_rows(tmp_path: Path, odd: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"x": 1.5}}\n{{"x": {odd}}}\nbad\n{{"x": 2.5}}\n{{"x": "text"}}\n')
    source = JsonlSource(tmp_path / "a.jsonl", schema=pa.schema([("x", pa.float64())]))
    block = source.next_block(1 << 20)
    assert block is not None
    decoded = source.decode(block)
    assert decoded.rows == (0, 1, 3)
    assert [one.row for one in decoded.rejected] == [2, 4]


@pytest.mark.parametrize(
    "bad",
    [
        'null{"x": {"NaN": 1}, "y": nu]',  # Arrow's parser reads a null there
        '{"y": -NaN, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_bad_rows_that_would_crash_the_parser_do_not_reach_it(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"x": [1]}}\n{bad}\n{{"x": null}}\n')
    # In a process of its own: a crash is not an exception.
    code = """
        import sys
        from penstock.sources import JsonlSource
        source = JsonlSource(sys.argv[1])
        decoded = source.decode(source.next_block(1 << 20))
        print(decoded.batch.to_pydict(), [one.row for one in decoded.rejected])
    """
    command = [sys.executable, "-c", dedent(code), str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{'x': [[1], None]} [1]\n"), done.stderr
