"""Shared config: a Python file, executed once, as a frozen value.

    # config/train_char_diffusion.py
    dataset = "char_diffusion"
    batch_size = 32
    block_size = 128
    max_iters = 2000
    lr_decay_iters = max_iters

Every name is a setting, except for names with a leading underscore, modules, functions and classes. A file can build
on another one (`from config.base import *`) and change its settings.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType, ModuleType
from typing import Any, Never, Self

from penstock._forks import renewed
from penstock._suggest import did_you_mean
from penstock._syntax import parse
from penstock.config.settings import KNOWN, Setting, check_settings, freeze, thaw
from penstock.errors import ConfigError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.types.conversion import Problems, from_text, kind_of

_IMPORT_LOCK = renewed(threading.RLock())  # sys.path and sys.modules are shared by all threads


def run_file(path: Path, after_statement: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The namespace that the file leaves; `after_statement` is called with it after each top-level statement.

    While it runs, files in the same directory can be imported, as `base` and as `config.base` from `config/train.py`.
    They are executed afresh each time and removed from `sys.modules` afterwards.
    """
    source = _read(path)
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _IMPORT_LOCK, _importable(path.absolute().parent):
        try:
            tree = parse(source, str(path))
            for statement in tree.body:
                part = ast.Module([statement], type_ignores=[])
                exec(compile(part, str(path), "exec", flags=_futures(tree), dont_inherit=True), namespace)
                after_statement(namespace)
        except (Exception, SystemExit) as error:
            raise broken(path, error) from error
    return namespace


def broken(path: Path, error: BaseException) -> ConfigError:
    """`config/train.py, line 3: NameError: ...`: the ConfigError to raise from an error of a user's file.

    The line is the innermost one in the file itself or in another file of its directory.
    """
    directory = path.absolute().parent
    if isinstance(error, ConfigError):
        problem = str(error)
    elif isinstance(error, SystemExit):
        problem = f"it called exit({'' if error.code is None else repr(error.code)}), which a config file must not"
    else:
        problem = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    if isinstance(error, SyntaxError) and error.filename and error.lineno and _is_in(error.filename, directory):
        if error.text and error.text.strip():
            problem += f": {error.text.strip()}"
        return ConfigError(f"{_shown(error.filename, path)}, line {error.lineno}: {problem}")
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(_shown(name, path), line) for name, line in frames if _is_in(name, directory)]
    return ConfigError(f"{own[-1][0]}, line {own[-1][1]}: {problem}" if own else f"{path}: {problem}")


def _read(path: Path) -> bytes:
    if path.suffix != ".py":
        raise ConfigError(f"a config is a Python file, with a name that ends in .py, got {str(path)!r}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        known = _configs_near(path.parent)
        hint = did_you_mean(str(path), known) or (f"; there is {', '.join(sorted(known)[:8])}" if known else "")
        raise ConfigError(f"no config file {str(path)!r}{hint}") from None
    except OSError as error:
        raise ConfigError(f"the config {str(path)!r} cannot be read: {error.strerror}") from error


def _configs_near(directory: Path) -> list[str]:
    """The Python files of a directory and of `config/` in it, except for the two commands themselves."""
    commands = [directory / "prepare.py", directory / "train.py"]
    excluded = commands if all(command.is_file() for command in commands) else []
    found = [*directory.glob("*.py"), *(directory / "config").glob("*.py")]
    return [str(file) for file in found if file not in excluded]


def _futures(tree: ast.Module) -> int:
    """The flags of `from __future__ import ...`, which statements compiled one by one would lose."""
    names = [a.name for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__" for a in s.names]
    return sum({getattr(__future__, name).compiler_flag for name in names if hasattr(__future__, name)})


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Files of the directory can be imported, by their own names and below the name of the directory."""
    before, written = set(sys.modules), sys.dont_write_bytecode
    places = [str(directory), str(directory.parent)]
    # At the end of the path: a config called `random.py` must not hide Python's own.
    sys.path.extend(places)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        # Before the path is restored: a namespace package looks there for its places.
        new = {name: sys.modules.get(name) for name in set(sys.modules) - before}
        own = [name for name, module in new.items() if _is_from(name.partition(".")[0], module, directory)]
        for place in places:
            with contextlib.suppress(ValueError):
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
        for name in own:
            del sys.modules[name]


def _is_from(top: str, module: Any, directory: Path) -> bool:
    """True if the module was found through the directory; an environment that lies below it does not count."""
    if top != directory.name and not (directory / f"{top}.py").exists() and not (directory / top).is_dir():
        return False
    file, places = getattr(module, "__file__", None), getattr(module, "__path__", None)
    found = [file] if file else [str(place) for place in places or []]
    return any(Path(each).absolute().is_relative_to(directory) for each in found)


def _is_in(name: str, directory: Path) -> bool:
    return Path(name).absolute().parent == directory


def _shown(name: str, path: Path) -> str:
    """A file name relative to the current directory, if the config was given so."""
    if path.is_absolute():
        return name
    with contextlib.suppress(ValueError):
        return str(Path(name).absolute().relative_to(Path.cwd()))
    return name


class SharedConfig(Mapping[str, Any]):
    """Immutable settings of a run, as a mapping and as attributes.

        SharedConfig(dataset="char_diffusion", batch_size=8, block_size=16).batch_size

    Configs are equal if their settings are.
    """

    __slots__ = ("_left_out", "_path", "_values")
    _left_out: Mapping[str, str]
    _path: Path | None
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        given = {**(values or {}), **more}
        frozen, problems = {}, Problems()
        for name, value in given.items():
            try:
                _check_name(name)
                frozen[name] = freeze(value, name)
            except ConfigError as error:
                problems.add(str(name), f"{error}; expected None, a number, text, a path, or lists and dicts of those")
        problems.check("the config")
        same = values if isinstance(values, SharedConfig) else None
        self._set(frozen, same._path if same is not None else None, same._left_out if same is not None else {})

    def _set(self, values: dict[str, Any], path: Path | None, left_out: Mapping[str, str]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_left_out", MappingProxyType(dict(left_out)))

    @property
    def path(self) -> Path | None:
        """The file of the config, if it was loaded."""
        return self._path

    @property
    def left_out(self) -> Mapping[str, str]:
        """Names of the file that are not settings, with the reason: `{"schedule": "is a function"}`."""
        return self._left_out

    def replace(self, **changes: Any) -> Self:
        """A copy with these settings changed."""
        return type(self)(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON copy: lists, dicts, text for paths."""
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
        raise AttributeError(f"a config is read-only; use config.replace({name}=...)")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError("a config is read-only")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return self._values == (other._values if isinstance(other, SharedConfig) else freeze(other))
        except ConfigError:
            return False

    __hash__ = None  # type: ignore[assignment]  # its dicts have none either

    def __repr__(self) -> str:
        return f"SharedConfig({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def _missing(self, name: str) -> str:
        where = str(self._path) if self._path is not None else "the config"
        if name in self._left_out:
            return f"{name!r} is not a setting: in {where} it {self._left_out[name]}"
        return f"no setting {name!r} in {where}{did_you_mean(str(name), self._values)}"


def load_shared_config(
    path: PathLike,
    overrides: Iterable[str] = (),
    *,
    settings: Mapping[str, Setting] = MappingProxyType({}),
) -> SharedConfig:
    """The settings of a Python file, with overrides of the command line (`"--batch_size=8"`).

    The file is executed statement by statement in a namespace of its own. An override replaces its setting as soon as
    the file sets it, so values computed from the setting follow. An override must name a setting of the file, of the
    two commands, or of `settings` (those of a provider), and have its kind. `penstock.config.validate` checks the rest.
    """
    path = require_local(path, "a config file")
    check_settings(settings, "the provider")
    override = _Overrides(overrides, {**KNOWN, **settings})
    namespace = run_file(path, override.apply)
    override.finish(namespace)
    problems = override.problems
    values, left_out = {}, {}
    for name, value in namespace.items():
        if name.startswith("_"):
            continue
        try:
            values[name] = freeze(value, name)
        except ConfigError as error:
            left_out[name] = "is a module" if isinstance(value, ModuleType) else str(error)
            continue
        try:
            _check_name(name)
        except ConfigError as error:
            problems.add(name, error)
    problems.check(str(path))
    config = SharedConfig()
    config._set(values, path, left_out)
    return config


_TAKEN = {name for name in dir(SharedConfig) if not name.startswith("_")}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ConfigError(f"expected the name of a variable without a leading underscore, got {name!r}")
    if name in _TAKEN:
        raise ConfigError(f"config.{name} is not a setting but an attribute of every config; choose another name")


def split_overrides(arguments: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The text of every `--name=text`, and the problems of the arguments. `--batch-size=8` means `batch_size` too."""
    found: dict[str, str] = {}
    problems = []
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.strip().replace("-", "_")
        if not argument.startswith("--") or not name.isidentifier() or name.startswith("_"):
            problems.append(f"expected --name=value, got {argument!r}")
        elif not equals:
            problems.append(f"{argument!r} has no value; write --{name}=value")
        elif name in found:
            problems.append(f"--{name} is given twice, as {found[name]!r} and {text!r}; give it once")
        else:
            found[name] = text
    return found, problems


class _Overrides:
    """Overrides for one execution of a file.

    The kind of a value is that of the setting, if there is one of that name, else that of the value in the file.
    """

    def __init__(self, arguments: Iterable[str], settings: Mapping[str, Setting]) -> None:
        self._settings = settings
        self._values: dict[str, Any] = {}
        self.problems = Problems()
        self._texts, self.problems.found = split_overrides(arguments)

    def apply(self, namespace: dict[str, Any]) -> None:
        """Replace what the last statement of the file has set."""
        for name, text in self._texts.items():
            if name in namespace and not (name in self._values and namespace[name] is self._values[name]):
                namespace[name] = self._value(name, text, namespace[name])

    def finish(self, namespace: dict[str, Any]) -> None:
        """Add known settings that the file does not set."""
        names = [name for name in namespace if not name.startswith("_")]
        for name, text in self._texts.items():
            if name in self._settings:
                namespace[name] = self._value(name, text, None)
            elif name not in self._values:
                hint = did_you_mean(name, [*self._settings, *names])
                self.problems.add(f"--{name}={text}", f"unknown setting{hint}")

    def _value(self, name: str, text: str, in_file: Any) -> Any:
        if name not in self._values:
            setting = self._settings.get(name)
            kind = setting.kind if setting is not None else kind_of(in_file)
            given = from_text(text, kind)
            try:
                converted = (setting or Setting(kind)).accept(freeze(given, name))
            except ConfigError as error:
                origin = "" if setting is not None else f" (the file has {name} = {in_file!r:.60})"
                self.problems.add(f"--{name}={text}", f"{error}{origin}")
                converted = given = in_file  # the rest of the file must not fail because of this
            # Converted numbers and paths, but containers as given: the file may append to a list.
            as_given = not isinstance(given, (int, float)) and not isinstance(in_file, PurePath)
            self._values[name] = given if as_given else converted
        return self._values[name]


class TrackedConfig(SharedConfig):
    """Config that records in `read` the names that were read."""

    __slots__ = ("read",)
    read: set[str]

    def __init__(self, values: Any = None, /, **more: Any) -> None:
        object.__setattr__(self, "read", set())
        super().__init__(values, **more)
        self.read.clear()  # the copy has read them all

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(name)
        return value

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        self.read.add(name)
        return value
