"""Rollouts for RL: from a list, a file, or inference engines that append while the trainer reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from penstock.backends import get_backend
from penstock.errors import ConfigError
from penstock.loaders._rollouts.advantages_of import AdvantageSpec, Estimator
from penstock.loaders._rollouts.engine import RolloutEngine
from penstock.loaders._rollouts.live import LiveBuffer
from penstock.loaders._rollouts.options import RolloutKeywords, read_rollout_options
from penstock.loaders._rollouts.queueing import RolloutQueue
from penstock.loaders._rollouts.reading import read_rollouts
from penstock.loaders._rollouts.sources import Fixed, Live, RolloutSource
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import pad_id_of
from penstock.order.plan import Plan
from penstock.transforms.advantages import Preset

if TYPE_CHECKING:
    from penstock.loaders._rollouts.batch import RolloutBatch
    from penstock.transforms._tokenizers.loading import TokenizerSpec

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

    A loop is over all of a list or a file. Of a live source it is over one rollout batch: set `policy_version` behind
    it. Rollouts that are dropped are counted by reason, in `counts`. `estimator` is a name or a function of
    `penstock.transforms.advantages`, or an `AdvantageSpec`, which says more.
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
        loaded = None
        if tokenizer is not None:
            from penstock.transforms.tokenization import load_tokenizer

            loaded = load_tokenizer(tokenizer)
        source: RolloutSource
        if isinstance(rollout_data, LiveBuffer | RolloutQueue):
            if columns is not None:
                raise ConfigError("columns are named where rollouts are read: pass columns= to the buffer or the queue")
            rank = chosen.find_rank()
            source = Live(rollout_data.entries(rank, loaded), rollout.rollout_batch_size, rollout.group_size)
        else:
            if rollout.group_size is not None:
                raise ConfigError("group_size is for live sources; of a list or a file every group is whole")
            empty = rollout.on_empty(spec.rules)
            table = read_rollouts(
                rollout_data,
                tokenizer=loaded,
                columns=columns,
                missing_rewards="error" if rollout.on_missing(spec.rules) == "error" else "keep",  # judged with others
                empty_responses="error" if empty == "error" else "keep",
                all_masked="error" if empty == "error" else "keep",
            )
            named = str(rollout_data) if isinstance(rollout_data, str | os.PathLike) else None
            source = Fixed(table, rollout.rollout_batch_size, named)
        form = rollout.form(chosen, pad_id_of(loaded), get_backend(chosen.backend).integer)
        super().__init__(RolloutEngine(source, chosen, rollout, spec, compute_advantages=compute_advantages, form=form))

    @property
    def policy_version(self) -> int | None:
        """Of the policy that is trained: what staleness is counted from. Rollout batches that are begun keep theirs."""
        return self._engine.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.version = replace(self._engine.rollout, policy_version=version).policy_version
        self._edits += 1  # what was made ahead is made again

    @property
    def ended(self) -> bool:
        """Whether a live source is at its end: a loop over nothing has said so. Never true of a list or a file."""
        return self._engine.ended

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts that were dropped so far, by reason."""
        return dict(self._position.counts)

    @property
    def plan(self) -> Plan:
        raise ConfigError("rollouts have no plan that could be looked up or edited; see rollout_batch_size")

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """What was used before `state` was taken (None: now) may be deleted from a `RolloutQueue`.

        Call it when the checkpoint that holds the state is safely on disk. Of other sources there is nothing to do.
        """
        self._check_ready()
        self._engine.commit(self.state_dict() if state is None else state)
