"""One rank of several that read all kinds of loaders step by step, as a trainer would, until it is killed.

A rank knows its number from torch.distributed alone. Every batch is written down before the ranks meet in a collective,
and rank 0 saves the states of all loaders every few turns.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock import ConversationDataLoader, DataLoader, MixedDataLoader, PretrainDataLoader, Schedule
from penstock.corpus import prepare as preparation
from penstock.distributed import gather_states
from penstock.loaders import StreamOptions

PLANNED = ("concat", "best_fit", "chat", "mixed")
KINDS = (*PLANNED, "stream")
EPOCHS = 2
GLOBAL_BATCH = 8
LENGTH = 48
SAVE_EVERY = 3
TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"


def make_loader(kind: str, home: Path, cache: Path, **options: Any) -> DataLoader:
    if kind == "chat":
        path, more = home / "chats.jsonl", {"cache_dir": cache, **options}
        return ConversationDataLoader(path, TOKENIZER, LENGTH, "chatml", truncation="right", seed=2, **more)
    if kind == "stream":
        streaming = StreamOptions(streams=16, shuffle_window=16, timeout_seconds=60)
        return PretrainDataLoader(home / "text0", None, LENGTH, streaming=streaming, seed=4, **options)
    if kind == "mixed":
        schedule = Schedule.of([(0, {"a": 3, "b": 1}), (6, {"a": 1, "b": 1}), (14, {"a": 1, "b": 3})], "linear")
        sources = {"a": home / "text0", "b": home / "text1"}
        return MixedDataLoader(
            sources,
            schedule,
            chunk_size=LENGTH,
            packing="first_fit",
            stopping_strategy="all_exhausted",
            seed=3,
            **options,
        )
    return PretrainDataLoader(home / "text0", None, LENGTH, packing=kind, seed=1, **options)  # type: ignore[arg-type]


def batches_of(loader: DataLoader) -> Iterator[Any]:
    """The rest of the epochs there are."""
    while loader.epoch < EPOCHS:
        yield from loader


def record(kind: str, batch: Any) -> dict[str, Any]:
    """All that a batch holds, sample by sample, in a way that can be put together again from those of ranks."""
    told, arrays = batch.metadata, batch.to_numpy()
    fields = sorted(name for name, value in arrays.items() if getattr(value, "ndim", 0) == 2)
    samples = []
    for number in np.unique(told["sample"]).tolist():
        parts = told["sample"] == number
        held: dict[str, Any] = {name: f"{arrays[name].dtype} {arrays[name][number].tobytes().hex()}" for name in fields}
        samples.append(held | {"rows": told["row"][parts].tolist(), "sources": told["source"][parts].tolist()})
    items = None if kind == "stream" else batch.num_items_in_batch  # no rank of a stream knows what others learn
    return {"kind": kind, "step": told["step"], "epoch": told["epoch"], "items": items, "samples": samples}


def save(path: Path, state: Any, *, die: bool = False) -> None:
    temporary = path.with_suffix(".tmp")
    text = json.dumps(state)
    temporary.write_text(text[: len(text) // 2] if die else text)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    temporary.replace(path)


def counted_preparing() -> list[bool]:
    """For every store that a loader asks for, whether this process made it."""
    made: list[bool] = []
    make = preparation._make

    def noted(*given: Any, **options: Any) -> preparation.Prepared:
        prepared = make(*given, **options)
        made.append(prepared.report is not None)
        return prepared

    preparation._make = noted
    return made


def main(home: str, cache: str, out: str, rank: int, world: int, port: int, prefetch: Any, death: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=world)
    states, made = Path(home, "states.json"), counted_preparing()
    dist.barrier()
    options = {"batch_size": GLOBAL_BATCH // world, "prefetch": prefetch}
    loaders = {kind: make_loader(kind, Path(home), Path(cache), **options) for kind in KINDS}
    saved: dict[str, Any] = json.loads(states.read_text()) if states.exists() else {"turn": 0, "states": {}}
    for kind, state in saved["states"].items():
        loaders[kind].load_state_dict(state)
    opened = {
        "rank": str(loaders["concat"].rank),
        "made": made,
        "turn": saved["turn"],
        "plans": {kind: loaders[kind].plan.fingerprint for kind in PLANNED},
        "lengths": {kind: [loaders[kind].plan.steps_in(epoch) for epoch in range(EPOCHS)] for kind in PLANNED},
        "starts": {kind: loader.step for kind, loader in loaders.items()},
        "store": str(loaders["chat"].sources[0].inputs.table.stores[0].path),
    }
    Path(out, f"{rank}.opened.json").write_text(json.dumps(opened))
    streams = {kind: batches_of(loader) for kind, loader in loaders.items()}
    turn = saved["turn"]
    with Path(out, f"{rank}.jsonl").open("w") as written:
        while streams:
            for kind in list(streams):
                batch = next(streams[kind], None)
                if batch is None:
                    del streams[kind]
                    continue
                line = json.dumps(record(kind, batch))
                if death == [rank, turn, kind]:
                    written.write(line[: len(line) // 2])
                    written.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                written.write(f"{line}\n")
                written.flush()
                # A trainer would add up gradients here, so no rank is ever a step ahead of what others wrote down.
                everybody = torch.tensor([1, int(batch.metadata["step"])])
                dist.all_reduce(everybody)
                assert everybody.tolist() == [world, world * batch.metadata["step"]], "ranks are at other steps"
            turn += 1
            if turn % SAVE_EVERY:
                continue
            now = {kind: loader.state_dict() for kind, loader in loaders.items()}
            now["stream"] = gather_states(now["stream"], timeout_seconds=60)
            if rank == 0:
                save(states, {"turn": turn, "states": now}, die=death == [rank, turn, "saving"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
