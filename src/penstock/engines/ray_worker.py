"""Tasks inside the worker processes of Ray: the work is unpickled once a process, and log lines go to the driver.

The function and the actor that Ray runs are pickled by value and import nothing of penstock by themselves, so that a
node without penstock answers with a message instead of failing inside of Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock._optional import require
from penstock.engines.executor import Task, Work
from penstock.engines.node_checks import NodeFault, error_of, fault_of_import, faults_here
from penstock.pipeline.cores import share_machine
from penstock.pipeline.processes import RemoteError

_FLUSH_SECONDS = 1.0
_MOST_LINES = 1_000
"""Different log lines that a process keeps between two messages to the driver; more are counted."""
_MOST_ERROR_BYTES = 1 << 20
"""Largest pickled error: one that holds a long row arrives as text."""


def task_function() -> Callable[..., dict[str, Any]]:
    """Function of all tasks, to be pickled by value."""

    def penstock_task(setup: Any, fields: dict[str, Any]) -> dict[str, Any]:
        from importlib import import_module  # what this function needs travels with it

        node = import_module("ray").get_runtime_context().get_node_id()
        try:
            from penstock.engines.ray_worker import run_task
        except ImportError as error:
            return {"node": node, "absent": f"{type(error).__name__}: {error}"}
        return run_task(setup, fields, node)

    return penstock_task


def probe_function() -> Callable[[Any], list[list[str]]]:
    """Function that says what a node lacks, to be pickled by value."""

    def penstock_probe(setup: Any) -> list[list[str]]:
        try:
            from penstock.engines.ray_worker import probe
        except ImportError as error:
            return [["absent", f"{type(error).__name__}: {error}"]]
        return probe(setup)

    return penstock_probe


def board_class() -> type[Any]:
    """Class of the actor that collects what workers tell: tasks that began and log lines. Pickled by value."""

    class PenstockBoard:
        def __init__(self) -> None:
            self.began: list[Any] = []
            self.lines: dict[Any, int] = {}
            self.lost = 0

        def tell(self, began: Any, lines: list[Any], most: int = 10_000) -> None:
            if began is not None:
                self.began.append(began)
            for line, count in lines:
                if line in self.lines or len(self.lines) < most:
                    self.lines[line] = self.lines.get(line, 0) + count
                else:
                    self.lost += count

        def take(self) -> dict[str, Any]:
            taken = {"began": self.began, "lines": list(self.lines.items()), "lost": self.lost}
            self.began, self.lines, self.lost = [], {}, 0
            return taken

    return PenstockBoard


class _Job:
    """The work of a job as this process has it."""

    def __init__(self, setup: Mapping[str, Any], node: str) -> None:
        self.key: str = setup["job"]
        if node not in setup["checked_nodes"] and (faults := probe(setup)):
            raise error_of([(_node_name(node), NodeFault(*fault)) for fault in faults], setup["versions"])
        share_machine(setup["cores"])
        pa.set_cpu_count(setup["cores"])
        with _directory(setup["directory"]):
            self.work = _loaded(setup)
        self.teller = _Teller(setup["board"], node, setup["log_level"])


_job: _Job | None = None


def probe(setup: Mapping[str, Any]) -> list[list[str]]:
    """Faults of this node, as kind and detail; none if tasks can run here."""
    faults = [*faults_here(setup["checks"], setup["versions"])]
    if not faults:
        try:
            with _directory(setup["directory"]):
                _loaded(setup)
        except Exception as error:  # noqa: BLE001 - any module may raise anything when it is imported
            faults.append(fault_of_import(error))
    return [[fault.kind, fault.detail] for fault in faults]


def _loaded(setup: Mapping[str, Any]) -> Work:
    work: Work = pickle.loads(memoryview(setup["work"]))  # noqa: S301 - written by the driver of this job
    return work


def run_task(setup: Mapping[str, Any], fields: dict[str, Any], node: str) -> dict[str, Any]:
    """Outcome of a task as a small dictionary: its result, or its pickled error."""
    global _job
    since = time.monotonic()
    try:
        if _job is None or _job.key != setup["job"]:
            _job = None
            _job = _Job(setup, node)
        with _directory(setup["directory"]), _job.teller.heard(fields["name"]):
            answer: dict[str, Any] = {"result": _job.work(Task(**fields))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the driver decides
        answer = {"error": pickled_error(error, f"in {fields['name']} on {_node_name(node)}")}
    lines = _job.teller.take_lines() if _job is not None else []
    return {"node": node, "seconds": time.monotonic() - since, "lines": lines, **answer}


@contextlib.contextmanager
def _directory(path: str) -> Iterator[None]:
    """The driver's working directory, in which relative paths are meant, where this node has it."""
    before = Path.cwd()
    with contextlib.suppress(OSError):
        os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _node_name(node: str) -> str:
    address = require("ray", "ray").util.get_node_ip_address()
    return f"{address} (node {node[:8]})"


def pickled_error(error: BaseException, where: str) -> bytes:
    """The error and its causes, with the traceback as a note. As text if it cannot be pickled, or is large."""
    note = f"{where}:\n" + "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = RemoteError(f"the function called sys.exit({error.code!r})", "SystemExit")
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__  # type: ignore[assignment]
    with contextlib.suppress(Exception):
        payload = pickle.dumps((chain, note))
        pickle.loads(payload)  # noqa: S301 - just written; many exceptions pickle, and cannot be made again
        if len(payload) <= _MOST_ERROR_BYTES:
            return payload
    first = chain[0]
    text = str(first)[:_MOST_ERROR_BYTES]
    return pickle.dumps(([RemoteError(f"{type(first).__name__}: {text}", type(first).__name__)], note))


def unpickled_error(payload: bytes) -> Exception:
    """Error of a task, as it was."""
    try:
        chain, note = pickle.loads(payload)  # noqa: S301 - written by a task of this job
    except Exception as error:  # noqa: BLE001 - a class that only the worker has
        return RemoteError(f"a task failed, and its error cannot be loaded here: {type(error).__name__}: {error}")
    for outer, cause in pairwise(chain):
        outer.__cause__ = cause
    chain[0].add_note(note)
    if not isinstance(chain[0], Exception):
        return RemoteError(f"{type(chain[0]).__name__}: {chain[0]}", type(chain[0]).__name__)
    return chain[0]


class _Teller(logging.Handler):
    """Handler of penstock's log lines in a worker.

    Lines travel with the answer of a task, and those of a task that runs on go to the board, which also learns where a
    task began: what a task that kills its process has said is known.
    """

    def __init__(self, board: str, node: str, level: int) -> None:
        super().__init__(level)
        self._board_name, self._node = board, node
        self._board: Any = None
        self._lines: dict[tuple[Any, ...], int] = {}
        self._lost = 0
        self._told_at = 0.0

    @contextlib.contextmanager
    def heard(self, task: str) -> Iterator[None]:
        """Take penstock's log lines of a task; they are not printed here as well."""
        logger = logging.getLogger("penstock")
        level, propagate = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(self.level)
        logger.propagate = False
        self._tell([task, self._node, os.getpid()])
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate

    def take_lines(self) -> list[Any]:
        """Lines since the last call, each with the number of times it came."""
        lines, self._lines = list(self._lines.items()), {}
        if self._lost:
            text = f"{self._lost:,} more log lines of this task are not shown"
            lines.append(((__name__, logging.WARNING, text, self._node), 1))
            self._lost = 0
        return lines

    def emit(self, record: logging.LogRecord) -> None:
        line = (record.name, record.levelno, self.format(record), self._node)
        if line in self._lines or len(self._lines) < _MOST_LINES:
            self._lines[line] = self._lines.get(line, 0) + 1
        else:
            self._lost += 1
        if time.monotonic() - self._told_at > _FLUSH_SECONDS:
            self._tell(None)

    def _tell(self, began: list[Any] | None) -> None:
        """Fire and forget: a task goes on without the board."""
        self._told_at = time.monotonic()
        with contextlib.suppress(Exception):
            if self._board is None:
                self._board = require("ray", "ray").get_actor(self._board_name)
            self._board.tell.remote(began, self.take_lines())
