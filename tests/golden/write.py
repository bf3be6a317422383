"""Write the golden material: stores, states, queues, checkpoints, and the digests of their batches.

    python -m golden.write

Run it in `tests/`, and only on a tree whose batches are to be kept: `tests/e2e/test_golden.py` compares every later
tree with them. A different batch then breaks the resume of existing runs; it is not a reason to run this again.

To add a case, add it to `golden_loaders.py` or `golden_runs.py` and run this with its name, which leaves all others
unchanged:

    python -m golden.write "text: a new case"
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from golden_digests import digests
from golden_keys import keys
from golden_loaders import BATCHES, LOADERS, SAVED_AFTER, raw_chats, raw_pairs, raw_text, table, take, titanic
from golden_runs import (
    CONTINUED,
    FILES,
    READ,
    STREAMS,
    Broken,
    appends,
    checkpointed,
    consumer,
    looped,
    provider,
    rollout_loader,
    rows_of,
    stream,
)
from penstock import Pipeline, RolloutQueue, prepare
from penstock.datasets import make_titanic
from penstock.errors import StageError
from penstock.loaders import Recipe
from penstock.sinks import StoreSink
from penstock.sources import MemorySource
from penstock.store import append
from penstock.templates import ColumnFormat, SentenceTemplate, TextTemplateEngine

MATERIAL = Path(__file__).parent / "material"
WORDS = """gate water turbine river valley pipe pump storm meadow bridge the a of and opens closes carries holds fills
slowly at dawn näher 水 10 3.5 under over stone wheel miller's lamp"""


def drawn(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS.split(), k=draw.randint(least, most))).capitalize() + "."


def main(names: list[str]) -> None:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="penstock-golden-cache-")
    if names:
        add(names)
        return
    work = Path(tempfile.mkdtemp(prefix="golden-")) / "material"
    work.mkdir()
    os.chdir(work)
    root = Path()  # states and metadata name paths as they were given
    make_raw(root)
    make_stores(root)
    make_cache(root)
    (root / "states").mkdir()
    make_runs(root)
    make_queues(root)
    golden: dict[str, Any] = {"loaders": {name: of_loader(root, name) for name in LOADERS}}
    golden["loops"] = {name: of_loop(root, name) for name in FILES}
    golden["streams"] = {name: of_stream(root, name) for name in STREAMS}
    golden["continued"] = {}
    for name, go_on in CONTINUED.items():
        copy = Path(tempfile.mkdtemp(prefix="golden-copy-")) / "material"
        shutil.copytree(work, copy)
        os.chdir(copy)
        golden["continued"][name] = go_on(root)
        os.chdir(work)
        shutil.rmtree(copy.parent)
    golden["keys"] = keys(root)
    golden["empty directories"] = [
        str(path) for path in sorted(root.rglob("*")) if path.is_dir() and not any(path.iterdir())
    ]
    save(root / "golden.json", golden)
    (root / ".gitattributes").write_text("* -text\n", "utf-8")
    os.chdir(MATERIAL.parent)
    shutil.rmtree(MATERIAL, ignore_errors=True)
    shutil.copytree(work, MATERIAL, ignore=shutil.ignore_patterns("*.lock", "*-lock"))
    shutil.rmtree(work.parent)
    print(f"{sum(1 for path in MATERIAL.rglob('*') if path.is_file())} files in {MATERIAL.name}/")


def add(names: list[str]) -> None:
    """Cases of loaders that the material does not have yet."""
    golden = json.loads((MATERIAL / "golden.json").read_text("utf-8"))
    os.chdir(MATERIAL)
    for name in names:
        if name in golden["loaders"]:
            raise SystemExit(f"{name!r} is written already; it is what later trees are held to")
        golden["loaders"][name] = of_loader(Path(), name)
    save(MATERIAL / "golden.json", golden)


def save(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def state_file(root: Path, name: str) -> Path:
    return root / "states" / (name.replace(": ", "-").replace(", ", "-").replace(" ", "_") + ".json")


# -- what is read ------------------------------------------------------------------------------------------------------


def make_raw(root: Path) -> None:
    draw = random.Random(1)
    (root / "raw").mkdir()

    sentence = partial(drawn, draw)
    documents = [
        {"id": f"d{n}", "text": " ".join(sentence(4, 12) for _ in range(draw.randint(1, 8)))} for n in range(40)
    ]
    documents[9]["text"] = documents[4]["text"]
    lines(root / "raw/documents.jsonl", documents)
    (root / "raw/parts").mkdir()
    for part in range(5):
        lines(root / f"raw/parts/part-{part}.jsonl", documents[8 * part : 8 * part + 8])
    packed = gzip.compress((root / "raw/documents.jsonl").read_bytes(), mtime=0)
    (root / "raw/documents.jsonl.gz").write_bytes(packed)
    (root / "raw/lines.txt").write_text("".join(f"{row['text']}\n" for row in documents), "utf-8")
    numbers = pa.table({"n": range(30), "name": [f"row {n}" for n in range(30)], "half": [n / 2 for n in range(30)]})
    pa.csv.write_csv(numbers, root / "raw/table.csv")
    pa.parquet.write_table(numbers, root / "raw/table.parquet", row_group_size=8)
    with pa.ipc.new_file(root / "raw/table.arrow", numbers.schema) as writer:
        writer.write_table(numbers, max_chunksize=9)
    chats = []
    for number in range(24):
        messages = [{"role": "system", "content": sentence(3, 6)}] if number % 3 == 0 else []
        for _ in range(draw.randint(1, 3)):
            messages += [{"role": "user", "content": sentence(2, 8)}, {"role": "assistant", "content": sentence(2, 9)}]
        chats.append({"id": number, "messages": messages})
    lines(root / "raw/chats.jsonl", chats)
    pairs = [{"prompt": sentence(2, 6), "chosen": sentence(2, 8), "rejected": sentence(1, 8)} for _ in range(17)]
    lines(root / "raw/pairs.jsonl", pairs)
    labelled = [{"prompt": sentence(2, 6), "completion": sentence(2, 8), "label": n % 3 != 1} for n in range(18)]
    lines(root / "raw/labelled.jsonl", labelled)
    lines(root / "raw/rollouts.jsonl", rollouts())
    make_tokenizer(root / "tokenizer", [row["text"] for row in documents])
    make_titanic(root / "titanic", rows=48, test_rows=12, seed=2)
    engine = TextTemplateEngine()
    formats = {"Age": ColumnFormat(unit="years"), "Fare": ColumnFormat(prefix="£", decimals=2)}
    engine.register_template(SentenceTemplate("golden", "{Name}[, aged {Age},] paid {Fare}.", columns=formats))
    engine.save_templates(root / "templates.yaml")


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def rollouts() -> list[dict[str, Any]]:
    """Ten groups of four; numbers are eighths and sixteenths, which every machine adds up to the same sum."""
    rng = np.random.default_rng(6)
    rows = []
    for number in range(40):
        size, group = int(rng.integers(2, 14)), number // 4
        rows.append(
            {
                "id": f"r{number}",
                "group": f"g{group}",
                "prompt_ids": [5 + group, 6, 7 + group % 3][: 1 + group % 3],
                "response_ids": rng.integers(5, 300, size).tolist(),
                "reward": int(rng.integers(-4, 9)) / 8,
                "logprobs": (-rng.integers(1, 40, size) / 16).tolist(),
                "ref_logprobs": (-rng.integers(1, 40, size) / 16).tolist(),
                "values": (rng.integers(-8, 9, size) / 16).tolist(),
                "loss_mask": [1, *(rng.random(size - 1) < 0.8).astype(int).tolist()],
                "policy_version": 0,
                "finish_reason": "stop",
            }
        )
    return rows


def make_tokenizer(home: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "[MASK]", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    save(home / "tokenizer_config.json", {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"})


def make_stores(root: Path) -> None:
    tokenizer = root / "tokenizer"
    chat = {"tokenizer": tokenizer, "template": "chatml", "max_length": 256}
    prepare(root / "raw/documents.jsonl", root / "stores/text.store", Recipe(tokenizer=tokenizer, keep=["id"]))
    prepare(root / "raw/chats.jsonl", root / "stores/chats.store", Recipe(**chat))
    for name in ("pairs", "labelled"):
        recipe = Recipe(**(chat | {"max_length": 128, "preference": True}))
        prepare(root / f"raw/{name}.jsonl", root / f"stores/{name}.store", recipe)
    rng = np.random.default_rng(8)
    rows = [rng.integers(0, 300, size).tolist() for size in rng.integers(1, 60, 50)]
    numbers = pa.table({"input_ids": pa.array(rows, pa.list_(pa.uint16()))})
    sink = StoreSink(root / "stores/versions.store", shard_bytes=1024)
    Pipeline(MemorySource(numbers.slice(0, 35)), [], sink).run()
    append(root / "stores/versions.store", numbers.slice(35).combine_chunks().to_batches())


def make_cache(root: Path) -> None:
    """The stores and tables that loaders make on first use."""
    for make in (raw_text, raw_chats, raw_pairs):
        make(root).close()
    for dataset in (titanic(root), table(root)):
        dataset.encoded()


# -- runs that were stopped --------------------------------------------------------------------------------------------


def make_runs(root: Path) -> None:
    (root / "runs").mkdir()
    for kind in ("text", "store"):
        file = root / f"runs/{kind}.run/checkpoint.json"
        Broken.at, Broken.wait = "d25", partial(wait_for_rows, file, 8)
        try:
            checkpointed(kind).run(checkpoint=f"runs/{kind}.run")
        except StageError:
            pass
        else:
            raise SystemExit("the run was to be stopped on the way")
        finally:
            Broken.at = None
        if not 0 < rows_in(file) < 40:
            raise SystemExit(f"the checkpoint is of {rows_in(file)} rows, and is to be of some of the 40")


def rows_in(checkpoint: Path) -> int:
    return int(json.loads(checkpoint.read_text("utf-8"))["rows_in"]) if checkpoint.exists() else 0


def wait_for_rows(checkpoint: Path, rows: int) -> None:
    """Until a checkpoint has that many rows: the run is to be stopped in its midst."""
    give_up = time.monotonic() + 30
    while rows_in(checkpoint) < rows and time.monotonic() < give_up:
        time.sleep(0.01)


def make_queues(root: Path) -> None:
    maker = provider(root)
    sample = maker.sample_batch

    def sample_and_stop(split: str, rng: np.random.Generator) -> Any:
        if maker.batch_index >= 5:
            maker.stop()
        return sample(split, rng)

    maker.sample_batch = sample_and_stop  # type: ignore[method-assign]
    maker.run()
    with consumer(root) as reader:
        for _ in range(READ):
            reader.get_batch("train")
        reader.get_batch("val")
        state = reader.state_dict()
        reader.commit(state)
        reader.get_batch("train")
        save(root / "states/queue.json", state)
    everything = appends(root)
    with RolloutQueue(root / "rollouts") as queue:
        for each in everything[: len(everything) * 2 // 3]:
            queue.append(each)
    loader = rollout_loader(root)
    for _ in range(6):
        loader.get_batch()
    state = loader.state_dict()
    loader.commit(state)
    loader.close()
    save(root / "states/rollouts.json", state)


# -- what comes out ----------------------------------------------------------------------------------------------------


def of_loader(root: Path, name: str) -> dict[str, Any]:
    with LOADERS[name](root) as loader:
        batches = take(loader, SAVED_AFTER)
        state = json.loads(json.dumps(loader.state_dict()))
        batches += take(loader, BATCHES - SAVED_AFTER)
    save(state_file(root, name), state)
    return digests(batches)


def of_loop(root: Path, name: str) -> dict[str, Any]:
    loop = looped(root, name)
    found = []
    for number, batch in enumerate(loop):
        found.append(batch)
        if number == 1:
            save(state_file(root, f"loop: {name}"), loop.state_dict())
    return digests(rows_of(iter(found)))


def of_stream(root: Path, name: str) -> dict[str, Any]:
    found = []
    pipeline = stream(root, name)
    for sample in pipeline:
        found.append(sample)
        if len(found) == 10:
            save(state_file(root, f"stream: {name}"), pipeline.state_dict())
    return digests(found)


if __name__ == "__main__":
    main(sys.argv[1:])
