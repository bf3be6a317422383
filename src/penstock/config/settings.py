"""What one setting of a config may be."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, Final, Literal

from penstock.config.kinds import ByteSize, Misfit, fit, in_words, understood
from penstock.config.values import NotPlain, freeze
from penstock.errors import ConfigError

__all__ = ["KNOWN", "PREPARE", "REQUIRED", "SHARED", "TRAIN", "Setting", "check_settings", "contradictions"]


class _Required(enum.Enum):
    REQUIRED = "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required.REQUIRED
"""The default of a setting that every config has to have."""


@dataclass(frozen=True)
class Setting:
    """A value of the shared config: its kind, its default, what else it must fulfil, and what it is for.

        settings = {"mask_probability": Setting(float, 0.15, check=lambda p: 0 < p <= 1, text="above 0, at most 1")}

    `kind` is a type or an annotation (`penstock.config.kinds`). `check` is given a value of that kind and returns
    whether it will do; or, for a message of its own, what is wrong with it in words (None: nothing).
    """

    kind: Any
    default: Any = REQUIRED
    check: Callable[[Any], bool | str | None] | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not understood(self.kind):
            raise ConfigError(
                f"a setting cannot be of the kind {self.kind!r}; use int, float, bool, str, Path, list, tuple, set, "
                "dict, Literal[...], Any, or a union of them"
            )
        if self.default is REQUIRED:
            return
        try:
            object.__setattr__(self, "default", fit(freeze(self.default), self.kind))
        except (Misfit, NotPlain) as error:
            raise ConfigError(f"the default {self.default!r} of a setting does not fit its kind: {error}") from None

    @property
    def required(self) -> bool:
        """Whether a config has to have it."""
        return self.default is REQUIRED

    def accept(self, value: Any) -> Any:
        """The value as the kind has it; raises Misfit with what is wrong."""
        fitted = fit(value, self.kind)
        if self.check is None:
            return fitted
        try:
            verdict = self.check(fitted)
        except Exception as error:  # the check is the provider's: whatever it raises is a verdict
            raise Misfit(f"its check raised {type(error).__name__}: {error}") from error
        if isinstance(verdict, str) and verdict:
            raise Misfit(verdict)
        if verdict is not None and verdict != "" and not verdict:
            raise Misfit(f"not allowed; expected {self.text or in_words(self.kind)}")
        return fitted


def check_settings(settings: Mapping[str, Setting], owner: str) -> None:
    """Refuse what a provider declares if it is not names and settings."""
    for name, setting in settings.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ConfigError(f"{owner}.settings: a name in a config file is expected, got {name!r}")
        if not isinstance(setting, Setting):
            raise ConfigError(f"{owner}.settings[{name!r}] is {setting!r}; write Setting(kind, default)")


def _at_least(low: float) -> Callable[[float], str | None]:
    return lambda value: None if value >= low else f"expected {low} or more"


def _above(low: float) -> Callable[[float], str | None]:
    return lambda value: None if low < value < float("inf") else f"expected a number above {low}"


def _share(value: float) -> str | None:
    return None if 0 <= value < 1 else "expected 0 or more, and less than 1"


def _optional(check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda value: None if value is None else check(value)


def _seed(value: int) -> str | None:
    return _at_least(0)(value) or (None if value < 2**63 else "expected less than 2**63")


def _directory_name(value: str) -> str | None:
    plain = value == PureWindowsPath(value).name == Path(value).name and value.strip() == value
    if value and plain and value.isprintable() and not value.startswith(".") and ":" not in value:
        return None
    return "expected the name of a directory in data/, without slashes or a leading dot"


def _proportions(value: Mapping[str, float]) -> str | None:
    if not value or not all(0 <= share < float("inf") for share in value.values()) or not any(value.values()):
        return "expected a share for every split, none below 0 and one above, such as {'train': 0.9, 'val': 0.1}"
    bad = [split for split in value if _directory_name(split)]
    return f"a split becomes a directory, and cannot be called {bad[0]!r}" if bad else None


def _device(value: str) -> bool:
    return value.partition(":")[0] in ("auto", "cpu", "cuda", "mps")


_ONE, _NONE = _at_least(1), _at_least(0)

SHARED: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "dataset": Setting(str, check=_directory_name, text="data/<dataset>/ holds prepare_streaming.py and the queue"),
        "batch_size": Setting(int, check=_ONE, text="rows of a batch"),
        "block_size": Setting(int, check=_ONE, text="tokens of a row"),
        "seed": Setting(int, 0, check=_seed, text="batches and training depend on it alone"),
        "data_root": Setting(Path, Path("data"), text="the directory that holds the datasets"),
        "queue_dir": Setting(Path | None, None, text="the queue, if it is not data/<dataset>/queue"),
    }
)

PREPARE: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "backlog_files": Setting(int, 64, check=_ONE, text="files of a split that may wait for the trainer"),
        "backlog_bytes": Setting(ByteSize, "1 GiB", check=_ONE, text="bytes of a split that may wait for it"),
        "batches_per_file": Setting(int, 8, check=_ONE, text="batches of a file"),
        "compression": Setting(Literal["zstd"] | None, None, text="of the files"),
        "split_proportions": Setting(
            dict[str, float], {"train": 0.9, "val": 0.1}, check=_proportions, text="how much is made for which split"
        ),
        "max_batches": Setting(int | None, None, check=_optional(_ONE), text="stop after so many"),
    }
)

TRAIN: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "max_iters": Setting(int, 2000, check=_ONE, text="steps of training"),
        "learning_rate": Setting(float, 1e-3, check=_above(0), text="the highest one"),
        "min_lr": Setting(
            float | None, None, check=_optional(_NONE), text="the last one; None: a tenth of the highest"
        ),
        "warmup_iters": Setting(int, 100, check=_NONE, text="steps until the highest learning rate"),
        "lr_decay_iters": Setting(
            int | None, None, check=_optional(_ONE), text="step of the last one; None: max_iters"
        ),
        "weight_decay": Setting(float, 0.1, check=_NONE),
        "beta1": Setting(float, 0.9, check=_share, text="of AdamW"),
        "beta2": Setting(float, 0.99, check=_share, text="of AdamW"),
        "grad_clip": Setting(float, 1.0, check=_NONE, text="the largest norm of the gradient; 0: any"),
        "n_layer": Setting(int, 4, check=_ONE),
        "n_head": Setting(int, 4, check=_ONE),
        "n_embd": Setting(int, 128, check=_ONE),
        "dropout": Setting(float, 0.0, check=_share),
        "eval_interval": Setting(int, 250, check=_ONE, text="steps between two evaluations"),
        "eval_iters": Setting(int, 20, check=_NONE, text="batches of one"),
        "log_interval": Setting(int, 10, check=_ONE, text="steps between two lines"),
        "checkpoint_interval": Setting(int | None, None, check=_optional(_ONE), text="None: eval_interval"),
        "out_dir": Setting(Path | None, None, text="checkpoints and curves; None: out/<dataset>"),
        "resume": Setting(bool, True, text="go on from the checkpoint in out_dir, if there is one"),
        "on_bad": Setting(
            Literal["raise", "skip"], "raise", text="a file that cannot be read: stop, or go on without it and count"
        ),
        "device": Setting(str, "auto", check=_device, text="auto, cpu, cuda, cuda:0 or mps"),
        "dtype": Setting(Literal["float32", "bfloat16"], "float32", text="of the computations"),
    }
)

KNOWN: Final[Mapping[str, Setting]] = MappingProxyType({**SHARED, **PREPARE, **TRAIN})


def contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """What cannot go together, each value by itself being right."""
    if values["n_embd"] % values["n_head"]:
        yield f"n_embd = {values['n_embd']} is no multiple of n_head = {values['n_head']}; heads share it equally"
    if values["min_lr"] is not None and values["min_lr"] > values["learning_rate"]:
        yield f"min_lr = {values['min_lr']} is above learning_rate = {values['learning_rate']}"
