"""Reports about tables, columns and plans: text, JSON, and figures (which alone need matplotlib)."""

from .assigned import AssignedRows, format_assigned
from .buckets import BucketReport, BucketUse, describe_buckets
from .config import ReportConfig, SizeColumns
from .figures import draw_aspects, draw_figures, draw_occupancy, draw_strategies, draw_tokens
from .histograms import Histogram, aspect_histogram, token_histogram
from .ladders import LadderChoice, LadderReport, format_ladders, measure_ladder
from .report import Report, make_report
from .strategies import StrategyReport, compare_strategies
from .text import format_report

__all__ = [
    "AssignedRows",
    "BucketReport",
    "BucketUse",
    "Histogram",
    "LadderChoice",
    "LadderReport",
    "Report",
    "ReportConfig",
    "SizeColumns",
    "StrategyReport",
    "aspect_histogram",
    "compare_strategies",
    "describe_buckets",
    "draw_aspects",
    "draw_figures",
    "draw_occupancy",
    "draw_strategies",
    "draw_tokens",
    "format_assigned",
    "format_ladders",
    "format_report",
    "make_report",
    "measure_ladder",
    "token_histogram",
]
