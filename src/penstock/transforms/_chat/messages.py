"""One form for all conversations: a list of messages as templates want them, and which of them are to be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.transforms._chat.problems import (
    MalformedChatError,
    NullContentError,
    ToolCallsError,
    UnknownRoleError,
)

__all__ = [
    "FLAGS",
    "ROLES",
    "SAID",
    "SPEAKER",
    "Conversation",
    "Message",
    "as_messages",
    "as_tools",
    "from_json",
    "function_calls",
    "role_of",
    "verbatim",
    "without_nulls",
]

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
FLAGS = ("training", "train", "weight", "step_loss_mask", "loss_mask")
"""Keys of a message that say whether to train on it; the first that is there counts."""
SPEAKER, SAID = ("role", "from"), ("content", "value")


@dataclass(slots=True)
class Conversation:
    """Messages with a role and a content each; `flags[i]` says whether to train on message i, None if nothing does."""

    messages: list[Message]
    tools: list[Any] | None = None
    flags: Sequence[bool | None] | None = None

    @property
    def simple(self) -> bool:
        """Whether there is nothing but roles and text."""
        return self.tools is None and all(len(m) == 2 and type(m["content"]) is str for m in self.messages)


def as_messages(given: Any) -> tuple[list[Message], list[bool | None] | None]:
    """Messages in the one form, and their training flags, if any has one. `given` is a list of dicts, or its JSON."""
    if isinstance(given, str):
        given = from_json(given, "the messages", MalformedChatError)
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not given:
        raise MalformedChatError(f"expected a list of messages, got {_brief(given)}")
    messages: list[Message] = []
    flags: list[bool | None] = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            raise MalformedChatError(f"message {i} is {_brief(message)}, expected role and content")
        if len(message) == 2 and type(message.get("content")) is str and message.get("role") in ROLES:
            messages.append(message)
            flags.append(None)
            continue
        made, flag = _message(message, i)
        messages.append(made)
        flags.append(flag)
    return messages, flags if any(flag is not None for flag in flags) else None


def as_tools(given: Any) -> list[Any] | None:
    """The `tools` column of a row: a list, its JSON, or a list of JSON texts. An empty list is none."""
    if isinstance(given, str):
        given = from_json(given, "the tools", ToolCallsError) if given.strip() else None
    if not given:
        return None
    if not isinstance(given, list):
        raise ToolCallsError(f"tools must be a list or its JSON, got {_brief(given)}")
    return [
        from_json(tool, "a tool", ToolCallsError) if isinstance(tool, str) else without_nulls(tool) for tool in given
    ]


class Verbatim(dict[str, Any]):
    """An object that was JSON in the data: if a key of it is null, somebody wrote that."""


def verbatim(value: Any) -> Any:
    """What was read from JSON, marked as such."""
    if isinstance(value, dict):
        return Verbatim({key: verbatim(item) for key, item in value.items()})
    return [verbatim(item) for item in value] if isinstance(value, list) else value


def without_nulls(value: Any) -> Any:
    """The value without keys that are null: Arrow gives every row the keys that any of them has."""
    if isinstance(value, Verbatim):
        return value
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def role_of(speaker: str) -> str:
    """The role that goes by that name; a name that is none stays as it is."""
    return OTHER_NAMES.get(speaker.lower(), speaker.lower())


def _message(message: Message, i: int) -> tuple[Message, bool | None]:
    speaker = _first(message, SPEAKER)
    if not isinstance(speaker, str):
        raise MalformedChatError(f"message {i} has no role: {_brief(message)}; expected one of {', '.join(ROLES)}")
    if speaker == "function_call":
        content = _first(message, SAID)
        return {"role": "assistant", "content": None, "tool_calls": function_calls(content)}, _flag(message, i)
    role = role_of(speaker)
    if role not in ROLES:
        raise UnknownRoleError(
            f"message {i} has role {speaker!r}, expected one of {', '.join(ROLES)}; rename it in a Map before"
        )
    made: Message = {"role": role, "content": _content(_first(message, SAID), i)}
    for key, value in message.items():
        if value is not None and key not in SPEAKER and key not in SAID and key not in FLAGS:
            made[key] = without_nulls(value)
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = _tool_calls(calls, i)
    elif made["content"] is None:
        raise NullContentError(f"message {i} ({role}) has null content and no tool calls; drop the row, or fill it")
    _alias_reasoning(made)
    return made, _flag(message, i)


def _alias_reasoning(message: Message) -> None:
    """Templates read `reasoning_content` or `thinking`: what is there goes by both names."""
    thought = _first(message, ("reasoning_content", "thinking", "reasoning"))
    if thought:
        message.setdefault("reasoning_content", thought)
        message.setdefault("thinking", thought)


def _content(content: Any, i: int) -> str | None:
    """Text; parts of text are put together."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise MalformedChatError(f"message {i} has content of type {type(content).__name__}, expected text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") not in (None, "text")):
            raise MalformedChatError(f"message {i} has a content part that is not text: {_brief(part)}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, i: int) -> list[Any]:
    if isinstance(calls, str):
        calls = from_json(calls, f"tool_calls of message {i}", ToolCallsError)
    if not isinstance(calls, list):
        raise ToolCallsError(f"tool_calls of message {i} must be a list, got {_brief(calls)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> Any:
    """A call in the nested form, with its arguments as a dict: what templates of today expect."""
    if isinstance(call, str):
        call = from_json(call, "a tool call", ToolCallsError)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ToolCallsError(f"a tool call needs a name and arguments, got {_brief(call)}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = from_json(arguments, f"the arguments of {function['name']}", ToolCallsError) if arguments else {}
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if call.get("id") else made


def function_calls(content: Any) -> list[Any]:
    """ShareGPT's `function_call` turn: the JSON of one call or of a list of them."""
    given = from_json(content, "the function call", ToolCallsError) if isinstance(content, str) else content
    return [_tool_call(call) for call in (given if isinstance(given, list) else [given])]


def _flag(message: Message, i: int) -> bool | None:
    for key in FLAGS:
        value = message.get(key)
        if value is None:
            continue
        if value in (0, 1):
            return bool(value)
        raise MalformedChatError(f"message {i} has {key}={value!r}, expected 0, 1, false or true")
    return None


def _first(message: Message, keys: tuple[str, ...]) -> Any:
    return next((value for key in keys if (value := message.get(key)) is not None), None)


def from_json(text: str, what: str, error: type[MalformedChatError | ToolCallsError]) -> Any:
    """What the text says; `what` it is called if it is not JSON."""
    try:
        return verbatim(orjson.loads(text))
    except orjson.JSONDecodeError as wrong:
        raise error(f"{what}: not JSON ({wrong}): {_brief(text)}") from None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
