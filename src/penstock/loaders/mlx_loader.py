"""Samples of any dataset as batches of MLX arrays.

config = MLXLoaderConfig(batch_size=32, shuffle=True, num_workers=4)
for batch in MLXDataLoader(dataset, config):
    loss = train(batch["input_ids"], batch["attention_mask"], batch["labels"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock._suggest import did_you_mean
from penstock.arrays.truncation import Truncation
from penstock.batching.backends import get_backend
from penstock.batching.options import Options, configured
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import pad_id_of
from penstock.loaders.profile import Profile
from penstock.loaders.samples.datasets import Columnar, Listed, SampleDataset, as_sample_dataset
from penstock.loaders.samples.engine import SampleEngine
from penstock.loaders.samples.layout import Corruption, Form
from penstock.loaders.samples.schema import Objective
from penstock.loaders.source import LoaderSource
from penstock.loaders.tuner import LoaderTuner, LoaderTuning, TunerSetting
from penstock.memory import MemoryBudget
from penstock.order.plan import Plan, PlanSource
from penstock.order.sample_orders import BucketOrder, Order, RowOrder

__all__ = ["MLXDataLoader", "MLXLoaderConfig"]

Ints = npt.NDArray[np.int64]
_BATCHES_AT_ONCE = 64
"""Of columns, which are looked up for all of them together."""
_OBJECTIVES = ("classification", "regression", "masked_lm", None)
_TRUNCATIONS = ("error", "right", "left")
_PADDINGS = ("longest", "max_length")
_FLAGS = ("shuffle", "use_unified_memory", "pin_memory", "drop_last", "bucket_by_length")
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
class MLXLoaderConfig:
    """How an `MLXDataLoader` makes batches.

    Which samples come when depends on `shuffle`, `seed`, `drop_last`, `bucket_by_length` and the sizes, and on nothing
    else here.
    """

    batch_size: int = 32
    """Samples of a batch of this rank."""
    shuffle: bool = True
    num_workers: int = 4
    """Threads that ask the dataset for samples, several at once; 0: the thread that wants the batch. Columns are read
    without any: that takes less time than handing a batch from one thread to another."""
    prefetch_size: int = 4
    """Batches that those threads make ahead, besides the one that each of them is at."""
    use_unified_memory: bool = True
    """MLX keeps arrays where CPU and GPU both find them, always; False changes nothing."""
    pin_memory: bool = True
    """Page-locked memory, where there is such a thing: with `backend="torch"` and an accelerator."""
    drop_last: bool = False
    """Whether samples that do not fill an optimizer step at the end of an epoch are left out."""
    seed: int = 0
    max_length: int | None = None
    """The most tokens of a row."""
    truncation: Literal["error", "right", "left"] = "error"
    """What becomes of longer rows: an error, or what is kept is their beginning (`right`) or their end (`left`)."""
    padding: Literal["longest", "max_length"] = "longest"
    """Rows are as long as the longest of the batch of all ranks, or all of them as `max_length`."""
    pad_id: int | None = None
    """By default that of the dataset's tokenizer, else 0."""
    pad_to_multiple_of: int | None = None
    bucket_by_length: bool = False
    """Rows of about one length together. Lengths are those of the columns, or `dataset.lengths`; where there are
    neither, every sample is read once for them."""
    gradient_accumulation_steps: int = 1
    """Batches to an optimizer step. `num_items_in_batch` is what all of them, on all ranks, divide their loss by."""
    objective: Objective = None
    """`classification`: labels are whole numbers. `regression`: they are float32. `masked_lm`: made by `mlm`. None: as
    the samples have them."""
    mlm: Corruption | None = None
    """A `MaskedLM`; by default one of the dataset's tokenizer."""
    rank: int | None = None
    world_size: int | None = None
    tune: Literal["auto"] | None = None
    """`auto` finds workers, prefetch and how much is made at a time in the first seconds; see `loader.tuning`."""
    cache_mb: int = 0
    """Samples that take long to make are kept, up to so many MiB. Not for a dataset that draws samples anew each time:
    they would stay as they were first drawn."""
    beside: Sequence[str] = ()
    """Values of samples that go to `batch.metadata`, besides text, `id` and `metadata`, which always do."""
    backend: str = "mlx"
    """Or `numpy`, `torch`, `jax`."""
    budget: MemoryBudget | None = None
    """What batches made ahead, columns made of lists and kept samples are charged to."""

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
        if isinstance(self.beside, str):
            raise ConfigError(f"beside is a list of names, got the text {self.beside!r}; pass [{self.beside!r}]")
        self.options()

    def options(self) -> Options:
        """What every loader is told."""
        return Options(
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_id=self.pad_id,
            pin_memory=self.pin_memory and self.backend == "torch",
            backend=self.backend,
            budget=self.budget,
        )


class MLXDataLoader(DataLoader):
    """Batches of `mx.array` from any dataset with `__len__` and `__getitem__`.

        loader = MLXDataLoader(dataset, MLXLoaderConfig(batch_size=32))
        loader = MLXDataLoader(dataset, batch_size=32, bucket_by_length=True)
        for batch in loader:
            batch["input_ids"], batch["attention_mask"], batch["labels"]

    A sample is a mapping with `input_ids` and whatever else: lists, numbers, arrays of NumPy, MLX, torch or JAX. The
    sample of row 0 says what the others are like. Text and what else is no number goes to `batch.metadata`, as lists;
    so do the single values of a sample's `metadata`, each under its name. Samples without `input_ids` are numbers of
    one shape each, which are stacked: `batch["x"]`.
    Samples may come as columns too, which is many times faster: a dataset with `to_columns()` (and no `transform`), a
    `pyarrow.Table`, a mapping of columns, a DataFrame, a Hugging Face dataset, a token store; a list of samples is made
    into columns.

    The order is a plan, as that of every loader: the same batches with any number of workers, resumed anywhere, also
    within an optimizer step, and on any number of ranks as long as `batch_size` times `world_size` stays the same. A
    step of the plan (`loader.step`, `seek`, `plan.skip` ...) is an optimizer step; `len` counts batches. What the
    dataset itself draws at random is a matter of the dataset.
    """

    _engine: SampleEngine

    def __init__(self, dataset: Any, config: MLXLoaderConfig | None = None, **overrides: Any) -> None:
        self.config = chosen = configured(MLXLoaderConfig, config, overrides)
        self.dataset = dataset
        origin = as_sample_dataset(
            dataset,
            chosen.objective,
            keep=frozenset(chosen.beside),
            cache_bytes=chosen.cache_mb << 20,
            budget=chosen.budget,
        )
        form, columnar = _form(dataset, chosen), isinstance(origin, (Columnar, Listed))
        # Samples have threads of their own. Columns take one if making a batch turns out to take long.
        options = replace(chosen.options(), prefetch=None if columnar and chosen.num_workers else 0)
        chunk = _BATCHES_AT_ONCE if columnar else 1
        setting = TunerSetting(chosen.num_workers, chosen.prefetch_size, chunk)
        tuner = _tuner(setting) if chosen.tune else None
        engine = SampleEngine(
            origin,
            _plan(origin, chosen, options, form),
            options,
            form,
            accumulation=chosen.gradient_accumulation_steps,
            setting=setting if tuner is None else tuner.setting,
            tuner=tuner,
        )
        super().__init__(engine)

    @property
    def plan(self) -> Plan:
        """The order of everything; a step is an optimizer step of all ranks."""
        return self._engine.plan

    @property
    def sources(self) -> tuple[LoaderSource, ...]:
        raise ConfigError("samples are one source that is no store of tokens; see loader.dataset and loader.plan")

    def edit(self, plan: Plan) -> None:
        """Go on by an edited plan, as `loader.edit(loader.plan.ban([17]))`; what was delivered cannot change."""
        self._position = self._engine.edit(plan, self._position)
        self._edits += 1

    @property
    def micro_step(self) -> int:
        """Which micro-batch of its optimizer step the next batch is."""
        return int(self._position.micro)

    @property
    def truncated(self) -> dict[str, int]:
        """Rows that were cut to `max_length`, and the tokens that went, in the batches that were made so far."""
        return dict(self._engine.maker.truncated)

    @property
    def tuning(self) -> LoaderTuning:
        """What `tune="auto"` has found so far; without it, what is used."""
        tuner = self._engine.tuner
        return LoaderTuning(self._engine.setting, done=True) if tuner is None else tuner.result

    def _watch(self, profile: Profile | None) -> None:
        self._engine.maker.stages = None if profile is None else profile.stages

    def _profile_facts(self) -> dict[str, Any]:
        return {
            "workers": self._engine.setting.workers,
            "fetched": self._engine.origin.one_by_one,
            "buckets": self.config.bucket_by_length,
            "tuned": self.config.tune is not None,
        }


class _Rows:
    """What an order has to know of rows that it does not look into: their number."""

    def __init__(self, rows: int) -> None:
        self.rows = self.tokens = rows

    def lengths(self, rows: npt.ArrayLike, /) -> Ints:
        return np.ones(len(np.asarray(rows)), np.int64)

    def find_tokens(self, positions: npt.ArrayLike, /) -> tuple[Ints, Ints]:
        found = np.asarray(positions, np.int64)
        return found, np.zeros(len(found), np.int64)


class _Lengths(_Rows):
    """The same, with their lengths, which are asked for when they are needed."""

    def __init__(self, origin: SampleDataset) -> None:
        super().__init__(origin.rows)
        self._origin = origin

    def lengths(self, rows: npt.ArrayLike, /) -> Ints:
        return self._origin.lengths()[np.asarray(rows, np.int64)]


def _plan(origin: SampleDataset, config: MLXLoaderConfig, options: Options, form: Form) -> Plan:
    size = config.batch_size * options.find_rank().world_size
    fit = Truncation(config.truncation, config.max_length)
    order: Order
    if config.bucket_by_length:
        order = BucketOrder(_Lengths(origin), fit, size=size, shuffle=config.shuffle, seed=config.seed)
    else:
        order = RowOrder(_Rows(origin.rows), fit, shuffle=config.shuffle, seed=config.seed)
    if not origin.rows:
        raise ConfigError(f"{origin.name} is empty: there are no samples to make batches of")
    feed = PlanSource("samples", order, origin.identity + _described(form.corruption))
    return Plan((feed,), size * config.gradient_accumulation_steps, drop_last=config.drop_last)


def _form(dataset: Any, config: MLXLoaderConfig) -> Form:
    tokenizer = getattr(dataset, "tokenizer", None)
    corruption = config.mlm
    if config.objective == "masked_lm" and corruption is None:
        if tokenizer is None:
            raise ConfigError(
                "objective='masked_lm' needs to know which token is the mask; pass mlm=MaskedLM.of(tokenizer), or a "
                "dataset with a tokenizer"
            )
        from penstock.batching.masked_lm import MaskedLM

        corruption = MaskedLM.of(tokenizer, seed=config.seed)
    return Form(
        integer=get_backend(config.backend).integer,
        pad_id=_pad_id(tokenizer) if config.pad_id is None else config.pad_id,
        multiple=config.pad_to_multiple_of or 1,
        max_length=config.max_length,
        truncation=config.truncation,
        to_max_length=config.padding == "max_length",
        objective=config.objective,
        corruption=corruption,
    )


def _described(corruption: Corruption | None) -> str:
    """What a corruption says of itself, in a few letters: with another one, batches are others too."""
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


def _check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        hint = did_you_mean(str(value), [str(choice) for choice in known])
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")
