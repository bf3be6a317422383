"""Quality filters compared with datatrove, one core each, on the same documents: speed and agreement of kept rows.

python benchmarks/filters.py [--rows 3000] [--repeat 3]

Each filter runs alone over documents in memory. datatrove splits words with spaCy, penstock with its own rules, which
give nearly the same words. In the case "same words" datatrove uses penstock's splitter, written in Python, so that
both see identical words. Loading is not timed: of spaCy on one side, of compiled rules on the other (up to 0.7 s).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from facts import report_facts
from measure import CaseError, measure
from realtext import make_text
from speed import QUIET
from table import table

from corpus import DATA

FILTERS = {
    "gopher-quality": ("GopherQuality", "gopher_quality_filter", "GopherQualityFilter"),
    "gopher-repetition": ("GopherRepetition", "gopher_repetition_filter", "GopherRepetitionFilter"),
    "c4": ("C4Quality", "c4_filters", "C4QualityFilter"),
    "fineweb": ("FineWebQuality", "fineweb_quality_filter", "FineWebQualityFilter"),
}
LEAST = 10.0


def documents(path: Path, rows: int) -> list[str]:
    with path.open("rb") as file:
        return [json.loads(line)["text"] for _, line in zip(range(rows), file)]


def penstock(name: str, texts: list[str]) -> tuple[float, list[int]]:
    import pyarrow as pa

    from penstock import transforms

    batch = pa.record_batch({"id": range(len(texts)), "text": texts})
    batches = [batch.slice(start, 500) for start in range(0, len(texts), 500)]
    stage = getattr(transforms, FILTERS[name][0])("text")
    for part in batches:  # plain Python filters the first rows, then numba loads its compiled code
        stage.transform(part)
    start = time.process_time()
    kept = [number for part in batches for number in stage.transform(part)["id"].to_pylist()]
    return time.process_time() - start, kept


def datatrove(name: str, texts: list[str], *, same_words: bool = False) -> tuple[float, list[int]]:
    import importlib

    from datatrove.data import Document

    if same_words:
        _share_words()
    _, module, kind = FILTERS[name]
    stage = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), kind)()
    rows = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    stage.filter(Document(text=texts[0], id="warm up"))
    start = time.process_time()
    kept = [number for number, row in enumerate(rows) if _passes(stage.filter(row))]
    return time.process_time() - start, kept


def datatrove_same(name: str, texts: list[str]) -> tuple[float, list[int]]:
    return datatrove(name, texts, same_words=True)


def _passes(answer: Any) -> bool:
    return bool(answer[0] if isinstance(answer, tuple) else answer)


def _share_words() -> None:
    """Make datatrove use the word splitter of penstock."""
    import datatrove.utils.word_tokenizers as word_tokenizers
    import pyarrow as pa

    from penstock.corpus.quality.words import word_spans

    class Splitter:
        def word_tokenize(self, text: str) -> list[str]:
            starts, ends, _ = word_spans(pa.array([text]), "english")
            data = text.encode()
            return [data[start:end].decode() for start, end in zip(starts.tolist(), ends.tolist())]

        def __getattr__(self, name: str) -> Any:
            return getattr(kept, name)

    kept = word_tokenizers.load_word_tokenizer("en")
    word_tokenizers.load_word_tokenizer = lambda language: Splitter()  # type: ignore[assignment]


CASES: dict[str, Callable[[str, list[str]], tuple[float, list[int]]]] = {
    "penstock": penstock,
    "datatrove": datatrove,
    "datatrove, same words": datatrove_same,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality filters compared with datatrove.")
    parser.add_argument("--rows", type=int, default=3000, help="documents (3000)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of penstock (3); of datatrove there is one")
    parser.add_argument("--mb", type=float, default=300, help="size of the corpus the documents are taken from (300)")
    arguments = parser.parse_args()
    source = make_text(arguments.mb)
    megabytes = sum(len(text.encode()) for text in documents(source, arguments.rows)) / 1e6
    print("python", *sys.argv)
    lines = []
    for name in FILTERS:
        runs: dict[str, list[dict[str, Any]]] = {}
        for case in CASES:
            for _ in range(arguments.repeat if case == "penstock" else 1):
                command = [sys.executable, __file__, f"case:{case}", name, source, str(arguments.rows)]
                try:
                    facts = measure(command, env=QUIET).facts
                    runs.setdefault(case, []).append(facts)
                except CaseError as error:
                    print(f"{name}, {case}: {error}")
        if "penstock" not in runs:
            continue
        own = median(run["seconds"] for run in runs["penstock"])
        for case, made in runs.items():
            seconds = median(run["seconds"] for run in made)
            different = len(set(made[0]["kept"]) ^ set(runs["penstock"][0]["kept"]))
            cells = [f"{arguments.rows / seconds:,.0f}", f"{megabytes / seconds:.2f}", f"{len(made[0]['kept']):,}"]
            lines.append([name, case, *cells, str(different), f"{seconds / own:.1f}x"])
            if case == "datatrove":
                verdict = "met   " if seconds / own >= LEAST else "MISSED"
                print(f"{verdict} {name}: {seconds / own:.1f}x {case}, {different} rows differ, wanted {LEAST:g}x")
    headers = ["filter", "case", "documents/s", "MB/s", "kept", "rows that differ", "penstock speed"]
    print(f"\n### quality filters, {arguments.rows:,} documents, {megabytes:.0f} MB, one core\n")
    print(table(headers, lines))


def _case(which: str, name: str, source: str, rows: str, facts: str) -> None:
    seconds, kept = CASES[which.removeprefix("case:")](name, documents(Path(source), int(rows)))
    report_facts(facts, seconds=seconds, kept=kept)


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 1 and sys.argv[1].startswith("case:"):
        _case(*sys.argv[1:])
    else:
        main()
