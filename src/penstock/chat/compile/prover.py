"""Prover: layouts of a template, proven once and chosen for the rows of a batch.

A template is run with a `Symbol` in place of each content (see `tracer`). A symbol can be written, joined and stripped,
and it answers a few questions from one real conversation; `SymbolWatch` keeps each answer as a condition. Everything
else that a template does with a symbol raises `LeakError`, and then nothing is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from penstock.chat.compile.layouts import FLAGGED, QUESTIONS, SAYS, Flat, Hole, Layout, Place, Text, filled, stripped
from penstock.chat.masks import Ints, Spans
from penstock.chat.messages import ROLES, Conversation
from penstock.chat.render import EVERYTHING, Renderer
from penstock.chat.templates import END, START, unmarked

if TYPE_CHECKING:
    from penstock.chat.compile.tracer import Tracer

MAX_PARTS = 4096


class LeakError(Exception):
    """A template uses a content in a way that cannot be written down as a condition."""


class SymbolWatch:
    """Contents of one real conversation, and the questions that a template had about them, with the answers."""

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents
        self.conditions: dict[tuple[Hole, str, str], bool] = {}

    def ask(self, hole: Hole, question: str, given: str = "") -> bool:
        answer = QUESTIONS[question](stripped(self.contents[hole.message], hole.strips), given)
        self.conditions[hole, question, given] = answer
        return answer


class Symbol:
    """Text of fixed pieces and of contents that are not known."""

    __slots__ = ("parts", "watch")

    def __init__(self, watch: SymbolWatch, parts: Sequence[str | Hole]) -> None:
        if len(parts) > MAX_PARTS:
            raise LeakError(f"a text of more than {MAX_PARTS} pieces")
        self.watch, self.parts = watch, tuple(parts)

    def __bool__(self) -> bool:
        if any(part for part in self.parts if isinstance(part, str)):
            return True
        return any(self.watch.ask(part, "filled") for part in self.parts if isinstance(part, Hole))

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        return self is other or self.watch.ask(self._only(), "is", _text(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, other: object) -> bool:
        return self.watch.ask(self._only(), "has", _text(other))

    def __hash__(self) -> int:
        reject()

    def __str__(self) -> str:
        reject()

    def __repr__(self) -> str:
        reject()

    def __format__(self, form: str) -> str:
        reject()

    def startswith(self, beginning: object) -> bool:
        return self.watch.ask(self._only(), "starts", _text(beginning))

    def endswith(self, end: object) -> bool:
        return self.watch.ask(self._only(), "ends", _text(end))

    def strip(self, characters: object = None) -> Symbol | str:
        stripped = self.lstrip(characters)
        return stripped.rstrip(characters) if isinstance(stripped, Symbol) else stripped.rstrip(_characters(characters))

    def lstrip(self, characters: object = None) -> Symbol | str:
        return self._stripped("left", _characters(characters))

    def rstrip(self, characters: object = None) -> Symbol | str:
        return self._stripped("right", _characters(characters))

    def _stripped(self, side: str, characters: str | None) -> Symbol | str:
        """The stripped text; pieces of which nothing is left are removed from that side."""
        parts = list(self.parts)
        at = 0 if side == "left" else -1
        while parts:
            part = parts[at]
            left: str | Hole
            if isinstance(part, str):
                left = stripped(part, ((side, characters),))
                there = bool(left)
            else:
                left = Hole(part.message, (*part.strips, (side, characters)))
                there = len(parts) == 1 or self.watch.ask(left, "filled")
            if there:
                parts[at] = left
                return Symbol(self.watch, parts)
            parts.pop(at)
        return ""

    def _only(self) -> Hole:
        part = self.parts[0] if len(self.parts) == 1 else None
        if not isinstance(part, Hole):
            raise LeakError("a question about a text of several pieces")
        return part


def _text(value: object) -> str:
    """A text that a content can be compared with: not the empty text, which is in all of them."""
    if type(value) is not str or not value:
        reject()
    _encoded(value)
    return value


def _characters(value: object) -> str | None:
    return None if value is None else _text(value)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        reject()


def reject() -> NoReturn:
    raise LeakError("the template looks at a content")


MAX_KINDS = 4096
MAX_MESSAGES = 256
MAX_ROW_BYTES = 1 << 20
"""Longer texts are rendered by the template, which has limits that layouts do not have."""
MAX_USES = 8
"""Number of times that a text may contain the same content."""
TRIES = 8
"""Proofs to attempt for one kind of conversation."""
UNPROFITABLE = 64
"""Number of proofs after which layouts must have filled more rows than the proofs cost."""


class NotProvenError(Exception):
    """No layout could be proven; the rows are rendered by the template one by one."""


@dataclass(slots=True)
class KindLayouts:
    """Layouts of one kind of conversation."""

    layouts: list[Layout] = field(default_factory=list)
    tries: int = 0


@dataclass
class Layouts:
    """Proven layouts of one renderer's template. A cache: any of it may be dropped."""

    renderer: Renderer
    _known: dict[bytes, KindLayouts] = field(default_factory=dict, repr=False, compare=False)
    _proofs: int = 0
    _rows: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"renderer": self.renderer, "_known": {}, "_proofs": 0, "_rows": 0}

    @property
    def possible(self) -> bool:
        """True while layouts are worth the proofs."""
        if self._proofs > UNPROFITABLE and self._rows < 4 * self._proofs:
            return False
        return self._tracer() is not None

    def fill(self, flat: Flat) -> tuple[Ints, Spans]:
        """The rows that a proven layout fits, and their texts and spans."""
        kinds: dict[bytes, list[int]] = {}
        total = np.concatenate(([0], np.cumsum(flat.lengths)))
        short = (np.diff(total[flat.offsets]) <= MAX_ROW_BYTES).tolist()
        for row, kind in enumerate(flat.kinds):
            if kind is not None and short[row]:
                kinds.setdefault(kind, []).append(row)
        chosen = []
        for kind, rows in kinds.items():
            if len(kind) <= MAX_MESSAGES:
                chosen += self._fitting(kind, np.array(rows), flat)
        self._rows += sum(len(rows) for _, rows in chosen)
        return filled(flat, chosen)

    def _fitting(self, kind: bytes, rows: Ints, flat: Flat) -> list[tuple[Layout, Ints]]:
        if len(self._known) > MAX_KINDS:
            self._known.clear()
        known = self._known.setdefault(kind, KindLayouts())
        found = []
        for layout in known.layouts[:]:
            met = layout.holds(flat, rows)
            found.append((layout, rows[met]))
            rows = rows[~met]
        while len(rows) and known.tries < TRIES and self.possible:
            known.tries += 1
            self._proofs += 1
            first, stop = flat.offsets[rows[0]], flat.offsets[rows[0] + 1]
            proven = self.proven(kind, flat.contents[first:stop].to_pylist())
            if proven is None:
                break
            known.layouts.append(proven)
            met = proven.holds(flat, rows)
            found.append((proven, rows[met]))
            rows = rows[~met]
        return [(layout, of) for layout, of in found if len(of)]

    def proven(self, kind: bytes, contents: Sequence[str]) -> Layout | None:
        """The layout of conversations of this kind that are like the given one; None if it cannot be proven."""
        roles, _, flags = kind.partition(FLAGGED)
        watch = SymbolWatch(contents)
        messages = [{"role": ROLES[role], "content": Symbol(watch, (Hole(i),))} for i, role in enumerate(roles)]
        conversation = Conversation(messages, flags=[(None, False, True)[flag] for flag in flags] or None)
        try:
            return self._proven(conversation, watch)
        except Exception:  # noqa: BLE001 - rendering the row by the template raises it again
            return None

    def _proven(self, conversation: Conversation, watch: SymbolWatch) -> Layout:
        renderer = self.renderer
        everything = renderer.train_on == EVERYTHING
        trained = renderer.trained(conversation)
        if not everything:
            for i in trained:
                if conversation.messages[i]["role"] != "assistant":
                    raise NotProvenError
                if renderer.check_content and not watch.ask(Hole(i, SAYS), "filled"):
                    raise NotProvenError
        messages = renderer.traits.present(conversation).messages
        proof = Proof(renderer, self._tracer(), messages)
        if everything:
            text = proof.whole()
            spans: list[tuple[Place, Place]] = [((0, 0), (len(text.holes), len(text.fixed[-1])))]
        elif renderer.template.program.has_generation:
            text, spans = proof.by_generation(list(trained))
        else:
            text, spans = proof.by_prompts(list(trained))
        _check_size(text)
        if renderer.check_parts:
            _check_holes(text, len(messages), watch)
        conditions = tuple((*asked, answer) for asked, answer in watch.conditions.items())
        return Layout(text, tuple(spans), conditions, answers=not everything)

    def _tracer(self) -> Tracer | None:
        from penstock.chat.compile.tracer import tracer

        template = self.renderer.template
        return None if template.program.captures else tracer(template.source)


@dataclass(frozen=True, slots=True)
class Proof:
    """Conversation with symbols for contents, and its renderings."""

    renderer: Renderer
    tracer: Any
    messages: list[dict[str, Any]]

    def rendered(self, stop: int, *, prompt: bool = False, **variables: Any) -> Text:
        """The first messages, without marks."""
        parts = self._parts(stop, prompt=prompt, **variables)
        return Text.of([unmarked(part) if isinstance(part, str) else part for part in parts])

    def whole(self) -> Text:
        """The text of all messages, with the end that is added after the last answer."""
        text = self.rendered(len(self.messages))
        return self._closed(text)

    def by_generation(self, trained: list[int]) -> tuple[Text, list[tuple[Place, Place]]]:
        """The text, and its generation blocks as spans; each begins where its prompt ends."""
        text, marks = _without_marks(Text.of(self._parts(len(self.messages))))
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if [mark for mark, _ in marks] != [START, END] * len(answers):
            raise NotProvenError
        places = [place for _, place in marks]
        spans = []
        for i, start, stop in zip(answers, places[::2], places[1::2]):
            if i not in trained:
                continue
            if self.renderer.check_prompts and text.begun_by(self.rendered(i, prompt=True)) != start:
                raise NotProvenError
            if self.renderer.check_parts and not start[0] <= _hole_of(text, i) < stop[0]:
                raise NotProvenError
            spans.append((start, stop))
        return self._closed(text), spans

    def by_prompts(self, trained: list[int]) -> tuple[Text, list[tuple[Place, Place]]]:
        """The text, and its spans, each from the end of its prompt to the token that ends the turn."""
        text = self.whole()
        spans: list[tuple[Place, Place]] = []
        done: Place = (0, 0)
        for i in trained:
            hole = _hole_of(text, i)
            start = self._start(text, i, hole)
            after = text.fixed[hole + 1]
            ends = [found + len(end) for end in self.renderer.ends.texts if (found := after.find(end)) >= 0]
            if not ends or start < done:
                raise NotProvenError
            done = (hole + 1, min(ends))
            spans.append((start, done))
        return text, spans

    def _start(self, text: Text, i: int, hole: int) -> Place:
        """End of the prompt for message i in the text, as `Renderer` finds it."""
        fits: Place | None = None
        for variables in self.renderer.settings:
            prompt = self.rendered(i, prompt=True, **variables)
            start = text.begun_by(prompt)
            if start is None or start[0] > hole:
                continue
            fits = fits if fits is not None else start
            before, after = text.fixed[start[0]][: start[1]], text.fixed[start[0]][start[1] :]
            if not (before[-1:].isspace() and after[:1].isspace()):
                return start
        if fits is None:
            raise NotProvenError
        return fits

    def _closed(self, text: Text) -> Text:
        closing = self.renderer.closing_of(self.messages)
        return Text((*text.fixed[:-1], text.fixed[-1] + closing), text.holes) if closing else text

    def _parts(self, stop: int, *, prompt: bool = False, **variables: Any) -> list[str | Hole]:
        given = self.renderer.given(self.messages[:stop], prompt=prompt, **variables)
        parts: list[str | Hole] = self.tracer.render(**given)
        return parts


def _without_marks(text: Text) -> tuple[Text, list[tuple[str, Place]]]:
    """The text without marks, and the position of each mark."""
    fixed, marks = [], []
    for slot, part in enumerate(text.fixed):
        at = [i for i, letter in enumerate(part) if letter in (START, END)]
        marks += [(part[i], (slot, i - before)) for before, i in enumerate(at)]
        fixed.append(unmarked(part))
    return Text(tuple(fixed), text.holes), marks


def _hole_of(text: Text, i: int) -> int:
    """Number of the hole with the content of message i."""
    found = [number for number, hole in enumerate(text.holes) if hole.message == i]
    if len(found) != 1:
        raise NotProvenError
    return found[0]


def _check_holes(text: Text, messages: int, watch: SymbolWatch) -> None:
    """Raise unless every content is in the text, once and in order, with only white space stripped."""
    written = [hole.message for hole in text.holes]
    if any(one >= other for one, other in pairwise(written)):
        raise NotProvenError
    if any(characters is not None and characters.strip() for hole in text.holes for _, characters in hole.strips):
        raise NotProvenError
    for i in range(messages):
        if i not in written and watch.ask(Hole(i, SAYS), "filled"):
            raise NotProvenError


def _check_size(text: Text) -> None:
    uses = [hole.message for hole in text.holes]
    if any(uses.count(message) > MAX_USES for message in set(uses)) or sum(map(len, text.fixed)) > MAX_ROW_BYTES:
        raise NotProvenError
    "".join(text.fixed).encode()  # a lone surrogate is not text
