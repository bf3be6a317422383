"""Policies for bad rows: raise at the first one, skip them, or quarantine them with file, row, byte and reason."""

import json
import tempfile
from pathlib import Path

from penstock import PenstockError, Pipeline, PipelineConfig
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource


def parse_price(row: dict) -> dict:
    return {**row, "price": float(row["price"])}


def make_pipeline(folder: Path, **options: object) -> Pipeline:
    source, sink = JsonlSource(folder / "in.jsonl"), JsonlSink(folder / "out.jsonl")
    return Pipeline(source, [parse_price], sink, PipelineConfig(**options))


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    lines = [json.dumps({"id": i, "price": f"{i}.50"}) for i in range(100)]
    lines[20] = json.dumps({"id": 20, "price": "about 20"})  # the function will raise
    lines[60] = '{"id": 60, "pri'  # half an object
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")

    for options in ({}, {"on_error": "skip", "max_failures": 1}):
        try:
            make_pipeline(folder, **options).run()
        except PenstockError as error:
            print(f"{options or 'by default'}: {type(error).__name__}: {error}".replace(name, ""))

    report = make_pipeline(folder, on_error="quarantine").run()
    print(f"quarantine: {report.rows_out} of {report.rows_in} rows written; left out: {report.quarantined}")
    for line in (folder / "out.jsonl.quarantine.jsonl").read_text().splitlines():
        bad = json.loads(line)
        print(f"  row {bad['row']}, byte {bad['offset']}, {bad['stage']}: {bad['reason']}")
        print(f"    {bad.get('data') or bad.get('raw')}")
