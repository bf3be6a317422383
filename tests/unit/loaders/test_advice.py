"""Advice of errors: what a message tells people to do is accepted where the message appears, and helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import ConversationDataLoader, PreferenceDataLoader, PretrainDataLoader, RolloutDataLoader
from penstock.cli.main import app
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import PenstockError
from penstock.loaders import StreamOptions
from penstock.pipeline import PipelineConfig
from penstock.rl import LiveBuffer, RolloutQueue, read_rollouts
from penstock.transforms import Cast, DropNulls, FillNulls, Map
from penstock.transforms.tokenization import ByteTokenizer

TOKENIZER = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
BARE = ByteTokenizer(("<|im_end|>",))


@dataclass(frozen=True)
class Advice:
    """Rows that are refused, the advice in the message, and options that follow it."""

    rows: list[Any]
    advice: str
    follow: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    """Options of `penstock prepare` that follow it."""


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    return {"messages": messages, **more}


DOCUMENTS = {
    "drop nulls": Advice(
        [{"text": "a"}, {"text": None}],
        r"put DropNulls\('text'\) or FillNulls before \(transforms=",
        {"transforms": [DropNulls("text")]},
        command=("--transform", "drop_nulls=text"),
    ),
    "fill nulls": Advice([{"text": None}], "FillNulls", {"transforms": [FillNulls({"text": ""})]}),
    "skip": Advice([{"text": "a"}, {"text": None}], "on_error='skip'", {"on_error": "skip"}),
    "half a character": Advice(
        [{"text": "a"}, '{"text": "\\ud800"}'], "on_error='skip'", {"on_error": "skip"}, command=("--on-error", "skip")
    ),
    "empty": Advice([], "allow_empty=True", {"allow_empty": True}, command=("--allow-empty",)),
    "cast": Advice(
        [{"text": 3}], r"Cast\(\{'text': 'string'\}\) before|text", {"transforms": [Cast({"text": "string"})]}
    ),
    "column": Advice(
        [{"body": "a"}], r"text_column= of a loader, --column", {"text_column": "body"}, command=("--column", "body")
    ),
}
CHATS = {
    "template": Advice([chat("q", "a")], "pass template=", {"template": "plain"}, {"template": None}),
    "role": Advice(
        [{"messages": [{"role": "x", "content": "q"}, {"role": "assistant", "content": "a"}]}],
        r"in a Map before \(transforms=",
        {"transforms": [Map(lambda row: chat("q", "a"))]},
    ),
    "columns": Advice(
        [{"q": "q", "a": "a"}],
        r"pass columns=\{'user'",
        {"columns": {"user": "q", "assistant": "a"}},
        command=("--columns", "user=q,assistant=a"),
    ),
    "special tokens": Advice(
        [chat("q", "a")],
        r"pass special_tokens=\[",
        {"special_tokens": [], "end_of_turn": "<eos>", "gate": {"terminator": False, "bos": False}},
        {"template": "gemma"},
    ),
    "label": Advice(
        [chat("q", "a", label=True)],
        "preference=False",
        {"preference": False},
        command=("--no-preference",),
    ),
    "drop the label": Advice(
        [chat("q", "a", label=True)],
        r"drop or rename the column before \(transforms=",
        {"transforms": [{"drop": "label"}]},
        command=("--transform", "drop=label"),
    ),
    "flag": Advice([chat("q", "a", weight=0.5)], r"before \(transforms=", {"transforms": [{"drop": "weight"}]}),
    "too long": Advice([chat("q", "a" * 199), chat("q", "a")], "truncation=.*'drop'", {"truncation": "drop"}),
    "lost thoughts": Advice(
        [{"messages": [*chat("q", "a")["messages"][:1], {"role": "assistant", "content": "a", "thinking": "hm"}]}],
        r"allow_lost=\['thoughts'\]",
        {"allow_lost": ["thoughts"]},
        command=("--chat", "allow_lost=thoughts"),
    ),
    "empty answer": Advice(
        [chat("q", "")],
        r"gate=\{'content': False\}",
        {"gate": {"content": False}},
        command=("--chat", "gate.content=false"),
    ),
    "time": Advice(
        [chat("q", "a")],
        r"pass now=",
        {"now": "2026-01-31"},
        {
            "template": "{{ bos_token }}{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{{ eos_token }}{% endfor %}"
        },
        command=("--chat", "now=2026-01-31"),
    ),
}


def written(tmp_path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if not rows:
        (folder / "b.jsonl").write_text('{"text": "a"}\n')
    return folder


def as_recipe(path: Path, tmp_path: Path, tokenizer: Any, given: dict[str, Any]) -> None:
    options = dict(given)
    config = PipelineConfig(on_error=options.pop("on_error", "raise"))
    if "text_column" in options:
        options["column"] = options.pop("text_column")
    prepare(path, tmp_path / "made.store", Recipe(tokenizer=tokenizer, **options), config=config)


def check(try_it: Callable[[dict[str, Any]], Any], advice: Advice, given: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match=advice.advice):
        try_it({**given, **advice.given})
    try_it({**given, **advice.given, **advice.follow})


@pytest.mark.parametrize("door", ["loader", "stream", "recipe"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_advice_about_documents_can_be_followed(name: str, door: str, tmp_path: Path) -> None:
    advice = DOCUMENTS[name]
    path = written(tmp_path, advice.rows)

    def try_it(options: dict[str, Any]) -> None:
        if door == "recipe":
            as_recipe(path, tmp_path, TOKENIZER, options)
            return
        more: dict[str, Any] = {"streaming": StreamOptions(worker_type="thread")} if door == "stream" else {}
        more |= {"backend": "numpy", "cache_dir": tmp_path / "cache", "packing": None}
        with PretrainDataLoader(path, TOKENIZER, 64, **more, **options) as loader:
            assert sum(len(batch.input_ids) for batch in loader)

    if door == "stream" and name in ("empty", "cast"):
        try_it(advice.follow)  # a stream passes over empty files, and reads any value as text
    else:
        check(try_it, advice, {})


@pytest.mark.parametrize("door", ["loader", "stream", "recipe"])
@pytest.mark.parametrize("name", CHATS)
def test_advice_about_chats_can_be_followed(name: str, door: str, tmp_path: Path) -> None:
    advice = CHATS[name]
    path = written(tmp_path, advice.rows)

    def try_it(options: dict[str, Any]) -> None:
        if door == "recipe":
            as_recipe(path, tmp_path, TOKENIZER, {"max_length": 128, **options})
            return
        more: dict[str, Any] = {"streaming": StreamOptions(worker_type="thread")} if door == "stream" else {}
        more |= {"backend": "numpy", "cache_dir": tmp_path / "cache"}
        with ConversationDataLoader(path, TOKENIZER, 128, **more, **options) as loader:
            assert sum(len(batch.input_ids) for batch in loader)

    check(try_it, advice, {"template": "plain"})


@pytest.mark.parametrize("name", [name for name, advice in {**DOCUMENTS, **CHATS}.items() if advice.command])
def test_advice_can_be_followed_on_the_command_line(name: str, tmp_path: Path) -> None:
    advice = {**DOCUMENTS, **CHATS}[name]
    path = written(tmp_path, advice.rows)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(_TOKENIZER_JSON)
    words = ["prepare", str(path), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "a.store"), "-q"]
    if name in CHATS:
        words += ["--template", advice.given.get("template", "plain")]
    assert CliRunner().invoke(app, words).exit_code == 1
    followed = CliRunner().invoke(app, [*words, *(advice.command or ())])
    assert followed.exit_code == 0, followed.output


_TOKENIZER_JSON = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for number, text in enumerate(("<s>", "</s>"), 256)
        ],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
)  # fmt: skip


# Rollouts

TEXT = [{"prompt": f"q{row // 2}", "response": "a" * (row + 1), "reward": float(row)} for row in range(4)]
TALK = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXT]
ALONE = [{**row, "prompt": f"q{number}"} for number, row in enumerate(TEXT)]


def rollouts(data: Any, **options: Any) -> None:
    with RolloutDataLoader(data, TOKENIZER, backend="numpy", **options) as loader:
        assert sum(len(batch.input_ids) for batch in loader) == 4


@pytest.mark.parametrize("name", ["template", "chat_template"])
def test_advice_about_the_template_of_rollouts_can_be_followed(name: str) -> None:
    with pytest.raises(PenstockError, match="pass template="):
        rollouts(TALK)
    rollouts(TALK, **{name: "plain"})
    with pytest.raises(PenstockError, match="pass template="):
        read_rollouts(TALK, tokenizer=TOKENIZER)
    assert len(read_rollouts(TALK, tokenizer=TOKENIZER, template="plain")) == 4


def test_the_template_of_live_rollouts_is_named_where_they_are_read(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="pass template= to the buffer or the queue"):
        rollouts(LiveBuffer(tokenizer=TOKENIZER), template="plain", rollout_batch_size=4)
    for source in (
        LiveBuffer(tokenizer=TOKENIZER, template="plain"),
        RolloutQueue(tmp_path / "queue", tokenizer=TOKENIZER, template="plain"),
    ):
        source.append(TALK)
        source.finish() if isinstance(source, RolloutQueue) else source.close()
        rollouts(source, rollout_batch_size=4)
        source.close()


def test_rollouts_are_grouped_by_equal_prompts_or_by_size(caplog: pytest.LogCaptureFixture) -> None:
    rollouts(TEXT, compute_advantages=True)
    assert "2 groups of 2" in caplog.text
    assert "group_size=" in caplog.text
    with pytest.raises(PenstockError, match="group_size="):
        rollouts(ALONE)
    rollouts(ALONE, group_size=2, group_prompts="any")
    with pytest.raises(PenstockError, match="group_prompts='any'"):
        rollouts(ALONE, group_size=2)
    with pytest.raises(PenstockError, match="cannot be split into groups of group_size=3"):
        rollouts(TEXT, group_size=3)
    named = [{**row, "group": row["prompt"]} for row in TEXT]
    rollouts(named, group_size=2)
    with pytest.raises(PenstockError, match="has 2 rollouts, and group_size=4"):
        rollouts(named, group_size=4)


def test_a_stream_says_where_its_number_of_steps_goes(tmp_path: Path) -> None:
    path = written(tmp_path, [{"text": "a"}])
    options: dict[str, Any] = {"backend": "numpy", "packing": None}
    unknown = pytest.raises(TypeError, match=r"streaming=StreamOptions\(steps_per_epoch=\.\.\.\)")
    with PretrainDataLoader(path, TOKENIZER, streaming=True, **options) as loader, unknown:
        len(loader)
    with PretrainDataLoader(path, TOKENIZER, streaming=StreamOptions(steps_per_epoch=1), **options) as loader:
        assert len(loader) == 1


def test_advice_about_preferences_can_be_followed(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "q", "chosen": "a" * 90, "rejected": "b"}])
    options: dict[str, Any] = {"backend": "numpy", "cache_dir": tmp_path / "cache", "template": "plain"}
    with pytest.raises(PenstockError, match=r"truncation=.*'right'"):
        PreferenceDataLoader(path, TOKENIZER, 64, **options)
    with PreferenceDataLoader(path, TOKENIZER, 64, truncation="right", **options) as loader:
        assert len(loader) == 1
