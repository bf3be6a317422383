"""Files of other programs for the tests, written by the packages themselves: run it where they are installed.

    pip install megatron-core mosaicml-streaming webdataset && python tests/foreign_files/write.py

Versions that wrote the files here: megatron-core 0.16.1, mosaicml-streaming 0.13.0, webdataset 1.0.2.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
import webdataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from streaming import MDSWriter

HERE = Path(__file__).parent


def tokens(row: int) -> np.ndarray:
    """Tokens of a row: the tests know the same rule."""
    return np.arange(row * 7, row * 7 + 1 + row % 5, dtype=np.int64) % 1000


def write_megatron() -> None:
    """`docs`: 20 documents of one sequence, uint16. `sentences`: documents of 1 to 3, int32. `pictures`: modes."""
    home = HERE / "megatron"
    home.mkdir()
    builder = IndexedDatasetBuilder(str(home / "docs.bin"), dtype=np.uint16)
    for row in range(20):
        builder.add_document(torch.tensor(tokens(row)), [len(tokens(row))])
    builder.finalize(str(home / "docs.idx"))
    builder = IndexedDatasetBuilder(str(home / "sentences.bin"), dtype=np.int32)
    row = 0
    for document in range(8):
        for _ in range(1 + document % 3):
            builder.add_item(torch.tensor(tokens(row)))
            row += 1
        builder.end_document()
    builder.finalize(str(home / "sentences.idx"))
    builder = IndexedDatasetBuilder(str(home / "pictures.bin"), dtype=np.uint16, multimodal=True)
    for row in range(4):
        builder.add_item(torch.tensor(tokens(row)), mode=row % 2)
        builder.end_document()
    builder.finalize(str(home / "pictures.idx"))


def write_mds() -> None:
    """`tokens`: shards of ndarray:uint16, raw. `zstd`: compressed, with hashes. `texts`: many encodings. `bytes`."""
    home = HERE / "mds"
    columns = {"tokens": "ndarray:uint16", "uid": "int"}
    with MDSWriter(out=str(home / "tokens"), columns=columns, size_limit=512, hashes=["xxh64"]) as out:
        for row in range(20):
            out.write({"tokens": tokens(row).astype(np.uint16), "uid": row})
    columns = {"tokens": "ndarray:int32:4"}
    with MDSWriter(
        out=str(home / "zstd"), columns=columns, size_limit=512, compression="zstd:7", hashes=["sha1", "xxh3_64"]
    ) as out:
        for row in range(20):
            out.write({"tokens": np.arange(row, row + 4, dtype=np.int32)})
    columns = {
        "text": "str",
        "raw": "bytes",
        "number": "int",
        "small": "uint8",
        "score": "float32",
        "any": "json",
        "vector": "ndarray:float32",
        "exact": "str_int",
    }
    with MDSWriter(out=str(home / "texts"), columns=columns, size_limit=2000, compression="gz") as out:
        for row in range(12):
            out.write(
                {
                    "text": f"zeile {row} äöü",
                    "raw": bytes([row, 0, 255]),
                    "number": -row,
                    "small": row,
                    "score": row / 2,
                    "any": {"row": row},
                    "vector": np.array([row, 0.5], np.float32),
                    "exact": 10**12 + row,
                }
            )
    with MDSWriter(out=str(home / "bytes"), columns={"tokens": "bytes"}, size_limit=512) as out:
        for row in range(20):
            out.write({"tokens": tokens(row).tobytes()})
    with MDSWriter(out=str(home / "pickles"), columns={"tokens": "pkl"}) as out:
        out.write({"tokens": [1, 2, 3]})


def write_webdataset() -> None:
    """`tokens-00000{0,1}.tar`: .npy and .json. `texts.tar`: .txt, .cls, .json. `pickles.tar`: .pyd."""
    home = HERE / "webdataset"
    home.mkdir()
    for shard in range(2):
        with webdataset.TarWriter(str(home / f"tokens-{shard:06d}.tar")) as out:
            for row in range(shard * 5, shard * 5 + 5):
                sample = {"tokens.npy": tokens(row).astype(np.uint16), "json": {"row": row}}
                out.write({"__key__": f"row{row:04d}", **sample})
    with webdataset.TarWriter(str(home / "texts.tar")) as out:
        for row in range(6):
            out.write({"__key__": f"a/row{row}", "txt": f"zeile {row} äöü", "cls": row % 3, "json": {"n": [row]}})
    with webdataset.TarWriter(str(home / "pickles.tar")) as out:
        out.write({"__key__": "row", "pyd": [1, 2]})


if __name__ == "__main__":
    for name in ("megatron", "mds", "webdataset"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    write_megatron()
    write_mds()
    write_webdataset()
