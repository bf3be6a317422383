"""Processes that answer requests with arrays, which lie in memory that both processes map.

    worker = ArrayWorker(service, slots=4)          # service.answer(request) -> Answer, in the other process
    worker.send([(0, request)])                     # answers come in the order of the requests
    answer = worker.receive()                       # its arrays are views of the slot

The child is a fresh interpreter (never a fork), started without the caller's `__main__`; the service travels with
cloudpickle. Nothing that comes back is unpickled: arrays are bytes, everything else is JSON. The memory has no name, so
nothing stays behind however the processes end; a child ends when its input closes, or its parent is gone.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import subprocess
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, BinaryIO, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import orjson

from penstock import errors
from penstock._forks import check_process
from penstock.errors import ConfigError
from penstock.pipeline.processes import (
    _HEADER,
    ERROR,
    SETUP,
    RemoteError,
    SharedBytes,
    environment,
    is_readable,
    lifeline,
    start_interpreter,
    write_frame,
)

Arrays = dict[str, npt.NDArray[Any]]
Result = TypeVar("Result")
REQUEST, SUPERSEDING = 16, 17
MAX_DEATHS = 3
_ALIGNMENT = 128
_READ_BYTES = 1 << 16
_CAN_SHARE = os.name == "posix"
# One thread a library: the processes are the parallelism, and threads of theirs would compete with the trainer.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(slots=True)
class Answer:
    """Answer to a request: small plain values, and arrays."""

    notes: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


class ArrayService(Protocol):
    """Service in the other process. One thread calls it, once for each request, in order."""

    def answer(self, request: bytes) -> Answer: ...


@runtime_checkable
class Preparing(Protocol):
    """A service that loads what its answers need before its process counts as ready. An answer tells of errors."""

    def prepare(self) -> None: ...


class WorkerDiedError(RemoteError):
    """A worker process that ended by itself, or was killed."""


class PickledService:
    """A service in the form that other processes load.

    It lies in memory that they map: a pipe takes no more than its other end has read, so that each process would start
    only when the one before it was running.
    """

    def __init__(self, service: ArrayService) -> None:
        self.data = _pickled(service)
        self._memory = SharedBytes() if _CAN_SHARE else None
        if self._memory is not None:
            np.frombuffer(self._memory.room(len(self.data)), np.uint8)[:] = np.frombuffer(self.data, np.uint8)
            weakref.finalize(self, self._memory.close)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the memory, which a process inherits."""
        return [] if self._memory is None else [self._memory.descriptor]

    @property
    def message(self) -> bytes:
        """The message that tells a process of it."""
        return self.data if self._memory is None else len(self.data).to_bytes(8, "little")


class ArrayWorker:
    """A process with a service. Used by one thread at a time.

    An answer is written to the slot that its request names; the arrays in it are good until the next request for that
    slot. A service that cannot be sent, or cannot be loaded there, raises `ConfigError`.
    """

    def __init__(self, service: ArrayService | PickledService, slots: int = 1) -> None:
        self._service = service if isinstance(service, PickledService) else PickledService(service)
        self._slots = [SharedBytes() for _ in range(slots)] if _CAN_SHARE else []
        self._close_slots = weakref.finalize(self, _close_all, self._slots)
        self._process = os.getpid()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._greeted = self._closed = False
        self._refusal: str | None = None
        """Why the process could not load the service: it answers no request."""
        self._unread = bytearray()

    @property
    def pid(self) -> int | None:
        """The process, if one runs."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the process, if none runs, without waiting until it is ready."""
        check_process(self._process, "this worker process")
        if self._closed:
            raise RemoteError("the worker process was stopped")
        if self._child is not None:
            return
        descriptors = lifeline() + self._service.descriptors + [part.descriptor for part in self._slots]
        child = start_interpreter("penstock.pipeline.array_server", descriptors, environment() | _ONE_THREAD)
        self._child, self._greeted, self._refusal, self._unread = child, False, None, bytearray()
        self._end = weakref.finalize(self, _end_child, child, self._process)
        with contextlib.suppress(OSError):  # a child that is gone already is noticed when its answer is read
            write_frame(cast(BinaryIO, child.stdin), SETUP, self._service.message)

    def send(self, requests: Iterable[tuple[int, bytes]], *, supersede: bool = False) -> None:
        """Send requests, each with the slot that its answer may take, in one go.

        With `supersede`, earlier requests that nobody works on yet get answers without content.
        """
        self.start()
        assert self._child is not None
        pipe = cast(BinaryIO, self._child.stdin)
        with contextlib.suppress(OSError):  # noticed when the answer is read
            for slot, request in requests:
                payload = slot.to_bytes(4, "little") + request
                pipe.write(_HEADER.pack(len(payload), SUPERSEDING if supersede else REQUEST) + payload)
            pipe.flush()

    def receive(self) -> Answer:
        """The next answer. Waits without the interpreter lock; raises the error of the service."""
        check_process(self._process, "this worker process")
        if not self._greeted:
            self._greet()
        kind, payload = self._read()
        size = int.from_bytes(payload[:4], "little")
        notes = orjson.loads(memoryview(payload)[4 : 4 + size])
        if kind == ERROR:
            raise_error(notes)
        return Answer(notes["notes"], self._arrays(notes, payload, 4 + size))

    @property
    def answered(self) -> bool:
        """True if something has come that was not received; `receive` may still have to wait for its rest."""
        pipe = None if self._child is None else self._child.stdout
        return bool(self._unread) or (pipe is not None and is_readable(pipe.fileno()))

    @property
    def unread(self) -> int:
        """Answers that came together with the last one, up to the first error: `receive` gives them without a wait."""
        count, at = 0, 0
        while at + _HEADER.size <= len(self._unread):
            size, kind = _HEADER.unpack_from(self._unread, at)
            at += _HEADER.size + size
            if kind == ERROR or at > len(self._unread):
                break
            count += 1
        return count

    def restart(self) -> int | None:
        """End the process; the next request starts another one. Returns its exit code."""
        child, self._child = self._child, None
        if child is None or self._end is None:
            return None
        self._end()
        return child.returncode

    def close(self) -> None:
        """End the process; a second call does nothing. Arrays stay as they are."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None and self._end is not None:
            self._end()
        self._close_slots()

    def _greet(self) -> None:
        if self._refusal is None:
            kind, payload = self._read()
            self._greeted = kind != ERROR
            self._refusal = None if self._greeted else payload.decode()
        if self._refusal is not None:
            raise ConfigError(f"a worker process could not load the functions: {self._refusal}")

    def _read(self) -> tuple[int, bytearray]:
        child = self._child
        if child is not None:
            with contextlib.suppress(OSError, ValueError):  # closed by another thread
                size, kind = _HEADER.unpack(self._bytes(child, _HEADER.size))
                return kind, self._bytes(child, size)
        if self._closed or child is None:
            raise RemoteError("the worker process was stopped")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)  # its pipe is closed a moment before it has an exit code
        raise WorkerDiedError("the worker process is gone")

    def _bytes(self, child: subprocess.Popen[bytes], size: int) -> bytearray:
        """The next bytes of the child. A small message takes one call of the system."""
        pipe = cast(io.BufferedReader, child.stdout).raw
        while len(self._unread) < size:
            data = pipe.read(max(_READ_BYTES, size - len(self._unread)))
            if not data:
                raise BrokenPipeError("the worker process is gone")
            self._unread += data
        found = self._unread[:size]
        del self._unread[:size]
        return found

    def _arrays(self, notes: Mapping[str, Any], payload: bytearray, begin: int) -> Arrays:
        nbytes = notes["nbytes"]
        if not nbytes:
            memory = np.empty(0, np.uint8)
        elif self._slots:
            # One array for all, which every view keeps alive: see `on_release`.
            memory = np.frombuffer(self._slots[notes["slot"]].content(nbytes), np.uint8)
        else:
            memory = np.frombuffer(payload, np.uint8, nbytes, begin)
        return views_of(memory, notes["arrays"])


class ArrayWorkers:
    """Several processes with the same service, each with a thread that talks to it.

    Work with the same key goes to the same process, as long as their number is the same. Used by one thread.
    """

    def __init__(self, service: ArrayService, count: int) -> None:
        self._service = PickledService(service)
        self._workers: list[ArrayWorker] = []
        self._threads: list[ThreadPoolExecutor] = []
        self._starting: list[ArrayWorker] = []
        for _ in range(count):
            self._join(ArrayWorker(self._service))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def starting(self) -> int:
        """Processes that were added and take no work yet."""
        self.join_ready()
        return len(self._starting)

    def start(self) -> None:
        """Start all processes, without waiting until they are ready."""
        for worker in self._workers:
            worker.start()

    def add(self, count: int) -> None:
        """Start more processes, which take work when they are ready; OSError if the system has none left."""
        for _ in range(count):
            worker = ArrayWorker(self._service)
            worker.start()
            self._starting.append(worker)

    def join_ready(self) -> None:
        """Let the processes that were added take work, as far as they are ready."""
        for worker in [worker for worker in self._starting if worker.answered]:
            self._starting.remove(worker)
            self._join(worker)

    def submit(
        self,
        key: int,
        request: bytes,
        use: Callable[[Answer], Result],
        explain: Callable[[str], Exception] = WorkerDiedError,
    ) -> Future[Result]:
        """Have a request answered. `use` gets the answer in another thread, before its memory is used again.

        A process that dies is replaced, and gets the same request; one that kills three raises what `explain` makes of
        the reason.
        """
        number = key % len(self._workers)
        return self._threads[number].submit(_ask, self._workers[number], request, use, explain)

    def close(self) -> None:
        """End the processes; what has begun fails."""
        for worker in self._workers + self._starting:
            worker.close()
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def _join(self, worker: ArrayWorker) -> None:
        self._workers.append(worker)
        self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="penstock-worker"))


def _ask(
    worker: ArrayWorker, request: bytes, use: Callable[[Answer], Result], explain: Callable[[str], Exception]
) -> Result:
    code: int | None = None
    for _ in range(MAX_DEATHS):
        worker.send([(0, request)])
        try:
            return use(worker.receive())
        except WorkerDiedError:
            code = worker.restart()
    raise explain(died(code))


def died(code: int | None) -> str:
    """Message for a worker that died repeatedly."""
    return (
        f"{MAX_DEATHS} worker processes in a row died at this place (last exit code {code}; -9 is often the system "
        "running out of memory)"
    )


def on_release(arrays: Arrays, call: Callable[[int], Any], slot: int) -> None:
    """Call `call(slot)` when no view of the arrays of an answer is left."""
    first = next(iter(arrays.values()))
    ending = weakref.finalize(first.base, call, slot)
    ending.atexit = False


def views_of(memory: npt.NDArray[np.uint8], table: list[list[Any]]) -> Arrays:
    """Arrays that lie in memory, by a table of name, dtype, shape and offset."""
    return {name: np.ndarray(shape, _dtype(kind), memory, offset) for name, kind, shape, offset in table}


_dtype = lru_cache(np.dtype)


def table_of(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[list[list[Any]], int]:
    """The table that `views_of` reads, and the bytes of all arrays."""
    table, size = [], 0
    for name, array in arrays.items():
        table.append([name, array.dtype.str, array.shape, size])
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return table, size


def dumped(notes: Mapping[str, Any]) -> bytes:
    """Notes as JSON. Text may hold anything, lone surrogates too: those become question marks."""
    try:
        return orjson.dumps(notes, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(notes, default=str, ensure_ascii=False).encode(errors="replace")


def describe_error(error: BaseException, trace: str) -> dict[str, Any]:
    """An error as plain values."""
    kept = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, type(None)))}
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an error that cannot be printed is still an error
        message = "(its message cannot be shown)"
    kind = type(error)
    return {"module": kind.__module__, "kind": kind.__name__, "message": message, "facts": kept, "traceback": trace}


def raise_error(notes: Mapping[str, Any]) -> None:
    """Raise a described error again: as its class if it is penstock's or Python's, else as a `RemoteError`."""
    module: Any = {"penstock.errors": errors, "builtins": builtins}.get(notes["module"])
    kind = getattr(module, notes["kind"], None) if module else None
    told = f"{notes['kind']}: {notes['message']}"
    error: Exception = RemoteError(told, notes["kind"])
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # groups of errors need the errors
            same = kind.__new__(kind)
            same.args = (notes["message"],)
            vars(same).update(notes["facts"])
            error = same if str(same) or not notes["message"] else error  # Unicode errors do not tell what is in args
    error.add_note("in a worker process:\n" + notes["traceback"])
    raise error


def _close_all(slots: list[SharedBytes]) -> None:
    for slot in slots:
        slot.close()


def _end_child(child: subprocess.Popen[bytes], process: int) -> None:
    if os.getpid() != process:
        return  # a fork ends: the worker is its parent's
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _pickled(service: ArrayService) -> bytes:
    import cloudpickle

    try:
        return cast(bytes, cloudpickle.dumps(service))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"worker_type='process' cannot send the functions to another process ({reason}); open files, locks and "
            "connections inside the function, or use threads"
        ) from error
