"""`penstock join STORE`: the rest of a preparation whose splits were done by other processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.console import log_lines, working
from penstock.cli.options import JsonOption, QuietOption, StoreArgument, command
from penstock.engines.driver import JobOptions
from penstock.engines.job_directory import SPLITS_NAME, JobDirectory, default_place
from penstock.engines.run import JobEngine, was_cut_short
from penstock.errors import ConfigError, PenstockError
from penstock.files.filesystems import output_place, shown
from penstock.files.remote import RemotePath
from penstock.files.states import parse_json, to_json
from penstock.loaders import Prepared, Recipe
from penstock.loaders import prepare as prepare_store
from penstock.memory import MemoryBudget
from penstock.observe import Extent, progress_on
from penstock.pipeline import PipelineConfig
from penstock.store.home import LocalHome, store_home
from penstock.store.manifest import is_store, is_whole, read_manifest

_SAME = ("inputs", "mode", "on_error", "quarantine")
"""Arguments that all splits have in common, beside those of the recipe."""


@command(stopped="stopped; the same command resumes")
def join(store: StoreArgument, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Put the splits of `penstock prepare --split I/N` together.

    \b
    penstock prepare corpus/*.jsonl --tokenizer model/ --out corpus.store --split 1/16   # ... to 16/16, anywhere
    penstock join corpus.store

    What a split has not done, because it was killed or needs the other splits first (deduplication), is done here. The
    shards have the bytes that `penstock prepare` without --split gives them. Nothing is done if the store is complete.
    """
    from penstock.cli.prepare import print_prepared

    target = output_place(store, "the store")
    directory = JobDirectory(default_place(target))
    asked = directory.read_json(SPLITS_NAME)
    if asked is None:
        home = store_home(target)
        if is_store(home) and is_whole(home, manifest := read_manifest(home)):  # joined before
            path = target if isinstance(target, Path) else RemotePath(target)
            ready = Prepared(path, manifest, None)
            print_prepared(ready, MemoryBudget(), as_json=as_json, quiet=quiet, why="no splits are left to join")
            return
        raise ConfigError(f"there are no splits to join for {shown(store)!r}; run penstock prepare --split I/N first")
    if asked["directory"] != str(Path.cwd()):
        raise ConfigError(
            f"the splits were run in {asked['directory']}, where paths may mean other files; run penstock join there"
        )
    console, memory = Console(stderr=True), MemoryBudget(asked["budget"])
    with (
        log_lines(console, logging.WARNING if quiet else logging.INFO),
        working(f"joining {shown(store)}", quiet=quiet),
    ):
        prepared = prepare_store(
            asked["inputs"],
            asked["out"],
            Recipe(**asked["recipe"]),
            mode=asked["mode"],
            config=PipelineConfig(
                workers=asked["workers"] or "auto", on_error=asked["on_error"], quarantine=asked["quarantine"]
            ),
            budget=memory,
            progress=None if quiet else lambda made: progress_on(console, Extent.of(made.source), str(made)),
            engine=JobEngine(options=JobOptions(task_budget_bytes=memory.capacity)),
        )
    if prepared.report is None:  # it was made without the splits meanwhile
        remove_splits(asked, prepared)
    print_prepared(prepared, memory, as_json=as_json, quiet=quiet)


def save_arguments(asked: Mapping[str, Any]) -> None:
    """Keep the arguments of a preparation for `penstock join`; those of another one are refused."""
    directory = JobDirectory(default_place(output_place(asked["out"], "out")))
    before, mine = directory.read_json(SPLITS_NAME), parse_json(to_json(asked))
    if before is not None:
        for name in _SAME:
            _check_same(directory, name, before[name], mine[name])
        for name in before["recipe"] | mine["recipe"]:
            _check_same(directory, name, before["recipe"].get(name), mine["recipe"].get(name))
    directory.make()
    directory.write_json(SPLITS_NAME, {**asked, "directory": str(Path.cwd())})
    if isinstance(directory.home, LocalHome):
        (directory.home.path / SPLITS_NAME).chmod(0o600)  # URLs of inputs may hold credentials


def remove_splits(asked: Mapping[str, Any], prepared: Prepared) -> None:
    """Remove what splits of the same preparation have left: the store is complete without them."""
    target = output_place(asked["out"], "out")
    directory = JobDirectory(default_place(target))
    with contextlib.suppress(PenstockError, OSError):  # a damaged record, a driver at work: the store is ready even so
        before, mine = directory.read_json(SPLITS_NAME), parse_json(to_json(asked))
        if before is None or before["directory"] != str(Path.cwd()):
            return
        same = all(before[name] == mine[name] for name in (*_SAME, "recipe"))
        if same and not was_cut_short(target, prepared.manifest.run or ""):
            with directory.lock() as lock:
                lock.hold(f"the job in {directory.shown}")
                directory.remove()


def _check_same(directory: JobDirectory, name: str, before: Any, mine: Any) -> None:
    if before != mine:
        raise ConfigError(
            f"the splits in {directory.shown} were begun with {name}={before!r}, and this one has {mine!r}; all splits "
            "take the same arguments: run it with those, or delete the directory to begin again"
        )
