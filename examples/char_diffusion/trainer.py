"""Training loop: step, evaluate, save, and resume exactly.

A step is a pure function of the weights, the optimizer, the random state and the next batch of the queue. A checkpoint
holds the first three and the number of the fourth. So a run that was killed ends with the weights of one that was not,
bit for bit, on CPUs with the same number of ranks and threads and the same torch. With another number of ranks no batch
is lost or repeated; on CUDA the order of additions may differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from char_diffusion import checkpoint
from char_diffusion.model import ModelSizes, Transformer, parameter_groups
from char_diffusion.objective import Batch, BatchFields, Objective
from char_diffusion.ranks import RankGroup, StopSignals, WaitInterruptedError
from char_diffusion.report import Report
from penstock.config import SharedConfig
from penstock.config.settings import TRAIN, thaw
from penstock.errors import ConfigError, DataError, PenstockError, ResumeError
from penstock.files.filesystems import require_local
from penstock.fsqueue import DatasetConsumer

__all__ = ["Trainer", "learning_rate"]

_SUMS = ("loss", "weight", "correct", "counted")
_TOTALS = (*_SUMS, "tokens", "waited", "stop", "ended")
"""Numbers that the ranks add up in every step: sums, seconds of waiting, and whether one of them cannot continue."""
_SAMPLES = 3


class Trainer:
    """One run, on one rank. All ranks do the same things in the same order."""

    def __init__(self, config: SharedConfig, consumer: DatasetConsumer, ranks: RankGroup, signals: StopSignals) -> None:
        self.config, self.consumer, self.ranks, self.signals = config, consumer, ranks, signals
        self.objective = Objective.from_meta(consumer.meta)
        per_sample = self.objective.per_sample
        self.fields = BatchFields.from_schema(
            consumer.schema("train") or [], block_size=config["block_size"], per_sample=per_sample
        )
        self.sizes = ModelSizes(
            tokens=self.objective.tokens,
            causal=self.objective.causal,
            classes=self.objective.answers if per_sample else None,
            **{name: config[name] for name in ("block_size", "n_layer", "n_head", "n_embd")},
        )
        self.settings = {name: thaw(config[name]) for name in ("dataset", "batch_size", "seed", *TRAIN)}
        self.settings = {name: str(v) if isinstance(v, Path) else v for name, v in self.settings.items()}
        self.settings["device"] = ranks.device.type
        self.out_dir = require_local(config["out_dir"] or Path("out") / config["dataset"], "out_dir")
        self.report = Report(self.out_dir, config["max_iters"], writes=ranks.rank == 0)
        self.step = 0
        self.best_loss: float | None = None
        self.sample: dict[str, Tensor] | None = None
        self._window = dict.fromkeys(_SUMS, 0.0)
        self._saved_step: int | None = None
        self._error: Exception | None = None
        self._train_ended = self._val_ended = False

    def run(self) -> bool:
        """Train until `max_iters`. Returns False if a signal, or the end of the queue, came first; always saves."""
        self._set_up()
        complete = self._train()
        if self.step and self._saved_step != self.step:
            try:
                self._save(best=False)
            except (PenstockError, OSError):
                if self._error is None:
                    raise
        if self._error is not None:
            raise self._error
        self._conclude(complete)
        return complete

    def _train(self) -> bool:
        max_iters = self.config["max_iters"]
        save_interval = self.config["checkpoint_interval"] or self.config["eval_interval"]
        while True:
            if self._evaluation_is_due() and not self._evaluate():
                return False
            if self.step and self._saved_step != self.step and self.step % save_interval == 0:
                self._save(best=False)
            if self.step >= max_iters:
                return True
            if not self._advance():
                return False

    # -- start -------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        if self.ranks.device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        saved = self._find_checkpoint()
        torch.manual_seed(self.config["seed"])
        self.model = Transformer(self.sizes, dropout=self.config["dropout"]).to(self.ranks.device)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
        self.parallel = self.ranks.wrap(self.model)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, self.config["weight_decay"]),
            lr=self.config["learning_rate"],
            betas=(self.config["beta1"], self.config["beta2"]),
            fused=self.ranks.device.type == "cuda",
        )
        if self.ranks.world_size > 1:
            self._warm_up()
        self.ranks.seed(self.config["seed"], step=0 if saved is None else saved["step"])
        self._introduce(saved)
        if saved is not None:
            self._restore(saved)
        self._mark()
        self.report.start([] if saved is None else saved["records"])
        self._reset_pace()

    def _find_checkpoint(self) -> dict[str, Any] | None:
        saved = checkpoint.load(self.out_dir / checkpoint.LAST) if self.config["resume"] else None
        steps = [int(each) for each in self.ranks.gather(torch.tensor([-1 if saved is None else saved["step"]]))]
        if len(set(steps)) > 1:
            raise ResumeError(
                f"the ranks found checkpoints of different steps in {self.out_dir}: {steps} (-1: none); out_dir must "
                "be a directory that all ranks share"
            )
        if saved is not None:
            checkpoint.refuse_misfit(saved, asdict(self.sizes), self.settings, dict(self.consumer.meta))
        return saved

    def _restore(self, saved: Mapping[str, Any]) -> None:
        groups = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, values in zip(self.optimizer.param_groups, groups):
            group.update(values)
        if saved["world_size"] == self.ranks.world_size and saved["settings"]["device"] == self.settings["device"]:
            self.ranks.set_random_state(saved["random"][self.ranks.rank])
        self.consumer.load_state_dict(saved["queue"])
        self.step = self._saved_step = saved["step"]
        self._window, self.best_loss, self.sample = dict(saved["window"]), saved["best_loss"], saved["sample"]

    def _warm_up(self) -> None:
        """Run a step without effect: DDP reorders its buckets after the first step, and rounding follows that order."""
        (length,) = next(each["shape"] for each in self.consumer.schema("train") or [] if each["name"] == self.fields.x)
        zeros = torch.zeros(1, length, dtype=torch.long, device=self.ranks.device)
        self.parallel(zeros, None if self.fields.mask is None else zeros == 0).float().square().mean().backward()
        self.optimizer.zero_grad(set_to_none=True)

    # -- step --------------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """One step of all ranks; False, and no rank has moved, if one of them cannot continue."""
        batch, numbers = self._next("train")
        sums = None
        if batch is not None:
            self.parallel.train()
            sums = self._measure(self.parallel, batch)[0]
            numbers |= zip(_SUMS, sums.tolist())
        totals = self._total(numbers)
        self._train_ended |= totals["ended"] > 0
        if totals["stop"] or sums is None or self._train_ended:
            return False
        if not math.isfinite(loss := _ratio(totals["loss"], totals["weight"])):
            raise self._diverged(f"the loss is {loss}")
        rate = learning_rate(self.step, self.config)
        # DDP averages over ranks; the loss is the mean over all targets.
        (sums[0] * (self.ranks.world_size / (totals["weight"] or 1.0))).backward()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config["grad_clip"] or math.inf))
        if not math.isfinite(norm):
            raise self._diverged(f"the norm of the gradient is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._mark()
        self._record_step(totals, rate)
        return True

    def _measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.ranks.autocast():
            logits = model(batch.x, batch.mask)
        return self.objective.measure(logits, batch), logits

    def _next(self, split: str) -> tuple[Batch | None, dict[str, float]]:
        """The next batch of this rank and its numbers; None after an error, a signal or the end of the split."""
        numbers, started, batch = dict.fromkeys(_TOTALS, 0.0), time.perf_counter(), None
        try:
            with self.signals.interruptible():
                batch = self.fields.read(self.consumer.get_batch(split))
            self._check(batch)
        except WaitInterruptedError:
            pass
        except StopIteration:
            return None, numbers | {"ended": 1.0}
        except (PenstockError, OSError) as error:
            self._error, batch = error, None
        numbers["waited"] = time.perf_counter() - started
        numbers["stop"] = float(batch is None or self.signals.requested)
        numbers["tokens"] = 0.0 if batch is None else float(batch.x.numel())
        return batch, numbers

    def _check(self, batch: Batch) -> None:
        if len(batch.x) != self.config["batch_size"]:
            raise ConfigError(
                f"batches of the queue have {len(batch.x)} rows, the config has batch_size="
                f"{self.config['batch_size']}; use the config of the queue, or purge it and prepare it again"
            )
        if self.ranks.device.type == "cpu" or self.step == (self._saved_step or 0):
            self.objective.check(batch)  # on a GPU it waits for all queued work: only at the start

    def _total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return dict(zip(_TOTALS, self.ranks.total([numbers[name] for name in _TOTALS])))

    def _diverged(self, what: str) -> DataError:
        return DataError(
            f"{what} at step {self.step}; the last checkpoint is of step {self._saved_step}; lower learning_rate (now "
            f"{self.config['learning_rate']}), set grad_clip, or look for bad batches"
        )

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluation_is_due(self) -> bool:
        last = self.report.last("val")
        if not self.config["eval_iters"] or self._val_ended or (last is not None and last["step"] == self.step):
            return False
        return self.step % self.config["eval_interval"] == 0 or self.step >= self.config["max_iters"]

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Mean over `eval_iters` batches per rank; False if it was interrupted, and then it is repeated."""
        self.model.eval()
        numbers, last = dict.fromkeys(_TOTALS, 0.0), None
        histogram = torch.zeros(self.objective.answers, dtype=torch.long, device=self.ranks.device)
        for _ in range(self.config["eval_iters"]):
            batch, more = self._next("val")
            if batch is not None:
                sums, logits = self._measure(self.model, batch)
                more |= zip(_SUMS, sums.tolist())
                histogram += self.objective.histogram(batch)
                last = (batch, logits)
            numbers = {name: numbers[name] + more[name] for name in _TOTALS}
            if more["stop"] or more["ended"]:
                break
        totals = self._total(numbers)
        if totals["stop"]:
            return False
        if totals["ended"]:
            self._val_ended = True
            self.report.print("split 'val' of the queue has ended: this is its last evaluation")
        commonest = float(torch.stack(self.ranks.gather(histogram)).sum(dim=0).max())
        self._mark()
        if last is not None:
            batch, logits = last
            found = {"x": batch.x, "y": batch.y, "masked": self.objective.weights(batch) > 0}
            found["predicted"] = logits.argmax(dim=-1)
            self.sample = {name: each[:_SAMPLES].cpu().clone() for name, each in found.items()}
        if totals["counted"]:
            commonest = _ratio(commonest, totals["counted"])
            record = {"kind": "val", "step": self.step, **_means(totals), "commonest": commonest}
            self.report.add(record)
            if self.step and (self.best_loss is None or record["loss"] < self.best_loss):
                self.best_loss = record["loss"]
                self._save(best=True)
            self._reset_pace()
        return True

    # -- records and files -------------------------------------------------------------------------------------------

    def _record_step(self, totals: Mapping[str, float], rate: float) -> None:
        self._window = {name: self._window[name] + totals[name] for name in _SUMS}
        self._tokens += totals["tokens"]
        self._waited += totals["waited"] / self.ranks.world_size
        if self.step % self.config["log_interval"] and self.step < self.config["max_iters"]:
            return
        seconds = max(time.perf_counter() - self._started, 1e-9)
        pace = {"tokens_per_second": self._tokens / seconds, "waiting": min(1.0, self._waited / seconds)}
        self.report.add({"kind": "train", "step": self.step, **_means(self._window), "lr": rate, **pace})
        self._window = dict.fromkeys(_SUMS, 0.0)
        self._reset_pace()

    def _reset_pace(self) -> None:
        self._started, self._tokens, self._waited = time.perf_counter(), 0.0, 0.0

    def _mark(self) -> None:
        """Remember the queue position and the random state of the last complete step or evaluation."""
        self._queue_state, self._random_state = self.consumer.state_dict(), self.ranks.random_state()

    def _save(self, *, best: bool) -> None:
        """Write the checkpoint; only then commit the queue, which deletes the batches before it."""
        error, random = None, self.ranks.gather(self._random_state)
        if self.ranks.rank == 0:
            state = {
                "step": self.step,
                "world_size": self.ranks.world_size,
                "sizes": asdict(self.sizes),
                "settings": self.settings,
                "meta": dict(self.consumer.meta),
                "queue": self._queue_state,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": random,
                "records": self.report.records,
                "window": self._window,
                "best_loss": self.best_loss,
                "sample": self.sample,
            }
            try:
                checkpoint.save(self.out_dir, state, best=best)
                self.report.draw(f"{self.config['dataset']}: {self.step:,} steps", self.settings)
            except OSError as raised:
                error = raised
        if self.ranks.total([float(error is not None)])[0]:
            raise error or PenstockError("rank 0 could not write the checkpoint")
        self.consumer.commit(self._queue_state)
        self._saved_step = self.step

    def _introduce(self, saved: Mapping[str, Any] | None) -> None:
        count, world_size = sum(each.numel() for each in self.model.parameters()), self.ranks.world_size
        say = self.report.print
        say(
            f"{self.config['dataset']}: {self.objective.training_type}, {count:,} parameters on {self.ranks.device}, "
            f"{world_size} rank{'s' * (world_size > 1)}"
        )
        if self.fields.unused:
            say(f"arrays not used in training: {', '.join(self.fields.unused)}")
        if saved is None:
            replaced = (self.out_dir / checkpoint.LAST).exists()
            say("new run" + (f" (resume=False); replaces the checkpoint in {self.out_dir}" if replaced else ""))
            self.consumer.counts("train")  # opens the split
            if self.ranks.rank == 0 and (position := self.consumer.state_dict()["splits"]["train"]["position"]):
                say(
                    f"the queue continues at batch {position:,} of 'train'; `penstock queue purge "
                    f"{self.consumer.queue_dir}` and prepare.py start it again"
                )
            return
        if saved["step"] >= self.config["max_iters"]:
            say(f"nothing left to do: max_iters={self.config['max_iters']} is reached in {self.out_dir}; raise it")
            return
        say(f"resuming at step {saved['step']:,} from {self.out_dir} (--resume=False starts a new run)")
        for change in checkpoint.changed_settings(saved, self.settings):
            say(f"changed since the checkpoint: {change}")
        if saved["world_size"] != world_size:
            say(f"the checkpoint is of {saved['world_size']} ranks: the same batches, but not bit for bit the same run")

    def _conclude(self, complete: bool) -> None:
        if self._train_ended:
            self.report.print(f"the queue ended after step {self.step:,}; prepare more, then run the same command")
        elif not complete:
            self.report.print(f"stopped at step {self.step:,}; the same command resumes there")
        skipped = sum(self.consumer.counts(split).skipped for split in self.consumer.state_dict()["splits"])
        if total := int(self.ranks.total([skipped])[0]):
            self.report.print(f"{total:,} batches of unreadable files were skipped (on_error='skip')")
        self.report.summarize(self.objective)
        if self.sample is not None and complete:
            self.report.show_samples(self.consumer.meta, self.objective, self.sample)


def learning_rate(step: int, config: Mapping[str, Any]) -> float:
    """Learning rate of a step: linear warm-up, then a cosine down to `min_lr`."""
    highest = config["learning_rate"]
    lowest = highest / 10 if config["min_lr"] is None else config["min_lr"]
    warmup, end = config["warmup_iters"], config["lr_decay_iters"] or config["max_iters"]
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    share = min(1.0, (step - warmup) / max(1, end - warmup))
    return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * share))


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    return {"loss": _ratio(sums["loss"], sums["weight"]), "accuracy": _ratio(sums["correct"], sums["counted"])}


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
