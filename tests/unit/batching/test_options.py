"""Options of loaders: defaults, groups, signatures, and what is refused when the loader is made."""

from __future__ import annotations

import pydoc
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    ConversationDataLoader,
    DataLoader,
    MixedDataLoader,
    MLXDataLoader,
    PreferenceDataLoader,
    PretrainDataLoader,
    RolloutDataLoader,
)
from penstock.batching import options
from penstock.batching.collate import FIELDS
from penstock.batching.options import (
    GROUPS,
    LoaderOptions,
    Options,
    Output,
    Padding,
    RawRows,
    Shard,
    option_names,
    read_options,
)
from penstock.corpus.recipe import Recipe
from penstock.distributed import Strided
from penstock.errors import ConfigError
from penstock.loaders import MLXLoaderConfig, StreamingConfig, StreamOptions
from penstock.memory import MemoryBudget
from penstock.pipeline import PipelineConfig
from penstock.rl.options import RolloutBatching
from token_stores import make_store


def test_the_defaults_are_those_people_know() -> None:
    found = read_options({})
    assert (found.batch_size, found.shuffle, found.seed, found.drop_last) == (8, True, 0, False)
    assert (found.backend, found.pin_memory, found.device, found.prefetch) == ("torch", False, None, None)
    assert found.wanted_fields == set(FIELDS)
    assert found.cache is None


STUB = '''"""Keywords of `Options` for type checkers. Generated: see tests/unit/batching/test_options.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from penstock.batching.context import Slicing
from penstock.batching.options import Output, Padding, RawRows, Shard
from penstock.connections.shared_cache import CacheSpec
from penstock.distributed.sharding import Sharding
from penstock.files.listing import PathLike
from penstock.memory import MemoryBudget
from penstock.metrics.targets import Metrics
from penstock.order.block_shuffle import BlockShuffle
from penstock.pipeline.config import OnError
from penstock.store.shards import Verify

class LoaderOptions(TypedDict, total=False):
'''


def test_the_stub_for_type_checkers_has_every_option() -> None:
    lines = [f"    {name}: {Options.__dataclass_fields__[name].type}" for name in option_names(Options)]
    lines += [f"    {name}: {kind.__name__}" for name, kind in GROUPS.items()]
    expected = STUB + "\n".join(lines).replace("'", '"') + "\n"
    path = Path(options.__file__).with_name("option_keywords.pyi")
    assert path.read_text(encoding="utf-8") == expected, f"write this to {path.name}:\n{expected}"
    assert set(LoaderOptions.__annotations__) == {*Options.__dataclass_fields__, *GROUPS}


@pytest.mark.parametrize("loader", [PretrainDataLoader, ConversationDataLoader, PreferenceDataLoader, MixedDataLoader])
def test_help_and_signature_show_every_option(loader: type[DataLoader]) -> None:
    parameters = signature(loader).parameters
    assert set(Options.__dataclass_fields__) <= set(parameters)
    assert parameters["batch_size"].default == 8
    text = pydoc.render_doc(loader, renderer=pydoc.plaintext)
    assert all(f"{name}: " in text for name in Options.__dataclass_fields__)


@pytest.mark.parametrize("loader", [MLXDataLoader, RolloutDataLoader])
def test_help_and_signature_show_the_options_of_loaders_with_more(loader: type[DataLoader]) -> None:
    text = pydoc.render_doc(loader, renderer=pydoc.plaintext)
    options = {name for name, each in signature(loader).parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert {"batch_size", "seed", "rank", "backend", "budget"} < options
    shown = options - {"estimator", "preset", "columns"}  # explained above the list
    assert all(f"    {name}: " in text for name in shown)


def test_groups_of_options_and_flat_keywords_are_the_same() -> None:
    flat = {"rank": 1, "world_size": 4, "pad_id": 7, "padding_side": "left", "backend": "numpy", "prefetch": 0}
    groups = {
        "shard": Shard(rank=1, world_size=4),
        "pad": Padding(pad_id=7, padding_side="left"),
        "output": Output(backend="numpy", prefetch=0),
    }
    assert read_options(groups) == read_options(flat)
    with pytest.raises(ConfigError, match=r"pad_id.*pad=Padding"):
        read_options({"pad_id": 3, "pad": Padding()})
    with pytest.raises(ConfigError, match=r"shard.*Shard"):
        read_options({"shard": 3})


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
    with pytest.raises(ConfigError, match=rf"'{given}'; did you mean '{meant}'\? Valid options: batch_size"):
        read_options({given: 1})
    with pytest.raises(ConfigError, match=r"'xyzzy'\. Valid options: batch_size"):
        read_options({"xyzzy": 1})


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
    ("given", "message"),
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
        ({"budget": "1 cow"}, r"budget.*'1 cow'"),
        ({"budget": 0}, r"budget.*\b0\b"),
        ({"budget": 1.5}, r"budget.*1\.5"),
        ({"sharding": "strided"}, r"shares\(sizes, world\).*'strided'"),
        ({"cache_dir": 7}, "cache_dir"),
        ({"backend": "tourch"}, "'torch'"),
    ],
)
def test_an_option_of_a_wrong_kind_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given)


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
    ("given", "message"),
    [
        ({"padding_side": "up"}, r"padding_side.*'up'"),
        ({"fields": ["input_ids", "lables"]}, r"'lables'.*'labels'"),
        ({"verify": "nope"}, r"verify.*'nope'"),
        ({"rank": 2, "world_size": 2}, r"rank 2\b"),
        ({"rank": -1, "world_size": 2}, r"rank -1\b"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"rank": 1}, r"rank=1.*world_size"),
        ({"world_size": 2}, "world_size=2"),
        ({"rank": 0, "world_size": 6, "model_parallel_size": 4}, r"\b6\b.*\b4\b"),
        ({"device": "cuda"}, None),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_loader(
    tmp_path: Path, given: dict[str, Any], message: str | None
) -> None:
    store = make_store(tmp_path / "store", [[1, 2]] * 8)
    with pytest.raises(ConfigError, match=message):
        PretrainDataLoader(store, chunk_size=2, batch_size=2, backend="numpy", **given).get_batch()


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(tmp_path: Path, seed: int) -> None:
    store = make_store(tmp_path / "store", [[n] for n in range(1, 51)])
    loader = PretrainDataLoader(store, chunk_size=1, packing=None, batch_size=50, backend="numpy", seed=seed)
    assert sorted(loader.get_batch().input_ids[:, 0].tolist()) == list(range(1, 51))


@pytest.mark.parametrize("given", [64 << 20, "64 MiB", MemoryBudget("64 MiB")])
def test_a_budget_is_a_size_or_a_budget(given: Any) -> None:
    read = read_options({"budget": given})
    assert isinstance(read.budget, MemoryBudget)
    assert read.memory is read.budget
    assert read.budget.capacity == 64 << 20


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (StreamOptions, "wrokers", "workers"),
        (PipelineConfig, "on_eror", "on_error"),
        (Recipe, "filter", "filters"),
        (Shard, "world", "world_size"),
        (RawRows, "transform", "transforms"),
        (MLXLoaderConfig, "batchsize", "batch_size"),
        (StreamingConfig, "buffersize", "buffer_size"),
        (RolloutBatching, "groupsize", "group_size"),
    ],
)
def test_an_unknown_option_of_any_group_names_the_nearest(kind: type[Any], given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: unknown option '{given}'; did you mean '{meant}'"):
        kind(**{given: 1})


@pytest.mark.parametrize(
    ("loader", "given", "meant"),
    [
        (PretrainDataLoader, "chunksize", "chunk_size"),
        (ConversationDataLoader, "maxlength", "max_length"),
        (MixedDataLoader, "stopping", "stopping_strategy"),
        (RolloutDataLoader, "pressets", "preset"),
    ],
)
def test_an_unknown_option_of_a_loader_names_the_nearest_of_all(loader: Any, given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"'{given}'; did you mean '{meant}'"):
        loader([], **{given: 1})
