"""Sorting digits: questions whose answers can be checked, and how right an answer is."""

import torch

DIGITS, LENGTH, ASK = 6, 4, 6
"""Digits 0 to 5, four of them; token 6 asks for the answer."""
VOCABULARY = DIGITS + 1


def questions(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, LENGTH + 1): digits in any order, and the token that asks for them in order."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=generator)
    return torch.cat([digits, torch.full((count, 1), ASK)], 1)


def rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """How much of the answer is right, from 0 to 1."""
    return (answers == prompts[:, :LENGTH].sort(1).values).float().mean(1)
