"""One rollout: a prompt, what the policy answered, and everything that is known of each token of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

__all__ = ["Rollout"]

Ids = Sequence[int] | npt.NDArray[Any]
Numbers = Sequence[float] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and a response, as token ids: what the engine generated is what is trained on.

    Text is there for those who have nothing else. It is tokenised only if there are no ids, and the batch says so:
    text that was decoded and encoded again is often not the tokens it came from.

    Everything per token belongs to the response and has its length.
    """

    prompt_ids: Ids | None = None
    response_ids: Ids | None = None
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    response: str | None = None
    reward: float | None = None
    """Of the whole response; None or NaN when there is none."""
    token_rewards: Numbers | None = None
    logprobs: Numbers | None = None
    """Of the policy that generated it."""
    ref_logprobs: Numbers | None = None
    values: Numbers | None = None
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None
    """0 for tokens that the policy did not write: tool results, observations. None: all are its own."""
    policy_version: int | None = None
    group: str | int | None = None
    """Rollouts of one prompt have the same. Where no rollout has one, equal prompts are a group."""
    finish_reason: str | None = None
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
