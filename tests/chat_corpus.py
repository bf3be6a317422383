"""Small tokenizers for templates that nobody here wrote, and a rendering of them that is not ours."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from penstock.transforms.tokenization import load_tokenizer

NOW = datetime(2026, 1, 2)
SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s'\"{}]+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|</?(?:start|end)_of_turn>|</?s>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|SYSTEM_PROMPT|TOOL_CONTENT|ARGS|CALL_ID|THINK|gMASK)\]"
    r"|</?seed:[a-z_:]+>|\]~b\]|\]~!b\[|\[e~\[|</?assistant>|<sep>|<sop>|</?(?:beginning|end)_of_sentence>|<SPECIAL_\d+>"
)
SYMBOL = re.compile(r"</?(?:think|tool_call|tool_response)>")
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|role_end|>",
    "[e~[",
    "<|assistant_end|>",
    "<seed:eos>",
    "<|message_sep|>",
    "<|end_of_text|>",
    "<|end_of_msg|>",
    "<|eot|>",
    "<|end|>",
    "<sep>",
    "</assistant>",
    "<end_of_sentence>",
    "<｜hy_eos:opensource｜>",
]
TENCENT = ("hy_eos", "hy_begin_of_sentence", "hy_pad", "hy_User", "hy_Assistant", "reasoning_mode")


def tokenizer_for(source: str) -> Any:
    """A byte-level tokenizer that knows the special tokens of a template, with line breaks that merge."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary | {"ĊĊ": len(vocabulary)}, merges=[("Ċ", "Ċ")]))
    words = r"\s*[\r\n]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, bytes_]), decoders.ByteLevel()
    special = [*SPECIAL.findall(source), *(f"<｜{name}:opensource｜>" for name in TENCENT if ":opensource" in source)]
    special += ["<s>"] if "bos_token" in source else []
    special += ["</s>"] if "eos_token" in source else []
    made.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys([*special, "<|endoftext|>"])])
    made.add_tokens([AddedToken(text, special=False) for text in dict.fromkeys(SYMBOL.findall(source))])
    eos = next((text for text in ENDS if text in special), "</s>" if "eos_token" in source else "<|endoftext|>")
    bos = "<s>" if "bos_token" in source else None
    return load_tokenizer(made, bos=bos, eos=eos, chat_template=source)


def rendered_by_transformers(
    source: str, row: dict[str, Any], tokenizer: Any, *, prompt: bool = False, **variables: Any
) -> str:
    """What `apply_chat_template` writes, by transformers' own environment."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {token: text for text, token in tokenizer.special.named.items()}
    special = tokenizer.special
    known = {"bos_token": names.get(special.bos, ""), "eos_token": names.get(special.eos, "")}
    texts, _ = render_jinja_template(
        [row["messages"]],
        tools=row.get("tools"),
        chat_template=source,
        add_generation_prompt=prompt,
        **known,
        **variables,
    )
    text: str = texts[0]
    return text


def needs_of(source: str) -> tuple[dict[str, Any], ...]:
    """What to give a template that does not load by itself, in the order in which it is tried."""
    ways: list[dict[str, Any]] = [{}]
    ways += [{"variables": {name: on}} for name in ("enable_thinking", "thinking") for on in (True, False)]
    ways += [{"variables": {"functions": "[]", "datetime": "today"}}, {"gate": {"prompt": False}}]
    ways += [{"gate": {"bos": False}}, {"gate": {"prompt": False}, "end_of_turn": "\n\n"}]
    return tuple(ways)
