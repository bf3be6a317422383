"""The same batch by the names, and in the shapes, that other trainers expect. No number is changed, none is copied
unless its type or its shape is another there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.batching.backends.base import Array
from penstock.errors import ConfigError
from penstock.rl.arrays import Arrays, arrays_of

if TYPE_CHECKING:
    from penstock.rl.batch import RolloutBatch

__all__ = ["as_trl", "as_verl"]


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
