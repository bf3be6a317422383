"""Loss mask of a batch: from conversations to supervised turns, and from these to supervised tokens.

`supervised_turns` finds the turns of one conversation in its text, tool calls included. A turn begins where the prompt
for it ends, and ends with the end-of-turn token; or it is a `{% generation %}` block of the template. All parts of its
message are inside, and no part of another message is.

A `Turn` is a piece of one text, in characters. `Spans` are the turns of all rows of a batch, in bytes. `SpanTokens`
are the tokens of the batch with the tokens of each span; `mask` is what becomes the column `loss_mask`.

A token is supervised if its first byte lies in a span. A token that begins in the prompt and reaches into the answer is
not supervised; a token that begins in the answer and takes a byte of the template along is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged, offsets_of
from penstock.chat.messages import Conversation
from penstock.chat.parts import Placement
from penstock.chat.problems import PromptDiffersError, SpansNotFoundError
from penstock.chat.templates import unmarked
from penstock.errors import ConfigError
from penstock.tokenizers.base import Encoded

if TYPE_CHECKING:
    from penstock.chat.render import Renderer

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_PROMPT = -1
EVERYTHING = "all"
"""Value of `train_on`: every token of a conversation is supervised."""


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """Supervised piece of a text, in characters, and the end of the prompt that it answers."""

    start: int
    stop: int
    prompt: int = NO_PROMPT
    message: int = -1


@dataclass(frozen=True, slots=True)
class Spans:
    """Supervised spans of the rows of a text column, in bytes from the first byte of the column."""

    texts: pa.Array
    offsets: Ints
    """Row i is bytes `offsets[i]` to `offsets[i + 1]`."""
    rows: Ints
    starts: Ints
    stops: Ints
    prompts: Ints
    """End of the prompt of each span; -1 for a span that answers no prompt."""

    @classmethod
    def of(cls, texts: Sequence[str], turns: Sequence[Sequence[Turn]]) -> Spans:
        """Spans of texts that were rendered one by one."""
        data = [text.encode() for text in texts]
        offsets = offsets_of([len(text) for text in data])
        rows = np.repeat(np.arange(len(texts)), [len(of_row) for of_row in turns])
        places = [
            _in_bytes(text, len(row_bytes), (turn.start, turn.stop, turn.prompt))
            for text, row_bytes, of_row in zip(texts, data, turns)
            for turn in sorted(of_row)
        ]
        starts, stops, prompts = np.array(places, np.int64).reshape(-1, 3).T
        begins = offsets[rows]
        ends = np.where(prompts < 0, NO_PROMPT, prompts + begins)
        blob = np.frombuffer(b"".join(data), np.uint8)
        return cls(as_texts(blob, offsets), offsets, rows, starts + begins, stops + begins, ends)


@dataclass(slots=True)
class SpanTokens:
    """Tokens of a batch, row after row, and the tokens that begin in each span: `first` up to `stop`."""

    ids: npt.NDArray[Any]
    offsets: Ints
    starts: Ints
    """First byte of each token, counted in the column."""
    ends: npt.NDArray[np.int32]
    """End of each token, counted in its row: only a few are ever needed in the column."""
    first: Ints
    stop: Ints

    @classmethod
    def of(cls, encoded: Encoded, spans: Spans) -> SpanTokens:
        rows = Ragged.of_lists(encoded.ids)
        ids, offsets = rows.values, rows.offsets
        if len(encoded.starts) != len(ids):
            raise ConfigError(f"the tokenizer gave {len(encoded.starts)} offsets for {len(ids)} tokens")
        starts = np.repeat(spans.offsets[:-1], np.diff(offsets))
        starts += encoded.starts
        # A token of no width at the end of a row stands where the next row begins: a span stays in its row.
        first = np.maximum(np.searchsorted(starts, spans.starts), offsets[spans.rows])
        stop = np.minimum(np.searchsorted(starts, spans.stops), offsets[spans.rows + 1])
        return cls(ids, offsets, starts, encoded.ends, first, np.maximum(first, stop))

    def mask(self) -> Flags:
        """True for each supervised token."""
        turns = np.concatenate(([0], np.stack((self.first, self.stop), axis=1).ravel(), [len(self.ids)]))
        runs = np.diff(turns)
        if (runs >= 0).all():
            return np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        edges = np.zeros(len(self.ids) + 1, np.int8)
        np.add.at(edges, self.first, 1)
        np.add.at(edges, self.stop, -1)
        return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


def supervised_turns(
    renderer: Renderer,
    given: Conversation,
    trained: Collection[int],
    whole: str,
    placement: Placement,
    blocks: list[tuple[int, int]] | None,
) -> Iterator[Turn]:
    """Supervised turns of a conversation in its text, in order.

    `trained` are the numbers of the supervised messages, `blocks` the generation blocks of the template, if it has any.
    """
    if renderer.train_on == EVERYTHING:
        yield Turn(0, len(whole))
        return
    answers = [i for i in trained if given.messages[i]["role"] == "assistant"]
    by_message = _blocks_by_message(renderer, blocks, given, placement) if blocks is not None else {}
    done = 0
    for i in trained:
        if i not in answers:
            yield from (Turn(start, stop, message=i) for start, stop in placement.of_message(i))
            continue
        found = _by_block(renderer, by_message[i], given, i, whole) if blocks is not None else None
        made = found or [_by_prompt(renderer, given, i, whole, placement, done)]
        if renderer.check_parts:
            _check_turn(renderer, made, i, placement)
        done = made[-1].stop
        yield from made


def _by_prompt(renderer: Renderer, given: Conversation, i: int, whole: str, placement: Placement, done: int) -> Turn:
    """The turn from the end of the prompt for message i to the token that ends it."""
    places = placement.of_message(i)
    first = places[0][0] if places else None
    start = _start(renderer, given, i, whole, first)
    last = places[-1][1] if places else start
    following = [place[0] for n in range(i + 1, len(given.messages)) for place in placement.of_message(n)]
    stop = _end(renderer, given, i, whole, last, min(following, default=len(whole)))
    if start < done or (first is not None and start > first):
        raise SpansNotFoundError(
            f"the prompt for message {i} ends inside of a turn, so the beginning of that turn is unknown"
        )
    return Turn(start, stop, start, i)


def _start(renderer: Renderer, given: Conversation, i: int, whole: str, first: int | None) -> int:
    """End of the prompt for message i in the text."""
    nearest, fits = 0, None
    differing = ""
    for prompt in renderer.prompts(given, i):
        end = len(prompt)
        if not whole.startswith(prompt) or (first is not None and end > first):
            differing = differing or prompt
            nearest = max(nearest, common_length(prompt, whole))
            continue
        if fits is None:
            fits = end
        # White space on both sides of the end may be one token: the prompt of another setting may end elsewhere.
        if not (first is None or end < first) or not (prompt[-1:].isspace() and whole[end : end + 1].isspace()):
            return end
    if fits is not None:
        return fits
    if renderer.check_prompts:
        raise _differing(i, differing, whole)
    if renderer.markers is not None:
        opened = whole.rfind(renderer.markers[0], 0, first if first is not None else len(whole))
        if opened >= 0:
            return opened + len(renderer.markers[0])
    return nearest if first is None else min(nearest, first)


def _end(renderer: Renderer, given: Conversation, i: int, whole: str, last: int, following: int) -> int:
    """End of the turn of message i: after the first token that ends turns, before the next message."""
    ends = [at + len(text) for text in renderer.ends.texts if (at := whole.find(text, last, following)) >= 0]
    if ends:
        return min(ends)
    grown = unmarked(renderer.unmarked_text(Conversation(given.messages[: i + 1], given.tools)))
    return len(grown) if len(grown) >= last and whole.startswith(grown) else last


def _check_turn(renderer: Renderer, turns: Sequence[Turn], i: int, placement: Placement) -> None:
    """Raise unless all parts of a message, and no others, are inside of its turn."""
    for part, places in zip(placement.parts, placement.places):
        for start, stop in places[:1]:
            inside = any(turn.start <= start and stop <= turn.stop for turn in turns)
            if part.message == i and not inside and not part.literal:
                raise SpansNotFoundError(f"message {i}: its {part.name} is outside of the supervised turn")
            if part.message not in (i, -1) and inside and not part.literal:
                raise SpansNotFoundError(f"message {part.message} is inside of the turn of message {i}")


def _blocks_by_message(
    renderer: Renderer, blocks: list[tuple[int, int]], given: Conversation, placement: Placement
) -> dict[int, list[tuple[int, int]]]:
    """Generation blocks of each assistant message: those with its parts inside."""
    answers = [i for i, message in enumerate(given.messages) if message["role"] == "assistant"]
    if len(blocks) == len(answers):
        return {i: [block] for i, block in zip(answers, blocks)}
    found: dict[int, list[tuple[int, int]]] = {i: [] for i in answers}
    for start, stop in blocks:
        owners = {i for i in answers for place in placement.of_message(i) if start <= place[0] and place[1] <= stop}
        if len(owners) != 1:
            break
        found[owners.pop()].append((start, stop))
    else:
        if all(found.values()):
            return found
    raise SpansNotFoundError(
        f"{renderer.template.name} has {len(blocks)} generation blocks for {len(answers)} assistant messages; "
        "each message must have its own"
    )


def _by_block(renderer: Renderer, blocks: list[tuple[int, int]], given: Conversation, i: int, whole: str) -> list[Turn]:
    """The turns of message i by its blocks; the text must begin with the prompt for it."""
    start, stop = blocks[0]
    others = [Turn(*block, message=i) for block in blocks[1:]]
    if not renderer.check_prompts:
        return [Turn(start, stop, start, i), *others]
    differing = None
    for prompt in renderer.prompts(given, i):
        if whole.startswith(prompt) and len(prompt) < stop:
            # A block that begins before the end of the prompt contains a header, which the model does not write.
            return [Turn(max(start, len(prompt)), stop, len(prompt), i), *others]
        differing = differing if differing is not None else prompt
    assert differing is not None
    raise _differing(i, differing, whole)


def common_length(one: str, other: str) -> int:
    """Length of the common prefix."""
    most = min(len(one), len(other))
    return next((n for n in range(most) if one[n] != other[n]), most)


def _differing(i: int, prompt: str, whole: str) -> PromptDiffersError:
    same = common_length(prompt, whole)
    return PromptDiffersError(
        f"the prompt for message {i} is not how the training text begins: after {prompt[max(0, same - 40) : same]!r} "
        f"the prompt has {prompt[same : same + 40]!r}, the training text {whole[same : same + 40]!r}; pass the "
        "variables that the model is used with, train on other turns (train_on='last'), or switch the check off with "
        "gate={'prompt': False}"
    )


def as_texts(data: npt.NDArray[np.uint8], offsets: Ints) -> pa.Array:
    """A text column over these bytes, without a copy of them."""
    wide = len(data) >= 2**31
    buffers = [None, pa.py_buffer(offsets.astype(np.int64 if wide else np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string() if wide else pa.string(), len(offsets) - 1, buffers)


def shown(text: bytes, spans: list[tuple[int, int]], limit: int = 1200) -> str:
    """The text with its supervised parts between ⟦ and ⟧; long parts are shortened in the middle."""
    parts, done = [], 0
    for start, stop in spans:
        parts += [_shortened(text[done:start], limit), "⟦", _shortened(text[start:stop], limit), "⟧"]
        done = stop
    return "".join([*parts, _shortened(text[done:], limit)])


def _in_bytes(text: str, length: int, places: tuple[int, ...]) -> tuple[int, ...]:
    """Character positions of a text as byte positions of its UTF-8, which has this length; -1 stays."""
    if length == len(text):
        return places
    return tuple(place if place < 0 else len(text[:place].encode()) for place in places)


def _shortened(text: bytes, limit: int) -> str:
    if len(text) > limit:
        text = text[: limit // 2] + b" ... " + text[-limit // 2 :]
    return text.decode("utf-8", "replace")
