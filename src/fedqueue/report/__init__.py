"""What a run looks like: plots, and a page to mail. Reads ledgers, changes nothing in them; needs matplotlib."""

from __future__ import annotations

from fedqueue.report.data import Curve, Run, read_run
from fedqueue.report.page import write_report
from fedqueue.report.plots import comparison_plot, run_plots

__all__ = ["Curve", "Run", "comparison_plot", "read_run", "run_plots", "write_report"]
