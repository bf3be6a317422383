"""Where a template comes from: the tokenizer, the built-in ones, a file, or a Jinja text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.chat.messages import THOUGHTS, Conversation, Message
from penstock.chat.problems import RenderError
from penstock.errors import ConfigError
from penstock.files.json_values import dumps, loads

if TYPE_CHECKING:
    from penstock.chat.sandbox import Program

__all__ = [
    "ANSWERED",
    "ASKED",
    "BUILT_IN",
    "END",
    "START",
    "THOUGHT",
    "Markers",
    "Template",
    "Traits",
    "call_sample",
    "clock",
    "load_template",
    "sample",
    "specials",
    "thought_sample",
    "traits_of",
    "unmarked",
]


Markers = tuple[str, str]
"""What opens a turn of the assistant in the text, and what ends it."""

START, END = "\ud800", "\ud801"
"""Marks around a generation block in a rendered text. Data cannot contain them: lone surrogates are not UTF-8."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    # The tokens a vocabulary must have for the template to make sense. What is not here is ordinary text.
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


@dataclass(frozen=True)
class Template:
    """A chat template: its text, what it is called in messages, and the tokens it cannot do without."""

    name: str
    source: str
    needs: tuple[str, ...] = ()
    own: bool = False
    """Whether it came with the tokenizer: then what it writes is taken to be what its model was trained with."""

    @property
    def program(self) -> Program:
        """Compiled once in a process, so that a template can travel to other processes as text."""
        return self.compiled()

    @cached_property
    def markers(self) -> Markers | None:
        """The turn markers of a well-known family, if the template writes its parts."""
        for opening, closing in KNOWN_MARKERS:
            parts = SPECIAL.findall(opening + closing)
            if all(part in self.source for part in parts):
                return opening, closing
        return None

    @property
    def unmarked(self) -> Program:
        """The same without marks. Only where marks might get in the way does it have to be another program."""
        return self.compiled(marks=False) if self.program.captures else self.program

    def compiled(self, *, marks: bool = True) -> Program:
        """The program, with marks where it has generation blocks, or without."""
        from penstock.chat.sandbox import compiled

        return compiled(self.source, marks=marks)

    def mentions(self, word: str) -> bool:
        """Whether the template does anything about, say, `tool_calls`."""
        return word in self.source

    @property
    def input_heading(self) -> str:
        """What announces the input of an instruction, in Alpaca's own template."""
        return "### Input:\n" if self.name == "alpaca" else ""


def load_template(given: str | Path | None, own: str | None) -> Template:
    """The template meant by `given`; without it, the tokenizer's own."""
    if given is None:
        if own is None:
            raise ConfigError(
                "the tokenizer has no chat template; pass template= with a name "
                f"({', '.join(BUILT_IN)}), a .jinja file, or a Jinja text"
            )
        for name in BUILT_IN:
            if own == _built_in(name).source:
                return _built_in(name)
        return _checked(Template("the tokenizer's template", own, own=True))
    if isinstance(given, str) and given in BUILT_IN:
        return _built_in(given)
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        return _checked(Template("the given template", given, specials(given)))
    path = Path(given)
    if path.suffix in (".jinja", ".jinja2", ".j2") or isinstance(given, Path):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the template {str(path)!r} cannot be read: {error}") from error
        return _checked(Template(f"the template {path.name}", source, specials(source)))
    raise ConfigError(
        f"no template is called {given!r}; expected one of {', '.join(BUILT_IN)}, a .jinja file, or a Jinja text"
    )


def unmarked(text: str) -> str:
    """The text without the marks of generation blocks."""
    return text.replace(START, "").replace(END, "")


def clock(now: datetime | None) -> Callable[[str], str]:
    """What templates call `strftime_now`. The time is an argument, so that the same data gives the same tokens."""

    def strftime_now(form: str) -> str:
        if now is None:
            raise ConfigError("the template asks for the time; pass now=datetime(...) to fix it")
        return now.strftime(form)

    return strftime_now


@cache
def _built_in(name: str) -> Template:
    source = (files("penstock.chat") / "template_files" / f"{name}.jinja").read_text(encoding="utf-8")
    return Template(name, source, BUILT_IN[name])


def specials(text: str) -> tuple[str, ...]:
    """What looks like a special token in a text."""
    return tuple(dict.fromkeys(SPECIAL.findall(text)))


def _checked(template: Template) -> Template:
    import jinja2

    try:
        template.source.encode()
        assert template.program
    except UnicodeEncodeError as error:
        raise ConfigError(f"{template.name} has a lone surrogate at {error.start}, which is not text") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{template.name} is not Jinja, line {error.lineno}: {error.message}") from None
    return template


# Words that no template writes by itself.
ASKED, ANSWERED, THOUGHT = "Zwölf Boxkämpfer?", "Quokkas jagten Viktor.", "Erst zählen, dann jagen."
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
"""What is left of parts that a template writes as Python or JSON would, and does not go through."""

Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Traits:
    """The forms that a template writes."""

    content_parts: bool = False
    """Content is a list of parts: a text would get lost."""
    thought_parts: bool = False
    """Thoughts are parts of the content."""
    thought_keys: tuple[str, ...] = ()
    """Names of thoughts that it reads."""
    call_forms: tuple[tuple[bool, bool], ...] = ()
    """For turns with calls and no text: whether content may be null (or else empty), and arguments may be text."""
    bare_tools: bool = True
    wrapped_tools: bool = True
    """Whether tools may be functions, or objects that hold one."""
    developer: bool = True
    """Whether it knows the role `developer`."""
    needs_tools: bool = False
    """Whether it renders no conversation without tools."""

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
        if not forms:  # the template leaves calls out: let it say so of the call, and not stumble over the content
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
    """A conversation of nothing but text, to try templates on."""
    pair = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    return Conversation([dict(message) for message in pair * turns])


def thought_sample(key: str = "reasoning_content", tools: list[Any] | None = None) -> Conversation:
    """A conversation whose answer has thoughts."""
    made = sample(1)
    made.messages[-1][key] = THOUGHT
    made.tools = tools
    return made


def call_sample(
    *, null: bool = True, text: bool = False, bare: bool = False, stop: int = 4, calls: int = 1
) -> Conversation:
    """A conversation with tool calls, their result and an answer; the first `stop` messages of it."""
    arguments: Any = dumps(ARGUMENTS) if text else ARGUMENTS
    call = {"type": "function", "id": "q1w2e3r4t", "function": {"name": TOOL, "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None if null else "", "tool_calls": [call] * calls},
        {"role": "tool", "content": RESULT, "tool_call_id": "q1w2e3r4t", "name": TOOL},
        {"role": "assistant", "content": ANSWERED},
    ]
    tools = [tool["function"] if bare else tool for tool in TOOLS]
    return Conversation(messages[:stop], tools)


def traits_of(render: Render, *, developer: bool) -> Traits:
    """Try the forms on a template. `render` takes a conversation as the template gets it."""

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
    for stop in (4, 2):  # some templates have no place for what tools answer
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
