"""HTML report with three plots: losses, confusion matrix and lengths of texts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

BLUE, ORANGE = "#2563a8", "#c2541b"
WIDTH, HEIGHT, EDGE = 520, 260, 48
Points = Sequence[tuple[int, float]]


def report(
    path: Path, train: Any, val: Any, said: np.ndarray, losses: Sequence[float], validation: Points
) -> list[str]:
    """Print the quality of the predictions for `val`, and write the HTML report."""
    truth = val.labels()
    right, majority = val.score(val.class_of(said), "accuracy"), np.bincount(truth).max() / len(truth)
    facts = [
        f"validation accuracy {right:.3f}, {right - majority:.3f} above that of the majority class",
        f"log loss {val.score(said, 'log_loss'):.3f}, AUC {val.score(said, 'auc'):.3f}",
    ]
    confusion = np.zeros((2, 2), int)
    np.add.at(confusion, (truth, said.argmax(axis=1)), 1)
    write_page(path, facts, losses, validation, confusion, ["lost", "saved"], train.lengths)
    return facts


def write_page(
    path: Path,
    facts: Sequence[str],
    losses: Sequence[float],
    validation: Points,
    confusion: np.ndarray,
    classes: Sequence[str],
    lengths: np.ndarray,
) -> None:
    """Write the page; `validation` is (step, loss), `confusion[true, predicted]` counts."""
    said = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    pictures = [
        ("Loss", loss_curve(losses, validation)),
        ("Confusion matrix", confusion_matrix(confusion, classes)),
        ("Tokens per text", histogram(lengths)),
    ]
    figures = "".join(f"<figure><figcaption>{name}</figcaption>{picture}</figure>" for name, picture in pictures)
    style = "body{font:15px system-ui,sans-serif;margin:2em;max-width:1160px;color:#222}"
    style += "figure{display:inline-block;margin:1em 1em 0 0}figcaption{font-weight:600;margin-bottom:.4em}"
    style += "svg{background:#fafafa;border:1px solid #ddd}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Titanic</title><style>{style}</style>'
    path.write_text(f"{head}<h1>Titanic as text</h1><ul>{said}</ul>{figures}</html>\n", encoding="utf-8")


def loss_curve(losses: Sequence[float], validation: Points) -> str:
    """Training loss, smoothed over some steps, and the loss on the validation fold."""
    window = max(1, len(losses) // 40)
    smooth = np.convolve(losses, np.ones(window) / window, "valid") if losses else []
    train = [(step + window, loss) for step, loss in enumerate(smooth)]
    highest = max([loss for _, loss in (*train, *validation)] + [1e-9])
    body = axes(len(losses), highest, "step", "loss")
    for name, points, colour, place in (("training", train, BLUE, 0), ("validation", validation, ORANGE, 1)):
        line = " ".join("{:.1f},{:.1f}".format(*at(x / max(len(losses), 1), y / highest)) for x, y in points)
        body += f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        body += text(WIDTH - EDGE - 80, EDGE + 16 * place, name, colour)
    return svg(body)


def confusion_matrix(counts: np.ndarray, classes: Sequence[str]) -> str:
    """Confusion matrix: rows are true classes, columns predictions; darker cells hold more of their row."""
    side, body = (HEIGHT - 2 * EDGE) / len(classes), ""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for (row, column), count in np.ndenumerate(counts):
        x, y = 2.4 * EDGE + 1.6 * side * column, EDGE + side * row
        body += f'<rect x="{x:.1f}" y="{y:.1f}" width="{1.6 * side:.1f}" height="{side:.1f}" fill="{BLUE}"'
        body += f' fill-opacity="{0.08 + 0.8 * share[row, column]:.2f}" stroke="#fff"/>'
        colour = "#fff" if share[row, column] > 0.5 else "#222"
        body += text(x + 0.8 * side, y + side / 2 + 5, f"{count} ({share[row, column]:.0%})", colour, "middle")
    for number, name in enumerate(classes):
        body += text(2.4 * EDGE - 8, EDGE + side * (number + 0.5), f"is {name}", anchor="end")
        body += text(2.4 * EDGE + 1.6 * side * (number + 0.5), EDGE - 10, f"said {name}", anchor="middle")
    return svg(body)


def histogram(lengths: np.ndarray) -> str:
    """Histogram of the number of tokens of the texts."""
    counts, edges = np.histogram(lengths, bins=min(24, max(1, int(np.ptp(lengths)) + 1)))
    body = axes(edges[-1], counts.max(), "tokens", "texts", first=edges[0])
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        spread = max(edges[-1] - edges[0], 1e-9)
        (x, y), (end, floor) = at((left - edges[0]) / spread, count / counts.max()), at((right - edges[0]) / spread, 0)
        body += f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(end - x - 1, 0.5):.1f}"'
        body += f' height="{floor - y:.1f}" fill="{BLUE}"/>'
    return svg(body)


def at(x: float, y: float) -> tuple[float, float]:
    """Pixel position of a point given in fractions of the axes."""
    return EDGE + x * (WIDTH - 1.5 * EDGE), HEIGHT - EDGE - y * (HEIGHT - 1.6 * EDGE)


def axes(right: float, top: float, x_label: str, y_label: str, *, first: float = 0) -> str:
    """Axes with the numbers at their ends."""
    (x, y), (end, high) = at(0, 0), at(1, 1)
    lines = f'<path d="M{x:.1f} {high:.1f}V{y:.1f}H{end:.1f}" fill="none" stroke="#888"/>'
    ends = text(x, y + 16, f"{first:.4g}") + text(end, y + 16, f"{right:.4g}", anchor="end")
    ends += text((x + end) / 2, y + 32, x_label, anchor="middle") + text(x - 6, high + 4, f"{top:.3g}", anchor="end")
    return lines + ends + text(x - 6, y, "0", anchor="end") + text(x, high - 10, y_label)


def text(x: float, y: float, said: str, colour: str = "#555", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{colour}" text-anchor="{anchor}">{escape(said)}</text>'


def svg(body: str) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img">{body}</svg>'
