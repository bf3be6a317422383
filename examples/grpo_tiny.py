"""GRPO on a small task: a policy learns to sort digits.

Responses are appended to a buffer as token ids, with log-probs and rewards. The loader returns minibatches with
advantages and the denominator of the loss.
"""

import argparse

import torch
from grpo_parts.policy import Policy
from grpo_parts.task import LENGTH, VOCABULARY, questions, rewards

from penstock import LiveBuffer, Rollout, RolloutDataLoader
from penstock.rl.advantages import aggregate_loss

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--iterations", type=int, default=120)
options.add_argument("--answers", type=int, default=8, help="to each of 32 questions")
given = options.parse_args()
size = 32 * given.answers

torch.manual_seed(0)
drawing = torch.Generator().manual_seed(0)
policy = Policy(VOCABULARY, 2 * LENGTH + 1)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
buffer = LiveBuffer()
loader = RolloutDataLoader(buffer, rollout_batch_size=size, batch_size=size // 2, ppo_epochs=2)

history = []
for iteration in range(given.iterations):
    loader.policy_version = iteration
    prompts = questions(32, drawing).repeat_interleave(given.answers, 0)
    answers, log_probs = policy.sample(prompts, LENGTH, drawing)
    scores = rewards(prompts, answers)
    buffer.append(
        Rollout(
            prompt_ids=prompts[row],
            response_ids=answers[row],
            logprobs=log_probs[row],
            reward=scores[row].item(),
            group=row // given.answers,
            policy_version=iteration,
        )
        for row in range(size)
    )
    for batch in loader:  # every response twice, in minibatches of whole groups
        ratio = (policy.log_probs(batch.input_ids, LENGTH) - batch.old_log_probs).exp()
        gains = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
        loss = aggregate_loss(-gains, batch.response_mask, batch.denominators)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    history.append(scores.mean().item())
    print(f"iteration {iteration:3d}  reward {history[-1]:.3f}  sorted {(scores == 1).float().mean():.0%}")

first, last = sum(history[:3]) / 3, sum(history[-3:]) / 3
print(f"the reward rose from {first:.2f} to {last:.2f}: {last > first + 0.3}")
