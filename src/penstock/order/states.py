"""A position in a plan as a small plain dict, and back: what a checkpoint holds, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.order.edits import edit_from_json, edits_digest
from penstock.order.mixing import Drawn
from penstock.order.plan import Plan
from penstock.order.positions import Position
from penstock.order.sample_orders import OrderPosition

__all__ = ["check_state", "from_state", "to_state"]

STATE = StateFormat("plan", "a loader of prepared data")
_MOST_EDIT_BYTES = 2048
"""Edits that take more are not kept in the state, which stays small; they have to be made again before it is loaded."""


def to_state(plan: Plan, position: Position, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A position as a small plain dict, the same on every rank, with `more` that a loader has to say."""
    edits = [edit.to_json() for edit in plan.edits]
    facts = {
        "plan": plan.fingerprint,
        "parts": _parts(plan),
        "global_batch": plan.global_batch,
        "epoch": position.epoch,
        "step": position.step,
        "samples": position.samples,
        "places": [place.to_json() for place in position.places],
        "drawn": None if position.drawn is None else position.drawn.to_json(),
        "marks": [mark.to_json() for mark in position.marks],
        "edits": edits if len(orjson.dumps(edits)) <= _MOST_EDIT_BYTES else None,
        "edits_digest": edits_digest(plan.edits),
    }
    return STATE.write({**facts, **(more or {})})


def from_state(plan: Plan, state: Mapping[str, Any], *, new_batch_size: bool = False) -> tuple[Plan, Position]:
    """The plan with the edits of a state, and the position it stands for. What does not go together is refused."""
    check_state(plan, state, new_batch_size=new_batch_size)
    try:
        places = tuple(map(_place, state["places"]))
        drawn = None if state["drawn"] is None else Drawn.from_json(state["drawn"])
        numbers = {name: _whole(state[name]) for name in ("step", "epoch", "samples")}
        marks = tuple(map(_place, state["marks"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(repr(error)) from error
    plan = _with_edits_of(plan, state, numbers["step"])
    position = Position(places, drawn=drawn, marks=marks, **numbers)
    _check_position(plan, position)
    return plan, position


def _check_position(plan: Plan, position: Position) -> None:
    """Refuse what cannot be a position of the plan. Plans the windows it is in, which are needed next anyway."""
    places, marks, drawn = position.places, position.marks, position.drawn
    if len(places) != len(plan.feeds) or len(marks) != len(plan.feeds):
        raise _damaged(f"it has {len(places)} places and {len(marks)} marks for {len(plan.feeds)} sources")
    if (drawn is None) != (plan.schedule is None) or (drawn is not None and len(drawn.counts) != len(plan.feeds)):
        raise _damaged("its counts do not go with the sources of the plan")
    for feed, place, mark in zip(plan.feeds, places, marks):
        if place.window >= feed.order.windows:
            raise _damaged(f"it is in window {place.window} of {feed.name!r}, which has {feed.order.windows}")
        if mark.window >= feed.order.windows or mark.epoch > place.epoch:
            raise _damaged(f"the epoch of {feed.name!r} began behind where it is")
        if place.index and place.index >= (size := feed.order.size_of(place.epoch, place.window)):
            raise _damaged(f"it is at sample {place.index} of a window of {feed.name!r} that has {size}")
    if drawn is None and not 0 <= places[0].epoch - position.epoch <= 1:
        raise _damaged(f"it is in epoch {position.epoch}, and its rows in epoch {places[0].epoch}")
    if drawn is not None and position.samples > drawn.position:
        raise _damaged(f"it counts {position.samples} samples of {drawn.position}")


def _place(value: Any) -> OrderPosition:
    epoch, window, index = map(_whole, value)
    return OrderPosition(epoch, window, index)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value


def _damaged(why: str) -> ResumeError:
    return ResumeError(f"the state is damaged: {why}; it is a dict that state_dict() made, unchanged")


def check_state(plan: Plan, state: Mapping[str, Any], *, new_batch_size: bool = False) -> None:
    """Refuse a state of another release, another plan or another size of batches."""
    STATE.read(state)
    if state.get("plan") != plan.fingerprint:
        raise ResumeError(
            f"the state belongs to the plan {state.get('plan')}, this loader has {plan.fingerprint}: "
            f"{_difference(plan, state)}"
        )
    if state.get("parts") != _parts(plan):
        raise _damaged("what it says of its plan is not what its plan is")
    there = state.get("global_batch")
    if there != plan.global_batch and not new_batch_size:
        raise ResumeError(
            f"the state was saved with global batches of {there} samples, this run has {plan.global_batch} (batch_size "
            "times world_size); choose batch_size so that they agree, or, to go on at the same row with batches of "
            "another size, load_state_dict(state, new_batch_size=True)"
        )
    if there != plan.global_batch and _counts_steps(plan, state):
        raise ResumeError(
            f"edits and schedules count steps, and steps of {there} samples are not steps of {plan.global_batch}; "
            "choose batch_size so that they agree"
        )


def _counts_steps(plan: Plan, state: Mapping[str, Any]) -> bool:
    return plan.counts_steps or bool(state.get("edits")) or state.get("edits", ()) is None


def _with_edits_of(plan: Plan, state: Mapping[str, Any], step: int) -> Plan:
    if "edits" not in state or "edits_digest" not in state:
        raise _damaged("it does not say which edits of the plan it was saved with")
    if edits_digest(plan.edits) == state["edits_digest"]:
        return plan
    there = state.get("edits")
    if there is None:
        raise ResumeError(
            f"the state was saved with edits of the plan (digest {state.get('edits_digest')}) that are too long to "
            "be kept in it; make the same edits before loading it"
        )
    if not isinstance(there, (list, tuple)):
        raise _damaged(f"its edits are {there!r:.200}")
    edits = tuple(edit_from_json(edit) for edit in there)
    if edits_digest(edits) != state["edits_digest"]:
        raise _damaged(f"its edits {[str(edit) for edit in edits]} are not those it was saved with")
    if not plan.edits:
        try:
            return plan.edited(*edits)
        except ConfigError as error:
            raise _damaged(str(error)) from error
    if plan.edits[: len(edits)] == edits and all(edit.step >= step for edit in plan.edits[len(edits) :]):
        return plan
    raise ResumeError(
        f"the state was saved with the edits {[str(edit) for edit in edits]}, this plan has "
        f"{[str(edit) for edit in plan.edits]}; load the state first and edit the plan then"
    )


def _parts(plan: Plan) -> dict[str, str]:
    """What makes up the plan, each as a few letters, so that two plans can be told apart by what differs."""
    described = plan.describe()
    sources = described["sources"]
    said = {
        "sources": [source["name"] for source in sources],
        "data": [source["rows"] for source in sources],
        "seed": [source["seed"] for source in sources],
        "shuffle": [source["shuffle"] for source in sources],
        "lengths and packing": [source["order"] for source in sources],
        "max_epochs": [source["max_epochs"] for source in sources],
        "weights": [described["weights"], described["stopping"]],
        "drop_last": described["drop_last"],
    }
    return {name: _short(value) for name, value in said.items()}


def _short(value: Any) -> str:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    return text if len(text) <= 24 else xxhash.xxh3_64_hexdigest(text.encode())[:12]


def _difference(plan: Plan, state: Mapping[str, Any]) -> str:
    there = state.get("parts")
    if not isinstance(there, Mapping):
        return "it does not say what it is of"
    here = _parts(plan)
    found = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    return "; ".join(found) or "made by another release"
