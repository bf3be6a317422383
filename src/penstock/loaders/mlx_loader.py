"""Loader of the samples of any dataset, for MLX, NumPy, torch and JAX.

config = MLXLoaderConfig(batch_size=32, shuffle=True, num_workers=4)
for batch in MLXDataLoader(dataset, config):
    loss = train(batch["input_ids"], batch["attention_mask"], batch["labels"])
"""

# ruff: noqa: RUF009 - option() makes a dataclass field

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock._suggest import did_you_mean, named_options
from penstock.arrays.truncation import Truncation
from penstock.batching.backends import get_backend
from penstock.batching.options import Options, configured, option
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.profile import Profile
from penstock.loaders.samples.datasets import ColumnarDataset, ListDataset, SampleDataset, as_sample_dataset
from penstock.loaders.samples.engine import SampleEngine
from penstock.loaders.samples.layout import Corruption, SampleLayout
from penstock.loaders.samples.schema import Objective
from penstock.loaders.source import LoaderSource, pad_id_of
from penstock.loaders.tuner import LoaderTuner, LoaderTuning, TunerSetting
from penstock.memory import MemoryBudget
from penstock.metrics.targets import Metrics
from penstock.order.plan import Plan, PlanSource
from penstock.order.sample_orders import BucketOrder, Order, RowOrder

log = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]
_BATCHES_AT_ONCE = 64
"""Batches of columns that are collated together."""
_OBJECTIVES = ("classification", "regression", "masked_lm", None)
_TRUNCATIONS = ("error", "right", "left")
_PADDINGS = ("longest", "max_length")
_FLAGS = ("shuffle", "drop_last", "bucket_by_length")
_MEMORY_FLAGS = ("use_unified_memory", "pin_memory")
_LEAST = {
    "batch_size": 1,
    "num_workers": 0,
    "prefetch_size": 0,
    "gradient_accumulation_steps": 1,
    "max_length": 1,
    "pad_to_multiple_of": 1,
    "pad_id": 0,
    "cache_mb": 0,
}


@dataclass(frozen=True, kw_only=True)
class SampleFormat:
    """Lengths, padding and labels of the rows of a batch."""

    max_length: int | None = option(None, "most tokens of a row")
    truncation: Literal["error", "right", "left"] = option(
        "error",
        "longer rows are an error, or lose their end (`right`) or their beginning (`left`)",
    )
    padding: Literal["longest", "max_length"] = option(
        "longest",
        "pad to the longest row of the batch on all ranks, or to `max_length`",
    )
    pad_id: int | None = option(None, "padding token; by default that of the dataset's tokenizer, else 0")
    pad_to_multiple_of: int | None = option(None, "rows are padded to a multiple of this many tokens")
    objective: Objective = option(
        None,
        "labels: integers (`classification`), float32 (`regression`), made by `mlm` (`masked_lm`), or unchanged (None)",
    )
    mlm: Corruption | None = option(None, "a `MaskedLM`; by default one for the dataset's tokenizer")
    metadata_fields: Sequence[str] = option(
        (),
        "fields of samples that go to `batch.metadata`, in addition to `text`, `id` and `metadata`",
    )


@dataclass(frozen=True, kw_only=True)
class SampleWorkers:
    """Threads, cache and memory for fetching samples."""

    num_workers: int = option(
        4,
        "threads that fetch samples; 0: the calling thread. Columns are read without threads, which is faster.",
    )
    prefetch_size: int = option(
        4, "batches that the threads make ahead, in addition to the one that each is working on"
    )
    tune: Literal["auto"] | None = option(
        None,
        "`auto` tunes workers, prefetch and chunk in the first seconds; see `loader.tuning`",
    )
    cache_mb: int = option(
        0,
        "MiB for a cache of fetched samples; it keeps the first that fit. Not for datasets with random "
        "augmentation: they would repeat the first draw.",
    )
    budget: MemoryBudget | int | str | None = option(
        None, "memory for prefetched batches, columns of lists and cached samples: bytes, '1 GiB', or a budget"
    )


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """Framework of the arrays of a batch."""

    backend: str = option("mlx", "framework of the arrays: mlx, numpy, torch or jax")
    pin_memory: bool | None = option(
        None,
        "page-locked memory; None: with torch and an accelerator. MLX needs none, NumPy and JAX have none: True is "
        "refused there.",
    )
    use_unified_memory: bool | None = option(
        None,
        "memory that CPU and GPU share; None: as the backend has it. MLX arrays always are in it, so False is refused "
        "there; other backends have none, and refuse True.",
    )


@named_options
@dataclass(frozen=True, kw_only=True)
class MLXLoaderConfig(SampleFormat, SampleWorkers, SampleOutput):
    """Options of an `MLXDataLoader`.

    The order of samples depends on `shuffle`, `seed`, `drop_last`, `bucket_by_length` and the sizes, and on no other
    option.
    """

    batch_size: int = option(32, "samples in a batch of this rank")
    shuffle: bool = option(True, "new order of samples in every epoch")
    seed: int = option(0, "seed of the order")
    drop_last: bool = option(False, "drop samples that do not fill an optimizer step at the end of an epoch")
    bucket_by_length: bool = option(
        False,
        "batch rows of similar length. Without columns or `dataset.lengths`, every sample is read once for its length.",
    )
    gradient_accumulation_steps: int = option(
        1,
        "batches of an optimizer step. Their `num_items_in_batch` is the loss denominator of the step on all ranks.",
    )
    rank: int | None = option(None, "data rank of this process; by default that of torch.distributed or the launcher")
    world_size: int | None = option(None, "number of data ranks, together with `rank`")
    metrics: Metrics = option(None, "where metrics go: prometheus://:9464, a path, or others; see docs/metrics.md")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("max_length", "pad_to_multiple_of", "pad_id"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is True or False, got {getattr(self, name)!r}")
        for name in _MEMORY_FLAGS:
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} is True, False or None, got {getattr(self, name)!r}")
        _check_memory(self)
        _check_choice("objective", self.objective, _OBJECTIVES)
        _check_choice("truncation", self.truncation, _TRUNCATIONS)
        _check_choice("padding", self.padding, _PADDINGS)
        _check_choice("tune", self.tune, ("auto", None))
        if self.padding == "max_length" and self.max_length is None:
            raise ConfigError("padding='max_length' needs a max_length to pad to; pass one, or padding='longest'")
        if self.mlm is not None and self.objective != "masked_lm":
            raise ConfigError(f"mlm is for objective='masked_lm', got objective={self.objective!r}")
        if self.mlm is not None and not callable(getattr(self.mlm, "corrupt", None)):
            raise ConfigError(f"mlm must be a MaskedLM, got {self.mlm!r}")
        if isinstance(self.metadata_fields, str):
            raise ConfigError(f"metadata_fields must be a list of names, got the string {self.metadata_fields!r}")
        object.__setattr__(self, "budget", self.options().memory)  # a budget, also if a size was given

    def options(self) -> Options:
        """Options that all loaders have."""
        return Options(
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_id=self.pad_id,
            pin_memory=self.pin_memory is not False and self.backend == "torch",
            backend=self.backend,
            budget=self.budget,
            metrics=self.metrics,
        )


class MLXDataLoader(DataLoader, options=(MLXLoaderConfig,)):
    """Batches of MLX, NumPy, torch or JAX arrays (`backend`) from any dataset with `__len__` and `__getitem__`.

    `SampleDataLoader` is another name of it.

        loader = MLXDataLoader(dataset, MLXLoaderConfig(batch_size=32))
        loader = MLXDataLoader(dataset, batch_size=32, bucket_by_length=True)
        for batch in loader:
            batch["input_ids"], batch["attention_mask"], batch["labels"]

    A sample is a mapping with `input_ids` and other fields: lists, numbers, arrays of NumPy, MLX, torch or JAX. The
    sample of row 0 defines the schema. Text and other fields that are not numbers go to `batch.metadata`, as lists; so
    do the scalar entries of a sample's `metadata`, each under its name. Samples without `input_ids` have numbers of one
    shape, which are stacked: `batch["x"]`.
    Columns are many times faster than samples: a dataset with `to_columns()` (and no `transform`), a `pyarrow.Table`, a
    mapping of columns, a DataFrame, a Hugging Face dataset, a token store. A list of samples is converted to columns.

    The order is a plan: the batches are the same with any number of workers, after a resume anywhere, also within an
    optimizer step, and on any number of ranks with the same `batch_size` times `world_size`. A step of the plan
    (`loader.step`, `seek`, `plan.skip` ...) is an optimizer step; `len` counts batches. Random draws of the dataset
    itself are not part of the plan.
    """

    _engine: SampleEngine

    def __init__(self, dataset: Any, config: MLXLoaderConfig | None = None, **overrides: Any) -> None:
        self.config = chosen = configured(MLXLoaderConfig, config, overrides)
        self.dataset, options = dataset, chosen.options()
        samples = as_sample_dataset(
            dataset,
            chosen.objective,
            keep=frozenset(chosen.metadata_fields),
            cache_bytes=chosen.cache_mb << 20,
            budget=options.memory,
        )
        layout, columnar = _layout(dataset, chosen), isinstance(samples, (ColumnarDataset, ListDataset))
        # Samples have threads of their own. Columns take one if making a batch turns out to take long.
        options = replace(options, prefetch=None if columnar and chosen.num_workers else 0)
        chunk = _BATCHES_AT_ONCE if columnar else 1
        setting = TunerSetting(chosen.num_workers, chosen.prefetch_size, chunk)
        tuner = _tuner(setting) if chosen.tune else None
        engine = SampleEngine(
            samples,
            _plan(samples, chosen, options, layout),
            options,
            layout,
            accumulation=chosen.gradient_accumulation_steps,
            setting=setting if tuner is None else tuner.setting,
            tuner=tuner,
        )
        super().__init__(engine)
        log.debug(
            "%r: %s of %d samples, %s arrays, %d workers, prefetch_size %d",
            self,
            "columns" if columnar else "rows",
            samples.rows,
            chosen.backend,
            setting.workers,
            setting.prefetch,
        )

    @property
    def plan(self) -> Plan:
        """The order of everything; a step is an optimizer step of all ranks."""
        return self._engine.plan

    @property
    def sources(self) -> tuple[LoaderSource, ...]:
        raise ConfigError("a loader of samples has no token store; see loader.dataset and loader.plan")

    def edit(self, plan: Plan) -> None:
        """Continue with an edited plan, as in `loader.edit(loader.plan.ban([17]))`; delivered steps cannot change."""
        self._position = self._engine.edit(plan, self._position)
        self._edits += 1

    @property
    def micro_step(self) -> int:
        """Number of the next batch in its optimizer step."""
        return int(self._position.micro)

    @property
    def truncated(self) -> dict[str, int]:
        """Rows that were truncated so far, and the tokens that they lost."""
        return dict(self._engine.collator.truncated)

    @property
    def tuning(self) -> LoaderTuning:
        """Result of `tune="auto"` so far; without it, the current setting."""
        tuner = self._engine.tuner
        return LoaderTuning(self._engine.setting, done=True) if tuner is None else tuner.result

    def _watch(self, profile: Profile | None) -> None:
        self._engine.collator.stages = None if profile is None else profile.stages

    def _profile_facts(self) -> dict[str, Any]:
        return {
            "workers": self._engine.setting.workers,
            "fetched": self._engine.dataset.one_by_one,
            "buckets": self.config.bucket_by_length,
            "tuned": self.config.tune is not None,
        }


SampleDataLoader = MLXDataLoader


class _RowCount:
    """Table of rows whose lengths an order does not need."""

    def __init__(self, rows: int) -> None:
        self.rows = self.tokens = rows

    def lengths(self, rows: npt.ArrayLike, /) -> Ints:
        return np.ones(len(np.asarray(rows)), np.int64)

    def find_tokens(self, positions: npt.ArrayLike, /) -> tuple[Ints, Ints]:
        found = np.asarray(positions, np.int64)
        return found, np.zeros(len(found), np.int64)


class _RowLengths(_RowCount):
    """Table of rows whose lengths are read when an order needs them."""

    def __init__(self, dataset: SampleDataset) -> None:
        super().__init__(dataset.rows)
        self._dataset = dataset

    def lengths(self, rows: npt.ArrayLike, /) -> Ints:
        return self._dataset.lengths()[np.asarray(rows, np.int64)]


def _plan(dataset: SampleDataset, config: MLXLoaderConfig, options: Options, layout: SampleLayout) -> Plan:
    size = config.batch_size * options.find_rank().world_size
    fit = layout.truncation
    order: Order
    if config.bucket_by_length:
        order = BucketOrder(_RowLengths(dataset), fit, size=size, shuffle=config.shuffle, seed=config.seed)
    else:
        order = RowOrder(_RowCount(dataset.rows), fit, shuffle=config.shuffle, seed=config.seed)
    if not dataset.rows:
        raise ConfigError(f"{dataset.name} is empty; pass a dataset with samples")
    feed = PlanSource("samples", order, dataset.identity + _described(layout.corruption))
    return Plan((feed,), size * config.gradient_accumulation_steps, drop_last=config.drop_last)


def _layout(dataset: Any, config: MLXLoaderConfig) -> SampleLayout:
    tokenizer = getattr(dataset, "tokenizer", None)
    corruption = config.mlm
    if config.objective == "masked_lm" and corruption is None:
        if tokenizer is None:
            raise ConfigError(
                "objective='masked_lm' needs a mask token; pass mlm=MaskedLM.of(tokenizer), or a dataset with tokenizer"
            )
        from penstock.batching.masked_lm import MaskedLM

        corruption = MaskedLM.of(tokenizer, seed=config.seed)
    return SampleLayout(
        integer=get_backend(config.backend).integer,
        pad_id=_pad_id(tokenizer) if config.pad_id is None else config.pad_id,
        multiple=config.pad_to_multiple_of or 1,
        truncation=Truncation(config.truncation, config.max_length, ("right", "left")),
        to_max_length=config.padding == "max_length",
        objective=config.objective,
        corruption=corruption,
    )


def _described(corruption: Corruption | None) -> str:
    """Hash of the description of a corruption, for the fingerprint of the plan."""
    describe = getattr(corruption, "describe", None)
    if corruption is None or not callable(describe):
        return ""
    return f" {xxhash.xxh3_64_hexdigest(orjson.dumps(describe(), option=orjson.OPT_SORT_KEYS, default=str))}"


def _pad_id(tokenizer: Any) -> int:
    if hasattr(tokenizer, "special"):
        return pad_id_of(tokenizer)
    found = getattr(tokenizer, "pad_token_id", None)  # of transformers' tokenizers
    return found if isinstance(found, int) else 0


def _tuner(start: TunerSetting) -> LoaderTuner:
    if start.chunk > 1:
        return LoaderTuner(start, workers=(start.workers,), prefetches=(start.prefetch,), chunks=(16, 64, 256))
    most = max(8, start.workers)
    return LoaderTuner(start, workers=(0, 1, 2, 4, most), prefetches=(2, 4, 8))


def _check_memory(output: SampleOutput) -> None:
    """Refuse a kind of memory that the arrays of a backend cannot have, or have always."""
    backend, unified, pinned = output.backend, output.use_unified_memory, output.pin_memory
    if backend == "mlx" and unified is False:
        raise ConfigError(
            "use_unified_memory=False: MLX arrays always are in memory that CPU and GPU share; leave it out, or pass "
            "backend='numpy' or 'torch' for arrays in main memory"
        )
    if backend != "mlx" and unified:
        raise ConfigError(
            f"use_unified_memory=True is for backend='mlx': arrays of {backend!r} are not in memory that CPU and GPU "
            "share; leave it out"
        )
    if pinned and backend not in ("mlx", "torch"):
        raise ConfigError(
            f"pin_memory=True is for backend='torch': arrays of {backend!r} cannot be in page-locked memory; leave it "
            "out"
        )


def _check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        hint = did_you_mean(str(value), [str(choice) for choice in known])
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")
