"""Layouts: what is proven of a template gives what the template gives, and what cannot be proven is left to it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.compile import layouts
from penstock.chat.compile.layouts import QUESTIONS, WHITE_SPACE, Hole, Layout, Text, flat_conversations, flat_messages
from penstock.chat.compile.prover import Layouts
from penstock.chat.format_chat import FormatChat, Gate, RowProblem
from penstock.chat.messages import Conversation
from penstock.chat.problems import PromptDiffersError
from penstock.chat.templates import BUILT_IN, load_template
from penstock.transforms.tokenization import ByteTokenizer

SPECIAL = ("<bos>", "<eos>", *dict.fromkeys(token for needed in BUILT_IN.values() for token in needed))
BYTES = ByteTokenizer(SPECIAL)
LENIENT = Gate(content=False, terminator=False, supervised=False, bos=False, parts=False)

ANSWER = "{% generation %}{{ content }}<eos>{% endgeneration %}"
TURN = "{% if m.role == 'assistant' %}A:" + ANSWER + "{% else %}{{ m.role }}:{{ content }}<eos>{% endif %}"


def looping(prepared: str) -> str:
    """A template that sets `content` in some way and writes it."""
    prompt = "{% if add_generation_prompt %}A:{% endif %}"
    return "{% for m in messages %}" + prepared + TURN + "{% endfor %}" + prompt


PROVABLE = {
    **{name: load_template(name, None).source for name in BUILT_IN},
    "as it is": looping("{% set content = m.content %}"),
    "by get": looping("{% set content = m.get('content', '') %}"),
    "trimmed": looping("{% set content = m['content'] | trim %}"),
    "stripped of lines": looping("{% set content = m['content'].lstrip('\\n').rstrip() %}"),
    "between texts, trimmed": looping("{% set content = (' <' + m['content'] + '> ') | trim %}"),
    "before a text, trimmed": looping("{% set content = (m['content'] ~ ' ' ~ m.content).strip() %}"),
    "if it is there": looping("{% set content = m.content if m.content else 'nothing' %}"),
    "if it is a text": looping("{% set content = m.content if m.content is string else m.content | tojson %}"),
    "if not null": looping("{% set content = '' if m.content is none or m.content == none else m.content %}"),
    "by what it has": looping("{% set content = 'x' ~ m.content if 'a' in m.content else m.content %}"),
    "by how it begins": looping("{% set content = 'x' if m.content.startswith('a') else m.content %}"),
    "by how it ends": looping("{% set content = 'x' if m.content.endswith(' ') else m.content %}"),
    "by what it is": looping("{% set content = 'x' if m.content == 'a' or m.content in ['b', 'ab'] else m.content %}"),
    "by default": looping("{% set content = m.content | default('x', true) %}"),
    "once more at the end": (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set content = m.content %}"
        "{% if m.role == 'user' %}{% set ns.last = content %}{% endif %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
    "of users first": (
        "{% for m in messages | selectattr('role', 'equalto', 'system') | list %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{% set content = m.content %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
    "without blocks": (
        "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "in parts only": (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}
LOOKING = {
    name: looping(prepared)
    for name, prepared in {
        "length": "{% set content = m.content | length %}",
        "upper": "{% set content = m.content | upper %}",
        "upper method": "{% set content = m.content.upper() %}",
        "slice": "{% set content = m.content[:2] %}",
        "index": "{% set content = m.content[0] %}",
        "json": "{% set content = m.content | tojson %}",
        "message": "{% set content = m | string %}",
        "messages": "{% set content = messages[:1] %}",
        "replace": "{% set content = m.content | replace('a', 'b') %}",
        "split": "{% set content = m.content.split('a') | last %}",
        "times": "{% set content = m.content * 2 %}",
        "percent": "{% set content = '%s' % m.content %}",
        "format": "{% set content = '{}'.format(m.content) %}",
        "join": "{% set content = [m] | map(attribute='content') | join %}",
        "join method": "{% set content = 'a'.join([m.content, m.content]) %}",
        "captured": "{% set content %}{{ m.content }}{% endset %}{% set content = content | upper %}",
        "macro": "{% macro f(x) %}{{ x }}{% endmacro %}{% set content = f(m.content) | length %}",
        "filter block": "{% set content %}{% filter upper %}{{ m.content }}{% endfilter %}{% endset %}",
        "letters": "{% set ns = namespace(x='') %}{% for l in m.content %}{% set ns.x = l %}{% endfor %}"
        "{% set content = ns.x %}",
        "lower": "{% set content = 'x' if m.content is lower else 'y' %}",
        "order": "{% set content = 'x' if m.content < 'b' else 'y' %}",
        "key": "{% set content = {'a': 'x'}.get(m.content, 'y') %}",
        "key in brackets": "{% set content = {'a': 'x'}[m.content] | default('y') %}",
        "within": "{% set content = 'x' if m.content in 'abc' else 'y' %}",
        "each other": "{% set content = 'x' if m.content == messages[0].content else 'y' %}",
        "same messages": "{% set content = 'x' if messages.index(m) else 'y' %}",
        "number": "{% set content = m.content | int(7) %}",
        "whole middle": "{% set content = 'x' if 'a:' in ('a' + m.content) else 'y' %}",
        "escaped": "{% autoescape true %}{% set content = m.content | e %}{% endautoescape %}{% set content = 'z' %}",
        "listed": "{% set content = m.content | list | length %}",
        "unique": "{% set content = [m, messages[0]] | map(attribute='content') | unique | list | length %}",
        "grouped": "{% set content = [m, m] | groupby('content') | length %}",
    }.items()
}


class Unproven(Layouts):
    """Everything by the template."""

    @property
    def possible(self) -> bool:
        return False


def made(source: str, **options: Any) -> tuple[FormatChat, FormatChat]:
    """Two of them: one with layouts, one without."""
    pair = [FormatChat(BYTES, source, special_tokens=(), **{"gate": LENIENT, **options}) for _ in range(2)]
    pair[1]._layouts = Unproven(pair[1]._renderer)
    return pair[0], pair[1]


def outcome(transform: FormatChat, batch: pa.RecordBatch) -> Any:
    try:
        return transform.transform(batch).to_pydict()
    except RowProblem as problem:
        return type(problem), problem.row, str(problem)


def proven_rows(transform: FormatChat, batch: pa.RecordBatch) -> list[int]:
    flat = flat_messages(batch, "messages")
    assert flat is not None
    rows: list[int] = transform._layouts.fill(flat)[0].tolist()
    return rows


texts = st.text("ab <é😀\n\u2028\x1f", max_size=4) | st.sampled_from(["", " ", "a", "ab", "<eos>", "a:"])


def batch_of(*conversations: list[tuple[str, str]]) -> pa.RecordBatch:
    rows = [
        [
            {"role": role, "content": content}
            for role, content in [("system", "S"), ("user", "U"), *said, ("assistant", "Yes")]
        ]
        for said in conversations
    ]
    return pa.RecordBatch.from_pydict({"messages": rows})


@cache
def pair(name: str) -> tuple[FormatChat, FormatChat]:
    return made((PROVABLE | LOOKING)[name])


@pytest.mark.parametrize("name", PROVABLE | LOOKING)
@given(rows=st.lists(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), max_size=3), min_size=1))
@settings(max_examples=12, deadline=None)
def test_rows_are_the_same_with_layouts_and_without(name: str, rows: Any) -> None:
    with_layouts, without = pair(name)
    batch = batch_of(*rows)
    assert outcome(with_layouts, batch) == outcome(without, batch)


@pytest.mark.parametrize("name", PROVABLE)
def test_layouts_are_found_for_templates_that_do_not_look_at_contents(name: str) -> None:
    transform, _ = pair(name)
    batch = batch_of([("user", " a "), ("assistant", "b")], [("user", "b"), ("assistant", " ")], [])
    assert proven_rows(transform, batch) == [0, 1, 2]


@pytest.mark.parametrize("name", LOOKING)
def test_no_layout_is_proven_of_a_template_that_looks_at_contents(name: str) -> None:
    transform, _ = pair(name)
    assert proven_rows(transform, batch_of([("user", "a"), ("assistant", "b")])) == []


@cache
def pair_trained_on(train_on: str | tuple[str, ...]) -> tuple[FormatChat, FormatChat]:
    roles = train_on if isinstance(train_on, str) else list(train_on)
    return made(PROVABLE["trimmed"], train_on=roles, gate=Gate(bos=False))


@pytest.mark.parametrize("train_on", ["last", "all", "flags", ("user", "assistant")])
@given(rows=st.lists(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), max_size=3), min_size=1))
@settings(max_examples=12, deadline=None)
def test_what_is_trained_on_is_the_same_with_layouts_and_without(train_on: Any, rows: Any) -> None:
    with_layouts, without = pair_trained_on(train_on)
    batch = batch_of(*rows)
    assert outcome(with_layouts, batch) == outcome(without, batch)


def test_the_gate_sees_the_one_row_whose_prompt_differs() -> None:
    # Earlier answers lose what they thought: whether the text begins with the prompt depends on what they say.
    source = looping(
        "{% set content = m.content %}{% if '</think>' in content and not loop.last %}"
        "{% set content = content.split('</think>') | last %}{% endif %}"
    )
    with_layouts, without = made(source)
    calm, thinking = [("assistant", "one")], [("assistant", "hm</think>one")]
    batch = batch_of(calm, calm, thinking, calm)
    assert outcome(with_layouts, batch) == outcome(without, batch)
    assert outcome(with_layouts, batch)[:2] == (PromptDiffersError, 2)
    assert proven_rows(with_layouts, batch) == [0, 1, 3]


def test_a_template_whose_prompt_never_fits_is_refused_as_ever() -> None:
    # Only conversations that begin with the system are written otherwise: the sample it is tried on does not.
    source = looping("{% set content = m.content ~ ('!' if loop.last and messages[0].role == 'system' else '') %}")
    with_layouts, without = made(source)
    batch = batch_of([("assistant", "one")], [])
    assert outcome(with_layouts, batch) == outcome(without, batch)
    assert outcome(with_layouts, batch)[0] is PromptDiffersError
    assert proven_rows(with_layouts, batch) == []


def test_rows_with_more_than_text_stand_where_they_stood() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain_row = [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "Yes"}]
    calling = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    flagged = [plain_row[0], {**plain_row[1], "train": True}]
    rows = [calling, plain_row, flagged, plain_row, calling]
    with_layouts, without = made("qwen")
    batch = pa.RecordBatch.from_pydict({"messages": rows, "tools": [None, None, None, "[]", None]})
    assert proven_rows(with_layouts, batch) == [1, 2]
    assert outcome(with_layouts, batch) == outcome(without, batch)
    sliced = batch.slice(1, 3)
    assert outcome(with_layouts, sliced) == outcome(without, sliced)


@pytest.mark.parametrize("train_on", ["assistant", "last", "flags"])
@pytest.mark.parametrize("kind", [pa.int8(), pa.float32(), pa.bool_(), pa.string()])
@given(
    rows=st.lists(
        st.lists(st.tuples(*[st.sampled_from([None, None, 0, 1, 1, 2])] * 2), min_size=3, max_size=3), min_size=1
    )
)
@settings(max_examples=8, deadline=None)
def test_flags_are_the_same_with_layouts_and_without(train_on: str, kind: pa.DataType, rows: Any) -> None:
    with_layouts, without = flagged(train_on)
    fields = [("role", pa.string()), ("content", pa.string()), ("train", pa.bool_()), ("weight", kind)]
    roles = ("user", "assistant", "assistant")
    as_kind = {pa.bool_(): bool, pa.string(): str}.get(kind, int)
    chats = [
        [
            {
                "role": role,
                "content": role,
                "train": None if train is None else bool(train),
                "weight": None if weight is None else as_kind(weight),
            }
            for role, (train, weight) in zip(roles, row)
        ]
        for row in rows
    ]
    batch = pa.RecordBatch.from_arrays([pa.array(chats, pa.list_(pa.struct(fields)))], ["messages"])
    assert outcome(with_layouts, batch) == outcome(without, batch)


@cache
def flagged(train_on: str) -> tuple[FormatChat, FormatChat]:
    return made(PROVABLE["as it is"], train_on=train_on)


@pytest.mark.parametrize(
    "rows",
    [
        {"messages": [None, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]},
        {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], []]},
        {"messages": [[{"role": "user", "content": "a"}, None, {"role": "assistant", "content": "b"}]]},
        {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]]},
        {"messages": [[{"role": None, "content": "a"}, {"role": "assistant", "content": "b"}]]},
        {"messages": [[{"role": "judge", "content": "a"}, {"role": "assistant", "content": "b"}]]},
        {"messages": [[{"role": "user", "content": "a"}]]},
        {"conversations": [[{"from": "human", "value": "a"}, {"from": "GPT", "value": "b"}]]},
        {"conversations": [[{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}]]},
        {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]], "system": ["s"]},
        {"prompt": ["a", "b"], "completion": ["", "c"]},
        {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]},
        {"instruction": ["a"], "input": ["b"], "output": ["c"]},
        {"messages": ['[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]']},
        {"messages": []},
    ],
)
def test_rows_of_all_forms_are_the_same_with_layouts_and_without(rows: dict[str, Any]) -> None:
    with_layouts, without = made("chatml", gate=Gate())
    batch = pa.RecordBatch.from_pydict(rows)
    assert outcome(with_layouts, batch) == outcome(without, batch)
    if batch.num_rows == 1:
        twice = pa.concat_batches([batch, batch])
        assert outcome(with_layouts, twice) == outcome(without, twice)


def test_wide_and_encoded_text_is_text() -> None:
    kind = pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.large_string())]))
    with_layouts, without = made("llama3")
    batch = batch_of([("user", " ü ")], [])
    wide = pa.RecordBatch.from_arrays([pa.array(batch["messages"].to_pylist(), kind)], ["messages"])
    assert proven_rows(with_layouts, wide) == [0, 1]
    assert outcome(with_layouts, wide) == outcome(without, batch)


def test_very_long_texts_are_left_to_the_template_and_its_limits() -> None:
    with_layouts, without = made("chatml")
    batch = batch_of([("user", "a" * (1 << 20))], [])
    assert proven_rows(with_layouts, batch) == [1]
    assert outcome(with_layouts, batch) == outcome(without, batch)


def test_proofs_that_do_not_pay_are_given_up() -> None:
    transform, _ = made(PROVABLE["as it is"])
    rows = [[("user", "a")] * n for n in range(100)]
    proven = [len(proven_rows(transform, batch_of(row))) for row in rows]
    assert proven[:60] == [1] * 60
    assert proven[-20:] == [0] * 20


def test_a_copy_in_another_process_finds_its_own_layouts() -> None:
    transform, _ = made("chatml")
    batch = batch_of([("user", "a")])
    before = transform.transform(batch)
    copy = cloudpickle.loads(cloudpickle.dumps(transform))
    assert copy._layouts._known == {}
    assert copy.transform(batch).equals(before)


@given(
    texts=st.lists(st.text() | texts, min_size=1),
    given=st.text(min_size=1, max_size=2) | st.sampled_from(["a", "ab"]),
    strips=st.lists(
        st.tuples(st.sampled_from(["left", "right"]), st.none() | st.sampled_from(["a", "é ", "\n"])), max_size=2
    ),
)
def test_a_column_answers_as_its_texts_do(texts: list[str], given: str, strips: Any) -> None:
    rows = np.arange(len(texts))
    flat = flat_conversations([Conversation([{"role": "user", "content": text}]) for text in texts])
    assert flat is not None
    for question, ask in QUESTIONS.items():
        layout = Layout(Text(("", ""), (Hole(0),)), (), ((Hole(0, tuple(strips)), question, given, True),))
        expected = [ask(layouts.stripped(text, strips), given) for text in texts]
        assert layout.holds(flat, rows).tolist() == expected


def test_white_space_is_what_python_strips() -> None:
    assert "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1)))) == WHITE_SPACE


def test_jinja_is_loaded_only_when_a_template_is() -> None:
    code = "import sys, penstock.transforms, penstock.chat.format_chat; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
