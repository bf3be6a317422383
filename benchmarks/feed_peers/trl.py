"""TRL and Hugging Face datasets: packing, and packed batches of chats as in SFTTrainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast
from trl import pack_dataset

from feed_peers.inputs import make_lengths


def pack(capacity: int) -> dict[str, Any]:
    lengths = make_lengths()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    start = time.perf_counter()
    packed = pack_dataset(dataset, capacity, strategy="bfd")
    seconds = time.perf_counter() - start
    placed = sum(len(bin) for batch in packed.data.column("seq_lengths").chunks for bin in batch)
    return {"seconds": seconds, "bins": len(packed), "placed": placed, "tokens": int(offsets[-1])}


def chat(source: str, tokenizer: str, cache: str, max_length: int, batch_size: int) -> dict[str, Any]:
    return _chat(source, tokenizer, cache, max_length, batch_size, num_proc=None)


def chat_two_processes(source: str, tokenizer: str, cache: str, max_length: int, batch_size: int) -> dict[str, Any]:
    return _chat(source, tokenizer, cache, max_length, batch_size, num_proc=2)


def _chat(
    source: str, tokenizer: str, cache: str, max_length: int, batch_size: int, *, num_proc: int | None
) -> dict[str, Any]:
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    start = time.perf_counter()
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        made = loaded.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = made["input_ids"][:max_length], made["assistant_masks"][:max_length]
        return {"input_ids": ids, "labels": [token if kept else -100 for token, kept in zip(ids, mask)]}

    rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=str(Path(cache, "datasets")))
    made = rows.map(tokenize, remove_columns=rows.column_names, num_proc=num_proc)
    packed = pack_dataset(made, max_length, strategy="bfd").shuffle(seed=0)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    tokens = supervised = batches = 0
    first = 0.0
    for batch in DataLoader(packed, batch_size=batch_size, collate_fn=collator):
        first = first or time.perf_counter() - start
        tokens += batch["input_ids"].numel()
        supervised += int((batch["labels"] != -100).sum())
        batches += 1
    return {
        "seconds": time.perf_counter() - start,
        "first_seconds": first,
        "conversations": len(rows),
        "tokens": tokens,
        "supervised": supervised,
        "batches": batches,
        "efficiency": tokens / (len(packed) * max_length),
    }
