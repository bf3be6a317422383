"""Cases of `feed.py`; this list imports none of the libraries.

Each file belongs to one library. A case of the suite `feed` is a function that takes the folder with the data and
returns a function from the number of an epoch to its batches, pairs of `input_ids` and `labels`: two int64 torch
tensors of 32 x 2048. Cases of other suites return their measurements. `documented` follows the documentation of the
library, `tuned` is the fastest variant we found, with custom code where that helps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEQUENCE, BATCH = 2048, 32
VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of a table. `function` and `write` name functions of this package: file.function."""

    name: str
    function: str
    package: str
    """Required distribution."""
    kind: str
    """`own`, `reference`, `documented` or `tuned`."""
    data: str = "flat"
    """Folder with the tokens in the format of this case."""
    write: str | None = None
    """Function that writes it."""
    note: str = ""

    @property
    def peer(self) -> str:
        """Library of the case: the name of the file."""
        return self.function.partition(".")[0]

    def load(self) -> Callable[..., Any]:
        return find(self.function)


def find(place: str) -> Callable[..., Any]:
    """Function named file.function; imports the library."""
    file, _, function = place.partition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"feed_peers.{file}"), function)
    return found


FEED = [
    Case(
        name="numpy gather",
        function="reference.gather",
        package="numpy",
        kind="reference",
        note="a loop over a memory map: rows by a shuffled index, astype(int64), a copy for the labels",
    ),
    Case(
        name="penstock",
        function="penstock.feed",
        package="penstock",
        kind="own",
        data="store",
        write="penstock.write",
        note="PretrainDataLoader over a token store, packing='concat', fields=('input_ids', 'labels')",
    ),
    Case(
        name="penstock rows",
        function="penstock.feed_rows",
        package="penstock",
        kind="own",
        data="store",
        write="penstock.write",
        note="packing=None: a row of the store is a sequence",
    ),
    Case(
        name="penstock all fields",
        function="penstock.feed_all_fields",
        package="penstock",
        kind="own",
        data="store",
        write="penstock.write",
        note="every field of a batch, provenance included, which nobody else makes",
    ),
    Case(
        name="mosaicml-streaming",
        function="mosaicml.documented",
        package="mosaicml-streaming",
        kind="documented",
        data="mds",
        write="mosaicml.write",
        note="MDS shards of uint16 arrays, StreamingDataset(shuffle=True) in a torch DataLoader, no workers",
    ),
    Case(
        name="litdata",
        function="litdata.documented",
        package="litdata",
        kind="documented",
        data="litdata",
        write="litdata.write",
        note="TokensLoader, StreamingDataLoader, no workers; shuffles chunks and blocks within a chunk, not globally",
    ),
    Case(
        name="datasets",
        function="datasets.documented",
        package="datasets",
        kind="documented",
        data="arrow",
        write="datasets.write",
        note="with_format('torch') in a torch DataLoader, no workers",
    ),
    Case(
        name="datasets Arrow by hand",
        function="datasets.arrow_by_hand",
        package="datasets",
        kind="tuned",
        data="arrow",
        write="datasets.write",
        note="with_format('arrow'), one query a batch, the buffer taken as it is",
    ),
    Case(
        name="grain",
        function="grain.documented",
        package="grain",
        kind="documented",
        note="MapDataset over a memory map, shuffle, batch, to_iter_dataset with its 16 threads",
    ),
    Case(name="grain 2 threads", function="grain.two_threads", package="grain", kind="tuned", note="num_threads=2"),
    Case(
        name="grain gather by hand",
        function="grain.gather_by_hand",
        package="grain",
        kind="tuned",
        note="it shuffles and batches row numbers; a map after that gathers the rows of a batch at once",
    ),
    Case(
        name="torchdata",
        function="torchdata.documented",
        package="torchdata",
        kind="documented",
        note="StatefulDataLoader over a map-style dataset on a memory map, no workers",
    ),
    Case(
        name="torchdata gather by hand",
        function="torchdata.gather_by_hand",
        package="torchdata",
        kind="tuned",
        note="__getitems__ gathers the rows of a batch at once",
    ),
]

PACKING = [
    Case(name="penstock global", function="penstock.pack_global", package="penstock", kind="own"),
    Case(
        name="penstock windows",
        function="penstock.pack_windows",
        package="penstock",
        kind="own",
        note="65,536 documents at a time",
    ),
    Case(
        name="trl bfd",
        function="trl.pack",
        package="trl",
        kind="documented",
        note="pack_dataset(strategy='bfd'), 1000 documents at a time by default; it also moves the tokens, a byte each",
    ),
]

CHAT = [
    Case(
        name="penstock",
        function="penstock.chat",
        package="penstock",
        kind="own",
        note="ConversationDataLoader(packing='best_fit'), an empty cache",
    ),
    Case(
        name="datasets + trl",
        function="trl.chat",
        package="trl",
        kind="documented",
        note="map(apply_chat_template with its mask), pack_dataset(strategy='bfd'), the collator of SFTTrainer",
    ),
    Case(
        name="datasets + trl 2 processes",
        function="trl.chat_two_processes",
        package="trl",
        kind="tuned",
        note="map(num_proc=2)",
    ),
]
