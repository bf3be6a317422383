"""Transforms in a spawned process: batches go there and back as Arrow IPC, and a killed process is replaced.

Batches lie in memory that both processes map, and the pipes carry only their lengths; on Windows the pipes carry all.

The child is a fresh interpreter (never a fork), started without the caller's `__main__`, so scripts need no guard.
The transforms travel to it with cloudpickle, which takes lambdas and closures; only this process's own objects are ever
unpickled there. Nothing that comes back is unpickled: results are Arrow, errors and counts are JSON.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa

from penstock.errors import ConfigError, PenstockError
from penstock.pipeline.chain import BrokenStageError, Chain, Counting, Ran, StepError, stage_name
from penstock.pipeline.cores import single_thread_environment
from penstock.pipeline.stages import Origin, Transform

_PAGE = 1 << 16
_KEEP = 8 << 20
"""Bytes kept mapped after a larger batch has passed."""


class SharedBytes:
    """Shared memory as long as its longest content needs, known to the other process by a file descriptor.

    Only one side writes, and tells the other how many bytes. POSIX only.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor if descriptor is not None else _unnamed_file()
        self._map: mmap.mmap | None = None

    def room(self, nbytes: int) -> pa.Buffer:
        """That many bytes to write to."""
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        now = os.fstat(self.descriptor).st_size
        if size > now or (now > _KEEP and now > 4 * size):
            os.ftruncate(self.descriptor, size)
            self._map = None
        return self.content(nbytes)

    def content(self, nbytes: int) -> pa.Buffer:
        """That many bytes which the other side has written; good until it writes again."""
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, size)  # an older map lives as long as buffers that look into it
        return pa.py_buffer(memoryview(self._map)[:nbytes])  # unlike a slice of a buffer, it can be written to

    def write_batch(self, batch: pa.RecordBatch) -> int:
        """A batch as an Arrow IPC stream; how long it is. Nothing is copied but into place."""
        size = batch_bytes(batch)
        sink = pa.FixedSizeBufferWriter(self.room(size))
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return size

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._map = None
        descriptor, self.descriptor = self.descriptor, -1  # first: another thread must not use a number that is reused
        if descriptor >= 0:
            os.close(descriptor)


def batch_bytes(batch: pa.RecordBatch) -> int:
    """Length of a batch as an Arrow IPC stream, found by a dry run that costs its columns, not its rows."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return int(sink.size())


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_HEADER = struct.Struct("<QB")
_SIZE = struct.Struct("<Q")
SETUP, BATCH, SHARED, RESULT, ERROR = 1, 2, 3, 4, 5
_CAN_SHARE = os.name == "posix"
_MAX_DEATHS = 3


class RemoteError(PenstockError):
    """An exception raised in a worker process, with its traceback as text; `kind` is the name of its class."""

    def __init__(self, message: str, kind: str = "RemoteError") -> None:
        super().__init__(message)
        self.kind = kind


class ProcessChain(Chain):
    """A chain that runs in a process of its own. Used by one thread at a time.

    If the process dies with a batch in hand (out of memory, kill -9), a new one gets the same batch: its result is
    taken once, so nothing is lost and nothing repeated. A batch that kills three processes in a row is an error.
    """

    def __init__(self, local: Chain) -> None:
        super().__init__(local.transforms, local.metrics)
        self._schemas = local._schemas  # what one of them has seen, all of them expect
        self._setup = _pickled(self.transforms)
        self._child: subprocess.Popen[bytes] | None = None
        self._there: SharedBytes | None = SharedBytes() if _CAN_SHARE else None
        self._back: SharedBytes | None = SharedBytes() if _CAN_SHARE else None
        self._lock = threading.RLock()  # a garbage collection inside of it may close this
        self._closed = False

    def run(self, batch: pa.RecordBatch, nbytes: int, origin: Origin | None = None) -> Ran:
        ran = Ran(batch, nbytes, nbytes)
        if not batch.num_rows:
            return ran
        if self._there is not None:
            message, kind = _SIZE.pack(self._there.write_batch(batch)), SHARED
        else:
            message, kind = _encode(batch), BATCH
        for stage in self.metrics:
            stage.begin(origin)
        try:
            kind, payload = self._ask(kind, message)
        finally:
            for stage in self.metrics:
                stage.leave()
        size = _SIZE.unpack_from(payload)[0]
        notes = orjson.loads(payload[8 : 8 + size])
        if kind == ERROR:
            error = (BrokenStageError if notes["broken"] else RemoteError)(notes["message"])
            if isinstance(error, RemoteError):
                error.kind = notes["kind"]
            error.add_note("in a worker process:\n" + notes["traceback"])
            raise StepError(notes["index"], error) from error
        ran.counts = {int(index): (dropped, changed) for index, (dropped, changed) in notes["counts"].items()}
        for index, counts in ran.counts.items():
            transform = self.transforms[index]
            if isinstance(transform, Counting):
                transform.add_counts(*counts)
        for stage, figures in zip(self.metrics, notes["figures"]):
            stage.add(*figures)
            if stage.spans is not None:
                stage.span(origin, *figures[:3])
        ran.batch = pa.ipc.open_stream(self._result(pa.py_buffer(payload)[8 + size :], notes)).read_next_batch()
        if self.transforms and ran.batch.num_rows:
            self._checked(len(self.transforms) - 1, ran.batch)
        ran.nbytes = ran.batch.nbytes
        ran.widest = 2 * (nbytes + ran.nbytes)  # each of them twice: as a batch and as a message
        return ran

    @property
    def pid(self) -> int | None:
        """The process that does the work now, if one has been started."""
        return self._child.pid if self._child else None

    def close(self) -> None:
        """End the process; a second call does nothing."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            self._close_pipes(child)
        for shared in (self._there, self._back):
            if shared is not None:
                shared.close()

    def _result(self, rest: pa.Buffer, notes: dict[str, Any]) -> pa.Buffer:
        """The bytes of the result, which the next one does not touch."""
        if self._back is None:
            return rest
        shared = self._back.content(notes["shared"])
        copy = pa.allocate_buffer(shared.size)  # from Arrow's pool, whose memory is used again
        memoryview(copy)[:] = memoryview(shared)
        return copy

    def _ask(self, kind: int, message: pa.Buffer | bytes) -> tuple[int, bytes]:
        for _ in range(_MAX_DEATHS):
            child = self._running()
            try:
                write_frame(cast(BinaryIO, child.stdin), kind, message)
                answer = read_frame(cast(BinaryIO, child.stdout))
                if answer is not None:
                    return answer
            except OSError:
                pass  # the pipe broke: the child is gone, whichever side noticed first
            code = child.wait()
            self._forget(child)
            if self._closed:
                raise RemoteError("the worker process was stopped")
        raise StepError(
            0,
            RemoteError(
                f"this batch killed {_MAX_DEATHS} worker processes in a row (last exit code {code}; -9 is often the "
                "system running out of memory); use smaller batches or look at the function"
            ),
        )

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise RemoteError("the worker process was stopped")
            for _ in range(_MAX_DEATHS):
                if self._child is None:
                    self._child = self._greeted()
            if self._closed:  # meanwhile
                self.close()
                raise RemoteError("the worker process was stopped")
            if self._child is None:
                raise BrokenStageError(f"{_MAX_DEATHS} worker processes died before they had loaded the functions")
            return self._child

    def _greeted(self) -> subprocess.Popen[bytes] | None:
        """A new process that has the functions; None if it was killed before. A refusal is not about any row."""
        descriptors = lifeline() + [part.descriptor for part in (self._there, self._back) if part is not None]
        child = start_interpreter("penstock.pipeline.process_worker", descriptors, environment())
        answer = None
        with contextlib.suppress(OSError):
            for pipe in (child.stdin, child.stdout):
                _widen(cast(BinaryIO, pipe))
            write_frame(cast(BinaryIO, child.stdin), SETUP, self._setup)
            answer = read_frame(cast(BinaryIO, child.stdout))
        if answer is not None and answer[0] == RESULT:
            return child
        child.kill()
        child.wait()
        self._close_pipes(child)
        if answer is not None:
            raise BrokenStageError(f"a worker process could not load the functions: {answer[1].decode()}")
        return None

    def _forget(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        self._close_pipes(child)

    @staticmethod
    def _close_pipes(child: subprocess.Popen[bytes]) -> None:
        for pipe in (child.stdin, child.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def write_frame(pipe: BinaryIO, kind: int, payload: Any) -> None:
    """One message: its length and kind, then its bytes."""
    view = memoryview(payload)
    pipe.write(_HEADER.pack(view.nbytes, kind))
    pipe.write(view)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> tuple[int, bytes] | None:
    """The next message, or None when the other side is gone."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size, kind = _HEADER.unpack(header)
    payload = pipe.read(size)
    return (kind, payload) if len(payload) == size else None


def is_readable(descriptor: int) -> bool:
    """True if a read of a pipe would not wait: there are bytes, or its other end is closed."""
    if not hasattr(select, "poll"):
        return bool(select.select([descriptor], [], [], 0)[0])
    waiting = select.poll()  # `select` refuses the descriptors of a process that has more than 1,024 of them
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))


def start_interpreter(module: str, descriptors: Sequence[int], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs a module: never a fork, and without the caller's `__main__`.

    It imports what this process imports: with `-m` alone, modules of the working directory would come first. Ctrl-C at
    a terminal reaches it too, also before it can say what it does about it: see `ignore_interrupts`.
    """
    with _interrupts_blocked():  # the child inherits that
        # Popen neither forks with Python running nor touches CUDA: the child is exec'ed at once.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
        )


def ignore_interrupts() -> None:
    """Called by a worker: the parent decides what happens at Ctrl-C, and closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # what users start here gets signals


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep SIGINT from the calling thread for a moment; Python's main thread gets it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment() -> dict[str, str]:
    """This process's, with its import path; and no threads of libraries, which compete with the workers."""
    path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return {**single_thread_environment(), "PYTHONPATH": path}


def _widen(pipe: BinaryIO) -> None:
    """A megabyte instead of 64 KiB, where the system allows it: a sixteenth of the switches between processes."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def _encode(batch: pa.RecordBatch) -> pa.Buffer:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def _pickled(transforms: Sequence[Transform]) -> bytes:
    import cloudpickle

    try:
        return cast(bytes, cloudpickle.dumps(list(transforms)))
    except Exception as error:
        for transform in transforms:
            try:
                cloudpickle.dumps(transform)
            except Exception as reason:
                raise ConfigError(
                    f"worker_type='process' cannot send {stage_name(transform)} to another process: {reason}; "
                    "open files, locks and connections inside the function, or use threads"
                ) from reason
        raise ConfigError(f"worker_type='process' cannot send the transforms to another process: {error}") from error


# Lifeline of worker processes: a pipe that nobody writes to, and whose end tells them that their parent is gone. A
# worker that is stuck in a call never reads its input, so it would not notice that the input has closed. The parent's
# death signal of Linux is no help: it comes when the *thread* ends that started the worker. Here the kernel sends the
# signal (SIGIO, which ends a process) when the last writing end closes, so it comes also while C code holds the
# interpreter. Where pipes send no signals (macOS), a thread waits for the end instead. Windows has neither: there a
# worker ends with the call that it is in.

_lifeline_ends: tuple[int, int] | None = None
"""Reading and writing end in the process that starts workers."""
_lifeline_guard = threading.Lock()


def lifeline() -> list[int]:
    """Descriptors to pass to a worker, which gives them to `end_with_parent`; none on Windows."""
    global _lifeline_ends
    if os.name != "posix":
        return []
    with _lifeline_guard:
        if _lifeline_ends is None:
            _lifeline_ends = os.pipe()
        return [_lifeline_ends[0]]


def end_with_parent(descriptor: int) -> None:
    """Have this process end as soon as the one that holds the other end of its lifeline is gone."""
    if sys.platform != "linux" or not _signalled(descriptor):
        threading.Thread(target=_wait_for_end, args=(descriptor,), name="penstock-lifeline", daemon=True).start()


def _signalled(descriptor: int) -> bool:
    """Ask the kernel for a signal at the end of the pipe; False if this system has no /proc."""
    import fcntl

    try:
        # Opened again: what all workers inherited is one file, with one process to be signalled.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    if is_readable(own):
        os._exit(1)  # the parent was gone before the signal was asked for
    return True


def _wait_for_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os._exit(1)


def _forget_lifeline() -> None:
    """A forked process lets go of its parent's lifeline: it must not keep the parent's workers alive."""
    global _lifeline_ends, _lifeline_guard
    ends, _lifeline_ends, _lifeline_guard = _lifeline_ends, None, threading.Lock()
    for end in ends or ():
        with contextlib.suppress(OSError):
            os.close(end)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lifeline)
