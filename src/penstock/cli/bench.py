"""`penstock bench CONFIG`: how fast the loader is, and how long a trainer would wait for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import orjson
import psutil
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.loader_files import ConfigArgument, DebugOption, JsonOption, SetOption, open_rank, read_config
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig
from penstock.memory.budget import format_bytes

__all__ = ["Speed", "bench", "measure"]


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured. Seconds are wall time but for `cpu_seconds`."""

    steps: int
    tokens: int
    seconds: float
    """From the second batch on, with the simulated steps."""
    first_batch_seconds: float
    """From opening the loader to having a batch."""
    wait_seconds: float
    """Of `seconds`, spent waiting for batches."""
    wait_p50_ms: float
    wait_p99_ms: float
    step_ms: float
    """What a step of a trainer was taken to need."""
    cpu_seconds: float
    batches_per_second: float
    tokens_per_second: float
    peak_rss_bytes: int
    """Of the whole process; pages of mapped files that the system may take back count too."""


def bench(
    config: ConfigArgument,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after so many batches behind the first.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, metavar="S", help="Stop after so long; 5, if nothing is said.")
    ] = None,
    step_ms: Annotated[
        float, typer.Option("--step-ms", min=0.0, metavar="MS", help="Let a step take so long, as training does.")
    ] = 0.0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure batches and tokens a second of one rank, the time to the first batch, how long a trainer waits for data
    if its steps take --step-ms, and memory.

    Batches are NumPy's, unless the file or --set backend=torch says otherwise. The first run reads files from disk, the
    next ones from memory, if they fit.
    """
    with clear_exits(debug=debug):
        described = read_config(config, assignments)
        limit = seconds if seconds is not None else (5.0 if steps is None else float("inf"))
        speed = measure(described, steps=steps, seconds=limit, step_seconds=step_ms / 1000)
    if as_json:
        typer.echo(orjson.dumps(asdict(speed), option=orjson.OPT_INDENT_2))
    else:
        _print(speed)


def measure(config: LoaderConfig, *, steps: int | None, seconds: float, step_seconds: float = 0.0) -> Speed:
    """Take batches, over ends of epochs, until there are enough or the time is over. The first one does not count."""
    started = time.perf_counter()
    with open_rank(config) as loader:
        batches = _batches(loader)
        if next(batches, None) is None:
            raise ConfigError(f"{config.name}: there is no batch to measure")
        first_seconds = time.perf_counter() - started
        _work(step_seconds)
        tokens, waits = 0, list[float]()
        cpu, began = time.process_time(), time.perf_counter()
        while (steps is None or len(waits) < steps) and time.perf_counter() - began < seconds:
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - asked)
            tokens += batch.num_tokens
            del batch
            _work(step_seconds)
        took, used = time.perf_counter() - began, time.process_time() - cpu
    p50, p99 = np.percentile(waits or [0.0], [50, 99]) * 1000
    return Speed(
        steps=len(waits),
        tokens=tokens,
        seconds=took,
        first_batch_seconds=first_seconds,
        wait_seconds=sum(waits),
        wait_p50_ms=float(p50),
        wait_p99_ms=float(p99),
        step_ms=step_seconds * 1000,
        cpu_seconds=used,
        batches_per_second=len(waits) / took if took else 0.0,
        tokens_per_second=tokens / took if took else 0.0,
        peak_rss_bytes=_peak_rss(),
    )


def _batches(loader: DataLoader) -> Iterator[Any]:
    while True:
        before = loader.step
        yield from loader
        if loader.step == before:
            return


def _work(seconds: float) -> None:
    """A step on an accelerator: the processor is free meanwhile."""
    if seconds:
        time.sleep(seconds)


def _peak_rss() -> int:
    """The most memory that the process has had."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # there is none on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024


def _print(speed: Speed) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("throughput", f"{speed.tokens_per_second / 1e6:,.2f} M", "tokens/s")
    table.add_row("", f"{speed.batches_per_second:,.1f}", f"batches/s, {speed.steps:,} in {speed.seconds:.2f} s")
    table.add_row("first batch", f"{speed.first_batch_seconds * 1000:,.0f} ms", "after opening the loader")
    share = speed.wait_seconds / speed.seconds if speed.seconds else 0.0
    step = f" with steps of {speed.step_ms:g} ms" if speed.step_ms else ""
    waits = f"{speed.wait_p50_ms:.2f} ms in the middle, {speed.wait_p99_ms:.2f} ms at p99"
    table.add_row("data wait", f"{share:.1%}", Text(f"of the time{step}; {waits}"))
    table.add_row("processor", f"{speed.cpu_seconds:.2f} s", "in all threads")
    table.add_row("peak memory", format_bytes(speed.peak_rss_bytes), "of the process, mapped files included")
    print_table(output(), table)
