"""Iteration and resume: save the position of a pipeline as a small JSON file, and resume there in a new pipeline."""

import json
import tempfile
from pathlib import Path

from penstock import Pipeline, PipelineConfig
from penstock.sources import JsonlSource
from penstock.transforms import Filter


def make_pipeline(folder: Path, workers: int) -> Pipeline:
    config = PipelineConfig(batch_rows=64, workers=workers)
    return Pipeline(JsonlSource(folder), [Filter("id != 100")], config=config)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for part in range(2):
        lines = (json.dumps({"id": 500 * part + i, "text": "some text"}) + "\n" for i in range(500))
        (folder / f"part-{part}.jsonl").write_text("".join(lines))

    seen: list[int] = []
    pipeline = make_pipeline(folder, workers=1)
    for step, batch in enumerate(pipeline):
        seen += batch["id"].to_pylist()
        if step == 4:
            break  # leaving the loop ends the threads; prefetched rows are not part of the state
    (folder / "state.json").write_text(json.dumps(pipeline.state_dict()))
    print(f"stopped after row {len(seen)}; the state takes {(folder / 'state.json').stat().st_size} bytes")

    # In another process, with another number of workers: the remaining rows are the same.
    pipeline = make_pipeline(folder, workers=4)
    pipeline.load_state_dict(json.loads((folder / "state.json").read_text()))
    for batch in pipeline:
        seen += batch["id"].to_pylist()
    print("every row once, in order:", seen == [i for i in range(1000) if i != 100])
