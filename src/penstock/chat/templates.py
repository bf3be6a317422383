"""Chat templates: sources, settings, and the message forms that a template takes.

A built-in template is a file in `template_files` and an entry in `BUILT_IN`; nothing else has to be registered.
`ChatTemplate` is a template with its settings. `TemplateSource` is its Jinja text. `Traits` are the forms of messages
that it writes, found once by rendering samples: data sets and templates disagree about forms that mean the same, so a
row is given to the template as it is where the template writes that form, else in a form that it writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import orjson
import xxhash

from penstock import plugins
from penstock._suggest import check_options, did_you_mean
from penstock.chat.messages import THOUGHTS, Conversation, Message
from penstock.chat.problems import RenderError
from penstock.errors import ConfigError
from penstock.files.filesystems import is_remote, shown
from penstock.files.json_values import dumps, loads

if TYPE_CHECKING:
    from penstock.chat.sandbox import Program

Markers = tuple[str, str]
"""Text that opens a turn of the assistant, and text that ends it."""

START, END = "\ud800", "\ud801"
"""Marks around a generation block in a rendered text. Data cannot contain them: lone surrogates are not UTF-8."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    # Name of the file in template_files, and the tokens that a vocabulary must have for it.
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "plain": (),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "vicuna": (),
    "zephyr": (),
}
KNOWN_MARKERS: tuple[Markers, ...] = (
    ("<|im_start|>assistant\n", "<|im_end|>"),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<start_of_turn>model\n", "<end_of_turn>"),
)
SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|</?(?:start|end)_of_turn>")


class TemplateSettings(TypedDict, total=False):
    """Settings of a `ChatTemplate` as keywords."""

    markers: Markers | None
    end_of_turn: str | Sequence[str] | None
    special_tokens: Sequence[str] | None
    variables: Mapping[str, Any] | None
    now: datetime | date | str | None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its settings.

    - `template`: a built-in name, a .jinja file, or Jinja text; None: the tokenizer's own.
    - `markers`: what opens an assistant turn in the text and what ends it, for templates whose turns cannot be found
      otherwise.
    - `end_of_turn`: the token that ends a turn, if it is not what the template writes after an answer.
    - `special_tokens`: texts that must be single tokens, if not those that look like it in the template.
    - `variables`: more variables for the template, such as `{"enable_thinking": False}`.
    - `now`: the time for templates that need it, such as "2026-01-31".
    """

    template: str | Path | None = None
    markers: Markers | None = None
    end_of_turn: str | Sequence[str] | None = None
    special_tokens: Sequence[str] | None = None
    variables: Mapping[str, Any] | None = None
    now: datetime | date | str | None = None

    def __post_init__(self) -> None:
        clash = {"messages", "tools", "add_generation_prompt", "strftime_now"} & set(self.variables or {})
        if clash:
            raise ConfigError(f"variables cannot have {sorted(clash)}: they come from the rows")
        try:
            orjson.dumps(dict(self.variables or {}))
        except TypeError as error:
            raise ConfigError(f"variables must be plain values, as in JSON: {error}") from None
        _as_time(self.now)

    @classmethod
    def of(cls, given: str | Path | ChatTemplate | None, settings: TemplateSettings) -> ChatTemplate:
        """The template with these settings."""
        check_options(settings, TemplateSettings.__annotations__, "template option")
        return replace(given, **settings) if isinstance(given, ChatTemplate) else cls(given, **settings)

    @property
    def time(self) -> datetime | None:
        return _as_time(self.now)


@dataclass(frozen=True)
class TemplateSource:
    """Jinja text of a chat template, its name in messages, and the tokens that it needs."""

    name: str
    source: str
    needs: tuple[str, ...] = ()
    own: bool = False
    """True if it came with the tokenizer: the model was trained with what it writes."""

    @property
    def fingerprint(self) -> str:
        """Hash of the text, as descriptions of steps and stores have it."""
        return xxhash.xxh3_128_hexdigest(self.source.encode())

    @property
    def program(self) -> Program:
        """The compiled template, cached by its text, so that only the text is pickled."""
        return self.compiled()

    @cached_property
    def markers(self) -> Markers | None:
        """The turn markers of a well-known family, if the template writes their tokens."""
        for opening, closing in KNOWN_MARKERS:
            parts = SPECIAL.findall(opening + closing)
            if all(part in self.source for part in parts):
                return opening, closing
        return None

    @property
    def unmarked(self) -> Program:
        """The template without marks; the same program, unless marks could change what the template writes."""
        return self.compiled(marks=False) if self.program.captures else self.program

    def compiled(self, *, marks: bool = True) -> Program:
        """The program, with or without marks around generation blocks."""
        from penstock.chat.sandbox import compiled

        return compiled(self.source, marks=marks)

    def mentions(self, word: str) -> bool:
        """True if the text has this word, such as `tool_calls`."""
        return word in self.source

    @property
    def input_heading(self) -> str:
        """Heading of the input of an instruction, in Alpaca's own template."""
        return "### Input:\n" if self.name == "alpaca" else ""


def load_template(given: str | Path | None, own: str | None) -> TemplateSource:
    """The template that `given` names; without it, the tokenizer's own."""
    if given is None:
        if own is None:
            raise ConfigError(
                "the tokenizer has no chat template; pass template= with a name "
                f"({', '.join(BUILT_IN)}), a .jinja file, or Jinja text"
            )
        for name in BUILT_IN:
            if own == _built_in(name).source:
                return _built_in(name)
        return _checked(TemplateSource("the tokenizer's template", own, own=True))
    if isinstance(given, str) and given in BUILT_IN:
        return _built_in(given)
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        return _checked(TemplateSource("the given template", given, specials(given)))
    if isinstance(given, str) and is_remote(given):
        from penstock.files.remote import fetch  # for those who have URLs

        try:
            given = fetch(given)
        except OSError as error:
            raise ConfigError(f"the template {shown(given)!r} cannot be read: {error}") from error
    path = Path(given)
    if path.suffix in (".jinja", ".jinja2", ".j2") or isinstance(given, Path):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the template {str(path)!r} cannot be read: {error}") from error
        return _checked(TemplateSource(f"the template {path.name}", source, specials(source)))
    added = [plugin.name for plugin in plugins.installed() if plugin.group == "templates"]
    if given in added:
        return _of_plugin(given)
    known = [*BUILT_IN, *added]
    raise ConfigError(
        f"unknown template {given!r}{did_you_mean(given, known)}; expected one of {', '.join(known)}, a .jinja file, "
        "or Jinja text"
    )


def _of_plugin(name: str) -> TemplateSource:
    found = plugins.find("templates", name)
    found = found() if callable(found) else found
    if isinstance(found, os.PathLike):
        try:
            found = Path(found).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"template {name!r} of a plugin cannot be read: {error}") from error
    if not isinstance(found, str):
        raise ConfigError(f"template {name!r} of a plugin is {found!r:.80}, expected Jinja text, or a path")
    return _checked(TemplateSource(name, found, specials(found)))


def specials(text: str) -> tuple[str, ...]:
    """Texts that look like special tokens."""
    return tuple(dict.fromkeys(SPECIAL.findall(text)))


def unmarked(text: str) -> str:
    """The text without the marks of generation blocks."""
    return text.replace(START, "").replace(END, "")


def clock(now: datetime | None) -> Callable[[str], str]:
    """`strftime_now` for templates. The time is an argument, so that the same data gives the same tokens."""

    def strftime_now(form: str) -> str:
        if now is None:
            raise ConfigError("the template needs the time; pass now=datetime(...)")
        return now.strftime(form)

    return strftime_now


@cache
def built_in_name(fingerprint: str) -> str | None:
    """Name of the built-in template with this fingerprint."""
    return next((name for name in BUILT_IN if load_template(name, None).fingerprint == fingerprint), None)


@cache
def _built_in(name: str) -> TemplateSource:
    source = (files("penstock.chat") / "template_files" / f"{name}.jinja").read_text(encoding="utf-8")
    return TemplateSource(name, source, BUILT_IN[name])


def _as_time(given: datetime | date | str | None) -> datetime | None:
    if given is None or isinstance(given, datetime):
        return given
    try:
        return datetime.fromisoformat(str(given))
    except ValueError:
        raise ConfigError(f"now must be a time such as 2026-01-31 or 2026-01-31T12:00, got {given!r}") from None


def _checked(template: TemplateSource) -> TemplateSource:
    import jinja2

    try:
        template.source.encode()
        assert template.program
    except UnicodeEncodeError as error:
        raise ConfigError(f"{template.name} has a lone surrogate at {error.start}, which is not text") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{template.name} is not Jinja, line {error.lineno}: {error.message}") from None
    except Exception as error:  # noqa: BLE001 - Jinja writes Python, whose compiler has limits of its own
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{template.name} cannot be compiled: {reason}") from None
    return template


# Words that no template writes by itself.
ASKED, ANSWERED, THOUGHT = "Zwölf Boxkämpfer?", "Quokkas jagten Viktor.", "Erst zählen, dann jagen."
CALL_ID = "q1w2e3r4t"
TOOL, VALUE, RESULT = "quokka_finden", "Rottnest", "Sieben Stück."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Sucht Quokkas.",
            "parameters": {
                "type": "object",
                "properties": {"insel": {"type": "string", "description": "Name der Insel."}},
                "required": ["insel"],
            },
        },
    }
]
ARGUMENTS = {"insel": VALUE}
RAW_PARTS = re.compile(r"""["']thinking["']:|["']type["']: ?["']text["']""")
"""Content parts that a template wrote as one Python or JSON value, instead of reading them."""

Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Traits:
    """Forms of messages that a template writes."""

    content_parts: bool = False
    """Content must be a list of parts: text would get lost."""
    thought_parts: bool = False
    """Thoughts are parts of the content."""
    thought_keys: tuple[str, ...] = ()
    """Keys of thoughts that it reads."""
    call_forms: tuple[tuple[bool, bool], ...] = ()
    """For turns with calls and no text: (content is null, else empty; arguments are text, else an object)."""
    bare_tools: bool = True
    wrapped_tools: bool = True
    """Tools may be functions; tools may be objects that hold a function."""
    developer: bool = True
    """It knows the role `developer`."""
    needs_tools: bool = False
    """It renders no conversation without tools."""

    def present(self, conversation: Conversation) -> Conversation:
        """The conversation in the form that the template takes."""
        messages = [self._message(message) for message in conversation.messages]
        tools = conversation.tools
        if tools is not None:
            tools = [self._tool(tool) for tool in tools]
        return Conversation(messages, tools, conversation.flags)

    def _message(self, message: Message) -> Message:
        if message["role"] == "developer" and not self.developer:
            message = {**message, "role": "system"}
        if len(message) > 2 or message["content"] is None:
            if message.get("tool_calls"):
                message = self._calls(message)
            message = self._thoughts(message)
        return _in_parts(message) if self.content_parts else message

    def _calls(self, message: Message) -> Message:
        forms = self.call_forms
        if not forms:  # the template ignores calls: the error should be about the call, not about the content
            return {**message, "content": message["content"] or ""}
        empty = not message["content"]
        is_null = message["content"] is None
        textual = all(isinstance(call["function"]["arguments"], str) for call in message["tool_calls"])
        allowed = [form for form in forms if not empty or form[0] == is_null] or list(forms)
        null, as_text = next((form for form in allowed if form[1] == textual), allowed[0])
        made = dict(message)
        if empty:
            made["content"] = None if null else ""
        made["tool_calls"] = [_with_arguments(call, as_text=as_text) for call in message["tool_calls"]]
        return made

    def _thoughts(self, message: Message) -> Message:
        given = [key for key in THOUGHTS if message.get(key)]
        if not given or any(key in self.thought_keys for key in given):
            return message
        if self.thought_keys:
            return {**message, self.thought_keys[0]: message[given[0]]}
        if self.thought_parts:
            text = message["content"]
            parts = [{"type": "thinking", "thinking": message[given[0]]}]
            if text:
                parts.append({"type": "text", "text": text})
            return {**message, "content": parts}
        return message

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        wrapped = isinstance(tool.get("function"), dict)
        if not wrapped and not self.bare_tools and self.wrapped_tools:
            return {"type": "function", "function": tool}
        if wrapped and not self.wrapped_tools and self.bare_tools:
            return dict(tool["function"])
        return tool


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content or ""}]}


def sample(turns: int = 2) -> Conversation:
    """A sample conversation of roles and text."""
    pair = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    return Conversation([dict(message) for message in pair * turns])


def thought_sample(key: str = "reasoning_content", tools: list[Any] | None = None) -> Conversation:
    """A sample conversation whose answer has thoughts."""
    made = sample(1)
    made.messages[-1][key] = THOUGHT
    made.tools = tools
    return made


def call_sample(
    *, null: bool = True, text: bool = False, bare: bool = False, stop: int = 4, calls: int = 1
) -> Conversation:
    """A sample conversation with tool calls, their result and an answer; its first `stop` messages."""
    arguments: Any = dumps(ARGUMENTS) if text else ARGUMENTS
    call = {"type": "function", "id": CALL_ID, "function": {"name": TOOL, "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None if null else "", "tool_calls": [call] * calls},
        {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID, "name": TOOL},
        {"role": "assistant", "content": ANSWERED},
    ]
    tools = [tool["function"] if bare else tool for tool in TOOLS]
    return Conversation(messages[:stop], tools)


def traits_of(render: Render, *, developer: bool) -> Traits:
    """The forms that a template writes, found by rendering samples of each."""

    def writes(conversation: Conversation, *words: str) -> bool:
        try:
            text = render(conversation)
        except RenderError:
            return False
        return all(word in text for word in words) and RAW_PARTS.search(text) is None

    plain = sample(1)
    needs_tools = not writes(plain) and writes(Conversation(plain.messages, TOOLS))
    if needs_tools:
        plain.tools = TOOLS
    in_parts = Conversation([_in_parts(message) for message in plain.messages], plain.tools)
    content_parts = not writes(plain, ASKED, ANSWERED) and writes(in_parts, ASKED, ANSWERED)

    def shown(conversation: Conversation, *words: str) -> bool:
        if content_parts:
            conversation.messages = [_in_parts(message) for message in conversation.messages]
        return writes(conversation, *words)

    calls: list[tuple[bool, bool]] = []
    for stop in (4, 2):  # some templates write no results of tools
        for null, text in ((True, False), (True, True), (False, False), (False, True)):
            words = (TOOL, dumps(ARGUMENTS)) if text else (TOOL, "insel", VALUE)
            if shown(call_sample(null=null, text=text, stop=stop), *words):
                calls.append((null, text))
        if calls:
            break
    keys = tuple(key for key in THOUGHTS if shown(thought_sample(key, plain.tools), THOUGHT))
    blocks = Traits(content_parts=content_parts, thought_parts=True)
    thought_parts = not keys and writes(blocks.present(thought_sample(tools=plain.tools)), THOUGHT, ANSWERED)
    bare = shown(Conversation(plain.messages, call_sample(bare=True).tools), TOOL)
    wrapped = shown(Conversation(plain.messages, call_sample().tools), TOOL)
    return Traits(content_parts, thought_parts, keys, tuple(calls), bare, wrapped, developer, needs_tools)


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) == as_text:
        return call
    if as_text:
        changed: Any = dumps(arguments)
    else:
        changed = loads(arguments) if arguments.strip() else {}
    return {**call, "function": {**call["function"], "arguments": changed}}
