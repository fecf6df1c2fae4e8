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
    "Rule: buckets and packs each lose a share of the samples, of the area, of the frames, and of the processes' time "
    f"(to padding and waiting). The share that differs most decides; packs have to lose over {LIMIT:.0%} less."
)


class Verdict(NamedTuple):
    """The way of batching that a report recommends, None if no sample can be trained on, and its reason."""

    way: Literal["bucketing", "packing"] | None
    reason: str

    def __str__(self) -> str:
        say = {"bucketing": "Bucket these", "packing": "Pack these", None: "Train on none of these yet"}
        return f"{say[self.way]}: {self.reason}"


def choose_way(report: Report) -> Verdict:
    """Recommend buckets or packs by [`RULE`], and say what both lose and cost."""
    ways = {strategy.name: strategy for strategy in report.strategies}
    buckets, packs, total = ways["bucketing"], ways["packing"], report.buckets.num_samples
    if not buckets.kept and not packs.kept:
        if total < report.config.num_processes:
            few = f"{_samples(total)} are fewer than {report.config.num_processes} processes, each of which takes one"
            return Verdict(None, f"{few} in every step.")
        return Verdict(None, f"neither buckets nor packs can take any of the {_samples(total)}.")
    said = f"buckets {_said(buckets)}, packs {_said(packs)}."
    if buckets.kept and packs.kept:
        cost = (packs.epoch_cost / packs.kept) / (buckets.epoch_cost / buckets.kept)
        said += (
            f" A sample costs {cost:.2f} times as much in packs; useful work is {packs.efficiency:.1%} of that, "
            f"in buckets {buckets.efficiency:.1%}."
        )
        ahead = max((_lost(buckets, total) - _lost(packs, total)).tolist(), key=abs)
    else:
        ahead = 1.0 if packs.kept else -1.0
    return Verdict("packing" if ahead > LIMIT else "bucketing", said)


def _lost(strategy: StrategyReport, total: int) -> FloatArray:
    """Return the shares of samples, area, frames and time that a strategy loses, `float64` of shape `(4,)`."""
    dropped = strategy.num_dropped / total
    return np.array([dropped, strategy.cropped_area, strategy.cropped_frames, 1 - strategy.efficiency])


def _said(strategy: StrategyReport) -> str:
    """Return what a strategy loses of samples, frames and area, without what rounds to nothing."""
    cuts = {"the frames": strategy.cropped_frames, "the area": strategy.cropped_area}
    cut = [f"{share:.1%} of {name}" for name, share in cuts.items() if math.isfinite(share) and share >= 0.0005]
    dropped = [f"drop {_samples(strategy.num_dropped)}"] if strategy.num_dropped else []
    return " and ".join([*dropped, *([f"cut {' and '.join(cut)}"] if cut else [])]) or "lose nothing"


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"
