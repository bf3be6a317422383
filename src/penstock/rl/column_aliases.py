"""Column aliases: names of the rollout fields in TRL, verl, OpenRLHF, slime and inference engines.

A dialect is recognised by the columns that only it has. Its names are read, and ours too. Two dialects at once, or a
name that resembles a known one, are errors: a column of log-probs that is silently taken for metadata costs a training
run. To support another stack, add a `Dialect` to `DIALECTS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError
from penstock.rl.rollout import PER_TOKEN

LISTED = (
    *("prompt_ids", "response_ids", "loss_mask", "prompt_mask", "completion_mask", "tool_mask", "attention_mask"),
    *("sequences", "action_mask", "tokens", *PER_TOKEN),
)
"""Fields with a list of numbers for each rollout."""
IMPORTANT = (
    *("prompt_ids", "response_ids", "loss_mask", "attention_mask", "prompt_mask", *PER_TOKEN),
    "reward",
    "group",
)
"""Fields, besides the policy version, that must not be missed because of their name."""
MASK_FIELDS = {"action_mask": "loss_mask", "completion_mask": "loss_mask", "tool_mask": "loss_mask"}
"""Masks of dialects, which are a loss mask on their own."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Column names of one stack."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """Columns that identify it: all of one tuple are there."""
    names: Mapping[str, tuple[str, ...]]
    """Names of each field; the first that is there is read, others are metadata."""
    text_marks: tuple[tuple[str, ...], ...] = ()
    """Columns that identify it if there are no token ids."""
    structure: tuple[str, ...] = ()
    """Columns that follow from others and are ignored."""
    padded: bool = False
    """Its arrays are padded to one length."""


OURS = Dialect(
    "penstock",
    (("response_ids",), ("turns",)),
    {
        "prompt_ids": ("prompt_ids",),
        "response_ids": ("response_ids",),
        "prompt": ("prompt",),
        "response": ("response",),
        "reward": ("reward", "rewards"),
        "token_rewards": ("token_rewards",),
        "logprobs": ("logprobs",),
        "ref_logprobs": ("ref_logprobs",),
        "values": ("values",),
        "loss_mask": ("loss_mask",),
        "policy_version": ("policy_version",),
        "group": ("group", "group_id"),
        "finish_reason": ("finish_reason",),
        "id": ("id", "rollout_id"),
        "metadata": ("metadata",),
        "messages": ("messages",),
        "turns": ("turns",),
        "tools": ("tools",),
        "tokenized": ("tokenized",),
    },
    (("messages",), ("response",)),
)
TRL = Dialect(
    "TRL",
    (("completion_ids",),),
    {
        "prompt_ids": ("prompt_ids",),
        "response_ids": ("completion_ids",),
        "response": ("completion",),
        "prompt_mask": ("prompt_mask",),
        "completion_mask": ("completion_mask",),
        "tool_mask": ("tool_mask", "env_mask"),
        "logprobs": ("old_per_token_logps", "sampling_per_token_logps", "logprobs"),
        "ref_logprobs": ("ref_per_token_logps",),
        "reward": ("rewards", "reward"),
    },
    (("completion",),),
    padded=True,
)
VERL = Dialect(
    "verl",
    (("responses",),),
    {
        "prompt_ids": ("prompts",),
        "response_ids": ("responses",),
        "attention_mask": ("attention_mask",),
        "loss_mask": ("response_mask", "loss_mask"),
        "logprobs": ("old_log_probs", "rollout_log_probs"),
        "ref_logprobs": ("ref_log_prob",),
        "values": ("values",),
        "token_rewards": ("token_level_rewards", "token_level_scores", "rm_scores"),
        "group": ("uid",),
        "id": ("id", "request_id"),
    },
    structure=("input_ids", "position_ids"),
    padded=True,
)
OPENRLHF = Dialect(
    "OpenRLHF",
    (("sequences", "action_mask"),),
    {
        "sequences": ("sequences",),
        "action_mask": ("action_mask",),
        "attention_mask": ("attention_mask",),
        "logprobs": ("action_log_probs", "rollout_log_probs"),
        "ref_logprobs": ("base_action_log_probs",),
        "values": ("values",),
        "reward": ("reward", "rewards"),
    },
    padded=True,
)
SLIME = Dialect(
    "slime",
    (("tokens", "response_length"), ("tokens", "response_lengths")),
    {
        "tokens": ("tokens",),
        "response_length": ("response_length", "response_lengths"),
        "loss_mask": ("loss_mask", "loss_masks"),
        "logprobs": ("rollout_log_probs", "log_probs"),
        "ref_logprobs": ("ref_log_probs",),
        "reward": ("reward", "rewards"),
        "group": ("group", "group_index"),
        "id": ("id", "index", "sample_indices"),
        "finish_reason": ("finish_reason", "status"),
    },
)
IDS = ("response_token_ids", "completion_token_ids", "output_token_ids", "output_ids", "token_ids")
ENGINES = Dialect(
    "inference engines",
    tuple((name,) for name in IDS),
    {
        "prompt_ids": ("prompt_ids", "prompt_token_ids", "input_token_ids", "input_ids"),
        "response_ids": IDS,
        "response": ("response", "text", "output_text"),
        "logprobs": ("logprobs", "output_token_logprobs", "token_logprobs", "response_logprobs", "output_logprobs"),
        "policy_version": ("policy_version", "weight_version"),
    },
)
TAU_BENCH = Dialect(
    "tau-bench",
    (),
    {"messages": ("traj",), "group": ("group", "group_id", "task_id"), "reward": ("reward",)},
    (("traj",),),
)
"""Transcripts. Not in `DIALECTS`: `task_id` is metadata in all others."""
DIALECTS = (OURS, TRL, VERL, OPENRLHF, SLIME, ENGINES)
FIELDS = tuple(dict.fromkeys(name for dialect in DIALECTS for name in dialect.names))


@dataclass(frozen=True, slots=True)
class ColumnFields:
    """Column of each field, and the columns that are metadata."""

    dialect: Dialect
    fields: dict[str, str]
    extras: list[str]

    def column(self, field: str) -> str:
        """Name of a field in the data, for messages."""
        return self.fields.get(field, field)


def resolve_columns(
    names: Sequence[str], columns: Mapping[str, str | Sequence[str]] | None, listed: Mapping[str, bool]
) -> ColumnFields:
    """Fields of columns; `columns` overrides the names, and `listed` marks columns of lists."""
    given, kept = _given_columns(columns or {}, names)
    rest = [name for name in names if name not in given.values() and name not in kept]
    dialect = _dialect(rest, given)
    fields = dict(given)
    for field in FIELDS:
        if field in fields:
            continue
        known = (*dialect.names.get(field, ()), *(OURS.names.get(field, ()) if dialect is not OURS else ()))
        found = next((name for name in known if name in rest and name not in fields.values()), None)
        if found is not None:
            fields[field] = found
    extras = [name for name in rest if name not in fields.values() and name not in dialect.structure]
    _check_near_misses(extras, fields, dialect, listed)
    return ColumnFields(dialect, fields, [*extras, *kept])


def _given_columns(
    columns: Mapping[str, str | Sequence[str]], names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Columns given by field, and columns to keep as metadata."""
    fields: dict[str, str] = {}
    kept: list[str] = []
    for field, wanted in columns.items():
        if field not in FIELDS:
            raise ConfigError(
                f"columns has {field!r}, which is not a field of a rollout{did_you_mean(field, FIELDS)}; pass "
                f"columns={{field: column}} with a field of {', '.join(FIELDS)}"
            )
        several = [wanted] if isinstance(wanted, str) else list(wanted)
        for column in several:
            if column not in names:
                raise SchemaError(
                    f"columns={{{field!r}: {column!r}}}: there is no such column{did_you_mean(column, names)}; "
                    f"the data has {list(names)}"
                )
        if field == "metadata" and not isinstance(wanted, str):
            kept = several
        elif len(several) != 1:
            raise ConfigError(f"columns={{{field!r}: {wanted!r}}}: a field has one column; only metadata takes several")
        else:
            fields[field] = several[0]
    twice = [column for column in fields.values() if list(fields.values()).count(column) > 1]
    if twice:
        raise ConfigError(f"columns={dict(columns)!r} uses {twice[0]!r} for two fields")
    return fields, kept


def _dialect(names: Iterable[str], given: Mapping[str, str]) -> Dialect:
    there = set(names)
    for marks in ("marks", "text_marks"):
        found = [d for d in (*DIALECTS, TAU_BENCH) if any(there.issuperset(mark) for mark in getattr(d, marks))]
        if len(found) == 1:
            return found[0]
        if found and not _has_response(given):
            seen = "; ".join(f"{d.name} by {_seen(d, marks, there)}" for d in found)
            raise SchemaError(
                f"the columns match several stacks ({seen}); name them with "
                f"columns={{'response_ids': ...}}; the columns are {sorted(there)}"
            )
    if _has_response(given) or "response_ids" in given:
        return OURS
    raise SchemaError(
        f"there is no response in the columns {sorted(there)}: neither token ids (response_ids, or the names of "
        f"{', '.join(d.name for d in DIALECTS[1:])}), nor turns, nor text (response, messages){_hint(there)}; "
        "name it with columns={'response_ids': ...}"
    )


def _hint(there: Iterable[str]) -> str:
    answers = [name for d in DIALECTS for marks in (d.marks, d.text_marks) for mark in marks for name in mark]
    hints = [(name, near) for name in sorted(there) if (near := difflib.get_close_matches(name, answers, 1, 0.75))]
    return f"; did you mean {hints[0][1][0]!r} by {hints[0][0]!r}?" if hints else ""


def _has_response(given: Mapping[str, str]) -> bool:
    return any(field in given for field in ("response_ids", "response", "turns", "messages", "sequences", "tokens"))


def _seen(dialect: Dialect, marks: str, there: set[str]) -> str:
    return next(" and ".join(map(repr, mark)) for mark in getattr(dialect, marks) if there.issuperset(mark))


def _check_near_misses(
    extras: Sequence[str], fields: Mapping[str, str], dialect: Dialect, listed: Mapping[str, bool]
) -> None:
    """Refuse a name that resembles that of a missing field, or is another stack's name of it."""
    for name in extras:
        for field in (*IMPORTANT, "policy_version"):
            if field in fields or (field in LISTED) != listed[name]:
                continue
            theirs = (
                field,
                *(other for other, meaning in MASK_FIELDS.items() if meaning == field and other not in fields),
            )
            whose = next((d for d in DIALECTS if any(name in d.names.get(other, ()) for other in theirs)), None)
            known = (*dialect.names.get(field, ()), *OURS.names.get(field, ()))
            near = None if whose is not None else next((other for other in known if similar_names(name, other)), None)
            if whose is None and near is None:
                continue
            looks = f"is the {field} of {whose.name}" if whose is not None else f"resembles {near!r}"
            raise SchemaError(
                f"column {name!r} {looks}, and the rollouts are read as those of {dialect.name}; pass "
                f"columns={{{field!r}: {name!r}}} to use it as such, or columns={{'metadata': [{name!r}]}} to keep it "
                "as metadata"
            )


def similar_names(name: str, known: str) -> bool:
    """True if `name` is probably a misspelling of `known`."""
    first, second = (text.lower().replace("_", "").replace("-", "").removesuffix("s") for text in (name, known))
    if first == second:
        return True
    return len(second) >= 6 and difflib.SequenceMatcher(None, first, second).ratio() >= 0.88
