"""Templates that packages ship: ids are those of `apply_chat_template`, and masks those of a reference of our own."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_corpus import in_use, rendered_by_transformers, tokenizer_for
from corpus_files import templates, tokenizer_dir
from penstock.chat import sandbox
from penstock.chat.compile import tracer
from penstock.chat.format_chat import FormatChat, RowProblem
from penstock.chat.templates import BUILT_IN, load_template
from penstock.errors import ConfigError

COLUMNS = pa.schema([("messages", pa.string()), ("tools", pa.string())])
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells wetterwort.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Names stadtwort."}},
                "required": ["city"],
            },
        },
    }
]

try:
    SOURCES = templates()
except BaseException:
    SOURCES = {}
NAMES = sorted(SOURCES) or ["none"]
LLAMA_CPP = [name for name in NAMES if name.startswith("llama.cpp/")]


@pytest.fixture(autouse=True)
def _corpus(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    templates()


@pytest.fixture(autouse=True, scope="module")
def _compiled_once() -> Iterator[None]:
    """The caches of compiled templates have room for all of these."""
    from transformers.utils import chat_template_utils

    caches = [(sandbox, "compiled"), (tracer, "tracer"), (chat_template_utils, "_compile_jinja_template")]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in caches:
            patch.setattr(module, name, cache(getattr(module, name).__wrapped__))
        yield


# -- conversations whose every part has words of its own ------------------------------------------------------------

texts = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]|\x85\u2028\u2029"), max_size=12
) | st.sampled_from(
    [
        "",
        " ",
        "\n",
        "한국어",
        "e\u0301\u0327",
        "😀 👩\u200d👩",
        '"quoted" \\ back',
        "a\tb",
        "{{ x }} {% y %}",
        "\u202eabc",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(-1e6, 1e6, width=32) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b c", "ä"]), inner, max_size=2),
    max_leaves=4,
)


class Numbered:
    """Words that stand nowhere else, so that a part can be found by searching for it."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def around(self, text: str) -> str:
        first, last = f"wort{len(self.words)}anf", f"wort{len(self.words)}end"
        self.words.append(first)
        return f"{first} {text} {last}"


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    numbered = Numbered()
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": numbered.around(draw(texts))})
    tools = draw(st.booleans())
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": numbered.around(draw(texts))})
        if tools and draw(st.booleans()):
            content = draw(st.sampled_from([None, "", numbered.around("call")]))
            arguments: Any = {"city": numbered.around(draw(texts)), "more": draw(values)}
            if draw(st.booleans()):
                arguments = json.dumps(arguments, ensure_ascii=False)
            call = {
                "type": "function",
                "id": f"c{turn}a1b2c3d",
                "function": {"name": "weather", "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            result = numbered.around(draw(texts))
            messages.append({"role": "tool", "content": result, "tool_call_id": call["id"], "name": "weather"})
        answer = {"role": "assistant", "content": numbered.around(draw(texts))}
        if draw(st.integers(0, 2)) == 0:
            answer["reasoning_content"] = numbered.around(draw(texts))
        messages.append(answer)
    return {"messages": messages, "tools": TOOLS if tools else None}


def batch_of(row: dict[str, Any]) -> pa.RecordBatch:
    tools = json.dumps(row["tools"], ensure_ascii=False) if row["tools"] else None
    cells = {"messages": json.dumps(row["messages"], ensure_ascii=False), "tools": tools}
    return pa.RecordBatch.from_pylist([cells], schema=COLUMNS)


def reference_spans(text: str, row: dict[str, Any], prompts: list[str], ends: tuple[str, ...]) -> list[tuple[int, int]]:
    """Turns of the assistant: from where its prompt ends to the first end of a turn behind its last words."""
    spans = []
    answers = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    for i, prompt in zip(answers, prompts):
        said = json.dumps(row["messages"][i], ensure_ascii=False)
        words = [word for word in said.replace("\\", " ").replace('"', " ").split() if word.startswith("wort")]
        last = max(text.index(word) + len(word) for word in words if word.endswith("end"))
        stops = [text.index(end, last) + len(end) for end in ends if end in text[last:]]
        spans.append((len(prompt), min(stops)))
    return spans


def check(format_chat: FormatChat, source: str, row: dict[str, Any], way: dict[str, Any]) -> bool:
    """Whether the row is taken; if it is, with the ids and the mask that it must have."""
    try:
        made = format_chat.transform(batch_of(row))
    except RowProblem:
        return False
    tokenizer = format_chat.tokenizer
    variables = way.get("variables", {})
    given = {"messages": row["messages"], "tools": row["tools"]}
    try:
        text, blocks = rendered_by_transformers(source, given, tokenizer, blocks="generation" in source, **variables)
    except Exception:
        return True
    words = [word for word in text.split() if word.startswith("wort")]
    if len(words) < 2 or "\\ud" in text:
        return True
    text += format_chat._renderer.ends.closing
    encoded = tokenizer.encode_spans(pa.array([text]), parse_special=True)
    ids, mask = made["input_ids"][0].values.to_numpy(), made["loss_mask"][0].values.to_numpy(zero_copy_only=False)
    decoded = tokenizer.decode(ids)
    if decoded != tokenizer.decode(encoded.ids.values.to_numpy()):
        # The template was given another form of the same: text for objects, an empty text for null, another name.
        assert any(key in message for key in ("tool_calls", "reasoning_content") for message in row["messages"]), (
            decoded
        )
        return True
    assert ids.tolist() == encoded.ids.values.to_numpy().tolist()
    if way.get("gate", {}).get("prompt") is False:
        return True
    prompts = []
    for i, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            before = {"messages": row["messages"][:i], "tools": row["tools"]}
            found = [
                rendered_by_transformers(source, before, tokenizer, prompt=True, **{**variables, **switch})[0]
                for switch in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": True})
            ]
            fitting = [prompt for prompt in found if text.startswith(prompt)]
            clear = [prompt for prompt in fitting if not (prompt[-1:].isspace() and text[len(prompt)].isspace())]
            prompts.append((clear or fitting)[0])
    expected = np.zeros(len(ids), bool)
    offsets = np.cumsum([0, *(len(letter.encode()) for letter in text)])
    spans = reference_spans(text, row, prompts, format_chat._renderer.ends.texts)
    if len(blocks) == len(prompts):  # what the template itself marks, but never a header that the prompt has
        spans = [(max(start, len(prompt)), stop) for (start, stop), prompt in zip(blocks, prompts)]
    for start, stop in spans:
        expected |= (encoded.starts >= offsets[start]) & (encoded.starts < offsets[stop])
    assert mask.tolist() == expected.tolist()
    return True


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_of_real_templates_are_those_of_the_reference(name: str) -> None:
    format_chat, way = in_use(SOURCES[name])
    if format_chat is None:
        pytest.skip(f"{name} is refused when loaded; another test counts those")
    transform, source = format_chat, SOURCES[name]

    @given(row=rows())
    @settings(max_examples=4, deadline=None, database=None)
    def each(row: dict[str, Any]) -> None:
        check(transform, source, row, way)

    each()


@pytest.mark.parametrize("name", BUILT_IN)
@given(row=rows())
@settings(max_examples=6, deadline=None)
def test_ids_and_masks_of_built_in_templates_are_those_of_the_reference(name: str, row: dict[str, Any]) -> None:
    source = load_template(name, None).source
    bare = source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    check(built_in(name), bare, row, {})


@cache
def built_in(name: str) -> FormatChat:
    return FormatChat(tokenizer_for(load_template(name, None).source + "eos_token"), name)


def test_templates_of_llama_cpp_load_but_for_few() -> None:
    refused = [name for name in LLAMA_CPP if in_use(SOURCES[name])[0] is None]
    assert len(LLAMA_CPP) >= 68
    assert len(refused) <= 6, refused


def test_real_templates_take_what_they_should() -> None:
    """The properties above are about something: most templates take a plain conversation, and many take tools."""
    plain = {"messages": [{"role": "user", "content": "wort0end"}, {"role": "assistant", "content": "wort1end"}]}
    function = {"name": "weather", "arguments": {"city": "wort1end"}}
    call = {"type": "function", "id": "a1b2c3d4e", "function": function}
    called = [
        {"role": "user", "content": "wort0end"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wort2end", "tool_call_id": "a1b2c3d4e", "name": "weather"},
        {"role": "assistant", "content": "wort3end"},
    ]
    taken = {"plain": 0, "tools": 0}
    for name in NAMES:
        format_chat, way = in_use(SOURCES[name])
        if format_chat is not None:
            taken["plain"] += check(format_chat, SOURCES[name], {**plain, "tools": None}, way)
            taken["tools"] += check(format_chat, SOURCES[name], {"messages": called, "tools": TOOLS}, way)
    assert taken["plain"] >= 0.75 * len(NAMES)
    assert taken["tools"] >= 0.35 * len(NAMES)


FAMILIES = """cohere cohere2 gemma gemma3 glm4moe llama3 phi3 phi3_5 qwen2_5 qwen3 qwen3_5_nothink qwen3_instruct_2507
lfm2 gptoss deepseekv3 muse_glimmer nemotron_3_nano"""


@pytest.mark.parametrize("family", FAMILIES.split())
def test_masks_are_those_of_the_training_templates_that_trl_writes(family: str) -> None:
    """TRL marks by hand, in a template of its own, what the assistant says: nothing of it is ours."""
    from transformers.utils.chat_template_utils import render_jinja_template

    stock, training = SOURCES.get(f"trl/{family}.jinja"), SOURCES.get(f"trl/{family}_training.jinja")
    if stock is None or training is None:
        pytest.skip(f"this version of TRL has no training template for {family}")
    format_chat, way = in_use(stock)
    if format_chat is None:
        pytest.skip(f"{family} is refused when loaded")
    tokenizer = format_chat.tokenizer
    messages = [{"role": role, "content": f"{role} says {n}"} for n, role in enumerate(("user", "assistant"))]
    names = {token: text for text, token in tokenizer.special.named.items()}
    special = {"bos_token": names.get(tokenizer.special.bos, ""), "eos_token": names[tokenizer.special.eos]}
    (text,), (spans,) = render_jinja_template(
        [messages],
        chat_template=training,
        return_assistant_tokens_mask=True,
        **special,
        **way.get("variables", {}),
    )
    made = format_chat.transform(batch_of({"messages": messages, "tools": None}))
    ids, mask = made["input_ids"][0].values.to_numpy(), made["loss_mask"][0].values.to_numpy(zero_copy_only=False)
    expected = "".join(text[start:stop] for start, stop in spans)
    supervised = tokenizer.decode(ids[mask])
    # TRL supervises what stands behind the end of a turn too; a thought that the prompt begins is not the model's.
    assert supervised.rstrip("\n") in expected
    assert "assistant says 1" in supervised


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek_v3"])
def test_ids_of_published_tokenizers_are_those_of_apply_chat_template(name: str) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tokenizer_dir(name)), FormatChat(tokenizer_dir(name))
    plain = [
        {"role": "user", "content": "What is 2 + 2? 한국어 e\u0301"},
        {"role": "assistant", "content": " Four. 😀\n"},
    ]
    call = {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Rome", "days": 1.5, "now": None}},
    }
    called = [
        plain[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    rows: list[dict[str, Any]] = [{"messages": plain * 2, "tools": None}]
    rows += [{"messages": [*called, plain[1]], "tools": TOOLS}] if name == "qwen3" else []
    for row in rows:
        made = ours.transform(batch_of(row))
        expected = theirs.apply_chat_template(row["messages"], tools=row["tools"], return_dict=True)["input_ids"]
        assert made["input_ids"][0].as_py() == expected
        mask = made["loss_mask"][0].values.to_numpy(zero_copy_only=False)
        assert "Four." in ours.tokenizer.decode(made["input_ids"][0].values.to_numpy()[mask])


def test_a_template_that_is_not_jinja_is_told_so() -> None:
    with pytest.raises(ConfigError):
        FormatChat(tokenizer_for("{% for %}"))
