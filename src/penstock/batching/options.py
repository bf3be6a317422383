"""Options that all loaders share, in four groups and one whole: `Shard`, `Padding`, `Output`, `RawRows`, `Options`.

PretrainDataLoader("corpus/", tokenizer, batch_size=16, rank=0, world_size=4)                # flat keywords
PretrainDataLoader("corpus/", tokenizer, batch_size=16, shard=Shard(rank=0, world_size=4))   # or a group of them
"""

# ruff: noqa: RUF009 - option() makes a dataclass field

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from inspect import Parameter, Signature, cleandoc, signature
from operator import index
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, cast, get_type_hints

from penstock._suggest import check_options, did_you_mean, named_options
from penstock.batching.backends import get_backend
from penstock.batching.collate import FIELDS
from penstock.batching.context import SLICINGS, ContextSlice, Slicing
from penstock.connections.shared_cache import CacheSpec, SharedCache, require_cache_dir, shared_cache
from penstock.distributed.mesh import MeshPosition, check_data_group, find_position, read_mesh
from penstock.distributed.ranks import Rank, find_rank
from penstock.distributed.sharding import Contiguous, Sharding
from penstock.errors import ConfigError
from penstock.files.filesystems import is_remote, require_local
from penstock.files.listing import PathLike
from penstock.memory import MemoryBudget, parse_bytes
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.order.block_shuffle import BlockShuffle, shuffle_of
from penstock.pipeline.config import OnError, PipelineConfig
from penstock.store.shards import Verify

__all__ = [
    "LoaderOptions",
    "Options",
    "Output",
    "Padding",
    "RawRows",
    "Shard",
    "configured",
    "flat_options",
    "option",
    "read_options",
    "show_options",
]

Config = TypeVar("Config")
_DIMENSIONS = ("dp", "cp", "tp", "pp")


def option(default: Any, doc: str) -> Any:
    """Dataclass field with a default and a line of documentation, which `help()` of a loader shows."""
    return field(default=default, metadata={"doc": doc})


@named_options
@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of every global batch that this process gets."""

    rank: int | None = option(None, "data rank of this process; by default that of torch.distributed or the launcher")
    world_size: int | None = option(None, "number of data ranks, together with `rank`")
    model_parallel_size: int = option(1, "neighbouring ranks that train one copy of the model get the same batches")
    group: Any = option(None, "data-parallel process group or device mesh, in place of `rank` and `world_size`")
    sharding: Sharding | None = option(None, "samples of a global batch for each rank; by default contiguous parts")
    dp: int | None = option(None, "data-parallel ranks of a mesh; by default what cp, tp and pp leave of the processes")
    cp: int = option(1, "context-parallel ranks, which share samples; `rank` is then that of the process in the mesh")
    tp: int = option(1, "tensor-parallel ranks, which share samples")
    pp: int = option(1, "pipeline-parallel ranks, which share samples")
    context: Slicing | None = option(
        None, "slices of sequences for cp ranks: contiguous, zigzag or zigzag_documents; by default whole sequences"
    )

    @classmethod
    def from_mesh(cls, mesh: Any, *, context: Slicing | None = None, sharding: Sharding | None = None) -> Self:
        """Shard of this process in a torch `DeviceMesh` or a `jax.sharding.Mesh`; see `read_mesh` for its dimensions.

        `rank` is the number of the process with the dimensions in the order pp, dp, cp, tp, whatever their order in the
        mesh. Ranks that differ in tp or pp alone get identical batches; those that differ in cp too, unless `context`
        says how to slice them.
        """
        place = read_mesh(mesh)
        sizes = {name: getattr(place, name).world_size for name in _DIMENSIONS}
        return cls(rank=place.rank, context=context, sharding=sharding, **sizes)

    def find_rank(self) -> Rank:
        """Data rank of this process."""
        return self.find_position().dp

    def find_position(self) -> MeshPosition:
        """Position of this process in the mesh; without sizes of one, its data rank alone."""
        if not self._sized:
            if self.group is not None:
                check_data_group(self.group)
            parallel = self.model_parallel_size
            return MeshPosition(find_rank(self.rank, self.world_size, model_parallel_size=parallel, group=self.group))
        if self.group is not None or self.model_parallel_size != 1:
            other = "group=" if self.group is not None else f"model_parallel_size={self.model_parallel_size}"
            raise ConfigError(f"{other} and the sizes of a mesh (dp, cp, tp, pp) were both given; pass one of them")
        return find_position(self.rank, self.world_size, dp=self.dp, cp=self.cp, tp=self.tp, pp=self.pp)

    @property
    def _sized(self) -> bool:
        """True if sizes of a mesh are given."""
        return (self.dp, self.cp, self.tp, self.pp) != (None, 1, 1, 1)

    @property
    def context_slice(self) -> ContextSlice | None:
        """Slice of every sequence that this process gets; None for whole sequences."""
        return None if self.context is None else ContextSlice(self.find_position().cp, self.context)

    @property
    def sharding_strategy(self) -> Sharding:
        return self.sharding if self.sharding is not None else Contiguous()


@named_options
@dataclass(frozen=True, kw_only=True)
class Padding:
    """Padding of the rows of a batch."""

    padding_free: bool = option(False, "all samples end to end in one row, with cu_seqlens and without attention_mask")
    pad_to_multiple_of: int | None = option(None, "rows are padded to a multiple of this many tokens")
    padding_side: Literal["right", "left"] = option("right", "side of the padding")
    pad_id: int | None = option(None, "padding token; by default that of the tokenizer, else its EOS, else 0")


@named_options
@dataclass(frozen=True, kw_only=True)
class Output:
    """Backend, device, fields and prefetching of batches."""

    backend: str = option("torch", "framework of the arrays: numpy, torch, mlx or jax")
    device: Any = option(None, "device of the arrays when a batch is delivered")
    pin_memory: bool = option(False, "arrays in page-locked memory (torch)")
    fields: Sequence[str] | None = option(None, "fields of a batch; by default all. Other fields are not computed")
    prefetch: int | None = option(None, "batches prepared ahead by a thread; 0: none; None: a few, if batches are slow")

    @property
    def wanted_fields(self) -> frozenset[str]:
        return frozenset(FIELDS if self.fields is None else self.fields)


@named_options
@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Rows of raw files, before they become tokens. A store has none."""

    on_error: OnError = option("raise", "a bad row stops the loader, or is left out and counted ('skip', 'quarantine')")
    quarantine: PathLike | None = option(
        None, "JSONL file for bad rows with on_error='quarantine'; by default next to the store in the cache"
    )
    transforms: Sequence[Any] = option(
        (), "transforms that run on raw rows first: stages, functions of a row, or names such as 'drop_nulls'"
    )
    columns: Sequence[str] | Mapping[str, str] | None = option(
        None, "columns to read; or, for chats in plain columns, the column of each role"
    )
    allow_empty: bool = option(False, "pass over files of 0 bytes, which are an error otherwise")
    template: str | None = option(None, "chat template: another name of `chat_template`")
    add_bos: bool | None = option(None, "begin documents with BOS; by default where the tokenizer itself does")
    add_eos: bool | None = option(None, "end documents with EOS; by default if the tokenizer has one")


@dataclass(frozen=True, kw_only=True)
class Options(Shard, Padding, Output, RawRows):
    """Options of a loader. Only the sizes, `shuffle`, `seed` and `drop_last` decide which rows come when."""

    batch_size: int = option(8, "samples for each rank; the batches of all ranks make up a global batch")
    max_tokens: int | None = option(None, "batches of at most this many tokens with padding, in place of `batch_size`")
    shuffle: bool | Literal["blocks"] | BlockShuffle = option(
        True,
        "new order of samples in every epoch; 'blocks' keeps neighbours near, for buckets and small caches",
    )
    seed: int = option(0, "seed of the order")
    drop_last: bool = option(False, "leave out samples that do not fill a global batch at the end of an epoch")
    budget: MemoryBudget | int | str | None = option(None, "memory for prefetched batches: bytes, '1 GiB', or a budget")
    cache_dir: PathLike | None = option(None, "directory for stores made from raw files and parts of stores in buckets")
    cache_bytes: int | str = option("50 GiB", "size of the cache for parts of stores in buckets")
    cache: CacheSpec | None = field(  # no repr: a URL may hold a password
        default=None,
        repr=False,
        metadata={"doc": "URL of a cache of stores that machines share: redis://, s3://, gs://, az://, or a directory"},
    )
    progress: bool = option(True, "show progress while raw files are prepared: live on a terminal, else a few lines")
    verify: Verify = option("fast", "checks of a store when it is opened; see `open_store`")
    metrics: Metrics = option(None, "where metrics go: prometheus://:9464, a path, or others; see docs/metrics.md")

    def __post_init__(self) -> None:
        _check_integer("batch_size", self.batch_size, least=1)
        for name, least in {"max_tokens": 1, "pad_to_multiple_of": 1, "prefetch": 0, "pad_id": 0}.items():
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), least)
        if not isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", shuffle_of(self.shuffle))
        for name in ("drop_last", "padding_free", "pin_memory", "progress", "allow_empty"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        for name in _DIMENSIONS:
            if name != "dp" or self.dp is not None:
                _check_integer(name, getattr(self, name), least=1)
        if self.context is not None and self.context not in SLICINGS:
            hint = did_you_mean(str(self.context), SLICINGS)
            raise ConfigError(f"context must be one of {', '.join(SLICINGS)} or None, got {self.context!r}{hint}")
        if self.sharding is not None and not isinstance(self.sharding, Sharding):
            raise ConfigError(f"sharding must have a method shares(sizes, world), got {self.sharding!r}")
        if isinstance(self.fields, str) or (self.fields is not None and "input_ids" not in self.fields):
            raise ConfigError(f"fields must be a list of names with 'input_ids' among them, got {self.fields!r}")
        if self.budget is not None:
            object.__setattr__(self, "budget", MemoryBudget.of(self.budget))
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, os.PathLike)):
            raise ConfigError(f"cache_dir must be a path, got {self.cache_dir!r}")
        if self.cache_dir is not None:
            assert self.cache_home  # which checks it
        if self.cache is not None:
            shared_cache(self.cache)
        object.__setattr__(self, "cache_bytes", parse_bytes(self.cache_bytes))
        assert self.pipeline  # which checks its options
        if self.quarantine is not None and self.on_error != "quarantine":
            raise ConfigError(f"quarantine={self.quarantine!r} is for on_error='quarantine', got {self.on_error!r}")
        if self.metrics is not None:
            object.__setattr__(self, "metrics", MetricsConfig.of(self.metrics))
        get_backend(self.backend)

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without what belongs to this one. The rank is known by then."""
        return self.__dict__ | {"budget": None, "group": None, "cache": None, "metrics": None}

    @property
    def memory(self) -> MemoryBudget | None:
        """The budget; never a size."""
        return None if self.budget is None else MemoryBudget.of(self.budget)

    @property
    def rows(self) -> dict[str, Any]:
        """Options of raw rows that are set and decide the content of a store, as keywords of `Recipe`."""
        names = ("transforms", "columns", "allow_empty", "template", "add_bos", "add_eos")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value != () and value != []}

    @property
    def pipeline(self) -> PipelineConfig:
        """Configuration of the run that prepares raw files."""
        return PipelineConfig(on_error=self.on_error, quarantine=_text(self.quarantine))

    @property
    def cache_home(self) -> Path | None:
        if self.cache_dir is None:
            return None
        require = require_cache_dir if is_remote(self.cache_dir) else partial(require_local, what="cache_dir")
        return require(self.cache_dir)

    @property
    def block_shuffle(self) -> bool | BlockShuffle:
        """`shuffle` as orders take it."""
        return cast("bool | BlockShuffle", self.shuffle)

    @property
    def shared_cache(self) -> SharedCache | None:
        return None if self.cache is None else shared_cache(self.cache)


GROUPS: dict[str, type[Any]] = {"shard": Shard, "pad": Padding, "output": Output, "raw": RawRows}
"""Keywords that take a group of options at once."""

if TYPE_CHECKING:
    from penstock.batching.option_keywords import LoaderOptions  # a stub, generated from `Options`
else:
    LoaderOptions = TypedDict("LoaderOptions", get_type_hints(Options) | GROUPS, total=False)
    LoaderOptions.__doc__ = "Keywords of `Options`, for the signatures of loaders."


def read_options(given: Mapping[str, Any], loader: type[Any] | None = None) -> Options:
    """Options of a loader from its keywords, flat or in groups. An error lists all parameters of `loader`."""
    flat, known = flat_options(given), option_names(Options)
    if "chat_template" in flat:
        if flat.get("template") is not None:
            raise ConfigError("template and chat_template are two names of one option; pass one of them")
        flat["template"] = flat.pop("chat_template")
    unknown = [name for name in flat if name not in known]
    if unknown:
        check_options(unknown, known if loader is None else list(signature(loader).parameters))
    return Options(**flat)


def flat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with groups taken apart. A keyword that is also in a group is an error."""
    flat = {name: value for name, value in given.items() if name not in GROUPS}
    for name, kind in GROUPS.items():
        group = given.get(name)
        if group is None:
            continue
        if not isinstance(group, kind):
            raise ConfigError(f"{name} must be {kind.__name__}(...), got {group!r}")
        for each in fields(kind):
            if each.name in flat:
                raise ConfigError(f"{each.name} is given twice: as a keyword and in {name}={kind.__name__}(...)")
            if getattr(group, each.name) is not each.default:
                flat[each.name] = getattr(group, each.name)
    return flat


def option_names(kind: type[Any]) -> list[str]:
    """Names of the options of a dataclass, those of the class itself before those of its bases."""
    inherited = {each.name for base in kind.__bases__ if hasattr(base, "__dataclass_fields__") for each in fields(base)}
    names = [each.name for each in fields(kind)]
    return [name for name in names if name not in inherited] + [name for name in names if name in inherited]


def configured(kind: type[Config], config: Config | None, overrides: Mapping[str, Any]) -> Config:
    """`config`, or the default one, with the options that were passed by name, flat or in groups."""
    if config is not None and not isinstance(config, kind):
        raise ConfigError(f"config must be {kind.__name__}(...), got {config!r}; options can be passed by name too")
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    shard = overrides.get("shard")
    if isinstance(shard, Shard) and shard._sized and "cp" not in known:
        place = shard.find_rank()
        plain = replace(shard, rank=place.rank, world_size=place.world_size, dp=None, cp=1, tp=1, pp=1)
        overrides = {**overrides, "shard": plain}
    overrides = flat_options(overrides)
    check_options(overrides, known)
    # The default one alone may need a framework that is not installed.
    return kind(**overrides) if config is None else replace(config, **overrides)  # type: ignore[type-var]


def show_options(cls: type[Any], kinds: Sequence[type[Any]], without: Collection[str] = ()) -> None:
    """Put the options that a class takes as `**options` into its signature and its docstring."""
    parameters = [each for each in signature(cls).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    taken = {*without, *(each.name for each in parameters)}
    lines = [cleandoc(cls.__doc__ or ""), "", "Options:", ""]
    for kind in kinds:
        for name in option_names(kind):
            if name not in taken:
                each = kind.__dataclass_fields__[name]
                default = None if each.default is MISSING else each.default  # MISSING: a group of options
                parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=each.type))
                line = f"{name}: {each.metadata.get('doc', each.type)}"
                lines += wrap(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    cls.__signature__ = Signature(parameters, return_annotation=None)
    cls.__doc__ = "\n".join(lines)


def _text(path: PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)


def _check_integer(name: str, value: Any, least: int) -> None:
    try:
        fits = not isinstance(value, bool) and index(value) >= least
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
