from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from penstock.errors import DataError
from penstock.files.checksums import FileFingerprint
from penstock.store import FORMAT_VERSION, Lineage, StoreWriter, content_key, open_store
from penstock.store.manifest import Manifest, _checksum, combined_key, read_manifest

INPUTS = (FileFingerprint("a.jsonl", 10, "aa"), FileFingerprint("b.jsonl", 20, "bb"))
LINEAGE = Lineage(
    inputs=INPUTS,
    tokenizer="gpt2 1234",
    template="chatml 99",
    transforms=("Tokenize(...)", "Filter('n > 3')"),
    notes={"made_by": "a test", "kept": 0.5},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "s", lineage=LINEAGE) as writer:
        writer.write(pa.record_batch({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.uint8()))}))
        writer.publish()
    return tmp_path / "s"


def change(path: Path, **facts: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_a_manifest_is_json_that_says_what_the_store_holds(path: Path) -> None:
    facts = json.loads((path / "manifest.json").read_text())
    assert (facts["format"], facts["version"], facts["rows"], facts["tokens"]) == (FORMAT_VERSION, 1, 2, 3)
    assert facts["columns"] == {"input_ids": "list<item: uint8>"}
    assert facts["lineage"][0]["inputs"] == [
        {"name": "a.jsonl", "size": 10, "xxh3": "aa"},
        {"name": "b.jsonl", "size": 20, "xxh3": "bb"},
    ]
    assert facts["shards"][0]["rows"] == 2
    assert (path / "versions" / "000001.json").read_bytes() == (path / "manifest.json").read_bytes()


def test_a_manifest_comes_back_as_it_was(path: Path) -> None:
    manifest = open_store(path).manifest
    assert Manifest.from_dict(manifest.to_dict()).to_dict() == manifest.to_dict()
    assert manifest.lineage == (LINEAGE,)
    assert (manifest.tokenizer, manifest.template) == ("gpt2 1234", "chatml 99")


def test_a_newer_format_is_refused_whatever_else_it_holds(path: Path) -> None:
    change(path, format=FORMAT_VERSION + 1, shards="in a way nobody knows yet")
    with pytest.raises(DataError, match=r"manifest\.json.*format"):
        open_store(path)


@pytest.mark.parametrize("content", ["", '{"format": 1', "[]", "{}", '{"format": "new"}', "\x00" * 50])
def test_a_manifest_that_is_none_is_damaged(path: Path, content: str) -> None:
    (path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_store(path)


def test_a_changed_number_in_a_manifest_is_noticed(path: Path) -> None:
    change(path, rows=3)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_store(path)


def test_every_flipped_bit_in_a_manifest_is_noticed_or_harmless(path: Path) -> None:
    file = path / "manifest.json"
    good, wanted = file.read_bytes(), open_store(path).manifest.to_dict()
    for position in range(0, len(good), 7):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            assert read_manifest(path).to_dict() == wanted  # a blank between two values
        except DataError:
            continue


def test_a_version_that_is_not_there_is_named_with_those_that_are(path: Path) -> None:
    with pytest.raises(DataError, match=r"version 3\b"):
        open_store(path, 3)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_content_and_order_and_every_step() -> None:
    keys = {
        content_key(INPUTS),
        content_key(INPUTS[::-1]),
        content_key(INPUTS[:1]),
        content_key(INPUTS, tokenizer="a"),
        content_key(INPUTS, template="a"),
        content_key(INPUTS, transforms=["a"]),
        content_key(INPUTS, transforms=["a", "b"]),
        content_key(INPUTS, transforms=["b", "a"]),
        content_key(INPUTS, tokenizer="a", transforms=["a"]),
    }
    assert len(keys) == 9
    assert all(len(key) == 32 for key in keys)


def test_a_key_does_not_depend_on_names_or_notes() -> None:
    moved = tuple(FileFingerprint("elsewhere/" + file.name, file.size, file.xxh3) for file in INPUTS)
    assert Lineage(inputs=moved, notes={"workers": 8}).key == Lineage(inputs=INPUTS).key
    # Written out, so that a key made today is found by a later release.
    assert content_key(INPUTS, tokenizer="t", template="c", transforms=["x"]) == KEY


KEY = "bfc5664f02946d8d1db53d360ca86bbb"


def test_rows_of_unknown_origin_have_no_key() -> None:
    assert Lineage(tokenizer="t").key is None
    assert combined_key([LINEAGE, Lineage()]) is None
    assert combined_key([]) is None
    assert combined_key([LINEAGE]) == LINEAGE.key
    assert combined_key([LINEAGE, LINEAGE]) not in (None, LINEAGE.key)


def signed(path: Path, **facts: Any) -> None:
    """Change the manifest, with a checksum that is right."""
    file = path / "manifest.json"
    made = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"} | facts
    file.write_bytes(orjson.dumps(made | {"checksum": _checksum(made)}))


def test_a_signed_manifest_with_the_facts_it_had_is_read(path: Path) -> None:
    signed(path)
    assert len(open_store(path)) == 2


BOMB = base64.b64encode(zlib.compress(bytes(1 << 28))).decode()
DEEP = orjson.loads("[" * 300 + "]" * 300)
HOSTILE: list[dict[str, Any]] = [
    *({"schema": value} for value in (None, 7, [], "", "!", "AAAA", "ü", BOMB, BOMB[:100])),
    *({"shards": value} for value in (None, 7, "x", {}, [7], [None], [{}], [{"name": "x"}], DEEP)),
    *({"lineage": value} for value in (None, 7, "x", [7], [{}], [{"inputs": 7}])),
    *({"version": value} for value in (None, "1", 1.5, True, [])),
    *({"parent": value} for value in ("1", 1.5, [])),
    *({"created": value} for value in (None, 7)),
    *({"tokens_column": value} for value in (7, "nowhere", [])),
    *({"mask_column": value} for value in (7, "nowhere")),
    *({"key": value} for value in (7, [])),
    *({"run": value} for value in (7, {})),
]


@pytest.mark.parametrize("facts", HOSTILE, ids=lambda facts: f"{facts!r:.40}")
def test_a_manifest_of_wrong_types_with_the_right_checksum_is_damaged(path: Path, facts: dict[str, Any]) -> None:
    try:
        signed(path, **facts)
    except TypeError:  # more levels than can be written
        (path / "manifest.json").write_text(json.dumps({"format": 1, "checksum": "x"} | facts))
    with pytest.raises(DataError, match=r"manifest\.json.*damaged"):
        open_store(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("name", value) for value in ("../../x", "a/b", "", 7, None, "A" * 32, "0" * 31)),
        *(("index_checksum", value) for value in ("../../x", "", 7, None)),
        *(("rows", value) for value in (-1, 1.5, "2", None, True, 1 << 60)),
        *(("tokens", value) for value in (-1, "2", 1.5)),
        *(("bytes", value) for value in (-1, "2", None)),
        *(("index_bytes", value) for value in (-1, "2", None)),
        *(("supervised", value) for value in (-1, "2")),
        ("more", 1),
    ],
)
def test_a_shard_of_wrong_types_or_outside_the_store_is_damaged(path: Path, name: str, value: Any) -> None:
    (shard,) = json.loads((path / "manifest.json").read_text())["shards"]
    signed(path, shards=[shard | {name: value}])
    with pytest.raises(DataError, match=r"manifest\.json.*damaged"):
        open_store(path)
