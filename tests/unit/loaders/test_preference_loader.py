"""Preferences in batches: refused as plain chats, laid out as TRL's own collators lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import ConversationDataLoader, MixedDataLoader, PreferenceDataLoader, PretrainDataLoader
from penstock.errors import ConfigError, PenstockError, SchemaError
from penstock.loaders import PreferenceBatch, Recipe, prepare
from penstock.loaders.plan_summary import summarize_plan
from penstock.transforms import FormatChat

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
WORDS = ["the", "river", "runs", "past", "a", "mill", "and", "turns", "its", "wheel", "before", "it", "meets"]
Row = dict[str, Any]


def text(rng: np.random.Generator, most: int) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(1, most)))


def make_pairs(count: int) -> list[Row]:
    rng = np.random.default_rng(count)
    rows: list[Row] = []
    for number in range(count):
        asked = [{"role": "system", "content": "Answer."}] * (number % 3 == 0)
        for _ in range(number % 2):
            asked += [{"role": "user", "content": text(rng, 6)}, {"role": "assistant", "content": text(rng, 6)}]
        asked += [{"role": "user", "content": f"{number}: {text(rng, 9)}"}]
        sides = {name: [{"role": "assistant", "content": text(rng, 12)}] for name in ("chosen", "rejected")}
        rows.append({"prompt": asked, **sides})
    return rows


def make_labelled(count: int) -> list[Row]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 1}
        for number, row in enumerate(make_pairs(count))
    ]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files, and a store of each."""
    home = tmp_path_factory.mktemp("preferences")
    for name, rows in {"pairs": make_pairs(23), "labels": make_labelled(19)}.items():
        file = write(home / f"{name}.jsonl", rows)
        prepare(file, home / f"{name}.store", Recipe(tokenizer=TOKENIZER, template="chatml", preference=True))
    return home


def opened(path: Path, **options: Any) -> PreferenceDataLoader:
    return PreferenceDataLoader(
        path, **{"backend": "numpy", "shuffle": False, "batch_size": 4, "prefetch": 0, **options}
    )


# What is no plain chat


LABELLED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
REFUSED = {
    "prompt, chosen and rejected": {"prompt": "Is it open?", "chosen": "Yes.", "rejected": "No."},
    "ShareGPT with chosen and rejected": {
        "conversations": [{"from": "human", "value": "Is it open?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "prompt, completion and label": {"prompt": "Is it open?", "completion": "No.", "label": False},
    "messages and label": LABELLED | {"label": False},
    "messages and kto_tag": LABELLED | {"kto_tag": True},
    "messages and rejected_response": LABELLED | {"rejected_response": "c"},
    "prompt, completion and rejected": {"prompt": "Is it open?", "completion": "Yes.", "rejected": "No."},
}


def ways(file: Path, cache: Path) -> Iterator[tuple[str, Any]]:
    """Everything that would train on the rows of a file as on plain chats."""
    common: dict[str, Any] = {"backend": "numpy", "cache_dir": cache, "batch_size": 1}
    chats = common | {"tokenizer": TOKENIZER, "chat_template": "chatml"}
    recipe = Recipe(tokenizer=TOKENIZER, template="chatml")
    yield "prepare", lambda: prepare(file, cache / "out.store", recipe)
    yield "a loader", lambda: next(iter(ConversationDataLoader(file, **chats)))
    yield "a stream", lambda: next(iter(ConversationDataLoader(file, streaming=True, **chats)))
    yield "a mixture", lambda: MixedDataLoader({"a": file}, tokenizer=TOKENIZER, packing="best_fit", **common)


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_preferences_are_refused_as_plain_chats_by_every_way_in(tmp_path: Path, row: Row) -> None:
    file = write(tmp_path / "rows.jsonl", [row] * 3)
    for name, use in ways(file, tmp_path):
        with pytest.raises(PenstockError, match="PreferenceDataLoader") as caught:
            use()
        column = next(column for column in ("label", "kto_tag", "rejected", "rejected_response") if column in row)
        assert repr(column) in str(caught.value), name


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_preferences_are_plain_chats_if_that_is_what_was_asked_for(tmp_path: Path, row: Row) -> None:
    file = write(tmp_path / "rows.jsonl", [row] * 3)
    common: dict[str, Any] = {"backend": "numpy", "cache_dir": tmp_path, "batch_size": 1, "tokenizer": TOKENIZER}
    for streaming in (False, True):
        loader = ConversationDataLoader(file, chat_template="chatml", preference=False, streaming=streaming, **common)
        assert next(iter(loader)).labels.max() > 0
    with pytest.raises(ConfigError, match="PreferenceDataLoader"):
        ConversationDataLoader(file, preference=True, **common)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pairs", "labels"])
def test_stores_of_preferences_are_refused_where_chats_are_read(home: Path, name: str) -> None:
    store = home / f"{name}.store"
    for streaming in (False, True):
        for kind in (ConversationDataLoader, PretrainDataLoader):
            with pytest.raises(ConfigError, match="PreferenceDataLoader"):
                kind(store, streaming=streaming, backend="numpy")
    with pytest.raises(ConfigError, match="PreferenceDataLoader"):
        MixedDataLoader({"a": store}, backend="numpy")
    with pytest.raises(ConfigError, match="'a'"):
        MixedDataLoader({"a": opened(store)}, backend="numpy")


def test_other_columns_named_label_are_left_alone(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pylist([LABELLED | {"label": "greeting"}])
    assert FormatChat(TOKENIZER, "chatml").transform(rows).num_rows == 1
    with pytest.raises(SchemaError, match=r"'label'.*KTO"):
        FormatChat(TOKENIZER, "chatml").transform(pa.RecordBatch.from_pylist([LABELLED | {"label": True}]))
    kept = FormatChat(TOKENIZER, "chatml", keep="label").transform(
        pa.RecordBatch.from_pylist([LABELLED | {"label": True}])
    )
    assert "label" in kept.schema.names


def test_what_holds_no_preferences_is_no_input(home: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", [LABELLED])
    with pytest.raises(ConfigError, match="--preference"):
        PreferenceDataLoader(file, TOKENIZER, chat_template="chatml", cache_dir=tmp_path, backend="numpy")
    prepare(file, tmp_path / "chats.store", Recipe(tokenizer=TOKENIZER, template="chatml"))
    with pytest.raises(ConfigError, match="--preference"):
        opened(tmp_path / "chats.store")
    with pytest.raises(SchemaError, match=r"pairs\.store"):
        PreferenceDataLoader([home / "pairs.store", home / "labels.store"], backend="numpy")
    both = write(tmp_path / "both.jsonl", [REFUSED["prompt, chosen and rejected"] | {"label": True}])
    with pytest.raises(SchemaError, match="'label'"):
        PreferenceDataLoader(both, TOKENIZER, chat_template="chatml", cache_dir=tmp_path, backend="numpy")


# As TRL lays them out


def tokenized(rows: list[Row], template: str) -> list[Row]:
    """As TRL tokenizes: the completion is what stands behind the tokens of the prompt."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = FormatChat(TOKENIZER, template).template.source
    made = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        found: Row = {"prompt_ids": prompt} | ({"label": row["label"]} if "label" in row else {})
        for side in ("chosen", "rejected", "completion"):
            if side in row:
                whole = tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=False)
                assert whole[: len(prompt)] == prompt
                found[f"{side}_ids"] = whole[len(prompt) :]
        made.append(found)
    return made


def same(batch: PreferenceBatch, theirs: Any) -> None:
    given = batch.as_dict()
    del given["position_ids"]
    assert given.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(batch[name], value.numpy(), err_msg=name)


@pytest.mark.parametrize("template", ["chatml", "zephyr", "plain"])
@pytest.mark.parametrize("multiple", [None, 16])
def test_pairs_are_those_of_trls_collator(tmp_path: Path, template: str, multiple: int | None) -> None:
    collator = pytest.importorskip("trl.trainer.dpo_trainer").DataCollatorForPreference
    rows = make_pairs(12)
    file = write(tmp_path / "pairs.jsonl", rows)
    loader = opened(
        file,
        tokenizer=TOKENIZER,
        chat_template=template,
        completion="all",
        pad_to_multiple_of=multiple,
        cache_dir=tmp_path,
    )
    reference = tokenized(rows, template)
    pad = loader.sources[0].layout.pad_id
    for number, batch in enumerate(loader):
        same(batch, collator(pad, pad_to_multiple_of=multiple)(reference[4 * number : 4 * number + 4]))
    # What counts by default is what the model says: the same without what the template writes behind it.
    for ours, all_of_it in zip(
        opened(file, tokenizer=TOKENIZER, chat_template=template, cache_dir=tmp_path, pad_to_multiple_of=multiple),
        loader,
    ):
        assert (ours.completion_mask <= all_of_it.completion_mask).all()
        assert (ours.completion_mask.argmax(axis=1) == all_of_it.completion_mask.argmax(axis=1)).all()


def test_rows_cut_on_the_right_are_those_of_trls_collator(tmp_path: Path) -> None:
    collator = pytest.importorskip("trl.trainer.dpo_trainer").DataCollatorForPreference
    rows = make_pairs(20)
    loader = opened(
        write(tmp_path / "pairs.jsonl", rows),
        tokenizer=TOKENIZER,
        chat_template="plain",
        completion="all",
        max_length=30,
        truncation="right",
        batch_size=64,
        cache_dir=tmp_path,
    )
    left = [row for row in tokenized(rows, "plain") if len(row["prompt_ids"]) < 30]  # as its trainer filters them
    assert 3 < len(left) < 20
    same(next(iter(loader)), collator(loader.sources[0].layout.pad_id, max_length=30)(left))


def test_labelled_answers_and_the_mismatched_are_those_of_trls_collator(tmp_path: Path) -> None:
    collator = pytest.importorskip("trl.trainer.kto_trainer").DataCollatorForUnpairedPreference
    rows = make_labelled(12)
    file = write(tmp_path / "labels.jsonl", rows)
    loader = opened(file, tokenizer=TOKENIZER, chat_template="chatml", completion="all", kl=True, cache_dir=tmp_path)
    reference = tokenized(rows, "chatml")
    for number, batch in enumerate(loader):
        mine = reference[4 * number : 4 * number + 4]
        answers = [row["completion_ids"] for row in mine]
        for row, other in zip(mine, [answers[-1], *answers[:-1]]):  # as its trainer does for each batch
            row["KL_completion_ids"] = other
        same(batch, collator(loader.sources[0].layout.pad_id)(mine))
    plain = opened(file, tokenizer=TOKENIZER, chat_template="chatml", cache_dir=tmp_path)
    assert not [name for name in next(iter(plain)) if name.startswith("KL_")]


# Batches


def documents(batch: PreferenceBatch) -> list[tuple[bytes, bytes]]:
    """The tokens of each pair of a batch in one row, or in rows of several pairs."""
    if batch.batch_size == 1:
        cuts = [int(cut) for cut in batch.cu_seqlens if cut <= batch.num_tokens]
        found = [batch.input_ids[0, low:high] for low, high in pairwise(cuts)]
    else:
        marks = batch.document_ids
        found = [row[mark == n] for row, mark in zip(batch.input_ids, marks) for n in range(1, mark.max() + 1)]
    half = len(found) // 2
    return [(one.tobytes(), other.tobytes()) for one, other in zip(found[:half], found[half:])]


@pytest.mark.parametrize(
    "options",
    [
        {"padding_free": True},
        {"packing": "best_fit"},
        {"packing": "first_fit"},
        {"padding_free": True, "max_tokens": 700},
    ],
    ids=str,
)
def test_packed_pairs_are_the_pairs_one_by_one(home: Path, options: Row) -> None:
    plain: dict[int, tuple[bytes, bytes]] = {}
    masks: dict[int, int] = {}
    for batch in opened(home / "pairs.store", max_length=200):
        for number, row in enumerate(batch.metadata["row"].tolist()):
            sides = [
                ids[mask == 1]
                for half in (batch.chosen, batch.rejected)
                for ids, mask in [(half["input_ids"][number], half["attention_mask"][number])]
            ]
            plain[row] = sides[0].tobytes(), sides[1].tobytes()
            masks[row] = sum(int(half["completion_mask"][number].sum()) for half in (batch.chosen, batch.rejected))
    seen: list[int] = []
    for batch in opened(home / "pairs.store", max_length=200, **options):
        rows = batch.metadata["row"].tolist()
        seen += rows
        assert documents(batch) == [plain[row] for row in rows]
        assert int(batch.completion_mask.sum()) == sum(masks[row] for row in rows)
        assert batch.num_pairs == len(rows)
        assert batch.num_tokens == sum(len(one) + len(other) for one, other in documents(batch)) // 8
        if batch.batch_size == 1:
            assert batch.input_ids.size <= options.get("max_tokens", 1 << 20)
            assert batch.chosen["input_ids"].size + batch.rejected["input_ids"].size == batch.num_tokens
        assert (batch.position_ids.ravel()[batch.cu_seqlens[:-1]] == 0).all()
    assert sorted(seen) == list(range(23))


def test_a_budget_of_tokens_counts_both_sides(home: Path) -> None:
    seen = []
    for batch in opened(home / "pairs.store", max_tokens=600, max_length=200):
        assert batch.input_ids.size <= 600
        assert batch.batch_size == 2 * batch.num_pairs
        seen += batch.metadata["row"].tolist()
    assert sorted(seen) == list(range(23))


def test_the_sides_of_a_batch_are_views_of_its_halves(home: Path) -> None:
    batch = next(iter(opened(home / "pairs.store", padding_side="left", pad_to_multiple_of=8)))
    assert isinstance(batch, PreferenceBatch)
    assert "PreferenceBatch(numpy" in repr(batch)
    assert batch.batch_size == 8
    assert batch.num_pairs == 4
    assert batch.input_ids.shape[1] % 8 == 0
    assert (batch.attention_mask[:, -1] == 1).all()
    sides = batch.as_sides()
    np.testing.assert_array_equal(
        np.concatenate([sides["chosen_input_ids"], sides["rejected_input_ids"]]), batch.input_ids
    )
    assert (sides["chosen_labels"] != -100).sum() == batch.chosen["completion_mask"].sum()
    assert "labels" not in list(batch)
    assert batch["labels"] is batch.labels
    again = PreferenceBatch.from_numpy(batch.to_numpy(), batch.metadata, "numpy")
    assert again.as_dict().keys() == batch.as_dict().keys()
    with pytest.raises(ConfigError, match="label"):
        _ = next(iter(opened(home / "labels.store"))).chosen


@pytest.mark.parametrize("backend", ["torch", "mlx", "jax"])
@pytest.mark.parametrize("name", ["pairs", "labels"])
def test_batches_are_the_same_in_every_framework(home: Path, name: str, backend: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(backend, backend))
    options = {"kl": name == "labels"}
    expected = next(iter(opened(home / f"{name}.store", **options)))
    batch = next(iter(opened(home / f"{name}.store", backend=backend, **options)))
    assert list(batch) == list(expected)
    found, wanted = batch.to_numpy(), expected.to_numpy()
    assert found.keys() == wanted.keys()
    for field, value in wanted.items():
        np.testing.assert_array_equal(found[field], value, err_msg=field)
    if backend == "torch":
        assert list(batch.to("cpu")) == list(expected)


def test_fields_that_are_not_asked_for_are_not_made(home: Path) -> None:
    batch = next(iter(opened(home / "pairs.store", fields=["input_ids", "attention_mask", "completion_mask"])))
    assert list(batch) == ["input_ids", "attention_mask", "completion_mask"]
    assert batch.labels is None
    free = next(iter(opened(home / "pairs.store", fields=["input_ids"], padding_free=True)))
    assert len(free.cu_seqlens) == 9


def test_a_rank_without_a_pair_has_a_blank_of_both_sides(home: Path) -> None:
    for name, rows in {"pairs": 2, "labels": 1}.items():
        loader = opened(home / f"{name}.store", batch_size=1, rank=3, world_size=4, kl=name == "labels")
        last = list(loader)[-1]
        assert last.num_pairs == 0
        assert last.batch_size == rows
        assert last.completion_mask.sum() == 0
        assert last.attention_mask.sum() == rows


def test_the_mismatched_are_the_same_on_any_number_of_ranks(home: Path) -> None:
    fields = ("input_ids", "KL_input_ids", "KL_completion_mask", "label")
    whole = list(opened(home / "labels.store", kl=True, batch_size=6))
    ranks = [opened(home / "labels.store", kl=True, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    for alone, *parts in zip(whole, *ranks):
        parts = [part for part in parts if len(part.metadata["row"])]
        for name in fields:
            np.testing.assert_array_equal(alone[name], np.concatenate([part[name] for part in parts]))
    # The last of the epoch is alone in its batch: it takes the answer of another row all the same.
    assert len(whole[-1].metadata["row"]) == 1
    assert whole[-1]["KL_input_ids"].tolist() != whole[-1].input_ids.tolist()


def test_loaders_of_preferences_refuse_what_they_cannot_do(home: Path, tmp_path: Path) -> None:
    pairs, labels = home / "pairs.store", home / "labels.store"
    for path, options, told in [
        (pairs, {"streaming": True}, "streaming"),
        (pairs, {"packing": "concat"}, "best_fit or first_fit"),
        (pairs, {"kl": True}, "kl=True"),
        (labels, {"kl": True, "padding_free": True}, "padding_free"),
        (pairs, {"completion": "some"}, "'supervised' or 'all'"),
        (pairs, {"truncation": "split"}, r"\berror\b"),
        (pairs, {"truncation": "left", "max_length": 30}, "max_length=30"),
        (pairs, {"max_prompt_length": 5}, "max_prompt_length"),
    ]:
        with pytest.raises(ConfigError, match=told):
            opened(path, **options)
    with pytest.raises(PenstockError, match=r"row 0\b"):
        next(iter(opened(pairs, max_length=10)))
    kept = [row for batch in opened(pairs, max_length=60, truncation="drop") for row in batch.metadata["row"].tolist()]
    assert 0 < len(kept) < 23
    with pytest.raises(ConfigError, match="PreferenceDataLoader"):
        summarize_plan(opened(pairs))
    assert summarize_plan(opened(labels)).samples == 19
