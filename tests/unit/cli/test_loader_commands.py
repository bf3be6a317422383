"""The verbs about a loader, as a person types them: plan, show --step, trace, verify-resume, bench, probe-isolation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.files.states import with_checksum
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.loader_file import load_config

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def chats(here: Path, cache: Path) -> str:
    tree = {
        "loader": "conversation",
        "path": str(SAMPLE / "chats.jsonl"),
        "tokenizer": str(SAMPLE / "tokenizer"),
        "chat_template": "chatml",
        "max_length": 128,
        "packing": "best_fit",
        "batch_size": 2,
        "world_size": 2,
        "cache_dir": str(cache),
    }
    (here / "chats.yaml").write_text(yaml.safe_dump(tree))
    return "chats.yaml"


@pytest.fixture
def mixture(here: Path, cache: Path) -> str:
    tree = {
        "loader": "mixed",
        "sources": {"a": str(SAMPLE / "documents.jsonl"), "b": [str(SAMPLE / "documents.jsonl")]},
        "weights": {"a": 0.75, "b": 0.25},
        "tokenizer": str(SAMPLE / "tokenizer"),
        "chunk_size": 64,
        "batch_size": 4,
        "cache_dir": str(cache),
    }
    (here / "mixed.json").write_text(json.dumps(tree))
    return "mixed.json"


def said(result: Any, code: int = 0) -> str:
    assert result.exit_code == code, result.output + repr(result.exception)
    return str(result.stdout if code == 0 else result.output)


def test_plan_prints_every_figure(penstock: Call, chats: str) -> None:
    table = said(penstock("plan", chats, "--epochs", "2"))
    for line in (
        r"steps +8 +2 epochs: 4 \+ 4",
        r"global batch +4 +samples, 2 for each of 2 ranks",
        r"imbalance +1\.\d{3} +cost of the slowest rank over the mean, if contiguous; 1\.\d{3} if balanced\n",
        r"tokens +2,860",
        r"padding +2\d\.\d%",
        r"packing +8\d\.\d%",
        r"supervised +33\.1% +948 tokens",
        r"longest +128",
        r"tokens lost +0",
        r"a batch +9\.2 KiB +at most; 18\.5 KiB",
        r"source +2\.00 +times all of data, 1,430 tokens in 24 rows",
    ):
        assert re.search(line, table), line


def test_plan_tells_a_machine_what_the_loader_does(penstock: Call, chats: str) -> None:
    facts = json.loads(said(penstock("plan", chats, "--json", "--set", "batch_size=3", "--set", "world_size=1")))
    tree = load_config(Path(chats)).arguments
    with ConversationDataLoader(**{**tree, "batch_size": 3, "world_size": 1, "rank": 0, "backend": "numpy"}) as loader:
        batches = list(loader)
    assert facts["steps"] == len(batches)
    assert facts["tokens"] == sum(batch.num_tokens for batch in batches)
    assert facts["supervised"] == sum(batch.num_items_in_batch or 0 for batch in batches)
    assert facts["settings"]["batch_size"] == 3
    assert facts["plan"] == loader.plan.fingerprint


def test_commands_show_the_data_ranks_of_a_mesh_and_whole_sequences(penstock: Call, chats: str) -> None:
    mesh = ["--set", "world_size=null", "--set", "dp=2", "--set", "cp=2", "--set", "context=zigzag"]
    assert re.search(r"global batch +4 .*each of 2 data ranks, 4 processes", said(penstock("plan", chats, *mesh)))
    contradiction = said(penstock("plan", chats, "--set", "world_size=4", "--set", "dp=2", "--set", "cp=2"), 1)
    assert "4 contradicts dp=2: world_size is the number of data ranks, 2 here" in contradiction
    assert said(penstock("show", chats, "--step", "2", *mesh)) == said(penstock("show", chats, "--step", "2"))
    assert "byte for byte" in said(penstock("verify-resume", chats, "--steps", "4", "--stops", "1", *mesh))


def test_plan_of_a_mixture_has_a_line_for_each_source(penstock: Call, mixture: str) -> None:
    table = said(penstock("plan", mixture))
    assert re.search(r"source +epochs +samples +tokens +share +rows\n", table)
    assert re.search(r"\na +1\.\d{3} +\d+ +[\d,]+ +7\d\.\d+% +64\n", table)
    endless = penstock("plan", mixture, "--set", "stopping_strategy=never")
    assert "--steps" in said(endless, 1)
    assert "steps               7  1 epoch" in said(
        penstock("plan", mixture, "--set", "stopping_strategy=never", "--steps", "7")
    )


def test_a_diff_of_two_plans_shows_only_what_differs(penstock: Call, chats: str) -> None:
    assert "same plan" in said(penstock("plan", chats, "--diff", chats))
    table = said(penstock("plan", chats, "--set", "packing=null", "--diff", chats))
    assert re.search(r"settings\.packing +- +best_fit", table)
    assert re.search(r"steps +6 +4 +-33\.3%", table)
    assert "supervised_share" not in table  # the same in both
    facts = json.loads(said(penstock("plan", chats, "--set", "packing=null", "--diff", chats, "--json")))
    assert facts["differences"]["settings.packing"] == [None, "best_fit"]
    assert facts["differences"]["steps"] == [6, 4]


def test_a_description_that_is_wrong_is_a_line_and_an_exit_code(penstock: Call, chats: str) -> None:
    assert "'batch_size'" in said(penstock("plan", chats, "--set", "batch_sise=3"), 1)
    assert "expected a.b=value" in said(penstock("plan", chats, "--set", "batch_size"), 2)
    assert "No such file" in said(penstock("plan", "nothing.yaml"), 1)
    Path("bad.yaml").write_text("loader: conversation\npth: x\n")
    assert re.search(r"bad\.yaml.*'path'", said(penstock("plan", "bad.yaml"), 1))
    assert "max_length" in said(penstock("plan", chats, "--set", "max_length=20"), 1)


def test_a_stream_has_no_plan(penstock: Call, chats: str) -> None:
    for verb in (["plan"], ["trace", "--step", "1"], ["show", "--step", "1"], ["verify-resume"]):
        assert "stream" in said(penstock(*verb, chats, "--set", "streaming=true"), 1)


def test_show_of_a_step_names_every_document_and_brackets_its_labels(penstock: Call, chats: str) -> None:
    text = said(penstock("show", chats, "--step", "1"))
    titles = re.findall(r"^rank \d, row \d: .*$", text, re.MULTILINE)
    found = re.findall(r"rank (\d), row (\d): data row (\d+): (\d+) tokens, (\d+) supervised", text)
    config = load_config(Path(chats))
    wanted = []
    for rank in range(2):
        with config.open(rank=rank, backend="numpy") as loader:
            loader.seek(1)
            batch = loader.get_batch()
        wanted += [
            (str(rank), str(sample), str(row))
            for sample, row in zip(batch.metadata["sample"].tolist(), batch.metadata["row"].tolist())
        ]
    assert [document[:3] for document in found] == wanted
    assert sum(int(re.findall(r": (\d+) tokens", title)[0]) for title in titles) == 2 * 2 * 128
    assert text.count("[[") == text.count("]]") > 0
    assert "[[In the year the old mill closed.<|im_end|>]]" in text
    only = said(penstock("show", chats, "--step", "1", "--rank", "1"))
    assert only in text
    assert "rank 0" not in only


def test_show_of_a_step_tells_a_machine_every_token(penstock: Call, chats: str) -> None:
    lines = said(penstock("show", chats, "--step", "0", "--rank", "0", "--json")).splitlines()
    sequences = [json.loads(line) for line in lines]
    assert sum(len(sequence["input_ids"]) for sequence in sequences) == 2 * 128
    kinds = {piece["kind"] for sequence in sequences for piece in sequence["pieces"]}
    assert kinds <= {"supervised", "masked", "special", "supervised special", "padding"}
    assert {"supervised", "masked", "special"} <= kinds


def test_show_of_a_step_without_packing_has_a_document_in_every_row(penstock: Call, mixture: str) -> None:
    text = said(penstock("show", mixture, "--step", "0", "--set", "packing=null", "--set", "truncation=right"))
    assert [int(row) for row in re.findall(r"^rank 0, row (\d): [ab] row", text, re.MULTILINE)] == [0, 1, 2, 3]


def test_show_of_a_step_that_is_not_delivered_says_so(penstock: Call, chats: str) -> None:
    skipped = penstock("show", chats, "--step", "3", "--set", "edits=[{skip: [2, 4]}]")
    assert "step 3" in said(skipped, 1)
    assert "from 0 to 1" in said(penstock("show", chats, "--step", "3", "--rank", "2"), 1)
    assert "pass --step N" in said(penstock("show", chats), 1)


def test_trace_goes_from_a_step_to_rows_and_back(penstock: Call, mixture: str) -> None:
    step = json.loads(said(penstock("trace", mixture, "--step", "9", "--json")))
    assert step["samples"] == 4
    assert step["tokens"] == sum(part["tokens"] for part in step["parts"]) == 4 * 64
    for part in step["parts"]:
        row = f"{part['source']}:{part['row']}"
        uses = json.loads(said(penstock("trace", mixture, "--row", row, "--epochs", "2", "--json")))["uses"]
        assert (9, part["sample"]) in [(use["step"], use["sample"]) for use in uses]
    text = said(penstock("trace", mixture, "--step", "9"))
    assert text.startswith("step 9, epoch 0: 4 samples, 256 tokens\n")
    text = said(penstock("trace", mixture, "--row", "a:3", "--epochs", "2"))
    assert re.match(r"a row 3: used 8 times in 2 epochs of the source\nstep +epoch +sample\n", text)


def test_trace_says_what_is_not_delivered(penstock: Call, chats: str) -> None:
    edits = "edits=[{skip: [0, 1]}, {ban: [5]}]"
    assert "skipped: " in said(penstock("trace", chats, "--step", "0", "--set", edits))
    assert "not delivered" in said(penstock("trace", chats, "--row", "5", "--set", edits))
    assert "not delivered" not in said(penstock("trace", chats, "--row", "5"))


def test_trace_of_what_is_not_there_is_an_error(penstock: Call, chats: str, mixture: str) -> None:
    assert re.search(r"--step.*--row", said(penstock("trace", chats), 2))
    assert re.search(r"--step.*--row", said(penstock("trace", chats, "--step", "1", "--row", "1"), 2))
    assert "24 rows" in said(penstock("trace", chats, "--row", "24"), 1)
    assert "a:4711" in said(penstock("trace", mixture, "--row", "3"), 1)
    assert "'c'" in said(penstock("trace", mixture, "--row", "c:3"), 1)


def test_verify_resume_says_that_all_is_the_same(penstock: Call, chats: str) -> None:
    text = said(penstock("verify-resume", chats, "--steps", "12", "--stops", "2"))
    assert re.search(r"12 steps.*2 ends", text)
    facts = json.loads(said(penstock("verify-resume", chats, "--steps", "6", "--worlds", "4,3", "--json")))
    assert facts["difference"] is None
    assert [line[:8] for line in facts["left_out"]] == ["3 ranks:"]
    assert {world for run in facts["runs"] for world in run["worlds"]} == {4}
    assert "expected numbers" in said(penstock("verify-resume", chats, "--worlds", "two"), 2)


def test_verify_resume_ends_with_an_error_if_anything_differs(
    penstock: Call, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ConversationDataLoader.load_state_dict

    def forgetful(self: Any, state: Any, **more: Any) -> None:
        load(self, with_checksum({**state, "step": state["step"] + 1}), **more)

    monkeypatch.setattr(ConversationDataLoader, "load_state_dict", forgetful)
    text = said(penstock("verify-resume", chats, "--steps", "8"), 3)
    assert "NOT the same: " in text


def test_bench_counts_batches_tokens_and_waiting(penstock: Call, mixture: str) -> None:
    facts = json.loads(said(penstock("bench", mixture, "--steps", "20", "--step-ms", "1", "--json")))
    assert facts["steps"] == 20
    assert facts["tokens"] > 19 * 4 * 64
    assert facts["step_ms"] == 1
    assert facts["seconds"] >= 20 * 0.001
    assert 0 < facts["wait_seconds"] < facts["seconds"]
    assert facts["peak_rss_bytes"] > 1 << 20
    assert facts["first_batch_seconds"] > 0
    text = said(penstock("bench", mixture, "--steps", "5"))
    for words in ("tokens/s", "batches/s", "first batch", "a batch", "peak memory"):
        assert words in text
    assert "data wait" not in text  # without steps there is nothing but waiting
    assert "data wait" in said(penstock("bench", mixture, "--steps", "5", "--step-ms", "1"))


def test_bench_ends_when_the_data_ends_for_good(penstock: Call, mixture: str) -> None:
    limited = ("--set", "max_epochs=1", "--set", "stopping_strategy=all_exhausted_without_replacement")
    facts = json.loads(said(penstock("bench", mixture, "--steps", "100000", "--json", *limited)))
    planned = json.loads(said(penstock("plan", mixture, "--json", *limited)))
    assert facts["steps"] == planned["steps"] - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=1100,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    ).save_pretrained(path)
    return str(path)


def test_probe_isolation_passes_a_model_that_keeps_documents_apart(penstock: Call, chats: str, model: str) -> None:
    text = said(penstock("probe-isolation", chats, "--model", model))
    assert re.search(r"model\(\*\*batch\) +sdpa +yes +0\.0e\+00", text)
    assert re.search(r"block mask +eager +yes", text)


def test_probe_isolation_fails_when_documents_see_each_other(penstock: Call, chats: str, model: str) -> None:
    fields = ("--set", "fields=[input_ids, labels, document_ids]")
    text = said(penstock("probe-isolation", chats, "--model", model, *fields), 3)
    assert re.search(r"model\(\*\*batch\) +sdpa +NO", text)
    assert "as_dict(block_mask=...)" in text
    facts = json.loads(penstock("probe-isolation", chats, "--model", model, *fields, "--json").stdout)
    assert [way["isolates"] for way in facts["ways"]] == [False, True, True]


def test_probe_isolation_without_packing_has_nothing_to_probe(penstock: Call, chats: str, model: str) -> None:
    text = said(penstock("probe-isolation", chats, "--model", model, "--set", "packing=null"), 1)
    assert "rows are not packed" in text
    assert "config.json" in said(penstock("probe-isolation", chats, "--model", "."), 1)


def test_settings_are_shown_without_the_secrets_of_urls(tmp_path: Path) -> None:
    file = tmp_path / "secret.yaml"
    tree = {
        "loader": "mixed",
        "sources": {"s3://user:hidden@bucket/web": "s3://user:hidden@bucket/web", "a": "data/a.store"},
        "metrics": ["jsonl:s3://user:hidden@bucket/run.jsonl", "prometheus://:9464"],
    }
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    shown = load_config(file).shown_tree
    assert "hidden" not in str(shown)
    assert list(shown["sources"]) == ["s3://user:***@bucket/web", "a"]
    assert shown["sources"]["a"] == "data/a.store"
    assert shown["metrics"] == ["jsonl:s3://user:***@bucket/run.jsonl", "prometheus://:9464"]
