"""Samples to MLX batches: the same ones whatever makes them, every row once, and what is wrong said with its row."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import MemoryBudget
from penstock.batching import options as options_module
from penstock.batching.backends import get_backend
from penstock.batching.masked_lm import MaskedLM
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.states import with_checksum
from penstock.loaders import Output, Padding, Shard
from penstock.loaders.mlx_loader import MLXDataLoader, MLXLoaderConfig
from penstock.loaders.samples.datasets import ListDataset
from penstock.loaders.streaming import StreamingConfig, StreamingPipeline
from penstock.pipeline.prefetch import ReadAhead
from penstock.testing import assert_loader_contract
from token_stores import make_rows, make_store

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make_samples(count: int = 37, longest: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(1, 900, rng.integers(1, longest + 1)).astype(np.int32),
            "labels": int(rng.integers(0, 3)),
            "text": f"row {row}",
        }
        for row in range(count)
    ]


class Asked:
    """A dataset that is nothing but its two methods, and remembers who asked for what."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.asked: Counter[int] = Counter()
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < len(self.samples):
            raise IndexError(row)
        self.asked[row] += 1
        self.threads.add(threading.current_thread().name)
        return self.samples[row]


class Columned(Asked):
    """One that has its samples as columns too."""

    def to_columns(self) -> pa.Table:
        return table_of(self.samples)


def table_of(samples: list[dict[str, Any]], chunk: int = 10) -> pa.Table:
    """In several chunks, as files are."""
    rows = [{name: value.tolist() if hasattr(value, "tolist") else value for name, value in s.items()} for s in samples]
    parts = [pa.Table.from_pylist(rows[low : low + chunk]) for low in range(0, len(rows), chunk)]
    return pa.concat_tables(parts)


SAMPLES = make_samples()
MLM = MaskedLM(mask_id=3, vocab_size=900, special_ids=(0, 1, 2, 3), seed=5)
FORMS: dict[str, Any] = {
    "asked": lambda: Asked(SAMPLES),
    "list": lambda: SAMPLES,
    "table": lambda: table_of(SAMPLES),
    "columned": lambda: Columned(SAMPLES),
}


def content(batch: Any) -> dict[str, Any]:
    arrays = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.to_numpy().items()}
    facts = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.metadata.items()}
    return arrays | facts


def epochs(loader: MLXDataLoader, count: int = 2) -> list[dict[str, Any]]:
    with loader:
        return [content(batch) for _ in range(count) for batch in loader]


def make(data: Any = None, **more: Any) -> MLXDataLoader:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "prefetch_size": 0, **more}
    return MLXDataLoader(SAMPLES if data is None else data, **options)


# What a batch is


def test_another_backend_by_name_needs_no_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(options_module, "get_backend", lambda name: asked.append(name) or get_backend(name))
    with MLXDataLoader([{"input_ids": [1, 2]}], backend="numpy") as loader:
        assert loader.get_batch().backend.name == "numpy"
    assert set(asked) == {"numpy"}


def test_batches_are_mlx_arrays_padded_to_the_longest_row() -> None:
    loader = MLXDataLoader(Asked(SAMPLES), MLXLoaderConfig(batch_size=4, shuffle=False, num_workers=2))
    batch = next(iter(loader))
    for name in ("input_ids", "attention_mask", "labels"):
        assert isinstance(batch[name], mx.array)
        assert batch[name].dtype == mx.int32
    longest = max(len(sample["input_ids"]) for sample in SAMPLES[:4])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, longest)
    for row, sample in enumerate(SAMPLES[:4]):
        length = len(sample["input_ids"])
        assert batch["input_ids"][row, :length].tolist() == sample["input_ids"].tolist()
        assert batch["input_ids"][row, length:].tolist() == [0] * (longest - length)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (longest - length)
    assert batch["labels"].tolist() == [sample["labels"] for sample in SAMPLES[:4]]
    assert batch.metadata["text"] == ["row 0", "row 1", "row 2", "row 3"]
    assert batch.num_items_in_batch == 4
    loader.close()


@pytest.mark.parametrize("form", FORMS)
def test_every_row_comes_exactly_once_an_epoch_with_its_own_values(form: str) -> None:
    for more in ({}, {"bucket_by_length": True}, {"shuffle": False}):
        seen: Counter[int] = Counter()
        with make(FORMS[form](), **more) as loader:
            assert len(loader) == 10
            for batch in loader:
                ids, mask = batch.to_numpy()["input_ids"], batch.to_numpy()["attention_mask"]
                assert batch.num_tokens == mask.sum()
                for at, row in enumerate(batch.metadata["row"].tolist()):
                    seen[row] += 1
                    assert ids[at][mask[at] == 1].tolist() == SAMPLES[row]["input_ids"].tolist()
                    assert int(batch.labels[at]) == SAMPLES[row]["labels"]
                    assert batch.metadata["text"][at] == SAMPLES[row]["text"]
        assert seen == dict.fromkeys(range(37), 1)


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_other_frameworks_get_the_same_values(backend: str) -> None:
    wanted = epochs(make(table_of(SAMPLES)), 1)
    for data in (table_of(SAMPLES), Asked(SAMPLES)):
        with make(data, backend=backend) as loader:
            found = list(loader)
        assert {type(batch.input_ids).__module__.partition(".")[0] for batch in found} <= {backend, "jaxlib"}
        assert [content(batch) for batch in found] == wanted


def test_samples_as_seed_001_prints_them_work_with_workers() -> None:
    class Houses(Asked):
        def __getitem__(self, row: int) -> dict[str, Any]:
            self.threads.add(threading.current_thread().name)
            tokens = [row + 1] * (row % 5 + 1)
            return {
                "text": f"house {row}",
                "input_ids": mx.array(tokens),
                "attention_mask": mx.array([1] * len(tokens)) * 1,  # lazy: belongs to the thread that made it
                "metadata": {"id": row},
                "labels": mx.array([100000.5 + row]),
            }

    data = Houses([None] * 23)
    with MLXDataLoader(data, MLXLoaderConfig(batch_size=5, num_workers=4)) as loader:
        batches = list(loader)
    assert any("penstock-ahead" in name for name in data.threads)
    for batch in batches:
        rows = batch.metadata["row"].tolist()
        assert batch["labels"].dtype == mx.float32
        assert batch["labels"].shape == (len(rows), 1)
        assert batch["labels"].tolist() == [[100000.5 + row] for row in rows]
        assert batch["attention_mask"].sum(axis=1).tolist() == [row % 5 + 1 for row in rows]
        assert batch.metadata["metadata"] == [{"id": row} for row in rows]
    assert sorted(row for batch in batches for row in batch.metadata["row"].tolist()) == list(range(23))


def test_an_array_that_another_thread_has_to_compute_is_an_error_that_says_so() -> None:
    lazy = [{"input_ids": mx.array([1, 2, 3]) + row, "labels": 0} for row in range(8)]
    with make(Asked(lazy), num_workers=2) as loader, pytest.raises(DataError, match=r"row .*num_workers=0"):
        list(loader)
    assert len(epochs(make(Asked(lazy)), 1)) == 2


def test_what_samples_have_by_token_and_by_row_comes_along() -> None:
    samples = [
        {
            "input_ids": list(range(1, n + 1)),
            "attention_mask": [0] + [1] * (n - 1),
            "token_type_ids": [1] * n,
            "labels": [0.5, float(n)],
            "weight": n / 2,
            "source": f"file {n}",
            "id": n,
            "features": np.full((2, 2), n),
        }
        for n in (2, 4, 3, 5)
    ]
    for data in (Asked(samples), samples, table_of(samples)):
        with make(data, shuffle=False) as loader:
            (batch,) = loader
        assert batch["attention_mask"].tolist()[0] == [0, 1, 0, 0, 0]
        assert batch["token_type_ids"].tolist()[2] == [1, 1, 1, 0, 0]
        assert batch["labels"].dtype == mx.float32
        assert batch["labels"].tolist()[3] == [0.5, 5.0]
        assert batch["weight"].tolist() == [1.0, 2.0, 1.5, 2.5]
        assert batch["features"].shape == (4, 2, 2)
        assert batch["features"][1].tolist() == [[4, 4], [4, 4]]
        assert batch.metadata["sample_source"] == ["file 2", "file 4", "file 3", "file 5"]
        assert batch.metadata["id"] == [2, 4, 3, 5]
        assert "id" not in batch


def test_labels_by_token_are_padded_with_what_is_not_learned() -> None:
    samples = [{"input_ids": [1, 2, 3], "labels": [-100, 5, 6]}, {"input_ids": [1, 2], "labels": [7, -100]}]
    for data in (Asked(samples), samples, table_of(samples)):
        with make(data, shuffle=False) as loader:
            (batch,) = loader
        assert batch["labels"].tolist() == [[-100, 5, 6], [7, -100, -100]]
        assert batch.num_items_in_batch == 3


def test_labels_that_only_look_as_if_they_were_by_token_are_told_apart_by_the_objective() -> None:
    samples = [{"input_ids": [1, 2], "labels": [0, 1]}, {"input_ids": [1, 2, 3], "labels": [1, 1]}]
    for data in (Asked(samples), samples, table_of(samples)):
        with pytest.raises(DataError, match=r"labels.*objective='classification'"):
            epochs(make(data), 1)
        (batch,) = epochs(make(data, objective="classification", shuffle=False), 1)
        assert batch["labels"] == [[0, 1], [1, 1]]
        assert batch["num_items_in_batch"] == 2


def test_objectives_decide_what_labels_are() -> None:
    samples = [{"input_ids": [1, 2], "labels": n} for n in (1, 2, 3)]
    with make(samples, objective="regression") as loader:
        assert next(iter(loader)).labels.dtype == mx.float32
    floats = [{"input_ids": [1, 2], "labels": float(n)} for n in (1, 2, 3)]
    with make(floats, objective="classification", shuffle=False) as loader:
        labels = next(iter(loader)).labels
        assert labels.dtype == mx.int32
        assert labels.tolist() == [1, 2, 3]
    with (
        make([*floats, {"input_ids": [1], "labels": 1.5}], objective="classification") as loader,
        pytest.raises(DataError, match=r"labels.*objective='regression'"),
    ):
        next(iter(loader))


def test_samples_without_labels_are_batches_without_them() -> None:
    samples = [{"input_ids": sample["input_ids"]} for sample in SAMPLES]
    with make(samples) as loader:
        batch = next(iter(loader))
    assert batch.labels is None
    assert "labels" not in batch
    assert batch.num_items_in_batch == 4


def test_padding_to_a_multiple_and_to_max_length_and_with_another_id() -> None:
    for data in (SAMPLES, Asked(SAMPLES)):
        for batch in epochs(make(data, pad_to_multiple_of=8, pad_id=999), 1):
            ids, mask = np.array(batch["input_ids"]), np.array(batch["attention_mask"])
            assert ids.shape[1] % 8 == 0
            assert (ids[mask == 0] == 999).all()
        shapes = {
            len(row) for b in epochs(make(data, padding="max_length", max_length=20), 1) for row in b["input_ids"]
        }
        assert shapes == {20}


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_longer_than_max_length_are_cut_and_counted(side: str, caplog: pytest.LogCaptureFixture) -> None:
    for data in (SAMPLES, Asked(SAMPLES), table_of(SAMPLES)):
        caplog.clear()
        loader = make(data, max_length=5, truncation=side)
        with loader, caplog.at_level(logging.WARNING):
            batches = list(loader)
        for batch in batches:
            ids = batch.to_numpy()["input_ids"]
            for at, row in enumerate(batch.metadata["row"].tolist()):
                given = SAMPLES[row]["input_ids"].tolist()
                due = given[:5] if side == "right" else given[-5:]
                assert ids[at, : len(due)].tolist() == due
        lost = [max(len(sample["input_ids"]) - 5, 0) for sample in SAMPLES]
        assert loader.truncated == {"rows": sum(map(bool, lost)), "tokens": sum(lost)}
        assert sum(batch.metadata["truncated_tokens"] for batch in batches) == sum(lost)
        assert sum("max_length=" in record.message for record in caplog.records) == 1


def test_a_row_longer_than_max_length_is_an_error_unless_it_may_be_cut() -> None:
    row = next(row for row, sample in enumerate(SAMPLES) if len(sample["input_ids"]) > 5)
    for data in (SAMPLES, Asked(SAMPLES), table_of(SAMPLES)):
        with make(data, max_length=5, shuffle=False) as loader, pytest.raises(DataError, match=f"row {row}"):
            list(loader)


# The same batches, whatever makes them


@QUICK
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 99),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 5]),
)
def test_batches_depend_neither_on_workers_nor_on_the_form_of_the_data(
    rows: int,
    size: int,
    seed: int,
    workers: int,
    prefetch: int,
    steps: int,
    buckets: bool,
    drop_last: bool,
    max_length: int | None,
) -> None:
    if drop_last and rows < size * steps:
        return
    samples = make_samples(rows, seed=seed)
    options: dict[str, Any] = {
        "batch_size": size,
        "seed": seed,
        "bucket_by_length": buckets,
        "drop_last": drop_last,
        "gradient_accumulation_steps": steps,
        "max_length": max_length,
        "truncation": "left",
    }
    wanted = epochs(make(Asked(samples), **options))
    assert epochs(make(Asked(samples), **options | {"num_workers": workers, "prefetch_size": prefetch})) == wanted
    assert epochs(make(Asked(samples), **options | {"num_workers": workers, "tune": "auto"})) == wanted
    assert epochs(make(samples, **options)) == wanted
    assert epochs(make(table_of(samples), **options | {"tune": "auto"})) == wanted
    assert len(make(samples, **options)) * 2 == len(wanted)


@pytest.mark.parametrize("nbytes", [1, 400, 1 << 19])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.1])
def test_how_many_batches_are_put_together_does_not_show(
    nbytes: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(200)
    for more in ({}, {"bucket_by_length": True}, {"rank": 1, "world_size": 3}):
        wanted = epochs(make(Asked(samples), batch_size=3, **more), 1)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.loaders.samples.collate._BYTES_AT_ONCE", nbytes)
            patch.setattr("penstock.loaders.samples.collate._FILLED", share)
            assert epochs(make(samples, batch_size=3, **more), 1) == wanted
            assert epochs(make(table_of(samples), batch_size=3, **more), 1) == wanted


def test_rows_longer_than_a_view_of_memory_are_copied_one_by_one() -> None:
    samples = [{"input_ids": np.arange(n, dtype=np.int32) % 1000, "labels": n} for n in (9000, 3, 8192, 8193, 1)]
    for data in (samples, Asked(samples), table_of(samples, chunk=2)):
        with make(data, batch_size=5, shuffle=False) as loader:
            (batch,) = loader
        arrays = batch.to_numpy()
        for at, sample in enumerate(samples):
            length = len(sample["input_ids"])
            assert arrays["attention_mask"][at].sum() == length
            assert (arrays["input_ids"][at, :length] == sample["input_ids"]).all()
            assert not arrays["input_ids"][at, length:].any()


def test_empty_samples_are_refused_by_their_row() -> None:
    for lengths, row in (((2, 0, 3), 1), ((0, 2, 3), 0)):
        samples = [{"input_ids": np.zeros(n, np.int32) + 7, "labels": n} for n in lengths]
        for data in (samples, Asked(samples), table_of(samples)):
            with (
                pytest.raises(DataError, match=rf"input_ids.*row {row}") as caught,
                make(data, shuffle=False) as loader,
            ):
                list(loader)
            assert caught.value.row == row


def held(samples: list[dict[str, Any]]) -> list[Any]:
    """Samples to be asked for, as a list, and as columns."""
    return [Asked(samples), samples, pa.Table.from_pylist(samples)]


def test_labels_are_by_token_also_if_the_first_rows_have_one_token() -> None:
    samples = [{"input_ids": [1] * count, "labels": [5] * count} for count in (1, 1, 2, 3)]
    for dataset in held(samples):
        found = list(MLXDataLoader(dataset, batch_size=2, shuffle=False, num_workers=0))
        assert [batch["labels"].tolist() for batch in found] == [[[5], [5]], [[5, 5, -100], [5, 5, 5]]]
    for dataset in held([{"input_ids": [1] * count, "labels": [5]} for count in (1, 1, 3)]):
        [batch] = MLXDataLoader(dataset, batch_size=3, shuffle=False, num_workers=0)
        assert batch["labels"].tolist() == [[5], [5], [5]]
    for dataset in held([*[{"input_ids": [1], "labels": [5]}] * 65, {"input_ids": [1, 1], "labels": [5, 5]}]):
        with pytest.raises(DataError, match=r"labels.*row 65\b") as caught:
            list(MLXDataLoader(dataset, batch_size=66, shuffle=False, num_workers=0))
        assert "objective=None" not in str(caught.value)
        with pytest.raises(DataError, match="objective=None"):
            list(MLXDataLoader(dataset, batch_size=66, shuffle=False, num_workers=0, objective="classification"))


@pytest.mark.parametrize("backend", ["mlx", "numpy"])
def test_bytes_and_truth_values_stay_what_they_are(backend: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 2, 2, 3)).astype(np.uint8)
    samples = [
        {"image": image, "flag": bool(row % 2), "labels": np.uint8(row), "pixel_mask": image[0, 0] > 9}
        for row, image in enumerate(images)
    ]
    columns = {
        "image": images,
        "flag": np.arange(5) % 2 == 1,
        "labels": np.arange(5, dtype=np.uint8),
        "pixel_mask": images[:, 0, 0] > 9,
    }
    whole = "int32" if backend == "mlx" else "int64"
    for dataset in (Asked(samples), samples, columns):
        batches = list(MLXDataLoader(dataset, batch_size=3, shuffle=False, num_workers=0, backend=backend))
        for batch in batches:
            told = {name: str(value.dtype).removeprefix("mlx.core.").rstrip("_") for name, value in batch.items()}
            assert {name: told[name] for name in samples[0]} == {
                **{"image": "uint8", "flag": "bool"},
                **{"labels": whole, "pixel_mask": whole},
            }
        assert np.array_equal(np.concatenate([np.array(batch["image"]) for batch in batches]), images)
        assert [flag for batch in batches for flag in batch["flag"].tolist()] == [False, True, False, True, False]
        [blank] = MLXDataLoader(dataset, batch_size=1, shuffle=False, num_workers=0, rank=5, world_size=6)
        assert blank.metadata["blank"]
        types = {name: array.dtype for name, array in blank.to_numpy().items() if name in ("image", "flag")}
        assert types == {"image": np.uint8, "flag": np.bool_}


def test_a_number_that_is_no_byte_as_those_of_row_0_is_told() -> None:
    for first, other, kind in ((np.array([1], np.uint8), np.array([300]), "uint8"), (True, 7, "bool")):
        loader = MLXDataLoader(Asked([{"x": first}, {"x": other}]), batch_size=1, shuffle=False, num_workers=0)
        with pytest.raises(DataError, match=rf"row 1\b.*{kind}"):
            list(loader)
    small = MLXDataLoader(Asked([{"x": 7}, {"x": np.uint8(8)}]), batch_size=1, shuffle=False, num_workers=0)
    assert [batch["x"].dtype for batch in small] == [mx.int32, mx.int32]
    for cells, problem in (
        ([[1, 2], [1, None]], r"row 1\b"),
        ([[1, None]], r"row 0\b.*input_ids"),
    ):
        with pytest.raises((DataError, SchemaError), match=problem):
            list(MLXDataLoader(pa.table({"x": pa.array(cells, pa.list_(pa.uint8()))}), batch_size=1))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int64, np.uint32])
def test_ids_of_any_width_are_the_same_ids(kind: Any) -> None:
    samples = [{"input_ids": (s["input_ids"] % 100).astype(kind), "labels": s["labels"]} for s in SAMPLES]
    plain = [{"input_ids": (s["input_ids"] % 100).tolist(), "labels": s["labels"]} for s in SAMPLES]
    wanted = epochs(make(Asked(plain), pad_id=5), 1)
    ids = pa.array([s["input_ids"].tolist() for s in samples], pa.large_list(pa.from_numpy_dtype(kind)))
    table = pa.table({"input_ids": ids, "labels": [s["labels"] for s in samples]})
    for data in (samples, Asked(samples), table, table.slice(0).combine_chunks()):
        assert epochs(make(data, pad_id=5), 1) == wanted


def test_a_part_of_a_table_is_only_that_part() -> None:
    table = table_of(SAMPLES)
    fixed = pa.table({"input_ids": pa.array([[n, n + 1] for n in range(9)], pa.list_(pa.int32(), 2))})
    assert epochs(make(table.slice(7, 20)), 1) == epochs(make(SAMPLES[7:27]), 1)
    with make(fixed.slice(3, 4), shuffle=False) as loader:
        assert next(iter(loader))["input_ids"].tolist() == [[3, 4], [4, 5], [5, 6], [6, 7]]


def test_a_batch_can_be_copied_and_moved_with_all_it_has() -> None:
    samples = [{"input_ids": [1, 2], "labels": 0.5, "weight": 2.5, "text": "a"}] * 3
    with make(samples, backend="torch") as loader:
        (batch,) = loader
    for other in (batch.to("cpu"), copy.copy(batch), batch.pin_memory()):
        assert content(other) == content(batch)
        assert other["weight"].tolist() == [2.5] * 3
        assert other.num_tokens == 6
        assert repr(other).startswith("SampleBatch(torch, input_ids=int64[3, 2]")


@QUICK
@given(st.integers(4, 40), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.sampled_from(list(FORMS)))
def test_ranks_share_what_one_has_alone(rows: int, size: int, world: int, buckets: bool, form: str) -> None:
    samples = make_samples(rows)
    data: dict[str, Any] = {
        "asked": Asked(samples),
        "list": samples,
        "table": table_of(samples),
        "columned": Columned(samples),
    }
    more: dict[str, Any] = {"bucket_by_length": buckets, "gradient_accumulation_steps": 2}
    alone = epochs(make(samples, batch_size=size * world, **more))
    ranks = [epochs(make(data[form], batch_size=size, rank=rank, world_size=world, **more)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for number, due in enumerate(alone):
        parts = [batches[number] for batches in ranks]
        assert [row for part in parts for row in part["row"]] == due["row"]
        for name in ("input_ids", "attention_mask", "labels"):
            assert [value for part in parts if part["row"] for value in part[name]] == due[name]
        for part in parts:
            assert part["num_items_in_batch"] == due["num_items_in_batch"]
            assert len(part["input_ids"][0]) == len(due["input_ids"][0])
            assert part["row"] or (part["blank"] and part["loss_mask"] == [0] and part["labels"] == [-100])


@pytest.mark.parametrize("form", FORMS)
def test_a_loader_keeps_the_contract_of_all_loaders(form: str) -> None:
    def make_one(*, prefetch: int | None, batch_size: int, **more: Any) -> MLXDataLoader:
        workers = 0 if prefetch == 0 else 2
        return MLXDataLoader(
            FORMS[form](), batch_size=batch_size, num_workers=workers, prefetch_size=prefetch or 0, **more
        )

    assert_loader_contract(make_one, steps=21, worlds=(1, 2))


@pytest.mark.parametrize("form", ["asked", "table"])
@pytest.mark.parametrize("more", [{}, {"bucket_by_length": True}, {"objective": "masked_lm", "mlm": MLM}])
def test_a_loader_of_micro_batches_keeps_the_contract_on_any_number_of_ranks(form: str, more: dict[str, Any]) -> None:
    def make_one(*, prefetch: int | None, batch_size: int, **ranks: Any) -> MLXDataLoader:
        return MLXDataLoader(
            FORMS[form](),
            batch_size=batch_size // 2,
            gradient_accumulation_steps=2,
            num_workers=0 if prefetch == 0 else 2,
            prefetch_size=prefetch or 0,
            **more,
            **ranks,
        )

    assert_loader_contract(make_one, steps=21, worlds=(1, 2))


def test_a_loader_with_buckets_and_accumulation_keeps_the_contract() -> None:
    def make_one(*, prefetch: int | None = 0, batch_size: int = 8, **more: Any) -> MLXDataLoader:
        return MLXDataLoader(
            Asked(SAMPLES),
            batch_size=batch_size // 2,
            gradient_accumulation_steps=2,
            bucket_by_length=True,
            num_workers=prefetch or 0,
            **more,
        )

    with make_one(batch_size=8) as loader:
        states, wanted = [loader.state_dict()], []
        for _ in range(2):
            for batch in loader:
                wanted.append(content(batch))
                states.append(loader.state_dict())
    for number, state in enumerate(states):
        with make_one(batch_size=8, prefetch=number % 3) as fresh:
            fresh.load_state_dict(state)
            assert fresh.state_dict() == state
            found = []
            while len(found) < len(wanted) - number:
                found += [content(batch) for batch in fresh]
            assert found[: len(wanted) - number] == wanted[number:]


def test_batches_can_be_asked_for_by_number_and_one_by_one() -> None:
    for data in (SAMPLES, Asked(SAMPLES)):
        wanted = epochs(make(data, gradient_accumulation_steps=3))
        with make(data, gradient_accumulation_steps=3) as loader:
            assert [content(loader[number]) for number in range(len(loader))] == wanted[:10]
            assert content(loader[-1]) == wanted[9]
            assert [content(loader.get_batch()) for _ in wanted] == wanted
            with pytest.raises(ConfigError, match=r"\b3 micro"):
                loader.get_batch(2)
        with make(data) as loader:
            assert [len(loader.get_batch(size).metadata["row"]) for size in (3, 1, 6)] == [3, 1, 6]


def test_a_plan_can_be_looked_up_and_edited() -> None:
    for data in (SAMPLES, Asked(SAMPLES), table_of(SAMPLES)):
        with make(data) as loader:
            wanted = [content(batch) for batch in loader]
            loader.reset()
            use = loader.plan.trace(17)[0]
            assert wanted[use.step]["row"][use.sample] == 17
            loader.edit(loader.plan.ban([17]).skip(3, 5))
            assert len(loader) == 8
            found = [content(batch) for batch in loader]
        assert [batch["step"] for batch in found] == [0, 1, 2, 5, 6, 7, 8, 9]
        rows = [row for batch in found for row in batch["row"]]
        assert rows == [row for batch in wanted if batch["step"] not in (3, 4) for row in batch["row"] if row != 17]
        banned = [batch for batch in found if batch["step"] == use.step]
        assert [batch["num_items_in_batch"] for batch in banned] == [len(wanted[use.step]["row"]) - 1] * len(banned)


def test_a_batch_whose_rows_are_all_banned_is_blank() -> None:
    for data in (SAMPLES, Asked(SAMPLES)):
        with make(data) as loader:
            rows = [batch.metadata["row"].tolist() for batch in loader]
            loader.reset()
            loader.edit(loader.plan.ban([*rows[0], *rows[1], *rows[5]]))
            batches = list(loader)
        assert [batch.metadata.get("blank", False) for batch in batches] == [
            number in (0, 1, 5) for number in range(10)
        ]
        for batch in batches:
            if batch.metadata.get("blank"):
                assert batch.num_items_in_batch == batch.num_tokens == 0
                assert batch.labels.tolist() == [-100]
                assert batch.input_ids.shape == (1, 1)
                assert batch.attention_mask.tolist() == [[1]]
                assert batch.loss_mask.tolist() == [0]
            else:
                assert batch.num_tokens == int(batch.attention_mask.sum())


def test_an_edit_within_an_optimizer_step_is_refused() -> None:
    with make(gradient_accumulation_steps=3) as loader:
        batches = iter(loader)
        next(batches)
        assert (loader.step, loader.micro_step) == (0, 1)
        with pytest.raises(ConfigError, match=r"step 1\b"):
            loader.edit(loader.plan.skip(0, 2))
        loader.edit(loader.plan.skip(1, 2))
        assert [batch.metadata["step"] for batch in batches] == [0, 0, 2, 2, 2, 3]


def test_states_of_other_data_or_other_steps_are_refused() -> None:
    with make(gradient_accumulation_steps=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(batch_size=8) as other, pytest.raises(ResumeError, match="batch_size"):
        other.load_state_dict(state)
    with make(batch_size=2, gradient_accumulation_steps=4) as other, pytest.raises(ResumeError, match="batch_size"):
        other.load_state_dict(state)
    with make(gradient_accumulation_steps=2, seed=1) as other, pytest.raises(ResumeError, match="seed"):
        other.load_state_dict(state)
    told = "gradient_accumulation_steps"
    with make(batch_size=3, gradient_accumulation_steps=2) as other, pytest.raises(ResumeError, match=told):
        other.load_state_dict(state)
    with make(SAMPLES[:36], gradient_accumulation_steps=2) as other, pytest.raises(ResumeError, match="data"):
        other.load_state_dict(state)
    with make(gradient_accumulation_steps=2) as other:
        for damaged in ({"micro_step": -1}, {"micro_step": 2}, {"micro_step": "1"}):
            with pytest.raises(ResumeError, match="micro"):
                other.load_state_dict(with_checksum(state | damaged))


def test_columns_are_made_ahead_by_a_thread_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = epochs(make())
    monkeypatch.setattr("penstock.loaders.base._SLOW_SECONDS", 1e-7)
    begun: list[int] = []
    monkeypatch.setattr("penstock.loaders.base.ReadAhead", lambda *a, **k: begun.append(1) or ReadAhead(*a, **k))
    assert epochs(make(num_workers=4)) == wanted
    assert len(begun) == 2
    assert epochs(make(num_workers=0)) == wanted
    assert len(begun) == 2


# What can be a dataset


def test_columns_are_taken_from_frames_mappings_stores_and_hugging_face(tmp_path: Path) -> None:
    from datasets import Dataset

    plain = [{"input_ids": s["input_ids"].tolist(), "labels": s["labels"]} for s in SAMPLES]
    wanted = [{k: v for k, v in b.items() if k != "text"} for b in epochs(make(SAMPLES), 1)]
    frame = pd.DataFrame(plain)
    for data in (frame, frame.to_dict("list"), Dataset.from_list(plain), pa.Table.from_pylist(plain)):
        assert epochs(make(data), 1) == wanted
    shuffled = Dataset.from_list(plain[::-1]).select(range(36, -1, -1))
    assert epochs(make(shuffled), 1) == wanted
    rows = make_rows(37, 12)
    make_store(tmp_path / "store", rows, shard_bytes=300)
    for data in (tmp_path / "store", str(tmp_path / "store")):
        with make(data, shuffle=False) as loader:
            for batch in loader:
                arrays = batch.to_numpy()
                for at, row in enumerate(batch.metadata["row"].tolist()):
                    assert arrays["input_ids"][at][arrays["attention_mask"][at] == 1].tolist() == rows[row]


def test_arrays_of_several_dimensions_are_columns_too() -> None:
    ids, grid = np.arange(1, 41).reshape(10, 4), np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    with make({"input_ids": ids, "grid": grid, "labels": np.arange(10)}, shuffle=False) as loader:
        batches = [batch.to_numpy() for batch in loader]
    assert np.concatenate([batch["input_ids"] for batch in batches]).tolist() == ids.tolist()
    assert np.concatenate([batch["grid"] for batch in batches]).tolist() == grid.tolist()


def test_single_values_of_the_metadata_of_samples_go_under_their_own_names() -> None:
    samples = [
        {**sample, "metadata": {"id": f"p{row}", "fold": row % 2, "step": row, "tags": ["a"], "text": "not this"}}
        for row, sample in enumerate(SAMPLES)
    ]
    for data in (samples, Asked(samples), table_of(samples)):
        with make(data) as loader:
            for batch in loader:
                rows, found = batch.metadata["row"].tolist(), batch.metadata
                assert found["id"] == [f"p{row}" for row in rows]
                assert found["fold"] == [row % 2 for row in rows]
                assert found["sample_step"] == rows
                assert found["text"] == [f"row {row}" for row in rows]
                assert found["metadata"] == [samples[row]["metadata"] for row in rows]
                assert "tags" not in found


# Samples without tokens


def numeric(count: int = 22) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=3).astype(np.float32),
            "grid": rng.integers(0, 9, (2, 2)),
            "labels": row % 3,
            "id": f"p{row}",
        }
        for row in range(count)
    ]


def test_samples_without_tokens_are_stacked() -> None:
    samples = numeric()
    columns = {
        "x": np.stack([sample["x"] for sample in samples]),
        "grid": np.stack([sample["grid"] for sample in samples]),
        "labels": np.array([sample["labels"] for sample in samples]),
        "id": [sample["id"] for sample in samples],
    }
    wanted = epochs(make(Asked(samples)))
    assert sorted(row for batch in wanted[:6] for row in batch["row"]) == list(range(22))
    for data, more in ((samples, {}), (columns, {}), (table_of(samples), {}), (Asked(samples), {"num_workers": 3})):
        assert epochs(make(data, **more)) == wanted
    for batch in make(samples):
        rows = batch.metadata["row"].tolist()
        assert isinstance(batch["x"], mx.array)
        assert batch["x"].tolist() == [samples[row]["x"].tolist() for row in rows]
        assert batch["grid"].tolist() == [samples[row]["grid"].tolist() for row in rows]
        assert batch["labels"].tolist() == [samples[row]["labels"] for row in rows]
        assert list(batch) == ["labels", "x", "grid"]
        assert (batch.batch_size, batch.num_tokens, batch.num_items_in_batch) == (len(rows), 0, len(rows))
        assert batch.nbytes >= batch["x"].nbytes
        assert copy.copy(batch).batch_size == len(rows)
        assert "x=float32" in repr(batch)


def test_samples_without_tokens_are_shared_by_ranks_resumed_and_profiled() -> None:
    samples = numeric()
    for data in (samples, Asked(samples)):
        ranks = [make(data, rank=rank, world_size=3, gradient_accumulation_steps=2) for rank in range(3)]
        found = [batch for loader in ranks for batch in loader]
        assert sorted(row for batch in found for row in batch.metadata["row"].tolist()) == list(range(22))
        blank = [batch for batch in found if batch.metadata.get("blank")]
        assert [batch["labels"].tolist() for batch in blank] == [[-100]] * len(blank)
        loader = make(data)
        loader.enable_profiling()
        next(iter(loader))
        state = loader.state_dict()
        wanted = [content(batch) for batch in loader]
        results = loader.get_profiling_results()
        assert (results["samples"], results["tokens"], results["padding_share"]) == (22, 0, 0)
        other = make(data)
        other.load_state_dict(state)
        assert [content(batch) for batch in other] == wanted


def test_what_is_about_tokens_is_refused_for_samples_without_them() -> None:
    samples = numeric()
    for data in (samples, Asked(samples), table_of(samples)):
        for wrong, error, message in (
            ({"bucket_by_length": True}, ConfigError, "bucket_by_length=False"),
            ({"max_length": 5}, ConfigError, "max_length=5"),
            ({"objective": "masked_lm", "mlm": MLM}, SchemaError, r"row 0\b.*input_ids"),
        ):
            with pytest.raises(error, match=message):
                list(make(data, **wrong))
    ragged = [{"x": [1] * n, "labels": 0} for n in (2, 3)]
    with make(ragged) as loader, pytest.raises(DataError, match=r"row 1\b.*input_ids"):
        list(loader)
    masks = [{"attention_mask": [1, 1], "x": 1.0}]
    with make(masks) as loader, pytest.raises(DataError, match=r"attention_mask.*input_ids"):
        list(loader)


def test_a_hugging_face_dataset_with_a_function_is_asked_sample_by_sample() -> None:
    from datasets import Dataset

    data = Dataset.from_list([{"n": n} for n in range(1, 9)])
    data.set_transform(lambda batch: {"input_ids": [[n] * n for n in batch["n"]], "labels": batch["n"]})
    with make(data, shuffle=False, batch_size=8) as loader:
        (batch,) = loader
    assert batch["attention_mask"].sum(axis=1).tolist() == batch["labels"].tolist() == list(range(1, 9))


def test_a_dataset_with_a_transform_is_asked_for_samples_and_not_for_columns() -> None:
    data = Columned(SAMPLES)
    data.transform = str  # type: ignore[attr-defined]
    epochs(make(data), 1)
    assert set(data.asked) == set(range(37))
    data = Columned(SAMPLES)
    epochs(make(data), 1)
    assert not data.asked


def test_a_list_becomes_columns_if_they_fit_into_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    wanted = epochs(make(Asked(SAMPLES)))
    budget = MemoryBudget("1 MiB")
    with caplog.at_level(logging.INFO), make(budget=budget) as loader:
        assert isinstance(loader._engine.dataset, ListDataset)
        assert [content(batch) for _ in range(2) for batch in loader] == wanted
        assert budget.by_owner()["columns"] > 500
    assert budget.used == 0
    assert "37 samples" in caplog.text
    caplog.clear()
    small = MemoryBudget("1 KiB")
    with caplog.at_level(logging.INFO):
        assert epochs(make(budget=small, num_workers=2)) == wanted
    assert "read one by one" in caplog.text
    assert small.used == 0


def test_samples_are_kept_where_that_is_asked_for() -> None:
    data = Asked(SAMPLES)
    wanted = epochs(make(Asked(SAMPLES)), 3)
    assert epochs(make(data, cache_mb=4, num_workers=2), 3) == wanted
    assert max(data.asked[row] for row in range(1, 37)) == 1


def test_keeping_samples_changes_nothing_of_what_is_beside_them() -> None:
    samples = [{**sample, "id": row, "metadata": {"n": row}, "age": [row, 2]} for row, sample in enumerate(SAMPLES)]
    wanted = epochs(make(Asked(samples), metadata_fields=["age"]))
    batches = list(make(Asked(samples), metadata_fields=["age"], cache_mb=4))
    assert [type(value) for batch in batches for value in batch.metadata["id"]] == [int] * 37
    assert epochs(make(Asked(samples), metadata_fields=["age"], cache_mb=4)) == wanted


def test_kept_samples_count_with_everything_in_them() -> None:
    class Images(Asked):
        def __getitem__(self, row: int) -> Any:
            return super().__getitem__(row) | {"image": b"x" * 100_000, "metadata": {"long": ["y" * 50_000] * 2}}

    budget = MemoryBudget("1 GiB")
    loader = make(Images(SAMPLES), cache_mb=1, metadata_fields=["image"], budget=budget)
    list(loader)
    held = loader._engine.dataset._cache  # type: ignore[attr-defined]
    assert 0 < len(held._items) <= (1 << 20) // 200_000
    assert budget.by_owner()["samples"] > 200_000 * len(held._items)
    loader.close()


def test_lengths_of_the_dataset_spare_reading_it_for_buckets(caplog: pytest.LogCaptureFixture) -> None:
    data = Asked(SAMPLES)
    with caplog.at_level(logging.INFO):
        wanted = epochs(make(data, bucket_by_length=True), 1)
    assert "37 samples" in caplog.text
    assert set(data.asked.values()) >= {2}
    told = Asked(SAMPLES)
    told.lengths = [len(sample["input_ids"]) for sample in SAMPLES]  # type: ignore[attr-defined]
    assert epochs(make(told, bucket_by_length=True), 1) == wanted
    assert max(told.asked[row] for row in range(1, 37)) == 1
    wrong = Asked(SAMPLES)
    wrong.lengths = [1] * 37  # type: ignore[attr-defined]
    with make(wrong, rank=0, world_size=2) as loader, pytest.raises(DataError, match=r"step 0\b"):
        list(loader)


def test_loaders_travel_to_worker_processes() -> None:
    for data in (SAMPLES, table_of(SAMPLES), Asked(SAMPLES)):
        with make(data, tune="auto") as loader:
            loader.enable_profiling()
            wanted = [content(batch) for batch in loader]
            loader.reset()
            there = pickle.loads(pickle.dumps(loader))  # noqa: S301 - made here
        assert [content(there[number]) for number in range(len(there))] == wanted


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def know_the_threads_of_others() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def threads_ahead() -> list[threading.Thread]:
    ahead = (thread for thread in threading.enumerate() if thread.name.startswith("penstock-ahead"))
    return [thread for thread in ahead if thread not in OTHERS]


def test_a_loop_that_is_left_ends_its_threads() -> None:
    budget = MemoryBudget("1 MiB")
    wanted = epochs(make(Asked(SAMPLES)), 1)
    loader = make(Asked(SAMPLES), num_workers=3, prefetch_size=3, budget=budget)
    found = []
    for number in range(3):
        with suppress(KeyError):
            for batch in loader:
                found.append(content(batch))
                if number == 1:
                    raise KeyError
                break
        for thread in threads_ahead():
            thread.join(5)
        assert not threads_ahead()
        assert budget.used == 0
    found += [content(batch) for batch in loader]
    assert found == wanted
    loader.close()


def test_leaving_a_loop_does_not_wait_for_samples_but_closing_the_loader_does() -> None:
    class Held(Asked):
        def __init__(self, samples: list[Any]) -> None:
            super().__init__(samples)
            self.leave, self.held = threading.Event(), threading.Event()

        def __getitem__(self, row: int) -> Any:
            if row > 8:
                self.held.set()
                assert self.leave.wait(300)
            return super().__getitem__(row)

    data = Held(SAMPLES)
    with make(data, num_workers=2, prefetch_size=3, shuffle=False) as loader:
        for _ in loader:
            assert data.held.wait(300)
            break
        assert threads_ahead()
        data.leave.set()
    assert not threads_ahead()


def test_what_is_made_ahead_is_charged_and_given_back() -> None:
    budget = MemoryBudget("1 KiB")
    wanted = epochs(make(Asked(SAMPLES)))
    with make(Asked(SAMPLES), num_workers=3, prefetch_size=8, budget=budget) as loader:
        first = next(iter(loader))
        assert content(first) == wanted[0]
    assert budget.used == 0
    assert epochs(make(Asked(SAMPLES), num_workers=3, prefetch_size=8, budget=budget)) == wanted
    assert budget.used == 0
    assert budget.peak > 0


def test_no_more_batches_are_made_ahead_than_are_asked_for() -> None:
    data = Asked(make_samples(4000))
    with make(data, num_workers=2, prefetch_size=6) as loader:
        batches = iter(loader)
        for number in range(500):
            next(batches)
            # Row 0 is asked for once more, for what samples are like.
            assert sum(data.asked.values()) - 1 <= 4 * (number + 1 + 8)


def test_two_users_of_a_budget_do_not_wait_for_each_other() -> None:
    budget = MemoryBudget("1 KiB")
    with make(Asked(SAMPLES), num_workers=2, prefetch_size=4, budget=budget) as paused:
        batches = iter(paused)
        next(batches)
        next(batches)
        other = StreamingPipeline(
            [{"i": row} for row in range(200)], StreamingConfig(budget=budget, chunk_size=16, buffer_size=64)
        )
        assert [sample["i"] for sample in other] == list(range(200))
        assert len(list(batches)) == 8


# What is wrong


def broken(row: int, sample: Any) -> list[Any]:
    return [sample if number == row else other for number, other in enumerate(SAMPLES)]


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        ([1, 2, 3], DataError, r"row 5\b"),
        (None, DataError, "row 5 is NoneType"),
        ({"input_ids": [1], "labels": 1}, SchemaError, r"row 5\b.*row 0\b"),
        ({**SAMPLES[5], "more": 1}, SchemaError, r"row 5\b"),
        ({"input_ids": [1], "label": 1, "text": ""}, SchemaError, r"row 5\b.*\blabel\b"),
        ({**SAMPLES[5], "labels": [1, 2]}, DataError, r"labels.*row 5\b"),
        ({**SAMPLES[5], "labels": None}, DataError, r"labels.*row 5\b"),
        ({**SAMPLES[5], "labels": "cat"}, DataError, r"labels.*'cat'"),
        ({**SAMPLES[5], "labels": float("nan")}, DataError, r"labels.*row 5\b"),
        ({**SAMPLES[5], "input_ids": [[1, 2]]}, DataError, r"input_ids.*row 5\b"),
        ({**SAMPLES[5], "input_ids": [1.5]}, DataError, r"input_ids.*row 5\b"),
        ({**SAMPLES[5], "input_ids": "text"}, DataError, r"input_ids.*row 5\b"),
        ({**SAMPLES[5], "input_ids": [2**40]}, DataError, r"input_ids.*row 5\b"),
    ],
)
@pytest.mark.parametrize("workers", [0, 3])
def test_a_sample_unlike_the_others_is_named(sample: Any, error: type[Exception], message: str, workers: int) -> None:
    for data in (broken(5, sample), Asked(broken(5, sample))):
        with make(data, num_workers=workers) as loader, pytest.raises(error, match=message):
            list(loader)


@pytest.mark.parametrize("objective", [None, "regression"])
def test_a_nan_label_is_named(objective: Any) -> None:
    samples = [{"input_ids": [1, 2, 3], "labels": value} for value in (1.0, 2.5, float("nan"), 3.0)]
    for data in (samples, Asked(samples), table_of(samples)):
        with pytest.raises(DataError, match=r"labels.*row 2\b"), make(data, objective=objective) as loader:
            list(loader)


def test_labels_with_a_fraction_behind_whole_ones_are_named_with_the_remedy() -> None:
    samples = [{"input_ids": [1, 2], "labels": value} for value in (1, 1.5)]
    for data in (samples, Asked(samples)):
        with make(data) as loader, pytest.raises(DataError, match=r"labels.*objective='regression'"):
            list(loader)


def test_values_by_token_of_another_length_than_the_ids_are_refused_in_row_0_too() -> None:
    for name in ("attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"):
        samples = [{"input_ids": [1, 2, 3, 4], name: [1, 1, 1]}] * 4
        for data in (samples, Asked(samples), table_of(samples)):
            with pytest.raises(DataError, match=rf"{name}.*input_ids"):
                list(make(data))


def test_labels_by_token_under_another_objective_are_told_which_it_is() -> None:
    samples = [{"input_ids": [1] * n, "labels": [2] * n} for n in (3, 4)]
    for data in (samples, Asked(samples), table_of(samples)):
        with pytest.raises(DataError, match=r"labels.*objective=None"):
            list(make(data, objective="classification"))


def test_zeros_and_ones_as_many_as_tokens_are_announced_as_labels_by_token(caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"input_ids": [1, 2, 3], "labels": [0, 1, 0]}] * 4
    for data in (samples, Asked(samples), table_of(samples)):
        caplog.clear()
        list(make(data, batch_size=2))
        assert caplog.text.count("objective='classification'") == 1
        caplog.clear()
        (batch,) = make(data, objective="classification")
        assert batch.num_items_in_batch == 4
        list(make([{**sample, "labels": [-100, 1, 0]} for sample in samples]))
        assert not caplog.text


def test_a_number_that_does_not_fit_is_named_with_its_row() -> None:
    samples = [{"input_ids": [1, 2], "user": 2**40 if row == 5 else row, "labels": row} for row in range(9)]
    for data in (samples, Asked(samples), table_of(samples)):
        with make(data) as loader, pytest.raises(DataError, match=r"metadata_fields=.*'user'") as caught:
            list(loader)
        assert caught.value.row == 5
    kept = [
        value for batch in make(samples, metadata_fields=["user"], shuffle=False) for value in batch.metadata["user"]
    ]
    assert kept[5] == 2**40


def test_rows_of_special_tokens_only_cannot_be_masked_and_are_named() -> None:
    samples = [{"input_ids": [1, 2]}] * 4
    for data in (samples, Asked(samples)):
        with (
            make(data, batch_size=2, shuffle=False, objective="masked_lm", mlm=MLM) as loader,
            pytest.raises(DataError, match=r"step 0\b"),
        ):
            list(loader)


def test_a_null_in_a_table_is_named() -> None:
    table = pa.table({"input_ids": [[1], [2], [3]], "labels": [1, None, 2]})
    with pytest.raises(DataError, match=r"labels.*row 1\b"):
        make(table)
    with pytest.raises(DataError, match=r"input_ids.*row 2\b"):
        make(pa.table({"input_ids": [[1], [2], [3, None]]}))


def test_ragged_labels_of_a_table_are_named() -> None:
    with pytest.raises(DataError, match=r"labels.*row 1\b"):
        make(pa.table({"input_ids": [[1], [2, 3]], "labels": [[1.0, 2.0], [1.0]]}))


@pytest.mark.parametrize("workers", [0, 4])
def test_a_dataset_that_raises_is_named_with_the_row(workers: int) -> None:
    class Failing(Asked):
        def __getitem__(self, row: int) -> Any:
            if row == 21:
                raise OSError("the disk is gone")
            return super().__getitem__(row)

    loader = make(Failing(SAMPLES), num_workers=workers, shuffle=False)
    seen: list[int] = []
    with loader, pytest.raises(DataError, match=r"row 21\b") as caught:
        seen.extend(batch.metadata["step"] for batch in loader)
    assert seen == [0, 1, 2, 3, 4]
    assert caught.value.row == 21
    assert isinstance(caught.value.__cause__, OSError)


def test_a_list_that_makes_its_samples_itself_is_asked_for_them() -> None:
    class Doubling(list[int]):
        def __getitem__(self, row: Any) -> Any:
            return {"input_ids": [super().__getitem__(row)] * 2, "labels": 0}

    with make(Doubling([5, 6, 7]), shuffle=False) as loader:
        assert next(iter(loader))["input_ids"].tolist() == [[5, 5], [6, 6], [7, 7]]


def test_an_error_of_the_dataset_that_names_no_row_gets_one() -> None:
    class Failing(Asked):
        def __getitem__(self, row: int) -> Any:
            if row == 3:
                raise ConfigError("no such file")
            return super().__getitem__(row)

    with make(Failing(SAMPLES)) as loader, pytest.raises(DataError, match=r"row 3\b"):
        list(loader)


def test_a_length_that_changes_is_told() -> None:
    data = Asked(list(SAMPLES))
    with make(data) as loader:
        list(loader)
        data.samples.append(SAMPLES[0])
        with pytest.raises(DataError, match=r"\b37\b.*\b38\b"):
            list(loader)
        with pytest.raises(DataError, match=r"\b38\b"):
            loader.get_batch()

    class Wrong(Columned):
        def to_columns(self) -> pa.Table:
            return table_of(self.samples[:-1])

    with pytest.raises(DataError, match=r"\b37\b.*\b36\b"):
        make(Wrong(SAMPLES))


@pytest.mark.parametrize("data", [[], Asked([]), pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))})])
def test_an_empty_dataset_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError):
        make(data)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (iter([1]), ConfigError, "StreamingPipeline"),
        ("nowhere.store", ConfigError, r"'nowhere\.store'"),
        (pa.table({"text": ["a"]}), SchemaError, "input_ids"),
        (pa.table({"input_ids": ["a"]}), DataError, "input_ids of row 0"),
        ({"input_ids": 5}, SchemaError, "(?i)columns"),
    ],
)
def test_what_is_no_dataset_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(data)


def test_samples_without_tokens_are_refused() -> None:
    with make([{"text": "a"}]) as loader, pytest.raises(SchemaError, match=r"row 0\b.*input_ids"):
        list(loader)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"prefetch_size": 1.5},
        {"shuffle": 1},
        {"objective": "classify"},
        {"truncation": "drop"},
        {"padding": "longest_first"},
        {"padding": "max_length"},
        {"tune": True},
        {"gradient_accumulation_steps": 0},
        {"mlm": object()},
        {"objective": "masked_lm", "mlm": object()},
        {"objective": "masked_lm"},
        {"metadata_fields": "text"},
        {"backend": "mxl"},
        {"budget": -5},
        {"rank": 0},
        {"cache_mb": -1},
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**wrong)


def test_an_option_that_is_misspelt_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'batch_size'"):
        MLXDataLoader(SAMPLES, batchsize=3)
    with pytest.raises(ConfigError, match="'batch_size'"):
        MLXDataLoader(SAMPLES, {"batch_size": 3})  # type: ignore[arg-type]


def test_drop_last_leaves_out_what_does_not_fill_a_step_and_says_if_that_is_all() -> None:
    batches = epochs(make(drop_last=True, gradient_accumulation_steps=2), 1)
    assert len(batches) == 8
    assert sum(len(batch["row"]) for batch in batches) == 32
    with pytest.raises(ConfigError, match="drop_last"):
        make(batch_size=20, drop_last=True, gradient_accumulation_steps=2)


def lengths_of(batches: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    for batch in batches:
        mask = np.array(batch["attention_mask"])
        yield mask.size, int(mask.sum())


def test_buckets_pad_less() -> None:
    samples = make_samples(600, longest=60)
    plain = sum(size for size, _ in lengths_of(epochs(make(samples, batch_size=8), 1)))
    buckets = sum(size for size, _ in lengths_of(epochs(make(samples, batch_size=8, bucket_by_length=True), 1)))
    assert buckets < 0.7 * plain


def test_a_state_is_refused_by_other_samples_of_the_same_number() -> None:
    def samples(first: int) -> list[dict[str, Any]]:
        return [{"input_ids": [first, row, 2], "labels": row % 2} for row in range(20)]

    def table(first: int) -> pa.Table:
        return pa.Table.from_pylist(samples(first))

    for form in (samples, table):
        state = MLXDataLoader(form(1), batch_size=4).state_dict()
        MLXDataLoader(form(1), batch_size=4).load_state_dict(state)
        with pytest.raises(ResumeError):
            MLXDataLoader(form(9), batch_size=4).load_state_dict(state)


def test_options_come_in_the_groups_of_the_other_loaders_too() -> None:
    loader = MLXDataLoader(
        SAMPLES, batch_size=4, shard=Shard(rank=1, world_size=2), pad=Padding(pad_id=7), output=Output(backend="numpy")
    )
    assert (loader.config.rank, loader.config.world_size) == (1, 2)
    assert (loader.config.pad_id, loader.config.backend) == (7, "numpy")
    with pytest.raises(ConfigError, match="padding_side"):
        MLXDataLoader(SAMPLES, pad=Padding(padding_side="left"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_dataset_that_reuses_a_few_rows_of_a_buffer_repeats_none(seed: int) -> None:
    class Ring:
        def __init__(self) -> None:
            self.buffer = np.zeros((8, 6), np.int64)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.buffer[index % 8] = index
            return {"input_ids": self.buffer[index % 8]}

    with MLXDataLoader(Ring(), batch_size=2, backend="numpy", seed=seed) as loader:
        seen = [int(row[0]) for batch in loader for row in batch["input_ids"]]
    assert sorted(seen) == list(range(100))
