"""Text as token ids, for rollouts that come without: prompt and response each by itself, or a whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.arrays.ragged import Ragged
from penstock.chat.messages import without_nulls
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.rl.read.columns import ListColumn, RolloutProblems
from penstock.rl.read.tokens import PromptResponse, firsts, lasts, windows

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["TextRule", "Texts", "fill_from_text"]

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """How text becomes ids where there are none.

    Prompt and response are tokenised each by itself, since that is where the policy took over; nothing is added to
    either unless asked for. Conversations are written by the chat template, as for fine-tuning: what the assistant said
    is the response's own, what came between is masked, and nothing behind the assistant's last token is kept.
    """

    add_bos: bool = False
    """Begin prompts with the tokenizer's BOS, where it does not stand there already."""
    add_eos: bool = False
    """End responses with EOS, where it does not stand there already and the finish reason is not "length"."""
    parse_special: bool = True
    """Whether the text of a special token is that token: inference engines read and write them so."""
    chat_template: str | Path | None = None
    """For conversations; without one, the tokenizer's own."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The columns of text, one entry per row, None where there is none."""

    prompt: Sequence[Any]
    response: Sequence[Any]
    messages: Sequence[Any]
    tools: Sequence[Any]
    finish_reasons: Sequence[Any]
    arrow: bool
    """Whether messages that lack a key have it all the same, as null."""


def fill_from_text(
    parts: PromptResponse, texts: Texts, tokenizer: Tokenizer | None, rule: TextRule, problems: RolloutProblems
) -> tuple[PromptResponse, Flags]:
    """The same with prompts and responses for the rows that lack them, and which rows those are."""
    rows = len(texts.prompt)
    no_prompt, no_response = _missing(parts.prompt, rows), _missing(parts.response, rows)
    lacking = no_prompt | no_response
    if not lacking.any():
        return parts, lacking
    wanted = _Wanted(texts, no_prompt, no_response, problems)
    if wanted.any and tokenizer is None:
        problems.add(wanted.rows, "there is text and no token ids, which needs a tokenizer; pass tokenizer=")
    if problems or tokenizer is None:
        return parts, lacking
    mask = parts.mask
    prompts, responses = [parts.prompt], [parts.response]
    if wanted.prompts:
        made = _encoded([texts.prompt[row] for row in wanted.prompts], tokenizer, rule)
        prompts.append(_spread(_with_bos(made, tokenizer) if rule.add_bos else made, wanted.prompts, rows))
    if wanted.responses:
        made = _encoded([texts.response[row] for row in wanted.responses], tokenizer, rule)
        if rule.add_eos:
            cut = [texts.finish_reasons[row] == "length" for row in wanted.responses]
            made = _with_eos(made, tokenizer, np.array(cut, np.bool_))
        responses.append(_spread(made, wanted.responses, rows))
    if wanted.chats:
        chosen = sorted(wanted.chats)
        written = _written([wanted.chats[row] for row in chosen], chosen, texts, tokenizer, rule, problems)
        if written is None:
            return parts, lacking
        ids, flags = written
        begin = firsts(flags)
        prompts.append(_spread(windows(ids, np.zeros_like(begin), begin), chosen, rows))
        whole = np.flatnonzero(no_response[chosen])
        if len(whole):
            answers = np.array(chosen, np.int64)[whole]
            begin, end = begin[whole], lasts(flags)[whole] + 1
            responses.append(_spread(windows(ids.take(whole), begin, end - begin), answers.tolist(), rows))
            own = _spread(windows(flags.take(whole), begin, end - begin), answers.tolist(), rows)
            mask = own if mask is None else _filled([mask, own])
    return replace(parts, prompt=_filled(prompts), response=_filled(responses), mask=mask), lacking


class _Wanted:
    """Which rows are to be tokenised as what; those that cannot be are problems."""

    def __init__(self, texts: Texts, no_prompt: Flags, no_response: Flags, problems: RolloutProblems) -> None:
        self.prompts: list[int] = []
        self.responses: list[int] = []
        self.chats: dict[int, list[Any]] = {}
        silent: list[int] = []
        promptless: list[int] = []
        for row in np.flatnonzero(no_prompt | no_response).tolist():
            prompt, response = texts.prompt[row], texts.response[row]
            if no_response[row]:
                if texts.messages[row] is not None:
                    self.chats[row] = _listed(texts.messages[row])
                    continue
                if not isinstance(response, str) and not _is_chat(response):
                    silent.append(row)
                    continue
                if _is_chat(prompt) or _is_chat(response):
                    said = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
                    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
                    self.chats[row] = [*map(_context, asked), *said]
                    continue
                self.responses.append(row)
            if no_prompt[row]:
                if isinstance(prompt, str):
                    self.prompts.append(row)
                elif _is_chat(prompt):
                    # What the template writes before the answer, whatever that is.
                    self.chats[row] = [*map(_context, prompt), {"role": "assistant", "content": "?"}]
                else:
                    promptless.append(row)
        problems.add(silent, lambda row: f"no response: neither token ids nor text{_instead(texts.response[row])}")
        problems.add(
            promptless,
            lambda row: f"no prompt{_instead(texts.prompt[row])}; give prompt_ids (empty if there was none), or text",
        )

    @property
    def rows(self) -> list[int]:
        return sorted({*self.prompts, *self.responses, *self.chats})

    @property
    def any(self) -> bool:
        return bool(self.prompts or self.responses or self.chats)


def _instead(value: Any) -> str:
    return "" if value is None else f" (it is {value!r:.60})"


def _is_chat(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str):
        return orjson.loads(messages)  # type: ignore[no-any-return]
    return list(messages)


def _context(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the prompt: an answer in it is not the policy's to learn."""
    return {**message, "train": False} if message.get("role") == "assistant" else message


# -- ids ---------------------------------------------------------------------------------------------------------------


def _encoded(texts: list[str], tokenizer: Tokenizer, rule: TextRule) -> Ragged:
    return _ragged(
        tokenizer.encode(pa.array(texts, pa.large_string()).cast(pa.string()), parse_special=rule.parse_special)
    )


def _ragged(lists: pa.Array) -> Ragged:
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False)
    return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _with_bos(ids: Ragged, tokenizer: Tokenizer) -> Ragged:
    bos = tokenizer.special.bos
    if bos is None:
        raise ConfigError(
            f"add_bos=True, but {tokenizer.name} has no BOS token; name one with load_tokenizer(..., bos=)"
        )
    there = _ends_with(ids, bos, first=True)
    values = np.insert(ids.values.astype(np.int64), ids.offsets[:-1][~there], bos)
    return Ragged(values, ids.offsets + np.concatenate(([0], np.cumsum(~there))))


def _with_eos(ids: Ragged, tokenizer: Tokenizer, cut: Flags) -> Ragged:
    eos = tokenizer.special.eos
    if eos is None:
        raise ConfigError(
            f"add_eos=True, but {tokenizer.name} has no EOS token; name one with load_tokenizer(..., eos=)"
        )
    there = _ends_with(ids, eos, first=False) | cut
    values = np.insert(ids.values.astype(np.int64), ids.offsets[1:][~there], eos)
    return Ragged(values, ids.offsets + np.concatenate(([0], np.cumsum(~there))))


def _ends_with(ids: Ragged, token: int, *, first: bool) -> Flags:
    filled = np.flatnonzero(ids.lengths)
    at = ids.offsets[filled] if first else ids.offsets[filled + 1] - 1
    found = np.zeros(len(ids), np.bool_)
    found[filled] = ids.values[at] == token
    return found


def _written(
    chats: list[list[Any]],
    rows: list[int],
    texts: Texts,
    tokenizer: Tokenizer,
    rule: TextRule,
    problems: RolloutProblems,
) -> tuple[Ragged, Ragged] | None:
    """Conversations as the template writes them: ids, and which of them the assistant said."""
    from penstock.chat.format_chat import FormatChat  # templates are for those who have conversations

    form = FormatChat(tokenizer, rule.chat_template)
    try:
        columns = {"messages": [_json(chat, texts.arrow) for chat in chats]}
        if any(texts.tools[row] is not None for row in rows):
            columns["tools"] = [_json(texts.tools[row] or [], texts.arrow) for row in rows]
    except TypeError as error:
        raise SchemaError(f"messages and tools hold what JSON can, and one of them does not: {error}") from error
    batch = pa.record_batch({name: pa.array(values, pa.large_string()) for name, values in columns.items()})
    try:
        made = form.transform(batch)
    except (ConfigError, SchemaError):
        raise
    except DataError:
        for violation in form.check_rows(batch):
            problems.add([rows[violation.row]], f"messages: {violation.message}")
        if not problems:
            raise
        return None
    return _ragged(made["input_ids"]), _ragged(made["loss_mask"])


def _json(value: Any, arrow: bool) -> str:
    return orjson.dumps(without_nulls(value) if arrow else value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


# -- putting together --------------------------------------------------------------------------------------------------


def _missing(lists: ListColumn | None, rows: int) -> Flags:
    return lists.missing if lists is not None else np.ones(rows, np.bool_)


def _spread(ragged: Ragged, rows: Sequence[int], total: int) -> ListColumn:
    """Lists for some of the rows; the others miss one."""
    missing = np.ones(total, np.bool_)
    missing[rows] = False
    lengths = np.zeros(total, np.int64)
    lengths[rows] = ragged.lengths
    return ListColumn.of(Ragged(ragged.values, np.concatenate(([0], np.cumsum(lengths)))), missing)


def _filled(lists: Sequence[ListColumn | None]) -> ListColumn | None:
    """One of several, row by row: the first that has a list there."""
    given = [each for each in lists if each is not None]
    if len(given) < 2:
        return given[0] if given else None
    rows = len(given[0])
    source = np.arange(rows)
    open_rows = given[0].missing.copy()
    for number, each in enumerate(given[1:], 1):
        taken = open_rows & ~each.missing
        source[taken] += number * rows
        open_rows &= ~taken
    dtype = np.bool_ if given[0].ragged.values.dtype == np.bool_ else np.int64
    parts = [Ragged(each.ragged.values.astype(dtype, copy=False), each.ragged.offsets) for each in given]
    return ListColumn.of(Ragged.joined(parts).take(source), open_rows)
