"""The options that every loader has, whatever it loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from penstock._suggest import did_you_mean
from penstock.batching.backends import get_backend
from penstock.batching.collate import FIELDS
from penstock.distributed.ranks import Rank, find_rank
from penstock.distributed.sharding import Contiguous, Sharding
from penstock.errors import ConfigError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.memory import MemoryBudget
from penstock.store.shards import Verify

__all__ = ["LoaderOptions", "Options", "configured", "read_options"]


class LoaderOptions(TypedDict, total=False):
    """The keywords of `Options`, for the signatures of loaders."""

    batch_size: int
    rank: int | None
    world_size: int | None
    model_parallel_size: int
    group: Any
    shuffle: bool
    seed: int
    drop_last: bool
    padding_free: bool
    pad_to_multiple_of: int | None
    padding_side: Literal["right", "left"]
    pad_id: int | None
    max_tokens: int | None
    fields: Sequence[str] | None
    prefetch: int | None
    pin_memory: bool
    device: Any
    backend: str
    budget: MemoryBudget | None
    sharding: Sharding | None
    cache_dir: PathLike | None
    verify: Verify


@dataclass(frozen=True, kw_only=True)
class Options:
    """How batches are made and handed over. None of it decides which rows come when, but `shuffle`, `seed`, `drop_last`
    and the sizes."""

    batch_size: int = 8
    """Samples for each rank; batches of all ranks together make a global batch."""
    rank: int | None = None
    world_size: int | None = None
    model_parallel_size: int = 1
    """So many neighbouring ranks train one copy of the model, and get the same batches."""
    group: Any = None
    """The data-parallel process group or device mesh, instead of `rank` and `world_size`."""
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    """Whether samples that do not fill a global batch at the end of an epoch are left out."""
    padding_free: bool = False
    """All samples of a batch end to end in one row, with `cu_seqlens` and without `attention_mask`."""
    pad_to_multiple_of: int | None = None
    padding_side: Literal["right", "left"] = "right"
    pad_id: int | None = None
    """By default the tokenizer's padding token, else its EOS, else 0."""
    max_tokens: int | None = None
    """Batches of as many rows as fit into so many tokens, padding included, instead of `batch_size` rows."""
    fields: Sequence[str] | None = None
    """Of the batch, if not all of them: what is not asked for is not made."""
    prefetch: int | None = None
    """Batches made ahead by a thread; 0: none; None: some, if making one takes long."""
    pin_memory: bool = False
    device: Any = None
    """Where batches are to lie when they are handed over."""
    backend: str = "torch"
    budget: MemoryBudget | None = None
    """What batches made ahead are charged to."""
    sharding: Sharding | None = None
    """Which samples of a global batch go to which rank; by default neighbours stay together."""
    cache_dir: PathLike | None = None
    """Where stores made of raw files are kept."""
    verify: Verify = "fast"
    """How much of a store is checked when it is opened; see `open_store`."""

    def __post_init__(self) -> None:
        _check_whole("batch_size", self.batch_size, least=1)
        for name, least in {"max_tokens": 1, "pad_to_multiple_of": 1, "prefetch": 0, "pad_id": 0}.items():
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least)
        for name in ("shuffle", "drop_last", "padding_free", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is True or False, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed is a whole number, got {self.seed!r}")
        if self.sharding is not None and not isinstance(self.sharding, Sharding):
            raise ConfigError(f"sharding must have a method shares(sizes, world), got {self.sharding!r}")
        if isinstance(self.fields, str):
            raise ConfigError(f"fields are a list of names, got the text {self.fields!r}; pass [{self.fields!r}]")
        if self.fields is not None and "input_ids" not in self.fields:
            raise ConfigError(f"fields must name input_ids, got {list(self.fields)}")
        if self.budget is not None and not isinstance(self.budget, MemoryBudget):
            raise ConfigError(f"budget must be a MemoryBudget, got {self.budget!r}; pass MemoryBudget({self.budget!r})")
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, os.PathLike)):
            raise ConfigError(f"cache_dir must be a path, got {self.cache_dir!r}")
        if self.cache_dir is not None:
            require_local(self.cache_dir, "cache_dir")
        get_backend(self.backend)

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what belongs to this one. The rank has been found by then."""
        return self.__dict__ | {"budget": None, "group": None}

    def find_rank(self) -> Rank:
        return find_rank(self.rank, self.world_size, model_parallel_size=self.model_parallel_size, group=self.group)

    @property
    def dealt(self) -> Sharding:
        return self.sharding if self.sharding is not None else Contiguous()

    @property
    def wanted_fields(self) -> frozenset[str]:
        return frozenset(FIELDS if self.fields is None else self.fields)

    @property
    def cache(self) -> Path | None:
        return None if self.cache_dir is None else require_local(self.cache_dir, "cache_dir")


def read_options(given: Mapping[str, Any]) -> Options:
    """The options of a loader; an unknown one is an error that names the nearest."""
    known = [option.name for option in fields(Options)]
    for name in given:
        if name not in known:
            raise TypeError(f"no option is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return Options(**given)


def _check_whole(name: str, value: Any, least: int) -> None:
    try:
        fits = not isinstance(value, bool) and index(value) >= least
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


Config = TypeVar("Config")


def configured(kind: type[Config], config: Config | None, overrides: Mapping[str, Any]) -> Config:
    """`config`, or the usual one, with the options that were passed by name."""
    if config is not None and not isinstance(config, kind):
        raise ConfigError(f"config must be of type {kind.__name__}, got {config!r}; options can be passed by name")
    known = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    for name in overrides:
        if name not in known:
            raise TypeError(f"no option is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    if config is None:
        return kind(**overrides)  # the usual one alone may need a framework that is not installed
    return replace(config, **overrides)  # type: ignore[type-var]
