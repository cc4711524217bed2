"""What a run gave: tables in the terminal, figures, and one page that works offline."""

from shoal.report.comparison import Answers, Questions
from shoal.report.cost_curves import at_budget, parse_accuracy, parse_counted, to_accuracy
from shoal.report.html import PAGE, write_page, write_partition_page, write_sheets
from shoal.report.plots import (
    accuracy_over_bytes,
    accuracy_over_joules,
    accuracy_over_rounds,
    client_boxes,
    joule_bars,
    partition_heatmap,
)
from shoal.report.summary import summarise, summarise_seeds
from shoal.report.terminal import compare_table, evaluation_view, paper_view, partition_view, result_table, sheet_view

__all__ = [
    "PAGE",
    "Answers",
    "Questions",
    "accuracy_over_bytes",
    "accuracy_over_joules",
    "accuracy_over_rounds",
    "at_budget",
    "client_boxes",
    "compare_table",
    "evaluation_view",
    "joule_bars",
    "paper_view",
    "parse_accuracy",
    "parse_counted",
    "partition_heatmap",
    "partition_view",
    "result_table",
    "sheet_view",
    "summarise",
    "summarise_seeds",
    "to_accuracy",
    "write_page",
    "write_partition_page",
    "write_sheets",
]
