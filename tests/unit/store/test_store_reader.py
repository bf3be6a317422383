from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.store.reader as module
import penstock.store.shards as shards_module
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.checksums import FileFingerprint
from penstock.store import Manifest, Store, StoreWriter, append, describe, find_store, is_complete, open_store, prune
from penstock.store.manifest import Lineage, content_key

COUNT = 300
IDS = [list(range(i % 11)) for i in range(COUNT)]


def batch_of(rows: list[list[int]], first: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "input_ids": pa.array(rows, pa.list_(pa.uint16())),
            "loss_mask": pa.array([[token % 2 == 1 for token in row] for row in rows], pa.list_(pa.bool_())),
            "block": pa.array([[i, i + 1] for i in range(len(rows))], pa.list_(pa.int32(), 2)),
            "holes": pa.array([[1, None] if i % 2 else None for i in range(len(rows))], pa.list_(pa.int64())),
            "n": pa.array(range(first, first + len(rows)), pa.int64()),
            "text": [f"row {i}" for i in range(first, first + len(rows))],
        }
    )


def make(path: Path, shard_bytes: int = 2000, **options: Any) -> Manifest:
    with StoreWriter(path, shard_bytes=shard_bytes, **options) as writer:
        writer.write(batch_of(IDS))
        return writer.publish()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make(tmp_path / "a.store")
    return tmp_path / "a.store"


def test_a_row_is_a_dict_of_views_and_plain_values(path: Path) -> None:
    store = open_store(path)
    assert len(store.manifest.shards) > 3
    assert len(store) == COUNT
    row = store[-1]
    assert list(row) == store.schema.names
    assert (row["n"], row["text"]) == (299, "row 299")
    assert (row["input_ids"].dtype, row["input_ids"].tolist()) == (np.uint16, IDS[-1])
    assert (row["loss_mask"].dtype, row["loss_mask"].tolist()) == (np.bool_, [bool(i % 2) for i in IDS[-1]])
    assert row["block"].tolist() == [299, 300]
    assert (row["holes"], store[298]["holes"]) == ([1, None], None)
    assert [row["n"] for row in store[5:8]] == [5, 6, 7]
    assert [row["n"] for row in store[::-100]] == [299, 199, 99]


def test_token_lists_are_views_of_the_file_and_cannot_be_written_to(path: Path) -> None:
    store = open_store(path)
    one, two = store[10]["input_ids"], store[10]["input_ids"]
    assert np.shares_memory(one, two)
    assert not one.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    store.close()
    assert one.tolist() == IDS[10]


@pytest.mark.parametrize("row", [COUNT, -COUNT - 1, 10**12])
def test_a_row_that_is_not_there_is_an_index_error(path: Path, row: int) -> None:
    store = open_store(path)
    with pytest.raises(IndexError, match=f"row {row}"):
        store[row]
    with pytest.raises(IndexError, match=r"\b300\b"):
        store.take([0, row])


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(-COUNT, COUNT - 1), max_size=50))
def test_take_gives_the_rows_in_the_order_asked_for(tmp_path_factory: pytest.TempPathFactory, rows: list[int]) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "take.store"
    if not path.exists():
        make(path)
    batch = open_store(path).take(rows, columns=["n", "input_ids"])
    assert batch.schema.names == ["n", "input_ids"]
    assert batch["n"].to_pylist() == [row % COUNT for row in rows]
    assert batch["input_ids"].to_pylist() == [IDS[row] for row in rows]


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, None), (7, 8), (100, 290), (299, None), (300, None), (50, 20), (-2, None), (5, -290), (-900, 3)],
)
def test_batches_cover_a_range_in_order(path: Path, start: int, stop: int | None) -> None:
    got = [n for batch in open_store(path).batches(start, stop, columns=["n"]) for n in batch["n"].to_pylist()]
    assert got == list(range(COUNT))[start:stop]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [([False, True], "bool"), ([1.9], "float64"), (np.array([2.0]), "float64"), (["1"], "str32"), ([10**30], "object")],
)
def test_take_refuses_what_are_no_row_numbers(path: Path, rows: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"take\(\).*{kind}"):
        open_store(path).take(rows)


def test_row_numbers_may_be_of_any_width_but_not_beyond_the_end(path: Path) -> None:
    store = open_store(path)
    for kind in (np.uint8, np.int16, np.uint64):
        assert store.take(np.array([3, 1], kind))["n"].to_pylist() == [3, 1]
    with pytest.raises(IndexError, match=r"\b300\b"):
        store.take(np.array([2**64 - 1], np.uint64))
    with pytest.raises(TypeError, match="integer"):
        store[1.0]  # type: ignore[call-overload]
    assert store[np.int64(-1)]["n"] == 299  # type: ignore[call-overload]


def test_lists_of_no_elements_are_rows_too(tmp_path: Path) -> None:
    column = pa.FixedSizeListArray.from_buffers(pa.list_(pa.int32(), 0), 3, [None], children=[pa.array([], pa.int32())])
    with StoreWriter(tmp_path / "s", tokens=None) as writer:
        writer.write(pa.record_batch({"none": column, "n": [1, 2, 3]}))
        writer.publish()
    row = open_store(tmp_path / "s")[2]
    assert (row["none"].tolist(), row["n"]) == ([], 3)


def test_a_store_stays_where_it_was_opened(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    store = open_store(path.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store[-1]["n"] == 299
    assert store.path == path
    assert describe(store)["path"] == "a.store", "shown as it was given"
    assert repr(store).startswith("Store('a.store', version 1, 300 rows")


def test_an_unknown_column_is_named(path: Path) -> None:
    with pytest.raises(SchemaError, match="'ids'"):
        next(open_store(path).batches(columns=["ids"]))


def test_lengths_come_from_the_indexes_alone(path: Path) -> None:
    store = open_store(path)
    for shard in (path / "shards").glob("*.arrow"):
        shard.unlink()
    assert store.lengths.tolist() == [len(row) for row in IDS]
    assert store.lengths.dtype == np.int32
    assert store.tokens == sum(map(len, IDS))
    with pytest.raises(ValueError, match="read-only"):
        store.lengths[0] = 1


def test_rows_without_tokens_have_no_lengths(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", tokens=None) as writer:
        writer.write(pa.record_batch({"n": [1, 2]}))
        writer.publish()
    store = open_store(tmp_path / "s")
    assert (store[1], store.tokens) == ({"n": 2}, 0)
    with pytest.raises(SchemaError, match="tokens=None"):
        _ = store.lengths


def test_nothing_is_mapped_before_it_is_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = module.ShardReader

    def counting(*args: Any) -> Any:
        opened.append(1)
        return real(*args)

    monkeypatch.setattr(module, "ShardReader", counting)
    store = open_store(path)
    assert opened == []
    for row in (0, 1, 299, 0):
        store[row]
    assert len(opened) == 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in Linux's /proc")
def test_open_shards_take_no_file_handles(path: Path) -> None:
    store = open_store(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    rows = list(store)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(rows) == COUNT


def test_the_cache_of_pieces_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PIECES", 2)
    store = open_store(path)
    assert [store[row]["n"] for row in range(0, COUNT, 7)] == list(range(0, COUNT, 7))
    assert len(store._pieces) <= 2


def test_many_threads_may_read_at_once(path: Path) -> None:
    store, wrong = open_store(path), []

    def read(seed: int) -> None:
        for row in np.random.default_rng(seed).integers(0, COUNT, 500).tolist():
            if store[row]["input_ids"].tolist() != IDS[row]:
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def total_of(store: Store) -> tuple[int, int]:
    return int(store.lengths.sum()), sum(int(row["input_ids"].sum()) for row in store)


def test_a_store_can_be_sent_to_another_process(path: Path) -> None:
    store = open_store(path)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(total_of, store).result(60) == total_of(store)


def test_a_pickled_store_keeps_its_version_and_notices_another_store_in_its_place(path: Path) -> None:
    data = pickle.dumps(open_store(path, verify="fast"))
    assert len(data) < 500
    append(path, [batch_of([[1]])])
    again = pickle.loads(data)  # noqa: S301 - our own bytes
    assert (len(again), again._verify) == (COUNT, "fast")
    elsewhere = path.with_name("b.store")
    make(elsewhere)
    path.rename(path.with_name("gone"))
    elsewhere.rename(path)
    with pytest.raises(DataError, match=r"version 1\b"):
        pickle.loads(data)  # noqa: S301


def test_a_closed_store_says_so(path: Path) -> None:
    with open_store(path) as store:
        assert store[0]["n"] == 0
    with pytest.raises(ValueError, match=r"a\.store"):
        store[0]
    store.close()


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("which", ["file", "index_file"])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_flipped_bit_is_found_and_the_shard_named(path: Path, which: str, place: float) -> None:
    shard = open_store(path).manifest.shards[1]
    file = path / getattr(shard, which)
    flip(file, int(place * file.stat().st_size))
    with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
        open_store(path, verify="full")
    touched = open_store(path)
    assert touched[0]["n"] == 0
    with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
        touched[touched.manifest.shards[0].rows]


@pytest.mark.parametrize("which", ["file", "index_file"])
@pytest.mark.parametrize("verify", ["fast", "touch", "full"])
def test_a_missing_or_shortened_shard_is_named_when_the_store_is_opened(path: Path, which: str, verify: Any) -> None:
    file = path / getattr(open_store(path).manifest.shards[1], which)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"{file.name}.*{len(data) - 1}"):
        open_store(path, verify=verify)
    file.unlink()
    with pytest.raises(DataError, match=file.name):
        open_store(path, verify=verify)


def test_every_flipped_bit_is_noticed_unless_told_not_to_look(path: Path) -> None:
    shard = open_store(path).manifest.shards[0]
    file = path / shard.file
    good = file.read_bytes()
    for position in range(0, len(good), len(good) // 40):
        flip(file, position)
        with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
            open_store(path)[0]
        with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
            open_store(path).take([0])
        with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
            next(open_store(path).batches())
        file.write_bytes(good)
    assert open_store(path)[0]["n"] == 0


def test_a_flipped_bit_in_an_index_does_not_become_a_length(path: Path) -> None:
    shard = open_store(path).manifest.shards[1]
    flip(path / shard.index_file, 4)
    with pytest.raises(DataError, match=rf"{shard.index_file.split('/')[1]}.*row 0\b"):
        _ = open_store(path).lengths
    assert len(open_store(path, verify="fast").lengths) == COUNT


def test_a_shard_is_hashed_once_in_a_process_unless_it_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = shards_module.hash_file

    def counting(file: Path) -> str:
        hashed.append(file.name)
        return real(file)

    monkeypatch.setattr(shards_module, "hash_file", counting)
    entry = open_store(path).manifest.shards[0]
    assert hashed == [], "opening is cheap"
    for name in (entry.file, entry.index_file):
        os.utime(path / name, (1000, 1000))
    for _ in range(3):
        store = open_store(path)
        assert (store[0]["n"], store[1]["n"]) == (0, 1)
    assert len(hashed) == len(set(hashed)) == 2
    assert open_store(path, verify="fast")[-1]["n"] == 299
    assert len(hashed) == 2
    flip(path / entry.file, 100)
    with pytest.raises(DataError, match=r"row 0\b"):
        open_store(path)[0]


def test_a_file_that_has_just_been_written_is_hashed_again(path: Path) -> None:
    """It might change once more without its time showing it."""
    file = path / open_store(path).manifest.shards[0].file
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    assert open_store(path)[0]["n"] == 0
    flip(file, 100)
    os.utime(file, ns=(now, now))
    with pytest.raises(DataError, match=r"row 0\b"):
        open_store(path)[0]


def test_columns_that_are_not_those_of_the_manifest_are_noticed_without_a_checksum(path: Path) -> None:
    shard = open_store(path).manifest.shards[0]
    file = path / shard.file
    file.write_bytes(file.read_bytes().replace(b"loss_mask", b"loss_mbsk"))
    for use in (lambda store: store[0], lambda store: store.take([0]), lambda store: next(store.batches())):
        with pytest.raises(DataError, match=rf"{file.name}.*row 0\b"):
            use(open_store(path, verify="fast"))


def test_text_that_is_no_text_is_said_with_its_row_and_file(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", tokens=None) as writer:
        writer.write(pa.record_batch({"text": ["abc", "defg"]}))
        manifest = writer.publish()
    file = tmp_path / "s" / manifest.shards[0].file
    file.write_bytes(file.read_bytes().replace(b"defg", b"de\xffg"))
    store = open_store(tmp_path / "s", verify="fast")
    assert store[0] == {"text": "abc"}
    with pytest.raises(DataError, match=rf"{file.name}.*row 1\b"):
        store[1]


def test_a_version_that_is_replaced_and_pruned_while_it_is_opened_is_not_missed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, other = module.read_manifest, path.with_name("other")

    def and_then_pruned(home: Path, version: int | None = None) -> Manifest:
        manifest = real(home, version)
        if not other.exists():
            other.mkdir()
            with StoreWriter(path, mode="overwrite") as writer:
                writer.write(batch_of([[7]]))
                writer.publish()
            prune(path, keep_versions=1)
        return manifest

    for use in (open_store, is_complete):
        shutil.rmtree(path)
        other.rmdir() if other.exists() else None
        make(path)
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_manifest", and_then_pruned)
            opened: Any = use(path)
            assert opened is True or len(opened) == 1


def test_a_shard_that_goes_while_the_store_is_open_is_named(path: Path) -> None:
    store = open_store(path)
    (path / store.manifest.shards[-1].file).unlink()
    assert store[0]["n"] == 0
    with pytest.raises(DataError, match=r"\.arrow"):
        store[-1]


@pytest.mark.parametrize("which", ["file", "index_file"])
@pytest.mark.parametrize(
    "use", [lambda store: store[1], lambda store: store.take([1]), lambda store: list(store.batches())]
)
def test_a_shard_that_is_truncated_while_the_store_is_open_is_named(
    path: Path, which: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(path)
    assert store[0]["n"] == 0
    monkeypatch.setattr(shards_module, "CHECK_SECONDS", -1.0)  # rows are not looked at more often than that
    os.truncate(path / getattr(store.manifest.shards[0], which), 0)
    with pytest.raises(DataError, match=r"shard was changed") as caught:
        use(store)
    assert caught.value.file == str(path / store.manifest.shards[0].file)


def test_a_file_that_is_no_arrow_file_is_damaged_even_with_the_right_size(path: Path) -> None:
    store = open_store(path)
    file = path / store.manifest.shards[0].file
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(DataError, match=r"row 0\b"):
        store[0]


def test_what_is_not_a_store_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        open_store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        open_store(tmp_path / "file")


def test_verify_has_three_degrees(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify.*'slow'"):
        open_store(path, verify="slow")  # type: ignore[arg-type]


# -- finding and describing ------------------------------------------------------------------------------------------


def test_a_store_is_found_by_its_key_if_it_is_whole(tmp_path: Path) -> None:
    lineage = Lineage(inputs=(FileFingerprint("a.jsonl", 3, "abc"),), tokenizer="t")
    key = lineage.key
    assert key == content_key(lineage.inputs, tokenizer="t")
    assert find_store(tmp_path / "nowhere", key) is None
    make(tmp_path / "other.store")
    manifest = make(tmp_path / "b.store", lineage=lineage)
    assert manifest.key == key
    assert find_store(tmp_path, key) == tmp_path / "b.store"
    assert is_complete(tmp_path / "b.store", key)
    assert is_complete(tmp_path / "other.store")
    assert not is_complete(tmp_path / "other.store", key)
    (tmp_path / "b.store" / manifest.shards[0].file).unlink()
    assert not is_complete(tmp_path / "b.store", key)
    assert find_store(tmp_path, key) is None
    assert not is_complete(tmp_path)
    (tmp_path / "other.store" / "manifest.json").write_text("{")
    assert not is_complete(tmp_path / "other.store")


def test_a_store_describes_itself(path: Path) -> None:
    facts = describe(open_store(path))
    tokens = sum(map(len, IDS))
    supervised = sum(token % 2 for row in IDS for token in row)
    assert (facts["rows"], facts["tokens"], facts["supervised"]) == (COUNT, tokens, supervised)
    assert facts["supervised_share"] == pytest.approx(supervised / tokens)
    assert facts["lengths"] == {"min": 0, "p50": 5, "p90": 9, "p99": 10, "max": 10}
    assert facts["columns"]["input_ids"] == "list<item: uint16>"
    assert facts["shards"] == len(list((path / "shards").glob("*.arrow")))
