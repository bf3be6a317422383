"""What is said before and after a run, and the page with its curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.trainer.checkpoints import LAST, Checkpoint
from penstock.trainer.curve import Curve, draw_page
from penstock.trainer.fields import Fields
from penstock.trainer.objectives import Objective
from penstock.trainer.settings import TrainSettings

__all__ = ["how_it_starts", "page_of", "queue_has_begun", "summary_of", "what_is_trained"]


def what_is_trained(settings: TrainSettings, objective: Objective, fields: Fields, *, weights: int) -> list[str]:
    """The data, the objective, the size of the model, and which arrays of a batch nobody uses."""
    said = f"{settings.dataset}: {objective.training_type} over {objective.answers:,} answers, {weights:,} weights"
    unused = [f"{name} (role {fields.slips[name]})" if name in fields.slips else name for name in fields.unused]
    return [said, *([f"not used in training: {', '.join(unused)}"] if unused else [])]


def how_it_starts(
    saved: Checkpoint | None, settings: TrainSettings, plain_settings: Mapping[str, Any], *, world_size: int
) -> list[str]:
    """Anew, or from which checkpoint, and what is not as it was there."""
    path = settings.out_dir / LAST
    if saved is None:
        replaced = not settings.resume and path.exists()
        return (
            [f"starting anew (resume=False); the checkpoint in {path.parent} will be replaced"]
            if replaced
            else ["starting anew"]
        )
    if saved.step >= settings.max_iters:
        reached = f"max_iters={settings.max_iters} is reached in {path}, which is of step {saved.step:,}"
        return [f"nothing left to do: {reached}; a larger max_iters goes on, --resume=False starts anew"]
    said = [f"going on at step {saved.step:,} from {path} (--resume=False starts anew)"]
    said += [f"another setting than in the checkpoint: {change}" for change in saved.changed(plain_settings)]
    if saved.world_size != world_size:
        said.append(
            f"the checkpoint is of {saved.world_size} ranks, this run has {world_size}: no batch is lost or repeated, "
            f"but the weights will not be bit for bit those of an unbroken run"
        )
    return said


def queue_has_begun(queue_dir: Path, position: int) -> list[str]:
    """For a run that starts anew on a queue that another one has read from."""
    return [
        f"the queue goes on at batch {position:,} of 'train', where another run was; "
        f"`penstock queue purge {queue_dir}` and prepare.py again give the batches of a first run"
    ]


def summary_of(curve: Curve, objective: Objective, out_dir: Path) -> list[str]:
    """How far it came, against guessing, and where the files are."""
    train, val = curve.last("train"), curve.last("val")
    lines = []
    if train is not None:
        started = next(each for each in curve.records if each["kind"] == "train")
        first = f", {started['loss']:.4f} at step {started['step']:,}" if started is not train else ""
        lines.append(f"loss on train: {train['loss']:.4f} at step {train['step']:,}{first}")
    if val is not None:
        what = "samples" if objective.per_sample else "next tokens" if objective.causal else "masked tokens"
        lines += [
            f"loss on val: {val['loss']:.4f} at step {val['step']:,}; {val['accuracy']:.1%} of {what} right",
            f"    {1 / objective.answers:.1%} would be one of {objective.answers:,} at random, "
            f"{val['commonest']:.1%} always the commonest",
        ]
    if not (out_dir / LAST).exists():
        return [*lines, "no step was made, so there is no checkpoint"]
    return [*lines, f"checkpoint: {out_dir / LAST}; curve: {out_dir / 'curve.html'}"]


def page_of(curve: Curve, objective: Objective, plain_settings: Mapping[str, Any], *, step: int) -> str:
    """The curves with what guessing would reach, and the settings below them."""
    levels = {"one of all": 1 / objective.answers}
    val = curve.last("val")
    if val is not None:
        levels["always the commonest"] = val["commonest"]
    known = {name: value for name, value in plain_settings.items() if value is not None}
    facts = {"steps": step, "objective": objective.training_type, **known}
    return draw_page(curve, title=f"{plain_settings['dataset']}: {step:,} steps", facts=facts, levels=levels)
