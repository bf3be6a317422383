"""Position of a process in a mesh: data, context, tensor and pipeline parallelism.

    dp    data parallel: each rank trains on samples of its own
    cp    context parallel: ranks share samples, and each has a slice of every sequence
    tp    tensor parallel: ranks share samples
    pp    pipeline parallel: ranks share samples

Nothing here imports torch or JAX: a mesh is an object that its framework has made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock._suggest import did_you_mean
from penstock.distributed.ranks import Rank, find_rank, whole_number
from penstock.errors import ConfigError

_NAMES = {
    "pp": ("pp", "pipeline", "pipe", "stage"),
    "dp": ("dp", "dp_replicate", "dp_shard", "fsdp", "ddp", "data", "replicate", "shard"),
    "cp": ("cp", "sp", "context"),
    "tp": ("tp", "tensor", "model"),
}
"""Names of the dimensions in meshes, from the slowest to the fastest, as Megatron and torchtitan number ranks."""
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}


_ALONE = Rank()


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """Position of a process: its rank in each dimension of a mesh."""

    dp: Rank = _ALONE
    cp: Rank = _ALONE
    tp: Rank = _ALONE
    pp: Rank = _ALONE

    @property
    def rank(self) -> int:
        """Number of the process, counted with the fastest dimension last: pp, dp, cp, tp."""
        rank = 0
        for kind in _NAMES:
            own: Rank = getattr(self, kind)
            rank = rank * own.world_size + own.rank
        return rank


def find_position(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    dp: int | None = None,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
) -> MeshPosition:
    """Position of this process in a mesh of these sizes, whose ranks are numbered with tp fastest, then cp, dp, pp.

    That is how Megatron and torchtitan number them; for another order use `read_mesh`. `rank` is that of the process,
    by default of torch.distributed or the launcher. Without `dp`, it is what the other sizes leave of the world.
    """
    given = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    sizes = {name: 1 if size is None else whole_number(name, size) for name, size in given.items()}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    total = math.prod(sizes.values())
    if rank is not None and world_size is None and dp is not None:
        world_size = total
    whole = find_rank(rank, world_size)
    spelled = " x ".join(f"{name}={size}" for name, size in sizes.items() if given[name] is not None)
    if dp is None:
        if whole.world_size % total:
            raise ConfigError(
                f"{whole.world_size} processes cannot be divided into groups of {spelled} = {total}; "
                "the number of processes must be a multiple of that"
            )
        sizes["dp"] = whole.world_size // total
    elif whole.world_size != total:
        raise ConfigError(
            f"{spelled} is a mesh of {total} processes, and this is {whole}; start {total} processes, correct the "
            f"sizes, or pass the rank of the process (rank=0 to {total - 1})"
        )
    places = dict(zip(sizes, np.unravel_index(whole.rank, tuple(sizes.values()))))
    return MeshPosition(**{name: Rank(int(places[name]), size) for name, size in sizes.items()})


def read_mesh(mesh: Any) -> MeshPosition:
    """Position of this process in a torch `DeviceMesh` or a `jax.sharding.Mesh` whose dimensions have known names.

    Known names are dp, dp_replicate, dp_shard, fsdp, ddp, data, replicate, shard (data; several count as one, in the
    order of the mesh), cp, sp, context, tp, tensor, model, and pp, pipeline, pipe, stage. Any of them may be missing.
    A process of JAX has several devices; it gets the data of all of them.
    """
    if hasattr(mesh, "get_coordinate"):
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names is None:
            raise ConfigError(f"the dimensions of {mesh} have no names; make it with mesh_dim_names=('dp', 'cp', 'tp')")
        kinds = _kinds(names, mesh)
        if coordinate is None:
            raise ConfigError(f"this process is not part of the mesh {mesh}; pass a mesh that it belongs to")
        found = {}
        for kind in dict.fromkeys(kinds):
            found[kind] = Rank(*_flattened(mesh.shape, [own == kind for own in kinds], coordinate))
        return MeshPosition(**found)
    if hasattr(mesh, "axis_names") and hasattr(mesh, "local_devices"):
        return _position_in_jax(mesh)
    raise ConfigError(f"expected a torch DeviceMesh or a jax Mesh, got {mesh!r}; or pass the sizes dp=, cp=, tp=, pp=")


def check_data_group(group: Any) -> None:
    """Refuse a mesh as data-parallel group whose dimensions share samples: each of their ranks would get others."""
    shared = [name for name in getattr(group, "mesh_dim_names", None) or () if _KINDS.get(name, "dp") != "dp"]
    if shared:
        raise ConfigError(
            f"group= is the data-parallel part of a mesh, and ranks of {shared[0]!r} in {group} share samples; pass "
            "shard=Shard.from_mesh(mesh), or the data dimensions alone, such as group=mesh['dp']"
        )


def _kinds(names: Iterable[str], mesh: Any) -> list[str]:
    """Kind of each dimension: dp, cp, tp or pp."""
    found = []
    for name in names:
        if name not in _KINDS:
            hint = did_you_mean(str(name), _KINDS)
            raise ConfigError(
                f"dimension {name!r} of the mesh {mesh} is unknown, so it is not clear whether its ranks get samples "
                f"of their own or share them{hint}; known names are {', '.join(_KINDS)}; rename it (mesh_dim_names=), "
                "leave it out (mesh['dp', 'cp']) if its ranks share samples, or pass the sizes dp=, cp=, tp=, pp="
            )
        found.append(_KINDS[name])
    if not found:
        raise ConfigError(f"the mesh {mesh} has no dimension; expected at least one of {', '.join(_NAMES)}")
    return found


def _flattened(shape: Sequence[int], chosen: Sequence[bool], coordinate: Sequence[int]) -> tuple[int, int]:
    """Place in the chosen dimensions as one, the last fastest, and their size."""
    place, size = 0, 1
    for length, use, here in zip(shape, chosen, coordinate, strict=True):
        if use:
            place, size = place * int(length) + int(here), size * int(length)
    return place, size


def _position_in_jax(mesh: Any) -> MeshPosition:
    kinds, devices = _kinds(mesh.axis_names, mesh), np.asarray(mesh.devices)
    local = {device.id for device in mesh.local_devices}
    if not local:
        raise ConfigError(f"this process has no device in the mesh {mesh}; pass a mesh that it belongs to")
    found = {}
    for kind in dict.fromkeys(kinds):
        chosen = [own == kind for own in kinds]
        places: dict[int, set[int]] = {}  # those of each process
        mine: set[int] = set()
        for coordinate, device in np.ndenumerate(devices):
            place, _ = _flattened(devices.shape, chosen, coordinate)
            places.setdefault(device.process_index, set()).add(place)
            if device.id in local:
                mine.add(place)
        parts = sorted({tuple(sorted(part)) for part in places.values()})
        if any(part[-1] - part[0] + 1 != len(part) for part in parts) or any(
            one[-1] >= other[0] or len(one) != len(other) for one, other in pairwise(parts)
        ):
            raise ConfigError(
                f"the processes of the mesh {mesh} have the places {parts} of its {kind} dimension, expected runs of "
                "equal length that do not overlap; order the devices so that each process has neighbours"
            )
        found[kind] = Rank(parts.index(tuple(sorted(mine))), len(parts))
    return MeshPosition(**found)
