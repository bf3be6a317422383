"""Who calls what by which name: the columns of rollouts as TRL, verl, OpenRLHF, slime and inference engines have them.

A dialect is told by the columns that only it has. Its own names count, and ours beside them. Two dialects at once, or a
name that is nearly one we know, are errors that say what was seen: a column of log-probs that is quietly taken for free
metadata costs a training run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError

__all__ = ["DIALECTS", "PER_TOKEN", "Dialect", "Meaning", "alike", "meaning_of"]

PER_TOKEN = ("token_rewards", "logprobs", "ref_logprobs", "values")
LISTED = (
    *("prompt_ids", "response_ids", "loss_mask", "prompt_mask", "completion_mask", "tool_mask", "attention_mask"),
    *("sequences", "action_mask", "tokens", *PER_TOKEN),
)
"""Fields that hold a list of numbers for each rollout."""
MATTER = (*("prompt_ids", "response_ids", "loss_mask", "attention_mask", "prompt_mask", *PER_TOKEN), "reward", "group")
"""Fields that must not be missed because of their name, beside the policy's version."""
MEANT = {"action_mask": "loss_mask", "completion_mask": "loss_mask", "tool_mask": "loss_mask"}
"""What a field is called that has a meaning of its own only beside others of its dialect."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of one stack."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """Columns that tell it: all of one of these are there."""
    names: Mapping[str, tuple[str, ...]]
    """What each field may be called; the first that is there counts, and the others are metadata."""
    text_marks: tuple[tuple[str, ...], ...] = ()
    """Columns that tell it where nobody has token ids."""
    structure: tuple[str, ...] = ()
    """Columns that follow from the others, and are left out."""
    padded: bool = False
    """Whether its arrays are filled up to one length."""


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
DIALECTS = (OURS, TRL, VERL, OPENRLHF, SLIME, ENGINES)
FIELDS = tuple(dict.fromkeys(name for dialect in DIALECTS for name in dialect.names))


@dataclass(frozen=True, slots=True)
class Meaning:
    """Which column is which field, and which are free metadata."""

    dialect: Dialect
    fields: dict[str, str]
    extras: list[str]


def meaning_of(
    names: Sequence[str], asked: Mapping[str, str | Sequence[str]] | None, listed: Mapping[str, bool]
) -> Meaning:
    """What the columns mean; `asked` has the last word, and `listed` says which of them hold lists."""
    given, kept = _asked(asked or {}, names)
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
    return Meaning(dialect, fields, [*extras, *kept])


def _asked(asked: Mapping[str, str | Sequence[str]], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The columns that were asked for by field, and those that were asked to be kept as metadata."""
    fields: dict[str, str] = {}
    kept: list[str] = []
    for field, wanted in asked.items():
        if field not in FIELDS:
            raise ConfigError(
                f"columns has {field!r}, which is no field of a rollout{did_you_mean(field, FIELDS)}; write "
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
            raise ConfigError(
                f"columns={{{field!r}: {wanted!r}}}: one column is one field; only metadata takes several"
            )
        else:
            fields[field] = several[0]
    twice = [column for column in fields.values() if list(fields.values()).count(column) > 1]
    if twice:
        raise ConfigError(f"columns={dict(asked)!r} takes {twice[0]!r} for two fields")
    return fields, kept


def _dialect(names: Iterable[str], given: Mapping[str, str]) -> Dialect:
    there = set(names)
    for marks in ("marks", "text_marks"):
        found = [d for d in DIALECTS if any(there.issuperset(mark) for mark in getattr(d, marks))]
        if len(found) == 1:
            return found[0]
        if found and not _answers(given):
            seen = "; ".join(f"{d.name} by {_seen(d, marks, there)}" for d in found)
            raise SchemaError(
                f"the columns look like several kinds of rollouts at once ({seen}); say which is which with "
                f"columns={{'response_ids': ...}}; the columns are {sorted(there)}"
            )
    if _answers(given) or "response_ids" in given:
        return OURS
    raise SchemaError(
        f"no response is among the columns {sorted(there)}: neither token ids (response_ids, or the names of "
        f"{', '.join(d.name for d in DIALECTS[1:])}), nor turns, nor text (response, messages){_hint(there)}; "
        "say which is which with columns={'response_ids': ...}"
    )


def _hint(there: Iterable[str]) -> str:
    answers = [name for d in DIALECTS for marks in (d.marks, d.text_marks) for mark in marks for name in mark]
    hints = [(name, near) for name in sorted(there) if (near := difflib.get_close_matches(name, answers, 1, 0.75))]
    return f"; did you mean {hints[0][1][0]!r} by {hints[0][0]!r}?" if hints else ""


def _answers(given: Mapping[str, str]) -> bool:
    return any(field in given for field in ("response_ids", "response", "turns", "messages", "sequences", "tokens"))


def _seen(dialect: Dialect, marks: str, there: set[str]) -> str:
    return next(" and ".join(map(repr, mark)) for mark in getattr(dialect, marks) if there.issuperset(mark))


def _check_near_misses(
    extras: Sequence[str], fields: Mapping[str, str], dialect: Dialect, listed: Mapping[str, bool]
) -> None:
    """Refuse a name that is nearly that of a field nobody gave, or that is what others call such a field."""
    for name in extras:
        for field in (*MATTER, "policy_version"):
            if field in fields or (field in LISTED) != listed[name]:
                continue
            theirs = (field, *(other for other, meant in MEANT.items() if meant == field and other not in fields))
            whose = next((d for d in DIALECTS if any(name in d.names.get(other, ()) for other in theirs)), None)
            known = (*dialect.names.get(field, ()), *OURS.names.get(field, ()))
            near = None if whose is not None else next((other for other in known if alike(name, other)), None)
            if whose is None and near is None:
                continue
            looks = f"is what {whose.name} calls {field}" if whose is not None else f"is nearly {near!r}"
            raise SchemaError(
                f"column {name!r} {looks}, and the rollouts are read as those of {dialect.name}; pass "
                f"columns={{{field!r}: {name!r}}} if it is that, or columns={{'metadata': [{name!r}]}} to keep it as "
                "free metadata"
            )


def alike(name: str, known: str) -> bool:
    """Whether somebody who wrote `name` meant `known`."""
    first, second = (text.lower().replace("_", "").replace("-", "").removesuffix("s") for text in (name, known))
    if first == second:
        return True
    return len(second) >= 6 and difflib.SequenceMatcher(None, first, second).ratio() >= 0.88
