"""Binding of a chat template to a tokenizer: the tokens that end a turn and those of role headers.

Both are found once, by rendering sample conversations. The result is a `Renderer` and a `Checker`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.arrays.text import numbers_of, text_array
from penstock.chat.gate import Checker, Gate
from penstock.chat.masks import common_length
from penstock.chat.messages import Conversation
from penstock.chat.parts import place_parts
from penstock.chat.problems import RenderError, RowProblem
from penstock.chat.render import EVERYTHING, Renderer, Rendering, TrainOn, TurnEnds
from penstock.chat.templates import TOOL, ChatTemplate, TemplateSource, call_sample, specials, thought_sample, traits_of
from penstock.errors import ConfigError, DataError
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.load import LoadedTokenizer


@dataclass(frozen=True, slots=True)
class SampleEnds:
    """Texts of the tokens that end turns, as samples show them."""

    texts: tuple[str, ...]
    at_the_end: bool = True
    """True if the last answer of a conversation has one."""
    of_calls: str = ""
    """Text that ends a turn with tool calls, where the template writes nothing after the last turn."""


def turn_ends_of(renderer: Renderer, known: Iterable[str], eos: str) -> SampleEnds:
    """The tokens that end an answer, and a turn that calls a tool.

    The text after the answer of a short conversation, and the text between that answer and the next message of a
    longer one, begin with the same special tokens. If EOS is among them, it ends turns; otherwise the last of them that
    does not open turns. If the two texts have no token in common, the first special token of each ends turns: one the
    last turn, the other the turns before.
    """
    specials = _pattern({*known, eos} - {""})
    openers = set(specials.findall(_opening(renderer))) - {eos}
    texts: dict[str, None] = {}
    at_the_end, of_calls = True, ""
    for called in (False, True):
        shorter = call_sample(stop=2) if called else renderer.sample(1)
        longer = call_sample(stop=4) if called else renderer.sample(2)
        after, between = _text_after(renderer, shorter, 1), _text_after(renderer, longer, 1)
        if after is None:
            continue
        between = after if between is None else between
        # A token between two calls ends a call, not the turn.
        inside = set(specials.findall(_between_calls(renderer))) - {eos} if called else set()
        found = _in_common(after, between, specials, openers | inside, eos)
        if found is not None:
            texts[found] = None
            continue
        firsts = [_first(text, specials, inside) for text in (after, between)]
        if called and at_the_end:  # answers have their own end, so a token that opens the result of a tool is none
            firsts[1] = ""
        texts.update(dict.fromkeys(text for text in firsts if text))
        if called and not firsts[0]:
            of_calls = firsts[1]
        elif not firsts[0]:
            at_the_end = False
    return SampleEnds(tuple(texts), at_the_end, of_calls)


def _first(text: str, specials: re.Pattern[str], inside: set[str]) -> str:
    return next((match[0] for match in specials.finditer(text) if match[0] not in inside), "")


def _between_calls(renderer: Renderer) -> str:
    """Text between two calls of one turn; empty if the template cannot write two."""
    given = renderer.traits.present(call_sample(stop=2, calls=2))
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return ""
    names = sorted(places[0] for part, places in zip(placement.parts, placement.places) if part.names and places)
    called = [place for place in names if whole[slice(*place)] == TOOL]
    if len(called) != 2:
        return ""
    last = max(place[1] for place in placement.of_message(1) if place[0] < called[1][0])
    return whole[last : called[1][0]]


def special_tokens_in_turns(renderer: Renderer, known: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Special tokens in the turns of samples, and those of them that end turns and also occur inside of one."""
    specials = _pattern(known)
    inside: set[str] = set()
    ends: set[str] = set()
    strict = replace(renderer, check_parts=False, train_on="assistant")
    for conversation in _samples(renderer):
        made = _rendering(strict, conversation)
        if made is None:
            continue
        for turn in made.turns:
            found = list(specials.finditer(made.text, turn.start, turn.stop))
            inside.update(match[0] for match in found)
            closers = [match[0] for match in found if match[0] in renderer.ends.texts]
            ends.update(closers[:-1])
    return inside, ends


def _rendering(renderer: Renderer, conversation: Conversation) -> Rendering | None:
    """A rendered sample; its prompts are checked if that is possible."""
    for check_prompts in (True, False):
        with contextlib.suppress(RowProblem):
            return replace(renderer, check_prompts=check_prompts).render(conversation)
    return None


def _samples(renderer: Renderer) -> list[Conversation]:
    keys = renderer.traits.thought_keys or ("reasoning_content",)
    return [renderer.sample(1), renderer.sample(2), call_sample(), *(thought_sample(key) for key in keys)]


def _opening(renderer: Renderer) -> str:
    """Text that opens the next turn of the assistant."""
    request = renderer.sample(1)
    request.messages = request.messages[:1]
    given = renderer.traits.present(request)
    try:
        prompt = next(iter(renderer.prompts(given, 1)))
        text = renderer.text_of(given)
    except RowProblem:
        return ""
    return prompt[len(text) :] if prompt.startswith(text) else ""


def _text_after(renderer: Renderer, conversation: Conversation, i: int) -> str | None:
    """Text after message i, up to the content of the next; None if the conversation cannot be rendered."""
    given = renderer.traits.present(conversation)
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return None
    places = placement.of_message(i)
    if not places:
        return None
    following = [place[0] for n in range(i + 1, len(given.messages)) for place in placement.of_message(n)]
    if len(given.messages) > i + 1 and not following:
        return None
    return whole[places[-1][1] : min(following, default=len(whole))]


def _in_common(after: str, between: str, specials: re.Pattern[str], openers: set[str], eos: str) -> str | None:
    """The special token that ends the turn in both texts."""
    shared = common_length(after, between)
    found = [match[0] for match in specials.finditer(after) if match.end() <= shared]
    if eos in found:
        return eos
    if not openers:  # tokens that open turns and tokens that end them cannot be distinguished
        return found[0] if found else None
    closers = [text for text in found if text not in openers]
    return closers[-1] if closers else None


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    listed: Sequence[str] = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, listed)) if listed else r"(?!)")


logger = logging.getLogger(__name__)

MARKUP = re.compile(r"\s*[<\[{(|\uff5c].*[>\]})|\uff5c]\s*", re.DOTALL)
ROLE_NAMES = re.compile(r"<\|(system|user|assistant|tool)\|>")
"""Role names that Zephyr and similar templates write as plain text."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `FormatChat` that concern template and tokenizer."""

    train_on: TrainOn
    include_eot: bool
    gate: Gate
    template: ChatTemplate
    allow_lost: frozenset[str] = frozenset()


def special_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """`bos_token` and the others, as templates name them; empty for a token that the tokenizer does not have."""
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


def check_vocabulary(tokenizer: Tokenizer, template: TemplateSource, needed: Sequence[str]) -> None:
    """Raise if a text that the template needs as one token is not in the vocabulary."""
    missing = [text for text in needed if token_id(tokenizer, text) is None]
    if missing:
        raise ConfigError(
            f"the vocabulary of {tokenizer.name} lacks {', '.join(map(repr, missing))}, which {template.name} writes: "
            "in pieces they would be ordinary text; add them to the tokenizer, use another template, "
            "or pass special_tokens=[...] with the tokens that are needed"
        )


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a text that is one single token."""
    named = tokenizer.special.named.get(text)
    if named is not None:
        return named
    try:  # between letters, so that a prefix that the tokenizer adds does not matter
        made = tokenizer.encode_spans(text_array([f"a{text}a"]), parse_special=True)
    except DataError:
        return None
    found = np.flatnonzero((made.starts == 1) & (made.ends == 1 + len(text.encode())))
    return int(made.ids.values[int(found[0])].as_py()) if len(found) == 1 else None


def bind_template(tokenizer: Tokenizer, template: TemplateSource, options: ChatOptions) -> tuple[Renderer, Checker]:
    """The renderer of conversations and the checker of their tokens."""
    settings, gate = options.template, options.gate
    given = {**special_variables(tokenizer), **(settings.variables or {})}
    renderer = Renderer(
        template,
        given,
        train_on=options.train_on,
        markers=settings.markers or template.markers,
        now=settings.time,
        check_prompts=gate.prompt,
        check_content=gate.content,
        check_parts=gate.parts,
        allow_lost=options.allow_lost,
    )
    traits = traits_of(renderer.text_of, developer=template.mentions("developer"))
    renderer = replace(renderer, traits=traits)
    text = _sample_text(renderer)
    if settings.special_tokens is not None or not template.own:
        needed = settings.special_tokens if settings.special_tokens is not None else template.needs
        check_vocabulary(tokenizer, template, needed)
    else:
        _check_own(tokenizer, template, specials(text))
    known = _known(tokenizer, template.source + text)
    ends = _terminators(tokenizer, renderer, options, known)
    renderer = replace(renderer, ends=TurnEnds(tuple(ends.ids), ends.closing, ends.call_closing))
    symbols = _symbols(tokenizer, known)
    framing = {tokenizer.special.bos, tokenizer.special.eos, *ends.ids.values()}
    inside, inner = special_tokens_in_turns(renderer, known)
    headers = _headers(
        tokenizer, text, {name: known[name] for name in known if name not in symbols or _is_markup(name)}
    )
    headers -= framing | {known[name] for name in inside}
    # Texts that no message may have. Symbols are ordinary text, unless the template gives them a meaning.
    forbidden = [name for name, token in known.items() if name not in symbols or token in framing | headers]
    forbidden.sort(key=len, reverse=True)
    renderer = replace(renderer, specials=tuple(forbidden) if gate.content else ())
    # A tokenizer splits text at special tokens first; symbols are found along with everything else.
    cuts = frozenset(token for name, token in tokenizer.special.named.items() if name in known and name not in symbols)
    allowed = frozenset(ends.ids[name] for name in inner)
    ids = frozenset(ends.ids.values())
    return renderer, Checker(gate, tokenizer, ids, frozenset(headers), cuts, options.include_eot, allowed)


def _sample_text(renderer: Renderer) -> str:
    try:
        text = renderer.text(renderer.sample(1))
        text.encode()
    except RenderError as error:
        raise ConfigError(f"a sample conversation cannot be rendered: {error}") from error
    except UnicodeEncodeError:
        raise ConfigError(f"{renderer.template.name} writes a lone surrogate, which is not text") from None
    return text


def _check_own(tokenizer: Tokenizer, template: TemplateSource, written: Sequence[str]) -> None:
    """As `check_vocabulary`, but role names in pieces are only a warning: some models were trained with them."""
    names = [text for text in written if ROLE_NAMES.fullmatch(text)]
    check_vocabulary(tokenizer, template, [text for text in written if text not in names])
    pieces = [text for text in names if token_id(tokenizer, text) is None]
    if pieces:
        logger.warning("%s writes %s, which %s has in pieces", template.name, ", ".join(pieces), tokenizer.name)


def _known(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Special tokens, and other single tokens that the template writes in their style."""
    unk = tokenizer.special.unk
    known = {name: token for name, token in tokenizer.special.named.items() if token != unk and name.strip()}
    for name in specials(text):
        token = token_id(tokenizer, name)
        if token is not None:
            known.setdefault(name, token)
    return known


def _symbols(tokenizer: Tokenizer, known: Mapping[str, int]) -> set[str]:
    """Tokens that are found in any text, even without parsing special tokens: `<think>`, runs of spaces."""
    # For a few texts, loading the fast tokenizer would take longer than the reference does.
    reference = tokenizer.without_fast(quietly=True) if isinstance(tokenizer, LoadedTokenizer) else tokenizer
    symbols = set()
    for text, token in known.items():
        try:
            ids = numbers_of(reference.encode(text_array([text]), parse_special=False).values)
        except DataError:  # its characters are not in the vocabulary
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
    tokenizer: Tokenizer, renderer: Renderer, options: ChatOptions, known: Mapping[str, int]
) -> _Terminators:
    """The tokens that end a turn: those given, or those that the template writes after answers."""
    template, given = renderer.template, options.template.end_of_turn
    bos, eos = renderer.variables["bos_token"], renderer.variables["eos_token"]
    special = {*known, eos} - {"", bos if bos != eos else ""}
    found = turn_ends_of(renderer, special, eos)
    needed = options.include_eot and options.gate.terminator and options.train_on != EVERYTHING
    if given is not None:
        texts = (given,) if isinstance(given, str) else tuple(given)
        check_vocabulary(tokenizer, template, texts)
        if set(texts) <= set(found.texts):  # it is missing after the last answer only
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
                f"{template.name} writes no special token after an answer, so the model would not learn to stop; "
                "use a tokenizer with an end-of-sequence token, pass end_of_turn=..., or pass include_eot=False"
            )
        if needed and not found.at_the_end:
            raise ConfigError(
                f"{template.name} writes nothing after the last answer of a conversation, only {texts[0]!r} between "
                f"turns, so the model would not learn to stop there; pass end_of_turn={texts[0]!r} to "
                "have it written after the last answer, or include_eot=False"
            )
    ids = {text: known[text] if text in known else token_id(tokenizer, text) for text in texts}
    return _Terminators({text: token for text, token in ids.items() if token is not None}, closing, call_closing)


def _headers(tokenizer: Tokenizer, text: str, known: Mapping[str, int]) -> set[int]:
    """Special tokens that the template writes; those that end no turn and begin no row belong to role headers."""
    # For one text, loading the fast tokenizer would take longer than the reference does.
    reference = tokenizer.without_fast(quietly=True) if isinstance(tokenizer, LoadedTokenizer) else tokenizer
    try:
        ids = numbers_of(reference.encode(text_array([text]), parse_special=True).values)
    except DataError:  # the sample has characters that the vocabulary lacks
        return {token for name, token in known.items() if name in text}
    return set(np.unique(ids).tolist()) & set(known.values())


def _is_markup(text: str) -> bool:
    return MARKUP.fullmatch(text) is not None
