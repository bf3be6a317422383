"""Loader benchmarks compared with peers: throughput, first batch, packing, chats, import.

    python benchmarks/feed.py                                             # all installed peers
    python benchmarks/feed.py --suite feed --repeat 3 --python /venvs/peers/bin/python
    python benchmarks/feed.py --suite feed --tokens 20e6 --only penstock,grain --python mosaicml=/venvs/m/bin/python

`feed`     tokens in a file -> int64 torch tensors of 32 x 2048, `input_ids` and `labels`, shuffled; 200 million tokens
`start`    a fresh process to its first batch, at 1M and 1B rows, from the beginning and resumed at 90% of an epoch
`packing`  a million documents into bins of 4096 tokens
`chat`     JSONL of 20,000 new conversations -> the whole epoch of packed, masked batches
`import`   time of importing penstock after NumPy and pyarrow

Every case runs in a fresh process, interleaved, with its files in the page cache. Peers are searched for in the
interpreter given by --python, in this one, and in the virtual environments in the project and in `.data`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from feed_peers import BATCH, CHAT, FEED, PACKING, SEQUENCE, Case, find
from feed_peers.reporting import compare, judge, notes, show, summary, times
from feed_peers.running import Runner, Runs

SUITES = ("feed", "start", "packing", "chat", "import")
CAPACITY, MAX_LENGTH, CHAT_BATCH = 4096, 2048, 8
START_ROWS = (1_000_000, 1_000_000_000)

AT_LEAST = {"reference": 0.7, "documented": 3.0, "tuned": 1.5}
"""Required speed of penstock relative to a case of this kind."""
MOST_START_SECONDS, MOST_IMPORT_SECONDS = 0.3, 0.1
LEAST_EFFICIENCY, LEAST_PACKING, LEAST_CHAT, MOST_CHAT_FIRST = 0.999, 50.0, 10.0, 3.0


# -- the measured process --------------------------------------------------------------------------------------------


def run_case(what: str, arguments: str, facts: str) -> None:
    """Run a case. `feed:NAME` is timed here; any other function returns its own measurements."""
    from facts import report_facts

    given = json.loads(arguments)
    if "torch_threads" in given:
        import torch

        torch.set_num_threads(given.pop("torch_threads"))
    if what.startswith("feed:"):
        from feed_peers.timing import time_feed

        case = next(case for case in FEED if case.name == what.removeprefix("feed:"))
        report_facts(facts, **time_feed(case, **given))
    elif what.startswith("write:"):
        find(what.removeprefix("write:"))(*map(Path, given))
        report_facts(facts)
    else:
        report_facts(facts, **find(what)(**given))


# -- the suites ------------------------------------------------------------------------------------------------------


def run_feed(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    from feed_peers.inputs import make_tokens

    from corpus import read_through

    sequences = int(options.tokens) // SEQUENCE
    data = make_tokens(runner.data, sequences)
    cases = runner.choose(FEED)
    for runs in cases:
        _write_once(runner, runs, data)
    arguments = {"data": str(data), "sequences": sequences, "seconds": options.seconds}
    arguments["torch_threads"] = options.torch_threads
    for repeat in range(runner.repeat):
        for runs in cases:
            if not runs.problem:
                for file in (data / runs.case.data).rglob("*"):
                    if file.is_file():
                        read_through(file)
            runner.run(runs, f"feed:{runs.case.name}", arguments, f"{repeat + 1}/{runner.repeat} ")
    figures = {runs.case.name: _feed_figures(runs) for runs in cases}
    compare(figures, "penstock", "tokens_per_second", "numpy gather")
    own_cpu = figures.get("penstock", {}).get("tokens_per_cpu_second")
    for figure in figures.values():
        there = figure.get("tokens_per_cpu_second")
        figure["penstock_cpu_speed"] = own_cpu / there if own_cpu and there else None
    print(f"\n## feed: {sequences * SEQUENCE / 1e6:.0f} million tokens, {BATCH} x {SEQUENCE}, int64 torch\n")
    show(
        figures,
        {
            "M tokens/s": lambda f: f"{f['tokens_per_second'] / 1e6:,.1f}",
            "spread": lambda f: f"{f['spread']:.2f}",
            "M tokens/CPU s": lambda f: f"{f['tokens_per_cpu_second'] / 1e6:,.1f}",
            "of numpy gather": lambda f: times(f["of_reference"]),
            "penstock speed": lambda f: times(f["penstock_speed"]),
            "(CPU)": lambda f: times(f["penstock_cpu_speed"]),
            "first batch ms": lambda f: f"{f['first_seconds'] * 1e3:.0f}",
            "peak MB": lambda f: f"{f['peak_mb']:.0f}",
            "shuffle": lambda f: f"{f['shuffle']:.2f}",
            "epoch": lambda f: f["epoch"],
            "others' cores": lambda f: f"{f['others']:.1f}",
        },
    )
    notes(cases)
    judged = []
    for name, figure in figures.items():
        limit = AT_LEAST.get(figure["kind"])
        if limit and figure.get("penstock_speed"):
            judged.append(judge(f"feed beside {name}, {figure['kind']}", figure["penstock_speed"], at_least=limit))
    return {"cases": figures, "targets": judged}


def _write_once(runner: Runner, runs: Runs, data: Path) -> None:
    """Tokens in the format of this case."""
    from measure import CaseError

    folder = data / runs.case.data
    if runs.problem or runs.case.write is None or folder.exists():
        return
    partial = data / f"{runs.case.data}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    print(f"  writing {folder.name}", flush=True)
    try:
        runner.measured(runs.python, f"write:{runs.case.write}", [str(data), str(partial)])
        partial.rename(folder)
    except CaseError as error:
        runs.problem = f"its data could not be written: {error}"


def _feed_figures(runs: Runs) -> dict[str, Any]:
    figure = summary(runs)
    if not runs.runs:
        return figure
    rates = [median(rates) for rates in runs.facts("tokens_per_second")]
    last = runs.runs[-1].facts
    if not last["complete"]:
        epoch = f"stopped after {last['batches']} batches, {last['repeated']} repeated"
    else:
        epoch = f"{last['missing']} missing, {last['repeated']} repeated"
    return figure | {
        "tokens_per_second": median(rates),
        "tokens_per_cpu_second": median(map(median, runs.facts("tokens_per_cpu_second"))),
        "spread": (max(rates) - min(rates)) / median(rates),
        "first_seconds": runs.middle("first_seconds"),
        "shuffle": last["shuffle"],
        "epoch": epoch,
    }


def run_start(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    from feed_peers.inputs import make_small_rows
    from measure import CaseError

    from corpus import read_through

    wanted: list[tuple[str, dict[str, Any], Runs]] = []
    for rows in START_ROWS:
        store = make_small_rows(runner.data, rows)
        for packing in ("concat", "best_fit"):
            state = runner.data / f"feed-state-{rows}-{packing}.json"
            problem = ""
            try:
                given: dict[str, Any] = {"store": str(store), "packing": packing, "share": 0.9, "out": str(state)}
                made = runner.measured(sys.executable, "penstock.save_state", given, timeout=60).facts
                steps = f"state of step {made['step']:,}, {made['state_bytes']} bytes"
                print(f"  {made['rows']:,} rows, {packing}: {steps}", flush=True)
            except CaseError as error:
                problem = f"no state: {error}"
            for resumed in (False, True):
                name = f"{rows:,} rows, {packing}{', resumed at 90%' if resumed else ''}"
                case = Case(name=name, function="penstock.first_batch", package="penstock", kind="own")
                given = {"store": str(store), "packing": packing, "state": str(state) if resumed else None}
                wanted.append((str(store), given, Runs(case, problem=problem if resumed else "")))
    for repeat in range(max(runner.repeat, 5)):
        for place, given, runs in wanted:
            if not repeat:
                for file in Path(place).rglob("*.*"):
                    read_through(file)
            runner.run(runs, "penstock.first_batch", given, f"{repeat + 1} ", timeout=120)
    figures = {}
    for _, _, runs in wanted:
        figures[runs.case.name] = summary(runs)
        if runs.runs:
            names = ("seconds", "cpu_seconds", "import_seconds", "construct_seconds", "batch_seconds")
            figures[runs.case.name] |= {name: runs.middle(name) for name in names}
            figures[runs.case.name]["most_seconds"] = max(runs.facts("seconds"))
    print("\n## start: a fresh process to its first batch, beyond importing torch\n")
    columns = {
        "ms": "seconds",
        "worst": "most_seconds",
        "CPU": "cpu_seconds",
        "import": "import_seconds",
        "construct": "construct_seconds",
    }
    columns["first batch"] = "batch_seconds"
    show(
        figures,
        {head: lambda f, name=name: f"{f[name] * 1e3:.0f}" for head, name in columns.items()}
        | {"peak MB": lambda f: f"{f['peak_mb']:.0f}"},
    )
    print("\nThe store of 1B rows lists the files of 32M rows as often as it takes.")
    judged = [
        judge(f"start {name}", figure["seconds"], at_most=MOST_START_SECONDS, unit=" s")
        for name, figure in figures.items()
        if "seconds" in figure
    ]
    return {"cases": figures, "targets": judged}


def run_packing(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    cases = runner.choose(PACKING)
    for repeat in range(runner.repeat):
        for runs in cases:
            if runs.case.kind == "own" or not repeat:  # the peer takes half a minute and is far from any target
                runner.run(runs, runs.case.function, {"capacity": CAPACITY}, f"{repeat + 1} ")
    figures = {}
    for runs in cases:
        figure = figures[runs.case.name] = summary(runs)
        if runs.runs:
            facts = runs.runs[-1].facts
            figure |= {"seconds": runs.middle("seconds"), "bins": facts["bins"], "placed": facts["placed"]}
            figure["efficiency"] = facts["tokens"] / (facts["bins"] * CAPACITY)
            figure["documents_per_second"] = facts["placed"] / figure["seconds"]
    own = "penstock windows"
    compare(figures, own, "documents_per_second")
    print(f"\n## packing: 1,000,000 documents, bins of {CAPACITY}\n")
    show(
        figures,
        {
            "s": lambda f: f"{f['seconds']:.3f}",
            "documents/s": lambda f: f"{f['documents_per_second']:,.0f}",
            "bins": lambda f: f"{f['bins']:,}",
            "efficiency": lambda f: f"{f['efficiency']:.3%}",
            "placed once": lambda f: f"{f['placed']:,}",
            "penstock speed": lambda f: times(f["penstock_speed"]),
            "peak MB": lambda f: f"{f['peak_mb']:.0f}",
        },
    )
    notes(cases)
    judged = []
    peers = {name: f["documents_per_second"] for name, f in figures.items() if f["kind"] != "own" and "bins" in f}
    for name, figure in figures.items():
        if figure["kind"] == "own" and "efficiency" in figure:
            judged.append(judge(f"packing efficiency of {name}", figure["efficiency"], at_least=LEAST_EFFICIENCY))
            judged += [
                judge(f"{name}, beside {peer}", figure["documents_per_second"] / rate, at_least=LEAST_PACKING)
                for peer, rate in peers.items()
            ]
    return {"cases": figures, "targets": judged}


def run_chat(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    from feed_peers.inputs import make_chats
    from realtext import make_tokenizer

    from corpus import read_through

    source, tokenizer = make_chats(runner.data, options.conversations), make_tokenizer()
    cases = runner.choose(CHAT)
    for repeat in range(runner.repeat):
        for runs in cases:
            if runs.case.kind != "own" and repeat:
                continue
            read_through(source)
            cache = runner.data / "out" / "feed-cache"
            shutil.rmtree(cache, ignore_errors=True)
            given: dict[str, Any] = {"source": str(source), "tokenizer": str(tokenizer), "cache": str(cache)}
            given |= {"max_length": MAX_LENGTH, "batch_size": CHAT_BATCH, "torch_threads": options.torch_threads}
            runner.run(runs, runs.case.function, given, f"{repeat + 1} ")
            shutil.rmtree(cache, ignore_errors=True)
    figures = {}
    for runs in cases:
        figure = figures[runs.case.name] = summary(runs)
        if runs.runs:
            facts = runs.runs[-1].facts
            figure |= {name: runs.middle(name) for name in ("seconds", "first_seconds")}
            figure |= {name: facts[name] for name in ("conversations", "tokens", "supervised", "batches", "efficiency")}
            figure["conversations_per_second"] = facts["conversations"] / figure["seconds"]
    compare(figures, "penstock", "conversations_per_second")
    print(f"\n## chat: {options.conversations:,} conversations, first use to the last batch\n")
    show(
        figures,
        {
            "conversations/s": lambda f: f"{f['conversations_per_second']:,.0f}",
            "penstock speed": lambda f: times(f["penstock_speed"]),
            "first batch s": lambda f: f"{f['first_seconds']:.2f}",
            "s": lambda f: f"{f['seconds']:.2f}",
            "conversations": lambda f: f"{f['conversations']:,}",
            "tokens": lambda f: f"{f['tokens']:,}",
            "supervised": lambda f: f"{f['supervised']:,}",
            "efficiency": lambda f: f"{f['efficiency']:.2%}",
            "peak MB": lambda f: f"{f['peak_mb']:.0f}",
            "others' cores": lambda f: f"{f['others']:.1f}",
        },
    )
    notes(cases)
    counts = {(figure["tokens"], figure["supervised"]) for figure in figures.values() if "tokens" in figure}
    print(f"tokens and supervised tokens: {'the same for all' if len(counts) < 2 else 'DIFFERENT'}")
    judged = []
    for name, figure in figures.items():
        if figure["kind"] == "documented" and figure.get("penstock_speed"):
            judged.append(judge(f"chat beside {name}", figure["penstock_speed"], at_least=LEAST_CHAT))
        elif figure["kind"] == "own" and "first_seconds" in figure:
            judged.append(judge("chat, first batch", figure["first_seconds"], at_most=MOST_CHAT_FIRST, unit=" s"))
    return {"cases": figures, "targets": judged}


def run_import(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    runs = Runs(Case(name="penstock", function="penstock.imports", package="penstock", kind="own"))
    for repeat in range(7):
        runner.run(runs, "penstock.imports", {}, f"{repeat + 1} ")
    figure = summary(runs)
    print("\n## import: beyond NumPy and pyarrow\n")
    if runs.problem:
        print(runs.problem)
        return {"cases": {"penstock": figure}, "targets": []}
    frameworks = runs.runs[-1].facts["frameworks"]
    figure |= {name: runs.middle(name) for name in ("seconds", "cpu_seconds")} | {"frameworks": frameworks}
    shown = f"{figure['seconds'] * 1e3:.0f} ms, {figure['cpu_seconds'] * 1e3:.0f} ms of CPU"
    print(f"{shown}; frameworks imported: {', '.join(frameworks) or 'none'}")
    judged = [
        judge("import", figure["seconds"], at_most=MOST_IMPORT_SECONDS, unit=" s"),
        judge("frameworks imported", len(frameworks), at_most=0),
    ]
    return {"cases": {"penstock": figure}, "targets": judged}


RUN = {"feed": run_feed, "start": run_start, "packing": run_packing, "chat": run_chat, "import": run_import}


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        run_case(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default=",".join(SUITES), help="some of them, separated by commas (all)")
    parser.add_argument("--only", default="", help="cases whose names begin so, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case (3)")
    parser.add_argument("--tokens", type=float, default=200e6, help="tokens of the suite feed (200e6)")
    parser.add_argument("--seconds", type=float, default=60, help="the most time for one epoch of a feed (60)")
    parser.add_argument(
        "--torch-threads", type=int, default=1, help="threads of torch itself; with more, peers are slower here (1)"
    )
    parser.add_argument("--conversations", type=int, default=20_000, help="rows of the suite chat (20000)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="[PEER=]PATH", help="an interpreter, of one peer or of any"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()
    unknown = sorted(set(options.suite.split(",")) - set(SUITES))
    if unknown:
        parser.error(f"no suite is called {', '.join(unknown)}; there are {', '.join(SUITES)}")
    runner = Runner(options)
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    for suite in options.suite.split(","):
        results[suite] = RUN[suite](runner, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
