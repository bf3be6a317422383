"""Inputs of the cases, generated once and cached under `.data/`.

Tokens follow Zipf's law over a vocabulary of 32,000. The first two tokens of each sequence are its number, which
identifies the sequences of a batch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from feed_peers import SEQUENCE, VOCABULARY

VERSION = 1
_ROWS_AT_ONCE = 4096


def make_tokens(home: Path, sequences: int) -> Path:
    """Folder with `flat/tokens.bin`, uint16; cases convert it to their own formats."""
    folder = home / f"feed-v{VERSION}-{sequences}"
    file = folder / "flat" / "tokens.bin"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(4)
        table = _zipf_table()
        partial = file.with_suffix(".partial")
        with partial.open("wb") as out:
            for start in range(0, sequences, _ROWS_AT_ONCE):
                numbers = np.arange(start, min(sequences, start + _ROWS_AT_ONCE))
                rows = table[rng.integers(0, len(table), (len(numbers), SEQUENCE), dtype=np.uint32)]
                rows[:, 0], rows[:, 1] = numbers % VOCABULARY, numbers // VOCABULARY
                out.write(rows.tobytes())
        partial.rename(file)
    return folder


def open_tokens(folder: Path) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Sequences as rows of a memory map."""
    return np.memmap(folder / "flat" / "tokens.bin", np.uint16, mode="r").reshape(-1, SEQUENCE)


def make_lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths of a million documents, log-normal with a median of 403 tokens, at most 4096."""
    lengths = np.random.default_rng(0).lognormal(6.0, 1.0, 1_000_000)
    return np.clip(lengths, 1, 4096).astype(np.int64)


def make_chats(home: Path, conversations: int) -> Path:
    """First conversations of `realtext.make_chats`: one to three turns of real text."""
    from realtext import make_chats as all_chats

    path = home / f"feed-chats-v{VERSION}-{conversations}.jsonl"
    if not path.exists():
        megabytes = 20.0
        while True:
            with all_chats(megabytes).open("rb") as file:
                lines = [line for _, line in zip(range(conversations), file)]
            if len(lines) == conversations:
                break
            megabytes *= 2
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(lines))
        partial.rename(path)
    return path


def make_small_rows(home: Path, rows: int, most_rows: int = 32_000_000) -> Path:
    """Token store with rows of 8 to 24 tokens.

    Beyond `most_rows` the shards repeat: the manifest lists the same files several times. For the start of a loader
    this makes no difference, except that the page cache holds all files.
    """
    import pyarrow as pa

    from penstock.store import Manifest, StoreWriter, open_store
    from penstock.store.manifest import write_manifest

    path = home / f"feed-rows-v{VERSION}-{rows}"
    if path.exists():
        return path
    if rows > most_rows:
        source = make_small_rows(home, most_rows)
        with open_store(source, verify="fast") as store:
            there = store.manifest
        shards = there.shards * -(-rows // there.rows)
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source / "shards", partial / "shards", copy_function=_link)
        manifest = Manifest(schema=there.schema, shards=shards, tokens_column=there.tokens_column)
        write_manifest(partial, manifest, current=False)
        write_manifest(partial, manifest, current=True)
        partial.rename(path)
        return path
    rng = np.random.default_rng(5)
    table = _zipf_table()
    with StoreWriter(path) as writer:
        for start in range(0, rows, 1 << 17):
            lengths = rng.integers(8, 25, min(rows - start, 1 << 17))
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            tokens = table[rng.integers(0, len(table), int(offsets[-1]), dtype=np.uint32)]
            writer.write(pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
        writer.publish()
    return path


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _zipf_table() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Token ids, repeated by Zipf's law: a uniform draw from the table is a Zipf draw."""
    shares = 1 / np.arange(1, VOCABULARY + 1)
    counts = np.maximum(1, np.round(shares / shares.sum() * (1 << 20))).astype(np.int64)
    return np.repeat(np.arange(VOCABULARY, dtype=np.uint16), counts)
