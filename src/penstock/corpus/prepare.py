"""Preparation of a token store from raw files: the pipeline of `penstock prepare`, and of every loader of raw files."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import orjson
import xxhash

from penstock.connections.shared_cache import CacheSpec, SharedCache, shared_cache
from penstock.corpus.recipe import OpenedRecipe, Recipe, Steps
from penstock.errors import ChangedFileError, ConfigError, ResumeError
from penstock.files.atomic import check_own_directory, remove_own_directory, write_atomic
from penstock.files.cache import default_cache_directory
from penstock.files.checksums import FileFingerprint, FileStamps, fingerprint_files, hash_file, is_settled
from penstock.files.filesystems import beside, output_place, shown_place
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import bucket_has, open_bucket
from penstock.files.ranges.remote_file import InputFile
from penstock.files.remote import RemotePath
from penstock.memory import MemoryBudget
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.pipeline import Pipeline, PipelineConfig, Report
from penstock.pipeline.chain import BrokenStageError
from penstock.pipeline.checkpoint import load_checkpoint
from penstock.pipeline.config import OnError
from penstock.pipeline.stages import Remembering, Stateful
from penstock.sinks import StoreSink
from penstock.sources import IteratorSource, StoreSource
from penstock.sources.by_suffix import SourceFiles
from penstock.sources.inputs import Input, fingerprints_of
from penstock.store import Manifest, Store, is_complete, open_store
from penstock.store.home import StoreHome, store_home
from penstock.store.manifest import is_store, is_whole, read_manifest
from penstock.store.shared_files import fetch_store, share_store

LOSSES_NAME = "losses.json"
EXAMPLES_NAME = "dropped_examples.json"
"""A few dropped rows for each reason, beside the manifest."""
_log = logging.getLogger(__name__)
_OWN = re.compile(r"\w+-(create|append|overwrite)|seen")
"""Names of the files in the directory of an unfinished run."""
_NOTES = "requests"
_KEY = re.compile("[0-9a-f]{32}")
"""Directory beside that of the cached stores: the key of the store of each request."""
_LONGEST_WAIT = 24 * 3600.0
"""Seconds to wait for another process that makes the same store."""

Progress = Callable[[Pipeline], Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store that is ready, and the report of the run that made it."""

    path: Path | RemotePath
    manifest: Manifest
    report: Report | None
    """None if the store existed already."""
    tokens: int | None = None
    """Tokens that this run added; None after a resume."""

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
        """Quantiles of row lengths: for each share, the length that this share of the rows does not exceed."""
        with self.open() as store:
            if not len(store):
                return dict.fromkeys(shares, 0)
            points = np.percentile(store.lengths, [100 * share for share in shares], method="lower")
        return dict(zip(shares, points.astype(int).tolist()))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One call of `prepare`."""

    opened: OpenedRecipe
    out: Path | str
    mode: str
    config: PipelineConfig
    budget: MemoryBudget | int | str | None
    cache: SharedCache | None
    """Where others may have put the store, and where it is put."""
    engine: Any = None
    """Where the pipeline runs; None: in this process."""
    metrics: MetricsConfig | None = None
    inputs: _Inputs
    """The files that the key depends on; none for a source given as an object, whose options are not known."""

    @property
    def home(self) -> StoreHome:
        return store_home(self.out)

    @property
    def work(self) -> Workplace:
        return Workplace(self.out)

    @property
    def path(self) -> Path | RemotePath:
        """Path of the store for those who open it."""
        return self.out if isinstance(self.out, Path) else RemotePath(self.out)

    @property
    def shown(self) -> str:
        return shown_place(self.out)

    def discard_checkpoint(self) -> None:
        self.work.remove()


def prepare(
    inputs: Input,
    out: PathLike,
    recipe: Recipe,
    *,
    mode: str = "create",
    config: PipelineConfig | None = None,
    budget: MemoryBudget | int | str | None = None,
    wait_seconds: float = 0.0,
    progress: Progress | None = None,
    cache: CacheSpec | None = None,
    engine: Any = None,
    metrics: Metrics = None,
) -> Prepared:
    """Make the token store of some files, unless it exists already, made of the same bytes with the same recipe.

        prepare("corpus/*.jsonl", "corpus.store", Recipe(tokenizer="model/", filters=["gopher"], dedup=["exact"]))

    `out` is a directory, or a URL of an object store (`s3://`, `gs://`, `az://`): shards are uploaded as they are made.
    `inputs` are paths, or data in any form that `open_source` takes. The same call resumes a run that was killed. If
    several processes want the same store, one makes it; the others wait up to `wait_seconds` for it, or raise. A store
    made of an iterator, whose content is not known before it is read, is not recognised again.
    `progress`, given the pipeline, returns a context manager whose value is called with snapshots.
    With a `cache` (its URL, see `open_cache`), a store that another machine has made is fetched, and one that is made
    here is put there; `mode` has to be "create". `engine="ray"` prepares on a cluster, with the same bytes, and
    `metrics` is where metrics go; see `Pipeline.run`.
    """
    target = output_place(out, "out")
    opened = OpenedRecipe.of(recipe, inputs, memory=None if budget is None else MemoryBudget.of(budget).capacity)
    files = _Inputs.of(opened)
    chosen, shared = config or PipelineConfig(), None if cache is None else shared_cache(cache)
    if shared is not None and mode != "create":
        raise ConfigError(f"cache= is for stores made in one run, and mode is {mode!r}; omit cache, or use mode create")
    if shared is not None and not isinstance(target, Path):
        raise ConfigError(
            f"cache= is for a store on this machine, and {shown_place(target)} is in a bucket, where other machines "
            "find it; omit cache"
        )
    job = _Job(
        opened=opened,
        out=target,
        mode=mode,
        config=chosen,
        budget=budget,
        cache=shared,
        inputs=files,
        engine=engine,
        metrics=None if metrics is None else MetricsConfig.of(metrics),
    )
    return _make(job, wait_seconds, progress)


def prepare_cached(
    inputs: Input,
    home: Path,
    recipe: Recipe,
    *,
    config: PipelineConfig | None = None,
    budget: MemoryBudget | int | str | None = None,
    wait_seconds: float = _LONGEST_WAIT,
    progress: Progress | None = None,
    cache: SharedCache | None = None,
) -> Prepared:
    """The store of some files or data below `home`, named by its key; made if it does not exist.

    The first process makes it; others wait for it. The key of a store is noted under the hash of the request, so that
    a store that exists is found without a look at the rows and without parsing the tokenizer. One that does not is
    looked for in `cache`, and put there once it is made.
    """
    chosen = config or PipelineConfig()
    opened = OpenedRecipe.of(recipe, inputs, memory=None if budget is None else MemoryBudget.of(budget).capacity)
    files = _Inputs.of(opened)
    if not files.fingerprints:
        raise ConfigError(
            f"the content of {opened.given!r} is not known before it is read, so its store cannot be found again; pass "
            "streaming=True, or make a store with penstock.prepare(data, 'name.store', Recipe(...)) and open that"
        )
    request = opened.request(files.fingerprints, chosen.on_error)
    note = None if request is None else home.with_name(_NOTES) / request
    if note is not None and (found := _noted(note, home)) is not None:
        files.check_stamps()
        _log_losses(found, _shown(opened, inputs))
        return found
    steps = opened.steps()
    key = steps.lineage(files.fingerprints, chosen.on_error).key
    if key is None:
        reason = steps.unnamed or "the recipe has no key"
        raise ConfigError(f"a loader caches the rows that it prepares, and {reason}")
    prepared = _without_bad_rows(home, steps, files, chosen.on_error)
    if prepared is None:
        job = _Job(
            opened=opened, out=home / key, mode="create", config=chosen, budget=budget, cache=cache, inputs=files
        )
        prepared = _make(job, wait_seconds, progress)
    if note is not None:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(note, prepared.path.name.encode())
        except OSError as error:
            _log.warning("%s: the store is complete, but its key could not be noted (%s)", note, error)
    if prepared.dropped_tokens:
        losses = ", ".join(f"{tokens:,} ({reason})" for reason, tokens in prepared.dropped_tokens.items())
        _log.warning("%s: dropped tokens while preparing: %s", _shown(opened, inputs), losses)
    _log_losses(prepared, _shown(opened, inputs))
    return prepared


def _shown(opened: OpenedRecipe, inputs: Any) -> str:
    return ", ".join(map(str, inputs)) if isinstance(inputs, list) else repr(opened.given)


def _log_losses(prepared: Prepared, inputs: str) -> None:
    """Say which bad rows are not in a store, every time it is used."""
    with prepared.open() as store:
        bad = bad_rows_of(store)
    if bad:
        reasons = ", ".join(f"{rows:,} ({reason})" for reason, rows in bad.items())
        file = Path(f"{prepared.path}.quarantine.jsonl")
        written = f"; they are in {file}" if file.exists() else ""
        _log.warning("%s: bad rows were left out: %s%s", inputs, reasons, written)


def _noted(note: Path, home: Path) -> Prepared | None:
    """The store whose key was noted; None if it is missing, incomplete or being changed."""
    try:
        key = note.read_bytes()[:64].decode("ascii", "replace")
    except OSError:
        return None
    return _finished(home / key, key) if _KEY.fullmatch(key) else None


def _finished(out: Path, key: str) -> Prepared | None:
    if not is_store(out) or not is_complete(out) or Workplace(out).exists():
        return None
    manifest = open_store(out).manifest
    return Prepared(out, manifest, None) if manifest.key == key else None


def _without_bad_rows(home: Path, steps: Steps, inputs: _Inputs, on_error: str) -> Prepared | None:
    """A store of the same input that was made with another `on_error`, and met no bad row: it has the same rows."""
    for policy in get_args(OnError):
        key = steps.lineage(inputs.fingerprints, policy).key
        if policy == on_error or key is None or (found := _finished(home / key, key)) is None:
            continue
        with found.open() as store:
            if policy == "raise" or _record(store, "bad") == {}:
                inputs.check_stamps()
                return found
    return None


class Workplace:
    """Checkpoint of an unfinished run beside the store, and the directory of what it has seen.

    That directory is on this machine also for a store in a bucket.
    """

    def __init__(self, out: Path | str) -> None:
        if not isinstance(out, Path):
            store_home(out)  # refuses a bucket without a name in it
        self._place = beside(out, ".", ".preparing")
        self.shown = shown_place(self._place)

    @property
    def seen(self) -> Path:
        if isinstance(self._place, Path):
            return self._place / "seen"
        return default_cache_directory() / "preparing" / xxhash.xxh3_128_hexdigest(self.shown.encode()) / "seen"

    def lock(self) -> FileLock | ObjectLock:
        path = beside(self._place, suffix=".lock")
        return FileLock(path) if isinstance(path, Path) else ObjectLock(path)

    def check(self) -> None:
        if isinstance(self._place, Path):
            check_own_directory(self._place, _OWN)

    def checkpoint(self, name: str) -> Path | RemotePath:
        return self._place / name if isinstance(self._place, Path) else RemotePath(self._place) / name

    def has(self, checkpoint: Path | RemotePath) -> bool:
        return checkpoint.exists() if isinstance(checkpoint, Path) else bucket_has(checkpoint)

    def exists(self) -> bool:
        return self._place.exists() if isinstance(self._place, Path) else bucket_has(self._place)

    def remove(self) -> None:
        if isinstance(self._place, Path):
            remove_own_directory(self._place, _OWN)
            return
        shutil.rmtree(self.seen.parent, ignore_errors=True)
        bucket, prefix = open_bucket(self._place)
        if keys := [info.key for info in bucket.objects(f"{prefix}/")]:
            bucket.delete(*keys)


def _make(job: _Job, wait_seconds: float, progress: Progress | None) -> Prepared:
    if isinstance(job.out, Path):
        job.out.parent.mkdir(parents=True, exist_ok=True)
    if getattr(job.engine, "share", None) is not None:
        return _prepare(job, progress)  # beside others
    with job.work.lock() as lock:
        if not lock.acquire() and wait_seconds > 0:
            _log.info("%s prepares %s; waiting for it", lock.owner(), job.shown)
        if not lock.acquire(wait_seconds):
            raise ConfigError(f"{job.shown} is being prepared by {lock.owner()}; wait for it, or choose another path")
        if job.cache is None:
            return _prepare(job, progress)
        return _prepare_shared(job, job.cache, progress)


def _prepare_shared(job: _Job, cache: SharedCache, progress: Progress | None) -> Prepared:
    """The store, fetched if another machine has made it; otherwise made, and put where others find it."""
    key = job.opened.steps().lineage(job.inputs.fingerprints, job.config.on_error).key
    assert isinstance(job.out, Path)
    if key is not None and not job.out.exists():
        fetch_store(cache, key, job.out)
    prepared = _prepare(job, progress)
    if key is not None and prepared.manifest.key == key:
        share_store(cache, job.out, key, extra=[LOSSES_NAME])
    return prepared


def _prepare(job: _Job, progress: Progress | None) -> Prepared:
    job.work.check()
    job.inputs.check_stamps()  # another process may have held the lock for long
    steps = job.opened.steps(job.work.seen)
    lineage = steps.lineage(job.inputs.fingerprints, job.config.on_error, job.opened.left_out)
    existing = read_manifest(job.home) if is_store(job.home) else None
    if existing is not None and isinstance(job.out, Path):
        existing = open_store(job.out).manifest
    checkpoint = job.work.checkpoint(f"{lineage.key or 'run'}-{job.mode}")
    if existing is not None and _has(job, existing, lineage.key):
        if not _was_cut_short(checkpoint, existing) and not _job_was_cut_short(job, existing):
            job.discard_checkpoint()
            return Prepared(job.path, existing, None)
    elif existing is not None:
        _check_goes_with(job, existing, steps)
    if job.engine is not None:
        pass  # the job has a directory of its own
    elif not job.work.has(checkpoint):
        # A checkpoint of another input or recipe cannot be resumed, since this run writes to the same place.
        job.discard_checkpoint()
    elif (
        not job.work.seen.exists()
        and any(isinstance(transform, Remembering) for transform in steps.transforms)
        and load_checkpoint(checkpoint) is not None
    ):
        raise ResumeError(
            f"the preparation of {job.shown} was begun on another machine, where the keys are that dedup has seen (in "
            f"{job.work.seen}); run it there, or delete {job.work.shown}/ to start again"
        )
    options = {"mode": job.mode, "tokens": steps.tokens, "mask": steps.mask, "lineage": lineage}
    sink = _CheckedSink(job.out, check=job.inputs.check, **options)
    before = existing.tokens or 0 if existing is not None and job.mode == "append" else 0
    source = job.opened.source
    resumable = checkpoint if isinstance(source, Stateful) and not getattr(source, "not_resumable", None) else None
    job.opened.log_bos(steps)
    pipeline = Pipeline(source, steps.transforms, sink, config=job.config, budget=job.budget)
    if job.engine is not None:
        resumable = None
    try:
        if progress is None:
            report = pipeline.run(resumable, engine=job.engine, metrics=job.metrics)
        else:
            with progress(pipeline) as shown:
                report = pipeline.run(resumable, progress=shown, engine=job.engine, metrics=job.metrics)
    except (BrokenStageError, ChangedFileError):
        job.discard_checkpoint()  # its rows come from a broken stage, or from a mix of two states of a file
        raise
    _write_losses(job.home, lineage.key, report)
    _write_examples(job.home, lineage.key, steps)
    job.discard_checkpoint()  # last: if the process is killed before, the next call does the rest
    manifest = read_manifest(job.home)
    tokens = (manifest.tokens or 0) - before if not report.resumed else None
    return Prepared(job.path, manifest, report, tokens)


class _Inputs:
    """The input files as they were hashed: the store must hold the rows that its key names."""

    @classmethod
    def of(cls, opened: OpenedRecipe) -> Self:
        """Of the files of a recipe, or of the content of data that was given as an object."""
        if isinstance(opened.given, SourceFiles | StoreSource):
            return cls(opened.files)
        made = cls(())
        memo = default_cache_directory() / "fingerprints.json"
        # An iterator that is refused must not have lost its first row, which `opened.source` reads.
        known = opened.given if isinstance(opened.given, IteratorSource) else opened.source
        made.fingerprints = fingerprints_of(known, memo=memo)
        for file in opened.files:
            made._stamps.note(file)
        return made

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files, self._stamps = files, FileStamps()
        for file in files:
            self._stamps.note(file)
        self._young = [isinstance(file, Path) and not is_settled(file.stat()) for file in files]
        """Files that could change without a new modification time."""
        memo = default_cache_directory() / "fingerprints.json"
        self.fingerprints: list[FileFingerprint] = fingerprint_files(files, memo=memo)

    def check_stamps(self) -> None:
        """Raise if a file has another size, time or inode."""
        self._stamps.check_all()

    def check(self) -> None:
        """Raise if any file has changed."""
        self.check_stamps()
        for file, young, known in zip(self._files, self._young, self.fingerprints):
            if young and hash_file(file) != known.xxh3:
                raise ChangedFileError("it holds other bytes than when it was hashed", file=str(file))


class _CheckedSink(StoreSink):
    """Store sink that publishes only if the input files have not changed."""

    def __init__(self, path: Path | str, *, check: Callable[[], None], **options: Any) -> None:
        super().__init__(path, **options)
        self._check = check

    def flush(self) -> None:
        self._check()
        super().flush()


def _was_cut_short(checkpoint: Path | RemotePath, existing: Manifest) -> bool:
    """True if the run that published the store was killed before it had cleaned up."""
    try:
        saved = load_checkpoint(checkpoint)
    except ResumeError:
        return False
    token = saved.get("sink") if saved is not None else None
    return isinstance(token, dict) and bool(token.get("finishing")) and token.get("run") == existing.run


def _job_was_cut_short(job: _Job, existing: Manifest) -> bool:
    if job.engine is None or getattr(job.engine, "share", None) is not None:
        return False
    engines = import_module("penstock.engines.run")  # by name, since engines know how to prepare
    return bool(engines.was_cut_short(job.out, existing.run))


def _has(job: _Job, existing: Manifest, key: str | None) -> bool:
    """True if the store holds these rows already, made with the same recipe."""
    if key is None or not is_whole(job.home, existing):
        return False
    return existing.key == key or (job.mode == "append" and key in [run.key for run in existing.lineage])


def _check_goes_with(job: _Job, existing: Manifest, steps: Steps) -> None:
    if job.mode == "create":
        raise ConfigError(
            f"{job.shown} holds a store of another input or recipe; use mode append (--mode "
            "append) to add to it, overwrite to replace it by a new version, or another place"
        )
    if job.mode == "append" and existing.template != steps.template:
        raise ConfigError(
            f"{job.shown} was made with the chat template {existing.template}, these rows with {steps.template}; a "
            "model trained on both would learn neither: use the same template, or another store"
        )


def _write_losses(store: StoreHome, key: str | None, report: Report) -> None:
    """Write the counts of dropped and changed rows next to the store, for reports on it."""
    losses = {
        "key": key,
        "rows": dict(report.dropped),
        "tokens": dict(report.dropped_tokens),
        "changed": dict(report.changed),
        "bad": {**report.skipped, **report.quarantined},
    }
    store.write(LOSSES_NAME, orjson.dumps(losses, option=orjson.OPT_SORT_KEYS))  # not in the order of threads or tasks


def _write_examples(store: StoreHome, key: str | None, steps: Steps) -> None:
    """Write dropped rows that filters of this process have kept; what other processes drop is counted only.

    So a run that was killed and resumed has fewer: the file is for people, and no part of what a store promises.
    """
    found: dict[str, list[str]] = {}
    for transform in steps.transforms:
        examples = getattr(transform, "dropped_examples", None)
        found |= examples.all() if examples is not None else {}
    if found:
        store.write(EXAMPLES_NAME, orjson.dumps({"key": key, "examples": found}))


def drop_examples_of(store: Store) -> dict[str, list[str]]:
    """Rows that were dropped when a store was prepared, a few for each reason; none if there is no record."""
    try:
        facts = orjson.loads(store.home.read(EXAMPLES_NAME))
        if facts["key"] is None or facts["key"] != store.manifest.key:
            return {}
        return {str(reason): [str(row) for row in rows] for reason, rows in facts["examples"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return {}


def losses_of(store: Store) -> dict[str, int]:
    """Tokens that were dropped when a store was prepared, by reason; none if there is no record."""
    return _record(store, "tokens") or {}


def bad_rows_of(store: Store) -> dict[str, int]:
    """Bad rows that were skipped or quarantined when a store was prepared, by reason; none if there is no record."""
    return _record(store, "bad") or {}


def loss_record(store: Store) -> dict[str, Any] | None:
    """Everything that was written about dropped, changed and bad rows of a store; None if there is no record.

    `examples` has a few rows for each reason of a filter, as text.
    """
    kinds = {kind: _record(store, kind) for kind in ("rows", "tokens", "changed", "bad")}
    if all(record is None for record in kinds.values()):
        return None
    return {kind: record or {} for kind, record in kinds.items()} | {"examples": drop_examples_of(store)}


def _record(store: Store, what: str) -> dict[str, int] | None:
    """Numbers by reason that were written when a store was prepared; None if there is no record."""
    try:
        losses = orjson.loads(store.home.read(LOSSES_NAME))
        known = losses["key"] is not None and losses["key"] == store.manifest.key
        return {str(reason): int(number) for reason, number in losses[what].items()} if known else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
