"""Tables and figures, from results only."""

from noisewise.report.comparison import write_comparison
from noisewise.report.explain import explain
from noisewise.report.tables import MethodRow, as_csv, as_markdown, as_text, method_rows

__all__ = [
    "MethodRow",
    "as_csv",
    "as_markdown",
    "as_text",
    "explain",
    "method_rows",
    "write_comparison",
]
