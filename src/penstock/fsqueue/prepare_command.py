"""`python prepare.py CONFIG.py [--name=value ...]`: fill the queue of a config's dataset until told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.config.settings import PREPARE, SHARED, ByteSize, Setting
from penstock.config.shared import SharedConfig, load_shared_config, split_overrides
from penstock.config.validator import validate
from penstock.errors import ConfigError, PenstockError
from penstock.fsqueue.provider import DataProviderBase, ProviderProgress
from penstock.fsqueue.provider_lookup import find_provider
from penstock.memory.budget import format_bytes
from penstock.types.conversion import in_words

__all__ = ["ProgressLines", "main", "make_provider", "read_config", "summary"]


_RATE_SECONDS = 5.0


class ProgressLines:
    """Shows every progress on a terminal; elsewhere a line every few seconds, and fewer while nothing is made."""

    def __init__(self, console: Console, *, every_seconds: float = 5.0, idle_seconds: float = 60.0) -> None:
        self._console = console
        self._every_seconds, self._idle_seconds = every_seconds, idle_seconds
        self._rate = _Rate()
        self._shown_at = 0.0
        self._shown_batches = -1
        # Without a refresh thread: nothing changes but when there is progress.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: ProviderProgress) -> None:
        rate = self._rate.add(progress)
        line = progress_line(progress, rate)
        if self._live is not None:
            self._live.update(Text(line, style="cyan"), refresh=True)
            return
        batches = sum(progress.batches.values())
        due = self._every_seconds if batches != self._shown_batches else self._idle_seconds
        if progress.seconds - self._shown_at >= due:
            self._shown_at, self._shown_batches = progress.seconds, batches
            self._console.print(f"prepare.py: {line}", markup=False, highlight=False, soft_wrap=True)


def progress_line(progress: ProviderProgress, batches_per_second: float) -> str:
    """`train 128, val 16 batches in 18 files, 12.5 MiB, 45.2 batches/s; backlog train 16, val 2 files; waiting ...`."""
    parts = [
        f"{_made(progress)}, {batches_per_second:,.1f} batches/s",
        f"backlog {_by_split(progress.backlog)} files",
    ]
    if progress.waiting:
        parts.append("waiting for the trainer to read")
    return "; ".join(parts)


def summary(progress: ProviderProgress) -> str:
    """The last line of a run."""
    return f"done: {_made(progress)}, in {progress.seconds:,.1f} s"


def _made(progress: ProviderProgress) -> str:
    files = sum(progress.files.values())
    return (
        f"{_by_split(progress.batches)} batches in {files:,} file{'s' * (files != 1)}, {format_bytes(progress.bytes)}"
    )


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


_PLACE = ("dataset", "data_root")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: stopped, or all of `max_batches` made. 1: something has to be mended first, said on standard error. 2: a command
    line that cannot be understood. 130, 143: stopped by a second Ctrl-C or SIGTERM, in the middle of a file.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_help())
        return 0
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    paths = [argument for argument in arguments if not argument.startswith("-")]
    console = Console(stderr=True)
    if len(paths) != 1:
        given = "none" if not paths else " and ".join(map(repr, paths))
        hint = f"; values are given as --name=value: {paths[1]!r}" if len(paths) > 1 else ""
        _say(console, f"expected one config file, got {given}{hint}\n{_USAGE}")
        return 2
    try:
        with _log_lines(console):
            provider = make_provider(paths[0], [argument for argument in arguments if argument.startswith("-")])
            _print(console, _opening(provider))
            report = _run(provider, console)
    except KeyboardInterrupt as stopped:
        _say(console, "stopped at once; what was being made is made by the next provider")
        return 143 if stopped.args == (signal.SIGTERM,) else 130
    except (PenstockError, OSError) as error:
        if debug:
            traceback.print_exception(error)
        _say(console, _message(error))
        return 1
    _say(console, summary(report))
    return 0


def make_provider(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> DataProviderBase:
    """The provider of the dataset that a config names, with that config."""
    config, provider_class = read_config(path, overrides)
    return provider_class(config)


def read_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[SharedConfig, type[DataProviderBase]]:
    """A config with what was said otherwise on the command line, and the provider it leads to.

    With overrides the file is run twice: what they may be, only the provider can say.
    """
    given, _ = split_overrides(overrides)
    # Those of the place alone; what is wrong with the others is said below, in one go.
    config = load_shared_config(path, [f"--{name}={given[name]}" for name in _PLACE if name in given])
    provider_class = find_provider(*_place(config))
    if overrides:
        config = load_shared_config(path, overrides, settings=provider_class.settings)
    return config, provider_class


def _place(config: SharedConfig) -> tuple[Any, Any]:
    """The dataset and where it lies; if that cannot be told, all that is wrong with the config is said."""
    try:
        return SHARED["dataset"].accept(config["dataset"]), SHARED["data_root"].accept(config.get("data_root", "data"))
    except (KeyError, ConfigError):
        validate(config)
        raise


def _run(provider: DataProviderBase, console: Console) -> ProviderProgress:
    with ProgressLines(console) as lines, _Signals(provider, console) as signals:

        def on_progress(progress: ProviderProgress) -> None:
            signals.repeat()
            lines(progress)

        return provider.run(on_progress=on_progress)


class _Signals:
    """The first Ctrl-C or SIGTERM lets the provider finish its file, the second stops it at once, a third kills."""

    def __init__(self, provider: DataProviderBase, console: Console) -> None:
        self._provider, self._console = provider, console
        self._before: dict[int, Any] = {}
        self._asked = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be had
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def repeat(self) -> None:
        """Ask once more: a signal may have come before the provider had begun."""
        if self._asked:
            self._provider.stop()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            for each in self._before:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number))
        self._asked = True
        self._provider.stop()
        # Not through the console: the signal may have come while that was writing, and holds its lock.
        with contextlib.suppress(OSError):
            os.write(2, b"\nprepare.py: stopping when this file is done; once more to stop at once\n")


def _opening(provider: DataProviderBase) -> str:
    config = provider.config
    total = sum(provider.proportions.values())
    splits = ", ".join(f"{split} {share / total:.0%}" for split, share in provider.proportions.items())
    bounds = f"{config['backlog_files']} files or {format_bytes(config['backlog_bytes'])} of a split, then it waits"
    end = f"{config['max_batches']:,} batches of every split are made" if config["max_batches"] else "Ctrl-C"
    compression = f", {config['compression']}" if config["compression"] else ""
    rows = [
        ("dataset", f"{provider.dataset} ({provider.data_dir}), made by {type(provider).__name__}"),
        ("queue", str(provider.queue_dir)),
        ("seed", str(provider.seed)),
        ("batches", f"{provider.batch_size} rows of {provider.block_size}"),
        ("files", f"{config['batches_per_file']} batches each{compression}"),
        ("splits", splits),
        ("backlog", f"{bounds} for the trainer"),
        ("until", end),
    ]
    return "\n".join(f"  {name:8}  {text}" for name, text in rows)


_USAGE = "usage: python prepare.py CONFIG.py [--name=value ...] [--debug]"


def _help() -> str:
    lines = [
        _USAGE,
        "",
        "Fills the queue of the dataset that the config names, with data/<dataset>/prepare_streaming.py, until Ctrl-C.",
        "Any setting of the config can be given on the command line too: --batch_size=8",
        "--debug shows the traceback of an error.",
        "",
        "settings (and what the provider declares):",
    ]
    lines += [f"  {name:18} {_described(setting)}" for name, setting in {**SHARED, **PREPARE}.items()]
    return "\n".join([*lines, ""])


def _described(setting: Setting) -> str:
    default = "required" if setting.required else f"default {_shown(setting)}"
    return f"{setting.text} ({in_words(setting.kind)}; {default})"


def _shown(setting: Setting) -> str:
    return format_bytes(setting.default) if setting.kind is ByteSize else str(setting.default)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, PenstockError) and error.strerror and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    return str(error) or type(error).__name__


def _say(console: Console, text: str) -> None:
    _print(console, f"prepare.py: {text}")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _log_lines(console: Console) -> Iterator[None]:
    """What penstock logs, as lines of the console, above the progress."""
    log, handler = logging.getLogger("penstock"), _Lines(console)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        _say(self._console, self.format(record))
