"""Transformer with rotary positions and pre-norm blocks, and a head over tokens or classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ConfigError

__all__ = ["ModelSizes", "Transformer", "parameter_groups"]


@dataclass(frozen=True)
class ModelSizes:
    """Numbers that the shapes of the weights, and the direction of attention, depend on."""

    tokens: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    causal: bool
    classes: int | None = None
    """Number of classes of a row; None: one token per position."""

    def __post_init__(self) -> None:
        if self.n_embd % (2 * self.n_head):
            raise ConfigError(f"n_embd={self.n_embd} must be an even multiple of n_head={self.n_head}")


class Transformer(nn.Module):
    """Logits of every position, or, with `classes`, of every row.

    The head over tokens shares its matrix with the embedding. Positions are rotary: with learned position embeddings
    filling in masked characters stays for hundreds of steps at the commonest one (18% right after 150 steps of the
    shipped config, against 40%).
    """

    rotations: Tensor

    def __init__(self, sizes: ModelSizes, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.n_embd
        self.tokens = nn.Embedding(sizes.tokens, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(sizes, dropout) for _ in range(sizes.n_layer))
        self.norm = nn.LayerNorm(width)
        self.classes = None if sizes.classes is None else nn.Linear(width, sizes.classes)
        self.register_buffer("rotations", _rotations(sizes), persistent=False)
        self.apply(_initialize)
        for name, weights in self.named_parameters():
            if name.endswith("out.weight"):
                # Every block adds to the residual stream: smaller outputs keep its variance for any depth.
                nn.init.normal_(weights, std=0.02 / math.sqrt(2 * sizes.n_layer))
            elif name.endswith("qkv.weight"):
                nn.init.normal_(weights, std=width**-0.5)  # smaller queries and keys would attend uniformly

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.tokens(x))
        rotations = self.rotations[:, : x.shape[1]]
        visible = None if mask is None else _visible(mask, self.sizes.causal)
        for block in self.blocks:
            hidden = block(hidden, rotations, visible)
        hidden = self.norm(hidden)
        if self.classes is None:
            return functional.linear(hidden, self.tokens.weight)
        return self.classes(_mean(hidden, mask))


class _Block(nn.Module):
    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        width = sizes.n_embd
        self.heads, self.causal, self.dropout = sizes.n_head, sizes.causal, dropout
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, rotations: Tensor, visible: Tensor | None) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(self.norm_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            _rotated(query, rotations),
            _rotated(key, rotations),
            value,
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and visible is None,
        )
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + self.drop(self.attention_out(attended))
        return hidden + self.drop(self.feed_out(functional.gelu(self.feed_in(self.norm_feed(hidden)))))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Groups for AdamW: matrices decay; norms and biases do not."""
    weights = list(model.parameters())
    return [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]


def _rotations(sizes: ModelSizes) -> Tensor:
    """Cosine and sine of every position at every frequency: [2, block, half of a head]."""
    half = sizes.n_embd // sizes.n_head // 2
    slowest = max(100.0, sizes.block_size)
    angles = torch.arange(sizes.block_size)[:, None] * slowest ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()])


def _rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = rotations
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).type_as(heads)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _visible(mask: Tensor, causal: bool) -> Tensor:
    """[batch, 1, from, to]. Every position sees itself: attention over nothing would be NaN."""
    length = mask.shape[1]
    visible = mask[:, None, None, :].expand(-1, 1, length, length)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return visible | torch.eye(length, dtype=torch.bool, device=mask.device)


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the positions that are not padding."""
    if mask is None:
        return hidden.mean(dim=1)
    kept = mask.to(hidden.dtype)[:, :, None]
    return (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)
