"""The whole report about a data set and a bucket table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from .buckets import BucketReport, describe_buckets
from .config import ReportConfig, SizeColumns
from .histograms import Histogram, aspect_histogram, token_histogram
from .strategies import StrategyReport, compare_strategies
from .values import as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is reported about a data set and a bucket table; the text and the figures are made from it alone.

    Attributes:
        config ([`ReportConfig`]): Settings of the plans.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        buckets ([`BucketReport`]): What the table does to the data.
        strategies (`tuple[StrategyReport, ...]`): Padding, bucketing and packing compared.
        aspects ([`Histogram`]): Samples by aspect ratio.
        tokens ([`Histogram`]): Samples by tokens.
    """

    config: ReportConfig
    spec: LatentSpec
    buckets: BucketReport
    strategies: tuple[StrategyReport, ...]
    aspects: Histogram
    tokens: Histogram

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, NaN as None."""
        return {
            "version": 1,
            **as_json(self),
            "buckets": self.buckets.to_dict(),
            "strategies": [strategy.to_dict() for strategy in self.strategies],
        }


def make_report(
    columns: SizeColumns, table: BucketTable, *, spec: LatentSpec, config: ReportConfig | None = None
) -> Report:
    """Report what a bucket table does to a data set, and how padding, bucketing and packing compare on it.

    Args:
        columns ([`SizeColumns`]): Sizes of all rows.
        table ([`BucketTable`][hf_bucketing.BucketTable]): The buckets.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model, which make tokens of pixels.
        config ([`ReportConfig`], *optional*): Settings of the plans.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
        PlanError: If a sample exceeds `config.capacity`.
    """
    config = config or ReportConfig()
    return Report(
        config=config,
        spec=spec,
        buckets=describe_buckets(columns, table, spec=spec, config=config),
        strategies=compare_strategies(columns, table, spec=spec, config=config),
        aspects=aspect_histogram(columns, table, config=config),
        tokens=token_histogram(columns, table, spec=spec, config=config),
    )
