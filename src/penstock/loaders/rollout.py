"""Rollouts for RL: from a list, a file, or inference engines that append while the trainer reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from penstock.batching.backends import get_backend
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.source import pad_id_of
from penstock.order.plan import Plan
from penstock.rl.advantages.estimators import EstimatorFunction
from penstock.rl.advantages.presets import Preset
from penstock.rl.compute import AdvantageSpec
from penstock.rl.engine import RolloutEngine
from penstock.rl.live import AppendReader, IteratorAppends, LiveBuffer
from penstock.rl.options import NOT_FOR_ROLLOUTS, OPTION_KINDS, read_rollout_options
from penstock.rl.queue import RolloutQueue
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.read.text import TextRule
from penstock.rl.selection import check_group_prompts, group_by_prompt, group_by_size, log_prompt_groups
from penstock.rl.sources import LiveRollouts, RolloutSource, TableRollouts

if TYPE_CHECKING:
    from penstock.rl.batch import RolloutBatch
    from penstock.tokenizers.load import TokenizerSpec


def _text_options(options: Options) -> dict[str, Any]:
    """Options for the tokenization of text."""
    return {name: getattr(options, name) for name in ("template", "add_bos", "add_eos")}


class RolloutDataLoader(DataLoader, options=OPTION_KINDS, without=NOT_FOR_ROLLOUTS):
    """Batches of rollouts, with rewards and advantages in their metadata.

        loader = RolloutDataLoader(rollouts, tokenizer, estimator="grpo", preset="trl", batch_size=16)
        for batch in loader:
            loss = policy_loss(batch, batch.metadata["advantages"], batch.metadata["denominators"])

    `rollout_data` is anything `read_rollouts` takes: a list of `Rollout` or of dicts, outputs of vLLM or SGLang with
    rewards (`penstock.rl.rollouts_from_vllm`), a batch of verl or TRL, JSONL or Parquet files; or a `LiveBuffer` or a
    `RolloutQueue`, to which inference engines append. Token ids are passed on unchanged; text is
    tokenized only where there are no ids, and `metadata["tokenized"]` says so.

    Advantages are computed over a whole *rollout batch* (all data of a list or a file, unless `rollout_batch_size` is
    given). It is then used `ppo_epochs` times, split into minibatches of at most `batch_size` rollouts a rank, which
    are balanced over ranks by length. So neither the batch size nor the number of ranks changes a number.

    An iterator, or a function that makes one, is read to its end, as a list is; with `rollout_batch_size` it is a live
    source, whose batches come as it makes rollouts. There, rollouts of a group, or with equal prompts, come one after
    the other.

    A loop is over all of a list or a file. Of a live source it is over one rollout batch: set `policy_version` before
    it. `counts` has the dropped rollouts by reason. `estimator` is a name or a function of `penstock.rl.advantages`, or
    an `AdvantageSpec`. `options` are the fields of `penstock.rl.options` and those of every loader, by name; the groups
    `RolloutBatching`, `Staleness`, `RolloutSelection` and `LengthLimits` can also be passed whole, as `batching=`,
    `staleness=`, `selection=` and `limits=`.
    """

    _engine: RolloutEngine
    _live: LiveBuffer | RolloutQueue | None = None
    _metrics_kind = "rollouts"

    if TYPE_CHECKING:  # the type of the batches

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
        estimator: str | EstimatorFunction | AdvantageSpec = "grpo",
        preset: str | Preset | None = None,
        columns: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        shared, rollout = read_rollout_options(options, list(signature(type(self)).parameters))
        if not isinstance(compute_advantages, bool):
            raise ConfigError(f"compute_advantages must be True or False, got {compute_advantages!r}")
        if not isinstance(estimator, AdvantageSpec):
            estimator = AdvantageSpec(estimator=estimator, preset="penstock" if preset is None else preset)
        elif preset is not None:
            raise ConfigError(f"the AdvantageSpec has preset={estimator.preset!r}; set the preset there only")
        spec = estimator
        by_prompt = rollout.selection.drop_zero_variance or (compute_advantages and spec.needs_groups)
        loaded = None
        if tokenizer is not None:
            from penstock.transforms.tokenization import load_tokenizer

            loaded = load_tokenizer(tokenizer)
        source: RolloutSource
        text = TextRule(chat_template=shared.template, add_bos=bool(shared.add_bos), add_eos=bool(shared.add_eos))
        if isinstance(rollout_data, LiveBuffer | RolloutQueue):
            for name, given in {"columns": columns, **_text_options(shared)}.items():
                if given is not None:
                    raise ConfigError(
                        f"{name} is for the place where rollouts are read: pass {name}= to the buffer or the queue"
                    )
            self._live = rollout_data
            appends = rollout_data.appends(shared.find_rank(), loaded)
            source = LiveRollouts(appends, rollout.batching, by_prompt=by_prompt)
        elif _is_endless(rollout_data) and rollout.batching.rollout_batch_size is not None:
            if shared.find_rank().world_size > 1:
                raise ConfigError(
                    f"an iterator of rollouts is only seen by its own process, and this is {shared.find_rank()}; use a "
                    "RolloutQueue, which all ranks read, or LiveBuffer(replicated=True) if every rank is given the same"
                )
            reader = AppendReader(loaded, columns, rollout.selection.group_prompts, text)
            joined = rollout.batching.group_size is None
            made = IteratorAppends(rollout_data, reader, by_prompt=by_prompt, joined=joined)
            source = LiveRollouts(made, rollout.batching, by_prompt=by_prompt)
        else:
            if rollout.batching.max_pending_appends is not None:
                raise ConfigError("max_pending_appends is for live sources; groups of a list or a file are complete")
            empty: Literal["error", "keep"] = "error" if rollout.selection.on_empty(spec.rules) == "error" else "keep"
            # Other rules apply to a rollout batch, when it is selected.
            table = read_rollouts(
                list(rollout_data()) if callable(rollout_data) and _is_endless(rollout_data) else rollout_data,
                tokenizer=loaded,
                columns=columns,
                missing_rewards="error" if rollout.selection.on_missing(spec.rules) == "error" else "keep",
                empty_responses=empty,
                all_masked=empty,
                group_prompts=rollout.selection.group_prompts,
                text=text,
            )
            path = str(rollout_data) if isinstance(rollout_data, str | os.PathLike) else None
            if rollout.batching.group_size is not None:
                table = group_by_size(table, rollout.batching.group_size)
                if rollout.selection.group_prompts == "equal":
                    check_group_prompts(table, table.groups.tolist())
            elif by_prompt and (grouped := group_by_prompt(table)) is not table:
                table = grouped
                log_prompt_groups(table, path or f"{len(table)} rollouts")
            source = TableRollouts(table, rollout.batching.rollout_batch_size, path)
        form = rollout.form(shared, pad_id_of(loaded), get_backend(shared.backend).integer)
        super().__init__(RolloutEngine(source, shared, rollout, spec, compute_advantages=compute_advantages, form=form))

    @property
    def policy_version(self) -> int | None:
        """Version of the policy that is trained, for staleness. Rollout batches that are begun keep theirs.

        Set it before each loop over a live source, also after resuming. `loader.epoch`, the number of the next rollout
        batch, is a version that is the same in both runs.
        """
        return self._engine.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        checked = replace(self._engine.rollout.staleness, policy_version=version).policy_version
        self._engine.set_version(checked, self._position)
        self._edits += 1  # prefetched batches are made again

    @property
    def ended(self) -> bool:
        """True if a live source has ended, after a loop without batches. Never True for a list or a file."""
        return self._engine.ended

    @property
    def counts(self) -> dict[str, int]:
        """Dropped rollouts so far by reason, and appends that could not be read."""
        end = self._engine.end_position
        return dict((self._position if end is None else end).counts)

    @property
    def plan(self) -> Plan:
        raise ConfigError("a RolloutDataLoader has no plan to look up or edit; see rollout_batch_size")

    def _more_metrics(self) -> dict[str, float]:
        engine, source = self._engine, self._live
        found = super()._more_metrics()
        found |= engine.counters.readings(self.counts, getattr(engine.source, "incomplete", 0))
        return found | source.metrics() if source is not None else found

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Allow a `RolloutQueue` to delete what was used before `state` was taken (None: now).

        Call it on every rank once the checkpoint with the state is safely on disk; the queue keeps what any rank may
        still need. Other sources ignore it.
        """
        self._check_ready()
        self._engine.commit(self.state_dict() if state is None else state)


def _is_endless(rollouts: Any) -> bool:
    """True for data that may have no end: an iterator, or a function that makes one."""
    return isinstance(rollouts, Iterator) or (callable(rollouts) and not isinstance(rollouts, Iterable | type))
