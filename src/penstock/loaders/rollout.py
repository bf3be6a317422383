"""Rollouts for RL: from a list, a file, or inference engines that append while the trainer reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from penstock.batching.backends import get_backend
from penstock.errors import ConfigError, DataError
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import pad_id_of
from penstock.order.plan import Plan
from penstock.rl.advantages import Preset
from penstock.rl.compute import AdvantageSpec, Estimator
from penstock.rl.engine import RolloutEngine
from penstock.rl.live import LiveBuffer
from penstock.rl.options import RolloutKeywords, RolloutOptions, read_rollout_options
from penstock.rl.queue import RolloutQueue
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.selection import group_by_prompt, log_prompt_groups
from penstock.rl.sources import Fixed, Live, RolloutSource

if TYPE_CHECKING:
    from penstock.rl.batch import RolloutBatch
    from penstock.rl.rollout import RolloutTable
    from penstock.tokenizers.load import TokenizerSpec
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["RolloutDataLoader"]


class RolloutDataLoader(DataLoader):
    """Batches of rollouts, with rewards and advantages in their metadata.

        loader = RolloutDataLoader(rollouts, tokenizer, estimator="grpo", preset="trl", batch_size=16)
        for batch in loader:
            loss = policy_loss(batch, batch.metadata["advantages"], batch.metadata["denominators"])

    `rollout_data` is anything `read_rollouts` takes: a list of `Rollout` or of dicts, a file or several of JSONL or
    Parquet; or a `LiveBuffer` or a `RolloutQueue`, to which inference engines append. Token ids are passed on as they
    are; text is tokenized only where there are no ids, and `metadata["tokenized"]` says so.

    Advantages are computed over a whole *rollout batch* (all data of a list or a file, unless `rollout_batch_size` is
    given), which is then used `ppo_epochs` times, cut into minibatches of at most `batch_size` rollouts for each rank
    and dealt to the ranks by length. So neither the size of batches nor the number of ranks changes a number.

    A loop is over all of a list or a file. Of a live source it is over one rollout batch: set `policy_version` in front
    of it. Rollouts that are dropped are counted by reason, in `counts`. `estimator` is a name or a function of
    `penstock.rl.advantages`, or an `AdvantageSpec`, which says more.
    """

    _engine: RolloutEngine

    if TYPE_CHECKING:  # what batches are, for those who look at types

        def get_batch(self, batch_size: int | None = None) -> RolloutBatch: ...
        def get_iterator(self) -> Iterator[RolloutBatch]: ...
        def __iter__(self) -> Iterator[RolloutBatch]: ...
        def __getitem__(self, number: int) -> RolloutBatch: ...

    def __init__(
        self,
        rollout_data: Any,
        tokenizer: TokenizerSpec | None = None,
        compute_advantages: bool = True,
        *,
        estimator: str | Estimator | AdvantageSpec = "grpo",
        preset: str | Preset | None = None,
        columns: Mapping[str, Any] | None = None,
        **options: Unpack[RolloutKeywords],
    ) -> None:
        chosen, rollout = read_rollout_options(options)
        if not isinstance(compute_advantages, bool):
            raise ConfigError(f"compute_advantages is True or False, got {compute_advantages!r}")
        if isinstance(estimator, AdvantageSpec):
            if preset is not None:
                raise ConfigError(f"an AdvantageSpec has a preset of its own ({estimator.preset!r}); pass it there")
            spec = estimator
        else:
            spec = AdvantageSpec(estimator=estimator, preset="penstock" if preset is None else preset)
        needs_groups = rollout.drop_zero_variance or (compute_advantages and spec.needs_groups)
        loaded = None
        if tokenizer is not None:
            from penstock.transforms.tokenization import load_tokenizer

            loaded = load_tokenizer(tokenizer)
        source: RolloutSource
        if isinstance(rollout_data, LiveBuffer | RolloutQueue):
            if columns is not None:
                raise ConfigError("columns are named where rollouts are read: pass columns= to the buffer or the queue")
            rank = chosen.find_rank()
            entries = rollout_data.entries(rank, loaded)
            source = Live(
                entries,
                rollout.rollout_batch_size,
                rollout.group_size,
                rollout.max_pending_appends,
                by_prompt=needs_groups,
            )
        else:
            for name in ("group_size", "max_pending_appends"):
                if getattr(rollout, name) is not None:
                    raise ConfigError(f"{name} is for live sources; of a list or a file every group is whole")
            table = _read(rollout_data, loaded, columns, rollout, spec)
            named = str(rollout_data) if isinstance(rollout_data, str | os.PathLike) else None
            if needs_groups and (grouped := group_by_prompt(table)) is not table:
                table = grouped
                log_prompt_groups(table, named or f"{len(table)} rollouts")
            source = Fixed(table, rollout.rollout_batch_size, named)
        form = rollout.form(chosen, pad_id_of(loaded), get_backend(chosen.backend).integer)
        super().__init__(RolloutEngine(source, chosen, rollout, spec, compute_advantages=compute_advantages, form=form))

    @property
    def policy_version(self) -> int | None:
        """Of the policy that is trained: what staleness is counted from. Rollout batches that are begun keep theirs.

        Set it in front of each loop over a live source. Then a run that is resumed sets it too, wherever its state was
        taken; `loader.epoch`, the number of the next rollout batch, is a version that both agree on.
        """
        return self._engine.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        checked = replace(self._engine.rollout, policy_version=version).policy_version
        self._engine.set_version(checked, self._position)
        self._edits += 1  # what was made ahead is made again

    @property
    def ended(self) -> bool:
        """Whether a live source is at its end: a loop over nothing has said so. Never true of a list or a file."""
        return self._engine.ended

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts that were dropped so far, by reason; and appends, where it was they that could not be read."""
        over = self._engine.over
        return dict((self._position if over is None else over).counts)

    @property
    def plan(self) -> Plan:
        raise ConfigError("rollouts have no plan that could be looked up or edited; see rollout_batch_size")

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """What was used before `state` was taken (None: now) may be deleted from a `RolloutQueue`.

        Call it on every rank, when the checkpoint that holds the state is safely on disk: what one rank may still need
        stays. Of other sources there is nothing to do.
        """
        self._check_ready()
        self._engine.commit(self.state_dict() if state is None else state)


_WORDS = {
    "pass empty_responses='drop' or 'keep'": "pass all_masked='drop' or 'keep'",
    "pass missing_rewards='zero', 'drop' or 'keep'": "pass missing_rewards='zero', 'exclude' or 'drop'",
}
"""What `read_rollouts` says of its own keywords, and what the loader's are."""


def _read(
    data: Any,
    tokenizer: Tokenizer | None,
    columns: Mapping[str, Any] | None,
    options: RolloutOptions,
    spec: AdvantageSpec,
) -> RolloutTable:
    """Rollouts that are all there. What is not an error for all of them is judged with the others of its batch."""
    empty: Literal["error", "keep"] = "error" if options.on_empty(spec.rules) == "error" else "keep"
    try:
        return read_rollouts(
            data,
            tokenizer=tokenizer,
            columns=columns,
            missing_rewards="error" if options.on_missing(spec.rules) == "error" else "keep",
            empty_responses=empty,
            all_masked=empty,
            group_prompts=options.group_prompts,
        )
    except DataError as error:
        reason = error.reason
        for theirs, ours in _WORDS.items():
            reason = reason.replace(theirs, ours)
        if reason == error.reason:
            raise
        told = DataError(reason)
        told.file, told.row = error.file, error.row  # the reason names them already
        raise told from None
