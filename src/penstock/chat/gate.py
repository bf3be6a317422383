"""Supervision gate: the checks that every row of chat has to pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._suggest import named_options
from penstock.arrays.text import numbers_of, text_array
from penstock.chat.masks import Flags, Ints, Spans, SpanTokens, shown
from penstock.chat.problems import (
    BosCountError,
    HeaderSupervisedError,
    NothingSupervisedError,
    PromptDiffersError,
    RowProblem,
    SpecialTokenInContentError,
    TerminatorInsideError,
    TerminatorNotSupervisedError,
)
from penstock.chat.rendered_batch import RenderedBatch
from penstock.errors import ConfigError
from penstock.tokenizers.base import Tokenizer

_MAX_TAILS = 4096
_MAX_WHITE_SPACE = 64
_WHITE_SPACE = np.isin(np.arange(256), list(b" \t\n\r"))
_END, _HEADER, _CUT, _BOS = 1, 2, 4, 8


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Checks that a row of chat has to pass. All are on; switch one off by name: `Gate(bos=False)`."""

    supervised: bool = True
    """Every kept row has at least one supervised token."""
    terminator: bool = True
    """The token that ends a turn is supervised (with `include_eot`), and occurs nowhere else in the turn."""
    bos: bool = True
    """Exactly one beginning-of-sequence token, at the beginning, if the tokenizer has one of its own."""
    prompt: bool = True
    """The text before a supervised turn is the prompt that a model gets for it, in text and in tokens."""
    headers: bool = True
    """Role headers are not supervised."""
    content: bool = True
    """Supervised turns are not empty, and no message contains the text of a special token."""
    parts: bool = True
    """Everything the row says is in the text, once, unchanged and in order."""

    @classmethod
    def of(cls, given: Gate | Mapping[str, bool]) -> Gate:
        """A gate, or a mapping of switches, as in a configuration file."""
        if isinstance(given, Gate):
            return given
        known = [check.name for check in fields(cls)]
        if not isinstance(given, Mapping) or any(
            name not in known or not isinstance(on, bool) for name, on in given.items()
        ):
            raise ConfigError(f"gate must switch some of {', '.join(known)} on or off, got {given!r}")
        return cls(**given)


@dataclass(frozen=True)
class Checker:
    """The gate's checks on tokens, for one tokenizer and template."""

    gate: Gate
    tokenizer: Tokenizer
    terminators: frozenset[int]
    headers: frozenset[int]
    cuts: frozenset[int]
    """Special tokens: a tokenizer splits a text at them first."""
    include_eot: bool
    inner: frozenset[int] = frozenset()
    """Tokens that end turns and that the template also writes inside of turns."""
    _tails: dict[bytes, bytes] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _roles(self) -> npt.NDArray[np.uint8]:
        """Meaning of each id of the vocabulary, as bits."""
        table = np.zeros(self.tokenizer.vocab_size, np.uint8)
        special = self.tokenizer.special
        bos = () if special.bos is None else (special.bos,)
        kinds = ((_END, self.terminators), (_HEADER, self.headers), (_CUT, self.cuts), (_BOS, bos))
        for bit, ids in kinds:
            table[list(ids)] |= bit
        return table

    def settle_ends(self, tokens: SpanTokens, spans: Spans) -> None:
        """Move the end of each span after the token that ends its turn, or before it without `include_eot`."""
        if not len(tokens.first) or not self.terminators or not len(tokens.ids):
            return
        closing = self._closing(tokens, spans)
        if not self.include_eot:
            tokens.stop = np.where(closing < 0, tokens.stop, closing)
            return
        there = tokens.stop < tokens.offsets[spans.rows + 1]
        following = np.where(there, tokens.stop, 0)
        adjacent = there & (tokens.starts[following] == spans.stops) & self._ends(tokens, following)
        tokens.stop += adjacent & (closing < 0)

    def _closing(self, tokens: SpanTokens, spans: Spans) -> Ints:
        """The token that ends the turn of each span: its last token, apart from white space; -1 for none."""
        some = tokens.stop > tokens.first
        at_end = some & self._ends(tokens, np.maximum(tokens.stop - 1, 0))
        closing = np.where(at_end, tokens.stop - 1, -1)
        others = np.flatnonzero(some & ~at_end)
        if not len(others):
            return closing
        ends = np.flatnonzero(self._roles[tokens.ids] & _END)
        before = np.searchsorted(ends, tokens.stop[others]) - 1
        last = ends[np.maximum(before, 0)] if len(ends) else np.zeros(len(others), np.int64)
        others, last = (values[(before >= 0) & (last >= tokens.first[others])] for values in (others, last))
        begins = spans.offsets[spans.rows[others]] + tokens.ends[last]
        closing[others] = np.where(_only_white_space(spans, begins, spans.stops[others]), last, -1)
        return closing

    def problems(self, tokens: SpanTokens, rendered: RenderedBatch, *, everything: bool) -> list[RowProblem]:
        """The problems of all rows, in order."""
        spans = rendered.spans
        gate = self.gate
        found: list[RowProblem] = []
        bos = self.tokenizer.special.bos
        roles = self._roles[tokens.ids]
        at = np.flatnonzero(roles)  # few tokens have a meaning
        known = KnownTokens(at, roles[at])
        if gate.supervised:
            found += _unsupervised(tokens, spans)
        if gate.bos and bos is not None and bos != self.tokenizer.special.eos and bos not in self.terminators:
            found += _bos(tokens, known.which(_BOS))
        if not everything and len(tokens.ids):
            if gate.headers and self.headers:
                found += self._headers(tokens, known.which(_HEADER))
            if gate.terminator:
                found += self._unended(tokens, spans, known.which(_END))
            if gate.prompt:
                found += self._prompts(tokens, spans, known.which(_CUT))
        if rendered.foreign:  # other problems of such a row follow from this one
            found = [problem for problem in found if problem.row not in rendered.foreign]
            found += _foreign(rendered.foreign)
        found.sort(key=lambda problem: problem.row or 0)
        return [_with_text(problem, tokens, spans) for problem in found]

    def _ends(self, tokens: SpanTokens, at: Ints) -> Flags:
        """True for tokens that end a turn."""
        ends: Flags = self._roles[tokens.ids[at]] & _END != 0
        return ends

    def _headers(self, tokens: SpanTokens, at: Ints) -> Iterable[RowProblem]:
        opened, closed = (np.searchsorted(np.sort(edges), at, side="right") for edges in (tokens.first, tokens.stop))
        bad = at[opened > closed]
        rows, firsts = np.unique(np.searchsorted(tokens.offsets, bad, side="right") - 1, return_index=True)
        for row, token in zip(rows, bad[firsts]):
            text = self.tokenizer.decode(tokens.ids[token : token + 1])
            yield HeaderSupervisedError(
                f"the token {text!r}, of a role header, would be supervised; "
                "a message contains it, or a generation block begins too early",
                row=int(row),
            )

    def _unended(self, tokens: SpanTokens, spans: Spans, at: Ints) -> Iterable[RowProblem]:
        closing = self._closing(tokens, spans)
        counted = ended = closing >= 0
        if self.inner:
            at = at[~np.isin(tokens.ids[at], list(self.inner))]
            counted = np.isin(closing, at)
        inside = np.searchsorted(at, tokens.stop) - np.searchsorted(at, tokens.first) > counted
        for span in np.flatnonzero(inside & (spans.prompts >= 0)):
            yield TerminatorInsideError(
                "a supervised turn has a token that ends turns in its middle, written by a message or by the template",
                row=int(spans.rows[span]),
            )
        for span in np.flatnonzero(~ended & (spans.prompts >= 0) & self.include_eot):
            yield TerminatorNotSupervisedError(
                "the token that ends a turn is not supervised, so the model would not learn to stop; "
                "correct the template, or pass include_eot=False",
                row=int(spans.rows[span]),
            )

    def _prompts(self, tokens: SpanTokens, spans: Spans, cuts: Ints) -> Iterable[RowProblem]:
        """Problems of prompts whose tokens are not the first tokens of their row.

        Tokens before the last special token of a prompt cannot differ, so only the few after it are compared; mostly
        they are the same in every row.
        """
        answers = np.flatnonzero(spans.prompts >= 0)
        rows, ends = spans.rows[answers], spans.prompts[answers]
        stops = np.clip(np.searchsorted(tokens.starts, ends), tokens.offsets[rows], tokens.offsets[rows + 1])
        begins = tokens.offsets[rows]
        reaches = tokens.ends[np.maximum(stops - 1, 0)] + spans.offsets[rows]
        straddling = (stops > begins) & (reaches > ends)
        for row in np.unique(rows[straddling]):
            yield PromptDiffersError(
                "a token reaches from the prompt into the answer, so at inference the prompt has other tokens; let "
                "prompt and answer meet where words or special tokens end",
                row=int(row),
            )
        before = np.searchsorted(cuts, stops) - 1
        tails = begins.copy()
        if len(cuts):
            tails = np.where(before >= 0, np.maximum(cuts[np.maximum(before, 0)], begins), begins)
        whole = np.flatnonzero(~straddling & (stops > tails))
        for i in self._retokenised(tokens, spans, tails[whole], stops[whole], ends[whole]):
            yield PromptDiffersError(
                "the prompt alone has other tokens than the same text at the beginning of the row; "
                "let prompt and answer meet where words or special tokens end",
                row=int(rows[whole[i]]),
            )

    def _retokenised(self, tokens: SpanTokens, spans: Spans, first: Ints, stop: Ints, ends: Ints) -> list[int]:
        """Numbers of the prompt ends that get other ids when they are tokenized alone."""
        data = np.frombuffer(spans.texts.buffers()[2], np.uint8)
        begins = tokens.starts[first]
        models = _models(data, tokens.ids, begins, ends, first, stop)
        judged = np.unique(models)
        texts = [data[a:b].tobytes() for a, b in zip(begins[judged].tolist(), ends[judged].tolist())]
        # Other threads share this cache and may clear it, so what it holds is copied first.
        remembered = {text: self._tails.get(text) for text in texts}
        known = {text: ids for text, ids in remembered.items() if ids is not None}
        new = [text for text, ids in remembered.items() if ids is None]
        if new:
            if len(self._tails) > _MAX_TAILS:
                self._tails.clear()
            made = self.tokenizer.encode(text_array([text.decode() for text in new]), parse_special=True)
            values, offsets = numbers_of(made.values), numbers_of(made.offsets)
            known |= {text: values[a:b].tobytes() for text, (a, b) in zip(new, pairwise(offsets))}
            self._tails.update((text, known[text]) for text in new if len(text) <= 256)
        pairs = zip(texts, first[judged].tolist(), stop[judged].tolist())
        wrong = [tokens.ids[a:b].tobytes() != known[text] for text, a, b in pairs]
        bad: list[int] = np.flatnonzero(np.isin(models, judged[wrong])).tolist()
        return bad


def _models(
    data: npt.NDArray[np.uint8], ids: npt.NDArray[Any], begins: Ints, ends: Ints, first: Ints, stop: Ints
) -> Ints:
    """For each piece of text, a piece with the same bytes and ids: often one for all."""
    models = np.arange(len(first))
    widths, numbers = ends - begins, stop - first
    sizes = widths << 32 | numbers
    _, firsts, which, counts = np.unique(sizes, return_index=True, return_inverse=True, return_counts=True)
    for group in np.flatnonzero((counts > 1) & (widths[firsts] <= 64)).tolist():
        members, model = np.flatnonzero(which == group), firsts[group]
        width, n = widths[model], numbers[model]
        alike = (data[begins[members][:, None] + np.arange(width)] == data[begins[model] : ends[model]]).all(axis=1)
        alike &= (ids[first[members][:, None] + np.arange(n)] == ids[first[model] : stop[model]]).all(axis=1)
        models[members[alike]] = model
    return models


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens of a batch with a meaning: their positions and bits."""

    at: Ints
    roles: npt.NDArray[np.uint8]

    def which(self, bit: int) -> Ints:
        chosen: Ints = self.at[self.roles & bit != 0]
        return chosen


def _only_white_space(spans: Spans, begins: Ints, ends: Ints) -> Flags:
    """True where there is only white space between two positions of a text."""
    data = np.frombuffer(spans.texts.buffers()[2], np.uint8)
    widths = ends - begins
    most = min(int(widths.max(initial=0)), _MAX_WHITE_SPACE)
    places = begins[:, None] + np.arange(most)
    inside = np.arange(most) < widths[:, None]
    white = _WHITE_SPACE[data[np.minimum(places, len(data) - 1)]]
    only: Flags = (white | ~inside).all(axis=1) & (widths <= most)
    return only


def _foreign(found: Mapping[int, str]) -> Iterable[RowProblem]:
    for row, where in found.items():
        yield SpecialTokenInContentError(
            f"{where}, the text of a special token: the model would read it as that token; remove it from the data, "
            "or switch the check off with gate={'content': False}",
            row=row,
        )


def _unsupervised(tokens: SpanTokens, spans: Spans) -> Iterable[RowProblem]:
    supervised = np.zeros(len(tokens.offsets) - 1, np.bool_)
    supervised[spans.rows[tokens.stop > tokens.first]] = True
    for row in np.flatnonzero(~supervised):
        yield NothingSupervisedError("no token is supervised", row=int(row))


def _bos(tokens: SpanTokens, at: Ints) -> Iterable[RowProblem]:
    begins, ends = np.searchsorted(at, tokens.offsets[:-1]), np.searchsorted(at, tokens.offsets[1:])
    counts = ends - begins
    at_first = np.isin(tokens.offsets[:-1], at) & (counts > 0)
    for row in np.flatnonzero((counts != 1) | ~at_first):
        n = int(counts[row])
        fault = "not at the beginning" if n == 1 else "expected one, at the beginning"
        yield BosCountError(
            f"{n} beginning-of-sequence tokens, {fault}; correct the template ({{{{ bos_token }}}}) or the data, "
            "or switch the check off with gate={'bos': False}",
            row=int(row),
        )


def _with_text(problem: RowProblem, tokens: SpanTokens, spans: Spans) -> RowProblem:
    """The problem with the text of its row, supervised parts marked."""
    row = problem.row or 0
    begin, end = int(spans.offsets[row]), int(spans.offsets[row + 1])
    data = bytes(memoryview(spans.texts.buffers()[2])[begin:end])
    parts = []
    for i in np.flatnonzero(spans.rows == row):
        first, stop = int(tokens.first[i]), int(tokens.stop[i])
        if stop > first:
            parts.append((int(tokens.starts[first]) - begin, int(tokens.ends[stop - 1])))
    return type(problem)(problem.reason, row=row, shown=shown(data, parts))
