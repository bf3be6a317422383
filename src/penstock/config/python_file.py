"""Execution of a Python config file in a namespace of its own."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError

__all__ = ["broken", "run_file"]

_IMPORT_LOCK = threading.RLock()  # sys.path and sys.modules are shared by all threads


def run_file(path: Path, after_statement: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The namespace that the file leaves; `after_statement` is called with it after each top-level statement.

    While it runs, files in the same directory can be imported, as `base` and as `config.base` from `config/train.py`.
    They are executed afresh each time and removed from `sys.modules` afterwards.
    """
    source = _read(path)
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _IMPORT_LOCK, _importable(path.absolute().parent):
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
