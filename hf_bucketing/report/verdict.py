"""Whether buckets or packs suit a data set, by one rule over what a report measures."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray
from .compare import Report, StrategyReport

LIMIT = 0.05
"""Largest share that buckets may lose more than packs."""

RULE = (
    "How it is decided: buckets and packs each lose a share of the samples, of the area, of the frames, and of the "
    "processes' time (what is not useful work: padding and waiting). The share that differs most decides; packs have "
    f"to lose over {LIMIT:.0%} less."
)

FIGURES_HEAD = ("", "buckets", "packs")
"""Titles of the columns of [`Verdict.figures`][Verdict]."""

_LOSSES = {
    "samples": "leave out {} of the samples",
    "area": "crop away {} of the area",
    "frames": "cut off {} of the frames",
    "time": "spend {} of the time on padding and waiting",
}


class Verdict(NamedTuple):
    """The way of batching that a report recommends, and why.

    Attributes:
        way (`"bucketing"` or `"packing"`, *optional*): The way; None if no sample can be trained on.
        sentence (`str`): What to do and the reason, in one sentence.
        figures (`tuple` of lines): What buckets and packs keep and cost, below [`FIGURES_HEAD`]; empty if one of them
            takes no sample.
    """

    way: Literal["bucketing", "packing"] | None
    sentence: str
    figures: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        return self.sentence


def choose_way(report: Report) -> Verdict:
    """Recommend buckets or packs by [`RULE`]."""
    ways = {strategy.name: strategy for strategy in report.strategies}
    buckets, packs, total = ways["bucketing"], ways["packing"], report.buckets.samples_per_epoch
    if not buckets.kept and not packs.kept:
        return Verdict(None, f"Train on none of these yet: {_why_none(report, total)}.")
    if not buckets.kept:
        return Verdict("packing", f"Train these in packs: buckets take none of the {_samples(total)}.")
    if not packs.kept:
        return Verdict("bucketing", f"Train these in buckets: packs take none of the {_samples(total)}.")
    lost, lost_by_packs = _lost(buckets, total), _lost(packs, total)
    decisive = int(np.abs(lost - lost_by_packs).argmax())
    name, ahead = [*_LOSSES][decisive], float((lost - lost_by_packs)[decisive])
    of_buckets, of_packs = (
        f"{share:.1%}" if share >= 0.0005 else "none" for share in (lost[decisive], lost_by_packs[decisive])
    )
    figures = _figures(buckets, packs)
    if ahead > LIMIT:
        said = f"Train these in packs: buckets would {_LOSSES[name].format(of_buckets)}, packs {of_packs}."
        return Verdict("packing", said, figures)
    if of_buckets == of_packs:
        reason = "packs would gain nothing"
    elif ahead > 0:
        reason = f"packs would gain little, at most {ahead:.1%} of the {name}"
    else:
        reason = f"packs would {_LOSSES[name].format(of_packs)}, buckets {of_buckets}"
    return Verdict("bucketing", f"Train these in buckets: {reason}.", figures)


def _why_none(report: Report, total: int) -> str:
    processes = report.config.num_processes
    if total < processes:
        return f"{_samples(total)} are fewer than {processes} processes, each of which takes one in every step"
    return f"neither buckets nor packs can take any of the {_samples(total)}"


def _lost(strategy: StrategyReport, total: int) -> FloatArray:
    """Return the shares of samples, area, frames and time that a strategy loses, `float64` of shape `(4,)`."""
    dropped = strategy.num_dropped / total
    return np.array([dropped, 1 - strategy.kept_area, 1 - strategy.kept_frames, 1 - strategy.efficiency])


def _figures(buckets: StrategyReport, packs: StrategyReport) -> tuple[tuple[str, str, str], ...]:
    """Return what both keep, and what packs cost where buckets cost 1."""
    epoch = packs.epoch_cost / buckets.epoch_cost
    per_sample = epoch * buckets.kept / packs.kept
    per_pixel = epoch * buckets.kept_pixels / packs.kept_pixels
    shares = {
        "kept area, mean": (buckets.kept_area, packs.kept_area),
        "kept frames, mean": (buckets.kept_frames, packs.kept_frames),
        "useful work": (buckets.efficiency, packs.efficiency),
    }
    return (
        ("samples dropped", f"{buckets.num_dropped:,}", f"{packs.num_dropped:,}"),
        *((title, f"{of_buckets:.1%}", f"{of_packs:.1%}") for title, (of_buckets, of_packs) in shares.items()),
        ("time per sample", _ratio(1), _ratio(per_sample)),
        ("time per kept pixel", _ratio(1), _ratio(per_pixel)),
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"
