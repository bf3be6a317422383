"""Any table as texts, tokens and labels: what a sample is, what is cached, what of bad files is said."""

from __future__ import annotations

import logging
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from penstock.datasets import ColumnSpec, DatasetSpec, Folds, TabularDataset
from penstock.datasets.rows import digest_of
from penstock.datasets.text_encoder import TextEncoder
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates import JinjaTemplate, KeyValueTemplate, NaturalTemplate, TabularTextConverter
from penstock.transforms.tokenization import ByteTokenizer

TRAIN = {
    "Id": range(1, 13),
    "Sex": ["male", "female", "male"] * 4,
    "Age": [22, 38, None, 35, 4, 54, 2, 27, 14, 4, 58, 20],
    "Survived": [0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1],
}
TEST = {"Id": [13, 14], "Sex": ["male", "female"], "Age": [34.5, None]}


def written(folder: Path, train: Any = TRAIN, test: Any = TEST) -> Path:
    for name, columns in (("train", train), ("test", test)):
        if columns is not None:
            pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    return folder


def spec(folder: Path, **options: Any) -> DatasetSpec:
    usual: dict[str, Any] = {"competition_type": "binary", "target_column": "Survived", "id_column": "Id"}
    return DatasetSpec(**{"competition_name": "small", "dataset_path": folder} | usual | options)


def bert(texts: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer as BERT has it, with [CLS] and [SEP] around every text."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def test_a_sample_has_text_tokens_label_and_id(tmp_path: Path) -> None:
    dataset = TabularDataset(spec(written(tmp_path)))
    sample = dataset[0]
    assert sample["text"] == "The Sex is male. The Age is 22."
    assert sample["input_ids"].dtype == np.int32
    assert sample["input_ids"].tolist() == [256, *sample["text"].encode(), 257]
    assert sample["attention_mask"].tolist() == [1] * len(sample["input_ids"])
    assert (sample["labels"], sample["labels"].dtype) == (0, np.int32)
    assert sample["metadata"] == {"id": 1}
    assert dataset[-1]["metadata"] == {"id": 12}
    assert "Age" not in dataset[2]["text"]  # a missing value is left out
    for several in (slice(0, 3), [0, 1], "0"):
        with pytest.raises(TypeError, match=r"range\(0, 3\)"):
            _ = dataset[several]  # type: ignore[index]
    for index in (12, -13):
        with pytest.raises(IndexError, match=f"row {index}"):
            _ = dataset[index]


def test_the_columns_are_the_samples_all_at_once(tmp_path: Path) -> None:
    dataset = TabularDataset(spec(written(tmp_path)))
    columns = dataset.to_columns()
    samples = list(dataset)
    assert columns["input_ids"].to_pylist() == [sample["input_ids"].tolist() for sample in samples]
    assert columns["labels"].type == pa.int32()
    assert columns["labels"].to_pylist() == TRAIN["Survived"] == [int(sample["labels"]) for sample in samples]
    assert columns["id"].to_pylist() == list(TRAIN["Id"])
    assert dataset.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]
    assert dataset.texts() == [sample["text"] for sample in samples]


def test_a_test_split_has_no_labels(tmp_path: Path) -> None:
    dataset = TabularDataset(spec(written(tmp_path)), "test")
    assert dataset.to_columns().column_names == ["input_ids", "id"]
    assert "labels" not in dataset[0]
    assert dataset.labels() is None
    assert dataset.targets() is None
    assert dataset.class_names == (0, 1)  # from the training file
    with pytest.raises(ConfigError, match="'small'"):
        dataset.score([0, 1], "accuracy")


def test_a_test_file_alone_can_be_read(tmp_path: Path) -> None:
    dataset = TabularDataset(spec(written(tmp_path, train=None)), "test")
    assert len(dataset) == 2
    assert dataset.class_names is None


def test_folds_cut_texts_and_labels_alike(tmp_path: Path) -> None:
    whole = TabularDataset(spec(written(tmp_path)))
    for fold in range(3):
        parts = [TabularDataset(spec(tmp_path), split, folds=Folds(3), fold=fold) for split in ("train", "val")]
        assert sorted(int(row) for part in parts for row in part.rows) == list(range(12))  # type: ignore[union-attr]
        for part in parts:
            assert part.rows is not None
            assert part.texts() == [whole[int(row)]["text"] for row in part.rows]
            assert part.labels().tolist() == [TRAIN["Survived"][row] for row in part.rows]  # type: ignore[union-attr, index]
            assert part.ids().to_pylist() == [int(row) + 1 for row in part.rows]


@pytest.mark.parametrize(
    ("target", "options", "labels"),
    [
        (["no", "yes"] * 6, {}, [0, 1] * 6),
        (["no", "yes"] * 6, {"class_names": ("yes", "no")}, [1, 0] * 6),
        ([True, False] * 6, {}, [1, 0] * 6),
        ([3, 1, 2] * 4, {"competition_type": "multiclass"}, [2, 0, 1] * 4),
        ([3, 1, 5] * 4, {"competition_type": "ordinal"}, [1, 0, 2] * 4),
        ([0.5, 2.0] * 6, {"competition_type": "regression"}, [0.5, 2.0] * 6),
        ([7, 8] * 6, {"competition_type": "regression"}, [7.0, 8.0] * 6),
    ],
)
def test_labels_are_class_numbers_or_numbers(
    tmp_path: Path, target: list[Any], options: dict[str, Any], labels: list[Any]
) -> None:
    dataset = TabularDataset(spec(written(tmp_path, TRAIN | {"Survived": target}), **options))
    found = dataset.labels()
    assert found is not None
    assert found.tolist() == labels
    assert found.dtype == (np.float32 if isinstance(labels[0], float) else np.int32)
    assert dataset[1]["labels"] == labels[1]
    truth = dataset.targets()
    assert truth is not None
    assert truth.tolist() == target


@pytest.mark.parametrize("kind", ["multilabel", "multi_target_regression"])
def test_several_targets_are_a_row_of_labels(tmp_path: Path, kind: str) -> None:
    train = TRAIN | {"Other": [1, 0] * 6}
    dataset = TabularDataset(
        spec(written(tmp_path, train), competition_type=kind, target_column=["Survived", "Other"], num_features=2)
    )
    labels = dataset.labels()
    assert labels is not None
    assert labels.shape == (12, 2)
    assert labels.dtype == np.float32
    assert dataset[3]["labels"].tolist() == [1.0, 0.0]
    assert dataset.to_columns()["labels"].to_pylist() == labels.tolist()
    assert "Other" not in dataset[0]["text"]


def test_templates_may_be_styles_sentences_templates_and_converters(tmp_path: Path) -> None:
    about = spec(written(tmp_path), columns={"Age": ColumnSpec(unit="years"), "Sex": ColumnSpec(name="sex")})

    def first(template: Any, **options: Any) -> str:
        text: str = TabularDataset(about, template=template, **options)[0]["text"]
        return text

    assert first(None) == "The sex is male. The Age is 22 years."
    assert first("key_value") == "sex: male | Age: 22 years"
    assert first("key_value", exclude=["Age"]) == "sex: male"
    assert first("A {Sex}[ of {Age}], number {Id}.") == "A male of 22 years, number 1."
    assert first(KeyValueTemplate()) == "Sex: male | Age: 22"  # neither id nor target
    assert first(TabularTextConverter(style="key_value")) == "Sex: male | Age: 22"
    with pytest.raises(ConfigError, match="'natural'"):
        first("natral")
    with pytest.raises(ConfigError, match="template"):
        first(3)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        (TabularTextConverter(target=["Survived", "Age"]), {}, "The Sex is male."),
        (NaturalTemplate(exclude=["Survived", "Id"]), {"exclude": ["Age"]}, "The Sex is male."),
        (NaturalTemplate(exclude=["Survived", "Age"]), {}, "The Sex is male."),
        ("key_value", {"exclude": "Age"}, "Sex: male"),
        ("A {Sex}[ of {Age}].", {"exclude": ["Age"]}, "A male."),
        (JinjaTemplate("all", "{{ row | list | join(' ') }}"), {"exclude": ["Age"]}, "Sex"),
    ],
)
def test_what_is_left_out_is_left_out_of_every_template(
    tmp_path: Path, split: str, template: Any, options: dict[str, Any], text: str
) -> None:
    assert TabularDataset(spec(written(tmp_path)), split, template=template, **options)[0]["text"] == text


@pytest.mark.parametrize("template", ["{Sex}[ of {Age}]", NaturalTemplate(only=["Sex", "Age"])])
def test_a_template_that_needs_what_is_left_out_is_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ConfigError, match="'Sex'"):
        TabularDataset(spec(written(tmp_path)), template=template, exclude=["Sex"]).texts()


@pytest.mark.parametrize("template", ["{Sex}: {Survived}", NaturalTemplate(only=["Sex", "Survived"])])
def test_a_template_that_says_the_target_is_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ConfigError, match="'Survived'"):
        TabularDataset(spec(written(tmp_path)), template=template).texts()


def test_a_template_with_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="'Age'"):
        TabularDataset(spec(written(tmp_path)), template="aged {age}").texts()


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_few_shot_examples_are_of_the_training_fold_and_never_the_row(tmp_path: Path, split: str) -> None:
    train = TRAIN | {"Sex": [f"kind{number}" for number in TRAIN["Id"]], "Age": 1}
    folds = Folds(3)
    dataset = TabularDataset(spec(written(tmp_path, train)), split, folds=folds, few_shot=2, template="{Sex}")
    allowed = TabularDataset(spec(tmp_path), "train", folds=folds).ids().to_pylist()
    for row, text in enumerate(dataset.texts()):
        *examples, own = text.split("\n\n")
        assert len(examples) == 2
        shown = [int(example.split("\n")[0].removeprefix("kind")) for example in examples]
        assert set(shown) <= set(allowed)
        assert dataset.ids()[row].as_py() not in shown
        for number, example in zip(shown, examples):
            assert example.split("\n")[1] == f"Survived: {TRAIN['Survived'][number - 1]}"  # type: ignore[index]
        assert own.endswith("Survived:")


@pytest.mark.parametrize("template", [NaturalTemplate(), TabularTextConverter(), NaturalTemplate(exclude=["Survived"])])
@pytest.mark.parametrize("split", ["train", "test"])
def test_few_shot_texts_do_not_say_ids(tmp_path: Path, template: Any, split: str) -> None:
    about = spec(written(tmp_path))
    texts = TabularDataset(about, split, template=template, few_shot=2).texts()
    assert texts == TabularDataset(about, split, few_shot=2).texts()
    assert not any("Id" in text for text in texts)


def test_few_shot_needs_labelled_rows(tmp_path: Path) -> None:
    written(tmp_path, train=None)
    with pytest.raises(ConfigError, match="few_shot=1"):
        TabularDataset(spec(tmp_path), "test", few_shot=1).texts()
    with pytest.raises(ConfigError, match="few_shot"):
        TabularDataset(spec(tmp_path), "test", few_shot=-1)


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_tokenizer_with_cls_and_sep(tmp_path: Path) -> None:
    texts = TabularDataset(spec(written(tmp_path))).texts()
    tokenizer = bert(texts[:3])
    for length in (None, 6):
        dataset = TabularDataset(spec(tmp_path), tokenizer=tokenizer, max_length=length)
        if length is not None:
            tokenizer.enable_truncation(length)
        assert dataset.to_columns()["input_ids"].to_pylist() == [tokenizer.encode(text).ids for text in texts]
        assert dataset.cut_rows == (12 if length else 0)
    tokenizer.no_truncation()
    bare = TabularDataset(spec(tmp_path), tokenizer=tokenizer, add_special_tokens=False)
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert bare.to_columns()["input_ids"].to_pylist() == expected


words = st.lists(st.text(max_size=12), max_size=8)


@given(texts=words, length=st.none() | st.integers(3, 9), special=st.booleans(), cut=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_encoding_frames_and_cuts_every_text_by_itself(
    texts: list[str], length: int | None, special: bool, cut: int
) -> None:
    encoder = TextEncoder.of("byte", add_special_tokens=special, max_length=length)
    given = pa.array(["before"] * cut + texts, pa.string())[cut:]  # also a slice
    found = encoder.encode(given).to_pylist()
    around = 2 if special else 0
    lost = 0
    for text, ids in zip(texts, found, strict=True):
        content = list(text.encode())
        kept = content if length is None else content[: length - around]
        lost += len(content) - len(kept)
        assert ids == ([256, *kept, 257] if special else kept)
    assert encoder.cut_tokens == lost


def test_a_tokenizer_with_bos_alone_gets_what_it_has() -> None:
    encoder = TextEncoder.of(ByteTokenizer(special=("<bos>", "<pad>")))
    assert encoder.encode(pa.array(["a"])).to_pylist() == [[256, 97]]


# -- cache ------------------------------------------------------------------------------------------------------------


def test_folds_and_files_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    written(tmp_path)

    def named(**options: Any) -> str:
        return TabularDataset(spec(tmp_path), **options).fingerprint

    told = [named(), named(split="test"), named(max_length=9), named(template="json")]
    told += [named(folds=Folds(3), fold=fold, split=split) for fold in (0, 1) for split in ("train", "val")]
    assert len(set(told)) == len(told)
    assert named(folds=Folds(3)) == told[4]


class Counted(ByteTokenizer):
    """A tokenizer that knows how often it was asked."""

    asked = 0

    def encode(self, texts: pa.Array, *, parse_special: bool = False) -> pa.ListArray:
        Counted.asked += 1
        return super().encode(texts, parse_special=parse_special)


def test_tokens_are_kept_and_found_again_until_something_changes(tmp_path: Path) -> None:
    written(tmp_path)
    Counted.asked = 0

    def columns(**options: Any) -> pa.Table:
        about = spec(tmp_path, **options.pop("spec", {}))
        return TabularDataset(about, tokenizer=Counted(), cache_dir=tmp_path / "kept", **options).to_columns()

    first = columns()
    assert columns().equals(first)
    assert Counted.asked == 1
    for number, options in enumerate(
        (
            {"template": "key_value"},
            {"max_length": 9},
            {"split": "test"},
            {"add_special_tokens": False},
            {"folds": Folds(3)},
            {"folds": Folds(3), "fold": 1},
            {"folds": Folds(3), "split": "val"},
            {"spec": {"class_names": (1, 0)}},
            {"few_shot": 1},
        ),
        start=2,
    ):
        made = columns(**dict(options))
        assert Counted.asked == number, options
        assert columns(**dict(options)).equals(made)
        assert Counted.asked == number, options
    written(tmp_path, TRAIN | {"Age": [1] * 12})
    assert not columns().equals(first)
    assert not list((tmp_path / "kept").glob("*.lock"))


def test_what_is_kept_is_what_was_encoded(tmp_path: Path) -> None:
    """Not what the file, the class or the training file are by then."""
    about, kept = spec(written(tmp_path)), tmp_path / "kept"

    def texts_and_tokens(dataset: TabularDataset) -> tuple[list[str], list[str]]:
        dataset._tokenizer, dataset.cache_dir = "byte", kept
        tokens = dataset.encoded()["input_ids"].to_pylist()
        return dataset.texts(), [bytes(row[1:-1]).decode() for row in tokens]

    before = TabularDataset(about)
    written(tmp_path, TRAIN | {"Age": 1, "Survived": [1, 0] * 6})  # in between
    for dataset in (before, TabularDataset(about)):
        texts, tokens = texts_and_tokens(dataset)
        assert texts == tokens
        labels = dataset.labels()
        assert labels is not None
        assert dataset.encoded()["labels"].to_pylist() == labels.tolist()
    for word in ("one", "two"):

        class Edited(TabularDataset):
            def _load_data(self) -> None:
                super()._load_data()
                self._data = self._data.set_column(1, "Sex", pa.array([word] * len(self._data)))  # noqa: B023

        texts, tokens = texts_and_tokens(Edited(about))
        assert texts == tokens
        assert word in texts[0]
    for age in (1.5, "1.5x"):  # the types of the training file are those of the others
        written(tmp_path, TRAIN | {"Age": [age] * 12}, TEST | {"Age": ["1.50", "2.50"]})
        texts, tokens = texts_and_tokens(TabularDataset(about, "test"))
        assert texts == tokens
        assert texts[0].endswith(f"{1.5 if age == 1.5 else '1.50'}.")


def test_the_fingerprint_is_of_what_is_said(tmp_path: Path) -> None:
    about = spec(written(tmp_path))
    before = TabularDataset(about)
    assert TabularDataset(about).fingerprint == before.fingerprint
    written(tmp_path, TRAIN | {"Age": 1})
    assert TabularDataset(about).fingerprint != before.fingerprint  # which still has the rows of then


@given(texts=st.lists(st.text(max_size=4), max_size=6), cut=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_digest_is_of_values_and_not_of_arrays(texts: list[str], cut: int) -> None:
    here = pa.array(texts, pa.string())
    there = pa.array(["before"] * cut + texts + ["behind"], pa.string())[cut : cut + len(texts)]
    assert digest_of({"a": here}) == digest_of({"a": there})
    others = [[*texts, ""], ["x", *texts], [text + "!" for text in texts] or ["!"], [*texts[1:], "z", *texts[:1]]]
    assert digest_of({"a": here}) not in [digest_of({"a": pa.array(other, pa.string())}) for other in others]
    numbers = np.arange(len(texts) + 1)
    assert digest_of({"a": here, "b": numbers}) != digest_of({"a": here, "b": numbers + 1})
    assert digest_of({"a": here, "b": None}) == digest_of({"a": here}) != digest_of({"b": here})


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    about, kept = spec(written(tmp_path)), tmp_path / "kept"
    TabularDataset(about, cache_dir=kept).encoded()
    (file,) = kept.glob("*.arrow")
    file.unlink()
    names = (f".{file.name}.1-0123abcd.tmp", ".encoded-1.arrow.1-0123abcd.tmp", ".encoded-2.arrow.1-0123abcd.tmp")
    own, old, other = (kept / name for name in names)
    for stray in (own, old, other):
        stray.touch()
    os.utime(old, (1, 1))
    TabularDataset(about, cache_dir=kept).encoded()
    assert sorted(kept.iterdir()) == sorted([file, other])  # that of another key may be being written


def test_a_slow_tokenizer_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about, tokenizer = spec(written(tmp_path)), bert(["said once and for all", str(tmp_path)])
    with caplog.at_level(logging.WARNING):
        for split in ("train", "val", "test"):
            TabularDataset(about, split, tokenizer=tokenizer, folds=Folds(2)).encoded()
    assert sum("slower" in record.getMessage() for record in caplog.records) == 1


def test_what_was_cut_is_counted_also_when_it_was_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = spec(written(tmp_path))
    lost = int((TabularDataset(about).lengths - 9).sum())
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dataset = TabularDataset(about, max_length=9, cache_dir=tmp_path / "kept")
            dataset.to_columns()
        assert (dataset.cut_rows, dataset.cut_tokens) == (12, lost)
        assert str(lost) in caplog.text
        assert len(caplog.records) == 1


def test_a_damaged_cache_file_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = spec(written(tmp_path))
    first = TabularDataset(about, cache_dir=tmp_path / "kept").to_columns()
    (file,) = (tmp_path / "kept").glob("*.arrow")
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damage in (b"", whole[: len(whole) // 2], b"x" * len(whole), bytes(flipped)):
        file.unlink()
        file.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert TabularDataset(about, cache_dir=tmp_path / "kept").to_columns().equals(first)
        assert "is damaged" in caplog.text
        caplog.clear()
    file.unlink()
    with pa.OSFile(str(file), "wb") as target, pa.ipc.new_file(target, first.schema) as writer:
        writer.write_table(first.slice(0, 3))
    with caplog.at_level(logging.WARNING):
        assert TabularDataset(about, cache_dir=tmp_path / "kept").to_columns().equals(first)
    assert re.search(r"3 rows.*\b12\b", caplog.text)


def test_many_that_ask_at_once_get_the_same_and_one_makes_it(tmp_path: Path) -> None:
    written(tmp_path)
    Counted.asked = 0

    def open_one(_: int) -> pa.Table:
        return TabularDataset(spec(tmp_path), tokenizer=Counted(), cache_dir=tmp_path / "kept").to_columns()

    with ThreadPoolExecutor(6) as pool:
        tables = list(pool.map(open_one, range(6)))
    assert all(table.equals(tables[0]) for table in tables)
    assert Counted.asked == 1


def test_texts_are_made_once_whoever_asks(tmp_path: Path) -> None:
    Counted.asked = 0
    dataset = TabularDataset(spec(written(tmp_path)), tokenizer=Counted())
    with ThreadPoolExecutor(4) as pool:
        samples = list(pool.map(dataset.__getitem__, range(12)))
    assert Counted.asked == 1
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert again[3]["text"] == samples[3]["text"]
    assert Counted.asked == 1


def test_a_transform_is_of_samples_and_takes_the_columns_away(tmp_path: Path) -> None:
    dataset = TabularDataset(spec(written(tmp_path)), transform=lambda sample: sample | {"seen": True})
    assert dataset[0]["seen"]
    assert not hasattr(dataset, "to_columns")
    assert hasattr(TabularDataset(spec(tmp_path)), "to_columns")


# -- bad files --------------------------------------------------------------------------------------------------------


def test_a_missing_target_column_is_told(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"'Surived'.*'Surv"):
        TabularDataset(spec(written(tmp_path), target_column="Surived"))


def test_files_may_differ_in_a_target_that_nobody_named(tmp_path: Path) -> None:
    about = spec(written(tmp_path), target_column=None)
    assert "labels" not in TabularDataset(about)[0]
    assert len(TabularDataset(about, "test")) == 2
    written(tmp_path, test=TEST | {"Deck": 1})
    with pytest.raises(SchemaError, match="'Deck'"):
        TabularDataset(about, "test")


@pytest.mark.parametrize("split", ["train", "test"])
def test_files_with_different_columns_are_told_with_both_sides(tmp_path: Path, split: str) -> None:
    written(tmp_path, TRAIN | {"Fare": 1}, TEST | {"Cabin": "C1", "Deck": "D"})
    problem = "'Cabin'"
    with pytest.raises(SchemaError, match=problem) as caught:
        TabularDataset(spec(tmp_path), split)
    assert "['Fare']" in str(caught.value)
    assert "['Cabin', 'Deck']" in str(caught.value)
    ignored = {name: ColumnSpec(kind="ignore") for name in ("Fare", "Deck", "Cabin")}
    dataset = TabularDataset(spec(tmp_path, columns=ignored), split)
    assert dataset.feature_names == ["Sex", "Age"]


@pytest.mark.parametrize("categories", [{}, {"male": "man", "female": "woman"}])
def test_a_category_that_training_does_not_know_is_told(tmp_path: Path, categories: dict[str, str]) -> None:
    written(tmp_path, test=TEST | {"Sex": ["male", "unknown"]})
    about = spec(tmp_path, columns={"Sex": ColumnSpec(kind="categorical", categories=categories)})
    problem = r"'Sex'.*'unknown'"
    with pytest.raises(DataError, match=problem) as caught:
        TabularDataset(about, "test")
    assert "['female', 'male']" in str(caught.value)
    kept = TabularDataset(about, "test", unseen="keep")
    assert "unknown" in kept[1]["text"]
    assert len(TabularDataset(about)) == 12
    with pytest.raises(ConfigError, match="unseen"):
        TabularDataset(about, unseen="drop")  # type: ignore[arg-type]


def test_categories_that_are_numbers_are_the_same_in_every_type(tmp_path: Path) -> None:
    train, test = TRAIN | {"Class": [1, 2, 3] * 4}, TEST | {"Class": [3.0, None]}
    about = spec(written(tmp_path, train, test), columns={"Class": ColumnSpec(kind="categorical")})
    assert len(TabularDataset(about, "test")) == 2
    written(tmp_path, train, TEST | {"Class": [4.0, None]})
    with pytest.raises(DataError, match=r"row 0\b"):
        TabularDataset(about, "test")


def test_ids_and_categories_keep_their_zeros(tmp_path: Path) -> None:
    codes = {"Zip": ["01234", "20000"] * 6}
    written(tmp_path, TRAIN | codes, TEST | {"Id": ["007", "0012"], "Zip": ["20000", "20000"]})
    test = TabularDataset(spec(tmp_path, columns={"Zip": "categorical"}), "test")
    assert test.ids().to_pylist() == ["007", "0012"]
    assert test._data["Zip"].to_pylist() == ["20000", "20000"]  # as in the training file
    assert TabularDataset(spec(tmp_path))[0]["text"].endswith("The Zip is 01234.")
    written(tmp_path, TRAIN | {"Zip": [1234, 20000] * 6}, TEST | {"Zip": ["01234", "20000"]})
    with pytest.raises(DataError, match=r"'01234'.*row 0\b"):
        TabularDataset(spec(tmp_path, columns={"Zip": "categorical"}), "test")


def test_features_of_parquet_may_be_dictionaries(tmp_path: Path) -> None:
    expected = TabularDataset(spec(written(tmp_path)))
    table = pa.table({name: pa.array(values) for name, values in TRAIN.items()})
    for kind in (pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string()):
        pq.write_table(table.set_column(1, "Sex", table["Sex"].cast(kind)), tmp_path / "rows.parquet")
        about = spec(tmp_path, files={"train": "rows.parquet"}, columns={"Sex": "categorical"})
        assert TabularDataset(about, folds=Folds(2)).texts() == TabularDataset(spec(tmp_path), folds=Folds(2)).texts()
        assert TabularDataset(about).fingerprint == expected.fingerprint


def test_which_columns_are_said_does_not_depend_on_the_split(tmp_path: Path) -> None:
    train = {"store_id": [0, 1, 2, 3, 4, 5] * 2, "x": range(12), "Survived": [0, 1] * 6}
    written(tmp_path, train, {"store_id": [1, 2], "x": [5, 6]})
    for split in ("train", "val", "test"):
        dataset = TabularDataset(spec(tmp_path, id_column=None), split, folds=Folds(6))
        assert dataset.feature_names == ["store_id", "x"]
        assert "store_id" in dataset[0]["text"]


def test_a_word_among_the_numbers_of_the_test_file_is_told(tmp_path: Path) -> None:
    written(tmp_path, test=TEST | {"Age": [34, "about 30"]})
    with pytest.raises(DataError, match=r"test\.csv.*'Age'"):
        TabularDataset(spec(tmp_path), "test")


@pytest.mark.parametrize("code", ["01234", "9007199254740993"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_code_where_training_has_numbers_is_told(tmp_path: Path, code: str, suffix: str) -> None:
    test = pd.DataFrame(TEST | {"Age": [f"{34.5}", code]})
    written(tmp_path, test=None)
    test.to_csv(tmp_path / "test.csv", index=False) if suffix == "csv" else test.to_parquet(tmp_path / "test.parquet")
    with pytest.raises(DataError, match=rf"'Age'.*'{code}'") as told:
        TabularDataset(spec(tmp_path), "test")
    assert told.value.row == 1
    as_text = TabularDataset(spec(tmp_path, columns={"Age": ColumnSpec(kind="text")}), "test", template="key_value")
    assert as_text.texts()[1] == f"Sex: female | Age: {code}"
    as_number = TabularDataset(spec(tmp_path, columns={"Age": ColumnSpec(kind="numeric")}), "test")
    assert as_number[1]["text"].startswith("The Sex is female. The Age is ")


def test_a_column_without_a_value_is_told(tmp_path: Path) -> None:
    written(tmp_path, TRAIN | {"Age": None})
    with pytest.raises(DataError, match="'Age'"):
        TabularDataset(spec(tmp_path))
    about = spec(tmp_path, columns={"Age": ColumnSpec(kind="ignore")})
    assert TabularDataset(about)[0]["text"] == "The Sex is male."


def test_duplicate_ids_are_told(tmp_path: Path) -> None:
    written(tmp_path, TRAIN | {"Id": [1, *range(1, 12)]})
    with pytest.raises(DataError, match=r"'Id'.*row 0\b"):
        TabularDataset(spec(tmp_path))


def test_counts_that_disagree_with_the_file_are_told(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(SchemaError, match="num_samples=891"):
        TabularDataset(spec(tmp_path, num_samples=891))
    with pytest.raises(SchemaError, match=r"num_features=10.*'Id'"):
        TabularDataset(spec(tmp_path, num_features=10))


def test_odd_files_make_the_same_dataset(tmp_path: Path) -> None:
    expected = TabularDataset(spec(written(tmp_path))).to_columns()
    frame = pd.DataFrame(TRAIN)
    (tmp_path / "test.csv").unlink()
    for sep, encoding in ((";", "utf-8-sig"), ("\t", "utf-16"), ("|", "utf-8")):
        frame.to_csv(tmp_path / "train.csv", index=False, sep=sep, encoding=encoding)
        assert TabularDataset(spec(tmp_path)).to_columns().equals(expected)
    (tmp_path / "train.csv").unlink()
    frame.to_csv(tmp_path / "Training.csv.gz", index=False)
    assert TabularDataset(spec(tmp_path)).to_columns().equals(expected)
    (tmp_path / "Training.csv.gz").unlink()
    frame.to_parquet(tmp_path / "rows.parquet")
    assert TabularDataset(spec(tmp_path, files={"train": "rows.parquet"})).to_columns().equals(expected)


@pytest.mark.parametrize(
    ("target", "options", "problem"),
    [
        ([0, 1, 2] * 4, {}, r"binary_classification.*'Survived'"),
        ([0, 1] * 6, {"class_names": ("died", "lived")}, r"'Survived'.*\bint64\b"),
        ([0, 1, 2] * 4, {"class_names": (0, 1)}, r"row 2\b"),
        (["a", "b"] * 6, {"competition_type": "regression"}, "competition_type"),
        ([0, 5] * 6, {"competition_type": "multilabel"}, r"'Survived'.*row 1\b"),
    ],
)
def test_targets_that_do_not_go_with_the_type_are_told(
    tmp_path: Path, target: list[Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises((DataError, SchemaError), match=problem):
        TabularDataset(spec(written(tmp_path, TRAIN | {"Survived": target}), **options)).labels()


def test_a_directory_that_is_not_a_dataset_is_told(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    with pytest.raises(FileNotFoundError, match=r"photo\.png.*train\.csv"):
        TabularDataset(spec(tmp_path))
    with pytest.raises(FileNotFoundError, match="dataset_path"):
        TabularDataset(spec(tmp_path / "nowhere"))


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "classes"),
    [
        ([0, 1, 1], ["no", "yes", "yes"]),
        ([0.2, 0.5, 0.9], ["no", "yes", "yes"]),
        ([[0.9, 0.1], [0.4, 0.6], [-3.0, 2.0]], ["no", "yes", "yes"]),
        (np.array([[1.0], [0.0], [1.0]]), ["yes", "no", "yes"]),
    ],
)
def test_predictions_become_class_names(tmp_path: Path, predictions: Any, classes: list[str]) -> None:
    dataset = TabularDataset(spec(written(tmp_path, TRAIN | {"Survived": ["no", "yes"] * 6})))
    assert dataset.class_of(predictions).tolist() == classes


@pytest.mark.parametrize(
    ("predictions", "problem"),
    [
        ([0, 2], r"row 1\b"),
        ([0.5, 1.7], "(?i)probability"),
        ([0.5, float("nan")], r"row 1\b.*NaN"),
        ([[0.1, 0.2, 0.7]], r"\b3\b.*\b2\b"),
        (["a", "b"], "'a'"),
    ],
)
def test_predictions_of_no_class_are_refused(tmp_path: Path, predictions: Any, problem: str) -> None:
    with pytest.raises((DataError, SchemaError), match=problem):
        TabularDataset(spec(written(tmp_path))).class_of(predictions)


def test_scores_are_of_the_rows_of_the_split(tmp_path: Path) -> None:
    target = ["no", "yes"] * 6
    val = TabularDataset(spec(written(tmp_path, TRAIN | {"Survived": target})), "val", folds=Folds(3))
    labels: npt.NDArray[np.int32] | None = val.labels()
    assert labels is not None
    assert val.score(val.class_of(labels), "accuracy") == 1.0
    assert val.score(labels * 0.5, "auc") == 1.0
    assert val.score(np.stack([labels, 1 - labels], 1) * 1.0, "log_loss") > 30
