"""Positions of a loader over rollouts, and states: positions with all that they depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.errors import ResumeError
from penstock.files.states import StateFormat
from penstock.rl.sources import Cursor

__all__ = ["RolloutPosition", "RolloutState", "read_state"]

_STATE = StateFormat("rollouts", "a RolloutDataLoader")


@dataclass(frozen=True, slots=True)
class RolloutPosition:
    """In front of a minibatch."""

    epoch: int = 0
    """Of a list or a file: how often all of it was used; of a live source: the number of the rollout batch."""
    step: int = 0
    cursor: Cursor = None
    """Where the rollout batch begins in its source."""
    number: int = 0
    """Of the rollout batch, in its epoch."""
    version: int | None = None
    """Of the policy when the rollout batch was begun with."""
    ppo_epoch: int = 0
    unit: int = 0
    """Groups of this PPO epoch that were used."""
    minibatch: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    """Rollouts dropped so far, by reason."""

    @property
    def begun(self) -> bool:
        """Whether something of the rollout batch was used, so that it has to stay what it is."""
        return bool(self.ppo_epoch or self.unit)

    def counting(self, dropped: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((Counter(dict(self.counts)) + Counter(dict(dropped))).items()))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"version": self.version if self.begun else None, "counts": dict(self.counts)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RolloutPosition:
        return cls(**{**given, "counts": tuple(sorted(given["counts"].items()))})


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What a loader gives to a checkpoint."""

    facts: Mapping[str, Any]
    """What the batches depend on besides the position."""
    global_batch: int
    policy_version: int | None
    settled: bool
    """Whether that is the version under which the rollout batch at the position is judged. Behind the last minibatch of
    one before it, the policy may be about to have the next."""
    position: RolloutPosition

    def to_dict(self) -> dict[str, Any]:
        told = {
            "facts": dict(self.facts),
            "global_batch": self.global_batch,
            "policy_version": self.policy_version,
            "version_settled": self.settled,
            "position": self.position.to_dict(),
        }
        return _STATE.write(told)

    def check(self, facts: Mapping[str, Any], global_batch: int | None, *, live: bool) -> list[str]:
        """Raises if a loader of these facts would not go on with what was to come. None: any size of batch will do.

        Rules and estimators are those of whole rollout batches: between two of them they may become others. What did
        is returned, in words.
        """
        theirs, ours = _flat(self.facts), _flat(facts)
        changed = []
        for name in dict.fromkeys([*theirs, *ours]):
            if theirs.get(name) == ours.get(name):
                continue
            told = f"{name} {theirs.get(name)!r}, this one has {ours.get(name)!r}"
            if not (name.startswith("rules.") or name == "advantages"):
                raise ResumeError(f"the state is of a loader with {told}; it would not go on with what was to come")
            if self.position.begun:
                raise ResumeError(
                    f"the state is of a loader with {told}; it is in the middle of a rollout batch, which has to be "
                    "used to its end as it was begun: behind its last minibatch, a state can be loaded with another"
                )
            if name == "rules.rollout_batch_size" and not live and self.position.cursor is not None:
                raise ResumeError(
                    f"the state is of a loader with {told}; it is in the middle of an epoch that was cut so, and it "
                    "would not go on with what was to come"
                )
            changed.append(told)
        if global_batch not in (None, self.global_batch):
            raise ResumeError(
                f"the state is of a loader with minibatches of {self.global_batch} rollouts over all ranks, this one "
                f"has {global_batch}; use as many, or pass new_batch_size=True"
            )
        return changed


def read_state(state: Mapping[str, Any]) -> RolloutState:
    """The state that `RolloutState.to_dict` wrote."""
    _STATE.read(state)
    try:
        position = RolloutPosition.from_dict(state["position"])
        settled = bool(state["version_settled"])
        return RolloutState(state["facts"], state["global_batch"], state["policy_version"], settled, position)
    except (KeyError, TypeError, AttributeError) as error:
        raise ResumeError(f"the state is damaged ({error!r}): {state!r:.200}") from None


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"source": {"rollouts": 3}}` as `{"source.rollouts": 3}`."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
