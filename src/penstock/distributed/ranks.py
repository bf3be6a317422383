"""Which part of the data this process reads: its place among the ranks, and among the workers of its rank.

Nothing here imports torch. A framework nobody imported cannot have been started, so it is looked up among the modules
that are already loaded.
"""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError

__all__ = ["Rank", "find_rank", "worker_rank"]

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
# SLURM_PROCID and SLURM_NTASKS are left out: an interactive shell or a batch script has them too, so one lone process
# would read the first of N shares and nobody would notice.


@dataclass(frozen=True, slots=True)
class Rank:
    """Number `rank` of `world` readers that share the data between them."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "world"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.world < 1:
            raise ConfigError(f"the world must hold at least one rank, got {self.world}")
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank {self.rank} outside the world of {self.world}; ranks count from 0 to {self.world - 1}"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def find_rank(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    model_parallel_size: int = 1,
    group: Any = None,
) -> Rank:
    """The data rank of this process: from the arguments, else torch.distributed, else the launcher, else alone.

    `group` is the data-parallel process group or DeviceMesh (`mesh["dp"]`, or several dimensions taken as one). Without
    one, `model_parallel_size` consecutive ranks share a data rank and so read the same batches. That holds for tensor
    and context parallelism; pipeline stages are usually far apart (Megatron and torchtitan count them slowest), so
    with pipeline parallelism pass `group`.

    Ask in the training process and hand the answer on: a spawned worker process does not know the group.
    """
    parallel = _whole("model_parallel_size", model_parallel_size)
    if parallel < 1:
        raise ConfigError(f"model_parallel_size must be at least 1, got {parallel}")
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ConfigError(
            f"{given}={rank if world_size is None else world_size} was given without {missing}; pass both or neither"
        )
    if group is not None:
        if rank is not None:
            raise ConfigError(f"rank={rank} and a group were both given; pass one of them")
        if parallel > 1:
            raise ConfigError(
                f"model_parallel_size={parallel} and a data-parallel group were both given; pass one of them"
            )
        return _rank_in(group)
    if rank is not None and world_size is not None:
        whole = Rank(rank, world_size)
    else:
        whole = _rank_of_torch() or _rank_of_launcher() or Rank()
    if whole.world % parallel:
        raise ConfigError(
            f"{whole.world} ranks cannot be divided into groups of model_parallel_size={parallel}; "
            f"the world size must be a multiple of it"
        )
    return Rank(whole.rank // parallel, whole.world // parallel)


def worker_rank() -> Rank:
    """Which worker of how many this is, inside a `torch.utils.data.DataLoader`; rank 0 of 1 anywhere else."""
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module is not None and hasattr(module, "get_worker_info") else None
    return Rank() if info is None else Rank(info.id, info.num_workers)


def running_torch() -> ModuleType | None:
    """torch.distributed, if somebody imported and started it."""
    module = sys.modules.get("torch.distributed")
    started = module is not None and hasattr(module, "is_initialized") and module.is_available()
    return module if started and module is not None and module.is_initialized() else None


def _rank_of_torch() -> Rank | None:
    module = running_torch()
    return None if module is None else Rank(module.get_rank(), module.get_world_size())


def _rank_in(group: Any) -> Rank:
    """The place in a process group, or in a mesh whose dimensions count as one, the last fastest."""
    if hasattr(group, "get_coordinate"):
        coordinate, rank, world = group.get_coordinate(), 0, 1
        if coordinate is None:
            raise ConfigError(f"this process is no part of the mesh {group}; its ranks alone can read with it")
        for here, size in zip(coordinate, group.shape):
            rank, world = rank * size + here, world * size
        return Rank(rank, world)
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        raise ConfigError(
            f"group must be a process group that this process belongs to, or a DeviceMesh, got {group!r}; "
            f"or pass rank= and world_size="
        )
    return Rank(group.rank(), group.size())


def _rank_of_launcher() -> Rank | None:
    for rank_name, world_name in _LAUNCHERS:
        rank, world = os.environ.get(rank_name), os.environ.get(world_name)
        if rank is None and (world is None or world.strip() == "1"):
            continue
        if rank is None or world is None:
            given, missing = (rank_name, world_name) if world is None else (world_name, rank_name)
            raise ConfigError(
                f"the environment has {given}={os.environ[given]!r} but no {missing}; "
                f"set both, or pass rank= and world_size="
            )
        try:
            return Rank(int(rank), int(world))
        except ValueError as error:
            raise ConfigError(
                f"the environment has {rank_name}={rank!r} and {world_name}={world!r}, which name no rank: {error}; "
                f"correct them, or pass rank= and world_size="
            ) from None
    return None


def _whole(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
