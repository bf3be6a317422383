"""States of every kind, damaged in every way that leaves them JSON: refused, or harmless, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Pipeline
from penstock.errors import ResumeError
from penstock.files.checkpoint_file import CHECKPOINT_NAME
from penstock.fsqueue import DatasetConsumer, QueueSink, QueueSource
from penstock.loaders import (
    MixedDataLoader,
    MLXDataLoader,
    PretrainDataLoader,
    RolloutDataLoader,
    StreamingPipeline,
)
from penstock.pipeline.checkpoint import load_checkpoint
from penstock.sinks import JsonlSink
from penstock.sources import IteratorSource, JsonlSource, MemorySource, ParquetSource, StoreSource
from penstock.transforms import ExactDedup, Map
from token_stores import make_rows, make_store

ROWS = [{"text": f"row {number}", "n": number} for number in range(60)]
FLIPS = 300


def jsonl(home: Path) -> Path:
    path = home / "in.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    return path


def read_some(source: Any) -> Any:
    source.next_batch(7)
    return source


def iterate(loader: Any, count: int = 3) -> Any:
    for _, _ in zip(range(count), loader, strict=False):
        pass
    return loader


def of_jsonl(home: Path) -> Any:
    return read_some(JsonlSource(jsonl(home)))


def of_parquet(home: Path) -> Any:
    pq.write_table(pa.Table.from_pylist(ROWS), home / "in.parquet")
    return read_some(ParquetSource(home / "in.parquet"))


def of_memory(home: Path) -> Any:
    return read_some(MemorySource(ROWS))


def of_iterator(home: Path) -> Any:
    return read_some(IteratorSource(lambda: ROWS))


def of_store(home: Path) -> Any:
    return read_some(StoreSource(make_store(home / "store", make_rows(20, 9))))


def of_dedup(home: Path) -> Any:
    dedup = ExactDedup(directory=home / "seen")
    dedup.transform(pa.RecordBatch.from_pylist(ROWS))
    return dedup


def of_pipeline(home: Path) -> Any:
    return Pipeline(JsonlSource(jsonl(home)), [Map(lambda row: row | {"more": 1}), ExactDedup(directory=home / "seen")])


def of_queue_source(home: Path) -> Any:
    with QueueSink(home / "queue") as sink:
        sink.consume(pa.RecordBatch.from_pylist(ROWS[:9]))
    return read_some(QueueSource(home / "queue", timeout_seconds=5))


def of_queue_consumer(home: Path) -> Any:
    with QueueSink(home / "queue") as sink:
        for _ in range(4):
            sink.consume(pa.RecordBatch.from_pylist([{"n": 1}]))
    consumer = DatasetConsumer(home / "queue", order="strict", backend="numpy", timeout_seconds=5)
    consumer.get_batch()
    return consumer


def of_samples(home: Path) -> Any:
    return StreamingPipeline(list(range(40)), chunk_size=8, num_workers=1)


def of_pretrain(home: Path) -> Any:
    store = make_store(home / "store", make_rows(40, 9))
    return iterate(PretrainDataLoader(store, chunk_size=8, batch_size=2, backend="numpy"))


def of_mixed(home: Path) -> Any:
    store = make_store(home / "store", make_rows(40, 9))
    return iterate(MixedDataLoader({"a": store, "b": store}, [1, 2], chunk_size=8, batch_size=2, backend="numpy"))


def of_streams(home: Path) -> Any:
    options: dict[str, Any] = {"chunk_size": 8, "batch_size": 2, "backend": "numpy", "streaming": True}
    return iterate(PretrainDataLoader(jsonl(home), "byte", **options))


def of_mlx(home: Path) -> Any:
    return iterate(MLXDataLoader(ROWS, batch_size=2, num_workers=0, gradient_accumulation_steps=2, backend="numpy"), 1)


def of_rollouts(home: Path) -> Any:
    rollouts = [
        {"id": str(n), "group": str(n // 2), "prompt_ids": [1, 2], "response_ids": [3, n], "reward": float(n)}
        for n in range(12)
    ]
    return iterate(RolloutDataLoader(rollouts, batch_size=4, backend="numpy", ppo_epochs=2, prefetch=0), 2)


KINDS: list[Callable[[Path], Any]] = [
    of_jsonl,
    of_parquet,
    of_memory,
    of_iterator,
    of_store,
    of_dedup,
    of_pipeline,
    of_queue_source,
    of_queue_consumer,
    of_samples,
    of_pretrain,
    of_mixed,
    of_streams,
    of_mlx,
    of_rollouts,
]


def flips(text: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The text with one bit flipped, each time another one."""
    for bit in random.Random(seed).sample(range(len(text) * 8), min(count, len(text) * 8)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def mutations(state: Any) -> Iterator[Any]:
    """The state with one value changed in size, sign or type, or taken away, at any depth."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield (*path, key)
            yield from places(inner, (*path, key))

    for *way, last in places(state, ()):
        changed = copy.deepcopy(state)
        place = changed
        for key in way:
            place = place[key]
        value = place[last]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        numbers = [value + 1, value - 1, -value - 1, float(value), value + 2**70] if number else []
        for other in [*numbers, None, True, "x", [], {}, [value], str(value), ...]:
            if other is ...:
                del place[last]
                yield copy.deepcopy(changed)
            elif other != value or type(other) is not type(value):
                place[last] = other
                yield copy.deepcopy(changed)


def same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_damaged_state_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        owner = make(tmp_path)
        if hasattr(owner, "close"):
            stack.callback(owner.close)
        text = json.dumps(owner.state_dict())
        assert len(text) < 4096
        state, refused = json.loads(text), 0
        found = []
        for flipped in flips(text.encode(), FLIPS, seed=19):
            try:
                found.append(json.loads(flipped))
            except ValueError:  # not JSON any more: whoever reads the file finds that out
                continue
        found += mutations(state)
        for damaged in found:
            if same(damaged, state):
                continue
            with pytest.raises(ResumeError):
                owner.load_state_dict(damaged)
            refused += 1
        assert refused > 50
        owner.load_state_dict(state)


def test_a_damaged_checkpoint_file_is_refused(tmp_path: Path) -> None:
    def pipeline() -> Pipeline:
        return Pipeline(JsonlSource(jsonl(tmp_path)), [], JsonlSink(tmp_path / "out.jsonl"))

    pipeline().run(checkpoint=tmp_path / "kept")
    file = tmp_path / "kept" / CHECKPOINT_NAME
    data, whole = file.read_bytes(), load_checkpoint(tmp_path / "kept")
    told = []
    for flipped in flips(data, FLIPS, seed=19):
        file.write_bytes(flipped)
        try:
            assert same(load_checkpoint(tmp_path / "kept"), whole)
        except ResumeError as error:
            told.append(str(error))
    assert len(told) > FLIPS // 2
    assert all(str(file) in each for each in told)
    for damaged in islice(mutations(json.loads(data)), 0, None, 7):
        file.write_bytes(json.dumps(damaged).encode())
        with pytest.raises(ResumeError):
            load_checkpoint(tmp_path / "kept")
    segments = json.loads(data)
    segments["sink"]["segments"] += 1
    file.write_bytes(json.dumps(segments).encode())
    with pytest.raises(ResumeError, match=r"checkpoint\.json"):
        pipeline().run(checkpoint=tmp_path / "kept")
