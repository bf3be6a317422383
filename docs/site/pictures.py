"""Pictures of docs/pictures.md, drawn from a real plan, a real budget and the names of a real queue.

python docs/site/pictures.py            writes docs/pictures/*.svg
python docs/site/pictures.py --check    fails if one of them is not current
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drawing import Drawing

from penstock.arrays.truncation import Truncation
from penstock.fsqueue import DataProviderBase, DatasetConsumer, QueueOptions
from penstock.memory import MemoryBudget
from penstock.order import Plan, PlanSource, Schedule
from penstock.order.sample_orders import PackedOrder, RowOrder

FOLDER = Path(__file__).parents[1] / "pictures"
LENGTHS = {"web": [5, 3, 8, 2, 6, 4, 7, 3, 2, 5, 4, 6], "code": [6, 4, 2, 8, 3, 5]}
SAMPLE_TOKENS, WINDOW_ROWS, GLOBAL_BATCH, WEIGHTS = 9, 6, 4, {"web": 3, "code": 1}
KIND = {"web": "a", "code": "b"}


class LengthTable:
    """Rows that are nothing but their lengths, which is all that a plan reads."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = np.array(lengths, np.int64)
        self.rows, self.tokens = len(lengths), int(self._lengths.sum())

    def lengths(self, rows: Any, /) -> Any:
        return self._lengths[np.asarray(rows)]

    def find_tokens(self, positions: Any, /) -> tuple[Any, Any]:
        ends = self._lengths.cumsum()
        rows = np.searchsorted(ends, np.asarray(positions), side="right")
        return rows, np.asarray(positions) - (ends - self._lengths)[rows]


def orders() -> dict[str, PackedOrder]:
    """The order of each source: shuffled, then packed in windows."""
    truncation = Truncation(max_length=SAMPLE_TOKENS)
    return {
        name: PackedOrder(LengthTable(lengths), truncation, window_rows=WINDOW_ROWS, shuffle=True, seed=0, name=name)
        for name, lengths in LENGTHS.items()
    }


def order_picture() -> Drawing:
    """How order is made: permutation, packing, mixing, ranks."""
    picture = Drawing(
        960,
        560,
        "How order is made",
        "Rows of two sources are permuted, packed into samples of nine tokens in windows of six rows, mixed three to "
        "one into steps of four samples, and each step is cut for one, two or four ranks.",
    )
    unit, left = 9.0, 150
    tops = {"rows": 40, "permuted": 125, "packed": 210}
    labels = {
        "rows": ("1  rows", "as in the store"),
        "permuted": ("2  permutation", "keyed by seed, source, epoch"),
        "packed": ("3  packing", f"{SAMPLE_TOKENS} tokens, windows of {WINDOW_ROWS}"),
    }
    for key, (head, note) in labels.items():
        picture.text(8, tops[key] + 12, head, "bold")
        picture.text(8, tops[key] + 30, note.split(", ")[0], "soft")
        picture.text(8, tops[key] + 46, ", ".join(note.split(", ")[1:]), "soft")
    x0 = {"web": left + 0.0, "code": left + 530.0}
    for name, order in orders().items():
        lengths, kind = LENGTHS[name], KIND[name]
        picture.text(x0[name], 22, f"source {name!r}: {len(lengths)} rows, {sum(lengths)} tokens", "bold")
        permuted = RowOrder(order.table, Truncation(max_length=99), shuffle=True, seed=0, name=name)
        rows = permuted.plan_range(0, 0, len(lengths)).rows.tolist()
        for key, sequence in (("rows", list(range(len(lengths)))), ("permuted", rows)):
            x = x0[name]
            for place, row in enumerate(sequence):
                if key == "permuted" and place == WINDOW_ROWS:
                    x += 10
                row_box(picture, x, tops[key], row, lengths[row] * unit - 2, kind)
                x += lengths[row] * unit
        x = x0[name]
        for window in range(order.windows):
            for sample in parts_of(order.plan_window(0, window)):
                sample_box(picture, x, tops["packed"], sample, unit, kind)
                x += SAMPLE_TOKENS * unit / 1.35 + 6
            x += 8
    plan = Plan(
        tuple(PlanSource(name, order) for name, order in orders().items()),
        GLOBAL_BATCH,
        schedule=Schedule.constant(WEIGHTS),
    )
    mixed_rows(picture, plan, 330)
    return picture


def row_box(picture: Drawing, x: float, y: float, row: int, width: float, kind: str) -> None:
    """A row of a source, as wide as it is long."""
    picture.box(x, y, width, 26, kind, f"row {row}")
    picture.text(x + width / 2, y + 18, str(row), anchor="middle")


def sample_box(picture: Drawing, x: float, y: float, sample: list[tuple[int, int]], unit: float, kind: str) -> None:
    """A sample: its rows one behind the other in a frame of its capacity."""
    scale = unit / 1.35
    picture.box(x - 1, y - 3, SAMPLE_TOKENS * scale + 2, 32, "empty")
    for row, length in sample:
        row_box(picture, x, y, row, length * scale - 1, kind)
        x += length * scale


def parts_of(samples: Any) -> Iterator[list[tuple[int, int]]]:
    """(row, tokens) of the parts of each sample."""
    parts = list(zip(samples.rows.tolist(), samples.lengths.tolist()))
    for low, high in zip(samples.offsets[:-1].tolist(), samples.offsets[1:].tolist()):
        yield parts[low:high]


def mixed_rows(picture: Drawing, plan: Plan, top: int) -> None:
    """Two steps of a mixture, and their cuts for ranks."""
    left, width, scale = 150, 88, 9
    picture.text(8, top + 12, "4  mixing", "bold")
    picture.text(8, top + 30, "3 web : 1 code", "soft")
    picture.text(8, top + 46, "exact at every prefix", "soft")
    picture.arrow((left + 170, 262), (left + 170, top - 28))
    picture.arrow((left + 640, 262), (left + 640, top - 60), (left + 250, top - 60), (left + 250, top - 28))
    for number in range(2):
        step = plan.step(number)
        x = left + number * (GLOBAL_BATCH * width + 24.0)
        picture.text(x, top - 10, f"step {number}: the global batch of {GLOBAL_BATCH} samples", "soft")
        first = step.samples.offsets[:-1].tolist()
        for slot, sample in enumerate(parts_of(step.samples)):
            name = step.names[int(step.sources[first[slot]])]
            picture.box(x - 1, top - 3, SAMPLE_TOKENS * scale + 2, 32, "empty")
            at = x
            for row, length in sample:
                row_box(picture, at, top, row, length * scale - 1, KIND[name])
                at += length * scale
            x += width
        for line, ranks in enumerate((1, 2, 4)):
            y = top + 80 + line * 48
            if number == 0:
                picture.text(8, y + 17, "5  ranks" if line == 0 else "", "bold")
                picture.text(142, y + 17, f"{ranks} rank{'s' * (ranks > 1)}", "soft", "end")
            share = GLOBAL_BATCH // ranks
            begin = left + number * (GLOBAL_BATCH * width + 24.0)
            for rank in range(ranks):
                picture.box(begin + rank * share * width - 2, y, share * width - 4, 26, "plain")
                middle = begin + (rank + 0.5) * share * width - 4
                picture.text(middle, y + 17, f"rank {rank}", anchor="middle")
    picture.text(left, top + 218, "Down to line 4 nothing depends on ranks: a run resumes on any number.", "soft")


def budget_picture() -> Drawing:
    """How the budget flows: five batches through a budget with room for two and a half."""
    events, limit = budget_events()
    picture = Drawing(
        920,
        430,
        "How the budget flows",
        "A batch is reserved before it is read, for all its forms. The reservation shrinks when the raw bytes are gone "
        "and ends when the sink has the batch. A batch that does not fit is not read: the source waits.",
    )
    left, right, base, scale = 150, 900, 330, 2.4
    picture.text(8, 26, "bytes charged to the budget", "bold")
    picture.text(8, 44, "at each event", "soft")
    picture.line((left, base - limit * scale), (right, base - limit * scale), kind="mark")
    picture.text(right, base - limit * scale - 6, f"limit {limit} MiB", "soft", "end")
    picture.line((left, base), (right, base))
    column = (right - left) / len(events)
    for number, (what, charges) in enumerate(events):
        x, y = left + number * column, float(base)
        for owner, size in charges.items():
            y -= size * scale
            kind = "b" if "reserved" in owner else "a"
            picture.box(x + 6, y, column - 12, size * scale - 1, kind, f"{owner}: {size} MiB")
            picture.text(x + column / 2, y + size * scale / 2 + 5, owner.split()[0], anchor="middle")
        for line, words in enumerate(what.split("\n")):
            picture.text(x + column / 2, base + 18 + line * 15, words, "bold" if line == 0 else "soft", "middle")
    picture.box(left, 400, 14, 14, "b")
    picture.text(left + 20, 412, "reserved before reading: raw bytes, decoded batch, transformed batch")
    picture.box(left + 500, 400, 14, 14, "a")
    picture.text(left + 520, 412, "corrected to the real size")
    return picture


def budget_events() -> tuple[list[tuple[str, dict[str, int]]], int]:
    """Events of a small run and the charges after each, in MiB, as a real `MemoryBudget` admits them."""
    mib, budget = 1 << 20, MemoryBudget("100 MiB")
    events: list[tuple[str, dict[str, int]]] = []
    held: dict[str, Any] = {}

    def note(what: str) -> None:
        charges = {f"{name} {entry.owner}": entry.nbytes // mib for name, entry in held.items()}
        assert sum(charges.values()) * mib == budget.used <= budget.limit
        events.append((what, charges))

    def admit(name: str) -> bool:
        reservation = budget.try_reserve(40 * mib, owner="reserved")
        if reservation is not None:
            held[name] = reservation
        return reservation is not None

    def correct(name: str, size: int) -> None:
        held[name].release()
        held[name] = budget.charge(size * mib, owner="real")

    assert admit("A")
    note("A admitted\nthen read")
    assert admit("B")
    note("B admitted\nthen read")
    assert not admit("C")
    note("C waits\nnot read")
    correct("A", 18)
    note("A decoded\nraw bytes gone")
    assert admit("C")
    note("C admitted\nthen read")
    correct("B", 20)
    note("B decoded\nwaits for A")
    held.pop("A").release()
    note("A written\nreleased")
    held.pop("B").release()
    note("B written\nin order")
    return events, budget.limit // mib


class TinyProvider(DataProviderBase):
    """Provider whose files are the same in every run."""

    def build_meta(self) -> dict[str, Any]:
        field = {"dtype": "int64", "shape": [self.block_size]}
        schema = [{"name": "x", "role": "input", **field}, {"name": "y", "role": "target", **field}]
        return {"training_type": "CLM", "vocab_size": 10, "batch_schema": schema}

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        digits = rng.integers(10, size=(self.batch_size, self.block_size + 1))
        return {"x": digits[:, :-1], "y": digits[:, 1:]}


def queue_names() -> list[tuple[str, str]]:
    """What happens in a real queue directory, and the name of its first file after each event."""
    with tempfile.TemporaryDirectory() as folder:
        queue = Path(folder) / "queue"
        config = {"dataset": "tiny", "batch_size": 2, "block_size": 4, "seed": 1, "batches_per_file": 2}
        TinyProvider({**config, "queue_dir": str(queue), "split_proportions": {"train": 1.0}}).run(max_batches=4)

        def first() -> str:
            names = sorted(path.name for path in (queue / "train").glob("*.arrow*"))
            return plain(names[0]) if names else ""

        found = [("provider publishes: rename of the finished file", first())]
        with DatasetConsumer(queue, backend="numpy", options=QueueOptions(lease_seconds=30)) as consumer:
            consumer.get_batch("train")
            found.append(("consumer claims: of two that try, one finds it gone", first()))
        found.append(("consumer leaves after one batch: released from batch 1", first()))
        with DatasetConsumer(queue, backend="numpy") as consumer:
            for _ in range(2):
                consumer.get_batch("train")
            found.append(("another goes on: file 0 is deleted, file 1 claimed", first()))
        return found


def plain(name: str) -> str:
    """A name with the id of its owner replaced, since ids are drawn at random."""
    ready, claimed, _ = name.partition(".by-")
    return f"{ready}{claimed}<consumer>" if claimed else ready


def queue_picture() -> Drawing:
    """How the queue renames."""
    picture = Drawing(
        920,
        400,
        "How the queue renames",
        "A batch file is published, claimed, released and deleted. Each change of state is one rename within its "
        "directory, so every process sees the old name or the new one.",
    )
    parts = [("number", 0, 12), ("batches", 13, 15), ("next batch", 16, 18), ("expired leases", 19, 21)]
    parts.append(("checksum", 22, 38))
    names = queue_names()
    letter, left = 7.4, 300
    picture.text(8, 24, "what happens", "bold")
    picture.text(left, 24, "name of the first file in queue/train/", "bold")
    for line, (what, name) in enumerate(names):
        y = 62 + line * 72
        before, _, after = what.partition(": ")
        picture.text(8, y, before, "bold")
        picture.text(8, y + 18, after, "soft")
        kind = "b" if "<consumer>" in name else "a"
        picture.box(left - 8, y - 20, len(name) * letter + 16, 32, kind)
        picture.text(left, y + 1, name, "name")
        if line:
            picture.arrow((left - 30, y - 66), (left - 30, y - 6), (left - 10, y - 6))
    y = 62 + len(names) * 72 - 18
    picture.text(8, y + 10, "what the name holds", "bold")
    for number, (word, low, high) in enumerate(parts):
        x = left + number * 116
        picture.box(x - 8, y - 8, 150 if word == "checksum" else 110, 40, "plain")
        picture.text(x, y + 8, names[0][1][low:high], "name")
        picture.text(x, y + 25, word, "soft")
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "order": order_picture,
    "budget": budget_picture,
    "queue": queue_picture,
}


def main(arguments: list[str]) -> int:
    """Write the pictures, or compare them with their files."""
    stale = []
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw().svg()
        if "--check" not in arguments:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        sys.stderr.write(f"not current: {', '.join(stale)}; run python docs/site/pictures.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
