"""Raw text and chats to tokens, compared with `datasets.map` and with the bare tokenizer.

python benchmarks/tokens.py [--mb 300] [--repeat 3] [--suite text,chat] [--rows 4000] [--json out.json]

`text`: JSONL -> token store. The bare tokenizer gets the same strings in memory; only its encoding is timed.
`chat`: JSONL of conversations -> ids and assistant mask. The peer is `apply_chat_template` with
`return_assistant_tokens_mask=True` through `datasets.map`, on the first `--rows` rows only, since it is slow.
Every case runs in a fresh process; ids and masks are compared. Imports are not timed. Loading the tokenizer is timed
for penstock, not for the bare tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from facts import report_facts
from measure import CaseError, Measurement, measure
from realtext import make_chats, make_text, make_tokenizer
from speed import QUIET
from table import table

from corpus import DATA, read_through

TARGETS = {
    "text": [("datasets", 30.0), ("bare", 0.6)],
    "chat": [("datasets", 10.0)],
}


# -- the cases, each in a process of its own ---------------------------------------------------------------


def text_bare(source: Path, tokenizer: Path, out: Path, rows: int) -> dict[str, Any]:
    import gigatoken

    texts = [json.loads(line)["text"] for line in source.open("rb")]
    loaded = gigatoken.Tokenizer(str(tokenizer / "tokenizer.json"))
    loaded.encode_batch(["warm up"])
    start = time.perf_counter()
    tokens = 0
    for first in range(0, len(texts), 4096):
        tokens += len(loaded.encode_batch(texts[first : first + 4096]).layout.content.data)
    return {"seconds": time.perf_counter() - start, "tokens": tokens, "rows": len(texts)}


def text_penstock(source: Path, tokenizer: Path, out: Path, rows: int) -> dict[str, Any]:
    from penstock import MemoryBudget
    from penstock.loaders import Recipe, prepare

    _import_what_comes_late()
    start = time.perf_counter()
    prepared = prepare(source, out, Recipe(tokenizer=tokenizer, add_eos=False), budget=MemoryBudget("256 MiB"))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": prepared.manifest.tokens, "rows": prepared.manifest.rows}


def text_datasets(source: Path, tokenizer: Path, out: Path, rows: int) -> dict[str, Any]:
    import datasets
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [made.ids for made in loaded.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    start = time.perf_counter()
    data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    data = data.map(tokenize, batched=True, remove_columns=data.column_names, num_proc=2)
    data.save_to_disk(str(out / "data"))
    seconds = time.perf_counter() - start
    tokens = sum(map(len, data["input_ids"]))
    return {"seconds": seconds, "tokens": tokens, "rows": len(data)}


def chat_penstock(source: Path, tokenizer: Path, out: Path, rows: int) -> dict[str, Any]:
    from penstock import MemoryBudget
    from penstock.loaders import Recipe, prepare

    _import_what_comes_late()
    start = time.perf_counter()
    prepared = prepare(source, out, Recipe(tokenizer=tokenizer), budget=MemoryBudget("256 MiB"))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": prepared.manifest.tokens, "rows": prepared.manifest.rows}


def chat_datasets(source: Path, tokenizer: Path, out: Path, rows: int) -> dict[str, Any]:
    import datasets
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(str(tokenizer))

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        made = loaded.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": made["input_ids"], "loss_mask": made["assistant_masks"]}

    head = out / "head.jsonl"
    head.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        head.write_bytes(b"".join(line for _, line in zip(range(rows), file)))
    start = time.perf_counter()
    data = datasets.load_dataset("json", data_files=str(head), split="train", cache_dir=str(out / "cache"))
    data = data.map(tokenize, remove_columns=data.column_names, num_proc=2)
    data.save_to_disk(str(out / "data"))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(map(len, data["input_ids"])), "rows": len(data)}


def _import_what_comes_late() -> None:
    """Import in advance, untimed: with the first row gigatoken imports awkward, and pyarrow imports pandas."""
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401
    import pandas  # noqa: F401


CASES = {
    "text": {"bare": text_bare, "penstock": text_penstock, "datasets": text_datasets},
    "chat": {"penstock": chat_penstock, "datasets": chat_datasets},
}


# -- running and comparing ---------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    tokenizer = make_tokenizer()
    for suite in arguments.suite.split(","):
        source = make_text(arguments.mb) if suite == "text" else make_chats(arguments.mb)
        read_through(source)
        results[suite] = _run(suite, source, tokenizer, arguments.rows, arguments.repeat)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _run(suite: str, source: Path, tokenizer: Path, rows: int, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[Measurement]] = {name: [] for name in CASES[suite]}
    problems: dict[str, str] = {}
    for repeat in range(repeats):
        for name in runs:
            if name in problems or (name == "datasets" and repeat):  # takes minutes and is far from any target
                continue
            out = DATA / "out" / f"{suite}-{name}"
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            try:
                run = measure(
                    [sys.executable, __file__, f"{suite}:{name}", source, tokenizer, out, str(rows)], env=QUIET
                )
            except CaseError as error:
                problems[name] = str(error)
                continue
            runs[name].append(run)
            print(f"  {repeat + 1}/{repeats} {suite} {name:10} {run.facts['seconds']:8.2f} s", flush=True)
    return _report(suite, source, runs, problems)


def _report(suite: str, source: Path, runs: dict[str, list[Measurement]], problems: dict[str, str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, made in runs.items():
        if not made:
            figures[name] = {"problem": problems.get(name, "not run")}
            continue
        seconds, facts = median(run.facts["seconds"] for run in made), made[0].facts
        figures[name] = {
            "seconds": seconds,
            "rows": facts["rows"],
            "tokens": facts["tokens"],
            "tokens_per_second": facts["tokens"] / seconds,
            "rows_per_second": facts["rows"] / seconds,
            "peak_bytes": median(run.peak_bytes for run in made),
            "others_cores": median(run.others_cores for run in made),
        }
    own = figures["penstock"].get("tokens_per_second")
    lines = []
    for name, f in figures.items():
        if "problem" in f:
            lines.append([name, *["-"] * 6, f["problem"]])
            continue
        ratio = f"{own / f['tokens_per_second']:.2f}x" if own else "-"
        rate, peak = f"{f['tokens_per_second'] / 1e6:.2f}", f"{f['peak_bytes'] / 1e6:.0f}"
        speed = f"{f['rows_per_second']:,.0f}"
        lines.append(
            [name, f"{f['rows']:,}", f"{f['seconds']:.2f}", rate, speed, peak, f"{f['others_cores']:.1f}", ratio]
        )
    print(f"\n### {suite}, {source.stat().st_size / 1e6:.0f} MB\n")
    print(table(["case", "rows", "s", "M tokens/s", "rows/s", "peak MB", "others' cores", "penstock speed"], lines))
    for peer, least in TARGETS[suite]:
        if own and "tokens_per_second" in figures[peer]:
            ratio = own / figures[peer]["tokens_per_second"]
            verdict = "met   " if ratio >= least else "MISSED"
            print(f"{verdict} {suite}: {ratio:.2f}x {peer}, wanted at least {least:g}x")
    figures["differences"] = _differences(suite)
    print(f"rows compared with datasets: {figures['differences']}")
    return figures


def _differences(suite: str) -> str:
    """Compare ids, and masks of chats, of penstock's store with the output of `datasets`."""
    import datasets
    import numpy as np

    from penstock.store import open_store

    own, peer = DATA / "out" / f"{suite}-penstock", DATA / "out" / f"{suite}-datasets" / "data"
    if not own.exists() or not peer.exists():
        return "not compared"
    theirs = datasets.load_from_disk(str(peer))
    different = 0
    with open_store(own) as store:
        for number in range(len(theirs)):
            row, other = store[number], theirs[number]
            same = all(np.array_equal(row[name], other[name]) for name in other)
            different += not same
    return f"{len(theirs):,} rows, {different:,} differ"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenization compared with peers.")
    parser.add_argument("--mb", type=float, default=300, help="size of the input in millions of bytes (300)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of penstock and of the bare tokenizer (3)")
    parser.add_argument("--suite", default="text,chat", help="text, chat or both")
    parser.add_argument("--rows", type=int, default=4000, help="chats that the slow peer gets (4000)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    return parser.parse_args()


def _case(which: str, source: str, tokenizer: str, out: str, rows: str, facts: str) -> None:
    suite, name = which.split(":")
    report_facts(facts, **CASES[suite][name](Path(source), Path(tokenizer), Path(out), int(rows)))


if __name__ == "__main__":
    if len(sys.argv) > 1 and ":" in sys.argv[1]:
        _case(*sys.argv[1:])
    else:
        main()
