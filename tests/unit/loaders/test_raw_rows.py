"""Raw rows of loaders: bad ones, empty files, transforms, columns, and what lies beside data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConversationDataLoader, MixedDataLoader, PreferenceDataLoader, PretrainDataLoader
from penstock.corpus.prepare import prepare
from penstock.corpus.raw_rows import named_transform
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError, DataError, PenstockError, SchemaError
from penstock.loaders import RawRows, StreamOptions
from penstock.pipeline import PipelineConfig
from penstock.sources import open_source
from penstock.transforms import DropNulls, ExactDedup, Filter, FlatMap, Lower, Map
from penstock.transforms.tokenization import ByteTokenizer

TOKENIZER = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
BOS, EOS = 256, 257
MODES = pytest.mark.parametrize(
    "streaming", [False, StreamOptions(workers=1, worker_type="thread")], ids=["indexed", "stream"]
)


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"backend": "numpy", "cache_dir": tmp_path / "cache", "batch_size": 4, "prefetch": 0, **more}


def documents(path: Any, tmp_path: Path, **more: Any) -> list[str]:
    """Every document of one epoch, sorted."""
    more = {"packing": None, "chunk_size": 4096, **more}
    with PretrainDataLoader(path, TOKENIZER, **options(tmp_path, **more)) as loader:
        rows = [(ids, mask) for batch in loader for ids, mask in zip(batch.input_ids, batch.attention_mask)]
    return sorted(TOKENIZER.decode(ids[mask.astype(bool)]).removesuffix("<eos>") for ids, mask in rows)


def chats(path: Any, tmp_path: Path, **more: Any) -> list[str]:
    more = {"chat_template": "plain", "max_length": 4096, **more}
    with ConversationDataLoader(path, TOKENIZER, **options(tmp_path, **more)) as loader:
        rows = [(ids, mask) for batch in loader for ids, mask in zip(batch.input_ids, batch.attention_mask)]
    return sorted(TOKENIZER.decode(ids[mask.astype(bool)]) for ids, mask in rows)


# Bad rows


@MODES
@pytest.mark.parametrize("bad", ['{"text": null}', '{"text": 1', '{"text": ["a"]}', "[]"])
def test_a_bad_row_is_left_out_and_counted_if_that_is_asked_for(
    bad: str, streaming: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, bad, {"text": "two"}])
    with pytest.raises(PenstockError, match=r"a\.jsonl"):
        documents(path, tmp_path, streaming=streaming)
    assert documents(path, tmp_path, streaming=streaming, on_error="skip") == ["one", "two"]
    if streaming is False:
        assert "bad rows were left out: 1 (" in caplog.text
        caplog.clear()
        documents(path, tmp_path, on_error="skip")
        assert "bad rows were left out: 1 (" in caplog.text, "a store of the cache says so too"


@MODES
def test_a_bad_row_goes_to_the_quarantine_file(streaming: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": None}, {"text": "two"}])
    bad = tmp_path / "bad.jsonl"
    found = documents(path, tmp_path, streaming=streaming, on_error="quarantine", quarantine=bad)
    assert found == ["one", "two"]
    (row,) = map(json.loads, bad.read_text().splitlines())
    assert row["file"] == str(path)
    assert row["data"] == {"text": None}


@pytest.mark.parametrize("first", ["raise", "skip", "quarantine"])
def test_rows_without_a_bad_one_have_one_store_for_every_policy(first: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    for policy in (first, "raise", "skip", "quarantine", first):
        assert documents(path, tmp_path, on_error=policy) == ["one"]
    stores = tmp_path / "cache" / "stores"
    (store,) = (each for each in stores.iterdir() if each.is_dir() and each.name[0] != ".")
    if first != "raise":
        (store / "losses.json").unlink()  # so it is not known if a row was left out
        shutil.rmtree(tmp_path / "cache" / "requests")
        documents(path, tmp_path)
        assert sum(1 for each in stores.iterdir() if each.is_dir() and each.name[0] != ".") == 2
    bad = write(tmp_path / "b.jsonl", [{"text": "one"}, {"text": None}])
    assert documents(bad, tmp_path, on_error="skip") == ["one"]
    with pytest.raises(PenstockError, match=r"b\.jsonl"):
        documents(bad, tmp_path)


def test_the_quarantine_of_a_cached_store_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": None}])
    documents(path, tmp_path, on_error="quarantine")
    (file,) = (tmp_path / "cache").rglob("*.quarantine.jsonl")
    assert str(file) in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise', 'skip' or 'quarantine', got 'ignore'"),
        ({"quarantine": "bad.jsonl"}, "quarantine"),
        ({"on_error": "skip", "streaming": StreamOptions(on_error="quarantine", quarantine="b")}, "contradict"),
        ({"raw": RawRows(on_error="skip"), "on_error": "skip"}, "given twice"),
        ({"allow_empty": "yes"}, "allow_empty must be True or False"),
    ],
)
def test_policies_that_make_no_sense_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(ConfigError, match=message):
        documents(path, tmp_path, **given)


def test_every_loader_leaves_bad_rows_out(tmp_path: Path) -> None:
    skip = options(tmp_path, on_error="skip", template="plain")
    turn = {"role": "user", "content": "q"}
    chat = [{"messages": [turn, {"role": "assistant", "content": "a"}]}, {"messages": [turn]}]
    with ConversationDataLoader(write(tmp_path / "c.jsonl", chat), TOKENIZER, **skip) as loader:
        assert sum(len(batch.input_ids) for batch in loader) == 1
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    pairs = write(tmp_path / "p.jsonl", [pair, {**pair, "chosen": None}])
    with PreferenceDataLoader(pairs, TOKENIZER, **skip) as preferences:
        assert sum(len(batch.input_ids) for batch in preferences) == 2
    text = write(tmp_path / "t.jsonl", [{"text": "one"}, {"text": None}])
    mixed = options(tmp_path, on_error="skip", packing=None)
    with MixedDataLoader({"a": text}, tokenizer=TOKENIZER, **mixed) as mixture:
        assert mixture.sources[0].inputs.table.rows == 1


# Empty files


@MODES
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt", ".parquet", ".arrow", ".json"])
def test_an_empty_file_is_passed_over_if_that_is_allowed(suffix: str, streaming: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table = pa.table({"text": ["one", "two"]})
    good = folder / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, good)
    elif suffix == ".arrow":
        with pa.ipc.new_file(good, table.schema) as sink:
            sink.write_table(table)
    else:
        rows = ["one", "two"] if suffix in (".txt", ".csv") else ['{"text": "one"}', '{"text": "two"}']
        good.write_text("\n".join([*(["text"] if suffix == ".csv" else []), *rows]) + "\n")
    (folder / f"b{suffix}").touch()
    if streaming is False:
        with pytest.raises(DataError, match=r"b\.\w+.*empty.*allow_empty=True"):
            documents(folder, tmp_path)
    assert documents(folder, tmp_path, streaming=streaming, allow_empty=True) == ["one", "two"]


# Transforms


def shouting(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"].upper()}


CHANGES: dict[str, tuple[list[Any], list[str]]] = {
    "stage": ([DropNulls("text"), Lower("text")], ["a b", "c"]),
    "names": (["drop_nulls", {"lower": "text"}], ["a b", "c"]),
    "function": ([DropNulls("text"), shouting], ["A B", "C"]),
    "lambda": ([DropNulls("text"), lambda row: {"text": row["text"] * 2}], ["A bA b", "CC"]),
    "filter": ([DropNulls("text"), Filter(lambda row: row["n"] > 1)], ["C"]),
    "expression": ([Filter("n <= 1"), Map({"text": "lower(text)"})], ["a b"]),
    "words": ([DropNulls("text"), FlatMap(lambda row: ({"text": w} for w in row["text"].split()))], ["A", "C", "b"]),
}


@MODES
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize("name", CHANGES)
def test_transforms_run_on_raw_rows_before_they_are_tokenized(
    name: str, suffix: str, streaming: Any, tmp_path: Path
) -> None:
    rows = [{"text": "A b", "n": 1}, {"text": None, "n": 2}, {"text": "C", "n": 3}]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        path.write_text('text,n\n"A b",1\n,2\n"C",3\n')
    else:
        write(path, rows)
    transforms, wanted = CHANGES[name]
    assert documents(path, tmp_path, streaming=streaming, transforms=transforms) == wanted


def test_a_stream_knows_the_rows_that_transforms_were_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a b"}, {"text": ""}, {"text": "c"}])
    words = FlatMap(lambda row: ({"text": word} for word in row["text"].split()))
    more = options(tmp_path, streaming=True, transforms=[words], packing=None, shuffle=False)
    with PretrainDataLoader(path, TOKENIZER, **more) as loader:
        places = [place for batch in loader for place in batch.metadata["offset"].tolist()]
    assert sorted(places) == [0, 0, 29]


@MODES
def test_the_advice_to_rename_a_role_in_a_map_works(streaming: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "robotic", "content": "a"}]
    call = {"name": "f", "arguments": {"x": 1.50, "y": None}}
    rows = [{"messages": chat}, {"messages": [*chat, {"role": "user", "content": "r", "extra": call}]}]
    path = write(tmp_path / "a.jsonl", rows)

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        names = {"robotic": "assistant"}
        return {"messages": [{**each, "role": names.get(each["role"], each["role"])} for each in row["messages"]]}

    with pytest.raises(PenstockError, match=r"role 'robotic'.*transforms="):
        chats(path, tmp_path, streaming=streaming)
    assert len(chats(path, tmp_path, streaming=streaming, transforms=[renamed])) == 2


def test_the_content_of_transforms_is_part_of_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "One"}])
    end = "!"

    def marked(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": row["text"] + end}

    stores = tmp_path / "cache" / "stores"
    assert documents(path, tmp_path, transforms=[marked]) == ["One!"]
    assert documents(path, tmp_path, transforms=[marked]) == ["One!"]
    assert sum(1 for each in stores.iterdir() if each.is_dir() and each.name[0] != ".") == 1
    end = "?"
    assert documents(path, tmp_path, transforms=[marked]) == ["One?"]
    assert documents(path, tmp_path, transforms=[Lower("text")]) == ["one"]
    assert documents(path, tmp_path) == ["One"]


class Opaque:
    """A transform with something in it that has no name."""

    def __init__(self) -> None:
        self.lines = (number for number in [1, 2])

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


class Described(Opaque):
    def describe(self) -> str:
        return "Described/1"


def test_a_transform_without_a_name_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(ConfigError, match=r"Opaque cannot be named by its content.*describe\(\).*prepare"):
        documents(path, tmp_path, transforms=[Opaque()])
    assert documents(path, tmp_path, transforms=[Described()]) == ["one"]
    recipe = Recipe(tokenizer=TOKENIZER, transforms=[Opaque()])
    made = prepare(path, tmp_path / "a.store", recipe)
    store, (run,) = made.path, made.manifest.lineage
    assert ([file.name for file in run.inputs], run.key) == (["a.jsonl"], None)
    with PretrainDataLoader(store, batch_size=1, backend="numpy", packing=None) as loader:
        assert len(loader) == 1


def test_transforms_that_need_the_order_of_rows_are_refused_in_a_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "one"}])
    once = ExactDedup("text", directory=tmp_path / "seen")
    assert documents(path, tmp_path, transforms=[once]) == ["one"]
    with pytest.raises(ConfigError, match=r"order of rows.*streaming=False"):
        documents(path, tmp_path, transforms=[once], streaming=True)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (["drop_nuls"], "did you mean 'drop_nulls'"),
        ([{"lower": "text", "strip": "text"}], "one transform"),
        ([{"lower": {"colum": "text"}}], "lower"),
        ([3], "cannot be a transform"),
    ],
)
def test_a_wrong_transform_is_refused_at_once(transforms: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(tokenizer=TOKENIZER, transforms=transforms)


# Columns


@MODES
def test_chats_in_plain_columns_are_named_by_columns(streaming: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "hi", "a": "yo"}])
    with pytest.raises(PenstockError, match=r"columns=\{'user'"):
        chats(path, tmp_path, streaming=streaming)
    (text,) = chats(path, tmp_path, streaming=streaming, columns={"user": "q", "assistant": "a"})
    assert "hi" in text
    assert "yo" in text


@MODES
@pytest.mark.parametrize("columns", [None, ["text"]])
def test_columns_that_nobody_needs_may_differ_between_files(columns: Any, streaming: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one"], "id": [1]}), folder / "a.parquet")
    pq.write_table(pa.table({"text": ["two"], "id": ["x"]}), folder / "b.parquet")
    pq.write_table(pa.table({"text": pa.array(["three"]).dictionary_encode()}), folder / "c.parquet")
    assert documents(folder, tmp_path, streaming=streaming, columns=columns) == ["one", "three", "two"]


@MODES
def test_chats_may_have_columns_of_several_types_beside_them(
    streaming: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": "q", "completion": "a"}]
    for name, number in (("a", 1), ("b", "x")):
        table = pa.Table.from_pylist([{**row, "id": number} for row in rows])
        pq.write_table(table, folder / f"{name}.parquet")
    assert len(chats(folder, tmp_path, streaming=streaming)) == 2
    assert "columns id are left out" in caplog.text
    pq.write_table(pa.table({"prompt": [1], "completion": ["a"]}), folder / "c.parquet")
    with pytest.raises(PenstockError, match=r"c\.parquet.*columns="):
        chats(folder, tmp_path, streaming=streaming)


# BOS and EOS


@MODES
def test_documents_get_bos_and_eos_as_asked(streaming: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x"}])
    for more, wanted in (
        ({}, [120, EOS]),
        ({"add_bos": True}, [BOS, 120, EOS]),
        ({"add_eos": False}, [120]),
    ):
        found = options(tmp_path, streaming=streaming, packing=None, **more)
        with PretrainDataLoader(path, TOKENIZER, **found) as loader:
            assert next(iter(loader)).input_ids.tolist() == [wanted]
    with pytest.raises(ConfigError, match="add_bos"):
        chats(path, tmp_path, add_bos=True)


# Directories as they lie around


BESIDE = ["README.md", "LICENSE", "dataset_infos.json", ".gitattributes", "notes.txt", "load.py", "SHA256SUMS", "a.bin"]


@MODES
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_lies_beside_data_is_left_out_and_named(
    suffix: str, streaming: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if suffix == ".jsonl":
        write(folder / "a.jsonl", [{"text": "one"}])
    else:
        pq.write_table(pa.table({"text": ["one"]}), folder / "a.parquet")
    for name in BESIDE:
        (folder / name).write_text("{}")
    assert documents(folder, tmp_path, streaming=streaming) == ["one"]
    for name in BESIDE:
        assert (name in caplog.text) == (name[0] != "."), name


def test_what_was_left_out_is_noted_in_the_store(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", [{"text": "one"}])
    (tmp_path / "data" / "notes.txt").write_text("no data")
    prepared = prepare(tmp_path / "data", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))
    assert prepared.manifest.lineage[-1].notes["left_out"] == ["notes.txt"]


MEANT: dict[str, tuple[dict[str, int], Callable[[str], bool]]] = {
    "only descriptions": ({"README.md": 10, "CHANGELOG.md": 10}, lambda name: name.endswith(".md")),
    "many texts and a small table": ({"a.txt": 5000, "b.txt": 5000, "labels.csv": 20}, lambda name: "txt" in name),
    "text beside a table": ({"a.txt": 100, "b.csv": 100}, lambda name: "csv" in name),
    "a small table beside a large one": ({"a.parquet": 5000, "b.csv": 20}, lambda name: "parquet" in name),
    "rows with names of descriptions": (
        {"changelog.jsonl": 9, "license.jsonl": 9, "readme.jsonl.gz": 9, "LICENSE": 9},
        lambda name: "json" in name,
    ),
    "documents called state": ({"state.json": 50, "city.json": 50}, lambda name: True),
    "a table and its description": ({"a.arrow": 50, "dataset_info.json": 500}, lambda name: "arrow" in name),
}


@pytest.mark.parametrize("case", MEANT)
def test_of_a_mixed_directory_what_was_meant_is_read(case: str, tmp_path: Path) -> None:
    sizes, meant = MEANT[case]
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    source: Any = open_source(tmp_path)
    assert {file.name for file in source.files} == set(filter(meant, sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a.csv": 100, "b.parquet": 100}, r"several formats.*'/.*/\*\.csv'.*MixedDataLoader"),
        ({"corpus.txt": 800, "labels.jsonl": 100}, r"several formats"),
        ({"a.jsonl": 100, "b.jsonl.part": 100}, r"no source reads.*b\.jsonl\.part.*glob"),
        ({"a.jsonl": 100, "b.zip": 100}, r"no source reads '\.zip'"),
        ({"a.bin": 100}, r"no source reads '\.bin'"),
    ],
)
def test_a_directory_that_could_mean_several_things_is_refused(
    sizes: Mapping[str, int], message: str, tmp_path: Path
) -> None:
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path)


@MODES
def test_a_column_with_two_types_is_not_left_out_before_a_transform_which_may_need_it(
    streaming: Any, tmp_path: Path
) -> None:
    for name, scores in {"a": [1], "b": ["1"]}.items():
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": [name], "score": scores}), folder / f"{name}.parquet")

    def scored(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": f"{row['text']}{row.get('score')}"}

    with pytest.raises(SchemaError, match=r"score.*pass columns="):
        documents(folder, tmp_path, streaming=streaming, transforms=[scored])
    assert documents(folder, tmp_path, streaming=streaming) == ["a", "b"]
    found = documents(folder, tmp_path, streaming=streaming, transforms=[scored], columns=["text"])
    assert found == ["aNone", "bNone"]


def test_files_that_are_named_are_never_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("hello")
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    assert documents(tmp_path / "README.md", tmp_path) == ["hello"]
    with pytest.raises(ConfigError, match="several formats"):
        open_source([tmp_path / "README.md", tmp_path / "a.jsonl"])


def test_directories_with_values_in_their_names_are_columns_for_transforms(tmp_path: Path) -> None:
    for language in ("de", "en"):
        write(tmp_path / "data" / f"lang={language}" / "a.jsonl", [{"text": language}])
    assert documents(tmp_path / "data", tmp_path, transforms=[Filter("lang == 'de'")]) == ["de"]


def test_the_policies_have_one_vocabulary() -> None:
    for word in ("raise", "skip", "quarantine"):
        assert PipelineConfig(on_error=word).on_error == RawRows(on_error=word).on_error == word


@pytest.mark.parametrize("given", ["DropNulls", "DropNulls('text')", "DropNulls(['a', 'b'])", "Cast({'id': 'string'})"])
def test_a_transform_may_be_named_as_errors_write_it(given: str) -> None:
    assert repr(named_transform(given)) == (given if "(" in given else f"{given}()")


@pytest.mark.parametrize("given", ["DropNulls(print('no'))", "Nulls('text')", "DropNulls('a', 'b')", "DropNulls("])
def test_nothing_but_plain_values_is_read_of_a_call(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no transform is called"):
        named_transform(given)
    assert not capsys.readouterr().out
