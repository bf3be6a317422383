"""The config that both commands read: a file of Python, run once, as a value that cannot be changed.

    # config/train_char_diffusion.py
    dataset = "char_diffusion"
    batch_size = 32
    block_size = 128
    max_iters = 2000
    lr_decay_iters = max_iters

Every name is a setting, but for those with a leading underscore, modules, functions and classes. A file can take over
another one (`from config.base import *`) and change what it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Never, Self

from penstock._dtypes import did_you_mean
from penstock.config.known import KNOWN
from penstock.config.overrides import Overrides
from penstock.config.running import run_file
from penstock.config.settings import Setting, check_settings
from penstock.config.values import NotPlain, freeze, thaw
from penstock.errors import ConfigError
from penstock.files.listing import PathLike

__all__ = ["SharedConfig", "load_shared_config", "problems_with"]


class SharedConfig(Mapping[str, Any]):
    """The settings of a run, by name and as attributes; neither they nor what they hold can be changed.

        SharedConfig(dataset="char_diffusion", batch_size=8, block_size=16).batch_size

    Two are equal if their settings are. `path` is the file they come from, if any.
    """

    __slots__ = ("_left_out", "_path", "_values")
    _left_out: Mapping[str, str]
    _path: Path | None
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        given = {**(values or {}), **more}
        problems = [_name_problem(name) for name in given]
        frozen = {}
        for name, value in given.items():
            try:
                frozen[name] = freeze(value, name)
            except NotPlain as error:
                problems.append(
                    f"{name}: {error}; a setting is None, a number, text, a path, or lists and dicts of those"
                )
        if found := [problem for problem in problems if problem]:
            raise problems_with("the config", found)
        same = values if isinstance(values, SharedConfig) else None
        self._set(frozen, same._path if same is not None else None, same._left_out if same is not None else {})

    def _set(self, values: dict[str, Any], path: Path | None, left_out: Mapping[str, str]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_left_out", MappingProxyType(dict(left_out)))

    @property
    def path(self) -> Path | None:
        """The file it was loaded from."""
        return self._path

    @property
    def left_out(self) -> Mapping[str, str]:
        """Names of the file that are no settings, with the reason: `{"schedule": "is a function"}`."""
        return self._left_out

    def replace(self, **changes: Any) -> Self:
        """The same settings but for these."""
        return type(self)(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A copy that JSON can hold and anybody may change: lists, dicts, text for paths."""
        return {name: thaw(value) for name, value in self._values.items()}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(self._missing(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(self._missing(name), name=name, obj=self)
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> Never:
        raise AttributeError(f"a config cannot be changed; make another with config.replace({name}=...)")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError("a config cannot be changed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return self._values == (other._values if isinstance(other, SharedConfig) else freeze(other))
        except NotPlain:
            return False

    __hash__ = None  # type: ignore[assignment]  # its dicts have none either

    def __repr__(self) -> str:
        return f"SharedConfig({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def _missing(self, name: str) -> str:
        where = str(self._path) if self._path is not None else "the config"
        if name in self._left_out:
            return f"{name!r} is no setting: in {where} it {self._left_out[name]}"
        return f"no setting {name!r} in {where}{did_you_mean(str(name), self._values)}"


def load_shared_config(
    path: PathLike,
    overrides: Iterable[str] = (),
    *,
    settings: Mapping[str, Setting] = MappingProxyType({}),
) -> SharedConfig:
    """The settings of a file, with those of the command line (`"--batch_size=8"`) in their places.

    The file is run in a namespace of its own, statement by statement, and an override takes its place as soon as the
    file sets its name: what is worked out from it follows. An override must name a setting of the file, of the two
    commands, or of `settings` (those a provider declares), and be of its kind. Nothing is checked yet beyond that:
    see `penstock.config.validate`.
    """
    path = Path(path)
    check_settings(settings, "the provider")
    override = Overrides(overrides, {**KNOWN, **settings})
    namespace = run_file(path, override.apply)
    override.finish(namespace)
    problems = list(override.problems)
    values, left_out = {}, {}
    for name, value in namespace.items():
        if name.startswith("_"):
            continue
        try:
            values[name] = freeze(value, name)
        except NotPlain as error:
            left_out[name] = "is a module" if isinstance(value, ModuleType) else str(error)
    problems += [problem for name in values if (problem := _name_problem(name))]
    if problems:
        raise problems_with(str(path), problems)
    config = SharedConfig()
    config._set(values, path, left_out)
    return config


def problems_with(what: str, problems: list[str]) -> ConfigError:
    """One error that says everything that is wrong, a line each."""
    if len(problems) == 1:
        return ConfigError(f"{what}: {problems[0]}")
    return ConfigError(f"{what} has {len(problems)} problems:" + "".join(f"\n  {problem}" for problem in problems))


_TAKEN = {name for name in dir(SharedConfig) if not name.startswith("_")}


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return f"a setting has the name of a variable without a leading underscore, got {name!r}"
    if name in _TAKEN:
        return f"{name}: a config has that name for something else (config.{name}); choose another"
    return None
