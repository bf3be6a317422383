"""Options of loaders: what they default to, and what is refused when the loader is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import PretrainDataLoader, Strided
from penstock.batching.collate import FIELDS
from penstock.batching.options import LoaderOptions, Options, read_options
from penstock.errors import ConfigError
from token_stores import make_store


def test_the_defaults_are_those_people_know() -> None:
    options = read_options({})
    assert (options.batch_size, options.shuffle, options.seed, options.drop_last) == (8, True, 0, False)
    assert (options.backend, options.pin_memory, options.device, options.prefetch) == ("torch", False, None, None)
    assert options.wanted_fields == set(FIELDS)
    assert options.cache is None


def test_signatures_name_every_option() -> None:
    assert set(LoaderOptions.__annotations__) == set(Options.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("batchsize", "batch_size"),
        ("shufle", "shuffle"),
        ("padding_fre", "padding_free"),
        ("pad_to_multiple", "pad_to_multiple_of"),
        ("max_token", "max_tokens"),
        ("prefech", "prefetch"),
        ("world", "world_size"),
    ],
)
def test_an_unknown_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match="batch_size"):
        read_options({given: 1})


@pytest.mark.parametrize("name", ["batch_size", "max_tokens", "pad_to_multiple_of"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, "8", True, [8]])
def test_sizes_are_positive_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(name)):
        read_options({name: value})


@pytest.mark.parametrize("name", ["prefetch", "pad_id"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_counts_may_be_zero_but_nothing_else_than_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(name)):
        read_options({name: value})


def test_whole_numbers_of_numpy_will_do() -> None:
    assert read_options({"batch_size": np.int64(4), "prefetch": np.int32(0)}).batch_size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "batch_size"),
        ({"seed": 1.5}, r"\bseed\b"),
        ({"seed": "7"}, r"\bseed\b.*'7'"),
        ({"seed": True}, r"\bseed\b"),
        ({"shuffle": 1}, "shuffle"),
        ({"drop_last": "yes"}, r"drop_last.*'yes'"),
        ({"padding_free": None}, "padding_free"),
        ({"pin_memory": 0}, "pin_memory"),
        ({"fields": "input_ids"}, r"fields.*'input_ids'"),
        ({"fields": ["labels"]}, r"fields.*input_ids"),
        ({"fields": []}, r"fields.*input_ids"),
        ({"budget": "1 GiB"}, r"budget.*'1 GiB'"),
        ({"sharding": "strided"}, r"shares\(sizes, world\).*'strided'"),
        ({"cache_dir": 7}, "cache_dir"),
        ({"backend": "tourch"}, "'torch'"),
    ],
)
def test_an_option_of_a_wrong_kind_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(options)


def test_a_class_of_a_sharding_is_no_sharding(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [[1, 2]] * 8)
    with pytest.raises((ConfigError, TypeError)):
        PretrainDataLoader(
            store,
            backend="numpy",
            sharding=Strided,
            rank=0,
            world_size=2,
            chunk_size=2,
            batch_size=2,  # type: ignore[typeddict-item]
        ).get_batch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_side": "up"}, r"padding_side.*'up'"),
        ({"fields": ["input_ids", "lables"]}, r"'lables'.*'labels'"),
        ({"verify": "nope"}, r"verify.*'nope'"),
        ({"rank": 2, "world_size": 2}, r"rank 2\b"),
        ({"rank": -1, "world_size": 2}, r"rank -1\b"),
        ({"rank": 0, "world_size": 0}, r"\brank\b"),
        ({"rank": 1}, r"rank=1.*world_size"),
        ({"world_size": 2}, "world_size=2"),
        ({"rank": 0, "world_size": 6, "model_parallel_size": 4}, r"\b6\b.*\b4\b"),
        ({"device": "cuda"}, None),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_loader(
    tmp_path: Path, options: dict[str, Any], message: str | None
) -> None:
    store = make_store(tmp_path / "store", [[1, 2]] * 8)
    with pytest.raises(ConfigError, match=message):
        PretrainDataLoader(store, chunk_size=2, batch_size=2, backend="numpy", **options).get_batch()


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(tmp_path: Path, seed: int) -> None:
    store = make_store(tmp_path / "store", [[n] for n in range(1, 51)])
    loader = PretrainDataLoader(store, chunk_size=1, packing=None, batch_size=50, backend="numpy", seed=seed)
    assert sorted(loader.get_batch().input_ids[:, 0].tolist()) == list(range(1, 51))
