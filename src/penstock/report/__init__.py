"""Pages about data: a store, a loader's plan, a run, or two of a kind side by side.

build_report                     the page of anything that `penstock report` takes
report.store                     store_sections: rows, lengths, supervision, tokens, losses
report.samples                   sample_sections: rows with token boundaries and loss masks, rows that were refused
report.plan, report.run          plan_sections, run_sections
report.comparison                compare_stores, compare_plans
"""

from penstock.report.page import build_report

__all__ = ["build_report"]
