"""Where a template comes from: the tokenizer, the built-in ones, a file, or a Jinja text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.chat.sandbox import Program

__all__ = ["BUILT_IN", "Markers", "Template", "clock", "load_template", "specials"]

Markers = tuple[str, str]
"""What opens a turn of the assistant in the text, and what ends it."""

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
