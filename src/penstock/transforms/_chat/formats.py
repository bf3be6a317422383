"""Which of the usual forms of chat data a batch has, and how each becomes conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SchemaError
from penstock.transforms._chat.messages import ROLES, Conversation, Message, as_messages, as_tools
from penstock.transforms._chat.problems import MalformedChatError, RowProblem
from penstock.transforms.columns import plain

__all__ = ["FORMATS", "Row", "conversations", "detect_format", "python_values", "sides_of"]

Row = dict[str, Any]

NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    # In the order they are looked for: the columns of one alternative are all there.
    "preference": (("chosen", "rejected"),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "prompt_completion": (("prompt", "completion"), ("prompt", "response")),
    "alpaca": (("instruction", "output"), ("instruction", "response")),
}
FORMATS = (*NEEDED, "columns")
USED = {
    "preference": ("prompt", "conversations", "messages", "chosen", "rejected", "system", "tools"),
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("conversations", "conversation", "system", "tools"),
    "prompt_completion": ("prompt", "completion", "response", "system", "tools"),
    "alpaca": ("instruction", "input", "output", "response", "system", "history"),
}


def detect_format(given: pa.Schema | pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]) -> str:
    """The form of chat data with these columns: one of `FORMATS` but "columns", which has to be asked for."""
    names: Iterable[str]
    if isinstance(given, pa.Schema):
        names = given.names
    elif isinstance(given, pa.RecordBatch | pa.Table):
        names = given.schema.names
    else:
        names = list(dict.fromkeys(name for row in given for name in row))
    there = set(names)
    for name, alternatives in NEEDED.items():
        if any(there.issuperset(columns) for columns in alternatives):
            return name
    raise SchemaError(
        f"the columns {sorted(there)} are none of the known forms of chat data ({', '.join(NEEDED)}); rename them, "
        "or pass columns={'user': ..., 'assistant': ...} to say which column is which role"
    )


def sides_of(name: str) -> tuple[str, ...]:
    """What the columns made of one row are prefixed with: a preference gives two conversations, the others one."""
    return ("chosen_", "rejected_") if name == "preference" else ("",)


def conversations(
    batch: pa.RecordBatch, name: str, columns: Mapping[str, str] | None = None
) -> list[tuple[Conversation, ...] | RowProblem]:
    """For each row its conversations (one, or the chosen and the rejected), or what is wrong with it."""
    used = tuple(columns.values()) if columns is not None else USED[name]
    there = [column for column in used if column in batch.schema.names]
    _check_columns(there, name, columns, batch.schema.names)
    convert = _by_columns(columns) if columns is not None else CONVERTERS[name]
    values = [python_values(batch.column(column)) for column in there]
    made: list[tuple[Conversation, ...] | RowProblem] = []
    for i, cells in enumerate(zip(*values)):
        try:
            made.append(convert(dict(zip(there, cells))))
        except RowProblem as problem:
            made.append(problem.at(i))
    return made


def _check_columns(there: list[str], name: str, columns: Mapping[str, str] | None, names: list[str]) -> None:
    if columns is not None:
        missing = [column for column in columns.values() if column not in there]
        if missing:
            raise SchemaError(f"column {missing[0]!r} of columns={dict(columns)} not found; the batch has {names}")
    elif not any(set(there).issuperset(needed) for needed in NEEDED[name]):
        wanted = " or ".join(str(list(needed)) for needed in NEEDED[name])
        raise SchemaError(f"the format {name!r} needs the columns {wanted}; the batch has {names}")


def python_values(array: pa.Array) -> list[Any]:
    """A column as Python values. Lists of structs are taken apart by field, several times faster than row by row."""
    array = plain(array)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)) or array.null_count:
        return array.to_pylist()  # type: ignore[no-any-return]
    flat = array.flatten()
    if not pa.types.is_struct(flat.type) or flat.null_count or not flat.type.num_fields:
        return array.to_pylist()  # type: ignore[no-any-return]
    fields = [plain(field).to_pylist() for field in flat.flatten()]
    names = [field.name for field in flat.type]
    if any(field.null_count for field in flat.flatten()):
        messages = [{k: v for k, v in zip(names, values) if v is not None} for values in zip(*fields)]
    elif names == ["role", "content"]:
        messages = [{"role": role, "content": content} for role, content in zip(*fields)]
    else:
        messages = [dict(zip(names, values)) for values in zip(*fields)]
    stops = list(accumulate(pc.list_value_length(array).to_pylist(), initial=0))
    return [messages[start:stop] for start, stop in pairwise(stops)]


def _conversation(given: Any, row: Row) -> Conversation:
    messages, flags = as_messages(given)
    return _with_system(Conversation(messages, as_tools(row.get("tools")), flags), row)


def _with_system(conversation: Conversation, row: Row) -> Conversation:
    """Put the text of a column `system` in front, unless the conversation has a system message already."""
    system = row.get("system")
    if system and conversation.messages[0]["role"] not in ("system", "developer"):
        conversation.messages = [{"role": "system", "content": system}, *conversation.messages]
        if conversation.flags is not None:
            conversation.flags = [None, *conversation.flags]
    return conversation


def _messages(row: Row) -> tuple[Conversation, ...]:
    return (_conversation(row["messages"], row),)


def _sharegpt(row: Row) -> tuple[Conversation, ...]:
    return (_conversation(row.get("conversations") or row.get("conversation"), row),)


def _alpaca(row: Row) -> tuple[Conversation, ...]:
    messages: list[Message] = []
    for asked, answered in row.get("history") or ():
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    request = "\n\n".join(text for text in (row.get("instruction"), row.get("input")) if text)
    if not request:
        raise MalformedChatError("instruction and input are both empty")
    answer = _either(row, "output", "response")
    messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return (_conversation(messages, row),)


def _prompt_completion(row: Row) -> tuple[Conversation, ...]:
    completion = _either(row, "completion", "response")
    return (_continued(_side(row.get("prompt"), "user"), _side(completion, "assistant"), row),)


def _preference(row: Row) -> tuple[Conversation, ...]:
    prompt = _either(row, "prompt", "conversations", "messages")
    sides = [_side(row[name], "assistant") for name in ("chosen", "rejected")]
    if prompt is None:
        shared = 0  # the prompt is what both begin with
        while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
            shared += 1
        if not shared:
            raise MalformedChatError("chosen and rejected share no first message, and there is no column 'prompt'")
        return tuple(_continued(side[:shared], side[shared:], row) for side in sides)
    asked = _side(prompt, "user")
    # Some data sets repeat the prompt in front of both answers.
    trimmed = [side[len(asked) :] if len(side) > len(asked) and side[: len(asked)] == asked else side for side in sides]
    return tuple(_continued(asked, side, row) for side in trimmed)


def _continued(prompt: list[Any], answer: list[Any], row: Row) -> Conversation:
    """A conversation of which only the answer is trained on, unless its messages say otherwise."""
    if not prompt or not answer:
        raise MalformedChatError("the prompt or the completion is empty")
    asked, _ = as_messages(prompt)
    answered, flags = as_messages(answer)
    marks: Sequence[bool | None] = [*([False] * len(asked)), *(flags or [None] * len(answered))]
    return _with_system(Conversation([*asked, *answered], as_tools(row.get("tools")), marks), row)


def _side(given: Any, role: str) -> list[Any]:
    """One side of a pair as messages: text is what that role said."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, dict):
        return [given]
    if isinstance(given, list):
        return given
    raise MalformedChatError(f"expected text or messages, got {given!r:.80}")


def _either(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _by_columns(columns: Mapping[str, str]) -> Callable[[Row], tuple[Conversation, ...]]:
    unknown = [role for role in columns if role not in ROLES]
    if unknown or not columns:
        raise ValueError(f"columns must map roles ({', '.join(ROLES)}) to column names, got {dict(columns)}")

    def convert(row: Row) -> tuple[Conversation, ...]:
        optional = ("system", "developer")
        said = [(role, row[name]) for role, name in columns.items() if role not in optional or row[name]]
        said.sort(key=lambda pair: ROLES.index(pair[0]))
        return (_conversation([{"role": role, "content": content} for role, content in said], {}),)

    return convert


CONVERTERS: dict[str, Callable[[Row], tuple[Conversation, ...]]] = {
    "preference": _preference,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
}
