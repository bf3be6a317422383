"""Executor on Ray: each task of a job is a Ray task, on any node of a cluster that passed the checks.

Ray retries nothing by itself: the driver of a job counts crashes. The work travels once to each node and is unpickled
once in each worker process. A task costs the driver two small messages, and results hold no rows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock._optional import require
from penstock.engines.executor import Outcome, Task, Work
from penstock.engines.node_checks import ABSENT, SILENT, NodeFault, error_of, versions_here, whole_paths
from penstock.engines.pickled_work import pickled
from penstock.engines.ray_connection import connect
from penstock.engines.ray_nodes import NodeTable
from penstock.engines.ray_worker import board_class, probe_function, task_function, unpickled_error
from penstock.errors import ConfigError, StalledError
from penstock.pipeline.processes import RemoteError

log = logging.getLogger(__name__)

_BOARD_SECONDS = 1.0
"""Interval at which log lines are fetched."""
_CLOSE_SECONDS = 5.0
_PROBE_SECONDS, _INSTALL_SECONDS = 120.0, 900.0
"""Time for the answers of all nodes; a runtime environment may install packages first."""
_NO_ROOM_SECONDS = 600.0
"""Time in which an autoscaler has to bring the first node with room for a task."""


@dataclass(slots=True)
class _Sent:
    """A task that Ray has."""

    task: Task
    ref: Any
    since: float


class RayExecutor:
    """Executor on a Ray cluster.

    `address` is one of Ray's: `host:port` on a machine of the cluster, `ray://host:port` from outside of it, `auto`
    for the cluster of this machine. Without one it is the cluster that this process is connected to, that of
    `RAY_ADDRESS`, that of this machine, or a new one on this machine alone, in this order. A connection that was open
    before stays open after `close`.

    `max_in_flight` limits the tasks that Ray has at once, running and waiting: by default some more than there are
    slots, so that an autoscaler sees demand. Nodes have `probe_seconds` to answer the checks. A head node that does not
    answer for `head_seconds` is an error: Ray itself ends the process after a minute.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus_per_task: float = 1,
        memory_bytes: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_in_flight: int | None = None,
        connect_seconds: float = 5.0,
        probe_seconds: float | None = None,
        head_seconds: float = 30.0,
    ) -> None:
        for name, value in (("cpus_per_task", cpus_per_task), ("memory_bytes", memory_bytes)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if max_in_flight is not None and max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, got {max_in_flight!r}")
        self.address = address
        self.cpus_per_task, self.memory_bytes, self.max_in_flight = cpus_per_task, memory_bytes, max_in_flight
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._connect_seconds, self._head_seconds = connect_seconds, head_seconds
        self._probe_seconds = probe_seconds or (_INSTALL_SECONDS if runtime_env else _PROBE_SECONDS)
        self._ray: Any = None
        self._setup: Any = None
        self._owned = self._lost = self._closed = False
        self._table = NodeTable(cpus_per_task, memory_bytes)
        self._waiting: deque[Task] = deque()
        self._sent: dict[int, _Sent] = {}
        self._numbers = 0
        self._remotes: dict[str, Any] = {}
        self._ended: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._lines = LogLines()
        self._board: Any = None
        self._board_asked: float | None = None
        self._board_answers = True
        self._board_gone_until = 0.0
        self._places: dict[str, tuple[str, int]] = {}
        """Node and process of running tasks, by name."""
        self._last_room = 0.0

    @property
    def slots(self) -> int:
        """Tasks that run at once on the nodes that are alive now; nodes may join and leave. Connects if need be."""
        self._open()
        return self._table.slots

    @property
    def room(self) -> int:
        """Tasks that Ray is given at once: some more than run, so that an autoscaler sees demand."""
        return self.max_in_flight or max(2 * self.slots, self.slots + 4)

    def start(self, work: Work, checks: Mapping[str, Any]) -> None:
        """Connect, check every node, and make the work known to the cluster."""
        if self._setup is not None:
            raise RuntimeError("the executor has been started before; make a new one for each job")
        payload = np.frombuffer(pickled(work), np.uint8)
        self._open()
        ray = self._ray
        try:
            name = f"penstock-{secrets.token_hex(8)}"
            setup = {
                "job": name,
                "work": payload,
                "cores": max(1, int(self.cpus_per_task)),
                "directory": str(Path.cwd()),
                "checks": whole_paths(checks),
                "versions": versions_here(),
                "checked_nodes": [],
                "board": name,
                "log_level": logging.getLogger("penstock").getEffectiveLevel(),
            }
            setup["checked_nodes"] = self._probe(setup, self._options())
            self._setup = ray.put(setup)
            self._function = ray.remote(task_function())
            self._board = ray.remote(board_class()).options(name=name, num_cpus=0, max_restarts=-1).remote()
        except BaseException:
            self.close()
            raise
        self._last_room = time.monotonic()
        if not self.slots:
            log.warning(
                "no node of the cluster has room for a task (%s): %s; waiting for one to join",
                *(self._table.wanted, self._table.described() or "it has no nodes with CPUs"),
            )

    def _open(self) -> None:
        """Connect, unless that is done."""
        if self._ray is not None or self._closed:
            return
        ray = require("ray", "ray")
        self._owned = connect(self.address, self._runtime_env, self._connect_seconds)
        self._ray = ray
        self._table.start(ray)

    def submit(self, task: Task) -> None:
        """Have a task run as soon as there is room; its outcome comes by `wait`."""
        self._waiting.append(task)
        self._pump()

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        until = time.monotonic() + timeout_seconds
        outcomes: list[Outcome] = []
        while (self._sent or self._waiting) and not outcomes:
            self._check_head()
            self._pump()
            self._ask_board()
            left = until - time.monotonic()
            outcomes = [*self._ready(min(max(left, 0.0), _BOARD_SECONDS))]
            if left <= 0:
                break
        self._pump()
        return outcomes

    def cancel(self, task: Task) -> None:
        """End a task: one that runs loses its process. No outcome comes for it."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(task)
        for number, sent in [*self._sent.items()]:
            if sent.task.name == task.name:
                del self._sent[number]
                self._ray.cancel(sent.ref, force=True)

    def snapshot(self) -> dict[str, Any]:
        by_node: dict[str, list[str]] = {self._table.name(node): [] for node in self._table.alive()}
        for sent in self._sent.values():
            if (place := self._places.get(sent.task.name)) is not None:
                by_node.setdefault(self._table.name(place[0]), []).append(sent.task.name)
        return {
            "nodes": len(self._table.alive()),
            "slots": self.slots,
            "running": sum(map(len, by_node.values())),
            "waiting": len(self._waiting) + len(self._sent) - sum(map(len, by_node.values())),
            "by_node": by_node,
            "repeated_lines": self._lines.repeated(),
        }

    def close(self) -> None:
        """Cancel what runs, and let go of the cluster; a second call does nothing."""
        ray, self._ray, self._closed = self._ray, None, True
        if ray is None:
            return
        self._waiting.clear()
        if not self._lost:
            for sent in self._sent.values():
                ray.cancel(sent.ref, force=True)
            if self._board is not None:
                with contextlib.suppress(Exception):
                    self._hear(ray.get(self._board.take.remote(), timeout=_CLOSE_SECONDS))
                ray.kill(self._board)
        self._sent.clear()
        self._lines.sum_up()
        self._table.stop()
        self._setup = self._board = None
        if self._owned and not self._lost:
            ray.shutdown()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """Options of tasks and probes. A connection of the caller's own has another environment than is asked for."""
        options: dict[str, Any] = {"max_retries": 0}
        if self._runtime_env and not self._owned:
            options["runtime_env"] = self._runtime_env
        return options

    def _pump(self) -> None:
        """Hand tasks to Ray while it has fewer than it may."""
        while self._waiting and len(self._sent) < self.room:
            task = self._waiting.popleft()
            self._numbers += 1
            fields = {**asdict(task), "arguments": dict(task.arguments)}
            sent = _Sent(task, self._remote(task.kind).remote(self._setup, fields), time.monotonic())
            self._sent[self._numbers] = sent
            self._notify(self._numbers, sent.ref)

    def _remote(self, kind: str) -> Any:
        """Function of Ray, by whose name its dashboard counts tasks of a kind."""
        if kind not in self._remotes:
            sizes = {"memory": self.memory_bytes} if self.memory_bytes else {}
            self._remotes[kind] = self._function.options(
                name=f"penstock {kind}",
                num_cpus=self.cpus_per_task,
                scheduling_strategy="SPREAD",
                **sizes,
                **self._options(),
            )
        return self._remotes[kind]

    def _notify(self, number: int, ref: Any) -> None:
        """Put a call into the queue when it ends: waiting for all of them would look at each of them each time."""
        ended = self._ended
        ref.future().add_done_callback(lambda future: ended.put((number, future)))

    def _ready(self, timeout_seconds: float) -> Iterator[Outcome]:
        """Outcomes that are there, after waiting for the first."""
        with contextlib.suppress(queue.Empty):
            item = self._ended.get(timeout=timeout_seconds) if timeout_seconds else self._ended.get_nowait()
            while True:
                number, future = item
                if number == 0:
                    self._board_answers = True
                    if future.exception() is None:
                        self._hear(future.result())
                elif (sent := self._sent.get(number)) is not None:
                    outcome = self._outcome(sent, future)
                    del self._sent[number]
                    self._places.pop(sent.task.name, None)
                    yield outcome
                item = self._ended.get_nowait()

    def _outcome(self, sent: _Sent, future: Future[Any]) -> Outcome:
        task, seconds = sent.task, time.monotonic() - sent.since
        error = future.exception()
        if error is not None:
            return self._outcome_of(error, task, seconds)
        self._last_room = time.monotonic()
        answer = future.result()
        node = self._table.name(answer["node"])
        self._log(answer.get("lines", ()))
        if "absent" in answer:
            fault = error_of([(node, NodeFault(ABSENT, answer["absent"]))], versions_here())
            return Outcome(task, error=fault, node=node, seconds=seconds)
        if "error" in answer:
            return Outcome(task, error=unpickled_error(answer["error"]), node=node, seconds=answer["seconds"])
        return Outcome(task, answer["result"], node=node, seconds=answer["seconds"])

    def _outcome_of(self, error: BaseException, task: Task, seconds: float) -> Outcome:
        """Outcome of a task that Ray could not run to its end."""
        kinds = self._ray.exceptions
        if task.name not in self._places and isinstance(error, kinds.WorkerCrashedError):
            self._ask_board_now()
        node, process = self._places.get(task.name, ("", 0))
        name = self._table.name(node) if node else ""
        where = f" (process {process})" if process else ""
        if isinstance(error, kinds.RayTaskError):
            return Outcome(task, error=RemoteError(f"Ray could not run the task: {error}"), node=name, seconds=seconds)
        if isinstance(error, kinds.RuntimeEnvSetupError):
            problem = ConfigError(f"the runtime_env cannot be set up{where}: {error}")
            return Outcome(task, error=problem, node=name, seconds=seconds)
        lost = isinstance(error, kinds.NodeDiedError | kinds.LocalRayletDiedError | kinds.ObjectLostError)
        if not lost and node and not self._table.answers(node):
            lost = True
        said = str(error).strip().partition("\n")[0]  # Ray adds what it knows of all processes
        if lost:
            crash = f"the node was lost{where}: {said}"
        elif isinstance(error, kinds.OutOfMemoryError):
            crash = f"out of memory{where}: {said}"
        elif isinstance(error, kinds.WorkerCrashedError):
            crash = (
                f"the worker process died{where}: by a signal (a fault in compiled code, or SIGKILL, by which the "
                "system ends a process that takes too much memory), or by os._exit"
            )
        else:
            crash = f"{type(error).__name__}{where}: {said}"
        return Outcome(task, crash=crash, node_lost=lost, node=name, seconds=seconds)

    # -- the cluster ---------------------------------------------------------------------------------------------------

    def _probe(self, setup: dict[str, Any], options: dict[str, Any]) -> list[str]:
        """Nodes that passed the checks: all that are alive; raises if one did not."""
        ray = self._ray
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        probe = ray.remote(probe_function())
        given = ray.put(setup)
        asked = {
            node: probe.options(
                name="penstock-probe", num_cpus=0, scheduling_strategy=affinity(node, soft=False), **options
            ).remote(given)
            for node in self._table.alive()
        }
        ready, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=self._probe_seconds)
        in_time, faults = set(ready), []
        for node, ref in asked.items():
            if ref not in in_time:
                ray.cancel(ref, force=True)
                found = [[SILENT, f"no answer within {self._probe_seconds:g} s"]]
            else:
                try:
                    found = ray.get(ref)
                except ray.exceptions.RayError as error:
                    if not self._table.answers(node):
                        continue  # gone meanwhile
                    found = [[SILENT, f"its probe failed ({type(error).__name__}: {error})"]]
            faults += [(self._table.name(node), NodeFault(*fault)) for fault in found]
        if faults:
            raise error_of(faults, setup["versions"])
        return [*asked]

    def _check_head(self) -> None:
        silent = self._table.silent_seconds()
        if silent > self._head_seconds or not self._table.is_home_alive:
            self._lost = True
            reason = f"the head node of the Ray cluster has not answered for {silent:.0f} s"
            if not self._table.is_home_alive:
                reason = "the node on which this process runs has left the Ray cluster"
            raise StalledError(
                f"{reason}, and the job cannot go on; its done tasks are kept in the job directory: start the cluster "
                "again and run the same command"
            )
        if self.slots:
            self._last_room = max(self._last_room, time.monotonic() - 1.0)
        elif time.monotonic() - self._last_room > _NO_ROOM_SECONDS:
            raise ConfigError(
                f"no node of the cluster has had room for a task ({self._table.wanted}) for {_NO_ROOM_SECONDS:g} s: "
                f"{self._table.described() or 'it has no nodes with CPUs'}; ask for less, or add larger nodes"
            )

    def _ask_board(self) -> None:
        now = time.monotonic()
        if self._board_answers and (self._board_asked is None or now - self._board_asked > _BOARD_SECONDS):
            self._board_asked, self._board_answers = now, False
            self._notify(0, self._board.take.remote())

    def _ask_board_now(self) -> None:
        """Ask the board where tasks began. One that is gone, with its node perhaps, is not waited for each time."""
        if time.monotonic() < self._board_gone_until:
            return
        try:
            self._hear(self._ray.get(self._board.take.remote(), timeout=_CLOSE_SECONDS))
        except self._ray.exceptions.RayError:
            self._board_gone_until = time.monotonic() + 10 * _CLOSE_SECONDS

    def _hear(self, told: Mapping[str, Any]) -> None:
        """Take the reports of workers: where tasks run, and their log lines."""
        running = {sent.task.name for sent in self._sent.values()}
        for task, node, process in told["began"]:
            if task in running:
                self._places[task] = (node, process)
        self._log(told["lines"])
        self._lines.lost += told["lost"]

    def _log(self, lines: Iterable[Any]) -> None:
        for (name, level, text, node), count in lines:
            self._lines.add(name, level, text, self._table.name(node), count)


_MOST_LINES = 10_000


class LogLines:
    """Log lines of tasks in the driver's log: each once, with the node it came from first; repeats are counted."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], int] = {}
        self._nodes: dict[tuple[str, int, str], set[str]] = {}
        self.lost = 0
        """Lines that were neither logged nor counted one by one."""

    def add(self, name: str, level: int, text: str, node: str, count: int = 1) -> None:
        """Log a line that is new; count one that is not."""
        key = (name, level, text)
        if key not in self._counts:
            if len(self._counts) >= _MOST_LINES:
                self.lost += count
                return
            logging.getLogger(name).log(level, "[%s] %s", node, text)
            self._counts[key], self._nodes[key] = 0, set()
            count -= 1
        self._counts[key] += count
        if len(self._nodes[key]) < _MOST_LINES // 100:
            self._nodes[key].add(node)

    def repeated(self) -> dict[str, int]:
        """Texts of lines that came again, with the number of times."""
        return {text: count for (_, _, text), count in self._counts.items() if count}

    def sum_up(self) -> None:
        """Log how often lines came again, and forget them."""
        for (name, level, text), count in self._counts.items():
            if count:
                nodes = len(self._nodes[name, level, text])
                where = f"on {nodes} nodes" if nodes > 1 else f"on {next(iter(self._nodes[name, level, text]))}"
                logging.getLogger(name).log(level, "%s more times, %s: %s", f"{count:,}", where, text)
        if self.lost:
            logging.getLogger(__name__).warning("%s more log lines of tasks were not shown", f"{self.lost:,}")
        self._counts, self._nodes, self.lost = {}, {}, 0
