"""What is going on: the progress of a run while it lasts, and what it did when it is over.

Everything here looks at snapshots and reports, which are plain values; nothing reaches into a running pipeline.
"""

from penstock.observe.figures import Extent, Rates
from penstock.observe.live import LineProgress, LiveProgress, progress_on
from penstock.observe.report import closing_table

__all__ = ["Extent", "LineProgress", "LiveProgress", "Rates", "closing_table", "progress_on"]
