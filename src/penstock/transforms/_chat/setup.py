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

from penstock.errors import ConfigError, DataError
from penstock.transforms._chat.gate import Checker, Gate
from penstock.transforms._chat.messages import Conversation
from penstock.transforms._chat.problems import RenderError
from penstock.transforms._chat.rendering import EVERYTHING, Renderer, TrainOn
from penstock.transforms._chat.shapes import shape_of
from penstock.transforms._chat.templates import BUILT_IN, Markers, Template, specials
from penstock.transforms._tokenizers.base import Tokenizer
from penstock.transforms._tokenizers.loaded import LoadedTokenizer

__all__ = ["Asked", "check_vocabulary", "fitted", "sample"]

logger = logging.getLogger(__name__)

MARKUP = re.compile(r"\s*[<\[{(|\uff5c].*[>\]})|\uff5c]\s*", re.DOTALL)
ROLE_NAMES = re.compile(r"<\|(system|user|assistant|tool)\|>")
"""What Zephyr and its kin write as plain text."""
# Words that no template writes by itself.
ASKED, ANSWERED = "Zwölf Boxkämpfer?", "Quokkas jagten Viktor."


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said about turns, as far as it concerns template and tokenizer."""

    train_on: TrainOn
    include_eot: bool
    gate: Gate
    markers: Markers | None
    end_of_turn: str | Sequence[str] | None
    special_tokens: Sequence[str] | None
    variables: Mapping[str, Any]
    now: datetime | None


def sample(turns: int = 2) -> Conversation:
    """A conversation to try templates on."""
    pair = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    return Conversation([dict(message) for message in pair * turns])


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


def fitted(tokenizer: Tokenizer, template: Template, asked: Asked) -> tuple[Renderer, Checker]:
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
        shape=shape_of(template.name, given["bos_token"], given["eos_token"]) if template.name in BUILT_IN else None,
        markers=asked.markers or template.markers,
        now=asked.now,
        check_prompts=gate.prompt,
        check_content=gate.content,
        check_headers=gate.headers,
    )
    renderer = replace(renderer, wants_parts=_wants_parts(renderer))
    text = _sample_text(renderer)
    if asked.special_tokens is not None or not template.own:
        check_vocabulary(
            tokenizer, template, asked.special_tokens if asked.special_tokens is not None else template.needs
        )
    else:
        _check_own(tokenizer, template, specials(text))
    known = _known(tokenizer, text)
    ends = _terminators(tokenizer, renderer, asked.end_of_turn, known)
    if asked.include_eot and gate.terminator and not ends and asked.train_on != EVERYTHING:
        raise ConfigError(
            f"{template.name} writes no special token behind an answer, so the model would not learn to stop; "
            "use a tokenizer with an end-of-sequence token, pass end_of_turn=..., or pass include_eot=False"
        )
    symbols = _symbols(tokenizer, known)
    framing = {tokenizer.special.bos, tokenizer.special.eos, *ends.values()}
    headers = _headers(
        tokenizer, text, {name: known[name] for name in known if name not in symbols or _is_markup(name)}
    )
    headers -= framing
    # What a message may not say: not symbols, which are text, unless the template gives them a meaning.
    forbidden = [name for name, token in known.items() if name not in symbols or token in framing | headers]
    forbidden.sort(key=len, reverse=True)
    renderer = replace(renderer, terminators=tuple(ends), specials=tuple(forbidden) if gate.content else ())
    # In any text, symbols are found along with everything else; only special tokens are looked for before.
    cuts = frozenset(token for name, token in tokenizer.special.named.items() if name in known and name not in symbols)
    ids = frozenset(ends.values())
    return renderer, Checker(gate, tokenizer, ids, frozenset(headers), cuts, asked.include_eot)


def _sample_text(renderer: Renderer) -> str:
    try:
        text = renderer.text(sample(1))
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


def _wants_parts(renderer: Renderer) -> bool:
    """Whether a text as content gets lost in the template, and a list of parts does not."""

    def writes_contents(candidate: Renderer) -> bool:
        try:
            text = candidate.text(sample(1))
        except RenderError:
            return False
        return ASKED in text and ANSWERED in text

    return not writes_contents(renderer) and writes_contents(replace(renderer, wants_parts=True))


def _terminators(
    tokenizer: Tokenizer, renderer: Renderer, given: str | Sequence[str] | None, known: Mapping[str, int]
) -> dict[str, int]:
    """The tokens that end a turn: those given, or the first special token that the template writes behind an answer."""
    template = renderer.template
    if given is not None:
        texts = [given] if isinstance(given, str) else list(given)
        check_vocabulary(tokenizer, template, texts)
    else:
        behind = renderer.text(sample(1)).rpartition(ANSWERED)[2]
        bos, eos = renderer.variables["bos_token"], renderer.variables["eos_token"]
        special = {*known, eos} - {"", bos if bos != eos else ""}
        found = [(behind.index(name), -len(name), name) for name in special if name in behind]
        texts = [min(found)[2]] if found else []
        # Llama's turns end in another token when a tool is to answer.
        texts += [name for name in ("<|eom_id|>",) if texts and name in special and template.mentions(name)]
    ids = {text: known[text] if text in known else token_id(tokenizer, text) for text in texts}
    return {text: token for text, token in ids.items() if token is not None}


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
