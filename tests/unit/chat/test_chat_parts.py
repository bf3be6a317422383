"""What a template drops is refused with its words, what it needs is found out, and turns end with their end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from penstock import Pipeline
from penstock.chat.format_chat import FormatChat, Gate, RowProblem
from penstock.cli.main import app
from penstock.errors import ConfigError, SchemaError
from penstock.sources import JsonlSource
from penstock.transforms.tokenization import ByteTokenizer

HEAD = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BYTES = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|end_response|>", "<|user|>", "<|assistant|>"))
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
ASKED = {"role": "user", "content": "Weather in Rome?"}
CALLING = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
THINKING = [
    ASKED,
    {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
    ASKED,
    {"role": "assistant", "content": "6", "reasoning_content": "Three and three."},
]
KEEPS_THE_LAST = (
    HEAD + "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + TAIL
)


def rows(*chats: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"messages": [json.dumps(chat) for chat in chats]})


def supervised(transform: FormatChat, *chats: list[dict[str, Any]]) -> str:
    made = transform.transform(rows(*chats))
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    return str(transform.tokenizer.decode(ids[mask]))


def test_a_call_that_is_written_only_beside_null_is_given_null() -> None:
    source = (
        HEAD + "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}" + TAIL
    )
    assert supervised(FormatChat(BYTES, source), CALLING) == 'weather{"city": "Rome"}<|im_end|>'


def test_a_call_that_is_not_written_is_refused_with_its_words() -> None:
    source = HEAD + "{# tool_calls #}{{ m.content or '' }}" + TAIL
    with pytest.raises(RowProblem, match=r"tool_calls\[0\]\.name.*'weather'") as caught:
        FormatChat(BYTES, source).transform(rows(CALLING))
    assert "⟪weather⟫" in str(caught.value)


def test_the_advice_for_lost_parts_ends_when_it_is_followed() -> None:
    source = HEAD + "{# tool_calls #}{{ m.content or '' }}" + TAIL
    thinking = [ASKED, {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}]
    allowed: list[str] = []
    for chat in (CALLING, thinking):
        with pytest.raises(RowProblem, match="allow_lost=") as caught:
            FormatChat(BYTES, source, allow_lost=allowed).transform(rows(chat))
        advice = re.search(r"pass allow_lost=\[(.*?)\]", str(caught.value))
        assert advice is not None
        allowed = [kind.strip("' ") for kind in advice[1].split(",")]
    assert allowed == ["arguments", "calls", "thoughts"]
    gate = Gate(content=False)  # a call without a word leaves an empty turn
    for chat in (CALLING, thinking):
        assert FormatChat(BYTES, source, allow_lost=allowed, gate=gate).transform(rows(chat)).num_rows == 1


def test_text_beside_a_call_that_is_not_written_is_refused() -> None:
    source = (
        HEAD + "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}" + TAIL
    )
    chat = [ASKED, {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}]
    with pytest.raises(RowProblem, match="Let me look"):
        FormatChat(BYTES, source).transform(rows(chat))
    allowed = FormatChat(BYTES, source, allow_lost=["text_beside_calls"])
    assert supervised(allowed, chat) == 'weather{"city": "Rome"}<|im_end|>'


def test_thoughts_of_earlier_turns_are_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(RowProblem, match="Two and two"):
        FormatChat(BYTES, KEEPS_THE_LAST).transform(rows(THINKING))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": THINKING}) + "\n")
    allowed = FormatChat(BYTES, KEEPS_THE_LAST, allow_lost="earlier_thoughts")
    assert supervised(allowed, THINKING) == "4<|im_end|><think>Three and three.</think>6<|im_end|>"
    from penstock.sinks import MemorySink

    report = Pipeline(JsonlSource(tmp_path / "a.jsonl"), [allowed], MemorySink()).run()
    assert report.changed["lost: earlier_thoughts"] == 1
    with pytest.raises(ConfigError, match=r"allow_lost.*'thougts'"):
        FormatChat(BYTES, KEEPS_THE_LAST, allow_lost=["thougts"])


def test_inline_thoughts_that_are_cut_off_are_refused() -> None:
    source = HEAD + "{{ m.content.split('</think>')[-1] }}" + TAIL
    chat = [ASKED, {"role": "assistant", "content": "<think>Two and two.</think>4"}]
    with pytest.raises(RowProblem, match="Two and two"):
        FormatChat(BYTES, source).transform(rows(chat))


def test_a_turn_ends_with_the_end_of_sequence_behind_other_tokens() -> None:
    source = (
        HEAD.replace("\n", "", 0) + "{{ m.content }}{% if m.role == 'assistant' %}<|end_response|>{% endif %}" + TAIL
    )
    ending = ByteTokenizer(("<bos>", "<|im_start|>", "<|im_end|>", "<|end_response|>"))
    chat = [ASKED, {"role": "assistant", "content": "Sunny."}]
    assert supervised(FormatChat(ending, source), chat) == "Sunny.<|end_response|><|im_end|>"
    assert supervised(FormatChat(ending, source), [*chat, *chat]) == "Sunny.<|end_response|><|im_end|>" * 2


def test_a_turn_that_only_the_next_header_ends_needs_an_end_of_turn() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"end_of_turn='<\|user\|>'"):
        FormatChat(BYTES, source, special_tokens=())
    chat = [ASKED, {"role": "assistant", "content": "Sunny."}]
    closed = FormatChat(BYTES, source, special_tokens=(), end_of_turn="<|user|>")
    assert supervised(closed, chat) == "Sunny.<|user|>"
    assert supervised(closed, [*chat, *chat]) == "Sunny.<|user|>" * 2


def test_a_prompt_of_another_setting_is_where_a_turn_begins() -> None:
    """The prompt asks to think, and a row without thoughts is what the model is asked for with thinking off."""
    source = HEAD + (
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>{{ '\\n\\n' }}{% endif %}"
        "{{ m.content }}"
    )
    quiet = "{{ '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' }}"
    source += TAIL.replace("assistant\n{% endif %}", "assistant\n<think>{{ '\\n' }}" + quiet + "{% endif %}")
    plain, thought = [ASKED, {"role": "assistant", "content": "4"}], THINKING[2:]
    made = FormatChat(BYTES, source)
    assert supervised(made, plain) == "4<|im_end|>"
    assert supervised(made, thought) == "Three and three.\n</think>\n\n6<|im_end|>"


def test_bare_functions_are_wrapped_for_templates_that_need_it() -> None:
    source = "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }}{{ t.function.description }}{% endfor %}"
    source += HEAD.removeprefix("{{ bos_token }}") + "{{ m.content }}" + TAIL
    batch = pa.RecordBatch.from_pydict(
        {
            "messages": [json.dumps([ASKED, {"role": "assistant", "content": "a"}])],
            "tools": [json.dumps([{"name": "weather", "description": "Tells it.", "parameters": {}}])],
        }
    )
    assert FormatChat(BYTES, source).transform(batch).num_rows == 1


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    template, chats = tmp_path / "t.jinja", tmp_path / "a.jsonl"
    template.write_text(KEEPS_THE_LAST.replace("<|im_end|>", "\x03").replace("<|im_start|>", "\x02"))
    chats.write_text(json.dumps({"messages": THINKING}) + "\n")
    return template, chats


def test_lint_explains_where_each_part_went(files: tuple[Path, Path]) -> None:
    template, chats = files
    given = ["lint", str(chats), "--tokenizer", "byte", "--template", str(template), "--no-eot"]
    assert CliRunner().invoke(app, given).exit_code == 3
    told = CliRunner().invoke(app, [*given, "--explain", "0", "--json"])
    assert told.exit_code == 0, told.output
    explained = json.loads(told.output)
    where = {(part["message"], part["name"]): part["where"] for part in explained["parts"]}
    assert where[1, "reasoning_content"] == "lost"
    assert where[3, "reasoning_content"] == where[1, "content"] == "supervised"
    assert where[0, "content"] == "prompt"
    assert "Two and two." in explained["refused"]
    assert "lost" in CliRunner().invoke(app, [*given, "--explain", "0"]).output
    assert CliRunner().invoke(app, [*given, "--explain", "9"]).exit_code != 0


def test_the_command_line_takes_what_a_template_needs(files: tuple[Path, Path], tmp_path: Path) -> None:
    template, chats = files
    template.write_text("{{ strftime_now('%Y') }}{{ mood }}" + template.read_text())
    given = [str(chats), "--tokenizer", "byte", "--template", str(template), "--no-eot", "--chat", "gate.bos=false"]
    needed = ["--chat", "now=2026-01-31", "--chat", "variables.mood=calm", "--chat", "allow_lost=earlier_thoughts"]
    refused = CliRunner().invoke(app, ["lint", *given])
    assert refused.exit_code == 1
    assert "pass --chat now=" in refused.output
    assert CliRunner().invoke(app, ["lint", *given, *needed]).exit_code == 0
    shown = CliRunner().invoke(app, ["show", *given, *needed])
    assert "2026calm" in shown.output
    made = CliRunner().invoke(app, ["prepare", *given, *needed, "--out", str(tmp_path / "s.store"), "--quiet"])
    assert made.exit_code == 0, made.output
    wrong = CliRunner().invoke(app, ["lint", *given, "--chat", "nowhere=1"])
    assert wrong.exit_code != 0


def test_thoughts_are_given_as_parts_of_the_content_where_only_those_are_read() -> None:
    source = HEAD + (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'thinking' %}"
        "[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    )
    made = FormatChat(BYTES, source + TAIL)
    expected = "[THINK]Two and two.[/THINK]4<|im_end|>[THINK]Three and three.[/THINK]6<|im_end|>"
    assert supervised(made, THINKING) == expected


def test_a_template_that_writes_parts_as_json_is_not_given_thoughts_as_parts() -> None:
    source = HEAD + "{{ m.content if m.content is string else m.content | tojson }}" + TAIL
    with pytest.raises(RowProblem, match="Two and two"):
        FormatChat(BYTES, source).transform(rows(THINKING))


def test_an_allowed_loss_allows_no_other_order_and_no_change() -> None:
    calls = [{**CALL, "function": {"name": name, "arguments": "{}"}} for name in ("first", "second")]
    chat = [*THINKING[:2], ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    source = HEAD + "{{ m.content }}" + CALLS
    assert supervised(FormatChat(BYTES, source + TAIL, allow_lost=["earlier_thoughts"]), chat).endswith("{}<|im_end|>")
    turned = source.replace("m.tool_calls or []", "(m.tool_calls or []) | reverse")
    with pytest.raises(RowProblem, match="'second'"):
        FormatChat(BYTES, turned + TAIL, allow_lost=["earlier_thoughts"]).transform(rows(chat))
    shouted = HEAD + "{{ (m.reasoning_content or '') | upper }}{{ m.content }}" + TAIL
    with pytest.raises(RowProblem, match="reasoning_content"):
        FormatChat(BYTES, shouted, allow_lost=["text_beside_calls"]).transform(rows(THINKING))


def test_white_space_beside_a_call_stays() -> None:
    source = HEAD + "{{ m.content or '' }}" + CALLS
    chat = [ASKED, {"role": "assistant", "content": "\n\n", "tool_calls": [CALL]}]
    assert supervised(FormatChat(BYTES, source + TAIL), chat) == '\n\nweather{"city": "Rome"}<|im_end|>'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "reasoning_content": "AAA", "thinking": "BBB"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "BBB"}], "reasoning_content": "AAA"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "BBB"}]},
        {"role": "assistant", "content": "a", "value": "b"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}, "parameters": {"y": 5}}]},
    ],
)
def test_two_values_for_one_thing_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RowProblem):
        FormatChat(BYTES, "qwen").transform(rows([ASKED, message]))


def test_thoughts_of_a_function_call_turn_are_kept() -> None:
    chat = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}', "reasoning_content": "hm"},
    ]
    batch = pa.RecordBatch.from_pydict({"conversations": [json.dumps(chat)]})
    made = FormatChat(BYTES, "qwen").transform(batch)
    assert "<think>\nhm\n</think>" in BYTES.decode(made["input_ids"].values.to_numpy())


@pytest.mark.parametrize("column", ["weight", "train", "loss_weight"])
def test_columns_that_say_what_to_train_on_are_refused(column: str) -> None:
    batch = rows([ASKED, {"role": "assistant", "content": "a"}]).append_column(column, pa.array([0]))
    with pytest.raises(SchemaError, match=column):
        FormatChat(BYTES, "chatml").transform(batch)
    assert FormatChat(BYTES, "chatml", keep=column).transform(batch).num_rows == 1


@pytest.mark.parametrize("labels", [[0, 1], ["true", "false"], ["desirable", "desirable"]])
def test_labels_that_are_no_booleans_are_refused_too(labels: list[Any]) -> None:
    chat = [ASKED, {"role": "assistant", "content": "a"}]
    batch = rows(chat, chat).append_column("label", pa.array(labels))
    with pytest.raises(SchemaError, match="label"):
        FormatChat(BYTES, "chatml").transform(batch)
    sports = rows(chat, chat).append_column("label", pa.array(["sports", "news"]))
    assert FormatChat(BYTES, "chatml").transform(sports).num_rows == 2


def test_a_token_between_calls_does_not_end_the_turn() -> None:
    ending = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|call_end|>"))
    source = HEAD + (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
        "<|call_end|>{% endfor %}{% if not m.tool_calls %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = FormatChat(ending, source)
    assert supervised(made, [ASKED, {"role": "assistant", "content": "a"}]) == "a<|im_end|>"
    with pytest.raises(RowProblem, match="include_eot=False"):
        made.transform(rows([*CALLING, {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "a"}]))


def test_a_template_that_drops_the_parameters_of_tools_is_refused() -> None:
    tool = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {"city": {}}}}
    rest = HEAD.removeprefix("{{ bos_token }}") + "{{ m.content }}" + TAIL
    named = "{{ bos_token }}{% for t in tools or [] %}{{ t.name }}{{ t.description }}{% endfor %}"
    chat = [ASKED, {"role": "assistant", "content": "a"}]
    batch = rows(chat).append_column("tools", pa.array([json.dumps([tool])]))
    with pytest.raises(RowProblem, match="'city'"):
        FormatChat(BYTES, named + rest).transform(batch)
    whole = "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    assert FormatChat(BYTES, whole + rest).transform(batch).num_rows == 1
