"""Formats of chat data: detection by columns, and conversion of rows to conversations.

To support another format, add its columns to `NEEDED` and `USED`, and its converter to `CONVERTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import is_list
from penstock.arrays.text import plain
from penstock.chat.messages import (
    FLAGS,
    ROLES,
    SAID,
    SPEAKER,
    Conversation,
    Message,
    as_messages,
    as_tools,
    from_json,
    without_nulls,
)
from penstock.chat.problems import MalformedChatError, RowProblem
from penstock.errors import ConfigError, SchemaError
from penstock.files.json_values import loads
from penstock.store.manifest import label_column, rejected_column

SYSTEM = ("system", "developer")
WAITING = ("user", "tool")
"""Roles after which it is the assistant's turn."""


@dataclass(frozen=True, slots=True)
class FlaggedMessages:
    """Messages and their training flags."""

    messages: list[Message]
    flags: Sequence[bool | None]

    def __getitem__(self, part: slice) -> FlaggedMessages:
        return FlaggedMessages(self.messages[part], self.flags[part])

    def __add__(self, other: FlaggedMessages) -> FlaggedMessages:
        return FlaggedMessages([*self.messages, *other.messages], [*self.flags, *other.flags])

    @property
    def unflagged(self) -> FlaggedMessages:
        """The same messages, not supervised."""
        return FlaggedMessages(self.messages, [False] * len(self.messages))


def as_side(given: Any, role: str, what: str) -> FlaggedMessages:
    """One side of a pair as messages; a text becomes one message of this role."""
    if isinstance(given, str):
        given = [{"role": role, "content": given}]
    if not isinstance(given, list | dict):
        raise MalformedChatError(f"{what}: expected text or messages, got {given!r:.80}")
    if not given:
        raise MalformedChatError(f"{what} is empty")
    messages, flags = as_messages(given)
    return FlaggedMessages(messages, flags or [None] * len(messages))


def answered(prompt: FlaggedMessages, answer: FlaggedMessages, what: str) -> FlaggedMessages:
    """The prompt and then the answer. Some data sets repeat the prompt before the answer: it is used once."""
    system, request = _parted(prompt)
    own_system, rest = _parted(answer)
    n = len(request.messages)
    if _alike(request, rest[:n]) and len(rest.messages) > n:
        if system.messages and own_system.messages and not _alike(system, own_system):
            raise MalformedChatError(f"the prompt and {what} begin with different system messages; keep one of them")
        opening = system if system.messages else own_system
        return (opening + request).unflagged + rest[n:]
    first, last = answer.messages[0]["role"], prompt.messages[-1]["role"]
    if first in SYSTEM or (first == "user" and last in WAITING):
        raise MalformedChatError(
            f"{what} begins with a message of role {first}, and not with the prompt, which ends with one of role "
            f"{last}: it neither answers the prompt nor repeats it; drop the column 'prompt', or correct the row"
        )
    return prompt.unflagged + answer


def shared_messages(one: FlaggedMessages, other: FlaggedMessages) -> int:
    """Number of messages that both begin with, at least one less than either has."""
    shared = 0
    while shared < min(len(one.messages), len(other.messages)) - 1 and _alike(
        one[shared : shared + 1], other[shared : shared + 1]
    ):
        shared += 1
    return shared


def _parted(given: FlaggedMessages) -> tuple[FlaggedMessages, FlaggedMessages]:
    """The leading system messages, and the rest."""
    roles = [message["role"] in SYSTEM for message in given.messages]
    n = roles.index(False) if False in roles else len(roles)
    return given[:n], given[n:]


def _alike(one: FlaggedMessages, other: FlaggedMessages) -> bool:
    """True if role, content and tool calls are equal; ids and other keys do not matter."""
    keys = ("role", "content", "tool_calls")
    parts = [[tuple(message.get(key) for key in keys) for message in side.messages] for side in (one, other)]
    return parts[0] == parts[1]


KEY, TEXT = b"penstock.json", b"text"

JsonDecoder = Callable[[Any], Any]


def is_json_text(field: pa.Field) -> bool:
    """True if the values of the field are JSON text."""
    return isinstance(field.type, pa.JsonType) or bool((field.metadata or {}).get(KEY) == TEXT)


def reader(field: pa.Field) -> JsonDecoder | None:
    """Decoder of the JSON text in a value of this field; None if there is none."""
    if is_json_text(field):
        return partial(_read, field.name)
    kind = field.type
    if pa.types.is_struct(kind):
        of_fields = {child.name: made for child in kind if (made := reader(child)) is not None}
        return partial(_read_struct, of_fields) if of_fields else None
    if pa.types.is_map(kind):
        of_items = reader(kind.item_field)
        return partial(_read_map, of_items) if of_items is not None else None
    if hasattr(kind, "value_field"):  # a list of any kind
        of_values = reader(kind.value_field)
        return partial(_read_list, of_values) if of_values is not None else None
    return None


def _read(name: str, text: Any) -> Any:
    if text is None:
        return None
    try:
        return loads(text)
    except ValueError as wrong:
        raise MalformedChatError(f"{name!r} is not JSON, which its schema declares ({wrong}): {text!r:.80}") from None


def _read_struct(of_fields: Mapping[str, JsonDecoder], value: Any) -> Any:
    if value is None:
        return None
    return {key: of_fields[key](item) if key in of_fields else item for key, item in value.items()}


def _read_list(of_values: JsonDecoder, values: Any) -> Any:
    return None if values is None else [of_values(value) for value in values]


def _read_map(of_items: JsonDecoder, pairs: Any) -> Any:
    return None if pairs is None else [(key, of_items(item)) for key, item in pairs]


Row = dict[str, Any]

NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    # In the order of detection: all columns of one alternative must exist.
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


MESSAGE_FIELDS = (*SPEAKER, *SAID, *FLAGS)
_OF_MESSAGES = ("messages", "conversations", "conversation", "prompt", "completion", "response", "chosen", "rejected")


def json_columns(named: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """Columns of chats that a source keeps as JSON, and the keys that it may parse: messages of text alone."""
    return {**dict.fromkeys((*_OF_MESSAGES, *named), MESSAGE_FIELDS), "tools": (), "history": ()}


def detect_format(given: pa.Schema | pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]) -> str:
    """The format of chat data with these columns: one of `FORMATS` except "columns", which must be requested."""
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
        f"the columns {sorted(there)} match no chat format ({', '.join(NEEDED)}); rename them, "
        "or pass columns={'user': ..., 'assistant': ...} to map roles to columns"
    )


def sides_of(name: str) -> tuple[str, ...]:
    """Prefixes of the new columns: a preference gives two conversations, other formats one."""
    return ("chosen_", "rejected_") if name == "preference" else ("",)


def conversations(
    batch: pa.RecordBatch, name: str, columns: Mapping[str, str] | None = None, *, input_heading: str = ""
) -> list[tuple[Conversation, ...] | RowProblem]:
    """Conversations of each row (one, or the chosen and the rejected), or its problem.

    `input_heading` is written between the instruction and the input of Alpaca rows.
    """
    used = tuple(columns.values()) if columns is not None else USED[name]
    there = [column for column in used if column in batch.schema.names]
    _check_columns(there, name, columns, batch.schema.names)
    convert = _by_columns(columns) if columns is not None else CONVERTERS[name]
    if name == "alpaca":
        convert = partial(_alpaca, input_heading=input_heading)
    readers = {column: read for column in there if (read := reader(batch.schema.field(column))) is not None}
    values = [_values(batch, column) for column in there]
    made: list[tuple[Conversation, ...] | RowProblem] = []
    for i, cells in enumerate(zip(*values)):
        try:
            row = dict(zip(there, cells))
            for column, read in readers.items():
                row[column] = read(row[column])
            made.append(convert(row))
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


def typed_json(batch: pa.RecordBatch, names: Iterable[str]) -> str | None:
    """One of these columns with typed objects instead of JSON."""
    for field in batch.schema:
        if (
            field.name in names
            and pa.types.is_nested(field.type)
            and not is_json_text(field)
            and not _is_flat(field.type)
        ):
            return str(field.name)
    return None


def _values(batch: pa.RecordBatch, column: str) -> list[Any]:
    """A column as Python values, without keys that only other rows have."""
    values = python_values(batch.column(column))
    kind = batch.schema.field(column).type
    return [without_nulls(value) for value in values] if pa.types.is_nested(kind) and not _is_flat(kind) else values


def _is_flat(kind: pa.DataType) -> bool:
    """True if nothing is nested deeper than the keys of messages, whose nulls count as missing anyway."""
    if hasattr(kind, "value_field"):
        kind = kind.value_type
    return pa.types.is_struct(kind) and not any(pa.types.is_nested(field.type) for field in kind)


def python_values(array: pa.Array) -> list[Any]:
    """A column as Python values. Lists of structs are converted by field, several times faster than by row."""
    array = plain(array)
    if not is_list(array.type) or array.null_count:
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
    """The conversation with the text of a column `system` first, unless it begins with it already."""
    system, first = row.get("system"), conversation.messages[0]
    if system is None or system == "":
        return conversation
    if not isinstance(system, str):
        raise MalformedChatError(f"the column 'system' has {system!r:.80}, expected text")
    if first["role"] in ("system", "developer"):
        if first["content"] != system:
            raise MalformedChatError("the column 'system' and the system message of the row differ; keep one of them")
        return conversation
    conversation.messages = [{"role": "system", "content": system}, *conversation.messages]
    if conversation.flags is not None:
        conversation.flags = [None, *conversation.flags]
    return conversation


def _messages(row: Row) -> tuple[Conversation, ...]:
    return (_conversation(row["messages"], row),)


def _sharegpt(row: Row) -> tuple[Conversation, ...]:
    return (_conversation(row.get("conversations") or row.get("conversation"), row),)


def _alpaca(row: Row, *, input_heading: str = "") -> tuple[Conversation, ...]:
    messages: list[Message] = []
    for request, answer in _history(row.get("history")):
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    instruction, given = _text(row, "instruction"), _text(row, "input")
    request = f"{instruction}\n\n{input_heading}{given}" if instruction and given else instruction or given
    if not request:
        raise MalformedChatError("instruction and input are both empty")
    answer = _either(row, "output", "response")
    messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return (_conversation(messages, row),)


def _history(given: Any) -> list[Any]:
    """Earlier turns, each a request and its answer."""
    if isinstance(given, str):
        given = from_json(given, "the history", MalformedChatError) if given.strip() else []
    turns = [] if given is None else given
    if not isinstance(turns, list) or any(not isinstance(turn, list) or len(turn) != 2 for turn in turns):
        raise MalformedChatError(f"history must be a list of pairs, a request and its answer, got {given!r:.80}")
    return turns


def _text(row: Row, name: str) -> str:
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        raise MalformedChatError(f"the column {name!r} has {text!r:.80}, expected text")
    return text or ""


def _prompt_completion(row: Row) -> tuple[Conversation, ...]:
    completion = as_side(_either(row, "completion", "response"), "assistant", "the completion")
    return (_with_tools(answered(as_side(row.get("prompt"), "user", "the prompt"), completion, "the completion"), row),)


def _preference(row: Row) -> tuple[Conversation, ...]:
    prompt = _either(row, "prompt", "conversations", "messages")
    chosen, rejected = (as_side(row[name], "assistant", name) for name in ("chosen", "rejected"))
    if prompt is not None:
        request = as_side(prompt, "user", "the prompt")
        sides = [answered(request, chosen, "chosen"), answered(request, rejected, "rejected")]
    else:
        shared = shared_messages(chosen, rejected)  # the prompt is what both begin with
        if not shared:
            raise MalformedChatError("chosen and rejected share no first message, and there is no column 'prompt'")
        sides = [side[:shared].unflagged + side[shared:] for side in (chosen, rejected)]
    return tuple(_with_tools(side, row) for side in sides)


def _with_tools(side: FlaggedMessages, row: Row) -> Conversation:
    """A conversation of which only the answer is supervised, unless its messages have flags."""
    return _with_system(Conversation(side.messages, as_tools(row.get("tools")), side.flags), row)


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


_NUMBERS = ({"0", "1"}, {"0.0", "1.0"})
_WORDS = ({"true", "false"}, {"desirable", "undesirable"}, {"chosen", "rejected"}, {"good", "bad"})


def refuse_flags(schema: pa.Schema, kept: Collection[str]) -> None:
    """Refuse columns with training flags of whole rows: flags belong into messages."""
    for name in FLAGS:
        if name in schema.names and name not in kept:
            raise SchemaError(
                f"the column {name!r} looks like a training flag of whole rows, which is not supported; "
                f"put {name!r} into the messages, or drop such rows or the column before (transforms= of a loader)"
            )


def refuse_label_values(batch: pa.RecordBatch, kept: Collection[str]) -> None:
    """Refuse a `label` that is not boolean and yet means good or bad in every row."""
    at = batch.schema.get_field_index("label")
    if at < 0 or "label" in kept or pa.types.is_nested(batch.schema.field(at).type):
        return
    values = {str(value).strip().lower() for value in pc.unique(batch.column(at)).to_pylist() if value is not None}
    if values in _NUMBERS or (values and any(values <= words for words in _WORDS)):
        raise SchemaError(
            f"the column 'label' rates the answer of every row ({', '.join(sorted(values))}), and as "
            "plain chats all answers would be supervised; make it a boolean and use PreferenceDataLoader, or "
            "FormatPreference in a pipeline; or pass keep='label' to FormatChat, or drop or rename the column before "
            "(transforms= of a loader)"
        )


def refuse_labels(schema: pa.Schema, kept: Collection[str]) -> None:
    """Refuse rows with labels or rejected answers that are not kept.

    Bad answers would be supervised like good ones, and rejected answers would be lost.
    """
    rejected = rejected_column(schema)
    if rejected is not None and rejected not in kept:
        raise SchemaError(
            f"the column {rejected!r} holds rejected answers, and as plain chats the rows would lose them; name the "
            "columns of both answers 'chosen' and 'rejected', with the prompt in its own column, and use "
            "PreferenceDataLoader (FormatPreference in a pipeline); or pass preference=False to a loader, or "
            f"keep={rejected!r} to FormatChat, or drop or rename the column before (transforms= of a loader)"
        )
    name = label_column(schema)
    if name is not None and name not in kept:
        raise SchemaError(
            f"the column {name!r} labels answers as good or bad (KTO), and as plain chats both would be "
            "supervised; use PreferenceDataLoader, or FormatPreference in a pipeline; pass preference=False "
            f"to a loader, or keep={name!r} to FormatChat, to train on all of them; or drop or rename the column "
            "before (transforms= of a loader)"
        )


def checked_format(name: str, columns: Mapping[str, str] | None) -> str:
    """The name of a format, or `columns`; an unknown one is refused."""
    if columns is not None:
        unknown = [role for role in columns if role not in ROLES]
        if unknown or not columns or name not in ("auto", "columns"):
            raise ConfigError(f"columns must map roles ({', '.join(ROLES)}) to column names, got {dict(columns)}")
        return "columns"
    if name != "auto" and name not in FORMATS:
        raise ConfigError(f"format must be 'auto' or one of {', '.join(FORMATS)}, got {name!r}")
    if name == "columns":
        raise ConfigError("format='columns' needs columns={'user': ..., 'assistant': ...}")
    return name


def good_rows(rows: list[tuple[Conversation, ...] | RowProblem]) -> list[tuple[Conversation, ...]]:
    """The rows; raises the problem of the first bad row."""
    good = []
    for row in rows:
        if isinstance(row, RowProblem):
            raise row
        good.append(row)
    return good
