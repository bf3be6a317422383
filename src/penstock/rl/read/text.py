"""Token ids of rollouts that come as text: prompt and response separately, or a whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.arrays.ragged import Ragged, offsets_of
from penstock.chat.messages import without_nulls
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.rl.read.columns import ListColumn, RolloutProblems
from penstock.rl.read.tokens import TokenColumns, first_true, last_true, windows

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """Tokenization of rollouts without ids.

    Prompt and response are tokenized separately, since the policy generated from there, without added tokens by
    default. Conversations are rendered by the chat template, as for fine-tuning: turns of the assistant are supervised,
    turns between them are masked, and tokens after the last one of the assistant are removed.
    """

    add_bos: bool = False
    """Start prompts with the tokenizer's BOS, unless they do already."""
    add_eos: bool = False
    """End responses with EOS, unless they do already or the finish reason is "length"."""
    parse_special: bool = True
    """Read the text of a special token as that token, as inference engines do."""
    chat_template: str | Path | None = None
    """Template of conversations; None: the tokenizer's own."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Text columns, one entry per row, None if there is none."""

    prompt: Sequence[Any]
    response: Sequence[Any]
    messages: Sequence[Any]
    tools: Sequence[Any]
    finish_reasons: Sequence[Any]
    arrow: bool
    """True for Arrow data, whose messages have missing keys as null."""


def fill_from_text(
    parts: TokenColumns, texts: Texts, tokenizer: Tokenizer | None, rule: TextRule, problems: RolloutProblems
) -> tuple[TokenColumns, Flags]:
    """Token columns with tokenized prompts and responses in rows that lack ids, and the mask of these rows."""
    rows = len(texts.prompt)
    no_prompt, no_response = _missing(parts.prompt, rows), _missing(parts.response, rows)
    lacking = no_prompt | no_response
    if not lacking.any():
        return parts, lacking
    text_rows = _TextRows(texts, no_prompt, no_response, problems)
    if text_rows.any and tokenizer is None:
        problems.add(text_rows.rows, "there is text without token ids, which needs a tokenizer; pass tokenizer=")
    if problems or tokenizer is None:
        return parts, lacking
    mask = parts.mask
    prompts, responses = [parts.prompt], [parts.response]
    if text_rows.prompts:
        made = _encoded([texts.prompt[row] for row in text_rows.prompts], tokenizer, rule)
        prompts.append(
            _spread(_with_special(made, tokenizer, "bos") if rule.add_bos else made, text_rows.prompts, rows)
        )
    if text_rows.responses:
        made = _encoded([texts.response[row] for row in text_rows.responses], tokenizer, rule)
        if rule.add_eos:
            cut = [texts.finish_reasons[row] == "length" for row in text_rows.responses]
            made = _with_special(made, tokenizer, "eos", np.array(cut, np.bool_))
        responses.append(_spread(made, text_rows.responses, rows))
    if text_rows.chats:
        chosen = sorted(text_rows.chats)
        rendered = _rendered([text_rows.chats[row] for row in chosen], chosen, texts, tokenizer, rule, problems)
        if rendered is None:
            return parts, lacking
        ids, flags = rendered
        begin = first_true(flags)
        prompts.append(_spread(windows(ids, np.zeros_like(begin), begin), chosen, rows))
        whole = np.flatnonzero(no_response[chosen])
        if len(whole):
            answers = np.array(chosen, np.int64)[whole]
            begin, end = begin[whole], last_true(flags)[whole] + 1
            responses.append(_spread(windows(ids.take(whole), begin, end - begin), answers.tolist(), rows))
            own = _spread(windows(flags.take(whole), begin, end - begin), answers.tolist(), rows)
            mask = own if mask is None else _filled([mask, own])
    return replace(parts, prompt=_filled(prompts), response=_filled(responses), mask=mask), lacking


class _TextRows:
    """Rows to tokenize as prompts, responses and conversations; others are problems."""

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
                    answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
                    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
                    self.chats[row] = [*map(_context, question), *answer]
                    continue
                self.responses.append(row)
            if no_prompt[row]:
                if isinstance(prompt, str):
                    self.prompts.append(row)
                elif _is_chat(prompt):
                    # The prompt is what the template writes before any answer.
                    self.chats[row] = [*map(_context, prompt), {"role": "assistant", "content": "?"}]
                else:
                    promptless.append(row)
        problems.add(
            silent, lambda row: f"there is no response: neither token ids nor text{_instead(texts.response[row])}"
        )
        problems.add(
            promptless,
            lambda row: (
                f"there is no prompt{_instead(texts.prompt[row])}; give prompt_ids (empty if there was none), or text"
            ),
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
    """Message of the prompt, which is not supervised."""
    return {**message, "train": False} if message.get("role") == "assistant" else message


# -- ids ---------------------------------------------------------------------------------------------------------------


def _encoded(texts: list[str], tokenizer: Tokenizer, rule: TextRule) -> Ragged:
    column = pa.array(texts, pa.large_string()).cast(pa.string())
    return Ragged.of_lists(tokenizer.encode(column, parse_special=rule.parse_special))


def _with_special(ids: Ragged, tokenizer: Tokenizer, name: Literal["bos", "eos"], skip: Flags | None = None) -> Ragged:
    """Ids with BOS at the start or EOS at the end of each row, except where it is already and in rows to skip."""
    token = getattr(tokenizer.special, name)
    if token is None:
        upper = name.upper()
        raise ConfigError(
            f"add_{name}=True, but {tokenizer.name} has no {upper} token; name one with load_tokenizer(..., {name}=)"
        )
    first = name == "bos"
    there = _ends_with(ids, token, first=first) | (False if skip is None else skip)
    at = ids.offsets[:-1] if first else ids.offsets[1:]
    return Ragged(np.insert(ids.values.astype(np.int64), at[~there], token), ids.offsets + offsets_of(~there))


def _ends_with(ids: Ragged, token: int, *, first: bool) -> Flags:
    filled = np.flatnonzero(ids.lengths)
    at = ids.offsets[filled] if first else ids.offsets[filled + 1] - 1
    found = np.zeros(len(ids), np.bool_)
    found[filled] = ids.values[at] == token
    return found


def _rendered(
    chats: list[list[Any]],
    rows: list[int],
    texts: Texts,
    tokenizer: Tokenizer,
    rule: TextRule,
    problems: RolloutProblems,
) -> tuple[Ragged, Ragged] | None:
    """Ids and loss masks of conversations, rendered by the template."""
    from penstock.chat.format_chat import FormatChat  # only conversations need templates

    form = FormatChat(tokenizer, rule.chat_template)
    try:
        columns = {"messages": [_json(chat, texts.arrow) for chat in chats]}
        if any(texts.tools[row] is not None for row in rows):
            columns["tools"] = [_json(texts.tools[row] or [], texts.arrow) for row in rows]
    except TypeError as error:
        raise SchemaError(f"messages and tools must be JSON: {error}") from error
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
    return Ragged.of_lists(made["input_ids"]), Ragged.of_lists(made["loss_mask"])


def _json(value: Any, arrow: bool) -> str:
    return orjson.dumps(without_nulls(value) if arrow else value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


# -- putting together --------------------------------------------------------------------------------------------------


def _missing(lists: ListColumn | None, rows: int) -> Flags:
    return lists.missing if lists is not None else np.ones(rows, np.bool_)


def _spread(ragged: Ragged, rows: Sequence[int], total: int) -> ListColumn:
    """Lists for these rows; missing in others."""
    missing = np.ones(total, np.bool_)
    missing[rows] = False
    lengths = np.zeros(total, np.int64)
    lengths[rows] = ragged.lengths
    return ListColumn.of(Ragged(ragged.values, offsets_of(lengths)), missing)


def _filled(lists: Sequence[ListColumn | None]) -> ListColumn | None:
    """First list of each row among several columns."""
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
