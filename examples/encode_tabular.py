"""Encoding of a table: fit scales and categories in one streaming pass, save them, and apply them."""

import json
import tempfile
from pathlib import Path

from penstock import Pipeline
from penstock.sinks import MemorySink, ParquetSink
from penstock.sources import CsvSource, MemorySource
from penstock.transforms import FillNulls, HashingEncoder, OneHotEncoder, StandardScaler, Validate

TRAIN = """age,fare,class,port
22,7.25,third,S
38,71.28,first,C
,8.05,third,Q
35,53.10,first,S
400,8.46,second,Q
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "train.csv").write_text(TRAIN)
    clean = [Validate(ranges={"age": (0, 120)}, on_invalid="skip"), FillNulls({"age": 30})]

    # First pass: fit the encoders on the cleaned rows, batch by batch, for any number of rows.
    scaler, one_hot = StandardScaler(["age", "fare"]), OneHotEncoder("class", unknown="ignore")
    for batch in Pipeline(CsvSource(folder / "train.csv"), clean):
        scaler.partial_fit(batch)
        one_hot.partial_fit(batch)
    print("mean:", {column: round(mean, 2) for column, mean in scaler.mean.items()})
    print("categories:", one_hot.categories)

    # Second pass: apply. Hashing needs no fit.
    encode = [scaler, one_hot, HashingEncoder("port", buckets=8)]
    report = Pipeline(CsvSource(folder / "train.csv"), [*clean, *encode], ParquetSink(folder / "train.parquet")).run()
    print(f"{report.rows_in} rows in, {report.rows_out} out, dropped: {report.dropped}")

    # Later, elsewhere: the same numbers from plain JSON.
    saved = json.dumps([scaler.to_dict(), one_hot.to_dict()])
    scaler_again, one_hot_again = json.loads(saved)
    steps = [StandardScaler.from_dict(scaler_again), OneHotEncoder.from_dict(one_hot_again)]
    sink = MemorySink()
    report = Pipeline(MemorySource([{"age": 31.0, "fare": 34.0, "class": "fourth"}]), steps, sink).run()
    print({column: round(value, 2) for column, value in sink.rows()[0].items()}, report.changed)
