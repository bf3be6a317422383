"""Steps made beside the training process: one process assembles batches, others make the windows for it.

    training process  <-- batches in shared memory --  StepService  <-- windows in shared memory --  WindowService x N

Each of them opens the files by itself. A batch lies in one of a few slots of shared memory, and its arrays are views of
the slot, which is used again when no view is left. A consumer that keeps batches gets copies, so there are always slots
to write to. A process that dies is replaced; the position says what it has to make.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batching.collate import CompactBatch
from penstock.errors import StageError
from penstock.loaders.streamed.sampled_windows import (
    SampledWindow,
    ThreadWindows,
    WindowInput,
    WindowMakers,
    keep,
    reserve,
)
from penstock.loaders.streamed.serialization import PackedCursors, counts_from, counts_to, window_from, window_to
from penstock.loaders.streamed.spec import StreamSpec
from penstock.loaders.streamed.steps import MadeStep, StepMaker, StreamPosition
from penstock.loaders.streamed.windows import BlockSequence, OpenSplit, StreamCursor
from penstock.memory import MemoryBudget
from penstock.pipeline.array_worker import (
    MAX_DEATHS,
    Answer,
    ArrayWorker,
    ArrayWorkers,
    WorkerDiedError,
    died,
    on_release,
)
from penstock.sources.inputs import shown_input

log = logging.getLogger(__name__)
_SLOTS = 20
_METADATA = "@"
"""Beginning of the names of arrays that are metadata."""
_LEAST_IN_ROTATION = 3
"""Slots that a consumer which keeps batches leaves to the process."""
_LEAST_AHEAD, _SHARE = 2, 8
"""Batches made ahead: at least so many, and as many as an eighth of the budget holds."""
_INTERVAL_SECONDS, _INTERVALS = 1.0, 2
"""More processes start after so many intervals in a row in which the trainer waited."""
_WAITING_SHARE, _ASSEMBLING_SHARE = 0.1, 0.8
"""Shares of an interval: the trainer waits from the first on, and from the second on the assembling is the limit."""


class WindowService:
    """Makes windows in a process of its own."""

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._sequences: tuple[int, list[BlockSequence]] = (-1, [])
        self._splits: dict[int, OpenSplit] = {}
        self._processes = 0
        """Processes that share the streams."""

    def prepare(self) -> None:
        """Open the input, and have the tokenizer encode something: what it needs is loaded then."""
        _ = self._spec.filler
        if (recipe := self._spec.recipe) is not None:
            recipe.load_tokenizer().encode(pa.array(["a"]))

    def answer(self, request: bytes) -> Answer:
        epoch, stream, processes, source = pickle.loads(request)  # noqa: S301 - written by the parent process
        if self._sequences[0] != epoch:
            self.close()
            self._sequences = (epoch, self._spec.sequences(epoch))
        if self._processes != processes:  # more than before: this one has fewer streams, and keeps their files only
            for other in [other for other in self._splits if (other - stream) % processes]:
                self._splits.pop(other).close()
            self._processes = processes
        split = self._splits.setdefault(stream, OpenSplit())
        return window_to(self._spec.filler.fill(self._sequences[1][stream], source, split))

    def close(self) -> None:
        """Close the files; the next request opens them again."""
        for split in self._splits.values():
            split.close()
        self._splits = {}


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """Processes that make windows: at first, and at most, if the trainer waits for its batches."""

    first: int
    most: int


class Demand:
    """Tells when more processes are worth it: the trainer waits, and not for the thread that assembles batches."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._seen: tuple[float, float, float] | None = None
        self._intervals = 0

    def wants_more(self, waited: float) -> bool:
        """After a wait of so many seconds altogether: True if the last intervals were spent with too much of it."""
        now, worked = self._clock(), self._cpu()
        if self._seen is None or waited < self._seen[1]:
            self._seen = now, waited, worked
        since, waited_before, worked_before = self._seen
        if now - since < _INTERVAL_SECONDS:
            return False
        waits = waited - waited_before > _WAITING_SHARE * (now - since)
        assembles = worked - worked_before > _ASSEMBLING_SHARE * (now - since)
        self._seen = now, waited, worked
        self._intervals = self._intervals + 1 if waits and not assembles else 0
        if self._intervals < _INTERVALS:
            return False
        self._intervals = 0
        return True


class ProcessWindows:
    """Windows made by processes. All windows of a stream come from one, which keeps its file open."""

    def __init__(self, spec: StreamSpec, budget: MemoryBudget, count: ProcessCount) -> None:
        self._spec, self._budget, self._most = spec, budget, count.most
        # Each process has caches of its own, which share the budget.
        service = WindowService(replace(spec, memory=max(1, spec.memory // count.most)))
        self._workers = ArrayWorkers(service, count.first)
        self._workers.start()

    @property
    def count(self) -> int:
        return len(self._workers)

    def grow(self) -> None:
        """Start as many processes again, up to the most, unless some are starting."""
        count = self.count
        if self._workers.starting or count >= self._most:
            return
        try:
            self._workers.add(min(count, self._most - count))
        except OSError as error:
            self._most = count
            log.warning("no more processes for %s than %d: %s", shown_input(self._spec.paths), count, error)

    def submit(
        self, sequence: BlockSequence, source: WindowInput | StreamCursor, split: OpenSplit, by: object
    ) -> Future[SampledWindow]:
        self._workers.join_ready()
        request = pickle.dumps((sequence.epoch, sequence.stream, self.count, source))
        charge = reserve(self._budget, self._spec.options.window().nbytes, by)

        def use(answer: Answer) -> SampledWindow:
            return keep(window_from(answer), charge, self._budget)

        def end(done: Future[SampledWindow]) -> None:
            if done.cancelled() or done.exception() is not None:
                charge.release()

        def explain(died: str) -> StageError:
            return self._located(died, sequence, source)

        work = self._workers.submit(sequence.stream, request, use, explain)
        work.add_done_callback(end)
        return work

    def close(self) -> None:
        self._workers.close()

    def _located(self, died: str, sequence: BlockSequence, source: WindowInput | StreamCursor) -> StageError:
        """The error of a window that kills processes, with the place where it begins."""
        start = source.start
        catalog, rows = self._spec.catalog, self._spec.options.window().of(sequence.stream, start.number)[0]
        file, row, offset = catalog.located(int(sequence.blocks[start.block]), start.at)
        reason = f"{died}: somewhere in the {rows} rows that begin here; use a smaller shuffle_window or window_bytes"
        return StageError(reason, stage="a worker process", file=file, row=row, offset=offset)


class StepService:
    """Process that assembles batches; other processes make their windows."""

    def __init__(self, spec: StreamSpec, count: ProcessCount) -> None:
        self._spec, self._count = spec, count
        self._windows: ProcessWindows | None = None
        self._demand = Demand()
        self._position: StreamPosition | None = None
        self._maker: StepMaker | None = None

    def answer(self, request: bytes) -> Answer:
        """Go to a position; or make the next step, with so much memory, for a trainer that waited so long."""
        wanted = pickle.loads(request)  # noqa: S301 - written by the parent process
        if isinstance(wanted, StreamPosition):
            self._position = wanted
            return Answer()
        if self._position is None:
            return Answer({"over": True})
        position, self._position = self._position, None
        maker = self._opened()
        memory, waited = wanted
        maker.budget.shrink_to(memory)
        if self._windows is not None and self._demand.wants_more(waited):
            self._windows.grow()
        made = maker.make(position)
        # Ranks agree on the end of an epoch; one alone goes on to the next.
        goes_on = made.has_data or self._spec.rank.world_size > 1
        self._position = made.following if goes_on else position.next_epoch()
        return self._answer(made, maker.budget.used)

    def close(self) -> None:
        """Close the files and end the workers; the next request opens them again."""
        maker, self._maker, self._windows = self._maker, None, None
        if maker is not None:
            maker.close()

    def _opened(self) -> StepMaker:
        if self._maker is None:
            spec, budget = self._spec, MemoryBudget(self._spec.memory)
            makers: WindowMakers
            if self._count.most > 1:
                makers = self._windows = ProcessWindows(spec, budget, self._count)
            else:
                makers = ThreadWindows(spec.filler, budget, 1)
            self._maker = StepMaker(spec, makers, budget)
        return self._maker

    @staticmethod
    def _answer(made: MadeStep, used: int) -> Answer:
        arrays: dict[str, npt.NDArray[Any]] = {"cursors": PackedCursors.pack(made.following.cursors)}
        if made.compact is not None:
            arrays |= made.compact.parts()
        metadata: dict[str, Any] = {}
        for name, value in made.metadata.items():  # the names of all of them keep their order in the notes
            array = isinstance(value, np.ndarray)
            if array:
                arrays[_METADATA + name] = value
            metadata[name] = None if array else value
        notes: dict[str, Any] = {"metadata": metadata}
        notes |= {
            "tokens": made.tokens,
            "has_data": made.has_data,
            "step": [made.following.epoch, made.following.step, made.following.epoch_step],
            "counts": [counts_to(counts) for counts in made.counts],
            "used": used,
        }
        return Answer(notes, arrays)


class ProcessSteps:
    """Steps made by other processes. Not thread-safe."""

    elsewhere = True

    def __init__(self, spec: StreamSpec, budget: MemoryBudget, count: ProcessCount) -> None:
        self.spec, self._budget, self._holder = spec, budget, object()
        _ = spec.catalog  # what is wrong with the input is no problem of sending it
        self._worker = ArrayWorker(StepService(spec, count), _SLOTS)
        self._position: StreamPosition | None = None
        """Position of the answer that comes next; None: the process has to be told one."""
        self._asked: deque[int | None] = deque()
        """Slots of the requests that are not answered yet; None for a position."""
        self._received: deque[tuple[int, Answer]] = deque()
        """Steps that came before they were asked for."""
        self._free = deque(range(_SLOTS))
        self._sizes = [0] * _SLOTS
        self._held = 0
        self._waited = 0.0
        """Seconds of waiting for steps."""

    @property
    def pid(self) -> int | None:
        """The process that assembles batches, if one runs."""
        return self._worker.pid

    def make(self, position: StreamPosition) -> MadeStep:
        code: int | None = None
        for _ in range(MAX_DEATHS):
            try:
                self.expect(position)
                slot, answer = self._receive()
                return self._made(slot, answer)
            except WorkerDiedError:
                code = self._restart()
                log.warning(
                    "the process that makes the batches of %s ended at step %d, exit code %s; another one goes on",
                    shown_input(self.spec.paths),
                    position.step,
                    code,
                )
            except BaseException:
                self._position = None
                raise
        raise self._located(position, died(code))

    def expect(self, position: StreamPosition) -> None:
        """Let the process go to a position, unless it is there, and make steps from there on."""
        if not self._at(position):
            request = [(0, pickle.dumps(position))]
            # Sent before the answers to earlier requests are taken, so that the process does not work on them.
            self._worker.send(request, supersede=True)
            if not self._drain():
                self._worker.send(request)
            self._asked.append(None)
            self._position = position
        self._ask_more()

    @property
    def at_hand(self) -> int:
        """Steps with data that have come, up to the first without: there the epoch may end."""
        for _ in range(self._worker.unread):
            self._receive_next()
        return sum(1 for _ in takewhile(lambda step: step[1].notes.get("has_data"), self._received))

    def ready(self) -> bool:
        """True if a step has come; does not wait for one."""
        while not self._received and self._worker.answered:
            self._receive_next()
        return bool(self._received)

    def skip_to(self, position: StreamPosition) -> None:
        """Go to a position: without the steps before it if they are made already, or else directly."""
        here = self._position
        ahead = -1 if here is None or here.epoch != position.epoch else position.step - here.step
        if here is None or not 0 <= ahead <= _SLOTS or position.epoch_step - here.epoch_step != ahead:
            self._position = None
            self.expect(position)
            return
        while self._received or self._asked:
            slot, answer = self._receive()
            if answer.notes.get("step") == [position.epoch, position.step + 1, position.epoch_step + 1]:
                self._received.appendleft((slot, answer))
                self._position = position
                return
            self._free.append(slot)
            if answer.notes.get("over") or answer.notes["step"][:2] > [position.epoch, position.step]:
                break
            self._ask_more()
        self._position = None

    def forget(self) -> None:
        """Have the process go to the next position that is asked for, wherever it is."""
        self._position = None

    def close(self) -> None:
        self._worker.close()
        self._hold(0)

    def _at(self, position: StreamPosition) -> bool:
        here = self._position
        if here is None or position is here:
            return here is not None
        return not position.cursors and not here.cursors and position == here

    def _ask_more(self) -> None:
        """Ask for steps ahead, as many as there are slots and memory for; several at a time, which costs less."""
        room = max(1, self._budget.limit - self._budget.used + self._held)
        most = max(_LEAST_AHEAD, min(_SLOTS, room // _SHARE // max(*self._sizes, 1)))
        due = len(self._asked) + len(self._received)
        count = min(most - due, len(self._free))
        # A message wakes the process, which costs the trainer more than all else that it does for a step.
        if due > most // 2 or (count < most // 4 and due >= _LEAST_AHEAD) or not count:
            return
        request = pickle.dumps((room, self._waited))
        slots = [self._free.pop() for _ in range(count)]
        self._worker.send((slot, request) for slot in slots)
        self._asked.extend(slots)

    def _receive(self) -> tuple[int, Answer]:
        """The next step."""
        if not self._received:
            began = time.monotonic()
            while not self._received:
                self._receive_next()
            self._waited += time.monotonic() - began
        return self._received.popleft()

    def _receive_next(self) -> None:
        try:
            answer = self._worker.receive()
        except WorkerDiedError:
            raise
        except Exception:  # of the service: it is an answer
            slot = self._asked.popleft()
            if slot is not None:
                self._free.append(slot)
            raise
        except BaseException:  # Ctrl-C: maybe half an answer was read
            self._restart()
            raise
        slot = self._asked.popleft()
        if slot is not None:
            self._received.append((slot, answer))

    def _drain(self) -> bool:
        """Take the answers to earlier requests, for nothing; False if the process died meanwhile."""
        while self._asked:
            try:
                self._receive_next()
            except WorkerDiedError:
                self._restart()
                return False
            except Exception:  # noqa: BLE001 - of a step that nobody asks for any more
                continue
        self._free.extend(slot for slot, _ in self._received)
        self._received.clear()
        return True

    def _restart(self) -> int | None:
        self._position = None
        self._free.extend(slot for slot in self._asked if slot is not None)
        self._free.extend(slot for slot, _ in self._received)
        self._asked.clear()
        self._received.clear()
        return self._worker.restart()

    def _made(self, slot: int, answer: Answer) -> MadeStep:
        notes, found = answer.notes, answer.arrays
        if "over" in notes:
            raise AssertionError("the process is at no position")
        packed = found.pop("cursors")
        self._sizes[slot] = packed.base.nbytes  # type: ignore[union-attr]  # the whole slot
        self._hold(notes["used"] + sum(self._sizes))
        cursors = PackedCursors(packed.tobytes())
        epoch, step, epoch_step = notes["step"]
        following = StreamPosition(epoch, step, epoch_step, cursors)
        # Small, and often kept: copies do not keep the slot.
        metadata = notes["metadata"]
        for name in [name for name in found if name[0] == _METADATA]:
            metadata[name[1:]] = found.pop(name).copy()
        parts: dict[str, Any] = dict(found)
        if not parts:
            self._free.append(slot)
        elif len(self._free) + len(self._asked) + len(self._received) < _LEAST_IN_ROTATION:
            parts = {name: array.copy() for name, array in parts.items()}
            self._free.append(slot)
        else:
            on_release(found, self._free.append, slot)
        compact = CompactBatch.from_parts(parts, self.spec.form) if parts else None
        counts = [counts_from(values) for values in notes["counts"]]
        goes_on = notes["has_data"] or self.spec.rank.world_size > 1
        self._position = following if goes_on else StreamPosition(epoch + 1, step - 1)
        return MadeStep(compact, metadata, notes["tokens"], notes["has_data"], following, counts)

    def _hold(self, nbytes: int) -> None:
        if nbytes != self._held:
            self._budget.hold("streams", nbytes, by=self._holder)
            self._held = nbytes

    def _located(self, position: StreamPosition, reason: str) -> StageError:
        """The error of a step that kills processes, with the place of the next row of its first stream."""
        spec, stage = self.spec, "the process that makes batches"
        for number in (lane.due(position.epoch_step) for lane in spec.lanes):
            start = position.cursors.get(number, StreamCursor()).start
            blocks = spec.sequences(position.epoch)[number].blocks
            if start.block < len(blocks):
                file, row, offset = spec.catalog.located(int(blocks[start.block]), start.at)
                return StageError(
                    f"{reason}, in step {position.step}, whose first window begins here",
                    stage=stage,
                    file=file,
                    row=row,
                    offset=offset,
                )
        return StageError(f"{reason}, in step {position.step}", stage=stage)
