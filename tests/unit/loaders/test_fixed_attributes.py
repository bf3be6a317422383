"""Attributes of loaders that batches do not follow, and loaders of one's own that have such names for themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lazy_modules import LazyModule
from penstock import ConfigError, DataLoader, MixedDataLoader, MLXDataLoader, PretrainDataLoader, StreamingPipeline
from penstock.loaders.samples.datasets import FetchedDataset, as_sample_dataset
from penstock.memory import LRUCache

torch = LazyModule("torch")


class Counted(DataLoader):
    """A loader of one's own: the four methods, and a batch size that is nobody else's business."""

    def __init__(self, batches: int) -> None:
        self.batch_size, self._left, self._batches = 2, batches, batches

    def get_batch(self, batch_size: int | None = None) -> Any:
        self._left -= 1
        return {"x": np.full(self.batch_size, self._left)}

    def get_iterator(self) -> Iterator[Any]:
        while self._left:
            yield self.get_batch()

    def get_num_batches(self) -> int:
        return self._batches

    def reset(self) -> None:
        self._left = self._batches


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "rank", "options"])
def test_an_attribute_that_batches_do_not_follow_cannot_be_set(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "all the water it can take"}\n' * 9)
    loader = PretrainDataLoader(tmp_path / "a.jsonl", "byte", 16, cache_dir=tmp_path, backend="numpy")
    with loader, pytest.raises(AttributeError, match=name):
        setattr(loader, name, 4)


def test_a_loader_of_ones_own_may_have_a_batch_size() -> None:
    loader = Counted(3)
    loader.batch_size = 5
    assert [batch["x"].shape for batch in loader] == [(5,)] * 3
    with pytest.raises(NotImplementedError, match="Counted"):
        _ = loader.epoch


@pytest.mark.parametrize(
    "option", [{"batch_size": 4}, {"seed": 1}, {"rank": 0, "world_size": 2}, {"tokenizer": "byte"}]
)
def test_options_without_effect_on_a_mixture_of_ones_own_loaders_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        MixedDataLoader({"a": Counted(3), "b": Counted(2)}, **option)


class Named(NamedTuple):
    x: Any


@pytest.mark.parametrize("form", [dict, Named])
def test_a_stream_gives_samples_with_arrays_of_their_own(form: Any) -> None:
    class Reused:
        """A dataset that fills one buffer again and again."""

        buffer = np.zeros(2, np.int64)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, row: int) -> Any:
            self.buffer[:] = row
            return form(x=self.buffer)

    samples = list(StreamingPipeline(Reused(), num_workers=1, chunk_size=2))
    arrays = [sample["x"] if form is dict else sample.x for sample in samples]
    assert [array.tolist() for array in arrays] == [[row, row] for row in range(6)]
    arrays[0] += 10
    assert Reused.buffer.tolist() == [5, 5]


def test_a_missing_value_is_built_by_one_thread() -> None:
    cache: LRUCache[Any] = LRUCache("1 MiB")
    calls: list[int] = []
    inside, go = threading.Event(), threading.Event()

    def build() -> Any:
        calls.append(1)
        inside.set()
        assert go.wait(300)
        return np.zeros(4)

    threads = [threading.Thread(target=cache.get_or_build, args=("a", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert inside.wait(300)
    go.set()
    for thread in threads:
        thread.join(300)
    assert len(calls) == 1
    assert cache.get_or_build("b", lambda: cache.get_or_build("b", lambda: np.ones(1))).tolist() == [1.0]


class Reusing:
    """A dataset that fills one buffer again and again, and gives it, a view of it, a list or a tensor."""

    def __init__(self, form: str, size: int) -> None:
        self.form, self.size = form, size
        self.buffer, self.list = np.zeros(size, np.int64), [0] * size

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.buffer[:] = row + 1
        self.list[:] = [row + 1] * self.size
        values: Any = {
            "buffer": lambda: self.buffer,
            "view": lambda: self.buffer[: self.size - row % 3],
            "list": lambda: self.list,
            "tensor": lambda: torch.from_numpy(self.buffer),
        }[self.form]()
        return {"input_ids": values, "labels": row}


@pytest.mark.parametrize("options", [{}, {"cache_mb": 8}], ids=["plain", "cached"])
@pytest.mark.parametrize("size", [6, 4000])
@pytest.mark.parametrize("form", ["buffer", "view", "list", "tensor"])
def test_samples_of_a_buffer_that_is_reused_are_not_mixed_up(form: str, size: int, options: dict[str, Any]) -> None:
    with MLXDataLoader(Reusing(form, size), batch_size=4, num_workers=1, backend="numpy", **options) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["input_ids"][:, 0].tolist() == [label + 1 for label in batch["labels"].tolist()]
                assert (batch["input_ids"] == batch["input_ids"][:, :1]).all(where=batch["attention_mask"] == 1)


def test_rows_of_one_matrix_are_not_copied() -> None:
    class Rows:
        matrix = np.arange(24.0).reshape(12, 2)

        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"x": self.matrix[row], "labels": row}

    fetched = as_sample_dataset(Rows(), None)
    fetched.fetch(np.arange(12))
    assert isinstance(fetched, FetchedDataset)
    assert not fetched.copies
