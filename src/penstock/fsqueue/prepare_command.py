"""`python prepare.py CONFIG.py [--name=value ...]`: find the provider of a config's dataset, and fill its queue."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self, TypeGuard

import xxhash
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock._amounts import counted
from penstock._suggest import did_you_mean
from penstock.config.settings import PREPARE, SHARED, ByteSize, Setting
from penstock.config.shared import SharedConfig, broken, load_shared_config, split_overrides
from penstock.config.validator import validate
from penstock.errors import ConfigError, PenstockError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.provider import PROVIDER_FILE, DataProviderBase, ProviderProgress
from penstock.memory.budget import format_bytes
from penstock.types.conversion import in_words

_PROVIDER_NAME = "Provider"
_LOCATION = ("dataset", "data_root")
_RATE_SECONDS = 5.0
_EVERY_SECONDS, _IDLE_SECONDS = 5.0, 60.0
"""Time between lines of progress, and between those that say that nothing was published."""
_USAGE = "usage: python prepare.py CONFIG.py [--name=value ...] [--debug]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: stopped, or `max_batches` published. 1: an error, on standard error. 2: a wrong command line. 130, 143: stopped
    by a second Ctrl-C or SIGTERM, in the middle of a file.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_help())
        return 0
    paths = [argument for argument in arguments if not argument.startswith("-")]
    overrides = [argument for argument in arguments if argument.startswith("-") and argument != "--debug"]
    console = Console(stderr=True)
    if len(paths) != 1:
        given = "none" if not paths else " and ".join(map(repr, paths))
        hint = f"; settings are given as --name=value: {paths[1]!r}" if len(paths) > 1 else ""
        _print(console, f"prepare.py: expected one config file, got {given}{hint}\n{_USAGE}")
        return 2
    try:
        with _log_lines(console):
            provider = make_provider(paths[0], overrides)
            _print(console, _introduction(provider))
            with ProgressLines(console) as lines, _StopSignals(provider) as signals:

                def on_progress(progress: ProviderProgress) -> None:
                    signals.repeat()
                    lines(progress)

                progress = provider.run(on_progress=on_progress)
    except KeyboardInterrupt as stopped:
        _print(console, "prepare.py: stopped at once; the next provider produces the unfinished file")
        return 143 if stopped.args == (signal.SIGTERM,) else 130
    except (PenstockError, OSError) as error:
        if "--debug" in arguments:
            traceback.print_exception(error)
        _print(console, f"prepare.py: {_message(error)}")
        return 1
    _print(console, f"prepare.py: {summary(progress)}")
    return 0


def make_provider(path: PathLike, overrides: Sequence[str] = ()) -> DataProviderBase:
    """The provider of the dataset that a config names, with that config."""
    config, provider_class = read_config(path, overrides)
    return provider_class(config)


def read_config(path: PathLike, overrides: Sequence[str] = ()) -> tuple[SharedConfig, type[DataProviderBase]]:
    """A config with overrides of the command line, and the provider of its dataset.

    With overrides the file is run twice: only the provider knows which settings they may name.
    """
    given, _ = split_overrides(overrides)
    # Only the overrides that locate the provider; problems of the others are reported below, all at once.
    config = load_shared_config(path, [f"--{name}={given[name]}" for name in _LOCATION if name in given])
    try:
        dataset = SHARED["dataset"].accept(config["dataset"])
        data_root = SHARED["data_root"].accept(config.get("data_root", "data"))
    except (KeyError, ConfigError):
        validate(config)  # reports every problem
        raise
    provider_class = find_provider(dataset, data_root)
    if overrides:
        config = load_shared_config(path, overrides, settings=provider_class.settings)
    return config, provider_class


# -- provider --------------------------------------------------------------------------------------------------------


class DatasetNotFoundError(ConfigError):
    """Dataset that does not exist, or has no provider."""


def find_provider(dataset: str, data_root: PathLike = "data") -> type[DataProviderBase]:
    """Provider class of a dataset: the one in `data/<dataset>/prepare_streaming.py`."""
    root = require_local(data_root, "data_root")
    if Path(dataset).name != dataset or dataset in ("", ".."):
        raise ConfigError(f"dataset must be the name of a directory in {root}, without slashes, got {dataset!r}")
    if not root.is_dir():
        raise DatasetNotFoundError(
            f"no directory {str(root)!r} for the dataset {dataset!r}; run the command in its parent, or set data_root"
        )
    directory = root / dataset
    if not directory.is_dir():
        known = sorted(file.parent.name for file in root.glob(f"*/{PROVIDER_FILE}"))
        there = f"there are: {', '.join(known)}" if known else f"none has a {PROVIDER_FILE}"
        raise DatasetNotFoundError(f"no dataset {dataset!r} in {root}; {there}{did_you_mean(dataset, known)}")
    if not (directory / PROVIDER_FILE).is_file():
        others = sorted(file.name for file in directory.glob("*.py"))
        raise DatasetNotFoundError(
            f"the dataset {dataset!r} has no {directory / PROVIDER_FILE}; write the subclass of DataProviderBase there"
            + did_you_mean(PROVIDER_FILE, others)
        )
    return load_provider(directory / PROVIDER_FILE)


def load_provider(path: PathLike) -> type[DataProviderBase]:
    """Class that a file names `Provider`, or else the only subclass of DataProviderBase that it defines.

    The file is imported anew, in a package of its directory, so that it can import its neighbours:
    `from .vocabulary import Vocabulary`. `sys.path` does not change.
    """
    path = Path(path)
    module = _import(path)
    if hasattr(module, _PROVIDER_NAME):
        chosen = getattr(module, _PROVIDER_NAME)
        if not _is_provider(chosen):
            what = f"the class {chosen.__name__}" if isinstance(chosen, type) else f"{chosen!r:.60}"
            raise ConfigError(f"{path}: {_PROVIDER_NAME} is {what}; expected a subclass of DataProviderBase")
        _check_complete(chosen, path)
        return chosen
    defined = list(
        dict.fromkeys(v for v in vars(module).values() if _is_provider(v) and v.__module__ == module.__name__)
    )
    complete = [each for each in defined if not inspect.isabstract(each)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        names = ", ".join(each.__name__ for each in complete)
        raise ConfigError(
            f"{path} defines {len(complete)} subclasses of DataProviderBase ({names}); choose one: "
            f"{_PROVIDER_NAME} = {complete[0].__name__}"
        )
    for each in defined:
        _check_complete(each, path)
    imported = sorted(name for name, value in vars(module).items() if _is_provider(value))
    hint = f"; to use the imported {imported[0]}, write {_PROVIDER_NAME} = {imported[0]}" if imported else ""
    raise ConfigError(f"{path} defines no subclass of DataProviderBase{hint}")


def _is_provider(value: object) -> TypeGuard[type[DataProviderBase]]:
    return isinstance(value, type) and issubclass(value, DataProviderBase) and value is not DataProviderBase


def _check_complete(provider: type[DataProviderBase], path: Path) -> None:
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        raise ConfigError(f"{path}: {provider.__name__} must define {' and '.join(missing)}")


def _import(path: Path) -> ModuleType:
    """Import a file as a module of a package made for its directory."""
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
        # Without its loader, which takes a file that was edited within a second for unchanged.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        for own in [own for own in sys.modules if own == package_name or own.startswith(f"{package_name}.")]:
            del sys.modules[own]
        raise _with_remedy(broken(path, error), error, home) from error
    return module


def _with_remedy(broken_file: ConfigError, error: BaseException, home: Path) -> ConfigError:
    """Add how to import a neighbour that was imported as if it were installed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or not ((home / f"{name}.py").is_file() or (home / name).is_dir()):
        return broken_file
    return ConfigError(f"{broken_file}; to import {home.name}/{name}, write `from .{name} import ...`, with the dot")


# -- progress and messages -------------------------------------------------------------------------------------------


class ProgressLines:
    """Progress on a terminal; elsewhere a line every few seconds, and fewer while nothing is published."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = _Rate()
        self._shown_at = 0.0
        self._shown_batches = -1
        # Without a refresh thread: only progress changes the line.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: ProviderProgress) -> None:
        rate = self._rate.add(progress)
        line = progress_line(progress, rate)
        if self._live is not None:
            self._live.update(Text(line, style="cyan"), refresh=True)
            return
        batches = sum(progress.batches.values())
        due = _EVERY_SECONDS if batches != self._shown_batches else _IDLE_SECONDS
        if progress.seconds - self._shown_at >= due:
            self._shown_at, self._shown_batches = progress.seconds, batches
            self._console.print(f"prepare.py: {line}", markup=False, highlight=False, soft_wrap=True)


def progress_line(progress: ProviderProgress, batches_per_second: float) -> str:
    """`train 128, val 16 batches in 18 files, 12.5 MiB, 45.2 batches/s; backlog train 16, val 2 files; waiting ...`."""
    parts = [
        f"{_published(progress)}, {batches_per_second:,.1f} batches/s",
        f"backlog {_by_split(progress.backlog)} files",
    ]
    if progress.waiting:
        parts.append("waiting for the trainer to read")
    return "; ".join(parts)


def summary(progress: ProviderProgress) -> str:
    """Last line of a run."""
    return f"done: {_published(progress)}, in {progress.seconds:,.1f} s"


def _published(progress: ProviderProgress) -> str:
    files = sum(progress.files.values())
    return f"{_by_split(progress.batches)} batches in {counted(files, 'file')}, {format_bytes(progress.bytes)}"


def _by_split(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in counts.items()) or "0"


class _Rate:
    """Batches per second over the last few seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, progress: ProviderProgress) -> float:
        now, batches = progress.seconds, sum(progress.batches.values())
        self._points.append((now, batches))
        while len(self._points) > 2 and self._points[1][0] <= now - _RATE_SECONDS:
            self._points.popleft()
        then, before = self._points[0]
        return (batches - before) / (now - then) if now > then else 0.0


class _StopSignals:
    """Ctrl-C or SIGTERM: the first lets the provider finish its file, the second stops it at once, a third kills."""

    def __init__(self, provider: DataProviderBase) -> None:
        self._provider = provider
        self._previous: dict[int, Any] = {}
        self._requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def repeat(self) -> None:
        """Stop the provider again: the signal may have come before it started."""
        if self._requested:
            self._provider.stop()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            for each in self._previous:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number))
        self._requested = True
        self._provider.stop()
        # Not through the console: the signal may have interrupted it while it holds its lock.
        with contextlib.suppress(OSError):
            os.write(2, b"\nprepare.py: stopping when this file is done; once more to stop at once\n")


def _introduction(provider: DataProviderBase) -> str:
    config = provider.config
    total = sum(provider.proportions.values())
    compression = f", {config['compression']}" if config["compression"] else ""
    rows = {
        "dataset": f"{provider.dataset} ({provider.data_dir}), made by {type(provider).__name__}",
        "queue": provider.queue_dir,
        "seed": provider.seed,
        "batches": f"{provider.batch_size} rows of {provider.block_size}",
        "files": f"{config['batches_per_file']} batches each{compression}",
        "splits": ", ".join(f"{split} {share / total:.0%}" for split, share in provider.proportions.items()),
        "backlog": f"at most {config['backlog_files']} files or {format_bytes(config['backlog_bytes'])} per split",
        "until": f"{config['max_batches']:,} batches per split" if config["max_batches"] else "Ctrl-C",
    }
    return "\n".join(f"  {name:8}  {text}" for name, text in rows.items())


def _help() -> str:
    lines = [
        _USAGE,
        "",
        "Fills the queue of the config's dataset, with data/<dataset>/prepare_streaming.py, until Ctrl-C.",
        "Any setting of the config can be given on the command line too: --batch_size=8",
        "--debug shows the traceback of an error.",
        "",
        "settings (and those of the provider):",
    ]
    lines += [f"  {name:18} {_described(setting)}" for name, setting in {**SHARED, **PREPARE}.items()]
    return "\n".join([*lines, ""])


def _described(setting: Setting) -> str:
    value = format_bytes(setting.default) if setting.kind is ByteSize else setting.default
    default = "required" if setting.required else f"default {value}"
    return f"{setting.text} ({in_words(setting.kind)}; {default})"


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, PenstockError) and error.strerror and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    return str(error) or type(error).__name__


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _log_lines(console: Console) -> Iterator[None]:
    """Print the log of penstock above the progress."""
    log, handler = logging.getLogger("penstock"), logging.Handler()
    handler.emit = lambda record: _print(console, f"prepare.py: {handler.format(record)}")  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
