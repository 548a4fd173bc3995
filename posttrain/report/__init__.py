"""The report of a run: one self-contained HTML file with the curves, the evaluation table and the samples."""

from posttrain.report.write import watch_report, write_report

__all__ = ["watch_report", "write_report"]
