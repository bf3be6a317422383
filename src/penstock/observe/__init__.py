"""Progress of a run on the console, and the table at its end.

Everything here reads snapshots and reports, which are plain values, and never a running pipeline.
"""

from penstock.observe.progress import Extent, LineProgress, LiveProgress, Rates, closing_table, progress_on

__all__ = ["Extent", "LineProgress", "LiveProgress", "Rates", "closing_table", "progress_on"]
