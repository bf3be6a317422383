"""A batch of rollouts: a training batch whose metadata has what RL knows of each token and of each response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import Backend, get_backend
from penstock.batching.backends.base import Array, Device
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError
from penstock.rl.arrays import Arrays, arrays_of
from penstock.rl.collate import FILLS, RolloutLayout, TokenLayout, widths
from penstock.rl.minibatches import micro_batches_of

__all__ = ["RolloutBatch", "as_trl", "as_verl"]


def as_trl(batch: RolloutBatch) -> dict[str, Any]:
    """What `GRPOTrainer` computes its loss of:

        prompt_ids, prompt_mask, completion_ids, completion_mask   (rows, tokens)
        tool_mask                  0 on tokens that the policy did not write; completion_mask is 1 there, since the
                                   model has to see them
        advantages                 (rows,) of estimators with one number for a response; (rows, completion tokens) of
                                   those with one for a token
        old_per_token_logps, sampling_per_token_logps, ref_per_token_logps, importance_sampling_ratio   if there are any
        num_items_in_batch         tokens to learn in the whole global batch, an array without dimensions

    `old_per_token_logps` are those of the policy that generated; so are `sampling_per_token_logps`, unless
    `metadata["rollout_log_probs"]` tells the two apart.
    """
    mask, known = _attention(batch, "as_trl"), batch.metadata
    if batch.advantages is None:
        raise ConfigError("TRL's loss needs advantages, and this batch has none; pass compute_advantages=True")
    arrays, width = arrays_of(batch.input_ids, gradients=True), batch.layout.prompt_width
    found = {
        "prompt_ids": batch.prompts,
        "prompt_mask": mask[:, :width],
        "completion_ids": batch.responses,
        "completion_mask": mask[:, width:],
        "tool_mask": arrays.like(batch.response_mask, mask),
        "advantages": known.get("sequence_advantages", batch.advantages),
        "old_per_token_logps": batch.old_log_probs,
        "sampling_per_token_logps": known.get("rollout_log_probs", batch.old_log_probs),
        "ref_per_token_logps": batch.ref_log_probs,
        "importance_sampling_ratio": known.get("importance_sampling_ratio"),
    }
    if batch.num_items_in_batch is not None:
        found["num_items_in_batch"] = arrays.put(np.array(batch.num_items_in_batch, np.int64))
    return {key: value for key, value in found.items() if value is not None}


def as_verl(batch: RolloutBatch) -> dict[str, Any]:
    """What verl keeps in a `DataProto`:

        prompts, responses, input_ids, attention_mask, position_ids
        response_mask              0 on padding and on tokens that the policy did not write
        old_log_probs, rollout_log_probs, ref_log_prob, values, advantages, returns   as far as there are any
        token_level_scores         what was given per token; or the reward, at the last token of the response; 0 where
                                   there is none
        token_level_rewards        the same with what was computed of it, such as a KL penalty
        uid                        the groups, as an array of objects: it belongs in `non_tensor_batch`

    All but the ids are (rows, response tokens). Both log-probs are those of the policy that generated, unless
    `metadata["rollout_log_probs"]` tells the two apart.
    """
    mask, known = _attention(batch, "as_verl"), batch.metadata
    arrays = arrays_of(batch.input_ids, gradients=True)
    scores = known.get("token_scores")
    scores = _at_the_end(batch, arrays) if scores is None else scores
    uid = np.empty(batch.num_rollouts, object)
    uid[:] = batch.groups
    found = {
        "prompts": batch.prompts,
        "responses": batch.responses,
        "input_ids": batch.input_ids,
        "attention_mask": mask,
        "position_ids": batch.position_ids,
        "response_mask": arrays.like(batch.response_mask, mask),
        "old_log_probs": batch.old_log_probs,
        "rollout_log_probs": known.get("rollout_log_probs", batch.old_log_probs),
        "ref_log_prob": batch.ref_log_probs,
        "values": known.get("values"),
        "token_level_scores": scores,
        "token_level_rewards": known.get("token_rewards", scores),
        "advantages": _per_token(batch.advantages, batch, arrays),
        "returns": _per_token(batch.returns, batch, arrays),
        "uid": uid,
    }
    return {key: value for key, value in found.items() if value is not None}


def _attention(batch: RolloutBatch, view: str) -> Array:
    if batch.layout.form.padding == "free":
        raise ConfigError(f"{view}() needs prompts and responses in columns of their own; use padding='sides'")
    if batch.attention_mask is None:
        raise ConfigError(f"{view}() needs attention_mask, which is not among the fields of this batch; ask for it")
    return batch.attention_mask


def _at_the_end(batch: RolloutBatch, arrays: Arrays) -> Array:
    """The reward of each response at its last token, 0 elsewhere, and where a response has none."""
    rewards = arrays.floats(batch.rewards)
    rewards = arrays.xp.where(arrays.xp.isnan(rewards), 0.0, rewards)
    here = arrays.put(np.arange(batch.response_mask.shape[1]))[None, :] == batch.response_length[:, None] - 1
    return arrays.xp.where(here, rewards[:, None], 0.0)


def _per_token(column: Array | None, batch: RolloutBatch, arrays: Arrays) -> Array | None:
    """What is one number a response, at each of its tokens that is to be learned."""
    if column is None or len(column.shape) == 2:
        return column
    return arrays.xp.where(batch.response_mask, column[:, None], 0.0)


Ints = npt.NDArray[np.int64]
_BY_TOKEN = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids")
_DOCUMENTS = ("position_ids", "document_ids", "cu_seqlens")
_GIVEN = ("old_log_probs", "ref_log_probs", "values", "token_scores")
"""What is known of tokens whether or not they are learned."""


class RolloutBatch(TrainingBatch):
    """Rollouts as one step's arrays, and in metadata, in arrays of the same framework, what RL trainers compute with.

        rewards, prompt_length, response_length ...   (rows,)
        response_mask, advantages, old_log_probs ...  (rows, response tokens); padding-free: shaped as input_ids
        ids, groups, finish_reasons ...               lists

    `to` and `pin_memory` take the arrays in metadata along. What nobody gave or computed is None. The critic's values
    are `metadata["values"]`, for a mapping has a method of that name.
    """

    @classmethod
    def from_numpy(
        cls,
        arrays: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        backend: str | Backend = "torch",
        *,
        device: Device = None,
        num_tokens: int | None = None,
    ) -> Self:
        """A batch of what `assemble` made, sharing its memory where the framework can."""
        chosen, given = get_backend(backend), dict(metadata or {})
        if num_tokens is None and "prompt_length" in given:
            num_tokens = int(given["prompt_length"].sum() + given["response_length"].sum())
        batch = super().from_numpy(arrays, None, chosen, device=device, num_tokens=num_tokens)
        batch.metadata = {
            key: chosen.from_numpy(value, device=device) if _is_numeric(value) else value
            for key, value in given.items()
        }
        return batch

    @property
    def layout(self) -> RolloutLayout:
        """Where prompts end, and which metadata is per token and which per rollout."""
        found = self.metadata.get("layout")
        if not isinstance(found, RolloutLayout):
            raise ConfigError(
                "this batch does not know how its rollouts lie: metadata['layout'] is missing; make it with "
                "assemble() and from_numpy(), and use to() to move it"
            )
        return found

    @property
    def num_rollouts(self) -> int:
        """Rollouts, whatever the number of rows."""
        return int(self.metadata["prompt_length"].shape[0])

    @property
    def prompts(self) -> Array:
        """(rows, prompt tokens), padded at the left."""
        return self.input_ids[:, : self._split_at]

    @property
    def responses(self) -> Array:
        """(rows, response tokens), padded at the right."""
        return self.input_ids[:, self._split_at :]

    @property
    def response_mask(self) -> Array:
        """Which response tokens are to be learned: those that the policy wrote."""
        return self.metadata["response_mask"]

    @property
    def rewards(self) -> Array:
        """(rows,) of the whole responses; NaN where there is none."""
        return self.metadata["rewards"]

    @property
    def advantages(self) -> Array | None:
        return self.metadata.get("advantages")

    @property
    def returns(self) -> Array | None:
        return self.metadata.get("returns")

    @property
    def old_log_probs(self) -> Array | None:
        """Of the policy that generated the responses."""
        return self.metadata.get("old_log_probs")

    @property
    def ref_log_probs(self) -> Array | None:
        return self.metadata.get("ref_log_probs")

    @property
    def token_rewards(self) -> Array | None:
        """As advantages were computed of them; as given (`metadata["token_scores"]`) if nothing changed them."""
        return self.metadata.get("token_rewards", self.metadata.get("token_scores"))

    @property
    def denominators(self) -> Array | None:
        """What the loss of each token is to be divided by; then the loss of a step is a sum. (rows,) for the tokens of
        a row; without padding shaped as input_ids, and 1 where there is no response."""
        return self.metadata.get("denominators")

    @property
    def prompt_length(self) -> Array:
        return self.metadata["prompt_length"]

    @property
    def response_length(self) -> Array:
        return self.metadata["response_length"]

    @property
    def groups(self) -> list[Any]:
        return list(self.metadata["groups"])

    @property
    def ids(self) -> list[Any]:
        return list(self.metadata["ids"])

    @property
    def policy_versions(self) -> Array:
        """(rows,) -1 where it is not known."""
        return self.metadata["policy_versions"]

    def as_trl(self) -> dict[str, Any]:
        """What TRL's GRPO trainer computes its loss of, see `as_trl` in views."""
        return as_trl(self)

    def as_verl(self) -> dict[str, Any]:
        """What verl's trainers compute with, by verl's names, see `as_verl` in views."""
        return as_verl(self)

    def micro_batches(self, max_tokens: int | None = None, *, at_least: int = 1) -> list[Self]:
        """Smaller batches with each rollout in one; the largest first.

        They have at most `max_tokens`, padding included, which is trimmed to what each needs. None: as the loader cut
        them (`metadata["micro_batches"]`), equally many on every rank. With a number of your own, ranks that must take
        equally many pass the largest number of any as `at_least`. Where there are fewer rollouts than that, the last
        ones teach nothing, see `take`.
        `num_items_in_batch` and denominators stay those of the whole step, so that gradients add up to the step's.
        """
        rows: Any = self.metadata.get("micro_batches")
        if max_tokens is not None:
            form = self.layout.form
            rows = micro_batches_of(*self._lengths(), max_tokens, form=form, at_least=at_least, names=self.ids)[0]
        elif rows is None:
            raise ConfigError("this batch was not cut by its loader; pass max_tokens, the most of a micro-batch")
        return [self.take(part) for part in rows]

    def take(self, rows: npt.ArrayLike) -> Self:
        """A batch of some of its rollouts, in the order given; everything that is of the whole step stays.

        Of no rollouts: the shortest, blanked. Its mask and everything that was computed is 0, and `metadata["blank"]`
        is true; a rank for which there is nothing left to do goes with the others through the same collectives.
        """
        chosen, layout = np.asarray(rows, np.int64), self.layout
        if not len(chosen):
            return self.take([int(np.argmin(sum(self._lengths())))])._blanked()
        if added := [key for key in self._arrays() if key in self._others]:
            raise ConfigError(f"{added[0]!r} was assigned to this batch, which has no rows that are known; take first")
        fields, per_token, left = (self._flat if layout.form.padding == "free" else self._sides)(chosen)
        index = self.backend.from_numpy(chosen)
        metadata = self.metadata | per_token | {"layout": replace(layout, prompt_width=left)}
        metadata.pop("micro_batches", None)  # which are rows of the whole
        for name in layout.per_row:
            column = self.metadata[name]
            metadata[name] = [column[row] for row in chosen.tolist()] if isinstance(column, list) else column[index]
        batch = type(self)(metadata=metadata, num_items_in_batch=self.num_items_in_batch, **fields)
        batch._others, batch._hidden = dict(self._others), set(self._hidden)
        batch._num_tokens = int(sum(lengths[chosen].sum() for lengths in self._lengths()))
        return batch

    def _sides(self, rows: Ints) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Fields and metadata per token of some rows, with the padding they need; the width of their prompts."""
        prompts, responses = self._lengths()
        layout, index = self.layout, self.backend.from_numpy(rows)
        left, right = widths(prompts[rows], responses[rows], layout.form)
        low, high = layout.prompt_width - left, layout.prompt_width + right
        fields = {key: value[:, low:high][index] for key in _BY_TOKEN if (value := getattr(self, key)) is not None}
        return fields, {key: self.metadata[key][:, :right][index] for key in layout.per_token}, left

    def _flat(self, rows: Ints) -> tuple[dict[str, Any], dict[str, Any], int]:
        """The same of a batch without padding: tokens are gathered, and what says where they begin is made anew."""
        prompts, responses = self._lengths()
        form, arrays, backend = self.layout.form, arrays_of(self.input_ids, gradients=True), self.backend
        at = TokenLayout.of(prompts, responses, form).at[rows]
        places = TokenLayout.of(prompts[rows], responses[rows], form)
        used = int(places.lengths.sum())
        where = np.zeros(places.tokens, np.int64)
        where[:used] = np.repeat(at - places.at, places.lengths) + np.arange(used)
        index, real = arrays.put(where), arrays.put(np.arange(places.tokens) < used)

        def gathered(array: Array, fill: Any) -> Array:
            found = array[:, index]
            return found if used == places.tokens else arrays.xp.where(real, found, fill)

        blanks = {"input_ids": form.pad_id, "labels": IGNORE, "loss_mask": False}
        fields = {key: gathered(getattr(self, key), fill) for key, fill in blanks.items() if key in self._arrays()}
        documents = places.documents(backend.integer)
        fields |= {key: arrays.put(documents[key]) for key in _DOCUMENTS if getattr(self, key) is not None}
        if self.max_seqlen is not None:
            fields["max_seqlen"] = documents["max_seqlen"]
        blank = {key: False if key == "response_mask" else FILLS.get(key, 0) for key in self.layout.per_token}
        return fields, {key: gathered(self.metadata[key], fill) for key, fill in blank.items()}, 0

    def _blanked(self) -> Self:
        """The same, and nothing to be learned from it: this batch itself is changed, which nobody else has."""
        xp, told = arrays_of(self.input_ids, gradients=True).xp, self.metadata
        for name in self.layout.per_token:
            if name not in _GIVEN:
                told[name] = xp.zeros_like(told[name]) + FILLS[name] if name in FILLS else xp.zeros_like(told[name])
        for name in ("denominators", "sequence_advantages"):
            if name in self.layout.per_row:
                told[name] = xp.zeros_like(told[name]) + FILLS.get(name, 0)
        if self.labels is not None:
            self.labels = xp.zeros_like(self.labels) + IGNORE
        if self.loss_mask is not None:
            self.loss_mask = xp.zeros_like(self.loss_mask)
        told["blank"] = True
        return self

    @property
    def _split_at(self) -> int:
        if self.layout.form.padding == "free":
            raise ConfigError(
                "a padding-free batch has prompts and responses in turns in one row; make it with padding='sides', or "
                "use response_mask, prompt_length and response_length"
            )
        return self.layout.prompt_width

    def _lengths(self) -> tuple[Ints, Ints]:
        prompts, responses = (self.backend.to_numpy(array) for array in (self.prompt_length, self.response_length))
        return prompts.astype(np.int64), responses.astype(np.int64)

    def all_arrays(self) -> list[Array]:
        kind = type(self.input_ids)
        return super().all_arrays() + [value for value in self.metadata.values() if isinstance(value, kind)]

    def _with(self, change: Any) -> Self:
        batch, kind = super()._with(change), type(self.input_ids)
        batch.metadata = {
            key: change(value) if isinstance(value, kind) else value for key, value in batch.metadata.items()
        }
        return batch

    def __repr__(self) -> str:
        return super().__repr__().replace("TrainingBatch", "RolloutBatch", 1)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
