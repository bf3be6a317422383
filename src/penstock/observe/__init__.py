"""Progress of a run on the console, and the table at its end.

Everything here reads snapshots and reports, which are plain values, and never a running pipeline.
"""

from penstock.observe.figures import Extent, Rates
from penstock.observe.live import LineProgress, LiveProgress, progress_on
from penstock.observe.report import closing_table

__all__ = ["Extent", "LineProgress", "LiveProgress", "Rates", "closing_table", "progress_on"]
