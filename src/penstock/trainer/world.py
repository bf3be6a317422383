"""The ranks of a run and their device: alone, or as torchrun started them (gloo on CPUs, nccl on CUDA)."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.distributed.ranks import Rank, find_rank
from penstock.errors import ConfigError

__all__ = ["World"]


class World:
    """What differs between one process and many; a context manager, since ranks have to part in order."""

    def __init__(self, device: str = "auto", dtype: str = "float32") -> None:
        self.rank: Rank = find_rank()
        self.device = _device(device, self.rank)
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank.rank == 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.rank.world_size > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After an error the others may never come to the parting; the launcher ends them.
        if self.rank.world_size > 1 and kind is None:
            distributed.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose gradients are the mean over all ranks."""
        if self.rank.world_size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **_no_buffers())

    def total(self, numbers: list[float]) -> list[float]:
        """Each number summed over all ranks. All ranks have to call it."""
        if self.rank.world_size == 1:
            return numbers
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        found: list[float] = summed.tolist()
        return found

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors (of one shape) of all ranks, in their order. All ranks have to call it."""
        if self.rank.world_size == 1:
            return [tensor]
        here = tensor.to(self.device)
        others = [torch.empty_like(here) for _ in range(self.rank.world_size)]
        distributed.all_gather(others, here)
        return [each.to(tensor.device) for each in others]

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is torch.bfloat16)

    def random_state(self) -> Tensor:
        """The generator dropout draws from on this device."""
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        if self.device.type == "mps":
            return torch.mps.get_rng_state()
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        elif self.device.type == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.set_rng_state(state)

    def seed(self, seed: int, *, step: int) -> None:
        """Another stream of random numbers for every rank and every step a run may start at."""
        # Odd multipliers keep (seed, step, rank) apart; torch takes 64 bits.
        torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + self.rank.rank + 1) % 2**63)


def _no_buffers() -> dict[str, Any]:
    """Keeps DDP from sending buffers before every step: they are constants, and a rank that has no batch takes none."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 gave the argument another name, and warns of the old one.
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _device(name: str, rank: Rank) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name!r} is not available here; use device='auto' or 'cpu'")
    if device.type == "mps" and rank.world_size > 1:
        raise ConfigError(f"device='mps' is one device, and {rank.world_size} ranks were started; use device='cpu'")
    if device.type != "cuda":
        return device
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", rank.rank))
    if count == 0:
        raise ConfigError(f"device={name!r} is not available here; use device='auto' or 'cpu'")
    if rank.world_size > 1 and local >= count:
        raise ConfigError(
            f"rank {local} of this machine has no GPU of its own: there are {count}; start as many ranks as there "
            f"are GPUs (torchrun --nproc_per_node={count}), or use device='cpu'"
        )
    index = local if rank.world_size > 1 else (device.index or 0)
    return torch.device("cuda", index)
