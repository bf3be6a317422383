"""Rank of this process, and worker of a rank.

Nothing here imports torch: a framework that is not imported yet cannot have been initialized, so it is looked up among
the loaded modules.
"""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
# Without SLURM_PROCID and SLURM_NTASKS: an interactive shell or a batch script has them too, so a single process would
# silently read the first of N shares.


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank of a reader: number `rank` of the `world_size` readers that share the data."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "world_size"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} is outside of world_size={self.world_size}; expected 0 to {self.world_size - 1}"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def find_rank(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    model_parallel_size: int = 1,
    group: Any = None,
) -> Rank:
    """Data rank of this process: from the arguments, else torch.distributed, else the launcher, else rank 0 of 1.

    `group` is the data-parallel process group or DeviceMesh (`mesh["dp"]`, or several dimensions as one). Without it,
    `model_parallel_size` consecutive ranks share a data rank and read the same batches. That fits tensor and context
    parallelism; pipeline stages are usually far apart (Megatron and torchtitan count them slowest): `find_position`
    and `read_mesh` know about them.

    Call it in the training process: a spawned worker process does not know the group.
    """
    parallel = whole_number("model_parallel_size", model_parallel_size)
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
    if whole.world_size % parallel:
        raise ConfigError(
            f"{whole.world_size} ranks cannot be divided into groups of model_parallel_size={parallel}; "
            f"the world size must be a multiple of it"
        )
    return Rank(whole.rank // parallel, whole.world_size // parallel)


def worker_rank() -> Rank:
    """Worker of a `torch.utils.data.DataLoader` as a rank; rank 0 of 1 outside of one."""
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module is not None and hasattr(module, "get_worker_info") else None
    return Rank() if info is None else Rank(info.id, info.num_workers)


def running_torch() -> ModuleType | None:
    """Module torch.distributed, if it is imported and initialized."""
    module = sys.modules.get("torch.distributed")
    started = module is not None and hasattr(module, "is_initialized") and module.is_available()
    return module if started and module is not None and module.is_initialized() else None


def _rank_of_torch() -> Rank | None:
    module = running_torch()
    return None if module is None else Rank(module.get_rank(), module.get_world_size())


def _rank_in(group: Any) -> Rank:
    """Rank in a process group, or in a mesh with its dimensions as one, the last fastest."""
    if hasattr(group, "get_coordinate"):
        coordinate, rank, world = group.get_coordinate(), 0, 1
        if coordinate is None:
            raise ConfigError(f"this process is not part of the mesh {group}; pass a mesh that it belongs to")
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
                f"the environment has {rank_name}={rank!r} and {world_name}={world!r}, which is no rank: {error}; "
                "correct them, or pass rank= and world_size="
            ) from None
    return None


def whole_number(name: str, value: Any) -> int:
    """Integer of an option; anything else is an error that names the option."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None
