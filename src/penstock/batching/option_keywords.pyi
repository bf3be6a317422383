"""Keywords of `Options` for type checkers. Generated: see tests/unit/batching/test_options.py."""

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
    batch_size: int
    max_tokens: int | None
    shuffle: bool | Literal["blocks"] | BlockShuffle
    seed: int
    drop_last: bool
    budget: MemoryBudget | int | str | None
    cache_dir: PathLike | None
    cache_bytes: int | str
    cache: CacheSpec | None
    progress: bool
    verify: Verify
    metrics: Metrics
    on_error: OnError
    quarantine: PathLike | None
    transforms: Sequence[Any]
    columns: Sequence[str] | Mapping[str, str] | None
    allow_empty: bool
    template: str | None
    add_bos: bool | None
    add_eos: bool | None
    backend: str
    device: Any
    pin_memory: bool
    fields: Sequence[str] | None
    prefetch: int | None
    padding_free: bool
    pad_to_multiple_of: int | None
    padding_side: Literal["right", "left"]
    pad_id: int | None
    rank: int | None
    world_size: int | None
    model_parallel_size: int
    group: Any
    sharding: Sharding | None
    dp: int | None
    cp: int
    tp: int
    pp: int
    context: Slicing | None
    shard: Shard
    pad: Padding
    output: Output
    raw: RawRows
