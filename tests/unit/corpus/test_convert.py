"""Conversion of token data: round trips, and what is refused or left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foreign_tokens import FILES, write_megatron
from penstock.cli.main import app
from penstock.errors import ConfigError, PenstockError, StageError
from penstock.loaders import convert
from penstock.sinks.mds import MdsSink
from penstock.sinks.megatron import MegatronSink
from penstock.store import StoreWriter, open_store
from token_stores import make_masks, make_rows, make_store

DTYPES = ["uint8", "uint16", "uint32", "int32", "int64"]


def rows_of(path: Path, column: str = "input_ids") -> list[list[int]]:
    return [row[column].tolist() for row in open_store(path)]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(("lock", ".lock")))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=300), min_size=1, max_size=20),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(["megatron", "mds"]),
)
def test_tokens_are_the_same_after_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], dtype: str, to: str
) -> None:
    home = tmp_path_factory.mktemp("round")
    store = make_store(home / "a.store", rows, dtype=pa.type_for_alias(dtype))
    convert(store, home / "other", to)
    convert(home / "other", home / "b.store", "store")
    first, second = open_store(store), open_store(home / "b.store")
    assert rows_of(home / "b.store") == rows
    kind = second.schema.field("input_ids").type
    assert kind == (pa.list_(pa.int32()) if (to, dtype) == ("megatron", "uint32") else first.schema.field(0).type)
    if kind == first.schema.field(0).type:
        assert [shard.name for shard in first.manifest.shards] == [shard.name for shard in second.manifest.shards]


@pytest.mark.parametrize("chain", [("mds", "store"), ("megatron", "store"), ("mds", "megatron", "mds", "store")])
def test_chains_of_the_command_keep_short_rows_long_rows_and_wide_ids(tmp_path: Path, chain: tuple[str, ...]) -> None:
    longest = np.arange(70_000, dtype=np.int64) * 30_011 % ((1 << 31) - 1)
    rows = [[7], [0], longest.tolist(), [(1 << 31) - 1], [1] * 255, [1] * 256, [2] * 65_535, [3] * 65_536, [5]]
    place = make_store(tmp_path / "a.store", rows, dtype=pa.uint32(), shard_bytes=200_000)
    for number, to in enumerate(chain):
        out = tmp_path / f"{number}_{to}"
        done = CliRunner().invoke(app, ["convert", str(place), str(out), "--to", to, "-q"])
        assert done.exit_code == 0, done.output
        place = out
    assert rows_of(place) == rows


def test_ids_of_32_bits_go_through_mds(tmp_path: Path) -> None:
    rows = [[(1 << 32) - 1, 0], [1 << 31]]
    store = make_store(tmp_path / "a.store", rows, dtype=pa.uint32())
    convert(store, tmp_path / "mds", "mds")
    convert(tmp_path / "mds", tmp_path / "b.store", "store")
    assert rows_of(tmp_path / "b.store") == rows
    assert open_store(tmp_path / "b.store").schema.field("input_ids").type == pa.list_(pa.uint32())


def test_files_that_megatron_wrote_come_back_byte_for_byte(tmp_path: Path) -> None:
    convert(FILES / "megatron/docs.bin", tmp_path / "a.store", "store")
    convert(tmp_path / "a.store", tmp_path / "docs", "megatron")
    for name in ("docs.bin", "docs.idx"):
        assert (tmp_path / name).read_bytes() == (FILES / "megatron" / name).read_bytes()
    assert left_in(tmp_path) == ["a.store", "docs.bin", "docs.idx"]


def test_masks_and_other_columns_go_through_mds(tmp_path: Path) -> None:
    rows = make_rows(30, 9)
    masks = make_masks(rows)
    columns: dict[str, Any] = {
        "input_ids": pa.array(rows, pa.list_(pa.uint16())),
        "loss_mask": pa.array(masks, pa.list_(pa.bool_())),
        "name": [f"ä{row}" for row in range(30)],
        "score": [row / 2 for row in range(30)],
    }
    with StoreWriter(tmp_path / "a.store") as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
        writer.publish()
    convert(tmp_path / "a.store", tmp_path / "mds", "mds", compression="zstd")
    index = json.loads((tmp_path / "mds/index.json").read_text())
    assert index["shards"][0]["column_names"] == ["loss_mask", "name", "score", "tokens"]
    assert left_in(tmp_path / "mds") == ["index.json", "shard.00000.mds.zstd"]
    convert(tmp_path / "mds", tmp_path / "b.store", "store")
    assert open_store(tmp_path / "b.store").manifest.supervised == sum(map(sum, masks))
    first, second = ([dict(row) for row in open_store(tmp_path / name)] for name in ("a.store", "b.store"))
    for before, after in zip(first, second, strict=True):
        assert {name: np.asarray(value).tolist() for name, value in before.items()} == {
            name: np.asarray(value).tolist() for name, value in after.items()
        }


def test_shards_of_mds_are_cut_by_size(tmp_path: Path) -> None:
    sink = MdsSink(tmp_path / "mds", shard_bytes=500)
    sink.consume(pa.record_batch({"tokens": pa.array([[1] * 20] * 30, pa.list_(pa.uint16()))}))
    sink.flush()
    assert len(list((tmp_path / "mds").glob("*.mds"))) == 3
    convert(tmp_path / "mds", tmp_path / "b.store", "store")
    assert rows_of(tmp_path / "b.store") == [[1] * 20] * 30


def test_a_mask_is_not_dropped_silently(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", [[1, 2]], [[True, False]])
    with pytest.raises(PenstockError, match="drop_mask"):
        convert(store, tmp_path / "a", "megatron")
    assert left_in(tmp_path) == ["a.store"]
    convert(store, tmp_path / "a", "megatron", drop_mask=True)
    assert rows_of(tmp_path / "a.bin") == [[1, 2]]


def test_columns_that_do_not_fit_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StoreWriter(tmp_path / "a.store") as writer:
        writer.write(pa.record_batch({"input_ids": pa.array([[1]], pa.list_(pa.uint8())), "meta": [{"a": 1}]}))
        writer.publish()
    for to in ("megatron", "mds"):
        convert(tmp_path / "a.store", tmp_path / f"out_{to}", to)
        assert "meta" in caplog.messages[-1]


@pytest.mark.parametrize("to", ["megatron", "mds", "store"])
def test_what_exists_is_replaced_only_on_request(tmp_path: Path, to: str) -> None:
    first, second = make_store(tmp_path / "1.store", [[1, 2]]), make_store(tmp_path / "2.store", [[3]])
    out = tmp_path / "out"
    convert(first, out, to)
    with pytest.raises(PenstockError, match="exists"):
        convert(second, out, to)
    convert(second, out, to, overwrite=True)
    if to == "mds":
        convert(out, tmp_path / "back", "store")
        out = tmp_path / "back"
    assert rows_of(out) == [[3]]


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "1.store", [[1, 2]])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious.txt").write_text("mine")
    with pytest.raises(PenstockError, match=r"precious\.txt"):
        convert(store, tmp_path / "out", "mds", overwrite=True)
    assert (tmp_path / "out/precious.txt").read_text() == "mine"


@pytest.mark.parametrize("to", ["megatron", "mds", "store"])
def test_a_run_that_fails_leaves_nothing_that_can_be_read_and_runs_again(tmp_path: Path, to: str) -> None:
    path = write_megatron(tmp_path / "a", [[1] * 10, [2] * 10, [700]], "int32")
    with pytest.raises(PenstockError, match="700"):
        convert(path, tmp_path / "out", to, vocab_size=500)
    assert not [name for name in left_in(tmp_path) if name.startswith("out")]
    convert(path, tmp_path / "out", to, vocab_size=701)
    assert [name for name in left_in(tmp_path) if name.startswith(".")] == []


def test_ids_that_the_format_cannot_hold_and_empty_rows_are_refused(tmp_path: Path) -> None:
    large = make_store(tmp_path / "1.store", [[3_000_000_000]], dtype=pa.uint32())
    with pytest.raises(PenstockError, match="3000000000"):
        convert(large, tmp_path / "a", "megatron")
    empty = make_store(tmp_path / "2.store", [[1], []])
    with pytest.raises(PenstockError, match=r"'tokens' has an empty list in row 1 "):
        convert(empty, tmp_path / "b", "mds")
    convert(empty, tmp_path / "c", "megatron")
    assert rows_of(tmp_path / "c.bin") == [[1], []]


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "1.store", [[1]])
    for options, message in (
        ({"to": "megatorn"}, "did you mean 'megatron'"),
        ({"to": "megatron", "compression": "zstd"}, "compression"),
        ({"to": "mds", "compression": "lzma"}, "zstd"),
        ({"to": "mds", "eot": 5}, "eot=5"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(store, tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype"):
        convert(FILES / "mds/bytes", tmp_path / "out", "store")
    with pytest.raises((ConfigError, StageError), match="token ids"):
        convert(FILES / "mds/texts", tmp_path / "out", "store", tokens=None)


def test_sinks_write_again_after_a_reset(tmp_path: Path) -> None:
    batch = pa.record_batch({"input_ids": pa.array([[1, 2]], pa.list_(pa.uint16()))})
    for sink in (MegatronSink(tmp_path / "a"), MdsSink(tmp_path / "b")):
        for _ in range(2):
            sink.consume(batch)
            sink.flush()
            sink.flush()
            sink.reset()
    assert rows_of(tmp_path / "a.bin") == [[1, 2]]


def test_the_command_converts_and_says_what_is_wrong(tmp_path: Path) -> None:
    run = CliRunner()
    np.array([1, 2, 9, 3, 9], np.uint16).tofile(tmp_path / "train.bin")
    given = ["convert", str(tmp_path / "train.bin"), str(tmp_path / "out"), "--to", "store", "--eot", "9"]
    done = run.invoke(app, [*given, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == 2
    assert rows_of(tmp_path / "out") == [[1, 2, 9], [3, 9]]
    again = run.invoke(app, given)
    assert again.exit_code != 0
    assert "--overwrite" in again.output
    shown = run.invoke(app, [*given, "--overwrite"])
    assert shown.exit_code == 0, shown.output
    assert "out: 2 rows" in shown.output


def test_a_store_is_written_to_a_bucket_and_read_from_there(s3_url: str, tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2], [3]])
    out = f"{s3_url}/a.store"
    done = CliRunner().invoke(app, ["convert", str(path), out, "--to", "store", "-q"])
    assert done.exit_code == 0, done.output
    assert [row["input_ids"].tolist() for row in open_store(out)] == [[1, 2], [3]]
    with pytest.raises(ConfigError, match="exists"):
        convert(path, out, "store")
    for to in ("mds", "megatron"):
        with pytest.raises(ConfigError, match="local"):
            convert(path, f"{s3_url}/b", to)
