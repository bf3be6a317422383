"""What people see: a display on a terminal, lines anywhere else, tokens spelt out."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from rich.console import Console

from penstock.trainer.fields import Batch
from penstock.trainer.figures import Pace
from penstock.trainer.objectives import Objective
from penstock.trainer.progress import Progress, decoder, sampled

TRAIN = {
    "kind": "train",
    "step": 5,
    "loss": 1.25,
    "accuracy": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 1e4,
    "waiting": 0.1,
}
VAL = {"kind": "val", "step": 5, "loss": 1.5, "accuracy": 0.25, "commonest": 0.2}
META = {"training_type": "MLM", "vocab_size": 4, "mask_token_id": 3, "ignore_index": -1}


def shown(*, terminal: bool) -> str:
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=terminal, width=150), 10) as progress:
        progress.record(TRAIN)
        progress.record(VAL)
        progress.step(6, Pace())
    return screen.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    assert shown(terminal=False).splitlines() == [
        "train  5/10  loss 1.2500  accuracy 50.0%  lr 1.00e-03  10,000 tokens/s  10% waiting for data",
        "val    5/10  loss 1.5000  accuracy 25.0%",
    ]


def test_a_terminal_shows_the_last_figures_under_a_bar_and_evaluations_above_it() -> None:
    drawn = shown(terminal=True)
    assert "val    5/10  loss 1.5000" in drawn
    assert "train  6/10  loss 1.2500" in drawn
    assert "train  5/10" not in drawn
    assert drawn.index("\x1b[?25l") < drawn.rindex("\x1b[?25h"), "the cursor comes back"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(None, 10) as progress:
        progress.record(TRAIN)
        progress.step(6, Pace())
        progress.say("word")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("table", [["a", "\n", "c", "_"], "a\nc_", {"0": "a", "1": "\n", "2": "c", "3": "_"}])
@pytest.mark.parametrize("key", ["itos", "chars"])
def test_tokens_are_spelt_from_a_list_a_text_or_a_dict(table: Any, key: str) -> None:
    spell = decoder(META | {key: table})
    assert spell is not None
    assert [spell(token) for token in (0, 1, 2, 3, 99)] == ["a", "⏎", "c", "▁", "▁"]


def test_without_a_table_nothing_is_spelt() -> None:
    assert decoder(META) is None


def test_samples_show_what_was_given_what_was_filled_in_and_what_was_there() -> None:
    screen, objective = io.StringIO(), Objective.of(META)
    batch = Batch(torch.tensor([[0, 3, 3], [2, 2, 2]]), torch.tensor([[-1, 1, 2], [-1, -1, 2]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 1, 0], [0, 0, 2]]), 4).float()
    progress = Progress(Console(file=screen, width=80), 10)
    progress.samples(META | {"chars": "abc_"}, objective, sampled(objective, batch, logits, most=1))
    assert screen.getvalue().split("\n")[1:4] == ["given   a▁▁", "filled  aba", "was     abc"]
    assert "given   ccc" not in screen.getvalue()
