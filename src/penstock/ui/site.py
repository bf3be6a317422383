"""Site: the targets that were opened, and a view of each that lasts as long as the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError
from penstock.files.filesystems import local_or_none
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.status import Status, look
from penstock.ui.file_rows import FileRows
from penstock.ui.plans import PlanView
from penstock.ui.rows import RowTable
from penstock.ui.runs import RunFile
from penstock.ui.store_rows import StoreRows
from penstock.ui.targets import Kind, Target
from penstock.ui.token_parts import RowTokenizer

_RATE_SECONDS = 5.0
"""Time over which rates are measured, once the page is open so long."""


class QueueView:
    """Queue that is looked at again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._before: list[Status] = []
        self._id = ""

    def look(self) -> Status:
        """The state now, with rates since a look of some seconds ago."""
        queue = Queue.read(self._path)
        now = look(queue)
        with self._lock:
            if queue.id != self._id:
                self._id, self._before = queue.id, []  # purged and made again
            while len(self._before) > 1 and now.at - self._before[1].at >= _RATE_SECONDS:
                self._before.pop(0)
            rated = now.since(self._before[0]) if self._before and now.at - self._before[0].at > 0.5 else now
            if not self._before or now.at - self._before[-1].at >= 0.5:
                self._before.append(now)
            while self._before and time.monotonic() - self._before[0].at > 60:
                self._before.pop(0)  # nobody looked for a while: the rate would be that of the pause
        return rated


View = StoreRows | FileRows | PlanView | RunFile | QueueView


class Site:
    """Targets by number. Each is opened when it is first looked at, and nothing else can be opened."""

    def __init__(self, targets: Sequence[Target], *, tokenizer: str | None = None, template: str | None = None) -> None:
        self.targets = list(targets)
        self.tokenizer, self._template = tokenizer, template
        self._lock = threading.Lock()
        self._row_tokenizer: RowTokenizer | None = None
        self._views = [self._view(target) for target in self.targets]

    def target(self, number: int, *kinds: Kind) -> Target:
        """Target of a number; an error unless it is of one of the kinds."""
        if not 0 <= number < len(self.targets):
            raise ConfigError(f"there is no target {number}; {len(self.targets)} are open, counted from 0")
        target = self.targets[number]
        if kinds and target.kind not in kinds:
            raise ConfigError(f"{target.shown} is a {target.kind}; it has no such page")
        return target

    def rows(self, number: int) -> RowTable:
        self.target(number, "store", "files")
        return cast(RowTable, self._views[number])

    def store(self, number: int) -> StoreRows:
        self.target(number, "store")
        return cast(StoreRows, self._views[number])

    def plan(self, number: int) -> PlanView:
        self.target(number, "loader")
        return cast(PlanView, self._views[number])

    def run(self, number: int) -> RunFile:
        self.target(number, "run")
        return cast(RunFile, self._views[number])

    def queue(self, number: int) -> QueueView:
        self.target(number, "queue")
        return cast(QueueView, self._views[number])

    def row_tokenizer(self) -> RowTokenizer | None:
        """Tokenizer for raw rows, if one was given."""
        with self._lock:
            if self._row_tokenizer is None and self.tokenizer is not None:
                self._row_tokenizer = RowTokenizer(self.tokenizer, self._template)
            return self._row_tokenizer

    def store_at(self, place: str) -> Target | None:
        """Target of the store at a place, if it is open."""
        return next((each for each in self.of_kind("store") if same_place(each.place, place)), None)

    def of_kind(self, kind: Kind) -> list[Target]:
        return [target for target in self.targets if target.kind == kind]

    def _view(self, target: Target) -> View:
        if target.kind == "store":
            return StoreRows(target.place, self.tokenizer)
        if target.kind == "files":
            return FileRows(target.place)
        if target.kind == "loader":
            return PlanView(target.place)
        return RunFile(target.place) if target.kind == "run" else QueueView(target.place)


def same_place(one: str, other: str) -> bool:
    """True if two paths or URLs are one place."""
    first, second = local_or_none(one), local_or_none(other)
    if first is None or second is None:
        return one.rstrip("/") == other.rstrip("/")
    return Path(first).expanduser().absolute() == Path(second).expanduser().absolute()
