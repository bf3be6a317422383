"""Python scripts as processes of their own, forked from a server that has imported penstock, pandas and torch.

Importing them takes longer than what most of these scripts do, and a test that kills one again and again would pay for
it every time. A forked process is like any other: it has a process id and an exit code, and SIGKILL ends it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["ForkedProgram", "run_ranks", "run_script"]

PRELOADED = [
    *("penstock.loaders", "penstock.fsqueue", "penstock.sources", "penstock.sinks", "penstock.transforms"),
    *("penstock.store", "penstock.pipeline.pipeline", "penstock.corpus.prepare", "penstock.cli.main"),
    *("penstock.transforms.functions", "pandas", "pyarrow.pandas_compat", "numba", "torch", "torch._dynamo"),
]


class ForkedProgram:
    """A running script, with the part of `subprocess.Popen` that tests use; what it prints goes to a file.

    In a strict one, warnings are errors.
    """

    def __init__(
        self,
        script: Path,
        *arguments: str,
        said: Path,
        environment: Mapping[str, str] = os.environ,
        directory: Path | None = None,
        strict: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        words, self._words = context.Pipe(duplex=False)
        place = os.fspath(directory or Path.cwd())
        facts = (words, os.fspath(script), arguments, os.fspath(said), dict(environment), place, strict)
        self._process = context.Process(target=_run, args=facts, daemon=True)
        said.write_bytes(b"")
        self._process.start()
        words.close()
        self.pid: int = self._process.pid
        self.said = said

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def say(self, word: str) -> None:
        """A line on its standard input."""
        os.write(self._words.fileno(), f"{word}\n".encode())

    def close(self) -> None:
        self.kill()
        self._words.close()


def run_script(
    script: Path, *arguments: str, said: Path, directory: Path, timeout: float, **environment: str
) -> tuple[int, str]:
    """The exit code of a script in which warnings are errors, and what it printed."""
    program = ForkedProgram(
        script,
        *arguments,
        said=said,
        environment={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
        directory=directory,
        strict=True,
    )
    try:
        return program.wait(timeout), said.read_text(encoding="utf-8")
    finally:
        program.close()


def run_ranks(
    script: Path, arguments: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, timeout: float
) -> list[Any]:
    """Run a script once for each rank, all at once; what each wrote to `<rank>.json` beside the script."""
    home = script.parent
    quiet = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    errors = [home / f"{rank}.err" for rank in range(len(arguments))]
    processes: list[ForkedProgram] = []
    deadline = time.monotonic() + timeout
    try:
        for words, own, error in zip(arguments, environments, errors, strict=True):
            environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", **own}
            processes.append(ForkedProgram(script, *words, said=error, environment=environment))
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout)
    assert [process.returncode for process in processes] == [0] * len(arguments), [
        error.read_text() for error in errors
    ]
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(len(arguments))]


def _run(
    words: Connection,
    script: str,
    arguments: tuple[str, ...],
    said: str,
    environment: dict[str, str],
    directory: str,
    strict: bool,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(words.fileno(), 0)
    out = os.open(said, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    words.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if strict:
        warnings.simplefilter("error")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # many run at once, and sums depend on it
    sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
