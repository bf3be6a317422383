"""`penstock bench CONFIG`: throughput of a loader, and the time that a trainer waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from penstock.cli.console import emit, fact_table, print_table, working
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, open_rank, read_config
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig
from penstock.memory.budget import format_bytes
from penstock.observe import WorkProgress


@dataclass(frozen=True, slots=True)
class Speed:
    """Measurement of a loader. Seconds are wall time, except for `cpu_seconds`."""

    steps: int
    tokens: int
    seconds: float
    """From the second batch on, with the simulated steps."""
    first_batch_seconds: float
    """From opening the loader to its first batch."""
    wait_seconds: float
    """Part of `seconds` spent waiting for batches."""
    wait_p50_ms: float
    wait_p99_ms: float
    step_ms: float
    """Duration of a simulated training step."""
    cpu_seconds: float
    batches_per_second: float
    tokens_per_second: float
    peak_rss_bytes: int
    """Of the whole process; pages of mapped files, which the system can reclaim, count too."""


@command()
def bench(
    config: ConfigArgument,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after this many batches.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, metavar="S", help="Stop after this time. Default without --steps: 5.")
    ] = None,
    step_ms: Annotated[
        float, typer.Option("--step-ms", min=0.0, metavar="MS", help="Simulated duration of a training step.")
    ] = 0.0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure batches and tokens per second of one rank, the time to the first batch, memory, and how long a trainer
    with steps of --step-ms waits for data.

    Batches are NumPy's, unless the file or --set backend=torch says otherwise. The first run reads files from disk,
    later ones from the page cache.
    """
    described = read_config(config, assignments)
    limit = seconds if seconds is not None else (5.0 if steps is None else float("inf"))
    unit, total = ("seconds", limit) if steps is None else ("batches", steps)
    with working(f"measuring {described.name}", unit=unit, total=total, interval_seconds=1.0) as progress:
        speed = measure(described, steps=steps, seconds=limit, step_seconds=step_ms / 1000, progress=progress)
    emit(asdict(speed), lambda: print_table(fact_table(_rows(speed))), as_json=as_json)


def measure(
    config: LoaderConfig,
    *,
    steps: int | None,
    seconds: float,
    step_seconds: float = 0.0,
    progress: WorkProgress | None = None,
) -> Speed:
    """Take batches, across epochs, until `steps` or `seconds` are reached. The first batch does not count."""
    started = time.perf_counter()
    with open_rank(config) as loader:
        batches = _batches(loader)
        if next(batches, None) is None:
            raise ConfigError(f"{config.name}: the loader has no batch to measure")
        first_seconds = time.perf_counter() - started
        time.sleep(step_seconds)  # as on an accelerator: the processor is free meanwhile
        tokens, waited, waits = 0, 0.0, list[float]()
        cpu, began = time.process_time(), time.perf_counter()
        while (steps is None or len(waits) < steps) and time.perf_counter() - began < seconds:
            requested = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - requested)
            waited += waits[-1]
            tokens += batch.num_tokens
            del batch
            if progress is not None:
                passed = time.perf_counter() - began
                share = max(passed / seconds, len(waits) / steps if steps is not None else 0.0)
                note = f"{tokens / passed / 1e6:,.2f} M tokens/s, {waited / passed:.0%} of the time waiting for data"
                progress(passed if steps is None else len(waits), share=share, note=note)
            time.sleep(step_seconds)
        elapsed, used = time.perf_counter() - began, time.process_time() - cpu
    p50, p99 = np.percentile(waits or [0.0], [50, 99]) * 1000
    return Speed(
        steps=len(waits),
        tokens=tokens,
        seconds=elapsed,
        first_batch_seconds=first_seconds,
        wait_seconds=waited,
        wait_p50_ms=float(p50),
        wait_p99_ms=float(p99),
        step_ms=step_seconds * 1000,
        cpu_seconds=used,
        batches_per_second=len(waits) / elapsed if elapsed else 0.0,
        tokens_per_second=tokens / elapsed if elapsed else 0.0,
        peak_rss_bytes=_peak_rss(),
    )


def _batches(loader: DataLoader) -> Iterator[Any]:
    while True:
        before = loader.step
        yield from loader
        if loader.step == before:
            return


def _peak_rss() -> int:
    """Peak resident memory of the process, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024


def _rows(speed: Speed) -> Iterator[tuple[str, str, str]]:
    yield "throughput", f"{speed.tokens_per_second / 1e6:,.2f} M", "tokens/s"
    yield "", f"{speed.batches_per_second:,.1f}", f"batches/s, {speed.steps:,} in {speed.seconds:.2f} s"
    yield "first batch", f"{speed.first_batch_seconds * 1000:,.0f} ms", "after opening the loader"
    if speed.step_ms:
        share = speed.wait_seconds / speed.seconds if speed.seconds else 0.0
        waits = f"{speed.wait_p50_ms:.2f} ms median, {speed.wait_p99_ms:.2f} ms at p99"
        yield "data wait", f"{share:.1%}", f"of the time with steps of {speed.step_ms:g} ms; {waits}"
    else:  # nothing but waiting was measured
        yield "a batch", f"{speed.wait_p50_ms:.2f} ms", f"median; {speed.wait_p99_ms:.2f} ms at p99"
    yield "processor", f"{speed.cpu_seconds:.2f} s", "in all threads"
    yield "peak memory", format_bytes(speed.peak_rss_bytes), "of the process, mapped files included"
