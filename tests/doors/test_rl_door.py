"""The RL usage example of design document 000, as it prints it."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

from penstock.batching.batch import TrainingBatch
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl.advantages import grpo
from penstock.rl.batch import RolloutBatch
from penstock.transforms.tokenization import ByteTokenizer

RL = """
    loader = RolloutDataLoader(
        rollout_data=rollout_samples,
        tokenizer=tokenizer,
        compute_advantages=True
    )
    batch = loader.get_batch(batch_size=16)  # Includes rewards, advantages
"""


def sampled(prompts: int, *, text: bool, named: bool) -> list[dict[str, Any]]:
    """Four answers to each prompt, as a rollout engine hands them over; with the name of the prompt, or without."""
    rng = np.random.default_rng(3)
    found: list[dict[str, Any]] = []
    for number in range(prompts):
        for answer in range(4):
            facts = {"reward": float(answer == number % 4) + float(rng.random()) / 8}
            if named:
                facts["group"] = number
            prompt, response = f"{number} + {number} =", f" {number + answer}"
            if text:
                found.append({"prompt": prompt, "response": response, **facts})
            else:
                found.append({"prompt_ids": list(prompt.encode()), "response_ids": list(response.encode()), **facts})
    return found


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_the_rl_example_runs_as_printed(text: bool, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = sampled(8, text=text, named=named)
    names: dict[str, Any] = {
        "RolloutDataLoader": RolloutDataLoader,
        "rollout_samples": rollouts,
        "tokenizer": ByteTokenizer(("<eos>",)),
    }
    exec(textwrap.dedent(RL), names)
    batch = names["batch"]
    assert isinstance(batch, RolloutBatch)
    assert isinstance(batch, TrainingBatch)
    assert batch.batch_size == 16
    assert batch.metadata["rewards"].shape == (16,)
    assert batch.metadata["tokenized"].tolist() == [text] * 16
    assert ("rollouts with equal prompts are a group: 8 groups of 4" in caplog.text) == (not named)
    wanted = grpo([r["reward"] for r in rollouts], 4)
    for row, name in enumerate(batch.metadata["ids"]):
        rollout, advantage = rollouts[int(name)], wanted[int(name)]
        assert float(batch.metadata["rewards"][row]) == pytest.approx(rollout["reward"])
        learned = batch.metadata["response_mask"][row]
        assert batch.metadata["advantages"][row][learned].tolist() == pytest.approx(
            [advantage] * int(learned.sum()), abs=1e-6
        )
        if not text:
            length = int(batch.metadata["response_length"][row])
            assert batch.responses[row, :length].tolist() == rollout["response_ids"]
