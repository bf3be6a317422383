"""Which rows make up step s: pure arithmetic, no I/O."""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.order.edits import Ban, Reweight, Skip
    from penstock.order.mixing import Drawn, Mixture
    from penstock.order.packing import Bins, count_bins, pack
    from penstock.order.permutation import Permutation, derive_key
    from penstock.order.plan import Plan
    from penstock.order.positions import Feed, Position, Step, Use
    from penstock.order.samples import Samples
    from penstock.order.schedules import Schedule, temperature_weights

__all__ = [
    "Ban",
    "Bins",
    "Drawn",
    "Feed",
    "Mixture",
    "Permutation",
    "Plan",
    "Position",
    "Reweight",
    "Samples",
    "Schedule",
    "Skip",
    "Step",
    "Use",
    "count_bins",
    "derive_key",
    "pack",
    "temperature_weights",
]

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "Ban": "penstock.order.edits",
        "Reweight": "penstock.order.edits",
        "Skip": "penstock.order.edits",
        "Drawn": "penstock.order.mixing",
        "Mixture": "penstock.order.mixing",
        "Bins": "penstock.order.packing",
        "count_bins": "penstock.order.packing",
        "pack": "penstock.order.packing",
        "Permutation": "penstock.order.permutation",
        "derive_key": "penstock.order.permutation",
        "Plan": "penstock.order.plan",
        "Feed": "penstock.order.positions",
        "Position": "penstock.order.positions",
        "Step": "penstock.order.positions",
        "Use": "penstock.order.positions",
        "Samples": "penstock.order.samples",
        "Schedule": "penstock.order.schedules",
        "temperature_weights": "penstock.order.schedules",
    },
)
