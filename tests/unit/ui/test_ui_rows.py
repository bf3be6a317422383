from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from ui_cases import HOSTILE, client, make_chat_store, make_store, shown, write_lines

from penstock.errors import ConfigError, DataError
from penstock.store import StoreWriter
from penstock.ui.file_rows import FileRows
from penstock.ui.matches import Query, characters, characters_in
from penstock.ui.rows import Deadline, RowPlace
from penstock.ui.store_rows import StoreRows


def numbers(page: object) -> list[int]:
    return [row.place.row for row in page.rows]  # type: ignore[attr-defined]


def read_all(table: FileRows, count: int) -> list[tuple[int, int, str]]:
    """All rows, page by page."""
    found, at = [], RowPlace()
    while at is not None:
        page = table.page(at, count)
        found += [(row.place.file, row.place.row, row.text) for row in page.rows]
        at = page.last  # type: ignore[assignment]
    return found


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 100])
def test_pages_of_json_lines_have_every_row_once(tmp_path: Path, count: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(40)])
    assert read_all(FileRows(str(path)), count) == [(0, number, f"row {number}") for number in range(40)]


def test_blank_lines_count_and_bad_ones_are_shown_in_their_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, "", "{broken", {"text": "two"}])
    rows = FileRows(str(path)).page(RowPlace(), 10).rows
    assert [(row.place.row, bool(row.problem)) for row in rows] == [(0, False), (2, True), (3, False)]
    detail = FileRows(str(path)).row(rows[1].place)
    assert detail.problem
    assert detail.raw == "{broken"
    assert detail.following == rows[2].place


def test_rows_of_several_files_go_on_from_file_to_file(tmp_path: Path) -> None:
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(3)])
    found = read_all(FileRows(str(tmp_path)), 2)
    assert found == [(file, row, f"{name}{row}") for file, name in enumerate("ab") for row in range(3)]
    assert [row.text for row in FileRows(str(tmp_path)).search(Query("b2"), RowPlace(), 5, Deadline()).rows] == ["b2"]


def test_csv_parquet_arrow_text_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,"two\nlines"\n2,x\n3\n')
    rows = FileRows(str(tmp_path / "a.csv")).page(RowPlace(), 10).rows
    assert [row.text for row in rows] == ["id: 1 text: two lines", "id: 2 text: x", "3"]
    assert "header has 2" in rows[2].problem
    table = pa.table({"text": [f"row {number}" for number in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 13)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"text": f"row {number}"}) + "\n" for number in range(100))
    (tmp_path / "a.txt").write_text("".join(f"row {number}\n" for number in range(100)))
    for name in ("a.parquet", "a.arrow", "a.jsonl.gz", "a.txt"):
        rows_of = FileRows(str(tmp_path / name))
        assert read_all(rows_of, 17) == [(0, number, f"row {number}") for number in range(100)]
        place, known = rows_of.find(0, 63, Deadline())
        assert known
        assert rows_of.row(place).values == {"text": "row 63"}
        assert numbers(rows_of.search(Query("row 7"), RowPlace(), 20, Deadline())) == [7, *range(70, 80)]
        with pytest.raises(ConfigError, match="has 100 rows"):
            rows_of.find(0, 100, Deadline())


def test_a_search_that_runs_out_of_time_says_how_far_it_looked_and_goes_on_there(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} " + "x" * 1000} for number in range(5000)]
    table = FileRows(str(write_lines(tmp_path / "a.jsonl", rows)))
    at, found, requests = RowPlace(), [], 0
    while at is not None:
        page = table.search(Query("row 4321 "), at, 10, Deadline(0.0))
        found += numbers(page)
        assert page.last is None or page.last.row > at.row
        at, requests = page.last, requests + 1  # type: ignore[assignment]
    assert found == [4321]
    assert requests > 2


def test_a_row_far_away_is_found_in_several_requests(tmp_path: Path) -> None:
    rows = [{"text": "x" * 1000} for _ in range(5000)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    table = FileRows(str(path))
    known, before = False, -1
    for _ in range(100):
        place, known = table.find(0, 4000, Deadline(0.0))
        assert place.row > before
        before = place.row
        if known:
            break
    assert known
    assert place.row == 4000
    made = client(path)
    assert "row 4,000" in shown(made, "/t/0?row=4000")


def test_search_by_length_counts_characters(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x" * number, "more": ["y"]} for number in range(30)])
    assert numbers(FileRows(str(path)).search(Query("", 11, 13), RowPlace(), 9, Deadline())) == [10, 11, 12]
    pq.write_table(pa.table({"t": ["x" * number for number in range(30)]}), tmp_path / "a.parquet")
    assert numbers(FileRows(str(tmp_path / "a.parquet")).search(Query("", 11, 13), RowPlace(), 9, Deadline())) == [
        11,
        12,
        13,
    ]


TEXTS = st.text(st.sampled_from('aAbäß"\\/\n 日'), max_size=6)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(TEXTS, st.none() | TEXTS, st.lists(TEXTS, max_size=2)), max_size=6), text=TEXTS)
def test_columns_and_plain_rows_are_searched_alike(rows: list[tuple[str, str | None, list[str]]], text: str) -> None:
    schema = pa.schema(
        [
            ("a", pa.string()),
            ("b", pa.dictionary(pa.int8(), pa.string())),
            ("c", pa.list_(pa.struct([("role", pa.string())]))),
            ("d", pa.map_(pa.string(), pa.string())),
        ]
    )
    values = [{"a": a, "b": b, "c": [{"role": each} for each in c], "d": list(zip("xy", c))} for a, b, c in rows]
    batch = pa.RecordBatch.from_pylist(values, schema=schema)
    plain = [{"a": a, "b": b, "c": c, "d": c} for a, b, c in rows]
    query = Query(text)
    if text:
        assert query.in_batch(batch).tolist() == [query.is_in_value(row) for row in plain]
        assert query.in_batch(batch.slice(1)).tolist() == [query.is_in_value(row) for row in plain[1:]]
    assert characters_in(batch).tolist() == [characters(row) for row in plain]


@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), text=TEXTS.filter(bool))
def test_the_quick_look_at_a_block_misses_no_row(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], text: str
) -> None:
    for ascii_only in (True, False):
        path = tmp_path_factory.getbasetemp() / "quick.jsonl"
        path.write_text("".join(json.dumps({"t": each}, ensure_ascii=ascii_only) + "\n" for each in texts))
        found = numbers(FileRows(str(path)).search(Query(text), RowPlace(), 99, Deadline()))
        assert found == [number for number, each in enumerate(texts) if Query(text).is_in_value(each)]


# -- stores ------------------------------------------------------------------------------------------------------------


def test_rows_of_a_store_are_paged_and_searched_in_their_tokens(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [f"Document {number} end" for number in range(120)])
    table = StoreRows(str(store))
    assert numbers(table.page(RowPlace(0, 0, 110), 50)) == list(range(110, 120))
    assert numbers(table.search(Query("document 11"), RowPlace(), 50, Deadline())) == [11, *range(110, 120)]
    assert numbers(table.search(Query("document 11"), RowPlace(0, 0, 112), 3, Deadline())) == [112, 113, 114]
    assert numbers(table.search(Query("Document 11 "), RowPlace(), 50, Deadline())) == [11]
    assert not numbers(table.search(Query("endDocument"), RowPlace(), 50, Deadline()))


def test_lengths_are_searched_in_the_index_over_shards(tmp_path: Path) -> None:
    lengths = np.random.default_rng(3).integers(1, 90, 700)
    with StoreWriter(tmp_path / "s", shard_bytes=4096) as writer:
        writer.write(
            pa.RecordBatch.from_pydict({"input_ids": pa.array([[1] * n for n in lengths], pa.list_(pa.uint16()))})
        )
        writer.publish()
    table = StoreRows(str(tmp_path / "s"))
    assert len(table.store.manifest.shards) > 3
    wanted = np.flatnonzero((lengths >= 40) & (lengths <= 44)).tolist()
    found, at = [], RowPlace()
    while at is not None:
        page = table.search(Query("", 40, 44), at, 10, Deadline(0.0))
        found, at = found + numbers(page), page.last  # type: ignore[assignment]
    assert found == wanted
    counted = table.length_counts()
    assert counted is not None
    assert {(low, high): rows for low, high, rows, _ in counted} == {
        (low, 2 * low - 1): int(((lengths >= low) & (lengths < 2 * low)).sum()) for low in (1, 2, 4, 8, 16, 32, 64)
    }


def test_the_page_of_a_row_shows_its_tokens_with_the_loss_mask(tmp_path: Path) -> None:
    made = client(make_chat_store(tmp_path / "s", [("Why?", "Because."), ("How?", "So.")]))
    assert "supervised" in shown(made, "/t/0")
    text = shown(made, "/t/0/row/0-0-1")
    assert 'class="run content trained"' in text
    assert "of them supervised" in text
    assert 'href="/t/0/row/0-0-0"' in text
    assert "Next row" not in text


def test_a_store_has_its_own_tokenizer_whatever_is_given_for_files(tmp_path: Path) -> None:
    store = make_chat_store(tmp_path / "s", [("Why?", "Because.")])
    other = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(other))
    made = client(store, write_lines(tmp_path / "f.jsonl", [{"text": "a"}]), tokenizer=str(other))
    assert "Because." in shown(made, "/t/0")
    assert "1 token" in shown(made, "/t/1/row/0-0-0")


def test_parts_of_a_row_are_those_of_its_template_also_beyond_the_first_tokens(tmp_path: Path) -> None:
    asked = "Say <think>no</think> " + "y" * 2_500
    text = shown(client(make_chat_store(tmp_path / "s", [(asked, "<think>Well.</think>Because.")])), "/t/0/row/0-0-0")
    assert "run thought" not in text.partition("legend")[2]
    text = shown(client(tmp_path / "s"), "/t/0/row/0-0-0?token=2000")
    assert 'class="run thought trained" data-part="thought"' in text
    assert 'class="run content trained"' in text


def test_a_huge_row_is_shown_in_parts(tmp_path: Path) -> None:
    made = client(make_store(tmp_path / "s", ["y" * 300_000]))
    text = shown(made, "/t/0/row/0-0-0")
    assert "Tokens 0 to 2,000 of 300,00" in text
    assert len(text) < 200_000
    assert "Earlier tokens" in shown(made, "/t/0/row/0-0-0?token=4000")
    assert len(shown(made, "/t/0")) < 20_000


def test_a_huge_line_of_a_file_is_shown_in_part(tmp_path: Path) -> None:
    made = client(write_lines(tmp_path / "a.jsonl", [{"text": "z" * 2_000_000}]))
    text = shown(made, "/t/0/row/0-0-0")
    assert "more characters" in text
    assert len(text) < 200_000
    assert len(shown(made, "/t/0")) < 20_000


def test_hostile_strings_are_text(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": HOSTILE, HOSTILE: [{"role": HOSTILE, "content": HOSTILE}]}])
    with lines.open("ab") as file:
        file.write(b'{"text": "\\ud800 lone"}\n\xff\xfe bad\n')
    made = client(lines, make_store(tmp_path / "s", [HOSTILE]))
    pages = ["/t/0", "/t/0/row/0-0-0", "/t/1", "/t/1/row/0-0-0", "/t/0?q=%3Cscript%3E", "/t/1?q=%3Cscript%3E"]
    pages += [f"/t/0/row/{row.place}" for row in FileRows(str(lines)).page(RowPlace(), 9).rows]
    for path in pages:
        text = shown(made, path)
        assert "<script>" not in text
        assert "<img" not in text
        assert "\u202e" not in text
        assert "\x00" not in text
    assert "&lt;script&gt;" in shown(made, "/t/0")
    assert "<mark>&lt;script&gt;</mark>" in shown(made, "/t/1?q=%3Cscript%3E")
    assert '"&gt;&lt;b' in shown(made, "/t/1?q=%22%3E%3Cb").replace("&quot;", '"')


def test_a_store_that_is_removed_while_shown_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", ["one", "two"])
    made = client(store, write_lines(tmp_path / "b.jsonl", [{"text": "x"}]))
    assert "2" in shown(made, "/t/0")
    shutil.rmtree(store)
    for path in ("/t/0", "/t/0/row/0-0-1"):
        assert "was removed while it was shown" in shown(made, path, 404)
    assert "was removed while it was shown" in shown(made, "/")
    make_store(tmp_path / "s", ["one", "two", "three"])
    assert "row 2" in shown(made, "/t/0")


def test_a_shard_that_is_removed_while_shown_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", ["one", "two"])
    table = StoreRows(str(store))
    table.row(RowPlace(0, 0, 1))
    for shard in store.rglob("*.arrow"):
        shard.unlink()
    with pytest.raises(DataError, match=r"removed|missing"):
        table.page(RowPlace(), 10)


def test_a_store_without_its_tokenizer_shows_ids_and_says_why(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        writer.write(pa.RecordBatch.from_pydict({"input_ids": pa.array([[104, 105]], pa.list_(pa.uint16()))}))
        writer.publish()
    text = shown(client(tmp_path / "s"), "/t/0")
    assert "104 105" in text
    assert "no path of its tokenizer" in text
    assert "hi" in shown(client(tmp_path / "s", tokenizer="byte"), "/t/0")


def test_raw_rows_get_tokens_with_a_tokenizer(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}],
    )
    assert "Conversation" in shown(client(path), "/t/0/row/0-0-0")
    text = shown(client(path, tokenizer="byte", template="alpaca"), "/t/0/row/0-0-0")
    assert 'class="run content trained"' in text


def test_wrong_parameters_are_named(tmp_path: Path) -> None:
    made = client(write_lines(tmp_path / "a.jsonl", [{"text": "x"}]))
    assert "expected a number" in shown(made, "/t/0?min=-4", 404)
    assert "expected a number" in shown(made, "/t/0?row=%C2%B2", 404)
    assert "a place is FILE-OFFSET-ROW" in shown(made, "/t/0/row/zero", 404)
    assert "row 5 does not exist" in shown(made, "/t/0?row=5", 404)
    assert "at most 1,000 characters" in shown(made, "/t/0?q=" + "x" * 2000, 404)
