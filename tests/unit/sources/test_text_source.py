from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError
from penstock.sources import TextSource
from penstock.testing import assert_source_contract


def read(source: TextSource) -> list[str]:
    rows: list[str] = []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.column(0).to_pylist()
    source.close()
    return rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(
        st.text(max_size=8).filter(lambda t: "\n" not in t and not t.endswith("\r")), min_size=1, max_size=9
    ),
    ends=st.sampled_from(["\n", "\r\n"]),
    newline_at_end=st.booleans(),
    block=st.sampled_from([1, 9, 1 << 20]),
)
def test_every_line_is_a_row_without_its_end(
    tmp_path: Path, lines: list[str], ends: str, newline_at_end: bool, block: int
) -> None:
    if lines[0].startswith("\ufeff") or (not newline_at_end and lines == [""]):
        return
    path = tmp_path / "a.txt"
    path.write_bytes((ends.join(lines) + (ends if newline_at_end else "")).encode())
    wanted = lines if newline_at_end or lines[-1] else lines[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.record_source._BATCH_BYTES", block)
        assert read(TextSource(path)) == wanted


def test_only_one_carriage_return_belongs_to_the_line_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\r\nb\rc\r\n\r\n  \n")
    assert read(TextSource(tmp_path / "a.txt")) == ["a\r", "b\rc", "", "  "]


def test_a_text_source_keeps_the_contract_with_blank_lines_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("\ufeffone\n\n\nfour")
    (tmp_path / "2.md").write_text("five\n")
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress("sechs ü\n\n".encode()))
    rows = [{"line": line} for line in ("one", "", "", "four", "five", "sechs ü", "")]
    assert_source_contract(lambda: TextSource(tmp_path, column="line"), rows)


def test_a_file_can_be_one_row(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("one\ntwo\n")
    (tmp_path / "2.txt").write_text("\ufeffthree")
    (tmp_path / "3.txt").write_text("x" * 3_000_000)
    rows = [{"text": "one\ntwo\n"}, {"text": "three"}, {"text": "x" * 3_000_000}]
    assert_source_contract(lambda: TextSource(tmp_path, per="file"), rows)
    (tmp_path / "4.txt").touch()
    assert len(read(TextSource(tmp_path, per="file", allow_empty=True))) == 3
    with pytest.raises(ConfigError, match=r"\bper\b.*'word'"):
        TextSource(tmp_path, per="word")  # type: ignore[arg-type]


def test_a_file_that_is_too_long_for_one_row_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("one\n" * 100)
    (tmp_path / "2.txt").write_text("two")
    source = TextSource(tmp_path, per="file", max_row_bytes=100)
    with pytest.raises(DataError, match=r"row 0\b.*max_row_bytes=100"):
        source.next_batch(1)
    source.skip_file()
    assert read(source) == ["two"]


def test_a_line_that_is_not_utf8_is_named_and_no_blank_line_is_lost_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\n\xff\xfe\n\n\nsix\n")
    source = TextSource(path)
    block = source.next_block(1000)
    assert block is not None
    decoded = source.decode(block)
    assert decoded.batch.column(0).to_pylist() == ["one", "", "", "", "six"]
    assert decoded.rows == (0, 1, 3, 4, 5)
    [bad] = decoded.rejected
    assert (bad.row, bad.offset, bad.kind, bad.data) == (2, 5, "invalid UTF-8", b"\xff\xfe")
    assert bad.reason == "not valid UTF-8: byte 0xff at position 0"


@pytest.mark.parametrize("limit", [0, -1, "3 GiB"])
def test_a_limit_for_rows_must_make_sense(tmp_path: Path, limit: int | str) -> None:
    with pytest.raises(ConfigError, match="max_row_bytes"):
        TextSource(tmp_path, max_row_bytes=limit)
