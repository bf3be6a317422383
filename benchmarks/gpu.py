"""Feeding one GPU: how much a training step loses to its data, and how fast batches arrive without a model.

    python benchmarks/gpu.py                                  # everything, about eight minutes on one H200
    python benchmarks/gpu.py --suite feed --only penstock,loader
    python benchmarks/gpu.py --suite train --rounds 5 --json figures.json

`train`   steps of a compiled 124M model (32 x 2048 tokens) and of a small eager one that is bound by its launches
          (2 x 2048), fed by every way in turn, interleaved; `constant` is one batch that is on the GPU already
`feed`    batches of 32 x 2048, ids and labels as int64 on the GPU, at most four in flight; no model

Ways: a token store, packed rows with a mask (as of chats), a stream that tokenizes raw text; torch's DataLoader over a
memory map; and gathers by hand. The data are made once, in `.data/gpu`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]
DATA = Path(__file__).parent / ".data" / "gpu"
VOCABULARY, TOKENS = 32_000, 2048
ROWS = {"large": 32, "small": 2}
IN_FLIGHT = 4


# -- data ------------------------------------------------------------------------------------------------------------


def make_data(tokens: int, text_mb: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from penstock.store import StoreWriter

    if (DATA / "done").exists():
        return
    DATA.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    flat = np.minimum(generator.zipf(1.2, tokens) % VOCABULARY, VOCABULARY - 1).astype(np.uint16)
    flat.tofile(DATA / "flat.bin")
    for name, masked in (("store", False), ("chats", True)):
        lengths = generator.integers(64, 1500, tokens // 782).astype(np.int32) if masked else np.array([1000], np.int32)
        lengths = lengths if masked else np.full(tokens // 1000, 1000, np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        offsets = offsets[: np.searchsorted(offsets, tokens, side="right")]
        columns = {"input_ids": pa.LargeListArray.from_arrays(offsets, flat[: offsets[-1]])}
        if masked:
            learned = pa.array(np.arange(offsets[-1]) % 100 > 40)
            columns["loss_mask"] = pa.LargeListArray.from_arrays(offsets, learned)
        whole = pa.record_batch(columns)
        with StoreWriter(DATA / f"{name}.store") as writer:
            for start in range(0, whole.num_rows, 20_000):
                writer.write(whole.slice(start, 20_000))
            writer.publish()
    words = np.array(
        ["".join(chr(97 + int(c)) for c in generator.integers(0, 26, n)) for n in generator.integers(2, 9, 20_000)]
    )
    folder = DATA / "text"
    folder.mkdir(exist_ok=True)
    for number in range(max(text_mb // 16, 1)):
        with open(folder / f"{number:03}.jsonl", "w") as file:
            while file.tell() < 16 << 20:
                chosen = words[np.minimum(generator.zipf(1.3, 400) % 20_000, 19_999)]
                file.write(json.dumps({"text": " ".join(chosen)}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<eos>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    with open(folder / "000.jsonl") as file:
        tokenizer.train_from_iterator((json.loads(line)["text"] for _, line in zip(range(2_000), file)), trainer)
    tokenizer.save(str(DATA / "tokenizer.json"))
    (DATA / "done").touch()


# -- ways ------------------------------------------------------------------------------------------------------------


def penstock(rows: int, **options: Any) -> Iterator[Pair]:
    from penstock import PretrainDataLoader

    given = {"packing": "concat", "path": DATA / "store.store", "device": "cuda"} | options
    with PretrainDataLoader(chunk_size=TOKENS, batch_size=rows, **given) as loader:
        while True:
            for batch in loader:
                yield batch.input_ids, batch.labels


def store(rows: int) -> Iterator[Pair]:
    return penstock(rows)


def store_by_hand(rows: int) -> Iterator[Pair]:
    for batch in penstock(rows, device=None):
        yield tuple(each.to("cuda") for each in batch)  # type: ignore[misc]


def chats(rows: int) -> Iterator[Pair]:
    return penstock(rows, path=DATA / "chats.store", packing="best_fit")


def stream(rows: int, **options: Any) -> Iterator[Pair]:
    files = sorted((DATA / "text").glob("*.jsonl"))
    return penstock(rows, path=files, tokenizer=DATA / "tokenizer.json", **{"streaming": True, **options})


def stream_threads(rows: int) -> Iterator[Pair]:
    from penstock.loaders import StreamOptions

    return stream(rows, streaming=StreamOptions(workers="thread"))


def memory_map(rows: int) -> Any:
    flat = np.memmap(DATA / "flat.bin", np.uint16, "r")
    return flat[: len(flat) // TOKENS * TOKENS].reshape(-1, TOKENS)


class MapDataset(torch.utils.data.Dataset[Pair]):
    def __init__(self) -> None:
        self._rows = memory_map(0)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Pair:
        ids = torch.from_numpy(self._rows[index].astype(np.int64))
        return ids, ids.clone()


def torch_loader(rows: int, workers: int) -> Iterator[Pair]:
    loader = torch.utils.data.DataLoader(
        MapDataset(), batch_size=rows, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True
    )
    while True:
        for ids, labels in loader:
            yield ids.cuda(non_blocking=True), labels.cuda(non_blocking=True)


def by_hand(rows: int, *, narrow: bool) -> Iterator[Pair]:
    """Gather into pinned memory that is there, copy on a side stream; labels are widened or copied on the GPU."""
    source = memory_map(rows)
    kind = torch.uint16 if narrow else torch.int64
    pinned = [torch.empty((rows, TOKENS), dtype=kind, pin_memory=True) for _ in range(IN_FLIGHT + 1)]
    views, events = [each.numpy() for each in pinned], [torch.cuda.Event() for _ in pinned]
    side, number = torch.cuda.Stream(), 0
    while True:
        order = np.random.default_rng(number).permutation(len(source))
        for start in range(0, len(order) - rows + 1, rows):
            at = number % len(pinned)
            number += 1
            events[at].synchronize()
            np.copyto(views[at], source[order[start : start + rows]])
            with torch.cuda.stream(side):
                there = pinned[at].to("cuda", non_blocking=True)
                events[at].record()
            torch.cuda.current_stream().wait_stream(side)
            there.record_stream(torch.cuda.current_stream())
            ids = there.to(torch.int64) if narrow else there
            yield ids, ids.clone()


WAYS: dict[str, Callable[[int], Iterator[Pair]]] = {
    "penstock store": store,
    "penstock store, .to('cuda')": store_by_hand,
    "penstock packed, masked": chats,
    "penstock stream": stream,
    "penstock stream, threads": stream_threads,
    "torch DataLoader, 0 workers": lambda rows: torch_loader(rows, 0),
    "torch DataLoader, 4 workers": lambda rows: torch_loader(rows, 4),
    "torch DataLoader, 14 workers": lambda rows: torch_loader(rows, 14),
    "by hand, int64": lambda rows: by_hand(rows, narrow=False),
    "by hand, uint16": lambda rows: by_hand(rows, narrow=True),
}
TRAINED = ("penstock store", "penstock packed, masked", "penstock stream", "penstock stream, threads")
TRAINED += ("torch DataLoader, 4 workers", "by hand, uint16")


# -- training --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.mixed, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.mixed(self.norms[0](x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(TOKENS, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def make_step(size: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    torch.manual_seed(0)
    model: Any = (Model(12, 768, 12) if size == "large" else Model(6, 384, 6)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if size == "large":
        model = torch.compile(model)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run_train(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for size, steps in (("large", options.steps), ("small", options.steps * 6)):
        rows, step = ROWS[size], make_step(size)
        constant = next(store(rows))
        ways: dict[str, Iterator[Pair]] = {"constant": itertools.repeat(constant)}
        ways |= {name: WAYS[name](rows) for name in TRAINED if chosen(name, options)}
        for batches in ways.values():
            for _ in range(12):
                step(*next(batches))
        times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, batches in ways.items():
                for _ in range(3):
                    step(*next(batches))
                times[name].append((*timed_steps(step, batches, steps), idle_seconds(step, batches, steps // 2)))
        base = median(each[0] for each in times["constant"])
        for name, each in times.items():
            middle, wait, cores, idle = (median(column) for column in zip(*each))
            found.append(
                {
                    "model": size,
                    "way": name,
                    "ms": middle,
                    "of constant": middle / base - 1,
                    "wait_ms": wait,
                    "idle_ms": idle,
                    "cores": cores,
                }
            )
            print(
                f"{size:6} {name:30} {middle * 1e3:9.3f} ms  {100 * (middle / base - 1):+7.2f}%  "
                f"next() {wait * 1e3:7.3f} ms, {idle * 1e3:7.3f} with an idle GPU  {cores:5.2f} cores",
                flush=True,
            )
        for batches in ways.values():
            getattr(batches, "close", lambda: None)()
    return found


def timed_steps(step: Callable[..., None], batches: Iterator[Pair], steps: int) -> tuple[float, float, float]:
    """Seconds of a step, seconds in `next`, and cores used."""
    torch.cuda.synchronize()
    began, cpu = time.perf_counter(), cpu_seconds()
    waited = waiting_seconds(step, batches, steps)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds / steps, waited, (cpu_seconds() - cpu) / seconds


def waiting_seconds(
    step: Callable[..., None], batches: Iterator[Pair], steps: int, *, before: Callable[[], None] = lambda: None
) -> float:
    """Seconds in `next`, for each of some steps, with a call before it that is not counted."""
    waited = 0.0
    for _ in range(steps):
        before()
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        step(*batch)
        del batch
    return waited / steps


def idle_seconds(step: Callable[..., None], batches: Iterator[Pair], steps: int) -> float:
    """Seconds in `next` while the GPU has nothing to do. In a training it is busy: the host is ahead of it."""
    return waiting_seconds(step, batches, steps, before=torch.cuda.synchronize)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


# -- feed ------------------------------------------------------------------------------------------------------------


def run_feed(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    rows = ROWS["large"]
    for name, way in WAYS.items():
        if not chosen(name, options):
            continue
        batches, rates, cores = way(rows), [], []
        try:
            for _ in range(20):
                next(batches)
        except Exception as error:
            print(f"feed   {name:30} failed: {error}", flush=True)
            continue
        for _ in range(options.rounds):
            rate, used = timed_feed(batches, options.seconds)
            rates.append(rate)
            cores.append(used)
        batches.close()  # type: ignore[attr-defined]
        found.append({"way": name, "tokens_per_second": median(rates), "cores": median(cores)})
        print(f"feed   {name:30} {median(rates) / 1e6:9.1f} M tokens/s  {median(cores):5.2f} cores", flush=True)
    return found


def timed_feed(batches: Iterator[Pair], seconds: float) -> tuple[float, float]:
    torch.cuda.synchronize()
    waiting: deque[Any] = deque()
    tokens, began, cpu = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - began < seconds:
        ids, labels = next(batches)
        assert ids.dtype == labels.dtype == torch.int64
        tokens += ids.numel()
        event = torch.cuda.Event()
        event.record()
        waiting.append(event)
        if len(waiting) > IN_FLIGHT:
            waiting.popleft().synchronize()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    return tokens / took, (cpu_seconds() - cpu) / took


def chosen(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(part in name for part in options.only.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="feed,train", help="feed, train, or both")
    parser.add_argument("--only", default="", help="ways whose names contain one of these words")
    parser.add_argument("--tokens", type=float, default=200e6, help="tokens of the store")
    parser.add_argument("--text-mb", type=int, default=256, help="raw text of the stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of the large model in a round")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of a round of `feed`")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; benchmarks/feed.py measures without one")
    torch.set_float32_matmul_precision("high")
    make_data(int(options.tokens), options.text_mb)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    print(machine, flush=True)
    figures: dict[str, Any] = {"machine": machine}
    suites = {"feed": run_feed, "train": run_train}
    for name in options.suite.split(","):
        figures[name] = suites[name](options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
