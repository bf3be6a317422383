"""What can be wrong with one row of chat, a class for each: the engine counts bad rows by the name of the class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import DataError

__all__ = [
    "BosCountError",
    "EmptyContentError",
    "HeaderSupervisedError",
    "MalformedChatError",
    "NoAssistantTurnError",
    "NothingSupervisedError",
    "NullContentError",
    "PartChangedError",
    "PartLostError",
    "PartMovedError",
    "PartRepeatedError",
    "PromptDiffersError",
    "RenderError",
    "RowProblem",
    "SpansNotFoundError",
    "SpecialTokenInContentError",
    "TerminatorInsideError",
    "TerminatorNotSupervisedError",
    "ThoughtsLeftOutError",
    "TooLongError",
    "ToolCallsError",
    "UnknownRoleError",
    "Violation",
    "alone",
]


class RowProblem(DataError):  # noqa: N818 - the root of many errors
    """A row of chat that cannot be trained on as it is."""

    def __init__(self, reason: str, *, row: int | None = None, shown: str | None = None, numbered: bool = True) -> None:
        self.shown = shown
        where = f"row {row} of the batch: " if row is not None and numbered else ""
        super().__init__(f"{where}{reason}" + (f"\n{shown}" if shown else ""), row=row)
        self.reason = reason

    @property
    def kind(self) -> str:
        """The trouble in few words, the same for all rows that have it: `nothing supervised`."""
        words = re.findall("[A-Z][a-z]+", type(self).__name__)
        return " ".join(word.lower() for word in words if word != "Error")

    def at(self, row: int) -> RowProblem:
        """The same problem, with the row it belongs to."""
        return type(self)(self.reason, row=row, shown=self.shown)

    def unnumbered(self) -> RowProblem:
        """The same problem, without the number of the row in its text."""
        return type(self)(self.reason, row=self.row, shown=self.shown, numbered=False)


class MalformedChatError(RowProblem):
    """Not a conversation: a column or a message of the wrong shape."""


class UnknownRoleError(RowProblem):
    """A role that is none of system, developer, user, assistant, tool and their usual other names."""


class NullContentError(RowProblem):
    """A message without content that makes no tool calls either."""


class EmptyContentError(RowProblem):
    """A message to train on that says nothing: it would teach to end the turn at once."""


class NoAssistantTurnError(RowProblem):
    """No message to train on."""


class ToolCallsError(RowProblem):
    """Tools or tool calls that cannot be read, or that the template would leave out."""


class PartLostError(RowProblem):
    """Something the row says, which the template does not write."""


class PartRepeatedError(RowProblem):
    """Something the row says once, which the template writes more than once."""


class PartMovedError(RowProblem):
    """Something the row says, which the template writes before what comes first."""


class PartChangedError(RowProblem):
    """Something the row says, which the template writes as something else."""


class ThoughtsLeftOutError(PartLostError):
    """What the assistant thought, which the template would leave out."""


class SpecialTokenInContentError(RowProblem):
    """A message that says the text of a special token: it would not be read as text."""


class RenderError(RowProblem):
    """The template refused the conversation, or did more than it may."""


class SpansNotFoundError(RowProblem):
    """Where the turns to train on are in the text could not be told."""


class TooLongError(RowProblem):
    """More tokens than `max_length`, with `truncation="error"`."""


class NothingSupervisedError(RowProblem):
    """No token of the row would be trained on."""


class TerminatorNotSupervisedError(RowProblem):
    """A turn whose end the model would not learn."""


class TerminatorInsideError(RowProblem):
    """A turn to train on that ends and goes on: its content has the text of the token that ends turns."""


class BosCountError(RowProblem):
    """Not exactly one beginning-of-sequence token, at the beginning."""


class PromptDiffersError(RowProblem):
    """What stands before a trained turn is not what the model will be given when it has to write that turn."""


class HeaderSupervisedError(RowProblem):
    """A role header, which the model never has to write, would be trained on."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with one row, for a list of them."""

    row: int
    kind: str
    message: str
    shown: str = ""
    """The rendered row with its supervised parts between ⟦ and ⟧, where it could be rendered."""


@contextmanager
def alone(batch: pa.RecordBatch) -> Iterator[None]:
    """Problems of the only row of a batch do not count it: who sent it alone knows where it came from."""
    try:
        yield
    except RowProblem as problem:
        if batch.num_rows != 1:
            raise
        raise problem.unnumbered() from problem.__cause__
