"""Reports on runs: tables for the terminal, plots, and one HTML page that works without a network.

`summary.py` has the numbers of the result table, `cost_curves.py` the joules and the accuracy round by round, and
`comparison.py` the answers to `--to-accuracy` and `--at-budget`. `terminal.py` and `html.py` draw them.
"""

from shoal.report.comparison import Comparison, ComparisonRequest
from shoal.report.cost_curves import accuracy_at_budget, cost_to_accuracy, parse_accuracy, parse_joules_scope
from shoal.report.html import PAGE, write_page, write_partition_page, write_tables
from shoal.report.plots import (
    accuracy_over_bytes,
    accuracy_over_joules,
    accuracy_over_rounds,
    client_boxes,
    joule_bars,
    partition_heatmap,
)
from shoal.report.summary import summarise, summarise_seeds
from shoal.report.terminal import (
    compare_table,
    evaluation_view,
    paper_view,
    partition_view,
    report_table_view,
    result_table,
)

__all__ = [
    "PAGE",
    "Comparison",
    "ComparisonRequest",
    "accuracy_at_budget",
    "accuracy_over_bytes",
    "accuracy_over_joules",
    "accuracy_over_rounds",
    "client_boxes",
    "compare_table",
    "cost_to_accuracy",
    "evaluation_view",
    "joule_bars",
    "paper_view",
    "parse_accuracy",
    "parse_joules_scope",
    "partition_heatmap",
    "partition_view",
    "report_table_view",
    "result_table",
    "summarise",
    "summarise_seeds",
    "write_page",
    "write_partition_page",
    "write_tables",
]
