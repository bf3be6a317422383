"""Deduplication: penstock and its peers on one corpus with known copies and known near copies.

    python benchmarks/dedup.py                                    # all installed engines, three runs each
    python benchmarks/dedup.py --suite minhash --only penstock,rensa-flat --rows 50000
    python benchmarks/dedup.py --suite recall --rows 50000        # share of copies found, by kind of text
    python benchmarks/dedup.py --peer-python other/bin/python     # peers in another environment

Every case runs in a fresh process, interleaved. The clock of the MinHash peers starts with their texts in memory, as
lists of Python strings or as an Arrow column, as they prefer. The clock of penstock starts with the Parquet file, or,
for `penstock-memory`, with an Arrow table.
Both sides of the exact cases read the same file: Parquet to the surviving ids (`exact`), Parquet to rows in memory
(`exact-rows`: penstock returns them batch by batch, and so does `polars-exact-batches`; `exact-short`: thirty times as
many rows of 100 bytes), JSONL to Parquet (`exact-file`). Polars runs `unique(keep="first", maintain_order=True)`;
`-hash` compares only 64-bit hashes, which gives nearly the same rows. Slow peers get fewer rows; rates are rows of 2 KB
a second.
Words are runs of letters and digits, for all MinHash engines but datatrove.
`CPU` is the time of all threads of the process, which is steadier on a busy machine (datatrove works in other
processes, so its figure is almost zero).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dedup_exact import EXACT, Dropped, as_jsonl, others, penstock
from facts import report_facts

VERSION = 1
_SHORT_ROWS = 30
EDITS = [0.0, 0.01, 0.02, 0.03]
"""Shares of replaced words in a copy; the copies of each share are 2.5% of the rows."""
NGRAM, BANDS, ROWS = 5, 14, 8


# -- the engines: each returns what is timed -------------------------------------------------------------------------


def penstock_minhash(path: Path) -> Callable[[], Dropped]:
    from penstock.transforms import MinHashDedup, dedup_stages

    return penstock(path, dedup_stages(MinHashDedup("text", ngram=NGRAM, bands=BANDS, rows=ROWS)))


def penstock_minhash_memory(path: Path) -> Callable[[], Dropped]:
    """Start from an Arrow table in memory, like rensa-flat."""
    from penstock.sources import MemorySource
    from penstock.transforms import MinHashDedup, dedup_stages

    stages = dedup_stages(MinHashDedup("text", ngram=NGRAM, bands=BANDS, rows=ROWS))
    return penstock(path, stages, MemorySource(pq.read_table(path, columns=["id", "text"])))


def rensa_tokens(path: Path) -> Callable[[], Dropped]:
    """rensa as documented: sets of tokens, here word 5-grams."""
    from rensa import RMinHash, RMinHashLSH

    texts = _texts(path)

    def work() -> Dropped:
        lsh = RMinHashLSH(threshold=0.7, num_perm=BANDS * ROWS, num_bands=BANDS)
        flags: list[bool] = []
        for start in range(0, len(texts), 5000):
            grams = [_grams(text) for text in texts[start : start + 5000]]
            matrix = RMinHash.digest_matrix_from_token_sets(grams, BANDS * ROWS, 42)
            flags += lsh.insert_matrix_and_query_duplicate_flags(matrix, start)
        return np.flatnonzero(flags)

    return work


def rensa_flat(path: Path) -> Callable[[], Dropped]:
    """rensa with shingles hashed by NumPy: faster than with its documented lists."""
    from rensa import RMinHash, RMinHashLSH

    column = pq.read_table(path, columns=["text"]).column(0).combine_chunks()

    def work() -> Dropped:
        lsh = RMinHashLSH(threshold=0.7, num_perm=BANDS * ROWS, num_bands=BANDS)
        flags: list[bool] = []
        for start in range(0, len(column), 1000):
            hashes, offsets = _flat_shingles(column[start : start + 1000])
            matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, BANDS * ROWS, 42)
            flags += lsh.insert_matrix_and_query_duplicate_flags(matrix, start)
        return np.flatnonzero(flags)

    return work


def datasketch_lsh(path: Path) -> Callable[[], Dropped]:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    texts = _texts(path)

    def work() -> Dropped:
        lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
        dropped = []
        for i, text in enumerate(texts):
            minhash = MinHash(num_perm=BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)
            minhash.update_batch([gram.encode() for gram in _grams(text)])
            if lsh.query(minhash):
                dropped.append(i)
            lsh.insert(i, minhash, check_duplication=False)
        return np.array(dropped, np.int64)

    return work


def datatrove_minhash(path: Path) -> Callable[[], Dropped]:
    """Four stages with files between them, each on two processes."""
    import json
    import shutil
    import tempfile

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup import MinhashDedupSignature as Signature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    folder = Path(tempfile.mkdtemp(prefix="datatrove-"))
    (folder / "in").mkdir()
    texts = _texts(path)
    for half in range(2):
        with open(folder / "in" / f"{half}.jsonl", "w") as file:
            for i in range(half * len(texts) // 2, (half + 1) * len(texts) // 2):
                file.write(json.dumps({"text": texts[i], "id": str(i)}) + "\n")
    # The default, xxhash, fails: datatrove 0.10 does not support xxhash 4.
    hashing = HashConfig(hash_fc="sha1")
    config = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS, hash_config=hashing)
    at = {name: str(folder / name) for name in ("in", "signatures", "buckets", "remove", "out")}

    def run(steps: list[Any], tasks: int, name: str) -> None:
        LocalPipelineExecutor(steps, tasks=tasks, workers=2, logging_dir=str(folder / "logs" / name)).run()

    def work() -> Dropped:
        reader = JsonlReader(at["in"])
        run([reader, Signature(at["signatures"], config=config)], 2, "1")
        run([MinhashDedupBuckets(at["signatures"], at["buckets"], config=config)], BANDS, "2")
        run([MinhashDedupCluster(at["buckets"], at["remove"], config=config)], 1, "3")
        writer = JsonlWriter(at["out"], compression=None)
        run([reader, MinhashDedupFilter(at["remove"]), writer], 2, "4")
        lines = [line for file in Path(at["out"]).glob("*.jsonl") for line in file.read_text().splitlines()]
        kept = np.array([int(json.loads(line)["id"]) for line in lines], np.int64)
        shutil.rmtree(folder)
        return others(kept, len(texts))

    return work


CASES: dict[str, tuple[str, Callable[[Path], Callable[[], Dropped]], int]] = {
    # suite, engine, maximum rows
    "penstock": ("minhash", penstock_minhash, 1 << 40),
    "penstock-memory": ("minhash", penstock_minhash_memory, 1 << 40),
    "rensa-flat": ("minhash", rensa_flat, 1 << 40),
    "rensa": ("minhash", rensa_tokens, 50_000),
    "datasketch": ("minhash", datasketch_lsh, 10_000),
    "datatrove": ("minhash", datatrove_minhash, 5_000),
    **EXACT,
}


def _texts(path: Path) -> list[str]:
    return pq.read_table(path, columns=["text"]).column(0).to_pylist()


_WORDS = re.compile(r"[^\W_]+").findall
_IN_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() for byte in range(256)])


def _grams(text: str) -> set[str]:
    words = _WORDS(text.lower())
    return {" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))}


def _flat_shingles(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the word 5-grams of all rows, and the offset of each row."""
    bounds = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(column.buffers()[2], np.uint8)[bounds[0] : bounds[-1]]
    bounds = bounds - bounds[0]
    word = _IN_WORD[data]
    starts = word.copy()
    starts[1:] &= ~word[:-1]
    row_starts = bounds[:-1][bounds[:-1] < len(data)]
    starts[row_starts] = word[row_starts]
    letters = np.where((data >= 65) & (data <= 90), data | 32, data)[word].astype(np.uint64)
    first = np.flatnonzero(starts[word])
    weights = np.multiply.accumulate(np.full(len(letters), 0x9E3779B97F4A7C15, np.uint64))
    sums = np.add.reduceat(letters * weights, first)
    # The sum of a word is weighted by its position: multiply by the inverse power of its first letter.
    inverse = np.multiply.accumulate(np.full(len(letters), pow(0x9E3779B97F4A7C15, -1, 1 << 64), np.uint64))
    words = sums * inverse[first]
    words ^= words >> np.uint64(29)
    grams = words[: len(words) - NGRAM + 1].copy()
    for i in range(1, NGRAM):
        grams = grams * np.uint64(0xD6E8FEB86659FD93) + words[i : len(words) - NGRAM + 1 + i]
    grams ^= grams >> np.uint64(32)
    per_row = np.searchsorted(np.flatnonzero(starts), bounds)
    counts = np.maximum(np.diff(per_row) - NGRAM + 1, 1)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(per_row[:-1], counts)
    return grams[np.minimum(place, len(grams) - 1)], np.concatenate(([0], np.cumsum(counts))).astype(np.uint64)


# -- the corpus ------------------------------------------------------------------------------------------------------


def make_input(rows: int) -> Path:
    """Texts of `corpus.py` with 10% copies; `original` is the row a copy was made from, or -1."""
    from corpus import DATA, make_corpus

    path = DATA / f"dedup-v{VERSION}-{rows}.parquet"
    if path.exists():
        return path
    import orjson

    originals: list[str] = []
    with make_corpus(min(520, 20 + 3 * rows // 1000)).path.open("rb") as file:
        for line in file:
            text = orjson.loads(line)["text"]
            if len(text) > 400:
                originals.append(text)
            if len(originals) == rows - rows // 10:
                break
    rng = np.random.default_rng(7)
    chosen = rng.permutation(len(originals))[: rows // 10]
    texts, source, edit = list(originals), [-1] * len(originals), [-1.0] * len(originals)
    for i, at in enumerate(chosen.tolist()):
        share = EDITS[i % len(EDITS)]
        texts.append(_edited(originals[at], share, rng))
        source.append(at)
        edit.append(share)
    # Originals and copies are shuffled: the first one should survive.
    order = rng.permutation(len(texts))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = {
        "id": np.arange(len(order)),
        "text": [texts[i] for i in order],
        "original": [int(place[source[i]]) if source[i] >= 0 else -1 for i in order],
        "edit": [edit[i] for i in order],
    }
    pq.write_table(pa.table(columns), path, row_group_size=2000, compression="zstd")
    return path


def make_short_input(rows: int) -> Path:
    """Texts of some 100 bytes, of which a tenth are copies."""
    from corpus import DATA

    path = DATA / f"dedup-short-v{VERSION}-{rows}.parquet"
    if path.exists():
        return path
    rng = np.random.default_rng(7)
    original = np.where(rng.random(rows) < 0.1, (rng.random(rows) * np.arange(rows)).astype(np.int64), -1)
    original[np.isin(original, np.flatnonzero(original >= 0))] = -1  # copies are of texts that are no copies
    shown = np.where(original < 0, np.arange(rows), original).tolist()
    columns = {
        "id": np.arange(rows),
        "text": [
            f"{number} a short text, the number of which is {number * 7919} and the rest is the same"
            for number in shown
        ],
        "original": original,
        "edit": np.where(original < 0, -1.0, 0.0),
    }
    pq.write_table(pa.table(columns), path, row_group_size=50_000, compression="zstd")
    return path


def _edited(text: str, share: float, rng: np.random.Generator) -> str:
    words = text.split(" ")
    for at in rng.integers(0, len(words), round(share * len(words))).tolist() if share else ():
        words[at] = f"edit{rng.integers(1000)}"
    return " ".join(words)


def cut(path: Path, rows: int) -> Path:
    """First rows of the corpus; a copy whose original is missing does not count as a copy."""
    part = path.with_name(f"{path.stem}-first-{rows}.parquet")
    if not part.exists():
        table = pq.read_table(path)[:rows]
        original = table.column("original").to_numpy()
        original = np.where(original < rows, original, -1)
        at = table.schema.get_field_index("original")
        pq.write_table(table.set_column(at, "original", pa.array(original)), part, row_group_size=2000)
    return part


def quality(path: Path, dropped: Dropped) -> str:
    """Recall for each share of edits, and precision.

    Either row of a pair may be dropped; engines that do not know the order drop both.
    """
    truth = pq.read_table(path, columns=["original", "edit"])
    original, edit = truth.column("original").to_numpy(), truth.column("edit").to_numpy()
    copies = np.flatnonzero(original >= 0)
    found = np.isin(copies, dropped) | np.isin(original[copies], dropped)
    edited = [edit[copies] == share for share in EDITS]
    recall = [found[share].mean() if share.any() else math.nan for share in edited]
    paired = np.union1d(copies, original[copies])
    precision = np.isin(dropped, paired).mean() if len(dropped) else 1.0
    return f"{' / '.join(f'{share:.3f}' for share in recall)}   {precision:.4f}"


# -- running ---------------------------------------------------------------------------------------------------------


def run_case(name: str, source: str, facts: str) -> None:
    """The measured process."""
    work = CASES[name][1](Path(source))
    start, cpu = time.perf_counter(), time.process_time()
    dropped = work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    report_facts(facts, seconds=seconds, cpu=cpu, dropped=dropped.tolist())


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        run_case(*sys.argv[2:])
        return
    from dedup_recall import recall_tables
    from measure import CaseError, Measurement, measure
    from table import table

    from corpus import read_through

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="minhash,recall,exact,exact-rows,exact-short,exact-file")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    options = parser.parse_args()
    suites = options.suite.split(",")
    if "recall" in suites:
        suites.remove("recall")
        print(f"\n## recall at shares of replaced words\n\n{recall_tables(min(options.rows, 50_000))}")
    for suite in suites:
        short = suite == "exact-short"
        whole = make_short_input(_SHORT_ROWS * options.rows) if short else make_input(options.rows)
        names = [name for name, case in CASES.items() if case[0] == suite and name in options.only.split(",")]
        inputs = {name: cut(whole, CASES[name][2]) if CASES[name][2] < options.rows else whole for name in names}
        runs: dict[str, list[Measurement]] = {name: [] for name in names}
        problems = {}
        for _ in range(options.repeat):
            for name in names:
                if name in problems:
                    continue
                read_through(as_jsonl(inputs[name]) if suite == "exact-file" else inputs[name])
                python = sys.executable if name.startswith("penstock") else options.peer_python
                try:
                    runs[name].append(measure([python, __file__, "--case", name, inputs[name]]))
                except CaseError as error:
                    problems[name] = str(error)
        rates = {
            name: pq.read_metadata(inputs[name]).num_rows / median(run.facts["seconds"] for run in done)
            for name, done in runs.items()
            if done
        }
        ours = next((rate for name, rate in rates.items() if name.startswith("penstock")), None)
        lines = [
            [
                name,
                f"{rate:,.0f}",
                f"{ours / rate:.1f}x" if ours else "-",
                f"{1e6 * median(run.facts['cpu'] for run in runs[name]) / pq.read_metadata(inputs[name]).num_rows:.1f}",
                f"{pq.read_metadata(inputs[name]).num_rows:,}",
                quality(inputs[name], np.array(runs[name][-1].facts["dropped"], np.int64)),
                f"{median(run.peak_bytes for run in runs[name]) / 1e6:,.0f}",
                f"{median(run.others_cores for run in runs[name]):.1f}",
            ]
            for name, rate in rates.items()
        ]
        heads = [
            "engine",
            "rows/s",
            "penstock speed",
            "CPU µs/row",
            "rows",
            "recall 0 / 1 / 2 / 3 % edited   precision",
            "peak MB",
        ]
        print(f"\n## {suite}\n\n{table([*heads, 'others cores'], lines)}")
        for name, problem in problems.items():
            print(f"\n{name}: {problem}")


if __name__ == "__main__":
    main()
