"""A policy learns to sort digits by GRPO: it answers, the answers go through penstock, and the good ones are praised.

Every iteration appends answers of the policy as token ids, with their log-probs and rewards, to a buffer; the loader
makes minibatches of them, with advantages and with what the loss is to be divided by.
"""

import argparse

import torch
from grpo_parts.policy import Policy
from grpo_parts.task import LENGTH, VOCABULARY, questions, rewards

from penstock.loaders._rollouts.live import LiveBuffer
from penstock.loaders._rollouts.rollout import Rollout
from penstock.loaders.rollout import RolloutDataLoader
from penstock.transforms.advantages import aggregate_loss

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--iterations", type=int, default=150)
options.add_argument("--questions", type=int, default=64, help="in each iteration")
options.add_argument("--answers", type=int, default=8, help="to each question")
given = options.parse_args()

torch.manual_seed(0)
drawing = torch.Generator().manual_seed(0)
policy = Policy(VOCABULARY, 2 * LENGTH + 1)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
buffer = LiveBuffer()
size = given.questions * given.answers
loader = RolloutDataLoader(buffer, rollout_batch_size=size, batch_size=size // 2, ppo_epochs=2, policy_version=0)

for iteration in range(given.iterations):
    prompts = questions(given.questions, drawing).repeat_interleave(given.answers, 0)
    answers, log_probs = policy.sample(prompts, LENGTH, drawing)
    scores = rewards(prompts, answers)
    buffer.append(
        [
            Rollout(
                prompt_ids=prompts[row].numpy(),
                response_ids=answers[row].numpy(),
                logprobs=log_probs[row].numpy(),
                reward=scores[row].item(),
                group=row // given.answers,
                policy_version=iteration,
            )
            for row in range(size)
        ]
    )
    for batch in loader:  # every answer twice, in minibatches of whole groups
        ratio = (policy.log_probs(batch.input_ids, LENGTH) - batch.old_log_probs).exp()
        gains = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
        loss = aggregate_loss(-gains, batch.response_mask, batch.denominators)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loader.policy_version = iteration + 1
    print(f"iteration {iteration:3d}  reward {scores.mean():.3f}  all right {(scores == 1).float().mean():.3f}")
