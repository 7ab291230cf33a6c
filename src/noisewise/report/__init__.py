"""Tables, figures and HTML pages, made only from results."""

from noisewise.report.comparison_report import write_comparison, write_report
from noisewise.report.explain import explain
from noisewise.report.run_sets import RunSet, find_runs
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
