"""Where each part of a conversation went: into the prompt, into what is trained on, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.chat.messages import Conversation
from penstock.chat.parts import TOOLS
from penstock.chat.placement import place_parts
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer, Rendering

__all__ = ["ExplainedPart", "explain"]


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """A part of a row, and where it went."""

    message: int | None
    """None for a part of the tools."""
    role: str
    name: str
    where: str
    """prompt, supervised, lost, changed, or repeated."""
    text: str


def explain(renderer: Renderer, conversation: Conversation) -> tuple[list[ExplainedPart], str | None]:
    """The parts of a conversation, and what the row is refused for, if it is. Raises if it cannot be rendered."""
    problem = None
    try:
        renderer.rendering(conversation)
    except RowProblem as error:
        problem = error.reason
    made = _rendering(renderer, conversation)
    explained = []
    for number, (part, places) in enumerate(zip(made.placement.parts, made.placement.places)):
        inside = any(turn.start <= place[0] and place[1] <= turn.stop for turn in made.turns for place in places[:1])
        if not places:
            where = "lost"
        elif number in made.placement.changed:
            where = "changed"
        elif made.placement.is_repeated(part, places, made.text):
            where = "repeated"
        else:
            where = "supervised" if inside else "prompt"
        of_tools = part.message == TOOLS
        role = "tools" if of_tools else conversation.messages[part.message]["role"]
        explained.append(ExplainedPart(None if of_tools else part.message, role, part.name, where, part.text))
    return explained, problem


def _rendering(renderer: Renderer, conversation: Conversation) -> Rendering:
    """As far as it gets: with turns if they can be found, or else without."""
    lenient = replace(renderer, check_parts=False, check_content=False)
    for check_prompts in (True, False):
        try:
            return replace(lenient, check_prompts=check_prompts).rendering(conversation)
        except RowProblem:
            continue
    given = renderer.traits.present(conversation)
    whole = renderer.text_of(given)
    return Rendering(whole, place_parts(given, whole, renderer.text_of), (), ())
