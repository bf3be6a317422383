"""Training loop over batches of `mx.array`."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from titanic_parts.model import Encoder

from penstock.loaders.mlx_loader import MLXDataLoader

Loss = Callable[[Encoder, Any], mx.array]


def class_loss(model: Encoder, batch: Any) -> mx.array:
    """Cross entropy of the classes; `num_items_in_batch` is the number of rows."""
    scores = model(batch["input_ids"], batch["attention_mask"])
    losses = nn.losses.cross_entropy(scores, batch["labels"], label_smoothing=0.05)
    return losses.sum() / batch.num_items_in_batch


def token_loss(model: Encoder, batch: Any) -> mx.array:
    """Cross entropy of the tokens that were hidden; `num_items_in_batch` is their number."""
    scores = model.predict_tokens(batch["input_ids"], batch["attention_mask"])
    hidden = batch["labels"] != -100
    losses = nn.losses.cross_entropy(scores, mx.where(hidden, batch["labels"], 0))
    return mx.where(hidden, losses, 0.0).sum() / batch.num_items_in_batch


def fit(model: Encoder, loader: MLXDataLoader, steps: int, loss: Loss, *, rate: float = 2e-3) -> Iterator[float]:
    """Train for a number of steps, with a warm-up and a cosine schedule; yields the loss of each step."""
    warm = max(1, steps // 10)
    rates = [optim.linear_schedule(0.0, rate, warm), optim.cosine_decay(rate, max(1, steps - warm))]
    optimizer = optim.AdamW(optim.join_schedules(rates, [warm]), weight_decay=0.05)
    learn = nn.value_and_grad(model, loss)
    done = 0
    while done < steps:
        for batch in loader:  # one epoch, shuffled
            model.train()
            value, gradients = learn(model, batch)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state, value)
            done += 1
            yield value.item()
            if done == steps:
                return


def learn_classes(model: Encoder, train: Any, val: Any, epochs: int) -> tuple[list[float], list[tuple[int, float]]]:
    """Train on one fold and evaluate on the other after each epoch; the losses of both, the latter as (step, loss)."""
    loader = MLXDataLoader(train, batch_size=32, objective="classification", drop_last=True)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    for loss in fit(model, loader, epochs * len(loader), class_loss):
        losses.append(loss)
        if len(losses) % len(loader) == 0:
            said = predict(model, val)
            validation.append((len(losses), val.score(said, "log_loss")))
            right, mean = val.score(val.class_of(said), "accuracy"), np.mean(losses[-len(loader) :])
            print(f"epoch {len(validation)} of {epochs}: loss {mean:.3f}, validation accuracy {right:.3f}", flush=True)
    return losses, validation


def predict(model: Encoder, dataset: Any) -> np.ndarray:
    """The probability of each class for each row, in the order of the dataset."""
    model.eval()
    loader = MLXDataLoader(dataset, batch_size=128, shuffle=False)
    parts = [np.array(mx.softmax(model(batch["input_ids"], batch["attention_mask"]), axis=-1)) for batch in loader]
    return np.concatenate(parts)
