"""From a dataset's name to its provider: the class in `data/<dataset>/prepare_streaming.py`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import xxhash

from penstock._suggest import did_you_mean
from penstock.config.python_file import broken
from penstock.errors import ConfigError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.provider import DataProviderBase

__all__ = ["DatasetNotFoundError", "find_provider", "load_provider"]

_FILE = "prepare_streaming.py"
_SYMBOL = "Provider"


class DatasetNotFoundError(ConfigError):
    """There is no such dataset here, or it has no provider."""


def find_provider(dataset: str, data_root: PathLike = "data") -> type[DataProviderBase]:
    """The provider class of a dataset; raises ConfigError, saying what is there, if there is none."""
    root = require_local(data_root, "data_root")
    if Path(dataset).name != dataset or dataset in ("", ".."):
        raise ConfigError(f"dataset is the name of a directory in {root}, without slashes, got {dataset!r}")
    if not root.is_dir():
        raise DatasetNotFoundError(
            f"no directory {str(root)!r} for the dataset {dataset!r}; run the command where it is, or set data_root"
        )
    directory = root / dataset
    if not directory.is_dir():
        known = sorted(file.parent.name for file in root.glob(f"*/{_FILE}"))
        there = f"there are: {', '.join(known)}" if known else f"there is none yet with a {_FILE}"
        raise DatasetNotFoundError(f"no dataset {dataset!r} in {root}; {there}{did_you_mean(dataset, known)}")
    if not (directory / _FILE).is_file():
        others = sorted(file.name for file in directory.glob("*.py"))
        raise DatasetNotFoundError(
            f"the dataset {dataset!r} has no {directory / _FILE}; write the subclass of DataProviderBase there"
            + did_you_mean(_FILE, others)
        )
    return load_provider(directory / _FILE)


def load_provider(path: PathLike) -> type[DataProviderBase]:
    """The class that a file calls `Provider`, or else the only subclass of DataProviderBase that it defines.

    The file is imported afresh, under a name of its own; `sys.path` stays as it is. It is a package together with its
    neighbours, whenever they are imported: `from .vocabulary import Vocabulary`.
    """
    path = Path(path)
    module = _import(path)
    if hasattr(module, _SYMBOL):
        chosen = getattr(module, _SYMBOL)
        if not _is_provider(chosen):
            what = f"the class {chosen.__name__}" if isinstance(chosen, type) else f"{chosen!r:.60}"
            raise ConfigError(f"{path}: {_SYMBOL} is {what}; expected a subclass of DataProviderBase")
        _check_complete(chosen, path)
        return chosen
    defined = list(
        dict.fromkeys(v for v in vars(module).values() if _is_provider(v) and v.__module__ == module.__name__)
    )
    whole = [each for each in defined if not inspect.isabstract(each)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        names = ", ".join(each.__name__ for each in whole)
        raise ConfigError(
            f"{path} defines {len(whole)} subclasses of DataProviderBase ({names}); say which one to use: "
            f"{_SYMBOL} = {whole[0].__name__}"
        )
    for each in defined:
        _check_complete(each, path)
    imported = sorted(name for name, value in vars(module).items() if _is_provider(value))
    hint = f"; {imported[0]} is imported: to use it, write {_SYMBOL} = {imported[0]}" if imported else ""
    raise ConfigError(f"{path} defines no subclass of DataProviderBase{hint}")


def _is_provider(value: object) -> TypeGuard[type[DataProviderBase]]:
    return isinstance(value, type) and issubclass(value, DataProviderBase) and value is not DataProviderBase


def _check_complete(provider: type[DataProviderBase], path: Path) -> None:
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        raise ConfigError(f"{path}: {provider.__name__} has to define {' and '.join(missing)}")


def _import(path: Path) -> ModuleType:
    """The module, in a package made for its directory."""
    home = path.absolute().parent
    package_name = f"penstock_dataset_{xxhash.xxh3_64_hexdigest(str(home).encode())}"
    for name in [name for name in sys.modules if name == package_name or name.startswith(f"{package_name}.")]:
        del sys.modules[name]  # it may have been edited since
    package = ModuleType(package_name)
    package.__path__ = [str(home)]
    name = f"{package_name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package_name], sys.modules[name] = package, module
    importlib.invalidate_caches()
    try:
        # Not by its loader, which takes a file for unchanged that was edited within a second.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        for own in [own for own in sys.modules if own == package_name or own.startswith(f"{package_name}.")]:
            del sys.modules[own]
        raise _with_remedy(broken(path, error), error, home) from error
    return module


def _with_remedy(said: ConfigError, error: BaseException, home: Path) -> ConfigError:
    """A neighbour that was imported as if it were installed can be had, by another line."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or not ((home / f"{name}.py").is_file() or (home / name).is_dir()):
        return said
    return ConfigError(f"{said}; to import {home.name}/{name}, write `from .{name} import ...`, with the dot")
