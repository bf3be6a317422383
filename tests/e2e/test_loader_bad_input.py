"""Bad input to loaders: each says what was given, what was expected and what to do, and leaves the loader usable."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock import ConversationDataLoader, MixedDataLoader, PretrainDataLoader, Schedule, prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError, DataError, PenstockError, ResumeError
from penstock.loaders import plan_engine as indexed
from penstock.order.steps import next_epoch
from penstock.transforms.tokenization import ByteTokenizer
from token_stores import make_rows, make_store

ROWS = make_rows(60, 12)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", ROWS, shard_bytes=200)


def make(store: Any, **more: Any) -> PretrainDataLoader:
    options: dict[str, Any] = {"chunk_size": 12, "packing": None, "batch_size": 4, "backend": "numpy", "prefetch": 0}
    return PretrainDataLoader(store, **(options | more))


# Too little data


@pytest.mark.parametrize("packing", [None, "concat"])
def test_less_than_a_global_batch_is_refused_when_the_loader_is_made(store: Path, packing: Any) -> None:
    count = 60 if packing is None else -(-sum(map(len, ROWS)) // 12)
    with pytest.raises(
        ConfigError,
        match=rf"{count}.*drop_last",
    ):
        make(store, packing=packing, batch_size=100, world_size=4, rank=0, drop_last=True)


@pytest.mark.parametrize("use", [list, lambda loader: loader.get_batch()], ids=["loop", "get_batch"])
def test_less_than_a_global_batch_of_packed_samples_is_refused_when_they_are_counted(store: Path, use: Any) -> None:
    loader = make(store, packing="best_fit", batch_size=400, drop_last=True)
    with pytest.raises(ConfigError, match=r"\buse\b"):
        use(loader)


@pytest.mark.parametrize("use", [list, len, lambda loader: loader.get_batch()], ids=["loop", "len", "get_batch"])
def test_a_mixture_smaller_than_a_global_batch_is_refused(
    store: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(100))

    def limited(position: Any) -> Any:
        assert next(left, None) is not None, "it goes on for ever"
        return next_epoch(position)

    for module in ("order.plan", "order.steps", "loaders.plan_engine"):
        monkeypatch.setattr(f"penstock.{module}.next_epoch", limited)
    with pytest.raises(ConfigError, match="drop_last=True"):
        use(
            MixedDataLoader(
                {"a": store, "b": store},
                chunk_size=12,
                batch_size=400,
                drop_last=True,
                stopping_strategy="all_exhausted_without_replacement",
                backend="numpy",
            )
        )


def test_without_drop_last_a_small_dataset_is_one_batch(store: Path) -> None:
    assert [len(batch.metadata["row"]) for batch in make(store, batch_size=400)] == [60]
    ranks = [list(make(store, batch_size=100, rank=rank, world_size=4)) for rank in range(4)]
    assert [[len(batch.metadata["row"]) for batch in batches] for batches in ranks] == [[15]] * 4


def test_more_ranks_than_rows_still_get_a_batch_each(tmp_path: Path) -> None:
    tiny = make_store(tmp_path / "tiny", [[1, 2, 3], [4, 5]])
    ranks = [list(make(tiny, batch_size=1, rank=rank, world_size=5)) for rank in range(5)]
    assert [len(batches) for batches in ranks] == [1] * 5
    assert sorted(row for (batch,) in ranks for row in batch.metadata["row"].tolist()) == [0, 1]
    assert {batch.num_items_in_batch for (batch,) in ranks} == {3}
    assert all(batch.attention_mask.any() for (batch,) in ranks)


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    empty = make_store(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="'data'"):
        make(empty)
    with pytest.raises(ConfigError, match="'b'"):
        MixedDataLoader({"a": make_store(tmp_path / "a", [[1]]), "b": empty}, [1, 1])


@pytest.mark.parametrize("packing", [None, "concat", "best_fit"])
def test_a_store_of_empty_rows_is_refused(tmp_path: Path, packing: Any) -> None:
    with pytest.raises(ConfigError, match="'data'"):
        list(make(make_store(tmp_path / "empty", [[], []]), packing=packing))


# Ranks


@pytest.mark.parametrize("rank", [2, 7, -1])
def test_a_rank_outside_the_world_is_refused(store: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank}"):
        make(store, rank=rank, world_size=2)


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("x", "2"), ("0", "0"), ("", "2")])
def test_a_launcher_that_makes_no_sense_is_refused(
    store: Path, rank: str, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError):
        make(store)


# States


def test_a_state_of_another_dataset_is_refused_naming_both(store: Path, tmp_path: Path) -> None:
    there = make(make_store(tmp_path / "other", ROWS[:-1]))
    here = make(store)
    with pytest.raises(ResumeError, match=rf"{there.plan.fingerprint}.*{here.plan.fingerprint}"):
        here.load_state_dict(there.state_dict())


def test_a_state_of_a_newer_release_is_refused(store: Path) -> None:
    loader = make(store)
    with pytest.raises(ResumeError, match=r"version 99\b"):
        loader.load_state_dict(loader.state_dict() | {"version": 99})


@pytest.mark.parametrize("kind", ["alone", "mixed"])
def test_a_state_that_lost_or_changed_anything_is_refused_and_the_loader_stays_where_it_was(
    store: Path, kind: str
) -> None:
    loader: Any = make(store)
    if kind == "mixed":
        loader = MixedDataLoader({"a": store, "b": store}, [1, 2], chunk_size=12, batch_size=4, backend="numpy")
    for _ in range(3):
        loader.get_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    for key in state:
        for change in ({key: ...}, {key: -7}, {key: "x"}, {key: {}}, {key: [None]}):
            damaged = {name: value for name, value in (state | change).items() if value is not ...}
            with pytest.raises(ResumeError):
                loader.load_state_dict(damaged)
            assert loader.state_dict() == state
    loader.load_state_dict(state)


def test_the_state_of_another_kind_of_loader_is_refused(store: Path) -> None:
    mixed = MixedDataLoader({"data": store}, [1], chunk_size=12, packing=None, batch_size=4, backend="numpy")
    with pytest.raises(ResumeError):
        make(store).load_state_dict(mixed.state_dict())
    with pytest.raises(ResumeError):
        make(store).load_state_dict({"version": 1, "cursors": {}})


# A store that changes


def shards(store: Path) -> list[Path]:
    return sorted(store.rglob("*.arrow"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_shard_that_is_removed_under_a_running_loader_is_noticed(
    store: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_FILE_CHECK_SECONDS", 0.0)
    loader = make(store, prefetch=prefetch)
    running = iter(loader)
    next(running)
    for shard in shards(store):
        shard.unlink()
    with pytest.raises((DataError, FileNotFoundError)):
        list(running)


def test_a_shard_that_is_rewritten_under_a_running_loader_is_noticed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_FILE_CHECK_SECONDS", 0.0)
    running = iter(make(store))
    for _ in range(4):
        next(running)
    for shard in shards(store):
        os.utime(shard, (1, 1))
    with pytest.raises(DataError, match=r"\.arrow"):
        list(running)


@pytest.mark.parametrize(("fresh_seconds", "more"), [(0.0, 0), (1e9, 3)], ids=["in the block", "in the next block"])
def test_a_shard_that_is_rewritten_between_two_batches_of_a_block_is_noticed(
    store: Path, fresh_seconds: float, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_FILE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(indexed, "_BYTES_AT_ONCE", 1)  # batches are copied one by one
    monkeypatch.setattr(indexed, "_FRESH_SECONDS", fresh_seconds)
    running = iter(make(store))
    for _ in range(4):  # blocks of 1, 2, and the first of 4
        next(running)
    for shard in shards(store):
        os.utime(shard, (1, 1))
    for _ in range(more):
        next(running)
    with pytest.raises(DataError, match=r"\.arrow"):
        next(running)


@pytest.mark.parametrize("suffix", [".arrow", ".index"])
@pytest.mark.parametrize("use", [list, lambda running: next(running)], ids=["all", "next"])
def test_a_shard_that_is_truncated_under_a_running_loader_is_noticed_before_it_is_touched(
    store: Path, suffix: str, use: Any
) -> None:
    loader = make(store, prefetch=0)
    running = iter(loader)
    next(running)
    for file in store.rglob(f"*{suffix}"):
        os.truncate(file, 0)
    with pytest.raises(DataError, match="shard was changed"):
        use(running)
    with pytest.raises(DataError, match="shard"):
        loader[2]


@pytest.mark.parametrize(
    "use", [lambda loader: loader.get_batch(), lambda loader: loader[0]], ids=["get_batch", "item"]
)
def test_a_changed_shard_is_noticed_however_batches_are_taken(
    store: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_FILE_CHECK_SECONDS", 0.0)
    loader = make(store)
    for _ in range(4):
        loader.get_batch()
    for shard in shards(store):
        os.utime(shard, (1, 1))
    with pytest.raises(DataError, match=r"\.arrow"):
        use(loader)


def test_a_store_removed_before_it_is_read_is_an_error_that_names_it(store: Path) -> None:
    loader = make(store)
    shutil.rmtree(store)
    with pytest.raises((PenstockError, FileNotFoundError), match="store"):
        list(loader)


def test_a_new_version_of_a_store_does_not_disturb_a_running_loader(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in range(1, 9)))
    (tmp_path / "b.jsonl").write_text('{"text": "more"}\n')
    recipe = Recipe(tokenizer=ByteTokenizer(("<eos>",)))
    path = prepare(tmp_path / "a.jsonl", tmp_path / "made", recipe).path
    wanted = [batch.input_ids.tolist() for batch in make(path)]
    running, state = iter(loader := make(path)), make(path).state_dict()
    found = [next(running).input_ids.tolist()]
    prepare(tmp_path / "b.jsonl", path, recipe, mode="append")
    found += [batch.input_ids.tolist() for batch in running]
    assert found == wanted
    loader.close()
    with pytest.raises(ResumeError):
        make(path).load_state_dict(state)


# Lengths, tokenizers, weights


@pytest.mark.parametrize("packing", [None, "best_fit", "first_fit"])
def test_a_length_shorter_than_one_document_is_an_error_unless_told_what_to_do(store: Path, packing: Any) -> None:
    with pytest.raises(DataError, match="truncation='right'"):
        list(make(store, packing=packing, chunk_size=5))
    for truncation in ("left", "right", "split", "drop"):
        assert list(make(store, packing=packing, chunk_size=5, truncation=truncation))
    assert list(make(store, packing="concat", chunk_size=5))


def test_a_row_too_long_for_a_token_budget_is_an_error(store: Path) -> None:
    for padding_free in (False, True):
        with pytest.raises(DataError, match="truncation='right'"):
            list(make(store, max_tokens=8, chunk_size=12, padding_free=padding_free))


def test_a_tokenizer_that_does_not_match_the_store_is_refused_naming_both(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')
    mine, other = ByteTokenizer(("<eos>",)), ByteTokenizer(("<eos>", "<pad>"))
    path = prepare(tmp_path / "a.jsonl", tmp_path / "made", Recipe(tokenizer=mine)).path
    for kind in (PretrainDataLoader, ConversationDataLoader):
        with pytest.raises(ConfigError, match=rf"{mine.fingerprint}.*{other.fingerprint}"):
            kind(path, other)
    with pytest.raises(ConfigError, match="tokenizer"):
        MixedDataLoader({"a": path}, tokenizer=other)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": -1, "b": 1}, "'a'"),
        ({"a": 0, "b": 0}, "weights"),
        ({"a": 1, "c": 1}, "'c'"),
        ({"a": 1}, "'b'"),
        ([(0, {"a": 1, "b": 1}), (3, {"a": 1})], r"'b'.*step 3\b"),
        ([(2, {"a": 1, "b": 1})], r"step 2\b"),
    ],
)
def test_weights_that_cannot_be_are_refused(store: Path, weights: Any, message: str) -> None:
    def mix() -> None:
        MixedDataLoader({"a": store, "b": store}, Schedule.of(weights) if isinstance(weights, list) else weights)

    with pytest.raises(ConfigError, match=message):
        mix()


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        make(tmp_path / "notes.txt")


def test_a_damaged_manifest_is_refused(store: Path) -> None:
    (store / "manifest.json").write_text('{"version": 1')
    with pytest.raises(PenstockError, match="manifest"):
        make(store)
