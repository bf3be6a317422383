"""Plan of a loader file, opened in the background: what is in a step, and where a row goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError, PenstockError
from penstock.files.filesystems import is_remote, shown
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig, load_config
from penstock.order.plan import Plan
from penstock.order.positions import RowUse
from penstock.store import Store
from penstock.ui.vocabulary import Vocabulary, vocabulary_of

OPEN_SECONDS = 2.0
"""Time that a request waits for a plan that is being opened."""
_MOST_USES = 200
_MOST_EPOCHS, _UNCOUNTED_STEPS = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a sample: tokens of one row."""

    sample: int
    source: str
    row: int
    start: int
    tokens: int
    store: str
    store_row: int
    text: str


@dataclass(frozen=True, slots=True)
class StepView:
    """Rows of a step."""

    number: int
    epoch: int
    skipped: bool
    samples: int
    tokens: int
    parts: Sequence[StepPart]
    more_parts: int
    """Parts that are not listed."""
    places: int
    """Tokens of the samples as long as the longest: with padding, unless the loader packs."""


class PlanView:
    """Plan of a loader file. It is opened when first looked at, in a thread, and again when the file changes.

    Sources that are not prepared yet are prepared by that, into penstock's cache, as `penstock plan` does.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._opening: _Opening | None = None
        self._stamp: object = None

    def plan(self, seconds: float = OPEN_SECONDS) -> OpenedPlan | None:
        """The opened plan; None if it is not open after `seconds`. Raises what opening raised."""
        with self._lock:
            stamp = _stamp(self._place)
            if self._opening is None or stamp != self._stamp:
                self._opening, self._stamp = _Opening(self._place), stamp
            opening = self._opening
        return opening.wait(seconds)

    @property
    def opening_seconds(self) -> float:
        opening = self._opening
        return time.monotonic() - opening.began if opening is not None else 0.0


class _Opening:
    """Loader that a thread opens."""

    def __init__(self, place: str) -> None:
        self.began = time.monotonic()
        self._done = threading.Event()
        self._result: OpenedPlan | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._open, args=(place,), name="penstock-ui-plan", daemon=True).start()

    def wait(self, seconds: float) -> OpenedPlan | None:
        self._done.wait(seconds)
        if self._error is not None:
            raise self._error
        return self._result

    def _open(self, place: str) -> None:
        try:
            self._result = OpenedPlan(load_config(place))
        except Exception as error:  # noqa: BLE001 - the page shows it
            self._error = (
                error if isinstance(error, PenstockError | OSError) else ConfigError(f"{shown(place)}: {error}")
            )
            return
        finally:
            self._done.set()
        self._result.count_steps()


class OpenedPlan:
    """Loader of rank 0 and its plan. Only the plan is read: the loader delivers no batch."""

    def __init__(self, config: LoaderConfig) -> None:
        if config.arguments.get("streaming"):
            raise ConfigError(f"{config.name}: a stream has no plan, since its length is known only at its end")
        self.config = config
        world = int(config.arguments.get("world_size") or config.arguments.get("dp") or 1)
        place = {"rank": 0, "world_size": world, "model_parallel_size": 1}
        alone = {"dp": None, "cp": 1, "tp": 1, "pp": 1, "context": None}
        self._loader: DataLoader = config.open(**{"backend": "numpy", "prefetch": 0, "device": None, **place, **alone})
        self.world_size = world
        self.counted_steps: int | None = None
        self.problem = ""
        """Reason why steps cannot be counted: a training would fail for it, too."""
        self._vocabularies: dict[int, Vocabulary | None] = {}
        self._lock = threading.Lock()

    @property
    def plan(self) -> Plan:
        return self._loader.plan

    @property
    def names(self) -> tuple[str, ...]:
        return self.plan.names

    def rows(self, source: int) -> int:
        return int(self.plan.sources[source].order.table.rows)

    def tokens(self, source: int) -> int:
        return int(self.plan.sources[source].order.table.tokens)

    def count_steps(self) -> None:
        """Count the steps of the first epoch, which takes a while for a packed plan."""
        try:
            self.counted_steps = self.plan.steps_in(0)
        except PenstockError as error:
            self.problem = str(error)

    def stores(self, source: int) -> Sequence[Store]:
        """Stores of a source, in the order of its rows."""
        return self._loader.sources[source].inputs.table.stores

    def step(self, number: int, most_parts: int) -> StepView:
        """Rows of a step. A mixture walks to it, so one that no training reaches is refused."""
        if number >= (most := _MOST_EPOCHS * (self.counted_steps or _UNCOUNTED_STEPS)):
            raise ConfigError(f"step {number:,} is too far: pages of steps end before step {most:,}")
        with self._lock:
            try:
                step = self.plan.step(number)
            except IndexError as error:
                raise ConfigError(str(error)) from error
            samples = step.samples
            lengths = np.bincount(samples.numbers(), weights=samples.lengths, minlength=len(samples))
            parts = list(
                zip(
                    samples.numbers()[:most_parts].tolist(),
                    step.sources[:most_parts].tolist(),
                    samples.rows[:most_parts].tolist(),
                    samples.starts[:most_parts].tolist(),
                    samples.lengths[:most_parts].tolist(),
                )
            )
            return StepView(
                number,
                step.epoch,
                self.plan.skipped(number),
                len(samples),
                samples.tokens,
                [self._part(step.names, *part) for part in parts],
                max(0, len(samples.rows) - most_parts),
                int(lengths.max(initial=0)) * len(samples),
            )

    def trace(self, source: str, row: int, epochs: int) -> list[RowUse]:
        with self._lock:
            try:
                return self.plan.trace(source, row, epochs=epochs)[:_MOST_USES]
            except IndexError as error:
                raise ConfigError(str(error)) from error

    def origin(self, source: int, row: int) -> tuple[str, int]:
        """Store of a row, and the row in it."""
        store, within = self._loader.sources[source].inputs.table.origin(row)
        return store.shown, within

    def _part(self, names: Sequence[str], sample: int, source: int, row: int, start: int, tokens: int) -> StepPart:
        table = self._loader.sources[source].inputs.table
        store, within = table.origin(row)
        text = ""
        column = store.manifest.tokens_column
        if (vocabulary := self._vocabulary(source)) is not None and column is not None:
            ids = store[within][column][start : start + min(tokens, 60)]
            text = " ".join(vocabulary.text(np.asarray(ids)).split())[:160]
        return StepPart(sample, names[source], row, start, tokens, store.shown, within, text)

    def _vocabulary(self, source: int) -> Vocabulary | None:
        if source not in self._vocabularies:
            inputs = self._loader.sources[source].inputs
            if inputs.tokenizer is not None:
                self._vocabularies[source] = Vocabulary(inputs.tokenizer)
            else:
                self._vocabularies[source] = vocabulary_of(inputs.table.stores[0].manifest, None)[0]
        return self._vocabularies[source]


def _stamp(place: str) -> Any:
    """Changes with the file."""
    if is_remote(place):
        return None
    try:
        stat = Path(place).stat()
    except FileNotFoundError:
        raise ConfigError(f"{place} was removed while it was shown; restore it, or end penstock ui") from None
    return stat.st_mtime_ns, stat.st_ino
