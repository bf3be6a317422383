"""Mixture of two sources with weights that change: each source is within one sample of its share at every step."""

import tempfile
from pathlib import Path

from penstock import ConversationDataLoader, MixedDataLoader, PretrainDataLoader, Schedule

SAMPLE = Path(__file__).parent / "sample"


def make_loader(cache: str) -> MixedDataLoader:
    common = {"packing": "best_fit", "cache_dir": cache, "backend": "numpy"}
    reports = PretrainDataLoader(SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", 288, **common)
    chats = ConversationDataLoader(SAMPLE / "chats.jsonl", SAMPLE / "tokenizer", 288, "chatml", **common)
    points = [(0, {"reports": 0.9, "chats": 0.1}), (10, {"reports": 0.5, "chats": 0.5})]
    return MixedDataLoader(
        {"reports": reports, "chats": chats},
        Schedule.of(points, interpolation="linear"),
        batch_size=6,
        stopping_strategy="all_exhausted",  # the few chats are repeated until the reports end too
        **common,
    )


with tempfile.TemporaryDirectory() as cache, make_loader(cache) as loader:
    given, target, furthest = 0, 0.0, 0.0
    for batch in loader:
        step = batch.metadata["step"]
        of_sample = dict(zip(batch.metadata["sample"].tolist(), batch.metadata["source"].tolist()))
        weight = loader.plan.schedule.weights_at(step)["chats"]
        given, target = given + sum(of_sample.values()), target + 6 * float(weight)
        furthest = max(furthest, abs(given - target))
        if step % 5 == 0:
            print(f"step {step}: weight {float(weight):.2f}, {given} samples of chats, {target:.1f} wanted")
        if step == 12:
            break
    print("never further off than one sample:", furthest < 1)

    # New weights from here on. Delivered batches stay, and every source continues at its cursor.
    loader.edit(loader.plan.reweight(loader.step, {"reports": 1, "chats": 0}))
    batch = next(iter(loader))
    print("sources of the next step:", {batch.metadata["sources"][number] for number in batch.metadata["source"]})
    row = int(batch.metadata["row"][0])
    print(
        f"row {row} of reports is used in the steps", [use.step for use in loader.plan.trace("reports", row, epochs=2)]
    )
