"""Streaming with real processes: ranks that meet in a directory, are killed, and go on as another number of ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.batching.collate import BatchLayout
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.synchronization import merge_states
from penstock.errors import StalledError
from penstock.loaders.source import Sampling
from penstock.loaders.streamed.reader import StreamOptions, StreamPosition, StreamReader, StreamStep
from penstock.transforms.tokenization import ByteTokenizer

LENGTH, GLOBAL_BATCH = 64, 8
WORKER = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_streaming import reader_of, tokens_in
from penstock.distributed.ranks import Rank

_, _, data, out, rank, world, meet, pause = sys.argv
reader = reader_of(Path(data), Rank(int(rank), int(world)), rendezvous=meet, timeout_seconds=60)
position = reader.start()
with open(out, "w") as file:
    while (step := reader.next(position)) is not None:
        position = step.position
        line = {"tokens": tokens_in(step), "state": reader.to_state(position)}
        file.write(json.dumps(line) + "\\n")
        file.flush()
        if position.step == int(pause):
            sys.stdin.read()  # for ever: here it is killed
"""


def reader_of(folder: Path, rank: Rank | None = None, **options: Any) -> StreamReader:
    given = {"streams": 16, "shuffle_window": 32, **options}
    return StreamReader(
        Recipe(tokenizer=ByteTokenizer()),
        sorted(folder.glob("*.jsonl")),
        Sampling(packing="concat", length=LENGTH),
        BatchLayout(length=LENGTH, packed=True),
        global_batch=GLOBAL_BATCH,
        rank=rank,
        seed=5,
        options=StreamOptions(**given),
    )


def tokens_in(step: Any) -> list[list[int]]:
    """The rows of a batch, but for blanks."""
    rows = sorted(set(step.metadata["sample"].tolist()))
    return [step.arrays["input_ids"][row].tolist() for row in rows]


def read_on(reader: StreamReader, position: StreamPosition) -> list[StreamStep]:
    """The rest of an epoch."""
    steps = []
    while (step := reader.next(position)) is not None:
        steps.append(step)
        position = step.position
    return steps


def run_ranks(
    folder: Path, world: int, meet: Path, read: Callable[[StreamReader], list[list[StreamStep]]]
) -> list[list[StreamStep]]:
    """Ranks as threads, which meet in a directory as processes would."""
    found: dict[int, list[StreamStep]] = {}

    def run(rank: int) -> None:
        reader = reader_of(folder, Rank(rank, world), rendezvous=meet, timeout_seconds=60)
        found[rank] = [step for steps in read(reader) for step in steps]
        reader.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    draw, folder = random.Random(2), tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        rows = [{"text": f"{number}-{i} " + "w" * draw.randrange(120)} for i in range(150)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def start_rank(corpus: Path, out: Path, rank: int, world: int, meet: Path, pause: int) -> Any:
    arguments = [str(part) for part in (Path(__file__).parent, corpus, out, rank, world, meet, pause)]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdin=subprocess.PIPE)


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_killed_ranks_go_on_as_another_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    alone = reader_of(corpus)
    whole = [tokens_in(step) for step in read_on(alone, alone.start())]
    alone.close()

    kill_at = len(whole) // 2
    outs = [tmp_path / f"first-{rank}" for rank in range(2)]
    ranks = [start_rank(corpus, out, rank, 2, tmp_path / "meet-1", kill_at) for rank, out in enumerate(outs)]
    try:
        deadline = time.monotonic() + 60
        while any(len(lines_of(out)) < kill_at for out in outs):
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
            process.communicate()
    for step_tokens, one, other in zip(whole, *map(lines_of, outs)):
        assert one["tokens"] + other["tokens"] == step_tokens

    states = [lines_of(out)[kill_at - 1]["state"] for out in outs]
    merged = merge_states(states)
    steps = run_ranks(corpus, 4, tmp_path / "meet-2", lambda reader: [read_on(reader, reader.from_state(merged))])
    assert [rank[-1].position.step for rank in steps] == [len(whole)] * 4, "all ranks stop at the same step"
    for n, step_tokens in enumerate(whole[kill_at:]):
        assert [row for rank in steps for row in tokens_in(rank[n])] == step_tokens


def test_a_rank_without_data_delivers_blanks_until_the_others_are_done(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": "w" * 600}) + "\n", "utf-8")

    def two_epochs(reader: StreamReader) -> list[list[StreamStep]]:
        first = read_on(reader, reader.start())
        return [first, read_on(reader, reader.next_epoch(first[-1].position))]

    steps = run_ranks(folder, 2, tmp_path / "meet", two_epochs)
    assert len(steps[0]) == len(steps[1]) == 4
    blanks = [step for rank in range(2) for step in steps[rank] if not len(step.metadata["sample"])]
    assert blanks
    for step in blanks:
        assert step.arrays["input_ids"].shape == (1, LENGTH)
        assert (step.arrays["labels"] == -100).all()
        assert step.arrays["attention_mask"].sum() == 1
    assert all("num_items_in_batch" not in step.arrays for step in steps[0])


def test_a_rank_that_never_comes_is_named(corpus: Path, tmp_path: Path) -> None:
    reader = reader_of(corpus, Rank(1, 2), rendezvous=tmp_path / "meet", timeout_seconds=0.2)
    position = reader.start()
    with pytest.raises(StalledError, match="rank 0"):
        read_on(reader, position)
    reader.close()
