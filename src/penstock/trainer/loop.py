"""Step, evaluate, save; and go on exactly where a run was saved.

A step is a pure function of the weights, the optimizer, the generator and the next batch of the queue, and a
checkpoint holds the first three and the number of the fourth. So a run that was killed anywhere ends with the weights
of one that was not, bit for bit: on CPUs, with the same number of ranks and threads and the same torch. On other
numbers of ranks it goes on without losing or repeating a batch, and on CUDA up to the order in which it adds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, DataError, PenstockError, ResumeError
from penstock.files.atomic import write_atomic
from penstock.trainer.checkpoints import Checkpoint, Checkpoints, meta_fingerprint, plain
from penstock.trainer.curve import Curve
from penstock.trainer.feeding import Consumer, position_of, skipped_by
from penstock.trainer.fields import Batch, Fields
from penstock.trainer.figures import EMPTY, KEPT, Pace, mean, means, numbers
from penstock.trainer.model import ModelSizes, Transformer, parameter_groups
from penstock.trainer.objectives import Measured, Objective
from penstock.trainer.progress import Progress, sampled
from penstock.trainer.settings import TrainSettings, learning_rate_at
from penstock.trainer.stopping import Stopping, WaitInterruptedError
from penstock.trainer.telling import how_it_starts, page_of, queue_has_begun, summary_of, what_is_trained
from penstock.trainer.world import World

__all__ = ["Trainer"]

_SAMPLES = 3


@dataclass(frozen=True)
class _Mark:
    """Where the queue and the generator were when the last whole step, or evaluation, was done."""

    queue: dict[str, Any]
    random: Tensor


class Trainer:
    """One run, on one rank. All ranks do the same things in the same order."""

    def __init__(
        self, settings: TrainSettings, consumer: Consumer, world: World, *, stopping: Stopping, progress: Progress
    ) -> None:
        self.settings, self.consumer, self.world = settings, consumer, world
        self.stopping, self.progress = stopping, progress
        self.objective = Objective.of(consumer.meta)
        self.fields = Fields.of(
            consumer.schema("train"), block_size=settings.block_size, per_sample=self.objective.per_sample
        )
        self.sizes = ModelSizes(
            tokens=self.objective.tokens,
            block_size=settings.block_size,
            n_layer=settings.n_layer,
            n_head=settings.n_head,
            n_embd=settings.n_embd,
            causal=self.objective.causal,
            classes=self.objective.answers if self.objective.per_sample else None,
        )
        self.checkpoints = Checkpoints(settings.out_dir)
        self.step = 0
        self.curve = Curve()
        self._window = dict.fromkeys(KEPT, 0.0)
        self._pace = Pace()
        self._best_loss: float | None = None
        self._saved_at: int | None = None
        self._error: Exception | None = None
        self._ended = self._val_ended = False
        self._sample: dict[str, Tensor] | None = None

    def run(self) -> bool:
        """Train until `max_iters`; False if somebody asked for an end before, or the queue ended. Saved in any case."""
        self._set_up()
        whole = self._train()
        if self.step and self._saved_at != self.step:
            try:
                self._save(best=False)
            except (PenstockError, OSError):
                if self._error is None:
                    raise
        if self._error is not None:
            raise self._error
        self._conclude(whole)
        return whole

    def _train(self) -> bool:
        while True:
            if self._evaluation_is_due() and not self._evaluate():
                return False
            ended = self.step >= self.settings.max_iters
            if self._saved_at != self.step and self.step and (ended or self.step % self.settings.save_every == 0):
                self._save(best=False)
            if ended:
                return True
            if not self._advance():
                return False

    # Starting

    def _set_up(self) -> None:
        if self.world.device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        saved = self._find_checkpoint()
        torch.manual_seed(self.settings.seed)
        self.model = Transformer(self.sizes, dropout=self.settings.dropout).to(self.world.device)
        if saved is not None:
            self.model.load_state_dict(saved.model)
        self.parallel = self.world.wrap(self.model)
        self.optimizer = self._make_optimizer()
        if self.world.rank.world_size > 1:
            self._rehearse()
        self.world.seed(self.settings.seed, step=0 if saved is None else saved.step)
        if saved is not None:
            self._restore(saved)
        self._mark = self._marked()
        if self.world.first:
            self.settings.out_dir.mkdir(parents=True, exist_ok=True)
            self.checkpoints.tidy()
            self.curve.write_log(self._log)
        self._introduce(saved)
        self._pace = Pace()

    def _find_checkpoint(self) -> Checkpoint | None:
        saved = self.checkpoints.load() if self.settings.resume else None
        steps = [int(each) for each in self.world.gather(torch.tensor([-1 if saved is None else saved.step]))]
        if len(set(steps)) > 1:
            raise ResumeError(
                f"the ranks found checkpoints of different steps in {self.settings.out_dir}: {steps} (-1: none); "
                f"out_dir has to be one directory that all of them see"
            )
        if saved is not None:
            saved.refuse_others(sizes=asdict(self.sizes), settings=self._plain_settings, meta=self.consumer.meta)
        return saved

    def _restore(self, saved: Checkpoint) -> None:
        fresh = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved.optimizer)
        for group, values in zip(self.optimizer.param_groups, fresh):
            group.update(values)
        if (
            saved.world_size == self.world.rank.world_size
            and saved.settings["device"] == self._plain_settings["device"]
        ):
            self.world.set_random_state(saved.random[self.world.rank.rank])
        self.consumer.load_state_dict(saved.queue)
        self.step = self._saved_at = saved.step
        self.curve, self._window, self._best_loss = Curve(saved.curve), dict(saved.window), saved.best_loss
        self._sample = saved.sample

    def _make_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            parameter_groups(self.model, self.settings.weight_decay),
            lr=self.settings.learning_rate,
            betas=(self.settings.beta1, self.settings.beta2),
            fused=self.world.device.type == "cuda",
        )

    def _rehearse(self) -> None:
        """A step that leaves no trace. DDP orders its buckets anew after the first one, and that order decides how
        sums over three ranks or more are rounded: a run that goes on has to have it behind it, too."""
        zeros = torch.zeros(1, self.fields.length, dtype=torch.long, device=self.world.device)
        logits = self.parallel(zeros, None if self.fields.attend is None else zeros == 0)
        logits.float().square().mean().backward()
        self.optimizer.zero_grad(set_to_none=True)

    # One step

    def _advance(self) -> bool:
        """One step of all ranks; False if one of them cannot or should not go on, and then none has moved."""
        batch, sums = self._next("train")
        measured = None
        if batch is not None:
            self.parallel.train()
            measured = self._measure(self.parallel, batch)[0]
            sums |= numbers(measured)
        totals = self._total(sums)
        self._ended |= totals["ended"] > 0
        if totals["stop"] or measured is None or self._ended:
            return False
        loss = mean(totals["loss"], totals["weight"])
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        rate = learning_rate_at(self.step, self.settings)
        # DDP takes the mean over the ranks, while the loss is the mean over all targets, wherever they are.
        scaled = measured.loss * (self.world.rank.world_size / (totals["weight"] or 1.0))
        scaled.backward()  # type: ignore[no-untyped-call]
        self._update(rate)
        self.step += 1
        self._mark = self._marked()
        self._record_step(totals, rate)
        return True

    def _update(self, rate: float) -> None:
        largest = self.settings.grad_clip or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), largest))
        if not math.isfinite(norm):
            raise self._diverged(f"the norm of the gradient is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _measure(self, model: nn.Module, batch: Batch) -> tuple[Measured, Tensor]:
        with self.world.autocast():
            logits = model(batch.x, batch.attend)
        return self.objective.measure(logits, batch), logits

    def _next(self, split: str) -> tuple[Batch | None, dict[str, float]]:
        """The next batch of this rank and the sums it starts with; None if there was an error or a signal."""
        sums, started = dict(EMPTY), time.perf_counter()
        try:
            with self.stopping.waiting():
                batch = self.fields.read(self.consumer.get_batch(split))
            self._check(batch)
        except WaitInterruptedError:
            batch = None
        except StopIteration:
            return None, sums | {"ended": 1.0}
        except (PenstockError, OSError) as error:
            self._error, batch = error, None
        sums["waited"] = time.perf_counter() - started
        sums["stop"] = float(batch is None or self.stopping.asked)
        sums["tokens"] = 0.0 if batch is None else float(batch.x.numel())
        return batch, sums

    def _check(self, batch: Batch) -> None:
        if len(batch.x) != self.settings.batch_size:
            raise ConfigError(
                f"the queue's batches have {len(batch.x)} rows, the config says batch_size={self.settings.batch_size}; "
                f"use the config the queue was prepared with, or purge it and prepare again"
            )
        if self.world.device.type == "cpu" or self.step == (self._saved_at or 0):
            self.objective.check(batch)  # on a GPU it waits for all work queued there: at the start only

    def _total(self, sums: Mapping[str, float]) -> dict[str, float]:
        return dict(zip(EMPTY, self.world.total([sums[name] for name in EMPTY])))

    def _diverged(self, what: str) -> DataError:
        return DataError(
            f"{what} at step {self.step}, so the weights would be lost; the last checkpoint is of step "
            f"{self._saved_at or 'none'}: lower learning_rate (now {self.settings.learning_rate}), set grad_clip, or "
            f"look for strange batches"
        )

    # Evaluation

    def _evaluation_is_due(self) -> bool:
        last = self.curve.last("val")
        if not self.settings.eval_iters or self._val_ended or (last is not None and last["step"] == self.step):
            return False
        return self.step % self.settings.eval_interval == 0 or self.step >= self.settings.max_iters

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """The mean over `eval_iters` batches of each rank; False if it was cut short, and then it is made again."""
        self.model.eval()
        sums, last = dict(EMPTY), None
        tally = torch.zeros(self.objective.answers, dtype=torch.long, device=self.world.device)
        for _ in range(self.settings.eval_iters):
            batch, more = self._next("val")
            if batch is not None:
                measured, logits = self._measure(self.model, batch)
                more |= numbers(measured)
                tally += self.objective.tally(batch)
                last = (batch, logits)
            sums = {name: sums[name] + more[name] for name in EMPTY}
            if more["stop"] or more["ended"]:
                break
        totals = self._total(sums)
        if totals["stop"]:
            return False
        self._val_ended |= totals["ended"] > 0
        if self._val_ended:
            self.progress.say(
                "split 'val' of the queue is at its end: what is left of it is evaluated, and then no more"
            )
        commonest = float(torch.stack(self.world.gather(tally)).sum(dim=0).max())
        self._mark = self._marked()
        if last is not None:
            self._sample = sampled(self.objective, *last, most=_SAMPLES)
        if totals["counted"]:
            self._record_evaluation(totals, commonest)
        return True

    # Records and files

    def _record_step(self, totals: Mapping[str, float], rate: float) -> None:
        self._window = {name: self._window[name] + totals[name] for name in KEPT}
        self._pace.add(totals["tokens"], totals["waited"] / self.world.rank.world_size)
        self.progress.step(self.step, self._pace)
        if self.step % self.settings.log_interval and self.step < self.settings.max_iters:
            return
        record = {"kind": "train", "step": self.step, **means(self._window), "lr": rate, **self._pace.figures()}
        self._window, self._pace = dict.fromkeys(KEPT, 0.0), Pace()
        self._add(record)

    def _record_evaluation(self, totals: Mapping[str, float], commonest: float) -> None:
        record: dict[str, Any] = {"kind": "val", "step": self.step, **means(totals)}
        record["commonest"] = mean(commonest, totals["counted"])
        self._add(record)
        loss = record["loss"]
        if self.step and (self._best_loss is None or loss < self._best_loss):
            self._best_loss = loss
            self._save(best=True)
        self._pace = Pace()

    def _add(self, record: dict[str, Any]) -> None:
        self.curve.add(record, self._log if self.world.first else None)
        self.progress.record(record)

    def _save(self, *, best: bool) -> None:
        """First the state is taken, then it is on the disk, then the queue may forget what came before it."""
        mark, error = self._mark, None
        random = self.world.gather(mark.random)
        if self.world.first:
            try:
                self.checkpoints.save(self._checkpoint(mark, random), best=best)
                page = page_of(self.curve, self.objective, self._plain_settings, step=self.step)
                write_atomic(self.settings.out_dir / "curve.html", page.encode())
            except OSError as raised:
                error = raised
        if self.world.total([float(error is not None)])[0]:
            raise error or PenstockError("rank 0 could not write the checkpoint")
        self.consumer.commit(mark.queue)
        self._saved_at = self.step

    def _checkpoint(self, mark: _Mark, random: list[Tensor]) -> Checkpoint:
        return Checkpoint(
            step=self.step,
            world_size=self.world.rank.world_size,
            sizes=asdict(self.sizes),
            settings=self._plain_settings,
            meta=plain(self.consumer.meta),
            queue=mark.queue,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            random=random,
            curve=self.curve.records,
            window=self._window,
            best_loss=self._best_loss,
            sample=self._sample,
            fingerprint=meta_fingerprint(self.consumer.meta),
        )

    def _introduce(self, saved: Checkpoint | None) -> None:
        weights, world_size = sum(each.numel() for each in self.model.parameters()), self.world.rank.world_size
        what, *more = what_is_trained(self.settings, self.objective, self.fields, weights=weights)
        where = f"{what} on {self.world.device}" + (f", {world_size} ranks" if world_size > 1 else "")
        how = how_it_starts(saved, self.settings, self._plain_settings, world_size=world_size)
        begun = [] if saved is not None or not self.world.first else self._where_the_queue_goes_on()
        for line in (where, *more, *how, *begun):
            self.progress.say(line)

    def _where_the_queue_goes_on(self) -> list[str]:
        """The weights are new, and the batches are not the first ones: to be said, since the run repeats no other."""
        position = position_of(self.consumer)
        return queue_has_begun(self.consumer.queue_dir, position) if position else []

    def _conclude(self, whole: bool) -> None:
        if self._ended:
            self.progress.say(f"the queue ended after step {self.step:,}; prepare more, and the same command goes on")
        elif not whole:
            self.progress.say(f"stopped at step {self.step:,}; the same command goes on from there")
        if skipped := int(self.world.total([skipped_by(self.consumer)])[0]):
            self.progress.say(f"{skipped:,} batches of files that could not be read were skipped (on_bad='skip')")
        for line in summary_of(self.curve, self.objective, self.settings.out_dir):
            self.progress.say(line)
        if self._sample is not None and whole:
            self.progress.samples(self.consumer.meta, self.objective, self._sample)

    @property
    def _log(self) -> Any:
        return self.settings.out_dir / "log.jsonl"

    @property
    def _plain_settings(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(asdict(self.settings) | {"device": self.world.device.type})
        return found

    def _marked(self) -> _Mark:
        return _Mark(self.consumer.state_dict(), self.world.random_state())
