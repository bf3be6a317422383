"""Rollouts from the outputs of one engine or stack, with rewards: `rollouts_from_vllm(outputs, rewards=[...])`.

Readers (`RolloutDataLoader`, `LiveBuffer`, `RolloutQueue`, `read_rollouts`) recognise all of these forms by themselves.
These functions say which form is meant, and add what the outputs do not have: rewards, prompts, tools.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.errors import ConfigError, DataError
from penstock.rl.read.engines import Prompt, openai_rollouts, sglang_rollouts, vllm_rollouts
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.rollout import Rollout

Rewards = Iterable[Any]

logger = logging.getLogger(__name__)


def rollouts_from_vllm(
    outputs: Any, *, rewards: Rewards | None = None, policy_version: int | None = None
) -> list[Rollout]:
    """Rollouts of vLLM's `RequestOutput`s, one for each sample, in order.

    rollouts = rollouts_from_vllm(llm.generate(prompts, SamplingParams(n=8, logprobs=0)), rewards=scores)

    `rewards` has one number for each sample, in order, or a list of them for each request. With `n` above 1 the samples
    of a request are a group; otherwise the loader groups equal prompts. Log-probs are those of the generated tokens.
    """
    return _completed(vllm_rollouts(_listed(outputs)), rewards, policy_version)


def rollouts_from_sglang(
    outputs: Any,
    *,
    prompts: Sequence[Prompt] | None = None,
    rewards: Rewards | None = None,
    policy_version: int | None = None,
) -> list[Rollout]:
    """Rollouts of the dicts of SGLang's `generate`, which should have `return_logprob=True`.

    `prompts` has the ids, text or messages of each output's prompt; it is not needed if the outputs have the ids, as
    with `logprob_start_len=0`. The policy version is the engine's `weight_version` if that is a number.
    """
    return _completed(sglang_rollouts(_listed(outputs), prompts), rewards, policy_version)


def rollouts_from_openai(
    responses: Any,
    *,
    prompts: Sequence[Prompt] | None = None,
    rewards: Rewards | None = None,
    policy_version: int | None = None,
    logprobs: bool = True,
) -> list[Rollout]:
    """Rollouts of OpenAI-style chat or text completions, as objects or dicts, one for each choice.

    Ids come from vLLM's `return_token_ids` (or `return_tokens_as_token_ids`, for responses alone). A response without
    ids is text: a reader with a tokenizer tokenizes it, and it must not have log-probs, unless `logprobs=False` leaves
    them out. `prompts` has one entry for each response, for servers that do not return the ids of prompts.
    """
    return _completed(openai_rollouts(_listed(responses), prompts, logprobs=logprobs), rewards, policy_version)


def rollouts_from_verl(
    data: Any, *, rewards: Rewards | None = None, policy_version: int | None = None
) -> list[Rollout]:
    """Rollouts of verl's `DataProto`, or of a dict with its columns. Padding is removed by the attention mask."""
    return _completed(_read(data), rewards, policy_version)


def rollouts_from_trl(data: Any, *, rewards: Rewards | None = None, policy_version: int | None = None) -> list[Rollout]:
    """Rollouts of TRL's dicts with prompt_ids, completion_ids and logprobs: of a rollout function or of `GRPOTrainer`.

    Log-probs of the most likely tokens are reduced to those of the generated ones by `logprob_token_ids`.
    """
    return _completed(_read(data), rewards, policy_version)


def rollouts_from_transcripts(
    results: Iterable[Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> list[dict[str, Any]]:
    """Rollouts of transcripts with one reward, as tau-bench writes them: `traj`, `reward`, `task_id`, `trial`, `info`.

    They are rows with messages, which a reader with a tokenizer renders by its chat template: turns of the assistant
    are supervised, those of users and tools are not. Trials of one task are a group, so pass `group_prompts="any"` if a
    simulated user begins them differently. `tools` are the definitions that the policy was given, which transcripts
    lack and prompts have. A run that failed has no messages: an error, or skipped with a log line.
    """
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    found: list[dict[str, Any]] = []
    failed = 0
    for number, item in enumerate(_listed(results)):
        row = dict(item.model_dump() if hasattr(item, "model_dump") else item)
        messages = row.pop("traj", None)
        messages = row.pop("messages", None) if messages is None else messages
        if not messages:
            failed += 1
            info = row.get("info")
            cause = info.get("error") if isinstance(info, Mapping) else None
            if on_error == "raise":
                raise DataError(
                    f"row {number} has no messages{f'; the run failed: {cause}' if cause else ''}; leave it out, or "
                    "pass on_error='skip'",
                    row=number,
                )
            continue
        group = row.pop("task_id", None)
        row = {"messages": messages, "group": row.pop("group", group), **row}
        found.append(row if tools is None else {**row, "tools": list(tools)})
    if failed:
        logger.warning("%d of %d transcripts have no messages and were skipped", failed, failed + len(found))
    return found


def _read(data: Any) -> list[Rollout]:
    table = read_rollouts(data, missing_rewards="keep", empty_responses="keep", all_masked="keep", group_prompts="any")
    rollouts = table.to_rollouts()
    # Numbers that readers give to rollouts without a name; they would be the same in every call.
    named = not all(str(each.group).startswith("~") for each in rollouts)
    own = [name == str(row) for row, name in enumerate(table.ids.tolist())]
    return [
        replace(each, group=each.group if named else None, id=None if by_row else each.id)
        for each, by_row in zip(rollouts, own)
    ]


def _listed(outputs: Any) -> list[Any]:
    """Outputs as a list; one output is a list of one."""
    if isinstance(outputs, Mapping) or not isinstance(outputs, Iterable) or hasattr(outputs, "model_dump"):
        return [outputs]
    return list(outputs)


def _completed(rollouts: list[Rollout], rewards: Rewards | None, policy_version: int | None) -> list[Rollout]:
    """Rollouts with their rewards, one for each, and the version of the policy that generated them."""
    if policy_version is not None:
        rollouts = [replace(each, policy_version=policy_version) for each in rollouts]
    if rewards is None:
        return rollouts
    if isinstance(rewards, Mapping | str):
        raise ConfigError(f"rewards must be a list of numbers, one for each rollout, got {rewards!r:.60}")
    flat: list[Any] = []
    for entry in rewards.tolist() if hasattr(rewards, "tolist") else rewards:
        flat.extend(entry if isinstance(entry, list | tuple) else [entry])
    if len(flat) != len(rollouts):
        raise ConfigError(
            f"rewards must have one number for each of the {len(rollouts)} rollouts, in order, got {len(flat)}"
        )
    return [replace(each, reward=reward) for each, reward in zip(rollouts, flat)]
