"""Fitting a template to a tokenizer, once, on a sample conversation: what ends a turn, what belongs to a header."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.chat.gate import Checker, Gate
from penstock.chat.problems import RenderError
from penstock.chat.render import EVERYTHING, Renderer, TrainOn
from penstock.chat.template_traits import traits_of
from penstock.chat.templates import Markers, Template, specials
from penstock.chat.turn_ends import ends_of, special_tokens_in_turns
from penstock.errors import ConfigError, DataError
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.loaded import LoadedTokenizer

__all__ = ["ChatOptions", "bind_template", "check_vocabulary"]

logger = logging.getLogger(__name__)

MARKUP = re.compile(r"\s*[<\[{(|\uff5c].*[>\]})|\uff5c]\s*", re.DOTALL)
ROLE_NAMES = re.compile(r"<\|(system|user|assistant|tool)\|>")
"""What Zephyr and its kin write as plain text."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user said about turns, as far as it concerns template and tokenizer."""

    train_on: TrainOn
    include_eot: bool
    gate: Gate
    markers: Markers | None
    end_of_turn: str | Sequence[str] | None
    special_tokens: Sequence[str] | None
    variables: Mapping[str, Any]
    now: datetime | None
    allow_lost: frozenset[str] = frozenset()


def special_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """`bos_token` and the others, as templates know them; an empty text for one that the tokenizer does not have."""
    names = {token: text for text, token in tokenizer.special.named.items()}

    def text_of(token: int | None) -> str:
        if token is None:
            return ""
        return names[token] if token in names else tokenizer.token_bytes(token).decode()

    special = tokenizer.special
    return {
        "bos_token": text_of(special.bos),
        "eos_token": text_of(special.eos),
        "pad_token": text_of(special.pad),
        "unk_token": text_of(special.unk),
    }


def check_vocabulary(tokenizer: Tokenizer, template: Template, needed: Sequence[str]) -> None:
    """Every token the template relies on must be one token: in pieces it would be text like any other."""
    missing = [text for text in needed if token_id(tokenizer, text) is None]
    if missing:
        raise ConfigError(
            f"the vocabulary of {tokenizer.name} lacks {', '.join(map(repr, missing))}, which {template.name} writes: "
            "in pieces they would be text like any other; add them to the tokenizer, use another template, "
            "or pass special_tokens=[...] with those that must be there"
        )


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a text that is one single token."""
    named = tokenizer.special.named.get(text)
    if named is not None:
        return named
    try:  # between other letters, so that what a tokenizer puts in front of a text does not matter
        made = tokenizer.encode_spans(pa.array([f"a{text}a"]), parse_special=True)
    except DataError:
        return None
    found = np.flatnonzero((made.starts == 1) & (made.ends == 1 + len(text.encode())))
    return int(made.ids.values[int(found[0])].as_py()) if len(found) == 1 else None


def bind_template(tokenizer: Tokenizer, template: Template, asked: ChatOptions) -> tuple[Renderer, Checker]:
    """What renders conversations and what checks their tokens."""
    given = {**special_variables(tokenizer), **asked.variables}
    clash = set(asked.variables) & {"messages", "tools", "add_generation_prompt", "strftime_now"}
    if clash:
        raise ConfigError(f"variables cannot have {sorted(clash)}: they come from the rows")
    try:
        orjson.dumps(dict(asked.variables))
    except TypeError as error:
        raise ConfigError(f"variables must be plain values, as in JSON: {error}") from None
    gate = asked.gate
    renderer = Renderer(
        template,
        given,
        terminators=(),
        train_on=asked.train_on,
        markers=asked.markers or template.markers,
        now=asked.now,
        check_prompts=gate.prompt,
        check_content=gate.content,
        check_headers=gate.headers,
        check_parts=gate.parts,
        allow_lost=asked.allow_lost,
    )
    traits = traits_of(renderer.text_of, developer=template.mentions("developer"))
    renderer = replace(renderer, traits=traits)
    text = _sample_text(renderer)
    if asked.special_tokens is not None or not template.own:
        check_vocabulary(
            tokenizer, template, asked.special_tokens if asked.special_tokens is not None else template.needs
        )
    else:
        _check_own(tokenizer, template, specials(text))
    known = _known(tokenizer, template.source + text)
    ends = _terminators(tokenizer, renderer, asked, known)
    renderer = replace(renderer, terminators=tuple(ends.ids), closing=ends.closing, call_closing=ends.call_closing)
    symbols = _symbols(tokenizer, known)
    framing = {tokenizer.special.bos, tokenizer.special.eos, *ends.ids.values()}
    inside, inner = special_tokens_in_turns(renderer, known)
    headers = _headers(
        tokenizer, text, {name: known[name] for name in known if name not in symbols or _is_markup(name)}
    )
    headers -= framing | {known[name] for name in inside}
    # What a message may not say: not symbols, which are text, unless the template gives them a meaning.
    forbidden = [name for name, token in known.items() if name not in symbols or token in framing | headers]
    forbidden.sort(key=len, reverse=True)
    renderer = replace(renderer, specials=tuple(forbidden) if gate.content else ())
    # In any text, symbols are found along with everything else; only special tokens are looked for before.
    cuts = frozenset(token for name, token in tokenizer.special.named.items() if name in known and name not in symbols)
    allowed = frozenset(ends.ids[name] for name in inner)
    ids = frozenset(ends.ids.values())
    return renderer, Checker(gate, tokenizer, ids, frozenset(headers), cuts, asked.include_eot, allowed)


def _sample_text(renderer: Renderer) -> str:
    try:
        text = renderer.text(renderer.sample(1))
        text.encode()
    except RenderError as error:
        raise ConfigError(f"a sample conversation cannot be rendered: {error}") from error
    except UnicodeEncodeError:
        raise ConfigError(f"{renderer.template.name} writes a lone surrogate, which is not text") from None
    return text


def _check_own(tokenizer: Tokenizer, template: Template, written: Sequence[str]) -> None:
    """As `check_vocabulary`, but there are models that were trained with names of roles in pieces."""
    names = [text for text in written if ROLE_NAMES.fullmatch(text)]
    check_vocabulary(tokenizer, template, [text for text in written if text not in names])
    pieces = [text for text in names if token_id(tokenizer, text) is None]
    if pieces:
        logger.warning("%s writes %s, which %s has in pieces", template.name, ", ".join(pieces), tokenizer.name)


def _known(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """The special tokens, and what else the template writes in their manner that is one token."""
    unk = tokenizer.special.unk
    known = {name: token for name, token in tokenizer.special.named.items() if token != unk and name.strip()}
    for name in specials(text):
        token = token_id(tokenizer, name)
        if token is not None:
            known.setdefault(name, token)
    return known


def _symbols(tokenizer: Tokenizer, known: Mapping[str, int]) -> set[str]:
    """Those that are found in any text, whether special tokens are looked for or not: `<think>`, runs of spaces."""
    # A handful of texts: loading a fast path for them would take longer than the reference does.
    reference = tokenizer.without_fast(quietly=True) if isinstance(tokenizer, LoadedTokenizer) else tokenizer
    symbols = set()
    for text, token in known.items():
        try:
            ids = reference.encode(pa.array([text]), parse_special=False).values.to_numpy()
        except DataError:  # not even its letters are in the vocabulary
            continue
        if (ids == token).any():
            symbols.add(text)
    return symbols


@dataclass(frozen=True, slots=True)
class _Terminators:
    """The tokens that end a turn, by their texts, and what has to be written behind the last answer."""

    ids: dict[str, int]
    closing: str = ""
    call_closing: str = ""


def _terminators(
    tokenizer: Tokenizer, renderer: Renderer, asked: ChatOptions, known: Mapping[str, int]
) -> _Terminators:
    """The tokens that end a turn: those given, or those that the template writes behind answers."""
    template, given = renderer.template, asked.end_of_turn
    bos, eos = renderer.variables["bos_token"], renderer.variables["eos_token"]
    special = {*known, eos} - {"", bos if bos != eos else ""}
    found = ends_of(renderer, special, eos)
    needed = asked.include_eot and asked.gate.terminator and asked.train_on != EVERYTHING
    if given is not None:
        texts = (given,) if isinstance(given, str) else tuple(given)
        check_vocabulary(tokenizer, template, texts)
        if set(texts) <= set(found.texts):  # it says what is missing behind the last answer: the others are still ends
            texts += tuple(text for text in found.texts if text not in texts)
        closing = texts[0] if needed and texts and not found.at_the_end else ""
        call_closing = found.of_calls if needed else ""
    else:
        # Llama's turns end in another token when a tool is to answer.
        texts = found.texts
        texts += tuple(name for name in ("<|eom_id|>",) if texts and name in special and template.mentions(name))
        closing = call_closing = ""
        if needed and not texts:
            raise ConfigError(
                f"{template.name} writes no special token behind an answer, so the model would not learn to stop; "
                "use a tokenizer with an end-of-sequence token, pass end_of_turn=..., or pass include_eot=False"
            )
        if needed and not found.at_the_end:
            raise ConfigError(
                f"{template.name} writes nothing behind the last answer of a conversation, only {texts[0]!r} between "
                f"turns, so the model would not learn to stop there; pass end_of_turn={texts[0]!r} to "
                "have it written behind the last answer, or include_eot=False"
            )
    ids = {text: known[text] if text in known else token_id(tokenizer, text) for text in texts}
    return _Terminators({text: token for text, token in ids.items() if token is not None}, closing, call_closing)


def _headers(tokenizer: Tokenizer, text: str, known: Mapping[str, int]) -> set[int]:
    """Special tokens that the template writes: if they end no turn and begin no row, they announce who speaks."""
    # One text does not pay for loading the fast tokenizer.
    reference = tokenizer.without_fast(quietly=True) if isinstance(tokenizer, LoadedTokenizer) else tokenizer
    try:
        ids = reference.encode(pa.array([text]), parse_special=True).values.to_numpy()
    except DataError:  # the sample has letters that the vocabulary lacks
        return {token for name, token in known.items() if name in text}
    return set(np.unique(ids).tolist()) & set(known.values())


def _is_markup(text: str) -> bool:
    return MARKUP.fullmatch(text) is not None
