"""Reports about tables, columns and plans: text, JSON, pages, and figures; matplotlib draws the charts of both."""

from .bucket_page import Beside, MemoryRow, bucket_page
from .compare import Report, count_kept, make_report, measure_ladder
from .figures import draw_figures
from .measure import AssignedColumns, ReportConfig, SizeColumns
from .page import render_page
from .references import ReferenceReport, describe_references, measure_references
from .sources import SourceUse, count_sources, describe_sources
from .text import describe_assignment, describe_packed_frames, format_report

__all__ = [
    "AssignedColumns",
    "Beside",
    "MemoryRow",
    "ReferenceReport",
    "Report",
    "ReportConfig",
    "SizeColumns",
    "SourceUse",
    "bucket_page",
    "count_kept",
    "count_sources",
    "describe_assignment",
    "describe_packed_frames",
    "describe_references",
    "describe_sources",
    "draw_figures",
    "format_report",
    "make_report",
    "measure_ladder",
    "measure_references",
    "render_page",
]
