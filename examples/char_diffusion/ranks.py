"""Ranks of a run: process group, device, collectives and random state; and the signals that stop it."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.distributed.ranks import find_rank
from penstock.errors import ConfigError

__all__ = ["RankGroup", "StopSignals", "WaitInterruptedError"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RankGroup:
    """Process-group context of one process, or of the ranks that torchrun started; destroys the group on exit."""

    def __init__(self, device: str = "auto", dtype: str = "float32") -> None:
        found = find_rank()
        self.rank, self.world_size = found.rank, found.world_size
        self.device = _device(device, self.rank, self.world_size)
        self._bfloat16 = dtype == "bfloat16"
        # Dropout draws from the generator of the device.
        self._generator: Any = {"cuda": torch.cuda, "mps": torch.mps}.get(self.device.type, torch)

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error the other ranks may never get here; torchrun ends them.
        if self.world_size > 1 and kind is None:
            distributed.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over all ranks."""
        if self.world_size == 1:
            return model
        # Buffers are constants: they need no broadcast. torch 2.13 renamed the argument.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **{buffers: False})

    def total(self, numbers: list[float]) -> list[float]:
        """Each number summed over all ranks. Every rank has to call it."""
        if self.world_size == 1:
            return numbers
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        return summed.tolist()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order. Every rank has to call it, with one shape."""
        if self.world_size == 1:
            return [tensor]
        here = tensor.to(self.device)
        gathered = [torch.empty_like(here) for _ in range(self.world_size)]
        distributed.all_gather(gathered, here)
        return [each.to(tensor.device) for each in gathered]

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bfloat16)

    def random_state(self) -> Tensor:
        return self._generator.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        self._generator.set_rng_state(state)

    def seed(self, seed: int, *, step: int) -> None:
        """Start a stream of random numbers that differs for every (seed, step, rank)."""
        torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + self.rank + 1) % 2**63)


def _device(name: str, rank: int, world_size: int) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, present in available.items() if present)
    device = torch.device(name)
    if not available[device.type]:
        raise ConfigError(f"device={name!r} is not available here; use device='auto' or 'cpu'")
    if device.type == "mps" and world_size > 1:
        raise ConfigError(f"device='mps' is one device, and {world_size} ranks were started; use device='cpu'")
    if device.type != "cuda":
        return device
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", rank))
    if world_size > 1 and local >= count:
        raise ConfigError(
            f"rank {local} of this machine has no GPU: there are {count}; start {count} ranks "
            f"(torchrun --nproc_per_node={count}), or use device='cpu'"
        )
    return torch.device("cuda", local if world_size > 1 else (device.index or 0))


class WaitInterruptedError(BaseException):
    """Wait for a batch that a signal ended. Never leaves the trainer."""


class StopSignals:
    """Handler of SIGINT and SIGTERM: the first requests a checkpoint and a stop, the second exits at once."""

    def __init__(self, *, launched: bool = False) -> None:
        # A terminal sends Ctrl-C to torchrun and to its ranks, and torchrun forwards it: one request comes twice.
        self._same_request_seconds = 1.0 if launched else 0.0
        self._requested_at: float | None = None
        self._waiting = False

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    def __enter__(self) -> Self:
        self._previous = [signal.signal(number, self._handle) for number in _SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(_SIGNALS, self._previous):
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context of a wait that may be cut short; everything outside of it is finished first."""
        self._waiting = True
        try:
            if self.requested:
                raise WaitInterruptedError
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        elif now - self._requested_at > self._same_request_seconds:
            raise SystemExit(130)
        if self._waiting:
            self._waiting = False
            raise WaitInterruptedError
