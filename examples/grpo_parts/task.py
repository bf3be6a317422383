"""Task: sort digits. Prompts, and the reward of a response."""

import torch

DIGITS, LENGTH, ASK = 6, 4, 6
"""Four digits from 0 to 5; token 6 ends the prompt."""
VOCABULARY = DIGITS + 1


def questions(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, LENGTH + 1): random digits, and the token that ends the prompt."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=generator)
    return torch.cat([digits, torch.full((count, 1), ASK)], 1)


def rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Share of correct digits of a response, from 0 to 1."""
    return (answers == prompts[:, :LENGTH].sort(1).values).float().mean(1)
