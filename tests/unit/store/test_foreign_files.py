"""Token files of other programs as stores: Megatron's pairs, and flat files with and without a header."""

from __future__ import annotations

import functools
import operator
import pickle
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreign_tokens import FILES, llmc_file, write_megatron, written_row
from penstock import PretrainDataLoader
from penstock.errors import ConfigError, DataError, PenstockError, ResumeError
from penstock.store import describe, open_store
from penstock.store.gather import TokenTable
from token_stores import make_rows, make_store


def rows_of(path: Path, **layout: object) -> list[list[int]]:
    store = open_store(path, **layout)  # type: ignore[arg-type]
    rows = [row["input_ids"].tolist() for row in store]
    lengths = np.array([len(row) for row in rows], np.int64)
    assert store.lengths.tolist() == lengths.tolist()
    assert store.tokens == lengths.sum()
    # The same by address, as loaders read them.
    table, out = TokenTable([store]), np.zeros(lengths.sum(), np.int64)
    numbers = np.arange(len(rows))
    table.copy(numbers, np.zeros(len(rows), np.int64), table.lengths(numbers), out, np.cumsum(lengths) - lengths)
    assert out.tolist() == [token for row in rows for token in row]
    return rows


@pytest.mark.parametrize("name", ["docs", "docs.bin", "docs.idx"])
def test_documents_that_megatron_wrote_are_rows_under_each_of_their_names(name: str) -> None:
    assert rows_of(FILES / "megatron" / name) == [written_row(row) for row in range(20)]


def test_documents_of_several_sequences_are_one_row_and_sequences_on_request() -> None:
    path, sentences = FILES / "megatron/sentences", [written_row(row) for row in range(15)]
    ends = np.cumsum([1 + document % 3 for document in range(8)]).tolist()
    documents = [functools.reduce(operator.iadd, sentences[low:high], []) for low, high in zip([0, *ends], ends)]
    assert rows_of(path) == documents
    assert rows_of(path, rows="sequences") == sentences


def test_multimodal_files_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="multimodal"):
        open_store(FILES / "megatron/pictures")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_dtype_of_whole_numbers_is_read(tmp_path: Path, dtype: str) -> None:
    rows = [[1, 2, 100], [], [5]]
    assert rows_of(write_megatron(tmp_path / "a", rows, dtype)) == rows


def test_floats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float32"):
        open_store(write_megatron(tmp_path / "a", [[1]], "float32"))


def test_sequences_in_another_order_than_the_file_are_rows_too(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2], [3], [4, 5, 6]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34:46], index[46:70] = np.array([3, 1, 2], np.int32).tobytes(), np.array([6, 4, 0], np.int64).tobytes()
    (tmp_path / "a.idx").write_bytes(index)
    assert rows_of(path) == [[4, 5, 6], [3], [1, 2]]


@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_batches_are_those_of_a_store_of_the_same_tokens(tmp_path: Path, packing: str | None) -> None:
    rows = make_rows(200, 40)
    options = {"chunk_size": 64, "batch_size": 3, "packing": packing, "backend": "numpy", "rank": 1, "world_size": 2}
    own = PretrainDataLoader(make_store(tmp_path / "own", rows), **options)  # type: ignore[arg-type]
    other = PretrainDataLoader(write_megatron(tmp_path / "a", rows), **options)  # type: ignore[arg-type]
    for mine, theirs in zip(own, other, strict=True):
        assert sorted(mine) == sorted(theirs)
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_loader_resumes_from_a_copy_of_the_file_and_refuses_another_one(tmp_path: Path) -> None:
    rows = make_rows(100, 30)
    first, copy, other = (tmp_path / name for name in ("first", "copy", "other"))
    for folder in (first, copy, other):
        folder.mkdir()
        changed = [[*row[:-1], row[-1] + (folder == other)] for row in rows[-1:]]
        write_megatron(folder / "a", [*rows[:-1], *changed])

    def loader(folder: Path) -> PretrainDataLoader:
        return PretrainDataLoader(folder / "a.bin", chunk_size=16, batch_size=4, backend="numpy")

    begun = loader(first)
    batches = iter(begun)
    for _ in range(5):
        next(batches)
    state, rest = begun.state_dict(), [batch["input_ids"].tolist() for batch in batches]
    resumed = loader(copy)
    resumed.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in resumed] == rest
    with pytest.raises(ResumeError, match="data"):
        loader(other).load_state_dict(state)


def test_the_state_of_another_cut_of_the_same_file_is_refused(tmp_path: Path) -> None:
    np.array([1, 2, 9, 3, 9] * 20, np.uint16).tofile(tmp_path / "train.bin")
    whole, cut = open_store(tmp_path / "train.bin"), open_store(tmp_path / "train.bin", eot=9)
    state = PretrainDataLoader(whole, chunk_size=4, backend="numpy").state_dict()
    with pytest.raises(ResumeError):
        PretrainDataLoader(cut, chunk_size=4, backend="numpy").load_state_dict(state)


def test_a_pickled_store_opens_the_same_file_again_and_refuses_a_changed_one(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.array([1, 2, 9, 3, 9], np.uint16).tofile(path)
    sent = pickle.dumps(open_store(path, eot=9))
    assert [row["input_ids"].tolist() for row in pickle.loads(sent)] == [[1, 2, 9], [3, 9]]  # noqa: S301
    np.array([1, 2, 9, 4, 9], np.uint16).tofile(path)
    with pytest.raises(DataError, match="pickled"):
        pickle.loads(sent)  # noqa: S301


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = open_store(write_megatron(tmp_path / "a", make_rows(50, 20)))
    assert len(store[0]["input_ids"])
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match="changed"):
        list(store.batches())


def test_ids_beyond_the_vocabulary_are_refused_with_row_and_id(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2], [3, 700, 4]])
    loader = PretrainDataLoader(open_store(path, vocab_size=500), chunk_size=2, backend="numpy")
    with pytest.raises(DataError, match=r"row 1 .*700.*0 to 499"):
        list(loader)
    assert len(list(PretrainDataLoader(open_store(path, vocab_size=701), chunk_size=2, backend="numpy")))


def test_the_tokenizer_of_a_loader_sets_the_largest_id(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2], [3, 700, 4]])
    with pytest.raises(DataError, match=r"row 1 .*700"):
        list(PretrainDataLoader(path, "byte", chunk_size=2, backend="numpy"))


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1], [2, -5]], "int32")
    with pytest.raises(DataError, match="-5"):
        list(PretrainDataLoader(path, chunk_size=2, backend="numpy"))


def test_a_flat_file_is_one_document_or_cut_after_eot(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.array([1, 2, 50256, 3, 50256, 50256, 4], np.uint16).tofile(path)
    assert rows_of(path) == [[1, 2, 50256, 3, 50256, 50256, 4]]
    assert rows_of(path, eot=50256) == [[1, 2, 50256], [3, 50256], [50256], [4]]
    assert rows_of(path, eot=50256, eot_side="start") == [[1, 2], [50256, 3], [50256], [50256, 4]]
    with pytest.raises(DataError, match="nowhere"):
        open_store(path, eot=7)


def test_the_header_of_llm_c_is_not_read_as_tokens(tmp_path: Path) -> None:
    path = llmc_file(tmp_path / "a.bin", [50256, 1, 2, 50256, 3])
    assert rows_of(path) == [[50256, 1, 2, 50256, 3]]
    assert rows_of(path, eot=50256) == [[50256, 1, 2], [50256, 3]]
    wide = llmc_file(tmp_path / "b.bin", [128000, 5], 20240801, 7, "uint32")
    assert rows_of(wide) == [[128000, 5]]


def test_a_text_may_begin_with_the_id_that_pickles_begin_with(tmp_path: Path) -> None:
    np.array([640, 5, 6], np.uint16).tofile(tmp_path / "a.bin")
    assert open_store(tmp_path / "a.bin").tokens == 3


def test_files_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for content, word in ((b"PK\x03\x04" + bytes(20), "zip"), (struct.pack("<iii", 20240326, 3, 1), "model")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word):
            open_store(path)
    llmc_file(path, [1, 2], version=9)
    with pytest.raises(DataError, match="version 9"):
        open_store(path)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [3, 4, 5]])
    whole = (tmp_path / "a.bin").read_bytes()
    for left in (len(whole) - 1, len(whole) - 2, 0):
        (tmp_path / "a.bin").write_bytes(whole[:left])
        with pytest.raises(DataError, match="truncated"):
            open_store(tmp_path / "a")
    path = llmc_file(tmp_path / "b.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="3 tokens"):
        open_store(path)
    (tmp_path / "c.bin").write_bytes(b"\1\2\3")
    with pytest.raises(DataError, match="3 bytes"):
        open_store(tmp_path / "c.bin")


@pytest.mark.parametrize(("kind", "most"), [("uint32", 300), ("uint32", 128_000), ("int64", 50_000), ("int32", 99)])
def test_wider_tokens_are_not_read_as_uint16(tmp_path: Path, kind: str, most: int) -> None:
    ids = np.random.default_rng(1).integers(0, most, 501)
    path = tmp_path / "wide.bin"
    ids.astype(kind).tofile(path)
    named = "int64" if kind == "int64" else "uint32"
    with pytest.raises(DataError, match=f"every second 16-bit word.*pass dtype='{named}'.*dtype='uint16'.*idx"):
        rows_of(path)
    assert rows_of(path, dtype=named) == [ids.tolist()]  # as the error says
    assert len(rows_of(path, dtype="uint16")[0]) == ids.astype(kind).nbytes // 2
    ids.astype("uint16").tofile(path)
    assert len(rows_of(path)[0]) == 501


def test_tokens_beyond_those_that_the_index_names_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[1, 2], [3]], "uint16")
    with (tmp_path / "m.bin").open("ab") as file:
        file.write(bytes(80))
    with pytest.raises(DataError, match=r"sequences of m.idx end at byte \d+.*copy both again"):
        rows_of(tmp_path / "m")


def test_an_index_without_tokens_and_an_empty_file_are_errors(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin"):
        open_store(tmp_path / "a.idx")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(DataError, match="no tokens"):
        open_store(tmp_path / "b.bin")
    with pytest.raises(DataError, match="no rows"):
        open_store(write_megatron(tmp_path / "c", []))


def test_options_of_another_format_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1]])
    with pytest.raises(ConfigError, match="eot=5 does not apply"):
        open_store(path, eot=5)
    with pytest.raises(ConfigError, match="vocab_size"):
        open_store(path, vocabsize=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="eot=5"):
        open_store(make_store(tmp_path / "own", [[1]]), eot=5)
    with pytest.raises(ConfigError, match="version=2"):
        open_store(path, 2)


def test_a_folder_of_splits_is_refused_and_a_glob_of_parts_is_read(tmp_path: Path) -> None:
    for number, name in enumerate(("train.bin", "val.bin")):
        np.full(8, number, np.uint16).tofile(tmp_path / name)
    with pytest.raises(ConfigError, match=r"train\.bin, val\.bin"):
        PretrainDataLoader(tmp_path, chunk_size=4, backend="numpy")
    loader = PretrainDataLoader(str(tmp_path / "*.bin"), chunk_size=4, batch_size=4, shuffle=False, backend="numpy")
    assert next(iter(loader))["input_ids"].tolist() == [[0] * 4] * 2 + [[1] * 4] * 2


def test_a_store_over_a_file_describes_itself(tmp_path: Path) -> None:
    facts = describe(open_store(write_megatron(tmp_path / "a", [[1, 2], [3]])))
    assert (facts["rows"], facts["tokens"], facts["transforms"]) == (2, 3, ["Megatron .bin and .idx"])


def test_long_documents_become_several_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.foreign.token_file._LONGEST", 4)
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert rows_of(tmp_path / "a.bin") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_indexes_give_rows_inside_the_file_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2], [3], [4, 5, 6]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(index) - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        index[place : place + width] = data.draw(st.binary(min_size=width, max_size=width))
    (tmp_path / "a.idx").write_bytes(index[: data.draw(st.integers(len(index) - 8, len(index)))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        rows = rows_of(path)
    except PenstockError:
        rows = []
    assert all(token < 7 for row in rows for token in row)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=1100), eot=st.none() | st.integers(0, 300))
def test_any_bytes_are_a_flat_file_or_an_error(tmp_path: Path, content: bytes, eot: int | None) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    try:
        rows = rows_of(path, eot=eot)
    except PenstockError:
        return
    assert sum(map(len, rows)) * 2 == len(content)
