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

_RANKED = "hf_bucketing suggest ranks by that the runs that fit a machine, packs at the rows' own sizes."


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
    buckets, packs, total = ways["bucketing"], ways["packing"], report.buckets.samples_per_epoch
    if not buckets.kept and not packs.kept:
        if total < report.config.num_processes:
            few = f"{_samples(total)} are fewer than {report.config.num_processes} processes, each of which takes one"
            return Verdict(None, f"{few} in every step.")
        return Verdict(None, f"neither buckets nor packs can take any of the {_samples(total)}.")
    said = f"buckets {_said(buckets)}, packs {_said(packs)}."
    if buckets.kept and packs.kept:
        epoch = packs.epoch_cost / buckets.epoch_cost
        per_pixel = epoch * buckets.kept_pixels / packs.kept_pixels
        said += (
            f" A sample costs {epoch * buckets.kept / packs.kept:.2f} times as much in packs, and a kept pixel of its "
            f"file {per_pixel:.2f} times; useful work is {packs.efficiency:.1%} of that, in buckets "
            f"{buckets.efficiency:.1%}."
        )
        ahead = max((_lost(buckets, total) - _lost(packs, total)).tolist(), key=abs)
        packed, faster = ahead > LIMIT, per_pixel < 1
        if packed != faster and round(100 * math.log(per_pixel)):  # 1 % decides nothing in suggestions either
            said += f" By the time of a kept pixel alone, {'packs' if faster else 'buckets'} are ahead; {_RANKED}"
    else:
        packed = packs.kept > 0
    return Verdict("packing" if packed else "bucketing", said)


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
