"""Runs of the demo: start the ranks, follow their logs, kill them, and compare their batches."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.loaders.adapters import RepeatLoader
from penstock.loaders.loader_file import load_config

_SCRIPT = Path(__file__).with_name("training.py")


@dataclass
class Run:
    """Run of `world` ranks up to a step, at which they finish or are killed."""

    number: int
    world: int
    until: int
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """Logged steps of each rank."""
    ended: str = "running"

    def read(self, folder: Path) -> int:
        """Read the logs; the number of finished steps, including those of earlier runs."""
        logs = [folder / f"log-{self.number}-{rank}.jsonl" for rank in range(self.world)]
        lines = [log.read_text().split("\n")[:-1] if log.exists() else [] for log in logs]
        done = min(map(len, lines))
        self.steps = [[json.loads(line) for line in of_rank[:done]] for of_rank in lines]
        return int(self.steps[0][-1]["step"]) + 1 if done else 0

    def hashes(self) -> dict[int, str]:
        """Hash of the global batch of each step: the samples of all ranks in rank order."""
        return {step[0]["step"]: _hash([s for rank in step for s in rank["samples"]]) for step in zip(*self.steps)}

    def row(self) -> list[str]:
        """Figures of the run for the table."""
        if not self.steps or not self.steps[0]:
            return [f"{self.world}", "starting"]
        first, last, loss = self.steps[0][0]["step"], self.steps[0][-1]["step"], self.steps[0][-1]["loss"]
        took = sum(step["took"] for step in self.steps[0])
        tokens = sum(step["tokens"] for rank in self.steps for step in rank)
        wait = max(sum(step["wait"] for step in rank) for rank in self.steps)
        memory = max(step["memory"] for rank in self.steps for step in rank)
        figures = [f"{tokens / took:,.0f}", f"{wait / took:.1%}", f"{memory / 2**20:,.0f} MiB", f"{loss:.2f}"]
        return [f"{self.world}", f"{first} to {last}", *figures, self.ended]


def run_all(runs: list[Run], steps: int, folder: Path, console: Console) -> None:
    """Run one after the other; kill all but the last with SIGKILL at their step."""
    with Live(console=console, refresh_per_second=4) as live, (folder / "errors.txt").open("w+") as errors:
        for count, run in enumerate(runs, 1):
            command = [sys.executable, str(_SCRIPT), str(run.number), str(steps), str(run.world)]
            ranks = [subprocess.Popen([*command, str(rank)], cwd=folder, stderr=errors) for rank in range(run.world)]
            codes: list[int | None] = [None]
            try:
                while None in codes and not any(codes):
                    if run.read(folder) >= run.until and run is not runs[-1]:
                        run.ended = "killed"
                        break
                    live.update(_table(runs[:count]))
                    time.sleep(0.1)
                    codes = [rank.poll() for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
                for rank in ranks:
                    rank.wait()
            if any(codes):
                errors.seek(0)
                raise SystemExit(f"a rank of run {run.number} failed, with {codes}\n{errors.read()}")
            run.read(folder)
            run.ended = "finished" if run.ended == "running" else run.ended
            live.update(_table(runs[:count]))
    if not console.is_terminal:
        console.print()  # the display has left the end of its line open


def compare(runs: list[Run], steps: int, config: str) -> str:
    """Compare every batch of a run with those of one uninterrupted process, as NumPy arrays."""
    from demo_parts.training import sample_hashes  # needs torch

    with load_config(config).open(backend="numpy") as loader:
        expected = {b.metadata["step"]: _hash(sample_hashes(b)) for b, _ in zip(RepeatLoader(loader), range(steps))}
    fed = [item for run in runs for item in run.hashes().items()]
    same = sum(expected[step] == found for step, found in fed)
    whole = same == len(fed) and dict(fed) == expected
    return (
        f"{same} of {len(fed)} global batches are byte-identical to those of a loader that nobody stopped; "
        f"{len(fed) - len(expected)} came again, since they were behind the last checkpoint\n"
        f"every step from 0 to {steps - 1} was trained on, and on nothing else: {whole}"
    )


def _hash(samples: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(samples).encode())


def _table(runs: list[Run]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("ranks", "steps", "tokens/s", "data wait", "memory of a rank", "loss", ""):
        table.add_column(name, justify="left" if name in ("steps", "") else "right")
    for run in runs:
        table.add_row(*run.row())
    return table
