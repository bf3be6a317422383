"""Loaders of rows that are tokens already: datasets of Hugging Face, MDS shards, WebDataset archives, Parquet."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreign_tokens import FILES, written_row
from penstock import ConversationDataLoader, PretrainDataLoader
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.objects import open_bucket
from penstock.loaders import convert
from penstock.sources import open_source
from penstock.store import open_store
from token_stores import make_masks, make_rows, make_store

ROWS = make_rows(60, 12)
MASKS = make_masks(ROWS)
OPTIONS: dict[str, Any] = {"chunk_size": 16, "batch_size": 3, "backend": "numpy", "progress": False}


def same_batches(first: Any, second: Any) -> bool:
    pairs = list(zip(first, second, strict=True))
    assert pairs
    return all(np.array_equal(a[name], b[name]) for a, b in pairs for name in a)


def saved(folder: Path, **columns: Any) -> Path:
    datasets.Dataset.from_dict({"input_ids": ROWS, **columns}).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("column", ["loss_mask", "assistant_masks", "completion_mask"])
def test_a_saved_dataset_with_a_mask_gives_the_batches_of_a_store(tmp_path: Path, column: str) -> None:
    own = make_store(tmp_path / "own", ROWS, MASKS, dtype=pa.int64())
    whole = [[1] * len(row) for row in ROWS]
    folder = saved(tmp_path / "saved", **{column: MASKS, "attention_mask": whole})
    assert same_batches(PretrainDataLoader(own, **OPTIONS), PretrainDataLoader(folder, **OPTIONS))
    options = {"max_length": 16, "batch_size": 3, "backend": "numpy"}
    assert same_batches(ConversationDataLoader(own, **options), ConversationDataLoader(folder, **options))  # type: ignore[arg-type]


def test_a_dataset_object_is_read_where_it_is_and_resumes_as_the_folder_of_its_rows(tmp_path: Path) -> None:
    own = PretrainDataLoader(make_store(tmp_path / "own", ROWS, dtype=pa.int64()), **OPTIONS)
    dataset = datasets.load_from_disk(str(saved(tmp_path / "saved")))
    loader = PretrainDataLoader(dataset, **OPTIONS, cache_dir=tmp_path / "cache")
    assert same_batches(own, loader)
    assert not (tmp_path / "cache").exists()
    state = loader.state_dict()
    PretrainDataLoader(pickle.loads(pickle.dumps(dataset)), **OPTIONS).load_state_dict(state)  # noqa: S301
    other = datasets.Dataset.from_dict({"input_ids": [[*ROWS[0][:-1], 7], *ROWS[1:]]})
    with pytest.raises(ResumeError):
        PretrainDataLoader(other, **OPTIONS).load_state_dict(state)


def test_a_dataset_object_is_opened_as_a_store_with_its_columns_named() -> None:
    dataset = datasets.Dataset.from_dict({"ids": ROWS, "keep": MASKS})
    store = open_store(dataset, tokens="ids", mask="keep")
    assert [row["ids"].tolist() for row in store] == ROWS
    with pytest.raises(ConfigError, match="selected or shuffled"):
        open_store(dataset.select([1, 0]), tokens="ids")
    with pytest.raises(ConfigError, match="got list"):
        open_store([1, 2])


def test_a_function_that_changes_rows_of_a_dataset_is_not_passed_over() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": ROWS}).with_transform(lambda rows: {"input_ids": [[9]]})
    with pytest.raises(ConfigError, match=r"changes rows when they are read.*dataset\.map"):
        PretrainDataLoader(dataset, **OPTIONS)


def test_a_dataset_in_another_order_becomes_a_store_in_the_cache(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": ROWS}).select(range(59, -1, -1)).shuffle(seed=3)
    expected = make_store(tmp_path / "own", dataset["input_ids"][:], dtype=pa.int64())
    loader = PretrainDataLoader(dataset, **OPTIONS, cache_dir=tmp_path / "cache")
    assert same_batches(PretrainDataLoader(expected, **OPTIONS), loader)
    again = PretrainDataLoader(dataset, **OPTIONS, cache_dir=tmp_path / "cache")
    again.load_state_dict(loader.state_dict())
    assert len(list((tmp_path / "cache/stores").glob("[0-9a-f]*"))) == 1


def padded(left: bool) -> dict[str, Any]:
    """Rows padded to 12 tokens, with labels."""
    found: dict[str, Any] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row, mask in zip(ROWS, MASKS):
        pad = 12 - len(row)
        labels = [token if chosen else -100 for token, chosen in zip(row, mask)]
        for name, values, fill in (
            ("input_ids", row, 0),
            ("attention_mask", [1] * len(row), 0),
            ("labels", labels, -100),
        ):
            found[name].append([fill] * pad + values if left else values + [fill] * pad)
    return found


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_left_out_and_labels_become_a_mask(tmp_path: Path, left: bool) -> None:
    own = make_store(tmp_path / "own", ROWS, MASKS, dtype=pa.int64())
    dataset = datasets.Dataset.from_dict(padded(left))
    assert same_batches(
        PretrainDataLoader(own, **OPTIONS), PretrainDataLoader(dataset, **OPTIONS, cache_dir=tmp_path / "cache")
    )
    dataset.save_to_disk(tmp_path / "saved")
    folder = PretrainDataLoader(tmp_path / "saved", **OPTIONS, cache_dir=tmp_path / "cache")
    assert same_batches(PretrainDataLoader(own, **OPTIONS), folder)


def test_padding_without_labels_is_refused_in_place_and_left_out_by_convert(tmp_path: Path) -> None:
    columns = padded(left=False)
    del columns["labels"]
    columns.pop("input_ids")
    rows = padded(left=False)["input_ids"]
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"input_ids": rows, **columns}).save_to_disk(folder)
    with pytest.raises(DataError, match=r"padded.*penstock convert"):
        PretrainDataLoader(folder, **OPTIONS)
    convert(folder, tmp_path / "out.store", "store")
    assert [row["input_ids"].tolist() for row in open_store(tmp_path / "out.store")] == ROWS


def test_labels_that_are_not_the_ids_are_refused(tmp_path: Path) -> None:
    shifted = [[*row[1:], -100] for row in ROWS]
    dataset = datasets.Dataset.from_dict({"input_ids": ROWS, "labels": shifted})
    with pytest.raises(Exception, match="labels are not the input ids"):
        PretrainDataLoader(dataset, **OPTIONS, cache_dir=tmp_path / "cache")


def test_texts_beside_tokens_are_tokenized_if_a_tokenizer_is_given(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", text=["abc"] * 60)
    tokens = PretrainDataLoader(folder, **OPTIONS)
    texts = PretrainDataLoader(folder, "byte", **OPTIONS, cache_dir=tmp_path / "cache")
    assert next(iter(tokens))["input_ids"].max() < 60 * 12
    assert set(np.unique(next(iter(texts))["input_ids"])) >= {97, 98, 99}


def test_nulls_masks_of_other_lengths_and_several_masks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1"):
        PretrainDataLoader(datasets.Dataset.from_dict({"input_ids": [[1], None]}), **OPTIONS)
    short = [[True]] * 60
    with pytest.raises(DataError, match="loss_mask has 1 values"):
        PretrainDataLoader(saved(tmp_path / "a", loss_mask=short), **OPTIONS)
    with pytest.raises(ConfigError, match="several masks"):
        PretrainDataLoader(saved(tmp_path / "b", loss_mask=MASKS, completion_mask=MASKS), **OPTIONS)
    chosen = open_store(tmp_path / "b", mask="completion_mask")
    assert chosen.manifest.mask_column == "completion_mask"


def test_a_saved_dataset_that_lacks_a_file_or_is_cut_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    (file,) = folder.glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="save the dataset again"):
        PretrainDataLoader(folder, **OPTIONS)
    file.unlink()
    with pytest.raises(DataError, match="not there"):
        PretrainDataLoader(folder, **OPTIONS)


@pytest.mark.parametrize(("name", "rows"), [("mds/tokens", 20), ("webdataset/tokens-*.tar", 10)])
def test_shards_of_tokens_become_a_store_once(tmp_path: Path, name: str, rows: int) -> None:
    own = make_store(tmp_path / "own", [written_row(row) for row in range(rows)])
    options = {**OPTIONS, "cache_dir": tmp_path / "cache"}
    loader = PretrainDataLoader(str(FILES / name), **options)
    assert same_batches(PretrainDataLoader(own, **OPTIONS), loader)
    (store,) = (tmp_path / "cache/stores").glob("[0-9a-f]*")
    stamp = (store / "manifest.json").stat().st_mtime_ns
    again = PretrainDataLoader(str(FILES / name), **options)
    again.load_state_dict(loader.state_dict())
    assert (store / "manifest.json").stat().st_mtime_ns == stamp


def test_shards_of_texts_are_tokenized(tmp_path: Path) -> None:
    for name, column in (("mds/texts", "text"), ("webdataset/texts.tar", "txt")):
        loader = PretrainDataLoader(
            FILES / name, "byte", text_column=column, shuffle=False, cache_dir=tmp_path / "cache", **OPTIONS
        )
        assert bytes(next(iter(loader))["input_ids"][0][:7].tolist()) == b"zeile 0"


def test_parquet_and_json_lines_of_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    own = make_store(tmp_path / "own", ROWS)
    pq.write_table(pa.table({"input_ids": pa.array(ROWS, pa.list_(pa.uint16()))}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    for name in ("a.parquet", "a.jsonl"):
        loader = PretrainDataLoader(tmp_path / name, **OPTIONS, cache_dir=tmp_path / "cache")
        assert same_batches(PretrainDataLoader(own, **OPTIONS), loader)


def test_data_that_cannot_be_opened_in_place_says_what_to_do(tmp_path: Path) -> None:
    for name in ("mds/tokens", "webdataset/tokens-000000.tar"):
        with pytest.raises(ConfigError, match="penstock convert"):
            open_store(FILES / name)
    with pytest.raises(ConfigError, match="--dtype int64"):
        PretrainDataLoader(FILES / "mds/bytes", **OPTIONS)


def test_ids_beyond_the_vocabulary_are_refused_in_datasets_and_shards(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary"):
        list(PretrainDataLoader(datasets.Dataset.from_dict({"input_ids": [[1, 2], [70_000]]}), "byte", **OPTIONS))


def test_a_folder_that_is_not_uploaded_whole_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FILES / "mds/tokens", tmp_path / "mds")
    (tmp_path / "mds/shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds.*not there"):
        PretrainDataLoader(tmp_path / "mds", **OPTIONS)


@pytest.mark.parametrize(("name", "rows"), [("megatron/docs", 20), ("mds/tokens", 20), ("webdataset/tokens-*.tar", 10)])
def test_tokens_are_streamed_without_a_store_and_resume(tmp_path: Path, name: str, rows: int) -> None:
    def loader() -> PretrainDataLoader:
        return PretrainDataLoader(str(FILES / name), chunk_size=4, batch_size=2, streaming=True, backend="numpy")

    first = loader()
    batches, states = [], []
    for batch in first:
        batches.append(batch["input_ids"].tolist())
        states.append(first.state_dict())
    tokens = sorted(token for row in range(rows) for token in written_row(row))
    found = sorted(token for batch in batches for row in batch for token in row)
    assert found[-len(tokens) :] == tokens  # the rest is padding
    resumed = loader()
    resumed.load_state_dict(states[2])
    assert [batch["input_ids"].tolist() for batch in resumed] == batches[3:]


def test_an_opened_file_is_not_streamed() -> None:
    with pytest.raises(ConfigError, match="omit streaming"):
        PretrainDataLoader(open_store(FILES / "megatron/docs"), streaming=True, backend="numpy")


@pytest.mark.parametrize("name", ["mds/tokens", "megatron/docs.bin"])
def test_token_data_in_a_bucket_is_refused_before_it_is_fetched(s3_url: str, tmp_path: Path, name: str) -> None:
    bucket, prefix = open_bucket(s3_url)
    for file in (FILES / "mds/tokens/index.json", FILES / "mds/tokens/shard.00000.mds", FILES / "megatron/docs.bin"):
        bucket.write(f"{prefix}/{file.relative_to(FILES)}", file.read_bytes())
    with pytest.raises(ConfigError, match="local disk"):
        PretrainDataLoader(f"{s3_url}/{name}", **OPTIONS, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="local disk"):
        open_source(f"{s3_url}/{name}")
    assert not (tmp_path / "cache").exists()
