"""A run of the trainer against a queue that is made up: exact resume, evaluation, stopping, errors."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from char_diffusion.checkpoint import BEST, LAST, load, save
from char_diffusion.ranks import StopSignals
from char_diffusion.trainer import learning_rate
from fake_queue import LENGTH, ROWS, FakeConsumer, masked_batch, masked_meta, small, trainer

from penstock.config import validate
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError, StalledError

NEEDED = {"dataset": "d", "batch_size": 2, "block_size": 4}
SVG = "{http://www.w3.org/2000/svg}"


class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it, nothing is saved."""


def final(out_dir: Path) -> dict[str, Any]:
    found = load(out_dir / LAST)
    assert found is not None
    return found


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other


def without_pace(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k not in ("tokens_per_second", "waiting")} for each in records]


def assert_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("step", "model", "optimizer", "random", "queue", "best_loss", "window"):
        assert_same(one[name], other[name])
    assert without_pace(one["records"]) == without_pace(other["records"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out_dir = tmp_path_factory.mktemp("unbroken")
    assert trainer(small(out_dir), FakeConsumer()).run()
    return final(out_dir)


@pytest.mark.parametrize(("split", "at"), [("train", k) for k in range(12)] + [("val", k) for k in range(8)])
def test_a_run_killed_at_any_batch_ends_with_the_weights_of_one_that_was_not(
    split: str, at: int, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    def kill(asked: str, k: int) -> None:
        if (asked, k) == (split, at):
            raise Killed

    with pytest.raises(Killed):
        trainer(small(tmp_path), FakeConsumer(fault=kill)).run()
    torch.manual_seed(at)  # another process has another generator
    assert trainer(small(tmp_path), FakeConsumer()).run()
    assert_same_run(final(tmp_path), unbroken)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert without_pace(log) == without_pace(unbroken["records"])


@pytest.mark.parametrize(("split", "at"), [("train", 0), ("train", 5), ("val", 0), ("val", 3)])
def test_a_signal_while_waiting_for_data_saves_the_last_whole_step_and_the_next_run_goes_on(
    split: str, at: int, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    def interrupt(asked: str, k: int) -> None:
        if (asked, k) == (split, at):
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("the wait went on")

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        first = trainer(small(tmp_path), FakeConsumer(fault=interrupt), signals=signals)
        assert first.run() is False
    assert signal.getsignal(signal.SIGTERM) is before
    assert first.step == {("train", 0): 0, ("train", 5): 5, ("val", 0): 0, ("val", 3): 4}[split, at]
    assert (tmp_path / LAST).exists() is (first.step > 0)
    assert trainer(small(tmp_path), FakeConsumer()).run()
    assert_same_run(final(tmp_path), unbroken)


def test_a_second_signal_leaves_at_once_with_130(tmp_path: Path) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.requested
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGINT)
    assert left.value.code == 130


def test_a_signal_that_comes_twice_through_a_launcher_is_one_request() -> None:
    with StopSignals(launched=True) as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.requested


def test_a_wait_that_begins_after_the_signal_does_not_begin(tmp_path: Path) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert trainer(small(tmp_path), FakeConsumer(), signals=signals).run() is False


def test_the_queue_forgets_only_what_a_checkpoint_on_the_disk_has_behind_it(tmp_path: Path) -> None:
    consumer = FakeConsumer()
    commit = consumer.commit

    def watch(state: Any = None) -> None:
        assert final(tmp_path)["queue"] == state
        commit(state)

    consumer.commit = watch  # type: ignore[method-assign]
    trainer(small(tmp_path), consumer).run()
    assert [each["train"] for each in consumer.commits] == sorted({each["train"] for each in consumer.commits})
    assert consumer.commits[-1] == {"train": 12, "val": 8}


def test_a_checkpoint_that_cannot_be_written_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = FakeConsumer()

    def full(*given: Any, best: bool) -> None:
        raise OSError(28, "No space left on device", "last.pt")

    monkeypatch.setattr("char_diffusion.checkpoint.save", full)
    with pytest.raises(OSError, match="No space left"):
        trainer(small(tmp_path), consumer).run()
    assert consumer.commits == []


def test_evaluation_changes_nothing_of_what_is_learned(unbroken: dict[str, Any], tmp_path: Path) -> None:
    trainer(small(tmp_path, eval_iters=0), FakeConsumer()).run()
    assert_same(final(tmp_path)["model"], unbroken["model"])
    assert not [each for each in final(tmp_path)["records"] if each["kind"] == "val"]
    assert not (tmp_path / BEST).exists()


def test_the_best_checkpoint_is_the_one_with_the_least_loss_on_val(tmp_path: Path) -> None:
    trainer(small(tmp_path, max_iters=40, learning_rate=1e-2), FakeConsumer()).run()
    losses = {
        each["step"]: each["loss"] for each in final(tmp_path)["records"] if each["kind"] == "val" and each["step"]
    }
    best = load(tmp_path / BEST)
    assert best is not None
    assert best["step"] == min(losses, key=losses.__getitem__)
    assert best["best_loss"] == losses[best["step"]]


def test_it_learns(tmp_path: Path) -> None:
    pace = {"eval_interval": 150, "eval_iters": 10, "checkpoint_interval": 150}
    settings = small(tmp_path, max_iters=150, n_embd=32, learning_rate=1e-2, dropout=0.0, **pace)
    trainer(settings, FakeConsumer()).run()
    first, last = (each for each in final(tmp_path)["records"] if each["kind"] == "val")
    assert first["loss"] == pytest.approx(math.log(10), rel=0.1)
    assert last["accuracy"] > 0.9 > 3 * first["accuracy"]
    assert last["commonest"] < 0.3


def test_a_finished_run_goes_on_when_there_is_more_to_do(unbroken: dict[str, Any], tmp_path: Path) -> None:
    trainer(small(tmp_path, max_iters=8, lr_decay_iters=12), FakeConsumer()).run()
    trainer(small(tmp_path, max_iters=8, lr_decay_iters=12), FakeConsumer()).run()  # nothing to do
    assert final(tmp_path)["step"] == 8
    trainer(small(tmp_path), FakeConsumer()).run()
    assert_same(final(tmp_path)["model"], unbroken["model"])


def test_starting_anew_replaces_the_checkpoint(unbroken: dict[str, Any], tmp_path: Path) -> None:
    trainer(small(tmp_path, seed=5), FakeConsumer()).run()
    trainer(small(tmp_path, resume=False), FakeConsumer()).run()
    assert_same_run(final(tmp_path), unbroken)


@pytest.mark.parametrize(
    ("changes", "meta", "said"),
    [
        ({"n_embd": 32}, {}, "n_embd"),
        ({"n_layer": 2}, {}, "n_layer"),
        ({"seed": 3}, {}, r"\bseed\b"),
        ({}, {"vocab_size": 12}, "tokens.*10.*12"),
        ({}, {"itos": list("abXdefgh\n_")}, r"\bfit: .*itos\[2\]"),
        ({}, {"note": {"a": [1, {"b": "c" * 300}]}}, r"\bnote\b.*a\[0\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_naming_both_sides(
    changes: dict[str, Any], meta: dict[str, Any], said: str, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, unbroken, best=False)
    before = (tmp_path / LAST).read_bytes()
    with pytest.raises(ResumeError, match=said):
        trainer(small(tmp_path, **changes), FakeConsumer(masked_meta(**meta))).run()
    assert (tmp_path / LAST).read_bytes() == before


def test_a_loss_that_is_no_number_stops_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    schema = [*masked_meta()["batch_schema"], {"name": "w", "dtype": "float32", "shape": [LENGTH], "role": "weight"}]

    def make(split: str, k: int) -> dict[str, torch.Tensor]:
        x, y = masked_batch(split, k)
        return {"x": x, "y": y, "w": torch.full((ROWS, LENGTH), math.inf if (split, k) == ("train", 5) else 1.0)}

    with pytest.raises(DataError, match=r"step 5\b.*step 4\b"):
        trainer(small(tmp_path), FakeConsumer(masked_meta(batch_schema=schema), make)).run()
    assert final(tmp_path)["step"] == 4
    assert all(weights.isfinite().all() for weights in final(tmp_path)["model"].values())


def test_a_queue_that_runs_dry_is_an_error_and_what_was_learned_is_saved(tmp_path: Path) -> None:
    def dry(split: str, k: int) -> None:
        if split == "train" and k == 7:
            raise StalledError("no batch of split 'train' for 60 s")

    with pytest.raises(StalledError, match=r"\b60 s"):
        trainer(small(tmp_path), FakeConsumer(fault=dry)).run()
    assert final(tmp_path)["step"] == 7


@pytest.mark.parametrize("evaluated", [0, 2])
def test_a_queue_that_ends_ends_the_run_and_more_of_it_goes_on(
    evaluated: int, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    def end(split: str, k: int) -> None:
        if split == "train" and k == 7:
            raise StopIteration

    assert trainer(small(tmp_path, eval_iters=evaluated), FakeConsumer(fault=end)).run() is False
    assert final(tmp_path)["step"] == 7
    assert trainer(small(tmp_path, eval_iters=evaluated), FakeConsumer()).run() is True
    assert_same(final(tmp_path)["model"], unbroken["model"])


def test_when_val_ends_what_is_left_of_it_is_evaluated_and_training_goes_on(
    unbroken: dict[str, Any], tmp_path: Path
) -> None:
    def end(split: str, k: int) -> None:
        if split == "val" and k == 3:
            raise StopIteration

    assert trainer(small(tmp_path), FakeConsumer(fault=end)).run()
    assert [each["step"] for each in final(tmp_path)["records"] if each["kind"] == "val"] == [0, 4]
    assert_same(final(tmp_path)["model"], unbroken["model"])


def test_batches_that_are_not_what_was_promised_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size=8"):
        trainer(small(tmp_path, batch_size=8), FakeConsumer()).run()
    with pytest.raises(ConfigError, match=r"'x'.*block_size=8"):
        trainer(small(tmp_path, block_size=8), FakeConsumer())
    with pytest.raises(SchemaError, match=r"\b9\b.*\b0\b"):
        trainer(small(tmp_path), FakeConsumer(masked_meta(vocab_size=7, mask_token_id=None))).run()
    assert not (tmp_path / LAST).exists()


def test_a_dict_of_classes_and_a_mask_trains(tmp_path: Path) -> None:
    """The class is the character most rows begin with; padding is full of another one."""
    schema = [
        {"name": "tokens", "dtype": "int32", "shape": [LENGTH], "role": "input"},
        {"name": "label", "dtype": "int64", "shape": [], "role": "target"},
        {"name": "real", "dtype": "bool", "shape": [LENGTH], "role": "attention_mask"},
        {"name": "source", "dtype": "int64", "shape": [], "role": "note"},
    ]
    meta = {"training_type": "classification", "vocab_size": 5, "num_classes": 3, "batch_schema": schema}

    def make(split: str, k: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(2 * k + (split == "val"))
        label = torch.randint(3, (ROWS,), generator=draw)
        real = torch.arange(LENGTH) < torch.randint(1, LENGTH, (ROWS, 1), generator=draw)
        noise = torch.randint(5, (ROWS, LENGTH), generator=draw)
        tokens = torch.where(real, label[:, None], noise).int()
        return {"tokens": tokens, "label": label, "real": real, "source": label}

    pace = {"eval_interval": 60, "eval_iters": 10, "checkpoint_interval": 60}
    settings = small(tmp_path, max_iters=60, learning_rate=1e-2, **pace)
    started = trainer(settings, FakeConsumer(meta, make))
    assert started.fields.unused == ("source",)
    started.run()
    first, last = (each for each in final(tmp_path)["records"] if each["kind"] == "val")
    assert last["accuracy"] == 1.0
    assert last["loss"] < 0.3 < 0.9 < first["loss"]


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{LAST}.1-ab.tmp").write_bytes(b"half")
    trainer(small(tmp_path, max_iters=1), FakeConsumer()).run()
    assert sorted(each.name for each in tmp_path.iterdir()) == [BEST, "curve.html", LAST, "log.jsonl"]


def test_bfloat16_trains_and_resumes_exactly_too(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trainer(small(whole, dtype="bfloat16"), FakeConsumer()).run()
    trainer(small(halves, dtype="bfloat16", max_iters=6, lr_decay_iters=12), FakeConsumer()).run()
    trainer(small(halves, dtype="bfloat16"), FakeConsumer()).run()
    assert_same(final(halves)["model"], final(whole)["model"])
    assert final(whole)["model"]["tokens.weight"].dtype is torch.float32


def test_the_learning_rate_rises_in_a_line_and_falls_in_half_a_cosine() -> None:
    config = validate(NEEDED | {"max_iters": 100, "learning_rate": 1.0, "min_lr": 0.2, "warmup_iters": 9})
    rates = [learning_rate(step, config) for step in range(120)]
    assert rates[:9] == pytest.approx([0.1 * (step + 1) for step in range(9)])
    assert rates[9] == max(rates) == 1.0
    assert all(before > after for before, after in pairwise(rates[9:101]))
    assert (rates[9] + rates[99] - learning_rate(54, config) * 2) == pytest.approx(0, abs=0.02)
    assert rates[100:] == [0.2] * 20


def test_the_lowest_rate_is_a_tenth_of_the_highest_and_the_decay_ends_with_the_run() -> None:
    config = validate(NEEDED | {"max_iters": 50, "learning_rate": 0.5, "warmup_iters": 0})
    assert learning_rate(0, config) == 0.5
    assert learning_rate(50, config) == pytest.approx(0.05)
    assert learning_rate(20, validate(NEEDED | {"lr_decay_iters": 20, "warmup_iters": 30})) < 1e-3


def test_a_flipped_bit_in_a_checkpoint_is_refused_or_harmless(unbroken: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, unbroken, best=False)
    data, refused = (tmp_path / LAST).read_bytes(), 0
    for bit in random.Random(19).sample(range(len(data) * 8), 100):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / LAST).write_bytes(flipped)
        try:
            assert_same_run(final(tmp_path), unbroken)
        except ResumeError:
            refused += 1
    assert refused > 50


def test_the_curve_is_a_page_that_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    trainer(small(tmp_path), FakeConsumer()).run()
    page = (tmp_path / "curve.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|url\(|@import", page)
    lines = list(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter(f"{SVG}polyline"))
    assert [len(line.attrib["points"].split()) for line in lines] == [4, 4, 4, 4]  # train and val, loss and accuracy
