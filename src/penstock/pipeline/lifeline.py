"""Lifeline of worker processes: a pipe that nobody writes to, and whose end tells them that their parent is gone.

A worker that is stuck in a call never reads its input, so it would not notice that the input has closed. The parent's
death signal of Linux is no help: it comes when the *thread* ends that started the worker. Here the kernel sends the
signal (SIGIO, which ends a process) when the last writing end closes, so it comes also while C code holds the
interpreter. Where pipes send no signals (macOS), a thread waits for the end instead. Windows has neither: there a
worker ends with the call that it is in.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading

_ends: tuple[int, int] | None = None
"""Reading and writing end in the process that starts workers."""
_guard = threading.Lock()


def lifeline() -> list[int]:
    """Descriptors to pass to a worker, which gives them to `end_with_parent`; none on Windows."""
    global _ends
    if os.name != "posix":
        return []
    with _guard:
        if _ends is None:
            _ends = os.pipe()
        return [_ends[0]]


def end_with_parent(descriptor: int) -> None:
    """Have this process end as soon as the one that holds the other end of its lifeline is gone."""
    if sys.platform != "linux" or not _signalled(descriptor):
        threading.Thread(target=_wait, args=(descriptor,), name="penstock-lifeline", daemon=True).start()


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
    if select.select([own], [], [], 0)[0]:
        os._exit(1)  # the parent was gone before the signal was asked for
    return True


def _wait(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os._exit(1)


def _forget() -> None:
    """A forked process lets go of its parent's lifeline: it must not keep the parent's workers alive."""
    global _ends, _guard
    ends, _ends, _guard = _ends, None, threading.Lock()
    for end in ends or ():
        with contextlib.suppress(OSError):
            os.close(end)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
