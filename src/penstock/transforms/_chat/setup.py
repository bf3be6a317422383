"""Fitting a template to a tokenizer, once, on a sample conversation: what ends a turn, what belongs to a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.errors import ConfigError
from penstock.transforms._chat.gate import Checker, Gate
from penstock.transforms._chat.messages import Conversation
from penstock.transforms._chat.problems import RenderError
from penstock.transforms._chat.rendering import EVERYTHING, Renderer, TrainOn
from penstock.transforms._chat.shapes import shape_of
from penstock.transforms._chat.templates import BUILT_IN, Markers, Template
from penstock.transforms._tokenizers.base import Tokenizer

__all__ = ["Asked", "check_vocabulary", "fitted", "sample"]

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
    ids = tokenizer.encode(pa.array([text]), parse_special=True).values
    return int(ids[0].as_py()) if len(ids) == 1 else None


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
    ends = _terminators(tokenizer, renderer, asked.end_of_turn)
    if asked.include_eot and gate.terminator and not ends and asked.train_on != EVERYTHING:
        raise ConfigError(
            f"{template.name} writes no special token behind an answer, so the model would not learn to stop; "
            "use a tokenizer with an end-of-sequence token, pass end_of_turn=..., or pass include_eot=False"
        )
    renderer = replace(renderer, terminators=tuple(ends))
    headers = _header_ids(tokenizer, renderer, frozenset(ends.values()))
    return renderer, Checker(gate, tokenizer, frozenset(ends.values()), headers, asked.include_eot)


def _wants_parts(renderer: Renderer) -> bool:
    """Whether a text as content gets lost in the template, and a list of parts does not."""

    def writes_contents(candidate: Renderer) -> bool:
        try:
            text = candidate.text(sample(1))
        except RenderError:
            return False
        return ASKED in text and ANSWERED in text

    return not writes_contents(renderer) and writes_contents(replace(renderer, wants_parts=True))


def _terminators(tokenizer: Tokenizer, renderer: Renderer, given: str | Sequence[str] | None) -> dict[str, int]:
    """The tokens that end a turn: those given, or the first special token that the template writes behind an answer."""
    template = renderer.template
    if given is not None:
        texts = [given] if isinstance(given, str) else list(given)
        check_vocabulary(tokenizer, template, texts)
    else:
        conversation = sample(1)
        try:
            text = renderer.text(conversation)
        except RenderError as error:
            raise ConfigError(f"a sample conversation cannot be rendered: {error}") from error
        behind = text.rpartition(ANSWERED)[2]
        special = {*tokenizer.special.named, renderer.variables["eos_token"]} - {"", renderer.variables["bos_token"]}
        found = [(behind.index(name), -len(name), name) for name in special if name in behind]
        texts = [min(found)[2]] if found else []
        # Llama's turns end in another token when a tool is to answer.
        texts += [name for name in ("<|eom_id|>",) if texts and name in special and template.mentions(name)]
    ids = {text: token_id(tokenizer, text) for text in texts}
    return {text: token for text, token in ids.items() if token is not None}


def _header_ids(tokenizer: Tokenizer, renderer: Renderer, terminators: frozenset[int]) -> frozenset[int]:
    """Special tokens that the template writes, but that end no turn and begin no row: they announce who speaks."""
    conversation = sample(1)
    text = renderer.text(conversation)
    ids = tokenizer.encode(pa.array([text]), parse_special=True).values.to_numpy()
    special = tokenizer.special
    announced = set(np.unique(ids).tolist()) & set(special.named.values())
    return frozenset(announced - terminators - {special.bos, special.eos})
