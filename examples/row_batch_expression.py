"""Three ways to write a transform: row function, batch function, Arrow expression."""

import pyarrow as pa
import pyarrow.compute as pc

from penstock import Pipeline
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.transforms import Filter, FlatMap, Map

ORDERS = [{"item": f"item {i}", "price": 5.0 * i, "count": i % 4} for i in range(10)]


def row_total(row: dict) -> dict:
    """Row function: dict in, dict out. Easy to write; Python runs once per row."""
    return {**row, "total": row["price"] * row["count"]}


def batch_total(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Batch function, recognised by its annotation. Python runs once per thousands of rows."""
    return batch.append_column("total", pc.multiply(batch["price"], batch["count"]))


def run(*steps: object) -> list[dict]:
    sink = MemorySink()
    Pipeline(MemorySource(ORDERS), steps, sink).run()
    return sink.rows()


by_row = run(row_total, Filter(lambda row: row["total"] > 50))
by_batch = run(batch_total, Filter(lambda batch: pc.greater(batch["total"], 50), batch=True))
by_expression = run(Map({"total": pc.field("price") * pc.field("count")}), Filter("total > 50"))
print("the same rows each way:", by_row == by_batch == by_expression)
for order in by_row:
    print(f"  {order['item']}: {order['total']:.0f}")

pieces = run(FlatMap(lambda row: ({"item": row["item"], "piece": n} for n in range(row["count"]))))
print(f"{len(ORDERS)} orders are {len(pieces)} pieces; the last: {pieces[-1]}")
