"""Which steps of an epoch are delivered: all but those that an edit of the plan skips."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.order.plan import Plan

__all__ = ["StepNumbers"]


class StepNumbers:
    """The numbers of the delivered steps of an epoch; those that were asked for last are kept."""

    def __init__(self) -> None:
        self._known: tuple[Plan, int, Sequence[int]] | None = None

    def of(self, plan: Plan, epoch: int) -> Sequence[int]:
        if self._known is None or self._known[:2] != (plan, epoch):
            first = sum(plan.steps_in(earlier) for earlier in range(epoch))
            steps: Sequence[int] = range(first, first + plan.steps_in(epoch))
            if plan.delivered_in(epoch) < len(steps):
                steps = [step for step in steps if not plan.skipped(step)]
            self._known = plan, epoch, steps
        return self._known[2]

    def __getstate__(self) -> dict[str, None]:
        """For worker processes: without what is quickly looked up again."""
        return {"_known": None}
