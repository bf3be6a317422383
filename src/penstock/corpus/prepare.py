"""Raw files to a token store: the one pipeline behind `penstock prepare`, and behind every loader given raw files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from penstock.corpus.recipe import Recipe, Steps
from penstock.errors import ChangedFileError, ConfigError, ResumeError
from penstock.files.atomic import check_own_directory, remove_own_directory, write_atomic
from penstock.files.cache import default_cache_directory
from penstock.files.checksums import FileFingerprint, FileStamps, fingerprint_files, hash_file, is_settled
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.memory import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig, Report, Source
from penstock.pipeline.chain import BrokenStageError
from penstock.pipeline.checkpoint import load_checkpoint
from penstock.sinks import StoreSink
from penstock.store import Manifest, Store, is_complete, open_store
from penstock.store.manifest import is_store

__all__ = ["Prepared", "losses_of", "prepare", "prepare_cached"]

LOSSES_NAME = "losses.json"
_log = logging.getLogger(__name__)
_OWN = re.compile(r"\w+-(create|append|overwrite)|seen")
"""The names of all that is ever put into the directory of an unfinished run."""
_LONGEST_WAIT = 24 * 3600.0
"""Seconds to wait for another process that makes the same store."""

Shown = Callable[[Pipeline], Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store that is ready, and how it came to be."""

    path: Path
    manifest: Manifest
    report: Report | None
    """None if it was there already."""
    tokens: int | None = None
    """How many this run added, if it went through in one go."""

    @property
    def dropped_tokens(self) -> Mapping[str, int]:
        """Tokens that are in no row of the store, by reason."""
        return self.report.dropped_tokens if self.report is not None else {}

    @property
    def tokens_per_second(self) -> float | None:
        if self.report is None or not self.tokens or self.report.seconds <= 0:
            return None
        return self.tokens / self.report.seconds

    def open(self) -> Store:
        return open_store(self.path)

    def lengths(self, shares: Sequence[float] = (0.5, 0.9, 0.99, 1.0)) -> dict[float, int]:
        """How many tokens that share of the rows has at most."""
        with self.open() as store:
            if not len(store):
                return dict.fromkeys(shares, 0)
            points = np.percentile(store.lengths, [100 * share for share in shares], method="lower")
        return dict(zip(shares, points.astype(int).tolist()))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What `prepare` was asked for."""

    source: Source
    recipe: Recipe
    out: Path
    mode: str
    config: PipelineConfig
    budget: MemoryBudget | None
    files: Sequence[Path] = field(default=())
    """What the key is made of; none if the source may have options that are not known here."""
    key: str | None = None
    """What it has to come out as, if the place is named after it."""
    steps: Steps | None = None
    """The transforms, where they were made for the key already."""

    @property
    def work(self) -> Path:
        """What is kept for going on after a kill."""
        return self.out.parent / f".{self.out.name}.preparing"

    def forget(self) -> None:
        """Remove what is kept for going on."""
        remove_own_directory(self.work, _OWN)


def prepare(
    inputs: PathLike | Iterable[PathLike] | Source,
    out: PathLike,
    recipe: Recipe,
    *,
    mode: str = "create",
    config: PipelineConfig | None = None,
    budget: MemoryBudget | None = None,
    wait_seconds: float = 0.0,
    progress: Shown | None = None,
) -> Prepared:
    """Make the token store of some files; if it is there already, made of the same bytes in the same way, just say so.

        prepare("corpus/*.jsonl", "corpus.store", Recipe(tokenizer="model/", filters=["gopher"], dedup=["exact"]))

    Killed in the middle, the same call goes on where it was. Of several processes that want the same store one makes
    it; the others wait up to `wait_seconds` for it, or are refused. What was made of a source given as an object is not
    recognised again. `progress`, given the pipeline, returns a context manager whose value is called with snapshots.
    """
    target = require_local(out, "out")
    given = hasattr(inputs, "next_batch")
    source = cast(Source, inputs) if given else recipe.open(cast(Any, inputs))
    job = _Job(
        source=source,
        recipe=recipe,
        out=target,
        mode=mode,
        config=config or PipelineConfig(),
        budget=budget,
        files=() if given else getattr(source, "files", ()),
    )
    return _make(job, wait_seconds, progress)


def prepare_cached(
    inputs: Sequence[PathLike],
    home: Path,
    recipe: Recipe,
    *,
    config: PipelineConfig | None = None,
    budget: MemoryBudget | None = None,
    wait_seconds: float = _LONGEST_WAIT,
) -> Prepared:
    """The store of some files below `home`, under the name of what it is made of; made if it is not there.

    Whoever comes first makes it; others wait for it.
    """
    chosen = config or PipelineConfig()
    source = recipe.open(inputs)
    files = fingerprint_files(getattr(source, "files", ()), memo=default_cache_directory() / "fingerprints.json")
    schema = getattr(source, "schema", None)
    if schema is None:
        raise ConfigError(f"{source!r} does not say which columns it has; prepare needs a source with a schema")
    steps = recipe.steps(schema, home / "unused")
    key = steps.lineage(files, chosen.on_error).key
    if key is None:
        raise ConfigError("the recipe cannot be named by its content, so its store cannot be kept; use prepare(...)")
    job = _Job(
        source=source,
        recipe=recipe,
        out=home / key,
        mode="create",
        config=chosen,
        budget=budget,
        files=getattr(source, "files", ()),
        key=key,
        steps=steps if steps.template is not None else None,  # those of documents keep what they have seen elsewhere
    )
    made = _make(job, wait_seconds, None)
    if made.dropped_tokens:
        told = ", ".join(f"{tokens:,} ({reason})" for reason, tokens in made.dropped_tokens.items())
        _log.warning("%s: tokens left out when it was prepared: %s", ", ".join(map(str, inputs)), told)
    return made


def _make(job: _Job, wait_seconds: float, progress: Shown | None) -> Prepared:
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(job.work.with_name(f"{job.work.name}.lock")) as lock:
        if not lock.acquire(wait_seconds):
            raise ConfigError(f"{job.out} is being prepared by {lock.owner()}; wait for it, or choose another place")
        return _prepare(job, progress)


def _prepare(job: _Job, progress: Shown | None) -> Prepared:
    check_own_directory(job.work, _OWN)
    inputs = _Inputs(job.files)
    schema = getattr(job.source, "schema", None)
    if schema is None:
        raise ConfigError(f"{job.source!r} does not say which columns it has; prepare needs a source with a schema")
    steps = job.steps or job.recipe.steps(schema, job.work / "seen")
    lineage = steps.lineage(inputs.fingerprints, job.config.on_error)
    if job.key is not None and lineage.key != job.key:
        raise ChangedFileError("it holds other bytes than when it was hashed", file=str(job.files[0]))
    there = open_store(job.out).manifest if is_store(job.out) else None
    kept = job.work / f"{lineage.key or 'run'}-{job.mode}"
    if there is not None and _has(job, there, lineage.key):
        if not _was_cut_short(kept, there):
            job.forget()
            return Prepared(job.out, there, None)
    elif there is not None:
        _check_goes_with(job, there, steps)
    if not kept.exists():
        # Perhaps of a run with another input or recipe: it cannot go on, since this one writes to the same place.
        job.forget()
    options = {"mode": job.mode, "tokens": steps.tokens, "mask": steps.mask, "lineage": lineage}
    sink = _CheckedSink(job.out, check=inputs.check, **options)
    before = there.tokens or 0 if there is not None and job.mode == "append" else 0
    pipeline = Pipeline(job.source, steps.transforms, sink, config=job.config, budget=job.budget)
    try:
        if progress is None:
            report = pipeline.run(kept)
        else:
            with progress(pipeline) as shown:
                report = pipeline.run(kept, progress=shown)
    except (BrokenStageError, ChangedFileError):
        job.forget()  # rows of a broken stage, or of a file in no state that it ever had, are not to be kept
        raise
    _note_losses(job.out, lineage.key, report)
    job.forget()  # last: what was not done when the process is killed before, the next call does
    with open_store(job.out) as store:
        made = (store.manifest.tokens or 0) - before if not report.resumed else None
        return Prepared(job.out, store.manifest, report, made)


class _Inputs:
    """The files that a store is made of, as they were hashed: the store must not hold other rows under that name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._stamps = files, FileStamps()
        for file in files:
            self._stamps.note(file)
        self._young = [not is_settled(file.stat()) for file in files]
        """Which could have changed without their time showing it."""
        memo = default_cache_directory() / "fingerprints.json"
        self.fingerprints: list[FileFingerprint] = fingerprint_files(files, memo=memo)

    def check(self) -> None:
        """Raise if any of them has changed since."""
        self._stamps.check_all()
        for file, young, known in zip(self._files, self._young, self.fingerprints, strict=True):
            if young and hash_file(file) != known.xxh3:
                raise ChangedFileError("it holds other bytes than when it was hashed", file=str(file))


class _CheckedSink(StoreSink):
    """A store that appears only if its input is still what its key says."""

    def __init__(self, path: Path, *, check: Callable[[], None], **options: Any) -> None:
        super().__init__(path, **options)
        self._check = check

    def flush(self) -> None:
        self._check()
        super().flush()


def _was_cut_short(kept: Path, there: Manifest) -> bool:
    """Whether the run that published the store was killed before it had done all that comes behind that."""
    try:
        saved = load_checkpoint(kept)
    except ResumeError:
        return False
    token = saved.get("sink") if saved is not None else None
    return isinstance(token, dict) and bool(token.get("finishing")) and token.get("run") == there.run


def _has(job: _Job, there: Manifest, key: str | None) -> bool:
    """Whether the store holds these rows already, made in this way."""
    if key is None or not is_complete(job.out):
        return False
    return there.key == key or (job.mode == "append" and key in [run.key for run in there.lineage])


def _check_goes_with(job: _Job, there: Manifest, steps: Steps) -> None:
    if job.mode == "create":
        raise ConfigError(
            f"{job.out} holds a store already, made of another input or in another way; use mode append (--mode "
            "append) to add to it, overwrite to put a new version in its place, or another place"
        )
    if job.mode == "append" and there.template != steps.template:
        raise ConfigError(
            f"{job.out} was made with the chat template {there.template}, these rows with {steps.template}; a model "
            "trained on both would learn neither: use the same template, or another store"
        )


def _note_losses(store: Path, key: str | None, report: Report) -> None:
    """Keep what was left out on the way, so that whoever plans with the store later can be told."""
    losses = {
        "key": key,
        "rows": dict(report.dropped),
        "tokens": dict(report.dropped_tokens),
        "changed": dict(report.changed),
    }
    write_atomic(store / LOSSES_NAME, orjson.dumps(losses))


def losses_of(store: Store) -> dict[str, int]:
    """Tokens that were left out when a store was prepared, by reason; none if nobody noted them."""
    try:
        noted = orjson.loads((store.path / LOSSES_NAME).read_bytes())
        known = noted["key"] is not None and noted["key"] == store.manifest.key
        return {str(reason): int(tokens) for reason, tokens in noted["tokens"].items()} if known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
