"""Evaluation: suites of problems, repeated samples, scores with intervals.

`evaluate` runs in a worker; `format_table` and the scores need no torch.
"""

from posttrain.evaluation.runner import evaluate
from posttrain.evaluation.table import format_table

__all__ = ["evaluate", "format_table"]
