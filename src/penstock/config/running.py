"""A file of Python, run in a namespace of its own, and what is said if it raises."""

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

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError

__all__ = ["broken", "run_file"]

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
