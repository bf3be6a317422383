"""Golden loaders by name: their batches and states must not change; `root` is a copy of the material."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock import (
    AdvantageSpec,
    ConversationDataLoader,
    MixedDataLoader,
    MLXDataLoader,
    PreferenceDataLoader,
    PretrainDataLoader,
    RolloutDataLoader,
    Schedule,
    TabularDataset,
    open_store,
)
from penstock.datasets import Folds, TitanicDataset
from penstock.datasets.titanic import titanic_spec
from penstock.distributed import Balanced, Strided
from penstock.loaders import MaskedLM, StreamOptions
from penstock.rl import KLPenalty, OverlongPenalty

Make = Callable[[Path], Any]

BATCHES = 24
"""That are taken of each loader: most are in their second or third epoch by then."""
SAVED_AFTER = 5
"""Batches; then the state is saved."""
COMMON: dict[str, Any] = {"backend": "numpy", "seed": 7}


def text(root: Path, **options: Any) -> Any:
    given = {"chunk_size": 48, "batch_size": 4} | COMMON | options
    return PretrainDataLoader(root / "stores/text.store", **given)


def versioned(root: Path, version: int | None = None, **options: Any) -> Any:
    return PretrainDataLoader(
        open_store(root / "stores/versions.store", version=version), chunk_size=32, **COMMON, **options
    )


def chats(root: Path, **options: Any) -> Any:
    given = {"max_length": 256, "batch_size": 3} | COMMON | options
    return ConversationDataLoader(root / "stores/chats.store", root / "tokenizer", **given)


def raw_text(root: Path, **options: Any) -> Any:
    given = {"chunk_size": 64, "batch_size": 4, "cache_dir": root / "cache"} | COMMON | options
    return PretrainDataLoader(root / "raw/documents.jsonl", root / "tokenizer", **given)


def raw_chats(root: Path, **options: Any) -> Any:
    given = {"batch_size": 4, "packing": "best_fit", "cache_dir": root / "cache"} | COMMON | options
    return ConversationDataLoader(root / "raw/chats.jsonl", root / "tokenizer", 256, "chatml", **given)


def raw_pairs(root: Path, **options: Any) -> Any:
    given = {"batch_size": 3, "cache_dir": root / "cache"} | COMMON | options
    return PreferenceDataLoader(root / "raw/pairs.jsonl", root / "tokenizer", 128, "chatml", **given)


def pairs(root: Path, **options: Any) -> Any:
    given = {"max_length": 128, "batch_size": 3} | COMMON | options
    return PreferenceDataLoader(root / "stores/pairs.store", root / "tokenizer", **given)


def labelled(root: Path, **options: Any) -> Any:
    given = {"max_length": 128, "batch_size": 4} | COMMON | options
    return PreferenceDataLoader(root / "stores/labelled.store", root / "tokenizer", **given)


def mixed(root: Path, **options: Any) -> Any:
    sources = {"text": root / "stores/text.store", "numbers": root / "stores/versions.store"}
    return MixedDataLoader(sources, **({"chunk_size": 32, "batch_size": 8} | COMMON | options))


def mixed_loaders(root: Path) -> Any:
    sources = {
        "text": text(root, chunk_size=256, packing="best_fit", tokenizer=root / "tokenizer"),
        "chats": chats(root, packing="best_fit"),
    }
    weights = {"text": 0.6, "chats": 0.4}
    return MixedDataLoader(sources, weights, batch_size=5, max_epochs={"chats": 2}, **COMMON)


def edited(root: Path) -> Any:
    loader = mixed(root, weights={"text": 0.75, "numbers": 0.25}, stopping_strategy="never", batch_size=4)
    plan = loader.plan.skip(7, 9).ban({"text": [2, 3]}, step=4)
    loader.edit(plan.reweight(12, {"text": 0.25, "numbers": 0.75}))
    return loader


def streamed(root: Path, **options: Any) -> Any:
    given = {"streaming": StreamOptions(streams=4, shuffle_window=8), "batch_size": 4} | COMMON | options
    return PretrainDataLoader(root / "raw/documents.jsonl", root / "tokenizer", 64, **given)


def streamed_chats(root: Path, **options: Any) -> Any:
    given = {"streaming": True, "packing": "best_fit", "batch_size": 2} | COMMON | options
    return ConversationDataLoader(root / "raw/chats.jsonl", root / "tokenizer", 256, "chatml", **given)


# -- samples -----------------------------------------------------------------------------------------------------------


def samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "input_ids": rng.integers(5, 90, int(size)).tolist(),
            "labels": int(size) % 3,
            "score": float(size) / 4,
            "text": f"row {row}",
            "metadata": {"id": row * 10},
        }
        for row, size in enumerate(rng.integers(2, 20, 41))
    ]


def features() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {
        "x": rng.integers(0, 100, (37, 3)).astype(np.float32),
        "flags": rng.integers(0, 2, (37, 2)).astype(np.uint8),
        "labels": rng.integers(0, 5, 37),
    }


class Slow:
    """A dataset that has no columns, so that its samples are asked for one by one."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = samples()[row]
        return found | {"input_ids": np.array(found["input_ids"], np.int32)}


def sampled(dataset: Callable[[Path], Any], root: Path, **options: Any) -> Any:
    given = {"batch_size": 4, "num_workers": 0} | COMMON | options
    return MLXDataLoader(dataset(root), **given)


def masked(root: Path, **options: Any) -> Any:
    hide = MaskedLM.of(root / "tokenizer", whole_words=options.pop("whole_words", False), seed=5)
    return sampled(titanic, root, objective="masked_lm", mlm=hide, **options)


def spec(root: Path) -> Any:
    return replace(titanic_spec(root / "titanic"), num_samples=None)


def titanic(root: Path, split: str = "train", **options: Any) -> Any:
    given = {"folds": Folds(4, seed=1), "tokenizer": root / "tokenizer", "cache_dir": root / "cache/tables"} | options
    return TitanicDataset(spec(root), split, **given)


def table(root: Path, template: str = "key_value", **options: Any) -> Any:
    given = {"tokenizer": root / "tokenizer", "cache_dir": root / "cache/tables", "exclude": ["Ticket"]} | options
    return TabularDataset(spec(root), "train", template=template, **given)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def rollouts(root: Path, **options: Any) -> Any:
    given = {"batch_size": 8, "ppo_epochs": 2} | COMMON | options
    return RolloutDataLoader(root / "raw/rollouts.jsonl", **given)


def rollout_rows(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "raw/rollouts.jsonl").read_text("utf-8").splitlines()]


def listed_rollouts(root: Path, **options: Any) -> Any:
    return RolloutDataLoader(rollout_rows(root), **({"batch_size": 8} | COMMON | options))


_SCHEDULE = Schedule.of(
    [(0, {"text": 0.9, "numbers": 0.1}), (8, {"text": 0.25, "numbers": 0.75})], interpolation="linear"
)
_GAE = AdvantageSpec(estimator="gae", gamma=0.99, lam=0.95, kl=KLPenalty(beta=0.05))
_DR_GRPO = AdvantageSpec(
    estimator="dr_grpo", preset="verl", max_length=16, overlong=OverlongPenalty(max_length=12, buffer=4)
)
_REINFORCE = AdvantageSpec(estimator="reinforce_plus_plus", kl=KLPenalty(beta=0.1), whiten=True)
_BUCKETS = {"bucket_by_length": True, "gradient_accumulation_steps": 3, "pad_to_multiple_of": 8}

LOADERS: Mapping[str, Make] = {
    "text: concat": text,
    "text: concat, rank 0 of 2": partial(text, rank=0, world_size=2, batch_size=2),
    "text: concat, rank 1 of 2": partial(text, rank=1, world_size=2, batch_size=2),
    "text: in order": partial(text, shuffle=False, drop_last=True, batch_size=7),
    "text: best fit": partial(text, packing="best_fit", truncation="split", chunk_size=160),
    "text: first fit": partial(text, packing="first_fit", truncation="right", chunk_size=200),
    "text: padding free": partial(text, packing="best_fit", truncation="drop", chunk_size=200, padding_free=True),
    "text: rows": partial(text, packing=None, truncation="left", padding_side="left", pad_to_multiple_of=16),
    "text: token budget": partial(text, packing=None, truncation="right", chunk_size=128, max_tokens=600),
    "text: strided": partial(text, sharding=Strided(), rank=1, world_size=3, batch_size=2),
    "text: balanced": partial(
        text, packing=None, truncation="right", sharding=Balanced(), rank=1, world_size=2, batch_size=3
    ),
    "text: some fields": partial(text, fields=["input_ids", "labels"]),
    "text: raw": raw_text,
    "versions: latest": versioned,
    "versions: first": partial(versioned, version=1),
    "chats: rows": chats,
    "chats: packed": partial(chats, packing="best_fit"),
    "chats: padding free": partial(chats, padding_free=True),
    "chats: raw": raw_chats,
    "chats: raw, rank 1 of 2": partial(raw_chats, rank=1, world_size=2, batch_size=2),
    "pairs: rows": pairs,
    "pairs: packed": partial(pairs, packing="best_fit"),
    "pairs: padding free": partial(pairs, padding_free=True, completion="all"),
    "pairs: token budget": partial(pairs, max_tokens=400),
    "pairs: raw": raw_pairs,
    "pairs: rank 1 of 2": partial(pairs, rank=1, world_size=2, batch_size=2),
    "labelled: kl": partial(labelled, kl=True),
    "labelled: packed": partial(labelled, packing="first_fit"),
    "mixed: schedule": partial(mixed, weights=_SCHEDULE, stopping_strategy="all_exhausted"),
    "mixed: rank 1 of 2": partial(
        mixed, weights=_SCHEDULE, stopping_strategy="all_exhausted", rank=1, world_size=2, batch_size=4
    ),
    "mixed: temperature": partial(mixed, temperature=2.0, stopping_strategy="all_exhausted_without_replacement"),
    "mixed: loaders": mixed_loaders,
    "mixed: edited": edited,
    "streamed: text": streamed,
    "streamed: best fit": partial(streamed, packing="best_fit", truncation="split"),
    "streamed: rank 1 of 2": partial(
        streamed, streaming=StreamOptions(streams=4, steps_per_epoch=6), rank=1, world_size=2, batch_size=2
    ),
    "streamed: chats": streamed_chats,
    "samples: list": partial(sampled, lambda root: samples()),
    "samples: one by one": partial(sampled, lambda root: Slow(), num_workers=2),
    "samples: columns": partial(sampled, lambda root: features(), objective="classification"),
    "samples: buckets": partial(sampled, lambda root: samples(), **_BUCKETS),
    "samples: rank 1 of 2": partial(sampled, lambda root: samples(), rank=1, world_size=2, **_BUCKETS),
    "samples: cut": partial(
        sampled, lambda root: samples(), max_length=8, truncation="left", padding="max_length", drop_last=True
    ),
    "samples: titanic": partial(sampled, titanic),
    "samples: table": partial(sampled, table, objective="regression", bucket_by_length=True),
    "samples: masked": masked,
    "samples: masked words": partial(masked, whole_words=True, gradient_accumulation_steps=2),
    "rollouts: grpo of TRL": partial(rollouts, preset="trl"),
    "rollouts: gae": partial(rollouts, estimator=_GAE),
    "rollouts: dr_grpo of verl": partial(rollouts, estimator=_DR_GRPO, micro_batch_tokens=64),
    "rollouts: reinforce++": partial(rollouts, estimator=_REINFORCE, padding="free"),
    "rollouts: rloo, listed": partial(listed_rollouts, estimator="rloo", rollout_batch_size=12),
    "rollouts: opo, rank 1 of 2": partial(rollouts, estimator="opo", rank=1, world_size=2, batch_size=4),
    "rollouts: cut": partial(rollouts, max_response_length=6, response_truncation="right", keep_groups=False),
}


def take(loader: Any, count: int) -> list[Any]:
    return [loader.get_batch() for _ in range(count)]
