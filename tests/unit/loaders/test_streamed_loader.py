"""`streaming=True`: the same loader over files that nobody prepared."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, ResumeError
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.streamed.reader import StreamOptions
from penstock.memory import MemoryBudget

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
TOKENIZER = SAMPLE / "tokenizer"


def documents(**more: Any) -> PretrainDataLoader:
    options: dict[str, Any] = {"chunk_size": 128, "streaming": True, "batch_size": 4, "backend": "numpy"} | more
    return PretrainDataLoader(SAMPLE / "documents.jsonl", TOKENIZER, **options)


def ids(batch: Any) -> list[list[int]]:
    return batch.input_ids.tolist()  # type: ignore[no-any-return]


def test_a_stream_resumes_after_every_batch_and_at_the_end_of_an_epoch() -> None:
    with documents() as loader:
        seen = [
            (ids(batch), json.dumps(loader.state_dict()), batch.metadata["epoch"]) for _ in range(2) for batch in loader
        ]
        assert loader.epoch == 2
    first = [epoch for _, _, epoch in seen].index(1)
    for number in (0, 1, first - 2, first - 1, first):
        with documents(prefetch=2) as loader:
            loader.load_state_dict(json.loads(seen[number][1]))
            assert json.dumps(loader.state_dict()) == seen[number][1]
            following = next(iter(loader))
            assert ids(following) == seen[number + 1][0]
            assert following.metadata["epoch"] == seen[number + 1][2]


def test_a_stream_holds_what_a_store_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"chat_template": "chatml", "max_length": 256, "batch_size": 4, "backend": "numpy"}
    chats = SAMPLE / "chats.jsonl"

    def rows(loader: ConversationDataLoader) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for batch in loader:
            for row, labels, mask in zip(batch.input_ids, batch.labels, batch.attention_mask):
                found[tuple(row[mask == 1]), tuple(labels[mask == 1])] += 1
        return found

    stream = rows(ConversationDataLoader(chats, TOKENIZER, streaming=True, **options))
    assert stream == rows(ConversationDataLoader(chats, TOKENIZER, cache_dir=tmp_path, **options))
    assert stream.total() == 24


def test_what_only_a_plan_can_do_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="drop_last=True"):
        documents(drop_last=True)
    with documents() as loader:
        with pytest.raises(TypeError, match="streaming=False"):
            len(loader)
        with pytest.raises(ConfigError, match="streaming=False"):
            _ = loader.plan
        with pytest.raises(ConfigError, match="batch_size=7"):
            loader.get_batch(7)
        with pytest.raises(ConfigError, match=r"step 3\b"):
            loader.seek(3)
        with pytest.raises(TypeError, match="streaming=False"):
            loader[0]
        assert ids(loader.get_batch(4)) == ids(next(iter(documents())))


def test_a_state_of_another_stream_is_refused() -> None:
    with documents() as loader, documents(seed=1) as other:
        next(iter(loader))
        with pytest.raises(ResumeError):
            other.load_state_dict(loader.state_dict())


def test_a_stream_of_so_many_steps_can_be_counted() -> None:
    with documents(streaming=StreamOptions(steps_per_epoch=5)) as loader:
        assert len(loader) == 5
        assert len(list(loader)) == 5
        assert loader.epoch == 1


def test_get_batch_goes_on_in_the_next_epoch() -> None:
    with documents() as loader, documents() as walked:
        expected = [ids(batch) for _ in range(2) for batch in walked]
        assert [ids(loader.get_batch()) for _ in expected] == expected


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = (json.dumps({"text": f"{row} {'some words that are repeated ' * (row % 50)}"}) for row in range(1000))
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl"


@pytest.mark.parametrize(("packing", "compressed"), [("concat", False), ("best_fit", True)])
def test_a_stream_keeps_to_its_budget_with_the_same_batches(corpus: Path, packing: Any, compressed: bool) -> None:
    if compressed:
        data, corpus = corpus.read_bytes(), corpus.with_suffix(".jsonl.gz")
        corpus.write_bytes(gzip.compress(data, 1))

    def read(limit: str) -> tuple[list[list[list[int]]], int]:
        budget = MemoryBudget(limit)
        options = StreamOptions(streams=16, window_bytes="32 KiB", worker_type="thread")
        with PretrainDataLoader(
            corpus, "byte", 256, streaming=options, packing=packing, truncation="split", batch_size=8,
            backend="numpy", budget=budget, fields=["input_ids"], prefetch=0,
        ) as loader:  # fmt: skip
            return [ids(batch) for batch in loader], budget.peak

    batches, needed = read("1 GiB")
    tight, peak = read("256 KiB")
    assert tight == batches
    # One window that is made, and a quarter of the budget for windows that wait.
    assert peak < 256 << 10
    assert compressed or needed > 512 << 10


def test_a_stream_without_room_for_its_windows_names_the_place(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    options = StreamOptions(window_bytes="64 KiB", worker_type="thread")
    with (
        PretrainDataLoader(corpus, "byte", 256, streaming=options, backend="numpy", budget="256 KiB") as loader,
        pytest.raises(OSError, match="full"),
    ):
        list(loader)
