"""The shipped dataset: what is hidden, what is to be predicted, and from which part of which text."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.config import load_shared_config, validate
from penstock.errors import ConfigError, DataError
from penstock.fsqueue.prepare_command import load_provider

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "data" / "char_diffusion"


CharDiffusionProvider: Any = load_provider(DATASET / "prepare_streaming.py")
_PACKAGE = CharDiffusionProvider.__module__.rpartition(".")[0]
masking: Any = importlib.import_module(f"{_PACKAGE}.masking")
making: Any = importlib.import_module(f"{_PACKAGE}.make_input")


def provider(data_dir: Path = DATASET, **config: Any) -> Any:
    given = {"dataset": "char_diffusion", "batch_size": 16, "block_size": 48, "seed": 3, **config}
    return CharDiffusionProvider(given, data_dir=data_dir)


def revealed(batch: dict[str, npt.NDArray[Any]], ignore_index: int = -100) -> npt.NDArray[Any]:
    return np.where(batch["y"] == ignore_index, batch["x"], batch["y"])


def hidden_share(batch: dict[str, npt.NDArray[Any]]) -> float:
    return float((batch["y"] != -100).mean())


STAGES = st.one_of(
    st.floats(0.01, 1).map(lambda rate: {"mask_probability": rate}),
    st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 1)).map(lambda rates: {"mask_probability": rates}),
)
HOW = st.fixed_dictionaries(
    {},
    optional={"mask_span": st.integers(1, 8), "mask_keep": st.floats(0, 0.5), "mask_random": st.floats(0, 0.5)},
)


@given(
    stage=STAGES, how=HOW, split=st.sampled_from(["train", "val"]), k=st.integers(0, 10**9), block=st.integers(8, 90)
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_what_was_hidden_put_back_is_a_piece_of_the_text_of_that_split(
    stage: dict[str, Any], how: dict[str, Any], split: str, k: int, block: int
) -> None:
    made = provider(block_size=block, **stage, **how)
    text = making.make_text()
    train = text[: len(text) - len(text) // 10]
    batch = made.make_batch(split, k)
    asked = batch["y"] != -100
    assert asked.any(axis=1).all(), "a row asks for nothing"
    assert (batch["x"][~asked] < made.mask_token_id).all(), "a character is hidden and not asked for"
    for row in revealed(batch):
        assert made.decode(row) in (train if split == "train" else text[len(train) :])
    if not how.get("mask_keep") and not how.get("mask_random"):
        assert (batch["x"][asked] == made.mask_token_id).all()


def test_a_batch_is_a_function_of_seed_split_and_number_alone() -> None:
    first, second = provider(), provider()
    order = [5, 0, 3]
    made = {k: first.make_batch("train", k) for k in order}
    for k in reversed(order):
        again = second.make_batch("train", k)
        assert all(np.array_equal(made[k][name], again[name]) for name in ("x", "y"))
    assert not np.array_equal(made[0]["x"], made[3]["x"])
    assert not np.array_equal(made[0]["x"], provider(seed=4).make_batch("train", 0)["x"])


def test_meta_says_what_a_trainer_needs() -> None:
    made = provider(ignore_index=-1)
    meta = made.build_meta()
    assert meta["training_type"] == "MLM"
    assert meta["vocab_size"] == len(meta["chars"]) + 1 == made.vocab_size
    assert meta["mask_token_id"] == len(meta["chars"])
    assert meta["ignore_index"] == -1
    assert [(f["name"], f["dtype"], f["shape"], f["role"]) for f in meta["batch_schema"]] == [
        ("x", "int64", [48], "input"),
        ("y", "int64", [48], "target"),
    ]
    assert set(meta["chars"]) == set((DATASET / "input.txt").read_text(encoding="utf-8"))
    assert sum(meta["characters"].values()) == len(made.text)
    batch = made.make_batch("val", 0)
    assert batch["x"].min() >= 0
    assert batch["x"].max() < meta["vocab_size"]
    assert batch["y"][batch["y"] != -1].max() < meta["mask_token_id"]


@pytest.mark.parametrize("span", [1, 3, 10])
@pytest.mark.parametrize("rate", [0.15, 0.6, 1.0])
def test_every_character_is_hidden_with_the_same_probability_at_the_edges_too(rate: float, span: int) -> None:
    rows, length = 20_000, 24
    chosen = masking.choose_characters(np.random.default_rng(1), np.full((rows, 1), rate), length, span)
    assert chosen.shape == (rows, length)
    runs = length + span - 1  # that touch the row; if none of them begins, one is made to
    expected = rate + (1 - rate) ** (runs / span) * span / runs
    assert np.abs(chosen.mean(axis=0) - expected).max() < 5 * np.sqrt(0.25 / rows)


@given(st.integers(1, 9), st.floats(0.001, 0.999), st.integers(9, 40), st.integers(0, 2**32))
@hypothesis_settings(max_examples=60, deadline=None)
def test_characters_are_hidden_in_runs(span: int, rate: float, length: int, seed: int) -> None:
    chosen = masking.choose_characters(np.random.default_rng(seed), np.full((30, 1), rate), length, span)
    for row in chosen:
        runs = [(run.start(), run.end()) for run in re.finditer("1+", "".join(map(str, row.astype(int))))]
        assert runs
        assert all(end - start >= span for start, end in runs if start > 0 and end < length)


def test_a_pair_of_probabilities_gives_every_row_its_own() -> None:
    asked = provider(batch_size=400, block_size=200, mask_probability=(0.2, 0.8)).make_batch("train", 0)["y"] != -100
    shares = np.sort(asked.mean(axis=1))
    assert shares[0] < 0.3
    assert shares[-1] > 0.7
    assert np.abs(shares - np.linspace(0.2, 0.8, len(shares))).max() < 0.15


def test_of_the_hidden_characters_some_stay_and_some_are_exchanged() -> None:
    made = provider(batch_size=200, mask_probability=0.5, mask_keep=0.3, mask_random=0.2)
    batch = made.make_batch("train", 0)
    asked = batch["y"] != -100
    x, y = batch["x"][asked], batch["y"][asked]
    assert (x == made.mask_token_id).mean() == pytest.approx(0.5, abs=0.03)
    assert (x == y).mean() == pytest.approx(0.3 + 0.2 / len(made.chars), abs=0.03)
    exchanged = x[(x != y) & (x != made.mask_token_id)]
    assert len(np.unique(exchanged)) == len(made.chars), "not every character can take another's place"


def test_stages_follow_each_other_by_batch_number_and_val_has_the_last_one() -> None:
    stages = [{"until": 3, "mask_probability": 0.1}, {"until": 5, "mask_probability": 0.5}, {"mask_probability": 1.0}]
    made = provider(batch_size=200, stages=stages)
    shares = [hidden_share(made.make_batch("train", k)) for k in range(7)]
    assert shares == pytest.approx([0.1] * 3 + [0.5] * 2 + [1.0] * 2, abs=0.03)
    assert hidden_share(made.make_batch("train", 0)) == shares[0]  # whatever was asked for before
    assert hidden_share(made.make_batch("val", 0)) == 1.0


def test_stages_are_drawn_by_weight() -> None:
    stages = [{"weight": 3, "mask_probability": 0.1}, {"weight": 1, "mask_probability": 1.0}]
    made = provider(batch_size=4, stages=stages)
    for split in ("train", "val"):
        full = np.mean([hidden_share(made.make_batch(split, k)) == 1.0 for k in range(600)])
        assert full == pytest.approx(0.25, abs=0.08)


def test_a_stage_has_what_the_config_says_for_all_unless_it_says_otherwise() -> None:
    stages = [{"until": 1, "mask_span": 2}, {"mask_probability": 0.3}]
    first, second = provider(mask_probability=0.7, mask_span=5, stages=stages).stages
    assert (first.mask_probability, first.mask_span) == (0.7, 2)
    assert (second.mask_probability, second.mask_span) == (0.3, 5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mask_probability": 0.0}, ["mask_probability = 0.0", "(0, 1]"]),
        ({"mask_probability": 1.5}, ["mask_probability = 1.5"]),
        ({"mask_probability": float("nan")}, ["mask_probability"]),
        ({"mask_probability": (0.9, 0.1)}, ["mask_probability", "(low, high)"]),
        ({"mask_span": 0, "mask_keep": -0.1, "mask_random": 2.0}, ["mask_span", "mask_keep", "mask_random"]),
        ({"mask_keep": 0.6, "mask_random": 0.6}, ["must not exceed 1"]),
        ({"mask_span": 49}, ["mask_span=49", "row of 48"]),
        ({"val_fraction": 1.0}, ["val_fraction"]),
        ({"ignore_index": 0}, ["ignore_index=0", "-100"]),
        ({"split_proportions": {"train": 0.9, "test": 0.1}}, ["['test']"]),
        ({"stages": "0.15"}, ["stages", "a list"]),
        ({"stages": [{"mask_probability": 0.1}, {}]}, ["every stage but the last needs an until", "[None]"]),
        ({"stages": [{"until": 5}, {"until": 5}, {}]}, ["later than the one before", "[5, 5]"]),
        ({"stages": [{"until": 5}, {"until": 9}]}, ["the last stage must not end", "9"]),
        ({"stages": [{"weight": 1}, {}]}, ["all stages have a weight or none", "[0]"]),
        ({"stages": [{"weight": 1, "until": 2}]}, ["not both"]),
        (
            {"stages": [{"mask_probability": 2, "mask_span": "3"}, {"untill": 4, "weight": 0}, {"until": 0.5}]},
            ["stage 0: mask_probability = 2", "stage 0: mask_span = '3'", "'untill'", "weight = 0", "until = 0.5"],
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_all_problems_named(config: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        provider(**config)
    assert not [words for words in said if words not in str(refused.value)], str(refused.value)


def test_a_text_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input\.txt.*input_file"):
        provider(tmp_path)
    (tmp_path / "latin.txt").write_bytes("Grüße ".encode("latin-1") * 100)
    with pytest.raises(DataError, match=r"latin\.txt.*byte 2\b"):
        provider(tmp_path, input_file="latin.txt")
    (tmp_path / "wide.txt").write_bytes(("word " * 100).encode("utf-16"))
    with pytest.raises(DataError, match=r"wide\.txt.*byte 0\b"):
        provider(tmp_path, input_file="wide.txt")


@pytest.mark.parametrize(
    ("text", "short"), [("", ["train", "val"]), ("a" * 47, ["train", "val"]), ("a" * 100, ["val"])]
)
def test_a_text_too_short_for_a_row_is_refused(text: str, short: list[str], tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"characters.*block_size=48") as refused:
        provider(tmp_path)
    assert re.findall(r"the split '(\w+)'", str(refused.value)) == short


def test_a_split_of_exactly_one_row_is_enough(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("ab" * 24 + "cd" * 24, encoding="utf-8")
    made = provider(tmp_path, val_fraction=0.5)
    assert {made.decode(row) for row in revealed(made.make_batch("train", 0))} == {"ab" * 24}
    assert {made.decode(row) for row in revealed(made.make_batch("val", 0))} == {"cd" * 24}


def test_a_byte_order_mark_and_other_line_ends_change_no_batch_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"line {number} says übermut 🌊" for number in range(200)]
    batches, metas = [], []
    for name, data in {
        "unix": "\n".join(lines).encode(),
        "windows": b"\xef\xbb\xbf" + "\r\n".join(lines).encode(),
        "mac": "\r".join(lines).encode(),
    }.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "input.txt").write_bytes(data)
        with caplog.at_level(logging.WARNING):
            made = provider(directory)
        batches.append(made.make_batch("train", 1))
        metas.append(made.build_meta())
    assert "🌊" in metas[0]["chars"]
    assert all(np.array_equal(batches[0]["x"], batch["x"]) for batch in batches)
    assert metas[0] == metas[1] == metas[2]
    assert [record.args[1:] for record in caplog.records if isinstance(record.args, tuple)] == [
        (True, 199),
        (False, 199),
    ]


def test_another_text_has_another_fingerprint(tmp_path: Path) -> None:
    prints = []
    for last in "ab":
        (tmp_path / "input.txt").write_text("ab" * 500 + last, encoding="utf-8")
        prints.append(provider(tmp_path).description().fingerprint)
    assert prints[0] != prints[1]


def test_decode_shows_what_is_hidden_and_refuses_ids_that_are_none() -> None:
    made = provider()
    ids = [made.chars.index("a"), made.mask_token_id, made.chars.index("b")]
    assert made.decode(ids) == "a_b"
    assert made.decode(np.array(ids), mask="?") == "a?b"
    assert made.decode([-100, *ids]) == "_a_b"
    assert made.decode([]) == ""
    with pytest.raises(DataError, match=r"\b66\b.*\b0\b"):
        made.decode([0, 66])


def test_the_text_is_what_its_grammar_makes() -> None:
    text = making.make_text()
    assert (DATASET / "input.txt").read_bytes().decode("utf-8").replace("\r\n", "\n") == text
    assert text.isascii()
    assert 40 <= len(set(text)) <= 70
    assert making.make_text(5000, seed=1) != making.make_text(5000, seed=2)


def test_the_text_keeps_to_its_grammar() -> None:
    """An independent look: sums are right, names go with their trades and pronouns, numbers agree."""
    text = making.make_text()
    numbers = {word: number for number, word in enumerate(making.NUMBERS)}
    sums = re.findall(r"counted (\w+) \w+ and (\w+) more: (\w+) ", text)
    assert len(sums) > 200
    assert all(numbers[a] + numbers[b] == numbers[c] for a, b, c in sums)
    trades = {(name, trade) for name, trade in re.findall(r"(\w+) the (\w+) (?:mend|paint|sold|carri|found)", text)}
    assert len(trades) == len({name for name, _ in trades}) == len({trade for _, trade in trades}) == 14
    openings = {(line.split()[2], word) for line in text.splitlines() for word in re.findall(r"\. (She|He) ", line)}
    assert len(openings) == 14
    assert not re.search(r"Where is the \w+s\?|Where are the \w*[^s]\?|mans |counted one \w+s ", text)


def test_neighbours_alone_tell_hidden_characters_far_better_than_chance() -> None:
    """What stands left and right, counted over the train batches, names the hidden characters of val."""
    made = provider(batch_size=64, block_size=64, mask_probability=0.15)
    counts = np.zeros((made.vocab_size,) * 3)
    for k in range(120):
        batch = made.make_batch("train", k)
        np.add.at(counts, (batch["x"][:, :-2], batch["x"][:, 2:], revealed(batch)[:, 1:-1]), 1)
    right = asked = 0
    for k in range(5):
        batch = made.make_batch("val", k)
        guesses = counts[batch["x"][:, :-2], batch["x"][:, 2:]].argmax(axis=-1)
        target = batch["y"][:, 1:-1]
        right += int((guesses == target)[target != -100].sum())
        asked += int((target != -100).sum())
    commonest = max(map(made.text.count, set(made.text))) / len(made.text)
    assert right / asked > 2 * commonest


def test_the_shipped_config_serves_the_provider() -> None:
    config = validate(load_shared_config(ROOT / "config" / "train_char_diffusion.py"), CharDiffusionProvider.settings)
    made = CharDiffusionProvider(config, data_dir=DATASET)
    assert made.make_batch("train", 0)["x"].shape == (config.batch_size, config.block_size)
    assert made.stages
