"""Makes a loader of raw chats, whose store is prepared on first use, and says how that went.

With `hold` it stops for good in front of that batch of the store, so that it can be killed in the middle for sure.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from penstock import ConversationDataLoader, MemoryBudget, PipelineConfig
from penstock.batching import options
from penstock.corpus import prepare as preparation
from penstock.files.locks import FileLock
from penstock.sinks import StoreSink

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"


def make_loader(source: Path, cache: Path, **options: Any) -> ConversationDataLoader:
    fixed: dict[str, Any] = {"packing": "best_fit", "batch_size": 4, "seed": 1, "backend": "numpy"}
    return ConversationDataLoader(source, TOKENIZER, 128, "chatml", cache_dir=cache, **fixed, **options)


def note_preparing() -> list[str]:
    """For every store that a loader asks for: made, made from where another stopped, or found."""
    notes: list[str] = []
    make = preparation._make

    def noted(*given: Any, **options: Any) -> preparation.Prepared:
        prepared = make(*given, **options)
        report = prepared.report
        notes.append("found" if report is None else "resumed" if report.resumed else "made")
        return prepared

    preparation._make = noted
    return notes


def hold_before(number: int, sign: Path) -> None:
    consume, done = StoreSink.consume, [0]

    def holding(self: StoreSink, batch: Any) -> None:
        if done[0] == number:
            sign.touch()
            time.sleep(1000)
        consume(self, batch)
        done[0] += 1

    StoreSink.consume = holding  # type: ignore[method-assign]


def sign_when_waiting(sign: Path) -> None:
    """As soon as the lock turns out to be somebody else's."""
    attempt = FileLock._try

    def signing(self: FileLock) -> bool:
        ours = attempt(self)
        if not ours:
            sign.touch()
        return ours

    FileLock._try = signing  # type: ignore[method-assign]


def main(source: str, cache: str, out: str, name: str, hold: int | None) -> None:
    notes = note_preparing()
    # Progress is kept after every batch, and a small budget makes batches small.
    vars(options)["PipelineConfig"] = partial(PipelineConfig, checkpoint_seconds=0)
    sign_when_waiting(Path(out, f"{name}.waits"))
    if hold is not None:
        hold_before(hold, Path(out, f"{name}.holds"))
    with make_loader(Path(source), Path(cache), budget=MemoryBudget("64 KiB")) as loader:
        rows = [batch.metadata["row"].tolist() for batch in loader]
        facts = {"notes": notes, "plan": loader.plan.fingerprint, "rows": rows}
    Path(out, f"{name}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
