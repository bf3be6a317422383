"""Small tokenizers for third-party chat templates, and their reference rendering by transformers."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from typing import Any

from penstock.chat.format_chat import FormatChat
from penstock.errors import ConfigError
from penstock.transforms.tokenization import load_tokenizer

NOW = datetime.now()
"""The clock of transformers cannot be set, so that ours is set by it. Templates write dates at most."""
SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s'\"{}]+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|</?(?:start|end)_of_turn>|</?s>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|SYSTEM_PROMPT|TOOL_CONTENT|ARGS|CALL_ID|THINK|gMASK)\]"
    r"|</?seed:[a-z_:]+>|\]~b\]|\]~!b\[|\[e~\[|</?assistant>|<sep>|<sop>|</?(?:beginning|end)_of_sentence>|<SPECIAL_\d+>"
)
SYMBOL = re.compile(r"</?(?:think|tool_call|tool_response)>")
BAR = "\uff5c"
ENDS = (
    *("<|im_end|>", "<|eot_id|>", f"<{BAR}end\u2581of\u2581sentence{BAR}>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>"),
    *("<turn|>", "<|return|>", "<|role_end|>", "[e~[", "<|assistant_end|>", "<seed:eos>", "<|message_sep|>"),
    *("<|end_of_text|>", "<|end_of_msg|>", "<|eot|>", "<|end|>", "<sep>", "</assistant>", "<end_of_sentence>"),
    f"<{BAR}hy_eos:opensource{BAR}>",
)
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
    special = [
        *SPECIAL.findall(source),
        *(f"<{BAR}{name}:opensource{BAR}>" for name in TENCENT if ":opensource" in source),
    ]
    special += ["<s>"] if "bos_token" in source else []
    special += ["</s>"] if "eos_token" in source else []
    made.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys([*special, "<|endoftext|>"])])
    made.add_tokens([AddedToken(text, special=False) for text in dict.fromkeys(SYMBOL.findall(source))])
    eos = next((text for text in ENDS if text in special), "</s>" if "eos_token" in source else "<|endoftext|>")
    own = f"<{BAR}hy_begin_of_sentence:opensource{BAR}>"  # what this template calls its BOS
    bos = own if own in special else "<s>" if "bos_token" in source else None
    return load_tokenizer(made, bos=bos, eos=eos, chat_template=source)


def rendered_by_transformers(
    source: str, row: dict[str, Any], tokenizer: Any, *, prompt: bool = False, blocks: bool = False, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """What `apply_chat_template` writes, by transformers' own environment, and with `blocks` its generation blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {token: text for text, token in tokenizer.special.named.items()}
    special = tokenizer.special
    known = {"bos_token": names.get(special.bos, ""), "eos_token": names.get(special.eos, "")}
    texts, spans = render_jinja_template(
        [row["messages"]],
        tools=row.get("tools"),
        chat_template=source,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=blocks,
        **known,
        **variables,
    )
    return texts[0], spans[0] if blocks else []


def loaded(tokenizer: Any, **options: Any) -> tuple[FormatChat | None, dict[str, Any]]:
    """The template in use, with what it needs, found by trying: what the refusal names first."""
    made = _made(tokenizer, {}, options)
    if isinstance(made, FormatChat):
        return made, {}
    ways: list[dict[str, Any]] = []
    named = re.search(r"pass end_of_turn='(.*?)'", made)
    if named:
        ways += [{"end_of_turn": named[1]}, {"end_of_turn": named[1], "gate": {"prompt": False}}]
        ways += [{"end_of_turn": named[1], "variables": {"enable_thinking": True}}]
    ways += [{"variables": {name: on}} for name in ("enable_thinking", "thinking") for on in (True, False)]
    ways += [{"variables": {"functions": "[]", "datetime": "today"}}, {"gate": {"prompt": False}}]
    ways += [{"gate": {"bos": False}}, {"end_of_turn": "\n\n", "gate": {"prompt": False}}]
    for way in ways:
        made = _made(tokenizer, way, options)
        if isinstance(made, FormatChat):
            return made, way
    return None, {}


@cache
def in_use(source: str) -> tuple[FormatChat | None, dict[str, Any]]:
    """A template in use with a tokenizer of its own, found once for all tests, which only read it."""
    return loaded(tokenizer_for(source))


def _made(tokenizer: Any, way: dict[str, Any], options: dict[str, Any]) -> FormatChat | str:
    """The transform, or why it was refused."""
    try:
        return FormatChat(tokenizer, now=NOW, **way, **options)
    except ConfigError as error:
        return str(error)
