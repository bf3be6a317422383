"""What people see of a run: a display on a terminal, plain lines anywhere else, and samples at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

from penstock.trainer.fields import Batch
from penstock.trainer.objectives import Objective

__all__ = ["Progress", "decoder", "sampled"]

_DRAW_SECONDS = 0.1
_MASK = "▁"
_SHOWN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class Pace(Protocol):
    def figures(self) -> dict[str, float]: ...


class Progress:
    """Speaks for rank 0; a context manager, since a display has to give the terminal back."""

    def __init__(self, console: Console | None, max_iters: int) -> None:
        self._console, self._max_iters = console, max_iters
        self._last: Mapping[str, Any] = {}
        self._drawn_at = 0.0
        drawn = console is not None and console.is_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if drawn else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str | Text) -> None:
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def record(self, record: Mapping[str, Any]) -> None:
        """A line of the log; on a terminal those of training are drawn instead."""
        if record["kind"] == "train":
            self._last = record
        if record["kind"] == "val" or self._live is None:
            self.say(_line(record, self._max_iters))

    def step(self, step: int, pace: Pace) -> None:
        """Called after every step, drawn ten times a second."""
        if self._live is None or time.monotonic() - self._drawn_at < _DRAW_SECONDS:
            return
        self._drawn_at = time.monotonic()
        row = Table.grid(padding=(0, 2))
        shown = {
            "loss": None,
            "accuracy": None,
            "lr": None,
            **self._last,
            **pace.figures(),
            "kind": "train",
            "step": step,
        }
        row.add_row(ProgressBar(self._max_iters, step, width=30), Text(_line(shown, self._max_iters)))
        self._live.update(row, refresh=True)

    def samples(self, meta: Mapping[str, Any], objective: Objective, sample: Mapping[str, Tensor]) -> None:
        """What the model made of these rows, if it fills in masks and the metadata says how to spell tokens."""
        spell = decoder(meta)
        if spell is None or objective.causal or objective.per_sample:
            return
        for row in zip(*(sample[name].tolist() for name in ("x", "y", "asked", "guessed"))):
            self.say("")
            for line in _filled(spell, *row):
                self.say(line)


def sampled(objective: Objective, batch: Batch, logits: Tensor, *, most: int) -> dict[str, Tensor]:
    """The first rows of a batch, which of their targets count, and what the model takes them for; on the CPU."""
    found = {"x": batch.x, "y": batch.y, "asked": objective.weights(batch) > 0, "guessed": logits.argmax(dim=-1)}
    return {name: each[:most].cpu().clone() for name, each in found.items()}


def decoder(meta: Mapping[str, Any]) -> Callable[[int], str] | None:
    """How to spell a token, from `itos` or `chars`; the mask, and what has no spelling, as one sign."""
    table = meta.get("itos") or meta.get("chars")
    if isinstance(table, Mapping):
        table = {int(key): str(value) for key, value in table.items()}
    elif isinstance(table, Sequence):
        table = dict(enumerate(map(str, table)))
    else:
        return None
    spelled: dict[int, str] = table | {meta.get("mask_token_id", -1): _MASK}
    return lambda token: _SHOWN.get(spelled.get(token, _MASK), spelled.get(token, _MASK))


def _filled(
    spell: Callable[[int], str], given: list[int], wanted: list[int], asked: list[bool], guessed: list[int]
) -> list[Text]:
    """Three lines: as the model saw it, as it filled it in (wrong ones marked), as it was."""
    seen, answer, truth = Text("given   "), Text("filled  "), Text("was     ")
    for x, y, counts, guess in zip(given, wanted, asked, guessed):
        seen.append(spell(x))
        truth.append(spell(y) if counts else spell(x))
        answer.append(spell(guess) if counts else spell(x), ("green" if guess == y else "bold red") if counts else "")
    return [seen, answer, truth]


def _line(record: Mapping[str, Any], most: int) -> str:
    parts = [f"{record['kind']:5} {record['step']:>{len(str(most))}}/{most}"]
    for name, shown in (("loss", ".4f"), ("accuracy", ".1%"), ("lr", ".2e")):
        if record.get(name) is not None:
            parts.append(f"{name} {record[name]:{shown}}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{record['waiting']:.0%} waiting for data")
    return "  ".join(parts)
