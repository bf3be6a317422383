"""The numbers of a run, out of the shared config, and the learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import require_local

__all__ = ["TrainSettings", "learning_rate_at"]

_DTYPES = ("float32", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What the trainer reads of a shared config; the defaults suit a few minutes on a CPU.

    `lr_decay_iters=None` decays until `max_iters`, `min_lr=None` to a tenth of `learning_rate`, `grad_clip=0` clips
    nothing. `checkpoint_interval=None` saves whenever it evaluates.
    """

    dataset: str
    batch_size: int
    block_size: int
    seed: int = 0
    max_iters: int = 2000
    learning_rate: float = 1e-3
    min_lr: float | None = None
    warmup_iters: int = 100
    lr_decay_iters: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    eval_interval: int = 250
    eval_iters: int = 20
    log_interval: int = 10
    checkpoint_interval: int | None = None
    out_dir: Path = Path("out")
    resume: bool = True
    device: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        problems = [*self._outside(), *self._contradictions()]
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TrainSettings:
        """The values of a config that has been validated; what it does not set, or sets to None, is the default."""
        given = {each.name: config.get(each.name) for each in fields(cls)}
        known = {name: value for name, value in given.items() if value is not None}
        missing = [name for name in ("dataset", "batch_size", "block_size") if name not in known]
        if missing:
            raise ConfigError(f"the config lacks {', '.join(missing)}; set them in the file that was given")
        known["out_dir"] = require_local(known.get("out_dir", Path("out") / str(known["dataset"])), "out_dir")
        return cls(**known)

    @property
    def save_every(self) -> int:
        """Steps between two checkpoints, beside those that are saved for being the best."""
        return self.eval_interval if self.checkpoint_interval is None else self.checkpoint_interval

    def _outside(self) -> list[str]:
        positive = ["batch_size", "block_size", "max_iters", "n_layer", "n_head", "n_embd", "log_interval"]
        positive += ["eval_interval", "learning_rate", "save_every"]
        counts = ["eval_iters", "warmup_iters", "weight_decay", "grad_clip"]
        problems = [f"{name} must be positive, got {value}" for name, value in self._named(positive) if value <= 0]
        problems += [f"{name} must not be negative, got {value}" for name, value in self._named(counts) if value < 0]
        shares = ["dropout", "beta1", "beta2"]
        problems += [f"{name} must be in [0, 1), got {v}" for name, v in self._named(shares) if not 0 <= v < 1]
        if self.dtype not in _DTYPES:
            problems.append(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.device.partition(":")[0] not in _DEVICES:
            problems.append(f"device must be one of {', '.join(_DEVICES)}, got {self.device!r}")
        return problems

    def _contradictions(self) -> list[str]:
        if self.n_head > 0 and self.n_embd % self.n_head:
            return [f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}; every head takes an equal share"]
        if self.n_head > 0 and self.n_embd // self.n_head % 2:
            return [f"n_embd={self.n_embd} gives n_head={self.n_head} heads an odd share; it has to be even"]
        return []

    def _named(self, names: list[str]) -> list[tuple[str, float]]:
        return [(name, getattr(self, name)) for name in names]


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """The rate of step `step` (from 0): a straight line up, half a cosine down, and the least from then on."""
    highest = settings.learning_rate
    least = highest / 10 if settings.min_lr is None else settings.min_lr
    if step < settings.warmup_iters:
        return highest * (step + 1) / (settings.warmup_iters + 1)
    end = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    if step >= end:
        return least
    share = (step - settings.warmup_iters) / max(1, end - settings.warmup_iters)
    return least + (highest - least) * 0.5 * (1.0 + math.cos(math.pi * share))
