"""Small BERT: embeddings, a few blocks of bidirectional attention, and a head for each task."""

import math

import mlx.core as mx
from mlx import nn


class Block(nn.Module):
    """Attention and two layers, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, hidden: mx.array, bias: mx.array) -> mx.array:
        rows, length, width = hidden.shape
        mixed = self.mix(self.first(hidden)).reshape(rows, length, 3, self.heads, width // self.heads)
        query, key, value = (part.squeeze(0) for part in mx.split(mixed.transpose(2, 0, 3, 1, 4), 3))
        scale = math.sqrt(self.heads / width)
        seen = mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=bias)
        hidden = hidden + self.dropout(self.out(seen.transpose(0, 2, 1, 3).reshape(rows, length, width)))
        return hidden + self.dropout(self.down(mx.maximum(self.up(self.second(hidden)), 0)))


class Encoder(nn.Module):
    """Token ids to a score for each class; for pretraining, to scores for each token of the vocabulary."""

    def __init__(
        self, vocabulary: int, classes: int, longest: int, *, width: int = 32, blocks: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = [Block(width, 4, dropout) for _ in range(blocks)]
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.classes = nn.Linear(width, classes)

    def hidden(self, input_ids: mx.array, attention_mask: mx.array) -> mx.array:
        """Output of the last block for each token. No token attends to padding."""
        hidden = self.dropout(self.tokens(input_ids) + self.places(mx.arange(input_ids.shape[1])))
        bias = mx.where(attention_mask[:, None, None, :] > 0, 0.0, -1e9)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return self.norm(hidden)

    def __call__(self, input_ids: mx.array, attention_mask: mx.array) -> mx.array:
        """Scores of the classes, from the mean of all tokens."""
        shown = attention_mask[:, :, None].astype(mx.float32)
        pooled = (self.hidden(input_ids, attention_mask) * shown).sum(1) / shown.sum(1)
        return self.classes(self.dropout(pooled))

    def predict_tokens(self, input_ids: mx.array, attention_mask: mx.array) -> mx.array:
        """Scores of the vocabulary at every position, with the embeddings as the last layer."""
        return self.tokens.as_linear(self.hidden(input_ids, attention_mask))
