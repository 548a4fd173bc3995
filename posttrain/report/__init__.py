"""The report of a run: one self-contained HTML file with the curves, the evaluation table and the samples."""

from posttrain.report.write import write_report

__all__ = ["write_report"]
