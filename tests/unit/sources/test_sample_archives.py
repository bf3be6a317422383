"""Sources of MDS shards and WebDataset archives: encodings, and files that are damaged, cut or hostile."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreign_tokens import FILES, written_row
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.sources import MdsSource, WebDatasetSource, open_source


def rows_of(source: Any) -> list[dict[str, Any]]:
    found = []
    while (batch := source.next_batch(7)) is not None:
        found += batch.to_pylist()
    return found


def copied(tmp_path: Path, name: str) -> Path:
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    return Path(shutil.copytree(FILES / "mds" / name, tmp_path / name))


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the first shard in the index."""
    index = json.loads((folder / "index.json").read_text())
    change(index["shards"][0])
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_every_encoding_that_has_an_arrow_type_is_read() -> None:
    source = open_source(FILES / "mds/texts")
    assert isinstance(source, MdsSource)
    assert {name: str(kind) for name, kind in zip(source.schema.names, source.schema.types)} == {
        "any": "string",
        "exact": "int64",
        "number": "int64",
        "raw": "binary",
        "score": "float",
        "small": "uint8",
        "text": "string",
        "vector": "list<item: float>",
    }
    assert rows_of(source)[11] == {
        "any": '{"row": 11}',
        "exact": 10**12 + 11,
        "number": -11,
        "raw": bytes([11, 0, 255]),
        "score": 5.5,
        "small": 11,
        "text": "zeile 11 äöü",
        "vector": [11.0, 0.5],
    }
    assert rows_of(MdsSource(FILES / "mds/texts", columns=["number"]))[3] == {"number": -3}


def test_compressed_shards_and_shapes_in_the_encoding_are_read() -> None:
    assert rows_of(MdsSource(FILES / "mds/zstd")) == [{"tokens": list(range(row, row + 4))} for row in range(20)]


def test_bytes_are_arrays_if_their_dtype_is_given() -> None:
    source = MdsSource(FILES / "mds/bytes", dtypes={"tokens": "int64"})
    assert [row["tokens"] for row in rows_of(source)] == [written_row(row) for row in range(20)]
    assert rows_of(MdsSource(FILES / "mds/bytes"))[1] == {"tokens": np.array([7, 8]).tobytes()}
    with pytest.raises(ConfigError, match="complex"):
        MdsSource(FILES / "mds/bytes", dtypes={"tokens": "complex64"})


@pytest.mark.parametrize("codec", ["bz2", "br", "snappy"])
def test_the_other_compressions_are_read(tmp_path: Path, codec: str) -> None:
    folder = copied(tmp_path, "tokens")
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        raw = folder / shard["raw_data"]["basename"]
        data = raw.read_bytes()
        arrow = {"br": "brotli"}.get(codec, codec)
        packed = bz2.compress(data) if codec == "bz2" else pa.compress(data, arrow, asbytes=True)
        raw.with_name(f"{raw.name}.{codec}").write_bytes(packed)
        raw.unlink()
        shard["compression"] = codec
        shard["zip_data"] = {"basename": f"{raw.name}.{codec}", "bytes": len(packed), "hashes": {}}
    (folder / "index.json").write_text(json.dumps(index))
    assert [row["tokens"] for row in rows_of(MdsSource(folder))] == [written_row(row) for row in range(20)]


def test_pickles_are_refused_and_other_columns_of_their_shards_are_read(tmp_path: Path) -> None:
    for source in (MdsSource(FILES / "mds/pickles"), WebDatasetSource(FILES / "webdataset/pickles.tar")):
        with pytest.raises(DataError, match="pickle"):
            rows_of(source)


def hostile(shard: dict[str, Any]) -> None:
    shard["raw_data"]["bytes"] = shard["samples"] = (1 << 32) - 1


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda shard: shard.update(version=1), "version"),
    "another format": (lambda shard: shard.update(format="xsv"), "xsv"),
    "a way out": (lambda shard: shard["raw_data"].update(basename="../../etc/passwd"), "leads out"),
    "an absolute path": (lambda shard: shard["raw_data"].update(basename="/etc/passwd"), "leads out"),
    "another size": (lambda shard: shard["raw_data"].update(bytes=7), "7"),
    "a size of terabytes": (lambda shard: shard["raw_data"].update(bytes=1 << 45), "no index"),
    "another hash": (lambda shard: shard["raw_data"]["hashes"].update(xxh64="0" * 16), "xxh64"),
    "an unknown hash": (lambda shard: shard["raw_data"]["hashes"].update(crc="0"), "crc"),
    "other samples": (lambda shard: shard.update(samples=11), "11 samples"),
    "billions of samples": (lambda shard: shard.update(samples=(1 << 32) - 1), "samples"),
    "negative samples": (lambda shard: shard.update(samples=-1), "no index"),
    "an unknown encoding": (lambda shard: shard.update(column_encodings=["secret", "int"]), "secret"),
    "columns without sizes": (lambda shard: shard.update(column_sizes=[None]), "no index"),
    "columns that are no list": (lambda shard: shard.update(column_names=5), "no index"),
    "several dimensions": (lambda shard: shard.update(column_encodings=["ndarray:uint16:2,2", "int"]), "dimensions"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_does_not_go_with_its_shards_is_refused(tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    folder = change_index(copied(tmp_path, "tokens"), change)
    with pytest.raises(DataError, match=message):
        rows_of(MdsSource(folder))


def test_compressed_shards_that_claim_another_size_are_refused(tmp_path: Path) -> None:
    for size in ((1 << 32) - 1, 100):
        folder = change_index(copied(tmp_path, "zstd"), lambda shard, size=size: shard["raw_data"].update(bytes=size))
        with pytest.raises(DataError, match=str(size)):
            rows_of(MdsSource(folder))


def test_an_index_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path, "tokens")
    (folder / "index.json").write_text('{"shards": [')
    with pytest.raises(DataError, match="no index"):
        MdsSource(folder)
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match=r"index\.json"):
        MdsSource(folder)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_shards_give_rows_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    folder = change_index(copied(tmp_path, data.draw(st.sampled_from(["tokens", "bytes"]))), lambda shard: None)
    index = json.loads((folder / "index.json").read_text())
    path = folder / "shard.00000.mds"
    shard = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 2, 4]))
        place = data.draw(st.integers(0, len(shard) - width))
        shard[place : place + width] = data.draw(st.binary(min_size=width, max_size=width))
    path.write_bytes(shard)
    index["shards"] = index["shards"][:1]
    index["shards"][0]["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    try:
        rows = rows_of(MdsSource(folder))
    except PenstockError:
        return
    assert len(rows) == index["shards"][0]["samples"]


# -- WebDataset ------------------------------------------------------------------------------------------------------


def archive(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as out:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def npy(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(values), allow_pickle=True)
    return out.getvalue()


def test_texts_numbers_and_json_have_their_types() -> None:
    rows = rows_of(open_source(FILES / "webdataset/texts.tar"))
    assert rows[4] == {"__key__": "a/row4", "cls": 1, "json": '{"n": [4]}', "txt": "zeile 4 äöü"}
    assert rows_of(WebDatasetSource(FILES / "webdataset/texts.tar", columns=["txt"]))[5] == {"txt": "zeile 5 äöü"}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.bz2"])
def test_compressed_archives_are_read(tmp_path: Path, suffix: str) -> None:
    data = (FILES / "webdataset/texts.tar").read_bytes()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(bz2.compress(data) if suffix.endswith("bz2") else gzip.compress(data))
    assert rows_of(open_source(path)) == rows_of(WebDatasetSource(FILES / "webdataset/texts.tar"))


def test_members_without_a_name_folders_and_hidden_files_are_no_samples(tmp_path: Path) -> None:
    members = [("README", b"x"), ("._a.txt", b"x"), ("a.txt", b"one"), ("b.txt", b"two"), ("d.e/f.txt", b"three")]
    found = rows_of(WebDatasetSource(archive(tmp_path / "a.tar", members)))
    assert found == [{"__key__": k, "txt": t} for k, t in (("a", "one"), ("b", "two"), ("d.e/f", "three"))]


def test_a_sample_may_lack_a_column_but_not_have_another_one(tmp_path: Path) -> None:
    members = [("a.txt", b"one"), ("a.cls", b"1"), ("b.txt", b"two")]
    assert rows_of(WebDatasetSource(archive(tmp_path / "a.tar", members)))[1]["cls"] is None
    more = archive(tmp_path / "b.tar", [("a.txt", b"one"), ("b.txt", b"two"), ("b.cls", b"1")])
    with pytest.raises(DataError, match=r"\.cls"):
        rows_of(WebDatasetSource(more))
    assert len(rows_of(WebDatasetSource(more, columns=["txt"]))) == 2


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.cls", b"one")], "cls"),
        ([("a.txt", b"\xff\xfe")], "txt"),
        ([("a.npy", b"no array")], "npy"),
        ([("a.npy", npy([[1, 2], [3, 4]]))], "dimension"),
        ([("a.npy", npy(np.array([{}], object)))], "numbers"),
        ([("a.npy", npy([1, 2, 3])[:-4])], "bytes"),
        ([("a.npy", npy([1]).replace(b"(1,)", b"(9**9,)"))], "no array"),
        ([("a.txt", b"x"), ("a.TXT", b"y")], "two members"),
        ([("a.__key__", b"x"), ("a.txt", b"y")], "two members"),
        ([("a.jsonl", b"{}")], "unpack"),
        ([("README", b"x")], "no samples"),
        ([("a.V\udc88", b"x")], "ending that cannot name a column"),
    ],
)
def test_members_that_cannot_be_read_are_named(tmp_path: Path, members: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(WebDatasetSource(archive(tmp_path / "a.tar", members)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.npy", npy([1, 2])), ("b.npy", npy([1.5]))], r"a\.tar, row 1: the member b\.npy .* float64.* int64"),
        ([("a.cls", b"1"), ("b.cls", str(1 << 64).encode())], r"a\.tar, row 1: the member b\.cls .* 64 bits"),
        ([("a.txt", b"x"), ("b.txt", b"y"), ("c.txt", b"z"), ("c.cls", b"1")], r"a\.tar, row 2: the sample c .*\.cls"),
    ],
)
def test_members_unlike_those_of_the_first_sample_are_named_with_file_and_row(
    tmp_path: Path, members: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(WebDatasetSource(archive(tmp_path / "a.tar", members)))


def test_large_members_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", [("a.txt", b"x" * 5000)])
    with pytest.raises(DataError, match="5000 bytes"):
        rows_of(WebDatasetSource(path, max_member_bytes=1000))


def test_an_archive_that_is_cut_between_two_members_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", [(f"{row}.txt", b"text") for row in range(9)])
    path.write_bytes(path.read_bytes()[: 4 * 1024])
    source = WebDatasetSource(path)
    with pytest.raises(DataError, match="truncated"):
        rows_of(source)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_archives_give_rows_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(archive(tmp_path / "a.tar", [("a.npy", npy([1, 2])), ("b.npy", npy([3]))]).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 3000))
        part = data.draw(st.binary(min_size=1, max_size=12))
        whole[place : place + len(part)] = part
    (tmp_path / "b.tar").write_bytes(whole)
    try:
        rows = rows_of(WebDatasetSource(tmp_path / "b.tar"))
    except PenstockError:
        return
    assert len(rows) <= 2
