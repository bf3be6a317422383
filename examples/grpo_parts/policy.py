"""Small policy: a transformer of two layers, sampling, and log-probs of sampled tokens."""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocabulary: int, longest: int, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probs of the next token at each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.layers(hidden, mask, is_causal=True)).log_softmax(-1)

    def log_probs(self, ids: torch.Tensor, answer: int) -> torch.Tensor:
        """Log-probs of the last `answer` tokens of each row."""
        return self(ids[:, :-1])[:, -answer:].gather(2, ids[:, -answer:, None])[:, :, 0]

    @torch.no_grad()
    def sample(self, ids: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample `count` more tokens; returns them with their log-probs."""
        drawn = []
        for _ in range(count):
            scores = self(ids)[:, -1]
            token = torch.multinomial(scores.exp(), 1, generator=generator)
            ids = torch.cat([ids, token], 1)
            drawn.append(scores.gather(1, token))
        return ids[:, -count:], torch.cat(drawn, 1)
