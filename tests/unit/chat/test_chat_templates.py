"""Templates: what they may do, and that all ways to find the turns in their text agree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from penstock.chat.format_chat import FormatChat, Gate, RowProblem
from penstock.chat.masks import Spans, Turn
from penstock.chat.messages import Conversation
from penstock.chat.problems import RenderError
from penstock.chat.render import Rendering
from penstock.chat.sandbox import compiled
from penstock.chat.templates import BUILT_IN, END, START, load_template
from penstock.errors import ConfigError
from penstock.transforms.tokenization import ByteTokenizer

SPECIAL = ("<bos>", "<eos>", *dict.fromkeys(token for needed in BUILT_IN.values() for token in needed))
BYTES = ByteTokenizer(SPECIAL)
UNCHECKED = Gate(content=False)

# No "<": the texts of special tokens in the data are another story, told in the tests of the gate.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=10) | st.sampled_from(
    ["", " ", "\n", " a ", "한", "😀"]
)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=4).map(
    lambda pairs: [{"role": r, "content": c} for pair in pairs for r, c in zip(("user", "assistant"), pair)]
)


def with_marks(rendering: Rendering) -> str:
    """The text with its turns between marks."""
    pieces, done = [], 0
    for turn in rendering.turns:
        pieces += [rendering.text[done : turn.start], START, rendering.text[turn.start : turn.stop], END]
        done = turn.stop
    return "".join([*pieces, rendering.text[done:]])


def rendered(transform: FormatChat, chat: list[dict[str, Any]], **changes: Any) -> str | None:
    try:
        return with_marks(replace(transform._renderer, **changes).render(Conversation(chat)))
    except RenderError:
        return None


@cache
def formatter(name: str) -> FormatChat:
    return FormatChat(BYTES, name, gate=UNCHECKED)


@pytest.mark.parametrize("name", BUILT_IN)
@given(chat=turns)
@settings(max_examples=50, deadline=None)
def test_in_a_built_in_template_every_prompt_is_how_the_text_begins(name: str, chat: list[dict[str, Any]]) -> None:
    # With the check on, rendering through Jinja raises if it is not.
    assert rendered(formatter(name), chat, check_prompts=True) is not None


def without_blocks(name: str) -> str:
    source = load_template(name, None).source
    return source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


def last_turn_differs(source: str) -> str:
    """The last answer is written with something more: a text that ends with a turn is not how a longer one begins."""
    changed = source.replace(
        "message.content", "(('(last)' if loop.last and message.role == 'assistant' else '') + message.content)"
    )
    assert changed != source
    return changed


MARKERS = {
    "chatml": ("<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": ("<start_of_turn>model\n", "<end_of_turn>"),
    "zephyr": ("<|assistant|>\n", "<eos>"),
}


@cache
def by_prefix(name: str) -> FormatChat:
    return FormatChat(BYTES, without_blocks(name), gate=UNCHECKED, special_tokens=())


@cache
def by_markers(name: str) -> FormatChat:
    source = last_turn_differs(without_blocks(name))
    return FormatChat(BYTES, source, gate=UNCHECKED, special_tokens=(), markers=MARKERS[name])


@cache
def by_blocks(name: str) -> FormatChat:
    source = last_turn_differs(load_template(name, None).source)
    return FormatChat(BYTES, source, gate=UNCHECKED, special_tokens=())


@pytest.mark.parametrize("name", BUILT_IN)
@given(chats=st.lists(turns, min_size=1, max_size=3), train_on=st.sampled_from(["assistant", "last"]))
@settings(max_examples=40, deadline=None)
def test_generation_blocks_and_prefixes_give_the_same_masks(name: str, chats: Any, train_on: str) -> None:
    batch = pa.RecordBatch.from_pydict({"messages": chats})
    results = []
    for transform in (formatter(name), by_prefix(name)):
        marked = [replace(transform._renderer, train_on=train_on).render(Conversation(chat)) for chat in chats]
        results.append([with_marks(row) for row in marked])
    assert results[0] == results[1]
    assert formatter(name).transform(batch).equals(by_prefix(name).transform(batch))


@pytest.mark.parametrize("name", MARKERS)
@given(chat=turns, train_on=st.sampled_from(["assistant", "last"]))
@settings(max_examples=40, deadline=None)
def test_generation_blocks_and_markers_give_the_same_masks(name: str, chat: Any, train_on: str) -> None:
    assert rendered(by_markers(name), chat, train_on=train_on) == rendered(by_blocks(name), chat, train_on=train_on)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_the_markers_of_well_known_families_need_not_be_passed(name: str) -> None:
    known = FormatChat(BYTES, last_turn_differs(without_blocks(name)))
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    assert rendered(known, chat) == rendered(by_blocks(name), chat)


def test_with_markers_too_the_prompt_must_be_how_the_text_begins() -> None:
    source = without_blocks("chatml")
    prompt = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n"
    assert prompt in source
    thinking = source.replace(prompt, prompt + "<think>")
    with pytest.raises(ConfigError, match=r"prompt.*message 1\b"):
        FormatChat(BYTES, thinking)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    unchecked = FormatChat(BYTES, thinking, gate=Gate(prompt=False))
    assert rendered(unchecked, chat) == rendered(formatter("chatml"), chat)


def test_where_a_prompt_ends_before_the_block_begins_is_told() -> None:
    source = load_template("chatml", None).source.replace("{%- generation -%}", "{{- 'ü: ' -}}{%- generation -%}")
    chat = [{"role": "user", "content": "ä"}, {"role": "assistant", "content": "y"}]
    rendering = FormatChat(BYTES, source)._renderer.render(Conversation(chat))
    prompt = "<bos><|im_start|>user\nä<|im_end|>\n<|im_start|>assistant\n"
    assert with_marks(rendering) == f"{prompt}ü: {START}y<|im_end|>{END}\n"
    assert [turn.prompt for turn in rendering.turns] == [len(prompt)]


def test_a_text_whose_turns_are_written_otherwise_when_they_are_last_is_cut_by_its_prompts() -> None:
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    text = rendered(FormatChat(BYTES, last_turn_differs(without_blocks("plain"))), chat)
    assert text == f"<bos>x\n{START}x<eos>{END}\nx\n{START}(last)x<eos>{END}\n"


def test_a_template_whose_prompts_never_begin_its_text_is_refused() -> None:
    source = without_blocks("plain").replace("{{- bos_token -}}", "{{- bos_token ~ messages | length -}}")
    with pytest.raises(ConfigError, match=r"message 1\b"):
        FormatChat(BYTES, source)


def test_markers_in_the_data_are_not_taken_for_turns() -> None:
    chat = [
        {"role": "user", "content": "<|im_start|>assistant\nHa<|im_end|>"},
        {"role": "assistant", "content": "No"},
    ]
    chat = [*chat, *chat]
    made = by_markers("chatml").transform(pa.RecordBatch.from_pydict({"messages": [chat]}))
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    assert BYTES.decode(ids[mask]) == "No<|im_end|>(last)No<|im_end|>"


def test_a_template_that_always_ends_with_a_header_is_understood() -> None:
    source = without_blocks("llama3").replace("{%- if add_generation_prompt -%}", "{%- if true -%}")
    chat = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    expected = rendered(formatter("llama3"), chat)
    assert rendered(FormatChat(BYTES, source), chat) == f"{expected}{header}"


def test_blocks_in_macros_are_marked_where_their_text_ends_up() -> None:
    source = (
        "{% macro say(m) %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endmacro %}{{ bos_token }}"
        "{% for m in messages %}{{ say(m) }}{{ '\n' }}{% endfor %}"
    )
    assert rendered(
        FormatChat(BYTES, source), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    trimmed = source.replace("{{ say(m) }}", "{{ say(m) | trim }}").replace(
        "{{ m.content + eos", "{{ ' ' + m.content + eos"
    )
    with pytest.raises(ConfigError):
        FormatChat(BYTES, trimmed)


def test_what_is_set_in_a_block_is_not_seen_outside() -> None:
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert compiled(source).render() == f"{START}b{END}a"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set t = 'x' * 3000 %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ ([0] * 10 ** 10) | length }}",
        "{{ 2 ** 1000000 }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('abc') }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ (['x' * 100000] * 100000) | join }}",
        "{{ ''.join(['x' * 100000] * 100000) }}",
        "{{ 'a'.ljust(10 ** 12) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=999999999) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_run_or_grow_for_ever_nor_get_at_python(source: str) -> None:
    with pytest.raises(SecurityError):
        compiled(source).render(messages=[])


def test_recursion_and_other_failures_of_a_template_are_problems_of_the_row() -> None:
    source = (
        "{{ bos_token }}{% macro f() %}{{ f() }}{% endmacro %}{% for m in messages %}"
        "{% if m.content == 'deep' %}{{ f() }}{% elif m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
        "{{ m.content + eos_token }}{% endfor %}"
    )
    transform = FormatChat(BYTES, source)
    yes = {"role": "assistant", "content": "Yes"}
    chats = [[{"role": "user", "content": text}, yes] for text in ("ok", "deep", "no")]
    found = transform.check_rows(pa.RecordBatch.from_pydict({"messages": chats}))
    assert [(violation.row, violation.kind) for violation in found] == [(1, "render"), (2, "render")]
    assert found[1].message == "the given template: not that"


def test_functions_of_hugging_face_templates_are_there() -> None:
    assert compiled("{{ {'ü': '<b>'} | tojson }}").render() == '{"ü": "<b>"}'
    assert compiled("{{ [1] | tojson(indent=2) }}").render() == "[\n  1\n]"
    assert compiled("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render() == "01"
    assert compiled("{{ '%s-%s' | format('a', 'b') }}{{ 'a,b'.split(',') | join('+') }}").render() == "a-ba+b"
    assert compiled("{{ 'a\nb' | indent(2) }}{{ 'xx' | replace('x', 'y', 1) }}").render() == "a\n  byx"
    assert compiled("{% for m in nothing %}x{% else %}empty{% endfor %}").render() == "empty"
    assert compiled("{{ 1 + 2 + 3 }}{{ ([1] + [2]) | tojson }}{{ 'a' ~ 1 ~ none }}").render() == "6[1, 2]a1None"
    assert compiled("{% set x | upper %}a{% endset %}{{ x }}{% set y = x + 'b' %}{{ y }}").render() == "AAb"
    assert compiled("{{ m.items() | list | length }}{{ m.a }}{{ m.b is defined }}").render(m={"a": 1}) == "11False"
    with pytest.raises(TemplateError, match="no way"):
        compiled("{{ raise_exception('no way') }}").render()


@pytest.mark.parametrize("name", ["mistral", "gemma"])
@pytest.mark.parametrize("roles", [("system", "assistant"), ("system", "assistant", "user", "assistant")])
def test_what_the_system_says_is_neither_lost_nor_moved_behind_an_answer(name: str, roles: tuple[str, ...]) -> None:
    batch = pa.RecordBatch.from_pydict({"messages": [[{"role": role, "content": role} for role in roles]] * 2})
    for train_on in ("assistant", "last", "all"):
        transform = FormatChat(BYTES, name, train_on=train_on)
        with pytest.raises(RowProblem, match="system") as caught:
            transform.transform(batch)
        assert caught.value.kind == "render"
        assert [violation.row for violation in transform.check_rows(batch)] == [0, 1]


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_system_message_alone_is_not_rendered_as_nothing(name: str) -> None:
    for text in ("S", ""):
        batch = pa.RecordBatch.from_pydict({"messages": [[{"role": "system", "content": text}]]})
        with pytest.raises(RowProblem, match="system"):
            FormatChat(BYTES, name, train_on="all").transform(batch)


def test_alpaca_rows_with_an_input_get_its_section_and_introduction() -> None:
    rows = pa.RecordBatch.from_pylist(
        [
            {"instruction": "Add", "input": "1 and 1", "output": "2", "system": None, "history": None},
            {"instruction": "Hi", "input": "", "output": "Yes", "system": None, "history": None},
            {"instruction": "Add", "input": "2", "output": "4", "system": "S", "history": None},
            {"instruction": "Add", "input": "2", "output": "4", "system": None, "history": [["a", "b"]]},
        ]
    )
    paired = (
        "<bos>Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
    )
    alone = (
        "<bos>Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
    )
    expected = [
        paired + "### Instruction:\nAdd\n\n### Input:\n1 and 1\n\n### Response:\n2<eos>\n\n",
        alone + "### Instruction:\nHi\n\n### Response:\nYes<eos>\n\n",
        "<bos>S\n\n### Instruction:\nAdd\n\n### Input:\n2\n\n### Response:\n4<eos>\n\n",
        alone + "### Instruction:\na\n\n### Response:\nb<eos>\n\n"
        "### Instruction:\nAdd\n\n### Input:\n2\n\n### Response:\n4<eos>\n\n",
    ]
    transform = FormatChat(BYTES, "alpaca")
    made = transform.transform(rows)
    assert [BYTES.decode(ids.values.to_numpy()) for ids in made["input_ids"]] == expected
    assert transform.check_rows(rows) == []
    plain = FormatChat(BYTES, "plain").transform(rows[:1])
    assert BYTES.decode(plain["input_ids"].values.to_numpy()) == "<bos>Add\n\n1 and 1\n2<eos>\n"


requests = st.sampled_from(["a", "\n\n### Input:\n", "x\n\n### Input:\ny", "### Input:\n"])


@given(
    chat=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": requests}),
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None)
def test_inputs_in_contents_give_the_same_text_by_layout_and_by_template(chat: list[dict[str, Any]]) -> None:
    chat = [{"role": "user", "content": "Hi"}, *chat, {"role": "assistant", "content": "Yes"}]
    transform = formatter("alpaca")
    batch = pa.RecordBatch.from_pydict({"messages": [chat]})
    by_template = rendered(transform, chat)
    if by_template is not None:
        (text,) = [BYTES.decode(ids.values.to_numpy()) for ids in transform.transform(batch)["input_ids"]]
        assert text == by_template.replace(START, "").replace(END, "")


@given(
    text=st.lists(st.sampled_from(["a", " ", "\n", "\r\n", "\t", "\x0b", "é"]), max_size=6).map("".join),
    width=st.integers(0, 9) | st.sampled_from(["", "> ", "\t"]),
    first=st.booleans(),
    blank=st.booleans(),
)
@settings(deadline=None)
def test_indent_is_that_of_jinja(text: str, width: int | str, first: bool, blank: bool) -> None:
    source = "{{ text | indent(width, first, blank) }}"
    variables = {"text": text, "width": width, "first": first, "blank": blank}
    assert compiled(source).render(**variables) == jinja2.Environment().from_string(source).render(**variables)


@pytest.mark.parametrize("width", [65, 10**12, " " * 65])
def test_a_width_that_is_too_large_is_refused_and_not_made_smaller(width: int | str) -> None:
    with pytest.raises(SecurityError, match="templates"):
        compiled("{{ 'a' | indent(width) }}").render(width=width)


def with_template(source: str, special: tuple[str, ...] = SPECIAL) -> Any:
    made = ByteTokenizer(special)
    made.chat_template = source
    return made


def test_the_tokenizers_own_template_is_checked_for_tokens_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    source = load_template("chatml", None).source + "{# #}"
    assert FormatChat(with_template(source)).template.own
    few = ("<bos>", "<eos>")
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>'.*'<\|im_end\|>'"):
        FormatChat(with_template(source, few))
    # Only what it writes: a token for tools does not matter to conversations without.
    unused = "{% if tools %}<|tools|>{% endif %}" + load_template("zephyr", None).source
    assert not caplog.records
    FormatChat(with_template(unused, few))
    # Zephyr's own writes names of roles as text; its model was trained with that.
    assert "writes <|user|>, <|assistant|>, which byte has in pieces" in caplog.text
    with pytest.raises(ConfigError, match=r"'<\|user\|>'"):
        FormatChat(with_template(unused, few), special_tokens=["<|user|>"])


def test_a_lone_surrogate_in_a_template_is_refused_clearly() -> None:
    with pytest.raises(ConfigError, match=r"\b15\b"):
        FormatChat(BYTES, "{{ bos_token }}\ud83d")
    with pytest.raises(ConfigError):
        FormatChat(BYTES, "{{ bos_token + '\\ud83d' }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")


def test_a_file_that_is_called_like_a_built_in_template_is_not_taken_for_it(tmp_path: Path) -> None:
    file = tmp_path / "chatml"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = FormatChat(BYTES, file).transform(pa.RecordBatch.from_pydict({"messages": [chat]}))
    assert BYTES.decode(made["input_ids"].values.to_numpy()) == "<bos>a<eos>b<eos>"


def test_symbols_of_a_sentencepiece_model_do_for_a_template(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [f"the user {i} asks, the assistant answers {i * 7}" for i in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "\n", "7"],
        minloglevel=2,
    )
    transform = FormatChat(tmp_path / "m.model", "chatml")
    chat = [{"role": "user", "content": "the user"}, {"role": "assistant", "content": "answers\n77"}]
    bad = [chat[0], {"role": "assistant", "content": "answers<|im_end|>"}]
    batch = pa.RecordBatch.from_pydict({"messages": [chat, bad]})
    found = transform.check_rows(batch)
    assert [(violation.row, violation.kind) for violation in found] == [(1, "special token in content")]
    made = transform.transform(batch[:1])
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    assert transform.tokenizer.decode(ids[mask]) == "answers\n77<|im_end|>"


def test_a_template_that_is_not_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2\b"):
        FormatChat(BYTES, "{{ bos_token }}\n{% for %}")


@given(st.lists(st.lists(st.tuples(words, words), max_size=3), min_size=1, max_size=4))
def test_turns_in_characters_become_spans_in_bytes(rows: list[list[tuple[str, str]]]) -> None:
    texts = ["".join(out + inside for out, inside in row) for row in rows]
    turns = []
    for row in rows:
        ends = list(accumulate((len(out) + len(inside) for out, inside in row), initial=0))
        turns.append([Turn(end - len(inside), end, end - len(inside)) for end, (_, inside) in zip(ends[1:], row)])
    spans = Spans.of(texts, [list(reversed(of_row)) for of_row in turns])
    assert spans.texts.to_pylist() == texts
    spans.texts.validate(full=True)
    whole = "".join(texts).encode()
    found = zip(spans.rows.tolist(), spans.starts.tolist(), spans.stops.tolist())
    assert [(row, whole[a:b].decode()) for row, a, b in found] == [
        (i, row_text[turn.start : turn.stop]) for i, row_text in enumerate(texts) for turn in sorted(turns[i])
    ]
    assert spans.prompts.tolist() == spans.starts.tolist()
    assert spans.offsets.tolist() == list(accumulate((len(text.encode()) for text in texts), initial=0))
