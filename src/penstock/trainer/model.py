"""The transformer: embeddings of tokens, positions as rotations, pre-norm blocks, a head for tokens or for classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ModelSizes", "Transformer", "parameter_groups"]


@dataclass(frozen=True)
class ModelSizes:
    """Everything the shapes of the weights, and the direction of attention, depend on."""

    tokens: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    causal: bool
    classes: int | None = None
    """One answer for a whole sample, out of so many; None: one token for every position."""


class Transformer(nn.Module):
    """Logits for every position, or, with `classes`, for every sample.

    The head of tokens is the embedding of tokens: one matrix. A causal model sees no position behind the one it
    answers for; any other sees all of them. Padding is seen by nobody but itself.

    Where a token stands is told by turning queries and keys by its position, so that what attention compares is how
    far apart two tokens are. With an embedding of every position instead, filling in masked characters stays for
    hundreds of steps at guessing the commonest one: 18% right after 150 steps of the shipped config, against 40%.
    """

    turns: Tensor

    def __init__(self, sizes: ModelSizes, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.n_embd
        self.tokens = nn.Embedding(sizes.tokens, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(sizes, dropout) for _ in range(sizes.n_layer))
        self.norm = nn.LayerNorm(width)
        self.classes = None if sizes.classes is None else nn.Linear(width, sizes.classes)
        self.register_buffer("turns", _turns(sizes), persistent=False)
        self.apply(_start)
        # Every block adds to the same stream: smaller last layers keep its spread the same for any depth.
        for name, weights in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(weights, std=0.02 / math.sqrt(2 * sizes.n_layer))
            elif name.endswith("mixed.weight"):
                nn.init.normal_(weights, std=width**-0.5)  # queries and keys that differ enough to be told apart

    def forward(self, x: Tensor, attend: Tensor | None = None) -> Tensor:
        stream = self.drop(self.tokens(x))
        turns = self.turns[:, : x.shape[1]]
        allowed = None if attend is None else _allowed(attend, self.sizes.causal)
        for block in self.blocks:
            stream = block(stream, turns, allowed)
        stream = self.norm(stream)
        if self.classes is None:
            return functional.linear(stream, self.tokens.weight)
        logits: Tensor = self.classes(_pooled(stream, attend))
        return logits


class _Block(nn.Module):
    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        width = sizes.n_embd
        self.heads, self.causal, self.dropout = sizes.n_head, sizes.causal, dropout
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, stream: Tensor, turns: Tensor, allowed: Tensor | None) -> Tensor:
        attended = self._attended(self.norm_attention(stream), turns, allowed)
        stream = stream + self.drop(self.attention_out(attended))
        hidden = functional.gelu(self.feed_in(self.norm_feed(stream)))
        out: Tensor = stream + self.drop(self.feed_out(hidden))
        return out

    def _attended(self, stream: Tensor, turns: Tensor, allowed: Tensor | None) -> Tensor:
        batch, length, width = stream.shape
        parts = self.mixed(stream).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            _turned(query, turns),
            _turned(key, turns),
            value,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and allowed is None,
        )
        return attended.transpose(1, 2).reshape(batch, length, width)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    weights = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]


def _turns(sizes: ModelSizes) -> Tensor:
    """[2, block, half of a head]: the cosine and sine of every position at every speed, from one turn in six tokens to
    one in several hundred, or in several blocks if those are longer."""
    half = sizes.n_embd // sizes.n_head // 2
    slowest = max(100.0, sizes.block_size)
    angles = torch.arange(sizes.block_size)[:, None] * slowest ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()])


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Pairs of numbers (the first half with the second) as points in a plane, turned about its origin."""
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).type_as(heads)


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _allowed(attend: Tensor, causal: bool) -> Tensor:
    """[batch, 1, from, to]. Every position sees itself, or padding would divide by nothing and spread NaN."""
    length = attend.shape[1]
    allowed = attend[:, None, None, :].expand(-1, 1, length, length)
    if causal:
        allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=attend.device).tril()
    return allowed | torch.eye(length, dtype=torch.bool, device=attend.device)


def _pooled(stream: Tensor, attend: Tensor | None) -> Tensor:
    """The mean of the positions that are no padding."""
    if attend is None:
        return stream.mean(dim=1)
    kept = attend.to(stream.dtype)[:, :, None]
    return (stream * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)
