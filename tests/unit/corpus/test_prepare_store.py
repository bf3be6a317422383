"""Raw files to a token store: what goes in comes out as tokens, once, however often it is asked for."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock import MemoryBudget, PipelineConfig
from penstock.errors import ConfigError, PenstockError, SchemaError
from penstock.loaders import Recipe, prepare
from penstock.sources import TextSource
from penstock.store import open_store

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
TOKENIZER = SAMPLE / "tokenizer"
EOS, IM_END = 0, 2


@pytest.fixture
def documents() -> list[str]:
    return [json.loads(line)["text"] for line in (SAMPLE / "documents.jsonl").read_text("utf-8").splitlines()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    with open_store(path) as store:
        return [{name: np.array(value).tolist() for name, value in store[i].items()} for i in range(len(store))]


def test_documents_become_the_ids_of_the_reference_with_eos(tmp_path: Path, documents: list[str]) -> None:
    prepare(SAMPLE / "documents.jsonl", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))
    reference = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    expected = [[*made.ids, EOS] for made in reference.encode_batch(documents)]
    assert [row["input_ids"] for row in rows_of(tmp_path / "a.store")] == expected


def test_filters_and_deduplication_come_before_the_tokens(tmp_path: Path) -> None:
    recipe = Recipe(tokenizer=TOKENIZER, filters=["gopher", "c4"], dedup=["exact", "minhash"], keep=["id"])
    prepared = prepare(SAMPLE / "documents.jsonl", tmp_path / "a.store", recipe)
    assert prepared.report is not None
    assert prepared.report.dropped == {
        "gopher-quality: too few words": 1,
        "gopher-quality: too few stop words": 1,
        "duplicate": 1,
        "near duplicate": 1,
    }
    with open_store(tmp_path / "a.store") as store:
        kept = [store[i]["id"] for i in range(len(store))]
    assert kept == [f"report-{number}" for number in range(60)]


def test_chats_are_seen_from_their_columns_and_get_a_mask(tmp_path: Path) -> None:
    prepare(SAMPLE / "chats.jsonl", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, template="chatml"))
    reference = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    for line, row in zip((SAMPLE / "chats.jsonl").read_text("utf-8").splitlines(), rows_of(tmp_path / "a.store")):
        answers = [turn["content"] for turn in json.loads(line)["messages"] if turn["role"] == "assistant"]
        trained = [token for token, mask in zip(row["input_ids"], row["loss_mask"]) if mask]
        assert reference.decode(trained, skip_special_tokens=False) == "".join(f"{said}<|im_end|>" for said in answers)


def test_the_same_work_is_not_done_twice(tmp_path: Path) -> None:
    out, recipe = tmp_path / "a.store", Recipe(tokenizer=TOKENIZER)
    first = prepare(SAMPLE / "documents.jsonl", out, recipe)
    again = prepare([SAMPLE / "documents.jsonl"], out, recipe, config=PipelineConfig(workers=1))
    assert first.report is not None
    assert again.report is None
    assert again.manifest == first.manifest


def test_another_input_or_recipe_is_refused_where_a_store_is_and_makes_a_new_version_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "a.store"
    prepare(SAMPLE / "documents.jsonl", out, Recipe(tokenizer=TOKENIZER))
    longer = Recipe(tokenizer=TOKENIZER, max_length=64, truncation="split")
    with pytest.raises(PenstockError, match="--mode"):
        prepare(SAMPLE / "documents.jsonl", out, longer)
    prepare(SAMPLE / "documents.jsonl", out, longer, mode="overwrite")
    with open_store(out) as store:
        assert store.manifest.version == 2
        assert store.lengths.max() <= 64
    with open_store(out, 1) as store:
        assert store.lengths.max() > 64


def test_nothing_is_left_beside_the_store(tmp_path: Path) -> None:
    prepare(SAMPLE / "documents.jsonl", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, dedup=["exact"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.store"]


def test_tokens_cut_off_are_reported(tmp_path: Path) -> None:
    recipe = Recipe(tokenizer=TOKENIZER, max_length=64, truncation="right")
    prepared = prepare(SAMPLE / "documents.jsonl", tmp_path / "a.store", recipe)
    whole = prepare(SAMPLE / "documents.jsonl", tmp_path / "b.store", Recipe(tokenizer=TOKENIZER))
    assert prepared.manifest.tokens is not None
    assert whole.manifest.tokens is not None
    assert sum(prepared.dropped_tokens.values()) == whole.manifest.tokens - prepared.manifest.tokens
    assert prepared.lengths()[1.0] == 64


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ({"filters": ["gophr"]}, ConfigError, r"'gophr'.*'gopher'"),
        ({"dedup": ["exakt"]}, ConfigError, r"'exakt'.*'exact'"),
        ({"column": "body"}, ConfigError, "'body'"),
        ({"template": "chatml"}, SchemaError, "columns="),
    ],
)
def test_a_wrong_recipe_is_told_before_anything_is_read(
    tmp_path: Path, recipe: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare(SAMPLE / "documents.jsonl", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, **recipe))
    assert not (tmp_path / "a.store").exists()


def test_a_template_whose_tokens_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start_header_id"):
        prepare(SAMPLE / "chats.jsonl", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, template="llama3"))


def test_chats_cannot_be_filtered_as_documents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dedup="):
        Recipe(tokenizer=TOKENIZER, template="chatml", dedup=["exact"])
    with pytest.raises(ConfigError, match="filters"):
        prepare(SAMPLE / "chats.jsonl", tmp_path / "a", Recipe(tokenizer=TOKENIZER, dedup=["exact"]))


def test_rows_that_are_documents_and_chats_have_to_be_told_apart(tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    row = {"text": "Hello", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    both.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"'text'.*messages"):
        prepare(both, tmp_path / "a", Recipe(tokenizer=TOKENIZER))
    assert "loss_mask" not in rows_of(prepare(both, tmp_path / "b", Recipe(tokenizer=TOKENIZER, column="text")).path)[0]
    assert "loss_mask" in rows_of(prepare(both, tmp_path / "c", Recipe(tokenizer=TOKENIZER, template="chatml")).path)[0]


def test_an_unfinished_run_with_another_recipe_is_forgotten(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", 20_000)
    stopped = start(source, tmp_path / "a.store")
    work = tmp_path / ".a.store.preparing"
    until = time.monotonic() + 60
    while not list(work.glob("*/*.json")) and stopped.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    stopped.kill()
    stopped.communicate()
    assert list(work.glob("*/*.json"))
    assert not (tmp_path / "a.store").exists()
    prepare(source, tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, dedup=["exact"]))
    prepare(source, tmp_path / "b.store", Recipe(tokenizer=TOKENIZER, dedup=["exact"]))
    assert rows_of(tmp_path / "a.store") == rows_of(tmp_path / "b.store")


def test_a_store_that_left_bad_rows_out_is_not_ready_for_who_wants_them_all(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "Hello"}\n{"text": 5}\n')
    recipe, skip = Recipe(tokenizer=TOKENIZER), PipelineConfig(on_error="skip")
    prepare(bad, tmp_path / "a.store", recipe, config=skip)
    assert prepare(bad, tmp_path / "a.store", recipe, config=skip).report is None
    with pytest.raises(PenstockError):
        prepare(bad, tmp_path / "a.store", recipe)


def test_append_adds_once_and_only_what_goes_together(tmp_path: Path) -> None:
    out, chats = tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, template="chatml")
    prepare(SAMPLE / "chats.jsonl", out, chats)
    more = tmp_path / "more.jsonl"
    more.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    assert prepare(more, out, chats, mode="append").manifest.rows == 25
    assert prepare(more, out, chats, mode="append").report is None
    plain = Recipe(tokenizer=TOKENIZER, template="plain", chat={"include_eot": False})
    with pytest.raises(ConfigError, match="template"):
        prepare(more, out, plain, mode="append")


def test_the_sample_is_what_its_script_makes() -> None:
    for name, text in runpy.run_path(str(SAMPLE / "make.py"))["files"]().items():
        assert (SAMPLE / name).read_text("utf-8") == text


def test_text_beside_parts_and_arguments_of_any_type_are_chats_like_any_other(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "one"}]},
                {"role": "assistant", "content": "two"},
            ]
        },
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(path, tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, template="chatml"))
    plain, parts = rows_of(tmp_path / "a.store")
    assert plain == parts


def test_a_source_given_as_an_object_is_not_taken_for_another(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo\n")
    prepare(TextSource(lines, per="line"), tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))
    with pytest.raises(PenstockError, match="--mode"):
        prepare(TextSource(lines, per="file"), tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))


def test_preference_pairs_have_a_supervised_share(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Is it open?", "chosen": "Yes.", "rejected": "No idea."}) + "\n")
    recipe = Recipe(tokenizer=TOKENIZER, template="chatml", preference=True)
    prepared = prepare(pairs, tmp_path / "a.store", recipe)
    assert prepared.manifest.supervised
    assert set(rows_of(tmp_path / "a.store")[0]) >= {"chosen_input_ids", "rejected_input_ids", "rejected_loss_mask"}


PROGRAM = """
import sys
from penstock import MemoryBudget, PipelineConfig
from penstock.loaders import Recipe, prepare
from penstock.sources import TextSource
source, out, tokenizer = sys.argv[1:4]
recipe = Recipe(tokenizer=tokenizer, dedup=["exact", "minhash"], keep=["id"])
config = PipelineConfig(checkpoint_seconds=0.05, batch_rows=50)
print("begins", flush=True)
prepared = prepare(source, out, recipe, config=config, budget=MemoryBudget("64 MiB"), wait_seconds=float(sys.argv[4]))
print("made" if prepared.report is not None else "found", flush=True)
"""


def corpus(path: Path, rows: int) -> Path:
    """Real sentences in other orders, so that few rows are alike, and every tenth is a copy."""
    sentences = " ".join(
        json.loads(line)["text"] for line in (SAMPLE / "documents.jsonl").read_text("utf-8").splitlines()
    )
    parts = sentences.split(". ")
    draw = np.random.default_rng(5)
    with path.open("w", encoding="utf-8") as out:
        for number in range(rows):
            text = ". ".join(parts[i] for i in draw.integers(0, len(parts), 12))
            for _ in range(2 if number % 10 == 0 else 1):
                out.write(json.dumps({"id": number, "text": text}) + "\n")
    return path


def start(source: Path, out: Path, wait_seconds: float = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(source), str(out), str(TOKENIZER), str(wait_seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_again_and_again_the_store_is_the_same_as_in_one_go(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", 6000)
    recipe = Recipe(tokenizer=TOKENIZER, dedup=["exact", "minhash"], keep=["id"])
    prepare(source, tmp_path / "whole.store", recipe, budget=MemoryBudget("64 MiB"))
    out, kills = tmp_path / "killed.store", 0
    for wait in (0.05, 0.3, 0.6, 0.9, 1.2, None):
        process = start(source, out)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        if wait is not None:
            time.sleep(wait)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        said, wrong = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), wrong
        if process.returncode == 0:
            break
    assert kills
    assert said.strip() in ("made", "found")
    assert rows_of(out) == rows_of(tmp_path / "whole.store")
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.slow
def test_of_two_processes_one_makes_the_store_and_the_other_finds_it(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", 3000)
    both = [start(source, tmp_path / "a.store", wait_seconds=100) for _ in range(2)]
    said = sorted(process.communicate(timeout=150)[0].split()[-1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said == ["found", "made"]
    assert len({row["id"] for row in rows_of(tmp_path / "a.store")}) == len(rows_of(tmp_path / "a.store"))


def test_a_process_that_does_not_wait_is_told_who_is_at_work(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", 20_000)
    first = start(source, tmp_path / "a.store")
    try:
        lock = tmp_path / ".a.store.preparing.lock"
        until = time.monotonic() + 60
        while not (lock.exists() and lock.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(ConfigError, match=str(first.pid)):
            prepare(source, tmp_path / "a.store", Recipe(tokenizer=TOKENIZER))
    finally:
        first.kill()
        first.communicate()
