"""Messages: one form for the conversations of all formats, as templates expect it, with training flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.chat.problems import (
    MalformedChatError,
    NullContentError,
    ToolCallsError,
    UnknownRoleError,
)
from penstock.files.json_values import loads

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
FLAGS = ("training", "train", "weight", "step_loss_mask", "loss_mask", "loss_weight")
"""Keys of the training flag of a message; the first that exists counts."""
LOOKS_LIKE_A_FLAG = re.compile(r"(?:^|_|(?<=[a-z])(?=[A-Z]))(?:loss|mask|weight|train|supervis)", re.IGNORECASE)
SPEAKER, SAID = ("role", "from"), ("content", "value")
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts")
"""Keys of the thoughts of a message."""
TEXTS = ("text", "value", "content")
"""Keys of the text of a content part."""


@dataclass(slots=True)
class Conversation:
    """Messages with role and content; `flags[i]` is the training flag of message i, None if it has none."""

    messages: list[Message]
    tools: list[Any] | None = None
    flags: Sequence[bool | None] | None = None

    @property
    def simple(self) -> bool:
        """True if there are only roles and text."""
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
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise ToolCallsError(f"tools must be a list or its JSON, got {_brief(given)}")
    tools = [from_json(tool, "a tool", ToolCallsError) if isinstance(tool, str) else tool for tool in given]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ToolCallsError(f"tool {i} must be an object with a name and parameters, got {_brief(tool)}")
    return tools


def without_nulls(value: Any) -> Any:
    """The value without null keys: Arrow gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def role_of(speaker: str) -> str:
    """The role with this name; an unknown name is returned unchanged."""
    return OTHER_NAMES.get(speaker.lower(), speaker.lower())


def _message(message: Message, i: int) -> tuple[Message, bool | None]:
    speaker = _only(message, SPEAKER, i)
    if not isinstance(speaker, str):
        raise MalformedChatError(f"message {i} has no role: {_brief(message)}; expected one of {', '.join(ROLES)}")
    said = _only(message, SAID, i)
    called = function_calls(said) if speaker == "function_call" else None
    role = "assistant" if called is not None else role_of(speaker)
    if role not in ROLES:
        raise UnknownRoleError(
            f"message {i} has role {speaker!r}, expected one of {', '.join(ROLES)}; rename it in a Map before "
            "(transforms= of a loader)"
        )
    content, thoughts = (None, "") if called is not None else _content(said, i)
    made: Message = {"role": role, "content": content}
    for key, value in message.items():
        if value is None or key in SPEAKER or key in SAID or key in FLAGS:
            continue
        if LOOKS_LIKE_A_FLAG.search(key):
            raise MalformedChatError(
                f"message {i} has the key {key!r}, which looks like a training flag, but is unknown; "
                f"rename it to one of {', '.join(FLAGS)} (0 or 1), or remove it"
            )
        made[key] = value
    for key in THOUGHTS:
        if key in made and not isinstance(made[key], str):
            raise MalformedChatError(f"message {i} has {key} of type {type(made[key]).__name__}, expected text")
    different = {text for text in (thoughts, *(made.get(key) for key in THOUGHTS)) if text}
    if len(different) > 1:
        raise MalformedChatError(f"message {i} has different thoughts under several keys; keep one of them")
    if thoughts and not any(made.get(key) for key in THOUGHTS):
        made["reasoning_content"] = thoughts
    calls = made.pop("tool_calls", None)
    single = made.pop("function_call", None)
    if sum(map(bool, (calls, single, called))) > 1:
        raise ToolCallsError(f"message {i} has tool calls under several keys; keep one of them")
    if single:
        calls = [single]
    calls = called or calls
    if calls:
        made["tool_calls"] = _tool_calls(calls, i)
    elif made["content"] is None:
        raise NullContentError(f"message {i} ({role}) has null content and no tool calls; drop the row, or fill it")
    return made, _flag(message, i)


def thoughts_of(message: Message) -> str:
    """The thoughts of a message, under any of their keys."""
    return str(_first(message, THOUGHTS) or "")


def _content(content: Any, i: int) -> tuple[str | None, str]:
    """The text and the thoughts of a content; parts are joined."""
    if content is None or isinstance(content, str):
        return content, ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise MalformedChatError(f"message {i} has content of type {type(content).__name__}, expected text")
    texts, thoughts = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("thinking", "reasoning") and isinstance(thought := _first(part, (*THOUGHTS, "text")), str):
            if any(text.strip() for text in texts):
                raise MalformedChatError(f"message {i} has a thought after text; thoughts come first")
            thoughts.append(thought)
        elif kind in (None, "text") and isinstance(part, dict) and isinstance(text := _first(part, TEXTS), str):
            texts.append(text)
        else:
            raise MalformedChatError(
                f"message {i} has a content part that is not text: {_brief(part)}; expected "
                "{'type': 'text', 'text': ...}"
            )
    return "".join(texts), "\n".join(thoughts)


def _tool_calls(calls: Any, i: int) -> list[Any]:
    if isinstance(calls, str):
        calls = from_json(calls, f"tool_calls of message {i}", ToolCallsError)
    if not isinstance(calls, list):
        raise ToolCallsError(f"tool_calls of message {i} must be a list, got {_brief(calls)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> Any:
    """A call in the nested form; keys keep their order, arguments stay text or an object."""
    if isinstance(call, str):
        call = from_json(call, "a tool call", ToolCallsError)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ToolCallsError(f"a tool call needs a name and arguments, got {_brief(call)}")
    name = function["name"]
    if function.get("arguments") is not None and function.get("parameters") is not None:
        raise ToolCallsError(f"the call of {name} has both arguments and parameters; keep one of them")
    arguments = function.get("arguments") if function.get("arguments") is not None else function.get("parameters")
    if isinstance(arguments, str) and arguments.strip():
        parsed = from_json(arguments, f"the arguments of {name}", ToolCallsError)
    else:
        parsed = arguments = arguments or {}
    if not isinstance(parsed, dict):
        raise ToolCallsError(f"the arguments of {name} must be an object, or its JSON, got {_brief(arguments)}")
    if function is call:
        made = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {**made, "id": call["id"]} if call.get("id") else made
    renamed = "parameters" if function.get("arguments") is None and "parameters" in function else "arguments"
    kept = {"arguments" if key == renamed else key: value for key, value in function.items()}
    made = {**call, "function": {**kept, "arguments": arguments}}
    made.setdefault("type", "function")
    return made


def function_calls(content: Any) -> list[Any]:
    """ShareGPT's `function_call` turn: the JSON of one call or of a list of them."""
    given = from_json(content, "the function call", ToolCallsError) if isinstance(content, str) else content
    return [_tool_call(call) for call in (given if isinstance(given, list) else [given])]


def _flag(message: Message, i: int) -> bool | None:
    for key in FLAGS:
        value = message.get(key)
        if value is None:
            continue
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        raise MalformedChatError(
            f"message {i} has {key}={value!r}; a message is supervised (1, true) or not (0, false): weights "
            "between 0 and 1 are not supported"
        )
    return None


def _only(message: Message, keys: tuple[str, ...], i: int) -> Any:
    """Value of the message under one of these keys; different values under several are an error."""
    found = [message[key] for key in keys if message.get(key) is not None]
    if any(value != found[0] for value in found[1:]):
        raise MalformedChatError(f"message {i} has different values for {' and '.join(keys)}; keep one of them")
    return found[0] if found else None


def _first(message: Message, keys: tuple[str, ...]) -> Any:
    return next((value for key in keys if (value := message.get(key)) is not None), None)


def from_json(text: str, what: str, error: type[MalformedChatError | ToolCallsError]) -> Any:
    """The value of a JSON text, with numbers as they are spelled; errors name it `what`."""
    try:
        return loads(text)
    except ValueError as wrong:
        raise error(f"{what}: not JSON ({wrong}): {_brief(text)}") from None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
