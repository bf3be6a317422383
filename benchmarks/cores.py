"""Throughput at 1, 2, 4, 8 and 16 cores: what scales, what does not, and where it stops.

    python benchmarks/cores.py                                   # every case at every core count that exists
    python benchmarks/cores.py --mb 1000 --only text,gigatoken   # some cases, a larger input
    PYTHONPATH=src python benchmarks/cores.py --seconds 360 --json cores.json

Each run is a fresh process that is bound to so many cores before it imports anything; everything else is at its
default. The clock runs from the call to the complete output, so loading a tokenizer counts, for bare gigatoken too;
imports do not count. Of several rounds the fastest counts. The efficiency in brackets is the rate divided by the rate
at the smallest count and by the ratio of cores. No run starts after `--seconds`.

The inputs: sources and documents of the installed Python packages, repeated if there are too few (`text`, `chats`,
`filters`, `stream`, and the bare tokenizer), and generated web text (`rows`, `exact`, `minhash`).
"""

from __future__ import annotations

import os
import sys

if len(sys.argv) > 3 and sys.argv[1] == "case" and hasattr(os, "sched_setaffinity"):
    # Before any import: thread pools of libraries are sized when they are loaded.
    os.sched_setaffinity(0, set(map(int, sys.argv[3].split(","))))

import argparse
import itertools
import json
import platform
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facts import report_facts
from measure import CaseError, measure
from realtext import make_chats, make_text, make_tokenizer
from table import table

from corpus import DATA, make_corpus, read_through

COUNTS = [1, 2, 4, 8, 16, 32, 64]
LEAST_RATIO = 0.6
"""Share of the rate of the bare tokenizer that `text` should reach at every count."""


# -- the cases: each returns what is timed, and the amount in its unit ------------------------------------------------

Work = tuple[Callable[[], Any], Callable[[Any], float]]
"""The timed call, and the amount of work from its result."""


def text(source: Path, out: Path) -> Work:
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401

    from penstock.loaders import Recipe, prepare

    recipe = Recipe(tokenizer=DATA / "tokenizer-32k", add_eos=False)
    return lambda: prepare(source, out, recipe), lambda made: made.manifest.tokens / 1e6


def gigatoken_jsonl(source: Path, out: Path) -> Work:
    import awkward  # noqa: F401
    import gigatoken

    def encode() -> Any:
        tokenizer = gigatoken.Tokenizer(str(DATA / "tokenizer-32k" / "tokenizer.json"))
        return tokenizer.encode_files(gigatoken.JsonlFileSource([str(source)], "text"))

    return encode, lambda made: len(made.layout.content.data) / 1e6


def gigatoken_strings(source: Path, out: Path) -> Work:
    import gigatoken

    texts = [json.loads(line)["text"] for line in source.open("rb")]

    def encode() -> Any:
        tokenizer = gigatoken.Tokenizer(str(DATA / "tokenizer-32k" / "tokenizer.json"))
        return tokenizer.encode_batch(texts)

    return encode, lambda made: len(made.layout.content.data) / 1e6


def chats(source: Path, out: Path) -> Work:
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401

    from penstock.loaders import Recipe, prepare

    recipe = Recipe(tokenizer=DATA / "tokenizer-32k")
    return lambda: prepare(source, out, recipe), lambda made: made.manifest.rows / 1e3


def rows(source: Path, out: Path) -> Work:
    from engines.penstock import row

    return row(source, out.with_suffix(".parquet")), lambda made: source.stat().st_size / 1e6


def exact(source: Path, out: Path) -> Work:
    from penstock.transforms import ExactDedup, dedup_stages

    return _read_through_stages(source, dedup_stages(ExactDedup("text")))


def minhash(source: Path, out: Path) -> Work:
    from penstock.transforms import MinHashDedup, dedup_stages

    return _read_through_stages(source, dedup_stages(MinHashDedup("text")))


def filters(source: Path, out: Path) -> Work:
    from penstock.transforms import C4Quality, GopherQuality, GopherRepetition

    run, _ = _read_through_stages(source, [GopherRepetition("text"), GopherQuality("text"), C4Quality("text")])
    return run, lambda made: source.stat().st_size / 1e6


def stream(source: Path, out: Path) -> Work:
    from penstock.loaders import PretrainDataLoader

    loader = PretrainDataLoader(source, DATA / "tokenizer-32k", 2048, streaming=True, batch_size=32, backend="numpy")
    batches = (batch for _ in itertools.count() for batch in loader)
    next(batches)

    def take() -> int:
        until, taken = time.perf_counter() + 3.0, 0
        while time.perf_counter() < until:
            next(batches)
            taken += 1
        return taken

    return take, lambda taken: taken * 32 * 2048 / 1e6


class _Discard:
    """Sink that drops every batch."""

    def consume(self, batch: Any) -> None:
        pass

    def flush(self) -> None:
        pass


def _read_through_stages(source: Path, stages: list[Any]) -> Work:
    """JSONL through the stages to nowhere; amount in thousands of rows."""
    from penstock import Pipeline
    from penstock.sources import JsonlSource

    # A few rows: compiled code is loaded before the clock starts.
    warm = next(iter(Pipeline(JsonlSource(source, columns=["id", "text"]), []))).slice(0, 6)
    for stage in stages:
        warm = stage.transform(warm)
    for stage in stages:
        stage.reset()
    pipeline = Pipeline(JsonlSource(source, columns=["id", "text"]), stages, _Discard())
    return pipeline.run, lambda report: report.rows_in / 1e3


CASES: dict[str, tuple[Callable[[Path, Path], Work], str, str, float]] = {
    # case: function, unit, kind of input, share of --mb
    "text": (text, "M tokens/s", "text", 1.0),
    "gigatoken": (gigatoken_jsonl, "M tokens/s", "text", 1.0),
    "gigatoken-strings": (gigatoken_strings, "M tokens/s", "text", 1.0),
    "chats": (chats, "k rows/s", "chat", 0.25),
    "rows": (rows, "MB/s", "web", 0.5),
    "exact": (exact, "k rows/s", "web", 0.5),
    "minhash": (minhash, "k rows/s", "web", 0.25),
    "filters": (filters, "MB/s", "text", 0.1),
    "stream": (stream, "M tokens/s", "text", 1.0),
}


# -- running and reporting --------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    began = time.monotonic()
    usable = _usable()
    wanted = [int(n) for n in arguments.cores.split(",")] if arguments.cores else COUNTS
    counts = [n for n in wanted if n <= len(usable)]
    if not hasattr(os, "sched_setaffinity"):
        counts = [len(usable)]
        print("this system cannot bind a process to cores: only the full count is measured")
    names = [name for name in CASES if not arguments.only or name in arguments.only.split(",")]
    print("python", *sys.argv)
    print(_machine(usable), flush=True)
    inputs = {name: _input(CASES[name][2], arguments.mb * CASES[name][3]) for name in names}
    if not arguments.no_warm_up:
        for name in names:  # fills the cache of compiled functions, which is not part of any figure
            _run(name, usable, _input(CASES[name][2], 1.0), arguments.limit)
    print(f"inputs made in {time.monotonic() - began:.0f} s", flush=True)
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in names}
    problems: list[str] = []
    for repeat in range(arguments.repeat):
        for name in names:
            for count in counts:
                if time.monotonic() - began > arguments.seconds:
                    problems.append(f"{name} at {count}: not run, --seconds {arguments.seconds:g} were over")
                    continue
                made = _run(name, usable[:count], inputs[name], arguments.limit)
                if "problem" in made:
                    problems.append(f"{name} at {count}: {made['problem']}")
                else:
                    runs[name].setdefault(count, []).append(made)
                    rate = f"{made['amount'] / made['seconds']:.1f} {CASES[name][1]}"
                    print(f"  {repeat + 1}/{arguments.repeat} {name} at {count}: {rate}", flush=True)
    _report(counts, runs, problems)
    if arguments.json:
        figures = {"machine": _machine(usable), "runs": runs, "problems": problems}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def _run(name: str, cores: list[int], source: Path, limit: float) -> dict[str, Any]:
    out = DATA / "out" / f"cores-{name}"
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".parquet").unlink(missing_ok=True)
    try:
        return measure(
            [sys.executable, __file__, "case", name, ",".join(map(str, cores)), source, out],
            env={"PYTHONWARNINGS": "ignore"},
            timeout=limit,
        ).facts
    except CaseError as error:
        return {"problem": str(error)}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _report(counts: list[int], runs: dict[str, dict[int, list[dict[str, Any]]]], problems: list[str]) -> None:
    best = {
        name: {count: max(made, key=lambda run: run["amount"] / run["seconds"]) for count, made in by_count.items()}
        for name, by_count in runs.items()
    }
    rates = {
        name: {count: run["amount"] / run["seconds"] for count, run in made.items()} for name, made in best.items()
    }
    lines = []
    for name, made in rates.items():
        cells = []
        for count in counts:
            if count not in made:
                cells.append("-")
                continue
            first = min(made)
            efficiency = made[count] / made[first] / (count / first)
            cells.append(f"{made[count]:.1f} ({efficiency:.2f})")
        lines.append([name, CASES[name][1], *cells])
    print("\n### rate (efficiency)\n")
    print(table(["case", "unit", *map(str, counts)], lines))
    print("\n### seconds, and cores used\n")
    used = [
        [name, *(f"{made[n]['seconds']:.2f} s, {made[n]['cores']:.1f}" if n in made else "-" for n in counts)]
        for name, made in best.items()
    ]
    print(table(["case", *map(str, counts)], used))
    print("\n### user and system seconds, thousands of page faults and of switches\n")
    costs = [
        [
            name,
            *(
                "{user:.1f} + {system:.1f}, {faults}k, {switches}k".format(
                    **made[n] | {key: round(made[n][key] / 1e3) for key in ("faults", "switches")}
                )
                if n in made
                else "-"
                for n in counts
            ),
        ]
        for name, made in best.items()
    ]
    print(table(["case", *map(str, counts)], costs))
    for peer in ("gigatoken", "gigatoken-strings"):
        for count in counts:
            if count in rates.get("text", {}) and count in rates.get(peer, {}):
                ratio = rates["text"][count] / rates[peer][count]
                verdict = "met   " if ratio >= LEAST_RATIO else "MISSED"
                print(f"{verdict} text at {count}: {ratio:.2f}x {peer}, wanted {LEAST_RATIO:g}x")
    for name, made in rates.items():
        for fewer, more in itertools.pairwise(sorted(made)):
            if made[more] < 0.95 * made[fewer]:
                print(f"MISSED {name}: {more} cores are slower than {fewer}")
    for name, made in best.items():
        if made and (sentence := made[max(made)].get("bottleneck")):
            print(f"{name} at {max(made)}: {sentence}")
            for stage in made[max(made)]["stages"]:
                print(f"    {stage}")
    print(*problems, sep="\n")


def _input(kind: str, megabytes: float) -> Path:
    if kind == "web":
        path = make_corpus(megabytes).path
    else:
        make_tokenizer()
        make = make_text if kind == "text" else make_chats
        path = _repeated(make(min(megabytes, 100.0)), megabytes)
    read_through(path)
    return path


def _repeated(path: Path, megabytes: float) -> Path:
    """The file as often as it takes: an installation with few packages has little text."""
    size = path.stat().st_size
    times = max(1, round(megabytes * 1e6 / size))
    if times == 1:
        return path
    long = path.with_name(f"{path.stem}-x{times}.jsonl")
    if not long.exists():
        partial = long.with_suffix(".partial")
        with partial.open("wb") as out:
            for _ in range(times):
                with path.open("rb") as one:
                    shutil.copyfileobj(one, out, 1 << 20)
        partial.rename(long)
    return long


def _usable() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _machine(usable: list[int]) -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{len(usable)} usable of {os.cpu_count()} cores, {model}; Python {platform.python_version()}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput at several core counts.")
    parser.add_argument("--mb", type=float, default=300, help="size of the text in millions of bytes (300)")
    parser.add_argument("--repeat", type=int, default=2, help="rounds (2)")
    parser.add_argument("--cores", help="core counts, such as 1,4,16 (1,2,4,8,16,32,64, as far as they exist)")
    parser.add_argument("--only", help=f"cases, of {','.join(CASES)}")
    parser.add_argument("--limit", type=float, default=60, help="seconds that one run may take (60)")
    parser.add_argument("--seconds", type=float, default=360, help="no run starts later than this (360)")
    parser.add_argument("--no-warm-up", action="store_true", help="compiled functions are cached already")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    return parser.parse_args()


def _case(name: str, cores: str, source: str, out: str, facts: str) -> None:
    work, amount = CASES[name][0](Path(source), Path(out))
    start, before = time.perf_counter(), _used()
    result = work()
    seconds = time.perf_counter() - start
    user, system, faults, switches = (now - then for now, then in zip(_used(), before))
    report = getattr(result, "report", result)
    report_facts(
        facts,
        seconds=seconds,
        cores=(user + system) / seconds,
        user=user,
        system=system,
        faults=faults,
        switches=switches,
        amount=amount(result),
        bottleneck=getattr(report, "bottleneck", None),
        stages=[_stage(stage) for stage in getattr(report, "stages", ())],
    )


def _stage(stage: dict[str, Any]) -> str:
    waits = f"waited {stage['wait_input_seconds']:.2f} for input, {stage['wait_room_seconds']:.2f} for room"
    busy = f"busy {stage['busy_seconds']:.2f} s, CPU {stage.get('cpu_seconds', 0):.2f} s"
    return f"{stage['name'][:40]}: {busy}, {stage['batches']} batches, {stage['threads']} threads, {waits}"


def _used() -> tuple[float, ...]:
    """User and system seconds, page faults and context switches of this process and its children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    fields = ("ru_utime", "ru_stime", "ru_minflt", "ru_nvcsw")
    return tuple(sum(getattr(one, field) for one in both) for field in fields)


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        _case(*sys.argv[2:])
    else:
        main()
