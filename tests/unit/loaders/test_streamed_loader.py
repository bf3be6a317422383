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


def rows_of(batches: list[Any]) -> list[list[int]]:
    return [row for batch in batches for row in ids(batch)]


def test_batches_of_any_size_are_the_same_samples_in_the_same_order() -> None:
    with documents() as loader, documents() as walked:
        batches = list(walked)
        expected = rows_of(batches)
        found: list[Any] = []
        for size in (7, 1, 4, 3, 9):
            found.append(loader.get_batch(size))
            assert len(ids(found[-1])) == size
            assert found[-1].metadata["step"] == len(found) - 1
        found += list(loader)
        assert rows_of(found) == expected
        assert loader.epoch == 1
        first = loader.get_batch(3)
        assert first.metadata["epoch"] == 1
        assert ids(first) == rows_of([next(iter(walked))])[:3]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_stream_resumes_within_a_step(workers: Any) -> None:
    sizes = (3, 5, 2, 4, 5, 4)
    with documents() as loader:
        seen = [(ids(loader.get_batch(size)), json.dumps(loader.state_dict())) for size in sizes]
    for number in range(len(sizes) - 1):
        with documents(streaming=StreamOptions(workers=workers)) as loader:
            loader.load_state_dict(json.loads(seen[number][1]))
            assert json.dumps(loader.state_dict()) == seen[number][1]
            assert ids(loader.get_batch(sizes[number + 1])) == seen[number + 1][0]
    with documents(batch_size=2, rank=0, world_size=2, streaming=StreamOptions(steps_per_epoch=9)) as loader:
        with pytest.raises(ResumeError, match=r"1 ranks.*has 2"):
            loader.load_state_dict(json.loads(seen[0][1]))
        loader.load_state_dict(json.loads(seen[1][1]))  # after two whole steps


def test_ranks_take_as_many_of_another_size() -> None:
    options = StreamOptions(steps_per_epoch=8)
    with documents(streaming=options) as whole:
        steps = [ids(batch) for batch in whole]
    for rank in (0, 1):
        expected = [row for step in steps for row in step[2 * rank : 2 * rank + 2]]
        with documents(streaming=options, batch_size=2, rank=rank, world_size=2) as loader:
            found = [loader.get_batch(size) for size in (3, 1, 5)]
            state = loader.state_dict()
            found += list(loader)
        assert rows_of(found) == expected
        with documents(streaming=options, batch_size=2, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            assert rows_of(list(loader)) == expected[9:]


def test_the_last_batch_of_an_epoch_is_shorter_and_a_larger_one_than_an_epoch_is_refused() -> None:
    with documents() as walked:
        samples = len(rows_of(list(walked)))
    with documents() as loader:
        with pytest.raises(ConfigError, match=f"a batch of 500 .* only {samples} samples"):
            loader.get_batch(500)
        assert loader.step == 0
        assert len(ids(loader.get_batch(samples))) == samples
        assert loader.get_batch(5).metadata["epoch"] == 1


def test_a_stream_of_token_budgets_has_no_other_size() -> None:
    with documents(packing=None, truncation="right", batch_size=1, max_tokens=512) as loader:
        with pytest.raises(ConfigError, match="max_tokens=512"):
            loader.get_batch(2)
        loader.get_batch(1)


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
