"""Starts the programs beside this file, and never waits for them longer than a deadline."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked_programs import ForkedProgram

HERE = Path(__file__).parent
DEADLINE_SECONDS = 300.0
KILLED = -9  # SIGKILL, which not every system has a name for


class Program(NamedTuple):
    """A running program, and where it writes what it has to complain about."""

    process: ForkedProgram | subprocess.Popen[str]
    complaints: Path

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        self.kill()
        if isinstance(self.process, ForkedProgram):
            self.process.close()


class Programs:
    """Programs whose messages go to a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._started: list[Program] = []

    def start(self, name: str, /, **facts: Any) -> Program:
        """`name`.py beside this file, with the facts as JSON."""
        complaints = self._folder / f"{name}-{len(self._started)}.err"
        # No rank but the one they are told.
        known = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        known |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        words = json.dumps(facts, default=str)
        process = ForkedProgram(HERE / f"{name}.py", words, said=complaints, environment=known)
        program = Program(process, complaints)
        self._started.append(program)
        return program

    def close(self) -> None:
        for program in self._started:
            program.close()


def killed_after_change(process: ForkedProgram, sign: Path, delay: float) -> bool:
    """Kill it `delay` seconds after a file has changed. False if it came to its end before."""
    before = sign.stat().st_mtime_ns if sign.exists() else 0
    while process.poll() is None:
        if sign.exists() and sign.stat().st_mtime_ns != before:
            time.sleep(delay)
            process.kill()
            return process.wait(DEADLINE_SECONDS) == KILLED
        time.sleep(0.002)
    return False


@contextmanager
def programs(folder: Path) -> Iterator[Programs]:
    """Whatever still runs at the end is killed."""
    started = Programs(folder)
    try:
        yield started
    finally:
        started.close()


def wait_until(true: Callable[[], bool], of: Sequence[Program], what: str, *, ends: bool = False) -> None:
    """Wait for something that programs do; if one ends before it should, or nothing comes, say what they said."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not true():
        codes = [program.returncode for program in of]
        early = [code for code in codes if code is not None and (not ends or code not in (0, KILLED))]
        late = time.monotonic() > deadline
        if (early or late) and not true():
            said = "\n".join(program.complaints.read_text()[-2000:] for program in of)
            raise AssertionError(f"{what}: {f'exit codes {codes}' if early else 'nothing came'}\n{said}")
        time.sleep(0.002)


def wait_for_end(of: Sequence[Program]) -> None:
    """Every program comes to its end by itself, and well."""
    wait_until(lambda: all(program.returncode == 0 for program in of), of, "should have ended", ends=True)


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of one to three turns."""
    draw = random.Random(seed)
    words = [
        "the",
        "gate",
        "of",
        "a",
        "dam",
        "lets",
        "water",
        "pass",
        "to",
        "turbines",
        "below",
        "after",
        "heavy",
        "rain",
    ]

    def said() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 6)))

    with path.open("w", encoding="utf-8") as out:
        for _ in range(count):
            roles = ["user", "assistant"] * draw.randint(1, 3)
            out.write(json.dumps({"messages": [{"role": role, "content": said()} for role in roles]}) + "\n")
    return path
