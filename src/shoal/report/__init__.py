"""What a run gave: tables in the terminal, figures, and one page that works offline."""

from shoal.report.figures import accuracy_over_bytes, accuracy_over_rounds, client_boxes, partition_heatmap
from shoal.report.page import write_page, write_partition_page
from shoal.report.summary import summarise, summarise_seeds
from shoal.report.terminal import compare_table, partition_view, result_table

__all__ = [
    "accuracy_over_bytes",
    "accuracy_over_rounds",
    "client_boxes",
    "compare_table",
    "partition_heatmap",
    "partition_view",
    "result_table",
    "summarise",
    "summarise_seeds",
    "write_page",
    "write_partition_page",
]
