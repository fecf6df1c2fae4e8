"""Reports about tables, columns and plans: text, JSON, and figures, for which alone matplotlib is needed."""

from .compare import LadderChoice, Report, count_kept, make_report, measure_ladder
from .figures import draw_figures
from .measure import ReportConfig, SizeColumns
from .text import describe_assignment, format_ladders, format_report

__all__ = [
    "LadderChoice",
    "Report",
    "ReportConfig",
    "SizeColumns",
    "count_kept",
    "describe_assignment",
    "draw_figures",
    "format_ladders",
    "format_report",
    "make_report",
    "measure_ladder",
]
