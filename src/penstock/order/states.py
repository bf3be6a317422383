"""State of a plan: a position as a small plain dict, and back; states of other plans are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

from penstock.errors import ConfigError, PenstockError, ResumeError
from penstock.files.states import StateFormat
from penstock.order.compact_states import read_compact, write_compact
from penstock.order.edits import edit_from_json, edits_digest
from penstock.order.mixing import Drawn
from penstock.order.plan import Plan
from penstock.order.positions import Position
from penstock.order.sample_orders import OrderPosition

STATE = StateFormat("plan", "a loader of prepared data")
_MOST_PLANNED = 16
"""Sources whose windows are planned to check a state."""
_MOST_BYTES, _MOST_PLAIN = 4096, 256
"""Larger states, and those of more sources, which would be larger, are written in less plain words."""
_MOST_EDIT_BYTES = 2048
"""Edits that take more are left out of the state; they have to be made again before it is loaded."""


def to_state(plan: Plan, position: Position, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """State of a position, the same on every rank; `more` are facts of the loader."""
    plain = plain_state(plan, position, more)
    if plain is not None:
        return plain
    compact, facts = write_compact(plan, position), _facts(plan, position, more)
    return STATE.write({**facts, **(_plain_position(position) if compact is None else {"compact": compact})})


def plain_state(plan: Plan, position: Position, more: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """State in plain words, which needs no rows of the plan; None if it is too large for them."""
    if len(plan.names) > _MOST_PLAIN:
        return None
    plain = STATE.write({**_facts(plan, position, more), **_plain_position(position)})
    return plain if len(orjson.dumps(plain)) < _MOST_BYTES else None


def _facts(plan: Plan, position: Position, more: Mapping[str, Any] | None) -> dict[str, Any]:
    edits = [edit.to_json() for edit in plan.edits]
    return {
        "plan": plan.fingerprint,
        "parts": _parts(plan),
        "global_batch": plan.global_batch,
        "epoch": position.epoch,
        "step": position.step,
        "samples": position.samples,
        "places": None,
        "drawn": None,
        "marks": None,
        "edits": edits if len(orjson.dumps(edits)) <= _MOST_EDIT_BYTES else None,
        "edits_digest": edits_digest(plan.edits),
        **(more or {}),
    }


def _plain_position(position: Position) -> dict[str, Any]:
    return {
        "places": [cursor.to_json() for cursor in position.cursors],
        "drawn": None if position.drawn is None else position.drawn.to_json(),
        "marks": [start.to_json() for start in position.epoch_starts],
    }


def from_state(plan: Plan, state: Mapping[str, Any], *, new_batch_size: bool = False) -> tuple[Plan, Position]:
    """Plan with the edits of a state, and the position of the state. A state of another plan is refused."""
    check_state(plan, state, new_batch_size=new_batch_size)
    drawn: Drawn | None
    try:
        numbers = {name: _whole(state[name]) for name in ("step", "epoch", "samples")}
        plan = _with_edits_of(plan, state, numbers["step"])
        if (compact := state.get("compact")) is not None:
            cursors, drawn, epoch_starts = read_compact(plan, compact, numbers["samples"])
        else:
            cursors, epoch_starts = (tuple(map(_cursor, state[name])) for name in ("places", "marks"))
            drawn = None if state["drawn"] is None else Drawn.from_json(state["drawn"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, PenstockError):
            raise
        raise _damaged(repr(error)) from error
    position = Position(cursors, drawn=drawn, epoch_starts=epoch_starts, **numbers)
    check_position(plan, position)
    return plan, position


def position_facts(position: Position) -> dict[str, Any]:
    """Position as plain values, the part of a state that changes from step to step."""
    return {
        "epoch": position.epoch,
        "step": position.step,
        "samples": position.samples,
        **_plain_position(position),
    }


def read_position(facts: Mapping[str, Any]) -> Position:
    """Position from the result of `position_facts`; `check_position` says whether a plan has it."""
    try:
        cursors = tuple(map(_cursor, facts["places"]))
        drawn = None if facts["drawn"] is None else Drawn.from_json(facts["drawn"])
        numbers = {name: _whole(facts[name]) for name in ("step", "epoch", "samples")}
        epoch_starts = tuple(map(_cursor, facts["marks"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(repr(error)) from error
    return Position(cursors, drawn=drawn, epoch_starts=epoch_starts, **numbers)


def check_position(plan: Plan, position: Position) -> None:
    """Refuse what cannot be a position of the plan. Plans the windows of the cursors, which are needed next.

    Of many sources only some are needed next: there, a cursor behind its window is refused when it is read.
    """
    cursors, starts, drawn, count = position.cursors, position.epoch_starts, position.drawn, len(plan.sources)
    if len(cursors) != count or len(starts) != count:
        raise _damaged(f"it has {len(cursors)} places and {len(starts)} marks for {count} sources")
    if (drawn is None) != (plan.schedule is None) or (drawn is not None and len(drawn.counts) != count):
        raise _damaged("its counts do not match the sources of the plan")
    for source, cursor, start in zip(plan.sources, cursors, starts):
        windows = source.order.windows
        if cursor.window >= windows:
            raise _damaged(f"window {cursor.window} of {source.name!r} does not exist; it has {windows}")
        if start.window >= windows or start.epoch > cursor.epoch:
            raise _damaged(f"the epoch of {source.name!r} begins after its cursor")
        if count > _MOST_PLANNED and source.order.even is None:
            continue
        if cursor.index and cursor.index >= (size := source.order.size_of(cursor.epoch, cursor.window)):
            raise _damaged(f"sample {cursor.index} of a window of {source.name!r} does not exist; it has {size}")
    if drawn is None and not 0 <= cursors[0].epoch - position.epoch <= 1:
        raise _damaged(f"its epoch is {position.epoch}, and that of its rows {cursors[0].epoch}")
    if drawn is not None and position.samples > drawn.position:
        raise _damaged(f"it counts {position.samples} samples of {drawn.position}")


def _cursor(value: Any) -> OrderPosition:
    epoch, window, index = map(_whole, value)
    return OrderPosition(epoch, window, index)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not an integer of at least 0")
    return value


def _damaged(why: str) -> ResumeError:
    return ResumeError(f"the state is damaged: {why}; pass what state_dict() returned, unchanged")


def check_state(plan: Plan, state: Mapping[str, Any], *, new_batch_size: bool = False) -> None:
    """Refuse a state of another release, another plan or another batch size."""
    STATE.read(state)
    if state.get("plan") != plan.fingerprint:
        raise ResumeError(
            f"the state belongs to plan {state.get('plan')}, and this loader has plan {plan.fingerprint}: "
            f"{_difference(plan, state)}"
        )
    if state.get("parts") != _parts(plan):
        raise _damaged("its parts do not match its plan")
    there = state.get("global_batch")
    if there != plan.global_batch and not new_batch_size:
        raise ResumeError(
            f"the state was saved with global batches of {there} samples, and this run has {plan.global_batch} "
            "(batch_size times world_size); choose batch_size so that they agree, or pass "
            "load_state_dict(state, new_batch_size=True) to continue at the same row"
        )
    state_edits = state.get("edits", ())
    if there != plan.global_batch and (plan.counts_steps or state_edits is None or state_edits):
        raise ResumeError(
            f"edits and schedules count steps, and steps of {there} samples are not steps of {plan.global_batch}; "
            "choose batch_size so that they agree"
        )


def _with_edits_of(plan: Plan, state: Mapping[str, Any], step: int) -> Plan:
    if "edits" not in state or "edits_digest" not in state:
        raise _damaged("its edits are missing")
    if edits_digest(plan.edits) == state["edits_digest"]:
        return plan
    there = state.get("edits")
    if there is None:
        raise ResumeError(
            f"the state was saved with edits of the plan (digest {state.get('edits_digest')}) that it is too small to "
            "hold; make the same edits before loading it"
        )
    if not isinstance(there, (list, tuple)):
        raise _damaged(f"its edits are {there!r:.200}")
    edits = tuple(edit_from_json(edit) for edit in there)
    if edits_digest(edits) != state["edits_digest"]:
        raise _damaged(f"its edits {[str(edit) for edit in edits]} do not match their digest")
    if not plan.edits:
        try:
            return plan.edited(*edits)
        except ConfigError as error:
            raise _damaged(str(error)) from error
    if plan.edits[: len(edits)] == edits and all(edit.step >= step for edit in plan.edits[len(edits) :]):
        return plan
    raise ResumeError(
        f"the state was saved with the edits {[str(edit) for edit in edits]}, and this plan has "
        f"{[str(edit) for edit in plan.edits]}; load the state before editing the plan"
    )


def _parts(plan: Plan) -> dict[str, str]:
    """Parts of a plan, each as a few letters, so that a refusal can name the part that differs. Kept by the plan."""
    if plan.parts is not None:
        return plan.parts
    parts = plan_parts(plan.describe())
    object.__setattr__(plan, "parts", parts)
    return parts


def plan_parts(described: Mapping[str, Any]) -> dict[str, str]:
    """Parts of a plan by its description, each as a few letters, so that a refusal can name the part that differs."""
    sources = described["sources"]
    facts = {
        "sources": [source["name"] for source in sources],
        "data": [source["rows"] for source in sources],
        "seed": [source["seed"] for source in sources],
        "shuffle": [source["shuffle"] for source in sources],
        "lengths and packing": [source["order"] for source in sources],
        "max_epochs": [source["max_epochs"] for source in sources],
        "weights": [described["weights"], described["stopping"]],
        "drop_last": described["drop_last"],
    }
    return {name: _short(value) for name, value in facts.items()}


def _short(value: Any) -> str:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    return text if len(text) <= 24 else xxhash.xxh3_64_hexdigest(text.encode())[:12]


def _difference(plan: Plan, state: Mapping[str, Any]) -> str:
    there = state.get("parts")
    if not isinstance(there, Mapping):
        return "its parts are missing"
    here = _parts(plan)
    different = [name for name in here if there.get(name) != here[name]]
    found = [f"{name} is {there.get(name)} in the state and {here[name]} here" for name in different]
    return "; ".join(found) or "another release wrote it"
