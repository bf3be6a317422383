"""`ToMessages`: chat data of any format as one column of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock.chat.formats import USED, checked_format, conversations, detect_format, good_rows
from penstock.chat.messages import Conversation, thoughts_of
from penstock.chat.problems import alone
from penstock.files.json_values import dumps
from penstock.pipeline.stages import Transform

MESSAGES = pa.list_(
    pa.struct(
        [
            pa.field("role", pa.string()),
            pa.field("content", pa.string()),
            pa.field("reasoning_content", pa.string()),
            pa.field("name", pa.string()),
            pa.field("tool_calls", pa.string()),
            pa.field("tool_call_id", pa.string()),
            pa.field("train", pa.bool_()),
        ]
    )
)
"""Type of the column that `ToMessages` makes. Tool calls are JSON, since their arguments have any type."""


class ToMessages(Transform):
    """Chat data of any format as one column `messages`, to inspect or to store it.

        ToMessages()                                              # the format is detected
        ToMessages(columns={"user": "question", "assistant": "answer"})

    Preferences give `chosen` and `rejected` instead. Tools become JSON in a column `tools`, other columns stay. The
    fields of `MESSAGES` are kept. `FormatChat` accepts the result like the original.
    """

    def __init__(self, format: str = "auto", *, columns: Mapping[str, str] | None = None) -> None:
        self.format = checked_format(format, columns)
        self.columns = dict(columns) if columns is not None else None

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name = self.format if self.format != "auto" else detect_format(batch)
        with alone(batch):
            made = good_rows(conversations(batch, name, self.columns))
        used = self.columns.values() if self.columns is not None else USED[name]
        result = {field: batch.column(field.name) for field in batch.schema if field.name not in used}
        for i, side in enumerate(("chosen", "rejected") if name == "preference" else ("messages",)):
            result[pa.field(side, MESSAGES)] = pa.array([_as_struct(row[i]) for row in made], MESSAGES)
        if "tools" in used and "tools" in batch.schema.names:
            tools = [dumps(row[0].tools) if row[0].tools else None for row in made]
            result[pa.field("tools", pa.string())] = pa.array(tools, pa.string())
        return pa.RecordBatch.from_arrays(list(result.values()), schema=pa.schema(list(result)))

    def __repr__(self) -> str:
        return f"ToMessages({self.format!r})" if self.columns is None else f"ToMessages(columns={self.columns})"


def _as_struct(conversation: Conversation) -> list[dict[str, Any]]:
    flags = conversation.flags or [None] * len(conversation.messages)
    return [
        {
            **message,
            "reasoning_content": thoughts_of(message) or None,
            "tool_calls": dumps(message["tool_calls"]) if "tool_calls" in message else None,
            "train": flag,
        }
        for message, flag in zip(conversation.messages, flags)
    ]
