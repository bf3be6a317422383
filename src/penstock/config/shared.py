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
import __future__

import ast
import contextlib
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Never, Self

from penstock._suggest import did_you_mean
from penstock.config.overrides import Overrides
from penstock.config.settings import KNOWN, Setting, check_settings
from penstock.config.values import NotPlain, freeze, thaw
from penstock.errors import ConfigError
from penstock.files.listing import PathLike

__all__ = ["SharedConfig", "TrackedConfig", "broken", "load_shared_config", "problems_with", "run_file"]


_ONE_AT_A_TIME = threading.RLock()  # what can be imported is the same for all threads of a process


def run_file(path: Path, after_statement: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The names that the file leaves behind; `after_statement` is called with them after each of its statements.

    While it runs, the files beside it can be imported, as `base` and as `config.base` from `config/train.py`; they
    too are run afresh each time, and are gone from `sys.modules` afterwards.
    """
    source = _read(path)
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _ONE_AT_A_TIME, _neighbours(path.absolute().parent):
        try:
            tree = ast.parse(source, str(path))
            for statement in tree.body:
                part = ast.Module([statement], type_ignores=[])
                exec(compile(part, str(path), "exec", flags=_futures(tree), dont_inherit=True), namespace)
                after_statement(namespace)
        except (Exception, SystemExit) as error:
            raise broken(path, error) from error
    return namespace


def broken(path: Path, error: BaseException) -> ConfigError:
    """`config/train.py, line 3: NameError: ...`: what to raise from an error that a file of the user's raised.

    The line is the innermost one in the file itself or in those beside it.
    """
    home = path.absolute().parent
    if isinstance(error, ConfigError):
        what = str(error)
    elif isinstance(error, SystemExit):
        what = f"it called exit({'' if error.code is None else repr(error.code)}); a file that is only read must not"
    else:
        what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    if isinstance(error, SyntaxError) and error.filename and error.lineno and _beside(error.filename, home):
        place = f"{_shown(error.filename, path)}, line {error.lineno}"
        if error.text and error.text.strip():
            what += f": {error.text.strip()}"
        return ConfigError(f"{place}: {what}")
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(_shown(name, path), line) for name, line in frames if _beside(name, home)]
    return ConfigError(f"{own[-1][0]}, line {own[-1][1]}: {what}" if own else f"{path}: {what}")


def _read(path: Path) -> bytes:
    if path.suffix != ".py":
        raise ConfigError(f"a config is a file of Python, with a name that ends in .py, got {str(path)!r}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        beside = _configs_near(path.parent)
        there = did_you_mean(str(path), beside) or (f"; there is {', '.join(sorted(beside)[:8])}" if beside else "")
        raise ConfigError(f"no config file {str(path)!r}{there}") from None
    except OSError as error:
        raise ConfigError(f"the config {str(path)!r} cannot be read: {error.strerror}") from error


def _configs_near(directory: Path) -> list[str]:
    """The files of a directory, and of `config/` in it, but for the two commands themselves."""
    commands = [directory / "prepare.py", directory / "train.py"]
    left_out = commands if all(command.is_file() for command in commands) else []
    found = [*directory.glob("*.py"), *(directory / "config").glob("*.py")]
    return [str(file) for file in found if file not in left_out]


def _futures(tree: ast.Module) -> int:
    """The flags of `from __future__ import ...`, which a statement compiled by itself would not know of."""
    names = [a.name for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__" for a in s.names]
    return sum({getattr(__future__, name).compiler_flag for name in names if hasattr(__future__, name)})


@contextlib.contextmanager
def _neighbours(home: Path) -> Iterator[None]:
    """Files in this directory can be imported, by their names and by those of the directory and theirs."""
    before, written = set(sys.modules), sys.dont_write_bytecode
    places = [str(home), str(home.parent)]
    # At the end: a config called `random.py` must not get in the way of those who want the library's.
    sys.path.extend(places)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        # Before the path is as it was: a package without a file of its own looks there for its places.
        new = {name: sys.modules.get(name) for name in set(sys.modules) - before}
        gone = [name for name, module in new.items() if _is_neighbour(name.partition(".")[0], module, home)]
        for place in places:
            with contextlib.suppress(ValueError):
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
        for name in gone:
            del sys.modules[name]


def _is_neighbour(top: str, module: Any, home: Path) -> bool:
    """Whether it was found in the directory: what merely lies somewhere below it, as an environment may, was not."""
    if top != home.name and not (home / f"{top}.py").exists() and not (home / top).is_dir():
        return False
    file, places = getattr(module, "__file__", None), getattr(module, "__path__", None)
    found = [file] if file else [str(place) for place in places or []]
    return any(Path(each).absolute().is_relative_to(home) for each in found)


def _beside(name: str, home: Path) -> bool:
    return Path(name).absolute().parent == home


def _shown(name: str, path: Path) -> str:
    """A file name as short as the user's own way of naming the config."""
    if path.is_absolute():
        return name
    with contextlib.suppress(ValueError):
        return str(Path(name).absolute().relative_to(Path.cwd()))
    return name


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


class TrackedConfig(SharedConfig):
    """The same settings; `read` has the names that were asked for so far."""

    __slots__ = ("read",)
    read: set[str]

    def __init__(self, values: Any = None, /, **more: Any) -> None:
        object.__setattr__(self, "read", set())
        super().__init__(values, **more)
        self.read.clear()  # making the copy read them all

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(name)
        return value

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        self.read.add(name)
        return value
