"""Evaluation: suites of problems, repeated samples, scores with intervals, comparison of runs.

`evaluate` runs in a worker; tables and comparisons need no torch.
"""

from typing import TYPE_CHECKING, Any

from posttrain.evaluation.table import format_results, format_table

if TYPE_CHECKING:
    from posttrain.evaluation.runner import evaluate

__all__ = ["evaluate", "format_results", "format_table"]


def __getattr__(name: str) -> Any:
    """`evaluate` brings the verifier and the data loaders along: imported where it is asked for."""
    if name == "evaluate":
        from posttrain.evaluation.runner import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
