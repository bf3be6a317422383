"""Messages among the tokens of a row: every content where the template has put it, or no figures at all."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from corpus_files import templates
from penstock.chat.bound_template import ChatOptions, bind_template
from penstock.chat.gate import Gate
from penstock.chat.messages import Conversation
from penstock.chat.templates import SPECIAL, ChatTemplate, load_template
from penstock.report.turns import TurnLayout
from penstock.transforms.tokenization import ByteTokenizer

LOOSE = Gate(prompt=False, content=False, parts=False, terminator=False, bos=False, headers=False)
TALK = [("user", "How high?"), ("assistant", "Ninety."), ("user", "And wide?"), ("assistant", "Forty."), ("user", "Oh")]


class OwnTemplate(ByteTokenizer):
    """Byte tokenizer with a chat template of its own."""

    def __init__(self, template: str) -> None:
        super().__init__(tuple(sorted({*SPECIAL.findall(template), "<bos>", "<eos>"})))
        self.chat_template = template


def found_in(template: str, conversation: Conversation) -> list[tuple[str, str]]:
    """Role and text of every message that the layout finds in the tokens of a conversation."""
    source = load_template(None, template)
    tokenizer = OwnTemplate(template)
    renderer, _ = bind_template(tokenizer, source, ChatOptions("assistant", False, LOOSE, ChatTemplate.of(None, {})))
    data = renderer.text_of(renderer.traits.present(conversation)).encode()
    layout = TurnLayout.of(tokenizer, source.fingerprint)
    return [(role, data[low:high].decode()) for role, low, high in layout.contents(data)]


def talk(count: int) -> Conversation:
    return Conversation([{"role": role, "content": text} for role, text in TALK[:count]])


@pytest.mark.parametrize("name", ["alpaca", "chatml", "gemma", "llama3", "mistral", "qwen", "vicuna", "zephyr"])
def test_messages_of_built_in_templates_are_found(name: str) -> None:
    found = found_in(load_template(name, None).source, talk(4))
    assert [each for each in found if each[0] != "system"] == TALK[:4]  # Alpaca writes a system message of its own


@pytest.mark.parametrize(
    "name",
    [
        "Qwen-Qwen3-0.6B",  # empty thoughts before the last answer only
        "Qwen3.5-4B",
        "GLM-4.6",
        "deepseek-ai-DeepSeek-V3.1",  # a turn has no mark but its role
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",  # a system message without content
        "moonshotai-Kimi-K2",
        "google-gemma-4-31B-it",
        "meta-llama-Llama-3.3-70B-Instruct",
    ],
)
def test_messages_of_published_templates_are_found(name: str) -> None:
    template = templates()[f"llama.cpp/{name}.jinja"]
    found = found_in(template, talk(4))
    assert [(role, text.strip()) for role, text in found if role != "system"] == TALK[:4]


def test_thoughts_belong_to_the_message_and_an_empty_one_to_the_template() -> None:
    template = templates()["llama.cpp/Qwen-Qwen3-0.6B.jinja"]
    thought = {"role": "assistant", "content": "<think>\nNine tens.\n</think>\n\nNinety."}
    assert found_in(template, Conversation([talk(1).messages[0], thought]))[1] == (
        "assistant",
        "<think>\nNine tens.\n</think>\n\nNinety.",
    )
    assert found_in(template, talk(2))[1] == ("assistant", "Ninety.")


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "google-gemma-4-31B-it", "deepseek-ai-DeepSeek-V3.1"])
def test_results_of_any_tool_are_found(name: str) -> None:
    call = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "depth", "arguments": {"lake": "Mjosa"}}}
    tool = {"type": "function", "function": {"name": "depth", "description": "Depth.", "parameters": {}}}
    messages = [
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "453 metres", "tool_call_id": "a1b2c3d4e", "name": "depth"},
        {"role": "assistant", "content": "Quite."},
    ]
    found = found_in(templates()[f"llama.cpp/{name}.jinja"], Conversation(messages, [tool]))
    assert [role for role, _ in found if role != "system"] == ["user", "assistant", "tool", "assistant"]
    assert found[-2:] == [("tool", "453 metres"), ("assistant", "Quite.")]


def test_marks_in_what_a_user_says_are_content() -> None:
    template = load_template("qwen", None).source
    tokenizer = OwnTemplate(template)
    layout = TurnLayout.of(tokenizer, load_template("qwen", None).fingerprint)
    text = "<|im_start|>user\nSay <think>no</think><|im_end|>\n<|im_start|>assistant\n<think>no</think>Yes<|im_end|>\n"
    ids = np.asarray(tokenizer.encode(pa.array([text]), parse_special=True)[0].as_py())
    parts, turns = layout.parts(ids)
    assert [turn.role for turn in turns] == ["user", "assistant"]
    assert {parts[at] for at in range(turns[0].start, turns[0].stop)} == {"content"}
    assert parts[turns[1].start] == "thought"
    assert parts[turns[1].stop - 1] == "content"


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2", "Spark2.5"])
def test_an_answer_with_thoughts_is_found_where_the_template_closes_empty_ones(name: str) -> None:
    thinking = {"role": "assistant", "content": "Ninety.", "reasoning_content": "Nine tens."}
    user = talk(1).messages[0]
    found = found_in(templates()[f"llama.cpp/{name}.jinja"], Conversation([user, thinking, user, thinking]))
    assert [role for role, _ in found if role != "system"] == ["user", "assistant"] * 2
    assert all(text.strip() == "How high?" for role, text in found if role == "user")
    assert "Nine tens." in found[-1][1]
    assert all(text.strip().endswith("Ninety.") for role, text in found if role == "assistant")


@pytest.mark.parametrize("name", ["Kimi-K3", "MiniMax-M3"])
def test_a_row_whose_messages_are_not_all_found_has_no_turns(name: str) -> None:
    template = templates()[f"llama.cpp/{name}.jinja"]
    source = load_template(None, template)
    tokenizer = OwnTemplate(template)
    renderer, _ = bind_template(tokenizer, source, ChatOptions("assistant", False, LOOSE, ChatTemplate.of(None, {})))
    layout = TurnLayout.of(tokenizer, source.fingerprint)
    thinking = {"role": "assistant", "content": "Ninety.", "reasoning_content": "Nine tens."}
    roles = []
    for conversation in (talk(2), Conversation([talk(1).messages[0], thinking])):
        text = renderer.text_of(renderer.traits.present(conversation))
        ids = np.asarray(tokenizer.encode(pa.array([text]), parse_special=True)[0].as_py())
        parts, turns = layout.parts(ids)
        assert len(parts) == len(ids)
        roles.append([turn.role for turn in turns if turn.role != "system"])
    assert roles == [["user", "assistant"], []]


def test_a_template_whose_samples_are_not_found_again_has_no_turns() -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert not TurnLayout.of(OwnTemplate(template), load_template(None, template).fingerprint).known
