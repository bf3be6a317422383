"""Chats for fine-tuning: rendered by a template, assistant turns supervised, packed without padding."""

import tempfile
from pathlib import Path

from penstock import ConversationDataLoader
from penstock.transforms import load_tokenizer

SAMPLE = Path(__file__).parent / "sample"

with tempfile.TemporaryDirectory() as cache:
    tokenizer = load_tokenizer(SAMPLE / "tokenizer")
    loader = ConversationDataLoader(
        path=SAMPLE / "chats.jsonl",
        tokenizer=tokenizer,
        max_length=256,
        chat_template="chatml",
        packing="best_fit",
        padding_free=True,  # all samples of a batch concatenated in one row
        batch_size=2,
        backend="numpy",
        cache_dir=cache,
    )
    with loader:
        batch = loader.get_batch()
        print("one row of", batch.input_ids.shape[1], "tokens, conversations begin at", batch.cu_seqlens[:-1].tolist())
        print("no mask, no padding:", batch.attention_mask is None)
        print("learned from:", batch.num_items_in_batch, "tokens. In the first conversation:")
        end = batch.cu_seqlens[1]
        print(repr(tokenizer.decode(batch.input_ids[0, :end][batch.loss_mask[0, :end]])))
        source, row = batch.metadata["sources"][0], batch.metadata["row"]
        print("rows of", source, "in this batch:", row.tolist())
