"""The verbs around a token store, as a person types them."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.options import RECIPE_OPTIONS
from penstock.corpus.recipe import Recipe

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
DOCUMENTS, CHATS, TOKENIZER = (str(SAMPLE / name) for name in ("documents.jsonl", "chats.jsonl", "tokenizer"))


def penstock(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture
def chat_store(tmp_path: Path) -> Path:
    out = tmp_path / "chats.store"
    penstock("prepare", CHATS, "--tokenizer", TOKENIZER, "--out", out, "--template", "chatml", "--quiet")
    return out


def test_prepare_ends_with_a_table_of_rows_reasons_tokens_and_lengths(tmp_path: Path) -> None:
    said = penstock(
        "prepare", DOCUMENTS, "--tokenizer", TOKENIZER, "--out", tmp_path / "a", "--filter", "gopher,c4",
        "--dedup", "exact,minhash",
    )  # fmt: skip
    for words in ("rows in", "64", "duplicate", "near duplicate", "too few words", "M tokens/s", "median", "p99"):
        assert words in said
    again = penstock(
        "prepare", DOCUMENTS, "--tokenizer", TOKENIZER, "--out", tmp_path / "a", "--filter", "gopher,c4",
        "--dedup", "exact,minhash",
    )  # fmt: skip
    assert "is ready" in again


def test_prepare_tells_a_machine_everything(tmp_path: Path) -> None:
    said = penstock(
        "prepare", CHATS, "--tokenizer", TOKENIZER, "--out", tmp_path / "a", "--template", "chatml", "--json"
    )
    facts = json.loads(said)
    assert facts["made"] is True
    assert facts["store"]["rows"] == 24
    assert 0 < facts["store"]["supervised_share"] < 1
    assert facts["tokens_per_second"] > 0


def test_show_brackets_what_is_supervised(chat_store: Path) -> None:
    said = penstock("show", chat_store, "--row", "1")
    assert "[[In the year the old mill closed.<|im_end|>]]" in said
    assert "<|im_start|>user\nWhen was it built?<|im_end|>\n<|im_start|>assistant\n[[" in said
    assert said == penstock("show", chat_store, "--row", "1", "--tokenizer", TOKENIZER)


@pytest.mark.parametrize(("given", "brackets"), [({}, False), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True)])
def test_show_brackets_what_is_supervised_on_a_terminal_without_colours(
    chat_store: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], brackets: bool
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=500, _environ={"TERM": "xterm"} | given)
    monkeypatch.setattr("penstock.cli.show.output", lambda: terminal)
    penstock("show", chat_store, "--row", "1")
    assert ("[[In the year the old mill closed.<|im_end|>]]" in screen.getvalue()) == brackets
    assert ("\x1b[1;32m" in screen.getvalue()) != brackets  # bold and green


def test_show_and_loader_files_may_be_urls(tmp_path: Path, chat_store: Path) -> None:
    files = pytest.importorskip("fsspec").filesystem("memory")
    files.pipe("/rows/chats.jsonl", Path(CHATS).read_bytes())
    files.pipe("/rows/loader.yaml", f"loader: conversation\npath: {chat_store}\nbatch_size: 2\n".encode())
    try:
        for place in ("memory://rows/chats.jsonl", f"file://{CHATS}"):
            said = penstock("show", place, "--row", "1", "--tokenizer", TOKENIZER, "--template", "chatml")
            assert "chats.jsonl row 1" in said
            assert "[[In the year the old mill closed.<|im_end|>]]" in said
        assert "12  1 epoch" in penstock("plan", "memory://rows/loader.yaml")
        assert "does not exist" in penstock("plan", "memory://rows/other.yaml", code=1)
        assert "local disk" in penstock("plan", "memory://rows/chats.store", code=1)
        assert "local disk" in penstock("show", "memory://rows/chats.store", "--tokenizer", "byte", code=1)
    finally:
        files.rm("/rows", recursive=True)


@pytest.mark.parametrize("command", ["plan", "run", "trace", "bench"])
@pytest.mark.parametrize("place", [DOCUMENTS, str(SAMPLE)])
def test_data_instead_of_a_file_that_describes_it_is_named(command: str, place: str) -> None:
    said = penstock(command, place, *(["--step", "0"] if command == "trace" else []), code=1)
    assert f"{place} is a {'directory' if place == str(SAMPLE) else 'file of data'}" in said
    assert "source: corpus.jsonl" in said if command == "run" else "loader: pretrain" in said


def test_show_of_a_file_is_that_of_the_store_made_of_it(chat_store: Path) -> None:
    for row in ("0", "4", "7"):
        stored = penstock("show", chat_store, "--row", row).partition("\n")[2]
        direct = penstock("show", CHATS, "--row", row, "--tokenizer", TOKENIZER, "--template", "chatml")
        assert direct.partition("\n")[2] == stored


def test_show_keeps_characters_whole_that_take_several_tokens(chat_store: Path) -> None:
    shown = [penstock("show", chat_store, "--row", str(row)) for row in range(24)]
    assert not any("�" in one for one in shown)
    assert any("山の雪から来ます。" in one for one in shown)


def test_show_tells_a_machine_ids_and_mask(chat_store: Path) -> None:
    facts = json.loads(penstock("show", chat_store, "--row", "1", "--json"))
    assert len(facts["input_ids"]) == len(facts["loss_mask"])
    assert {piece["kind"] for piece in facts["pieces"]} >= {"supervised", "masked", "special", "supervised special"}
    assert "supervised special" in penstock("show", chat_store, "--row", "1", "--ids")


def test_show_of_a_row_that_is_not_there_says_how_many_there_are(chat_store: Path) -> None:
    assert "24 rows" in penstock("show", chat_store, "--row", "99", code=1)
    missing = penstock("show", CHATS, "--row", "99", "--tokenizer", TOKENIZER, "--template", "chatml", code=1)
    assert "24 rows" in missing
    assert "pass --tokenizer" in penstock("show", CHATS, code=1)


def test_show_refuses_another_tokenizer_than_the_store_was_made_with(chat_store: Path) -> None:
    assert "tokenizer" in penstock("show", chat_store, "--tokenizer", "byte", code=1)


def test_lint_checks_rows_after_their_transforms(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": turns, "id": None}, {"messages": turns, "id": 1}, {"messages": turns[:1], "id": 2}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({**row, "prompt": "q"}) + "\n" for row in rows))
    given = ["lint", file, "--tokenizer", TOKENIZER, "--template", "chatml"]
    chosen = ["--transform", "drop=prompt", "--transform", "drop_nulls=id"]
    said = penstock(*given, *chosen, code=3)
    assert "row 2" in said
    assert "3 rows, 1 violation" in said
    assert "is dropped by --transform" in penstock(*given, *chosen, "--explain", "0", code=1)
    assert "supervised" in penstock(*given, *chosen, "--explain", "1")


def test_lint_passes_what_is_right_and_names_what_is_not(tmp_path: Path) -> None:
    good = penstock("lint", CHATS, "--tokenizer", TOKENIZER, "--template", "chatml")
    assert "24 rows" in good
    bad = tmp_path / "bad.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Nobody answers"}]},
        {"messages": [{"role": "wizard", "content": "Who?"}, {"role": "assistant", "content": "Me"}]},
    ]
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = penstock("lint", bad, "--tokenizer", TOKENIZER, "--template", "chatml", code=3)
    assert "row 1" in said
    assert "row 2" in said
    assert "3 rows, 2 violations" in said
    lines = penstock("lint", bad, "--tokenizer", TOKENIZER, "--template", "chatml", "--json", code=3).splitlines()
    assert [json.loads(line)["row"] for line in lines] == [1, 2]


def test_lint_counts_lines_that_are_no_json(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    good = (SAMPLE / "chats.jsonl").read_text("utf-8").splitlines()
    bad.write_text("\n".join([*good[:2], "{half", *good[2:4]]) + "\n", encoding="utf-8")
    said = penstock("lint", bad, "--tokenizer", TOKENIZER, "--template", "chatml", code=3)
    assert "row 2: unreadable" in said
    assert "1 violation" in said


def test_info_shows_what_a_store_is_made_of_and_checks_it(chat_store: Path) -> None:
    said = penstock("info", chat_store, "--verify")
    for words in ("rows", "24", "input_ids, list<uint16>", "chats.jsonl", "all right", "1: 24 rows"):
        assert words in said
    facts = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines() if line[0] != " "}
    assert (facts["tokenizer"], facts["template"]) == ("tokenizer", "chatml")
    assert facts["steps"] == "FormatChat, format auto, include_eot true, train_on assistant, truncation error"
    facts = json.loads(penstock("info", chat_store, "--json"))
    assert facts["rows"] == 24
    shard = next((chat_store / "shards").glob("*.arrow"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    assert shard.name[:16] in penstock("info", chat_store, "--verify", code=3)


def test_a_store_that_is_none_is_an_error(tmp_path: Path) -> None:
    assert "penstock:" in penstock("info", tmp_path, code=1)


def test_a_filter_that_is_none_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    said = penstock(
        "prepare", DOCUMENTS, "--tokenizer", TOKENIZER, "--out", tmp_path / "a", "--filter", "gophr", "-q", code=1
    )
    assert "'gopher'" in said


def test_every_field_of_a_recipe_is_an_option() -> None:
    names = {field.name for field in fields(Recipe) if field.init}
    assert names == {*RECIPE_OPTIONS, "chat"}
    shown = penstock("prepare", "--help")
    assert all(f"--{name}" in shown for name in ("filter", "dedup", "train-on", "no-eot", "chat", "max-prompt-length"))


def test_info_says_which_rows_and_files_were_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    (folder / "notes.txt").write_text("no data")
    store = tmp_path / "a.store"
    penstock("prepare", folder, "--tokenizer", "byte", "--out", store, "--on-error", "skip", "-q")
    facts = json.loads(penstock("info", store, "--json"))
    assert facts["left_out"] == ["notes.txt"]
    assert sum(facts["bad_rows"].values()) == 1
    said = penstock("info", store)
    assert "notes.txt" in said
    assert "1 row left out" in said


def test_show_has_bos_and_transforms(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "One"}\n')
    said = penstock("show", path, "--tokenizer", TOKENIZER, "--transform", "lower=text", "--json")
    assert "one" in "".join(piece["text"] for piece in json.loads(said)["pieces"])
    ends = json.loads(penstock("show", path, "--tokenizer", TOKENIZER, "--no-eos", "--json"))
    assert len(ends["input_ids"]) == len(json.loads(said)["input_ids"]) - 1
