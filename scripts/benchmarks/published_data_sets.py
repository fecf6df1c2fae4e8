"""Durations and sizes of published data sets, as documented, to draw clips from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What is documented of a published data set, and what is assumed beyond it.

    Attributes:
        clips: Documented number of clips.
        hours: Documented hours of all clips together.
        bounds: Shortest and longest clip in seconds.
        sizes: Share of the clips by `(height, width)`.
        deviation: Assumed standard deviation of the logarithm of durations. None: all clips last as long as the
            longest, but for a share that is spread evenly; the share follows from the mean.
        source: Where it is documented.
        assumed: What is not documented there.
    """

    clips: int
    hours: float
    bounds: tuple[float, float]
    sizes: Mapping[tuple[int, int], float] = field(default_factory=lambda: {(720, 1280): 1.0})
    deviation: float | None = 0.7
    source: str
    assumed: str

    @property
    def mean_seconds(self) -> float:
        """Documented mean duration of a clip."""
        return self.hours * 3600 / self.clips

    def seconds(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw durations whose mean is the documented one."""
        low, high = self.bounds
        if self.deviation is None:
            share = 2 * (high - self.mean_seconds) / (high - low)
            return np.where(rng.random(count) < share, rng.uniform(low, high, count), high)
        shares = rng.random(count)
        below, above = -20.0, 20.0  # medians in ln; the mean rises with the median
        while above - below > 1e-6:
            middle = (below + above) / 2
            mean = float(_log_normal(np.linspace(0, 1, 4001), middle, self.deviation, self.bounds).mean())
            below, above = (middle, above) if mean < self.mean_seconds else (below, middle)
        return _log_normal(shares, below, self.deviation, self.bounds)

    def draw(self, count: int, *, fps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw clips: seconds, frames at a frame rate, heights and widths, each of shape `(count,)`."""
        rng = np.random.default_rng(0)
        seconds = self.seconds(count, rng)
        kinds = rng.choice(len(self.sizes), count, p=list(self.sizes.values()))
        heights, widths = np.array(list(self.sizes))[kinds].T
        return seconds, np.maximum((seconds * fps).astype(np.int64), 1), heights, widths


def _log_normal(shares: np.ndarray, location: float, deviation: float, bounds: tuple[float, float]) -> np.ndarray:
    """Return the quantiles, at shares from 0 to 1, of the part of a log-normal distribution within bounds."""
    normal = NormalDist(location, deviation)
    low, high = (min(max(normal.cdf(math.log(bound)), 1e-12), 1 - 1e-12) for bound in bounds)
    grid = np.linspace(low, high, 2001)
    quantiles = np.clip(np.exp([normal.inv_cdf(float(share)) for share in grid]), *bounds)
    return np.interp(shares, np.linspace(0, 1, len(grid)), quantiles)


DATA_SETS = {
    "Panda-70M": DataSet(
        clips=70_723_513,
        hours=167_000,
        bounds=(2, 60),
        source="snap-research/Panda-70M, README.md",
        assumed="log-normal durations from 2 to 60 s; all 720p at 16:9",
    ),
    "InternVid": DataSet(
        clips=234_000_000,
        hours=760_000,
        bounds=(1, 120),
        sizes={(720, 1280): 0.85, (480, 854): 0.075, (360, 640): 0.075},
        deviation=1.0,
        source="arXiv 2307.06942 and its data card: 85 % at 720p, the others from 360p to 720p",
        assumed="log-normal durations from 1 to 120 s; the others half 480p, half 360p; all at 16:9",
    ),
    "Koala-36M": DataSet(
        clips=36_000_000,
        hours=172_000,
        bounds=(2, 120),
        source="arXiv 2410.08260: a mean of 17.2 s, as cited elsewhere",
        assumed="log-normal durations from 2 to 120 s; all 720p at 16:9",
    ),
    "OpenVid-1M": DataSet(
        clips=1_019_957,
        hours=2_100,
        bounds=(1, 60),
        sizes={(1080, 1920): 0.425, (720, 1280): 0.275, (960, 540): 0.15, (512, 512): 0.15},
        source="arXiv 2407.02371 and its data card: at least 512×512, 433 thousand clips at 1080p",
        assumed="2.1 thousand hours; log-normal durations from 1 to 60 s; the others at 720p, portrait and square",
    ),
    "SpatialVID": DataSet(
        clips=2_710_000,
        hours=7_089,
        bounds=(3, 15),
        source="arXiv 2509.09676: clips of 3 to 15 s",
        assumed="log-normal durations; all 720p at 16:9",
    ),
    "MiraData": DataSet(
        clips=57_803,
        hours=1_754,
        bounds=(60, 120),
        deviation=None,
        source="mira-space/MiraData, README.md of the first version: 1 to 2 minutes, longer ones cut; a later version "
        "has a mean of 72 s",
        assumed="clips below 2 minutes spread evenly; all 720p at 16:9",
    ),
}
