"""Settings of the shared config: kinds, defaults and checks; and the frozen plain values that they hold."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PureWindowsPath
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Never

import numpy as np

from penstock.errors import ConfigError
from penstock.memory.budget import parse_bytes
from penstock.types.conversion import convert, in_words, is_convertible


class FrozenDict(dict[Any, Any]):
    """Read-only dict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Never:
        raise TypeError("the values of a config are read-only; change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any, where: str = "") -> Any:
    """An immutable copy of a plain value: lists become tuples, dicts read-only, sets frozen.

    Plain values are None, bools, numbers, text, paths, and lists, tuples, sets and dicts of those. A NumPy scalar
    becomes its number. Raises ConfigError for anything else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a text enum, not its name
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, PurePath):
        return Path(value)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item, f"{where}[{number}]") for number, item in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(item, where) for item in value)
    if isinstance(value, Mapping):
        return FrozenDict({freeze(key, where): freeze(item, f"{where}[{key!r}]") for key, item in value.items()})
    raise ConfigError(f"{where + ' ' if '[' in where else ''}is {_type_name(value)}")


def thaw(value: Any) -> Any:
    """A JSON copy of a frozen value: lists, dicts, text for paths, sorted lists for sets."""
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    if isinstance(value, frozenset):
        return [thaw(item) for item in sorted(value, key=repr)]
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    return str(value) if isinstance(value, PurePath) else value


def _type_name(value: Any) -> str:
    if callable(value):
        return "a class" if isinstance(value, type) else "a function"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a value of type {name}"


class ByteSize:
    """Kind of a size in bytes: a number, or text with a unit (`"256 MiB"`). The value becomes the number."""

    expected: ClassVar[str] = "a number of bytes such as 268435456 or '256 MiB'"

    @staticmethod
    def from_plain(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ConfigError(f"expected {ByteSize.expected}, got {value!r}")
        return parse_bytes(value)


class _Required(enum.Enum):
    REQUIRED = "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required.REQUIRED
"""Default of a setting that every config must have."""


@dataclass(frozen=True)
class Setting:
    """One setting of the shared config: its kind, default, check and description.

        settings = {"mask_probability": Setting(float, 0.15, check=lambda p: 0 < p <= 1, text="above 0, at most 1")}

    `kind` is a type or an annotation (`penstock.types.conversion`). `check` gets a value of that kind and returns True
    or None if it is valid, else False or a message.
    """

    kind: Any
    default: Any = REQUIRED
    check: Callable[[Any], bool | str | None] | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not is_convertible(self.kind):
            raise ConfigError(
                f"kind: expected int, float, bool, str, Path, list, tuple, set, dict, Literal[...], Any, or a union of "
                f"them, got {self.kind!r}"
            )
        if self.default is REQUIRED:
            return
        try:
            object.__setattr__(self, "default", convert(freeze(self.default), self.kind))
        except ConfigError as error:
            raise ConfigError(f"default {self.default!r} of a setting: {error}") from None

    @property
    def required(self) -> bool:
        """True if the setting has no default."""
        return self.default is REQUIRED

    def accept(self, value: Any) -> Any:
        """The value, converted and checked; raises ConfigError."""
        converted = convert(value, self.kind)
        if self.check is None:
            return converted
        try:
            verdict = self.check(converted)
        except Exception as error:
            raise ConfigError(f"its check raised {type(error).__name__}: {error}") from error
        if isinstance(verdict, str) and verdict:
            raise ConfigError(verdict)
        if verdict is not None and verdict != "" and not verdict:
            raise ConfigError(f"expected {self.text or in_words(self.kind)}")
        return converted


def check_settings(settings: Mapping[str, Setting], owner: str) -> None:
    """Raise ConfigError unless these are names and settings."""
    for name, setting in settings.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ConfigError(f"{owner}.settings: expected the name of a variable, got {name!r}")
        if not isinstance(setting, Setting):
            raise ConfigError(f"{owner}.settings[{name!r}] is {setting!r}; write Setting(kind, default)")


def _at_least(low: float) -> Callable[[Any], str | None]:
    return lambda value: None if value is None or value >= low else f"expected {low} or more"


def _positive(value: float) -> str | None:
    return None if 0 < value < float("inf") else "expected a number above 0"


def _share(value: float) -> str | None:
    return None if 0 <= value < 1 else "expected 0 or more, and less than 1"


def _seed(value: int) -> str | None:
    return None if 0 <= value < 2**63 else "expected 0 or more, and less than 2**63"


def _directory_name(value: str) -> str | None:
    plain = value == PureWindowsPath(value).name == Path(value).name and value.strip() == value
    if value and plain and value.isprintable() and not value.startswith(".") and ":" not in value:
        return None
    return "expected the name of a directory in data/, without slashes or a leading dot"


def _proportions(value: Mapping[str, float]) -> str | None:
    if not value or not all(0 <= share < float("inf") for share in value.values()) or not any(value.values()):
        return "expected a share for every split, none below 0 and one above, such as {'train': 0.9, 'val': 0.1}"
    bad = [split for split in value if _directory_name(split)]
    return f"split {bad[0]!r}: expected the name of a directory" if bad else None


def _device(value: str) -> bool:
    return value.partition(":")[0] in ("auto", "cpu", "cuda", "mps")


_ONE, _ZERO = _at_least(1), _at_least(0)

SHARED: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "dataset": Setting(str, check=_directory_name, text="data/<dataset>/ holds prepare_streaming.py and the queue"),
        "batch_size": Setting(int, check=_ONE, text="rows per batch"),
        "block_size": Setting(int, check=_ONE, text="tokens per row"),
        "seed": Setting(int, 0, check=_seed, text="seed of the batches and of training"),
        "data_root": Setting(Path, Path("data"), text="directory of the datasets"),
        "queue_dir": Setting(Path | None, None, text="queue directory; None: data/<dataset>/queue"),
        "metrics": Setting(str | None, None, text="where metrics go: prometheus://:9464, a path; see docs/metrics.md"),
    }
)

PREPARE: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "backlog_files": Setting(int, 64, check=_ONE, text="most files of a split in the backlog"),
        "backlog_bytes": Setting(ByteSize, "1 GiB", check=_ONE, text="most bytes of a split in the backlog"),
        "batches_per_file": Setting(int, 8, check=_ONE, text="batches per file"),
        "compression": Setting(Literal["zstd"] | None, None, text="compression of the files"),
        "split_proportions": Setting(
            dict[str, float], {"train": 0.9, "val": 0.1}, check=_proportions, text="share of each split"
        ),
        "max_batches": Setting(int | None, None, check=_ONE, text="stop after this many batches"),
    }
)

TRAIN: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "max_iters": Setting(int, 2000, check=_ONE, text="steps of training"),
        "learning_rate": Setting(float, 1e-3, check=_positive, text="highest learning rate"),
        "min_lr": Setting(float | None, None, check=_ZERO, text="final learning rate; None: a tenth of learning_rate"),
        "warmup_iters": Setting(int, 100, check=_ZERO, text="steps of warm-up"),
        "lr_decay_iters": Setting(
            int | None, None, check=_ONE, text="step at which min_lr is reached; None: max_iters"
        ),
        "weight_decay": Setting(float, 0.1, check=_ZERO),
        "beta1": Setting(float, 0.9, check=_share, text="AdamW"),
        "beta2": Setting(float, 0.99, check=_share, text="AdamW"),
        "grad_clip": Setting(float, 1.0, check=_ZERO, text="maximum gradient norm; 0: no clipping"),
        "n_layer": Setting(int, 4, check=_ONE),
        "n_head": Setting(int, 4, check=_ONE),
        "n_embd": Setting(int, 128, check=_ONE),
        "dropout": Setting(float, 0.0, check=_share),
        "eval_interval": Setting(int, 250, check=_ONE, text="steps between evaluations"),
        "eval_iters": Setting(int, 20, check=_ZERO, text="batches per evaluation"),
        "log_interval": Setting(int, 10, check=_ONE, text="steps between log lines"),
        "checkpoint_interval": Setting(int | None, None, check=_ONE, text="None: eval_interval"),
        "out_dir": Setting(Path | None, None, text="directory of checkpoints and curves; None: out/<dataset>"),
        "resume": Setting(bool, True, text="resume from the checkpoint in out_dir, if there is one"),
        "on_error": Setting(Literal["raise", "skip"], "raise", text="unreadable file: stop, or skip and count it"),
        "device": Setting(str, "auto", check=_device, text="auto, cpu, cuda, cuda:0 or mps"),
        "dtype": Setting(Literal["float32", "bfloat16"], "float32", text="dtype of the computation"),
    }
)

KNOWN: Final[Mapping[str, Setting]] = MappingProxyType({**SHARED, **PREPARE, **TRAIN})


def conflicts(values: Mapping[str, Any]) -> Iterator[str]:
    """Problems with combinations of values."""
    if values["n_embd"] % values["n_head"]:
        yield f"n_embd = {values['n_embd']} is no multiple of n_head = {values['n_head']}"
    if values["min_lr"] is not None and values["min_lr"] > values["learning_rate"]:
        yield f"min_lr = {values['min_lr']} is above learning_rate = {values['learning_rate']}"
