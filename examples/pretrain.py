"""Documents for pretraining: tokenized on first use, split into chunks, shuffled in every epoch."""

import tempfile
from pathlib import Path

from penstock import PretrainDataLoader

SAMPLE = Path(__file__).parent / "sample"

with tempfile.TemporaryDirectory() as cache:
    text = {"path": SAMPLE / "documents.jsonl", "tokenizer": SAMPLE / "tokenizer", "cache_dir": cache}
    with PretrainDataLoader(**text, chunk_size=128, batch_size=8, backend="numpy") as loader:  # or torch, mlx, jax
        print(f"{len(loader)} batches an epoch")
        for batch in loader:
            rows, tokens = batch.input_ids.shape
            documents = len(batch.cu_seqlens) - 1
            print(f"step {batch.metadata['step']}: {rows} x {tokens} tokens, {documents} documents or parts")
            if loader.step == 3:
                break
        first = batch.labels[batch.position_ids == 0]
        print("the first token of a document is not learned from the one before it:", (first == -100).all())

    # Whole documents instead, packed by length. The token store exists already, so this starts at once.
    with PretrainDataLoader(**text, chunk_size=512, packing="best_fit", backend="numpy") as packed:
        steps = len(packed)
        print(f"packed: {steps} batches, composed anew in the next epoch: ", end="")
        print(packed.plan.step(0).rows != packed.plan.step(steps).rows)
