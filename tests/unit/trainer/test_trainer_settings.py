"""The numbers of a run and its learning rates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SharedConfig, validate
from penstock.errors import ConfigError
from penstock.trainer.settings import TrainSettings, learning_rate_at

NEEDED = {"dataset": "d", "batch_size": 2, "block_size": 4}


def test_the_rate_goes_up_in_a_line_and_down_in_half_a_cosine() -> None:
    settings = TrainSettings(**NEEDED, max_iters=100, learning_rate=1.0, min_lr=0.2, warmup_iters=9)
    rates = [learning_rate_at(step, settings) for step in range(120)]
    assert rates[:9] == pytest.approx([0.1 * (step + 1) for step in range(9)])
    assert rates[9] == max(rates) == 1.0
    assert all(before > after for before, after in pairwise(rates[9:101]))
    assert (rates[9] + rates[99] - learning_rate_at(54, settings) * 2) == pytest.approx(0, abs=0.02)
    assert rates[100:] == [0.2] * 20


def test_what_is_left_out_follows_from_what_is_there() -> None:
    settings = TrainSettings(**NEEDED, max_iters=50, learning_rate=0.5, warmup_iters=0)
    assert learning_rate_at(0, settings) == 0.5
    assert learning_rate_at(50, settings) == 0.05
    assert settings.save_every == settings.eval_interval
    assert learning_rate_at(20, TrainSettings(**NEEDED, lr_decay_iters=20, warmup_iters=30)) < 1e-3


def test_a_validated_config_gives_the_same_defaults_as_the_trainer_itself() -> None:
    wanted = TrainSettings(**NEEDED, out_dir=Path("out/d"))
    assert TrainSettings.of(validate(SharedConfig(NEEDED))) == TrainSettings.of(NEEDED) == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_embd": 10, "n_head": 3}, r"n_embd=10.*n_head=3"),
        ({"n_embd": 6, "n_head": 2}, "n_head=2"),
        ({"max_iters": 0}, "max_iters"),
        ({"dropout": 1.0, "beta1": -0.1}, r"dropout.*\bbeta1\b"),
        ({"dtype": "float16"}, r"\bdtype\b.*'float16'"),
        ({"device": "tpu"}, r"device.*'tpu'"),
        ({"warmup_iters": -1}, "warmup_iters"),
    ],
)
def test_numbers_that_cannot_work_are_refused_all_at_once(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainSettings(**(NEEDED | changes))


def test_a_config_without_the_needed_three_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size.*block_size"):
        TrainSettings.of({"dataset": "d"})
