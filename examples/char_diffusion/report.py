"""Report of a run: printed lines, samples, `log.jsonl` and `curve.html`. Only rank 0 has one that writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from char_diffusion.objective import Objective
from penstock.files.atomic import write_atomic

__all__ = ["Report"]

_WIDTH, _HEIGHT = 860, 300
_COLOURS = {"train": "#2563a8", "val": "#c2541b"}
_MASK = "▁"
_ESCAPES = {"\n": "⏎", "\t": "⇥", "\r": "␍"}

Record = dict[str, Any]


class Report:
    """Records `{"kind": "train" | "val", "step": ..., "loss": ..., ...}` in order, and the files made of them."""

    def __init__(self, out_dir: Path, max_iters: int, *, writes: bool) -> None:
        self.out_dir, self.max_iters, self.writes = out_dir, max_iters, writes
        self.records: list[Record] = []

    def start(self, records: Sequence[Record]) -> None:
        """Begin with the records of a checkpoint: after a kill `log.jsonl` may hold more."""
        self.records = list(records)
        if self.writes:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            for unfinished in self.out_dir.glob(".*.tmp"):  # of a run that was killed while writing
                unfinished.unlink(missing_ok=True)
            write_atomic(self._log, b"".join(orjson.dumps(each) + b"\n" for each in self.records))

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.print(_line(record, self.max_iters))
        if self.writes:
            with self._log.open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")

    def print(self, line: str = "") -> None:
        if self.writes:
            print(line, flush=True)

    def last(self, kind: str) -> Record | None:
        return next((each for each in reversed(self.records) if each["kind"] == kind), None)

    def summarize(self, objective: Objective) -> None:
        """Print the first and last losses, and the accuracy against guessing."""
        if (train := self.last("train")) is not None:
            first = next(each for each in self.records if each["kind"] == "train")
            self.print(
                f"loss on train: {train['loss']:.4f} at step {train['step']:,}, "
                f"{first['loss']:.4f} at step {first['step']:,}"
            )
        if (val := self.last("val")) is not None:
            what = "classes" if objective.per_sample else "next tokens" if objective.causal else "masked tokens"
            self.print(
                f"loss on val: {val['loss']:.4f} at step {val['step']:,}; {val['accuracy']:.1%} of {what} right "
                f"({1 / objective.answers:.1%} at random, {val['commonest']:.1%} always the commonest)"
            )
        self.print(f"checkpoint and curve: {self.out_dir}")

    def show_samples(self, meta: Mapping[str, Any], objective: Objective, sample: Mapping[str, Tensor]) -> None:
        """Print rows with their masks filled in, if that is the objective and the metadata spells the tokens."""
        table = meta.get("itos") or meta.get("chars")
        if table is None or objective.causal or objective.per_sample:
            return
        spelling = dict(table if isinstance(table, Mapping) else enumerate(table))
        spelling = {int(token): _ESCAPES.get(text, text) for token, text in spelling.items()}
        spelling[meta.get("mask_token_id")] = _MASK
        for row in zip(*(sample[name].tolist() for name in ("x", "y", "masked", "predicted"))):
            given, target, predicted = (
                "".join(spelling.get(token, _MASK) for token in tokens)
                for tokens in (
                    row[0],
                    [y if masked else x for x, y, masked, _ in zip(*row)],
                    [p if masked else x for x, _, masked, p in zip(*row)],
                )
            )
            self.print(f"\ngiven   {given}\nfilled  {predicted}\ntarget  {target}")

    def draw(self, title: str, settings: Mapping[str, Any]) -> None:
        """Write `curve.html`: loss and accuracy over the steps, and the settings of the run."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(v))}</td></tr>" for name, v in settings.items())
        legend = "".join(f'<span style="color:{colour}">&#9632; {kind}</span> ' for kind, colour in _COLOURS.items())
        page = (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title></head>\n'
            f'<body style="font-family:sans-serif;max-width:900px;margin:2em auto"><h1>{escape(title)}</h1>'
            f"<p>{legend}</p>\n{self._chart('loss')}{self._chart('accuracy')}<table>{rows}</table></body></html>\n"
        )
        write_atomic(self.out_dir / "curve.html", page.encode())

    def _chart(self, name: str) -> str:
        series = {
            kind: [(each["step"], each[name]) for each in self.records if each["kind"] == kind] for kind in _COLOURS
        }
        points = [point for line in series.values() for point in line if math.isfinite(point[1])]
        if not points:
            return f"<h2>{name}</h2><p>no records yet</p>"
        steps, values = zip(*points)
        low, high, end = min(values), max(values), max(steps) or 1
        span = (high - low) or 1.0
        lines = "".join(
            f'<polyline fill="none" stroke="{_COLOURS[kind]}" stroke-width="1.8" points="'
            + " ".join(f"{step / end * _WIDTH:.1f},{(high - value) / span * _HEIGHT:.1f}" for step, value in line)
            + '"/>'
            for kind, line in series.items()
            if line
        )
        return (
            f"<h2>{name}, {low:.4g} to {high:.4g}, over {end:,} steps</h2>"
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {_WIDTH + 8} {_HEIGHT + 8}">{lines}</svg>\n'
        )

    @property
    def _log(self) -> Path:
        return self.out_dir / "log.jsonl"


def _line(record: Record, max_iters: int) -> str:
    parts = [f"{record['kind']:5} {record['step']:>{len(str(max_iters))}}/{max_iters}"]
    parts += [f"loss {record['loss']:.4f}", f"accuracy {record['accuracy']:.1%}"]
    if record["kind"] == "train":
        parts += [f"lr {record['lr']:.2e}", f"{record['tokens_per_second']:,.0f} tokens/s"]
        parts.append(f"{record['waiting']:.0%} waiting for data")
    return "  ".join(parts)
