"""What the choices of a token ladder cost: kept area against number of buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.ladders import COMMON_RATIOS, token_ladder
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from .config import ReportConfig
from .plans import plan_bucketing
from .targets import Sizes, bucket_targets, kept_area
from .text import percent

_SWEEP = 2001
_LARGE = 20_000  # pixels of a side that every bucket can be cut from


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderChoice:
    """Arguments of [`token_ladder`][hf_bucketing.token_ladder]."""

    tokens: Sequence[int]
    frames: Sequence[int]
    sizes: Sequence[tuple[int, int]] = ()
    max_aspect_ratio: float = 2.5
    aspect_step: float = 0.08

    def make(self, spec: LatentSpec) -> BucketTable:
        """Return the table.

        Raises:
            BucketingError: As `token_ladder` does.
        """
        return token_ladder(
            spec,
            self.tokens,
            frames=self.frames,
            sizes=self.sizes,
            max_aspect_ratio=self.max_aspect_ratio,
            aspect_step=self.aspect_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """What a ladder makes of samples; kept areas are shares of a frame.

    Attributes:
        choice ([`LadderChoice`]): What was measured.
        num_buckets (`int`): In the table.
        common (`float`): Mean kept area over the common ratios within the limit, and all numbers of frames.
        worst (`float`): Smallest kept area over all ratios within the limit, and all numbers of frames, of samples
            that are larger than every bucket.
        mix (`float`): Mean kept area over the mix of [`measure_ladder`], of the samples that have a bucket.
        too_small (`float`): Share of the mix that every bucket would enlarge.
        short_batches (`float`): Share of the batches of an epoch of the mix that are not full.
    """

    choice: LadderChoice
    num_buckets: int
    common: float
    worst: float
    mix: float
    too_small: float
    short_batches: float


def measure_ladder(
    choice: LadderChoice, spec: LatentSpec, *, num_samples: int = 100_000, seed: int = 0
) -> LadderReport:
    """Measure a ladder on the common ratios, on all ratios, and on a mix.

    The mix is log-normal: aspect ratios around 1.2 with a standard deviation of 0.35 in ln, sides (square root of the
    area) around 1,000 pixels with 0.4; ratios beyond the limit are turned away. Frames are those of the table and up
    to 15 more, evenly. An epoch takes batches of 8 samples on 8 processes.

    Raises:
        BucketingError: If there is no such ladder.
    """
    table, limit = choice.make(spec), math.log(choice.max_aspect_ratio)
    config = ReportConfig(batch_size=8, num_processes=8, seed=seed)
    common = [math.log(ratio) for ratio in COMMON_RATIOS if ratio <= choice.max_aspect_ratio * (1 + 1e-9)]

    def kept_of_large(logarithms: FloatArray) -> FloatArray:
        counts = np.repeat(np.array(choice.frames), len(logarithms))
        sizes = _sizes(counts, np.tile(logarithms, len(choice.frames)), np.full(len(counts), _LARGE))
        return kept_area(sizes, bucket_targets(sizes, table, spec=spec, config=config).sizes)

    rng = np.random.default_rng(seed)
    shapes = rng.normal(math.log(1.2), 0.35, 2 * num_samples + 100)
    shapes = shapes[np.abs(shapes) <= limit][:num_samples]
    counts = rng.choice(np.array(choice.frames), len(shapes))
    counts += np.where(counts > 1, rng.integers(0, 16, len(shapes)), 0)
    mix = _sizes(counts, shapes, rng.lognormal(math.log(1000), 0.4, len(shapes)))
    targets = bucket_targets(mix, table, spec=spec, config=config)
    plan = plan_bucketing(targets, config)
    has_bucket = targets.bucket_id >= 0
    return LadderReport(
        choice=choice,
        num_buckets=len(table),
        common=float(kept_of_large(np.array([*common, *(-ratio for ratio in common)])).mean()),
        worst=float(kept_of_large(np.linspace(-limit, limit, _SWEEP)).min()),
        mix=float(kept_area(mix, targets.sizes)[has_bucket].mean()) if has_bucket.any() else math.nan,
        too_small=1 - float(has_bucket.mean()),
        short_batches=float((np.diff(plan.offsets) < config.batch_size).mean()) if plan.num_batches else math.nan,
    )


def _sizes(frames: IntArray, logarithms: FloatArray, sides: FloatArray) -> Sizes:
    """Return sizes of given aspect ratios, as logarithms, and square roots of their areas."""
    heights, widths = (
        np.maximum(np.round(sides * np.exp(sign * logarithms / 2)).astype(np.int64), 1) for sign in (-1, 1)
    )
    return Sizes(np.asarray(frames, np.int64), heights, widths)


def format_ladders(reports: Sequence[LadderReport]) -> str:
    """Return the reports as a table in markdown."""
    lines = [
        "| own sizes | aspect_step | buckets | common ratios | worst ratio | mix | too small | short batches |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for report in reports:
        own = ", ".join(f"{height}×{width}" for height, width in report.choice.sizes) or "none"
        shares = (report.common, report.worst, report.mix, report.too_small, report.short_batches)
        cells = [own, f"{report.choice.aspect_step:g}", f"{report.num_buckets:,}", *map(percent, shares)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
