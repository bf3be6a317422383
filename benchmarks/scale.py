"""Jobs on a cluster: speed beside peers, cost of a split, and scaling with workers.

    python benchmarks/scale.py jobs --mb 200 --workers 2     # penstock, penstock on Ray, Ray Data, datasets, datatrove
    python benchmarks/scale.py splits --most 10000           # seconds, files, bytes and driver memory of a split
    python benchmarks/scale.py workers --mb 800              # 1, 2, 4, 8, 16 workers: prepare and a function per row

Each run is a fresh process, in a network namespace of its own where the system allows it, since Ray listens on every
interface. Starting Ray, and its first worker processes, is not timed; reading, the work and complete output are. Of
several rounds the median counts. `scale_plan.py` measures the plan of a trillion rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from facts import report_facts
from job import tidy_row
from measure import CaseError, Measurement, measure
from realtext import make_text, make_tokenizer
from table import table

JOBS = ("rows", "tokenize", "filter")
ENGINES = ("penstock", "penstock-ray", "ray", "datasets", "datatrove")
_RAY = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


# -- the work of a case ------------------------------------------------------------------------------------------------


def penstock(job: str, source: Path, output: Path, workers: int, engine: Any = None) -> Callable[[], object]:
    from penstock import Pipeline, PipelineConfig
    from penstock.loaders import Recipe, prepare
    from penstock.sinks import ParquetSink
    from penstock.transforms import Map

    config = PipelineConfig(workers=workers)
    if job == "tokenize":
        recipe = Recipe(tokenizer=str(make_tokenizer()))
        return lambda: prepare(str(source), output, recipe, config=config, budget="1 GiB", engine=engine)
    steps: list[Any] = [Map(tidy_row)]
    if job == "filter":
        from penstock.corpus.quality.filters import quality_filters

        steps = quality_filters(["gopher-quality"], column="text")
    elif engine is None:
        config = PipelineConfig(workers="process", max_workers=workers)
    pipeline = Pipeline(str(source), steps, ParquetSink(output), config, "1 GiB")
    return lambda: pipeline.run(engine=engine)


def penstock_ray(job: str, source: Path, output: Path, workers: int) -> Callable[[], object]:
    from penstock.engines.run import RayEngine

    _start_ray(workers)
    return penstock(job, source, output, 1, RayEngine(memory="512 MiB"))


def ray_data(job: str, source: Path, output: Path, workers: int) -> Callable[[], object]:
    import ray.data

    _start_ray(workers)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def work() -> None:
        rows = ray.data.read_json(str(source))
        if job == "rows":
            rows = rows.map(tidy_row)
        elif job == "filter":
            rows = rows.filter(is_good)
        else:
            # Actors that take all cores would leave none to the tasks that read, and all would wait for ever.
            rows = rows.map_batches(
                RayTokenizer, batch_format="pyarrow", num_cpus=0.5, compute=ray.data.ActorPoolStrategy(size=workers)
            )
        rows.write_parquet(str(output))

    return work


def datasets(job: str, source: Path, output: Path, workers: int) -> Callable[[], object]:
    import datasets as hf

    cache = str(output.parent / "hf")
    tokenizer = BatchTokenizer() if job == "tokenize" else None

    def work() -> None:
        rows = hf.load_dataset("json", data_files=str(source), split="train", cache_dir=cache, num_proc=workers)
        if job == "rows":
            rows = rows.map(tidy_row, num_proc=workers)
        elif job == "filter":
            rows = rows.filter(is_good, num_proc=workers)
        else:
            rows = rows.map(tokenizer, batched=True, num_proc=workers, remove_columns=rows.column_names)
        rows.to_parquet(str(output))

    return work


def datatrove(job: str, source: Path, output: Path, workers: int) -> Callable[[], object]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import ParquetWriter

    # It reads whole files only, so the input is cut for it before the clock starts.
    parts = output.parent / "parts"
    parts.mkdir()
    with source.open("rb") as lines:
        files = [(parts / f"{number}.jsonl").open("wb") for number in range(workers)]
        for number, line in enumerate(lines):
            files[number % workers].write(line)
        for file in files:
            file.close()
    if job == "tokenize":
        steps = [
            DocumentTokenizer(
                str(output), tokenizer_name_or_path=str(make_tokenizer() / "tokenizer.json"), shuffle_documents=False
            )
        ]
    elif job == "filter":
        steps = [gopher_quality(), ParquetWriter(str(output))]
    else:
        steps = [datatrove_rows, ParquetWriter(str(output))]
    executor = LocalPipelineExecutor(
        [JsonlReader(str(parts), id_key="no id"), *steps],  # it writes no id that is 0, and then refuses the next one
        tasks=workers,
        workers=workers,
        logging_dir=str(output.parent / "logs"),
    )
    return executor.run


def datatrove_rows(data: Any, rank: int = 0, world_size: int = 1) -> Any:
    for document in data:
        made = tidy_row({"text": document.text})
        document.text = made["text"]
        document.metadata = {"words": made["words"]}
        yield document


class BatchTokenizer:
    """Ids of a batch of texts, by the tokenizers package."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(make_tokenizer() / "tokenizer.json"))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": [found.ids for found in self._tokenizer.encode_batch(list(batch["text"]))]}


class RayTokenizer(BatchTokenizer):
    def __call__(self, batch: Any) -> Any:
        import pyarrow as pa

        texts = batch.column("text").to_pylist()
        return pa.table({"input_ids": [found.ids for found in self._tokenizer.encode_batch(texts)]})


_FILTERS: list[Any] = []


def gopher_quality() -> Any:
    """The filter of datatrove, which the peers run; it splits words with spaCy. Made once in each process."""
    from datatrove.pipeline.filters import GopherQualityFilter

    if not _FILTERS:
        _FILTERS.append(GopherQualityFilter())
    return _FILTERS[0]


def is_good(row: Mapping[str, Any]) -> bool:
    """The rules of Gopher for the quality of a document, as users of these engines take them from datatrove."""
    from datatrove.data import Document

    return gopher_quality().filter(Document(text=row["text"], id="")) is True


def _start_ray(workers: int) -> None:
    import ray

    ray.init(num_cpus=workers, **_RAY)
    warm = ray.remote(num_cpus=1)(lambda: time.sleep(0.5))
    ray.get([warm.remote() for _ in range(workers)])


CASES: dict[str, Callable[..., Callable[[], object]]] = {
    "penstock": penstock,
    "penstock-ray": penstock_ray,
    "ray": ray_data,
    "datasets": datasets,
    "datatrove": datatrove,
}


def run_case(engine: str, job: str, source: str, workers: str, facts: str) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        output = Path(folder) / ("out" if job == "tokenize" or engine in ("ray", "datatrove") else "out.parquet")
        work = CASES[engine](job, Path(source), output, int(workers))
        start = time.perf_counter()
        work()
        report_facts(facts, seconds=time.perf_counter() - start, rows=rows_in(output))


def rows_in(output: Path) -> int | None:
    """Rows of what a case has written: a token store, or Parquet; None for formats without a number of rows."""
    import pyarrow.parquet as pq

    if (output / "manifest.json").exists():
        return int(json.loads((output / "manifest.json").read_bytes())["rows"])
    files = [output] if output.is_file() else sorted(output.rglob("*.parquet"))
    return sum(pq.read_metadata(file).num_rows for file in files) if files else None


# -- splits ------------------------------------------------------------------------------------------------------------


def run_splits(engine: str, count: str, facts: str) -> None:
    """A job of many small splits: what each costs."""
    import psutil

    from penstock import Pipeline
    from penstock.engines.driver import JobOptions
    from penstock.engines.run import JobEngine, RayEngine
    from penstock.sinks import JsonlSink

    number = int(count)
    if engine == "ray":
        _start_ray(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        source = Path(folder) / "in.jsonl"
        line = json.dumps({"text": "some words of a small row " * 4}) + "\n"
        source.write_text(line * 8 * number)
        chosen = (
            RayEngine(split_bytes=8 * len(line))
            if engine == "ray"
            else JobEngine(options=JobOptions(split_bytes=8 * len(line)))
        )
        job = Path(folder) / "job"
        pipeline = Pipeline(str(source), [], JsonlSink(Path(folder) / "out.jsonl"))
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        pipeline.run(job, engine=chosen)
        seconds = time.perf_counter() - start
        files = [file for file in job.rglob("*") if file.is_file()]
        report_facts(
            facts,
            seconds=seconds,
            driver_bytes=psutil.Process().memory_info().rss - before,
            files=len(files),
            job_bytes=sum(file.stat().st_size for file in files),
            plan_bytes=(job / "job.json").stat().st_size,
        )


# -- suites ------------------------------------------------------------------------------------------------------------


def _measured(*arguments: Any, timeout: float = 900) -> Measurement:
    return measure([*_alone(), sys.executable, __file__, *map(str, arguments)], timeout=timeout, env=_environment())


def _environment() -> dict[str, str]:
    return {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}


def _alone() -> list[str]:
    """Prefix of a command that has nothing but loopback; none where the system does not allow it."""
    prefix = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return prefix
    return []


def jobs(arguments: argparse.Namespace) -> None:
    source = make_text(arguments.mb)
    make_tokenizer()
    size, rows = source.stat().st_size, []
    for job in arguments.jobs:
        base: float | None = None
        for engine in arguments.only:
            times, peak, kept = [], 0, None
            try:
                for _ in range(arguments.repeat):
                    run = _measured("case", engine, job, source, arguments.workers)
                    times.append(run.facts["seconds"])
                    kept = run.facts["rows"]
                    peak = max(peak, run.peak_bytes)
            except CaseError as error:
                rows.append([f"{job}, {engine}", "-", "-", "-", "-", str(error)[:80]])
                continue
            seconds = statistics.median(times)
            base = base or seconds
            rows.append(
                [
                    f"{job}, {engine}",
                    f"{seconds:.2f}",
                    f"{size / seconds / 1e6:.1f}",
                    f"{seconds / base:.2f}x",
                    "-" if kept is None else f"{kept:,}",
                    f"{peak >> 20}",
                ]
            )
            print(rows[-1], flush=True)
    print(table(["job, engine", "s", "MB/s", "time of the first", "rows out", "MiB"], rows))


def splits(arguments: argparse.Namespace) -> None:
    rows = []
    for engine in arguments.only:
        number = 10
        while number <= arguments.most:
            found = _measured("splits-case", engine, number, timeout=3600).facts
            rows.append(
                [
                    f"{engine}, {number:,}",
                    f"{found['seconds']:.2f}",
                    f"{found['seconds'] / number * 1e3:.2f}",
                    f"{found['files'] / number:.2f}",
                    f"{found['job_bytes'] / number:,.0f}",
                    f"{found['plan_bytes'] / number:,.0f}",
                    f"{found['driver_bytes'] / 1e6:.1f}",
                ]
            )
            print(rows[-1], flush=True)
            number *= 10
    names = ["engine, splits", "s", "ms a split", "files a split", "bytes a split", "plan bytes a split", "driver MB"]
    print(table(names, rows))


def workers(arguments: argparse.Namespace) -> None:
    source = make_text(arguments.mb)
    make_tokenizer()
    rows, counts = [], [count for count in (1, 2, 4, 8, 16, 32) if count <= (os.cpu_count() or 1)]
    for job in arguments.jobs:
        for engine in arguments.only:
            first: float | None = None
            for count in counts:
                times = [
                    _measured("case", engine, job, source, count).facts["seconds"] for _ in range(arguments.repeat)
                ]
                seconds = statistics.median(times)
                first = first or seconds
                rate = source.stat().st_size / seconds / 1e6
                rows.append(
                    [f"{job}, {engine}, {count}", f"{seconds:.2f}", f"{rate:.1f}", f"{first / seconds / count:.0%}"]
                )
                print(rows[-1], flush=True)
    print(table(["job, engine, workers", "s", "MB/s", "efficiency"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Jobs on a cluster: speed, cost of splits, scaling.")
    parser.add_argument("suite", choices=["jobs", "splits", "workers"])
    parser.add_argument("--mb", type=float, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=list(JOBS))
    parser.add_argument("--only", type=lambda text: text.split(","), default=None)
    arguments = parser.parse_args()
    defaults = {"jobs": list(ENGINES), "splits": ["in-process", "ray"], "workers": ["penstock-ray", "penstock"]}
    arguments.only = arguments.only or defaults[arguments.suite]
    {"jobs": jobs, "splits": splits, "workers": workers}[arguments.suite](arguments)


if __name__ == "__main__":
    if sys.argv[1] == "case":
        run_case(*sys.argv[2:])
    elif sys.argv[1] == "splits-case":
        run_splits(*sys.argv[2:])
    else:
        main()
