"""Tables, figures and the HTML page, from results only."""

from noisewise.report.comparison import write_comparison, write_report
from noisewise.report.explain import explain
from noisewise.report.sources import RunSet, find_runs
from noisewise.report.tables import MethodRow, as_csv, as_markdown, as_text, method_rows

__all__ = [
    "MethodRow",
    "RunSet",
    "as_csv",
    "as_markdown",
    "as_text",
    "explain",
    "find_runs",
    "method_rows",
    "write_comparison",
    "write_report",
]
