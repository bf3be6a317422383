"""Tables of lakes in a bucket: read, pruned, written, resumed, without a secret anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from tests.servers import SECRET_KEY, Proxy, S3Server, environment_of

from penstock.connections.delta import open_table
from penstock.errors import ConfigError, StageError
from penstock.files.objects import open_bucket
from penstock.loaders import Recipe, prepare
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import DeltaSink, MemorySink
from penstock.sources import DeltaSource, IcebergSource, MemorySource, ParquetSource, open_source
from penstock.testing import FailingTransform

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"


def numbers(source: Any) -> list[int]:
    found: list[int] = []
    while (batch := source.next_batch(1000)) is not None:
        found += batch["n"].to_pylist()
    return sorted(found)


def put(url: str, table: pa.Table, **options: Any) -> None:
    sink = DeltaSink(url, **options)
    for batch in table.to_batches():
        sink.consume(batch)
    sink.flush()


@pytest.fixture
def lake(s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return s3_url


def test_a_table_in_a_bucket_is_written_and_read_by_its_url(lake: str) -> None:
    rows = pa.table({"n": range(60), "lang": ["a b/c", "de", None] * 20})
    put(f"{lake}/t", rows, partition_by=["lang"])
    put(f"{lake}/t", rows.slice(0, 3))
    source = open_source(f"{lake}/t")
    assert isinstance(source, DeltaSource)
    assert numbers(source) == sorted([*range(60), 0, 1, 2])
    assert numbers(open_source(f"{lake}/t@v0")) == list(range(60))
    assert numbers(DeltaSource(f"{lake}/t", filter=[("lang", "=", "a b/c")], version=0)) == list(range(0, 60, 3))
    with pytest.raises(ConfigError, match="is a Delta table"):
        open_source(lake)
    with pytest.raises(ConfigError, match="is a Delta table"):
        ParquetSource(f"{lake}/t").next_batch(1)
    with pytest.raises(ConfigError, match=r"lang=de' lies in 's3://.*/t', which is a Delta table"):
        open_source(f"{lake}/t/lang=de")


def test_files_of_other_partitions_are_not_fetched(lake: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [np.random.default_rng(n).bytes(3000).hex() for n in range(400)]
    rows = pa.table({"n": range(400), "text": text, "part": [n // 100 for n in range(400)]})
    put(f"{lake}/t", rows, partition_by="part")
    with Proxy(s3.port) as proxy:
        for name, value in environment_of(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        assert numbers(DeltaSource(f"{lake}/t")) == list(range(400))
        whole, proxy.bytes_down = proxy.bytes_down, 0
        assert numbers(DeltaSource(f"{lake}/t", filter=[("part", "=", 2), ("n", "<", 210)])) == list(range(200, 210))
        assert proxy.bytes_down < 0.4 * whole


def test_a_run_into_a_bucket_that_fails_is_resumed_and_repeats_nothing(lake: str, tmp_path: Path) -> None:
    rows = pa.table({"n": range(500)})
    config = PipelineConfig(checkpoint_seconds=0, batch_rows=50)
    for commit in ("end", "checkpoint"):
        url, kept = f"{lake}/{commit}", tmp_path / commit

        def run(failing: list[int], commit: Any = commit, url: str = url, kept: Path = kept) -> Any:
            sink = DeltaSink(url, commit=commit)
            return Pipeline(MemorySource(rows), [FailingTransform("n", failing)], sink, config).run(kept)

        for _ in range(2):
            with pytest.raises(StageError, match="failing as requested"):
                run([333])
        assert run([]).rows_out == 500
        assert numbers(DeltaSource(url)) == list(range(500))
        assert not [key for key in keys(url) if "_penstock" in key]


def keys(url: str) -> list[str]:
    bucket, key = open_bucket(url)
    return [found.key for found in bucket.objects(f"{key}/")]


def test_an_iceberg_table_in_a_bucket_is_read_by_its_url(lake: str, s3: S3Server, tmp_path: Path) -> None:
    settings = {"s3.endpoint": s3.endpoint, "s3.access-key-id": "penstock", "s3.secret-access-key": SECRET_KEY}
    catalog: Any = load_catalog(
        "mine", type="sql", uri=f"sqlite:///{tmp_path}/c.db", warehouse=lake, **settings, **{"s3.region": "us-east-1"}
    )
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", schema=pa.schema([("n", pa.int64())]))
    table.append(pa.table({"n": range(5)}))
    table.append(pa.table({"n": range(5, 9)}))
    first = table.snapshots()[0].snapshot_id
    catalog.engine.dispose()
    source = open_source(f"{lake}/ns/t")
    assert isinstance(source, IcebergSource)
    assert numbers(source) == list(range(9))
    with pytest.raises(ConfigError, match=r"lies in 's3://.*/ns/t', which is an Iceberg table"):
        open_source(f"{lake}/ns/t/data")
    assert numbers(open_source(f"{lake}/ns/t@v{first}")) == list(range(5))


def test_no_secret_is_in_states_names_manifests_or_errors(lake: str, tmp_path: Path, monkeypatch: Any) -> None:
    put(f"{lake}/t", pa.table({"n": range(9), "text": ["some words"] * 9}))
    source = DeltaSource(f"{lake}/t")
    sink = DeltaSink(f"{lake}/u", commit="checkpoint")
    sink.restore({})
    sink.consume(pa.RecordBatch.from_pydict({"n": [1]}))
    said = [source.state_dict(), repr(source), sink.checkpoint(), repr(sink), source.fingerprints()]
    prepare(f"{lake}/t", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))
    said += [path.read_text(errors="replace") for path in (tmp_path / "a.store").rglob("*.json")]
    assert "version 0" in str(said[-1])
    login = lake.replace("s3://", f"s3://penstock:{SECRET_KEY}@")
    said += [repr(DeltaSource(f"{login}/t")), DeltaSource(f"{login}/t").state_dict(), repr(DeltaSink(f"{login}/t"))]
    for url in (f"{login}/none", login.replace("@pen/", "@nobucket/") + "/t"):
        with pytest.raises((FileNotFoundError, ConnectionError, ConfigError)) as caught:
            open_table(url)
        said.append(str(caught.value))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET_KEY}-wrong")
    with pytest.raises(ConnectionError, match="cannot be reached: SignatureDoesNotMatch") as refused:
        open_table(f"{lake}/t")
    said.append(str(refused.value))
    assert numbers(DeltaSource(f"{login}/t")) == list(range(9))  # the login of the URL is that of the files too
    assert SECRET_KEY not in json.dumps(said, default=str)


def test_a_pipeline_reads_and_writes_tables_in_buckets(lake: str) -> None:
    put(f"{lake}/t", pa.table({"n": range(100)}))
    Pipeline(DeltaSource(f"{lake}/t", filter=[("n", ">=", 90)]), [], DeltaSink(f"{lake}/u")).run()
    sink = MemorySink()
    Pipeline(DeltaSource(f"{lake}/u"), [], sink).run()
    assert [row["n"] for row in sink.rows()] == list(range(90, 100))
