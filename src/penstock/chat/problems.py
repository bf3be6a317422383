"""Problems of a row of chat, one class for each: the engine counts bad rows by the name of the class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import DataError


class RowProblem(DataError):  # noqa: N818 - the root of many errors
    """A row of chat that cannot be used."""

    def __init__(self, reason: str, *, row: int | None = None, shown: str | None = None, numbered: bool = True) -> None:
        self.shown = shown
        where = f"row {row} of the batch: " if row is not None and numbered else ""
        super().__init__(f"{where}{reason}" + (f"\n{shown}" if shown else ""), row=row)
        self.reason = reason

    @property
    def kind(self) -> str:
        """Name of the problem, the same for all its rows: `nothing supervised`."""
        words = re.findall("[A-Z][a-z]+", type(self).__name__)
        return " ".join(word.lower() for word in words if word != "Error")

    def at(self, row: int) -> RowProblem:
        """The same problem, with the number of its row."""
        return type(self)(self.reason, row=row, shown=self.shown)

    def unnumbered(self) -> RowProblem:
        """The same problem, without the number of the row in its text."""
        return type(self)(self.reason, row=self.row, shown=self.shown, numbered=False)


class MalformedChatError(RowProblem):
    """Not a conversation: a column or a message of the wrong shape."""


class UnknownRoleError(RowProblem):
    """A role that is none of system, developer, user, assistant, tool and their usual other names."""


class NullContentError(RowProblem):
    """A message without content and without tool calls."""


class EmptyContentError(RowProblem):
    """A supervised message without text: a model would learn to end the turn at once."""


class NoAssistantTurnError(RowProblem):
    """No supervised message."""


class ToolCallsError(RowProblem):
    """Tools or tool calls that cannot be read."""


class PartLostError(RowProblem):
    """A part of the row that the template does not write."""


class PartRepeatedError(RowProblem):
    """A part of the row that the template writes more than once."""


class PartMovedError(RowProblem):
    """A part of the row that the template writes out of order."""


class PartChangedError(RowProblem):
    """A part of the row that the template changes."""


class ThoughtsLeftOutError(PartLostError):
    """Thoughts of the assistant that the template does not write."""


class SpecialTokenInContentError(RowProblem):
    """A message with the text of a special token: the tokenizer would not read it as text."""


class RenderError(RowProblem):
    """The template refused the conversation, or exceeded its limits."""


class SpansNotFoundError(RowProblem):
    """Supervised turns whose place in the text is unknown."""


class TooLongError(RowProblem):
    """More tokens than `max_length`, with `truncation="error"`."""


class NothingSupervisedError(RowProblem):
    """No token of the row is supervised."""


class TerminatorNotSupervisedError(RowProblem):
    """A turn whose end is not supervised."""


class TerminatorInsideError(RowProblem):
    """A supervised turn with a token that ends turns in its middle."""


class BosCountError(RowProblem):
    """Not exactly one beginning-of-sequence token, at the beginning."""


class PromptDiffersError(RowProblem):
    """The text before a supervised turn is not the prompt that the model gets for it."""


class HeaderSupervisedError(RowProblem):
    """A supervised role header, which the model never writes."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A problem of one row, in a list of problems."""

    row: int
    kind: str
    message: str
    shown: str = ""
    """The rendered row with its supervised parts between ⟦ and ⟧; empty if it could not be rendered."""


@contextmanager
def alone(batch: pa.RecordBatch) -> Iterator[None]:
    """Leave the row number out of the problem of a single row: the caller knows where it comes from."""
    try:
        yield
    except RowProblem as problem:
        if batch.num_rows != 1:
            raise
        raise problem.unnumbered() from problem.__cause__
