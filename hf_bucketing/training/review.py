"""Look back at a run: did every process see its share, and did the loss fall?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray
from ..errors import BucketingError
from ..files import complete_file
from .history import SampleCount, StepLog, count_samples, losses_of, plans_of, sample_lines, steps_of


class LossSummary(NamedTuple):
    """Mean loss over the first and the last tenth of the steps."""

    first: float
    last: float

    @property
    def fall(self) -> float:
        """Share of the loss that is gone: 0.4 is a fall by 40 %."""
        return 1 - self.last / self.first


def summarise_losses(losses: Sequence[float]) -> LossSummary:
    """Compare the first tenth of a run with its last.

    Raises:
        BucketingError: If there are fewer than ten losses.
    """
    if len(losses) < 10:
        raise BucketingError(f"Ten optimizer steps or more make tenths to compare, got {len(losses)}.")
    tenth = len(losses) // 10
    return LossSummary(float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:])))


class Check(NamedTuple):
    """A statement with its figures, and whether it holds."""

    holds: bool
    statement: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.holds else 'FAILED'}  {self.statement}"


class RunReview(NamedTuple):
    """The checks of a run; as text, a line each."""

    name: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks hold."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *map(str, self.checks)])


def review_run(output_dir: Path, *, min_fall: float = 1 / 3) -> RunReview:
    """Hold the logs of a run against its plans.

    Args:
        output_dir (`Path`): Of the run.
        min_fall (`float`): Least fall of the loss that passes, as a share.

    Raises:
        BucketingError: If the run left no logs or made fewer than ten optimizer steps.
    """
    plans, losses = plans_of(output_dir), summarise_losses(losses_of(output_dir))
    # max_train_steps may cut the last epoch short; all others are held against their plans.
    epochs = [epoch for epoch in count_samples(output_dir) if max(epoch.steps) == plans[epoch.epoch]["num_steps"]]
    fall = f"loss {losses.first:.4f} in the first tenth, {losses.last:.4f} in the last: {losses.fall:.0%} less"
    return RunReview(
        output_dir.name,
        (
            *(_check_epochs(epochs, plans) if epochs else [Check(False, "no complete epoch")]),
            Check(losses.fall >= min_fall, fall),
        ),
    )


def losses_by_bucket(output_dir: Path) -> dict[int, tuple[int, float]]:
    """Return how many samples of each bucket the second half of a run saw, and their mean loss; empty for packs.

    Raises:
        BucketingError: If the run left no log.
    """
    lines = sample_lines(output_dir)
    half = max(line["batch"] for line in lines) // 2
    losses: dict[int, list[float]] = {}
    for line in lines:
        if line["batch"] >= half and line["bucket_id"] is not None:
            losses.setdefault(line["bucket_id"], []).extend(line["loss"])
    return {bucket: (len(values), float(np.mean(values))) for bucket, values in sorted(losses.items())}


def _check_epochs(epochs: Sequence[SampleCount], plans: Mapping[int, Mapping[str, Any]]) -> list[Check]:
    total = len(epochs)
    num_processes = plans[epochs[0].epoch]["num_processes"]
    once = sum(not epoch.repeated and epoch.seen == plans[epoch.epoch]["kept"] for epoch in epochs)
    left = max(plans[epoch.epoch]["dropped"].get("remainder", 0) for epoch in epochs)
    even = sum(set(epoch.steps) == {plans[epoch.epoch]["num_steps"]} for epoch in epochs)
    steps, mixed = sum(epoch.steps[0] for epoch in epochs), sum(epoch.mixed_steps for epoch in epochs)
    checks = [
        Check(once == total, f"every planned sample seen exactly once in {once} of {total} epochs"),
        Check(left < num_processes, f"{left} left out of an epoch at most, fewer than the {num_processes} processes"),
        Check(even == total, f"equal steps on all processes in {even} of {total} epochs, {steps} in all"),
    ]
    if all(epoch.buckets for epoch in epochs):
        planned = sum(plans[epoch.epoch]["num_mixed_steps"] for epoch in epochs)
        same = f"one bucket on all processes in {steps - mixed} of {steps} steps, {planned} planned as mixed"
        checks.append(Check(mixed == planned, same))
    return checks


def running_mean(steps: StepLog, *, window: int) -> FloatArray:
    """Return the mean loss over the last samples, after each step: `(n,)`; NaN until there are enough.

    Args:
        steps ([`StepLog`]): Of a run.
        window (`int`): Samples to take the mean over, at least; whole steps are taken.

    Example:
        >>> steps = StepLog(np.array([4.0, 1.0, 2.0, 8.0]), np.array([1, 3, 1, 2]), np.ones(4))
        >>> running_mean(steps, window=4)
        array([ nan, 1.75, 1.25, 3.5 ])
    """
    samples = np.append(0, np.cumsum(steps.samples))
    totals = np.append(0.0, np.cumsum(steps.loss * steps.samples))
    first = np.searchsorted(samples, samples[1:] - window, side="right") - 1
    means = (totals[1:] - totals[first.clip(0)]) / (samples[1:] - samples[first.clip(0)])
    return np.where(first >= 0, means, np.nan)


def draw_losses(runs: Iterable[Path], path: Path) -> None:
    """Draw the losses of runs by the samples that they saw, and by the time that they took, as a PNG.

    Runs that take different numbers of samples per step are so compared at equal work and at equal time. Each line is
    a running mean over equally many samples in all runs: a twentieth of those of the shortest run.

    Raises:
        BucketingError: If a run left no log.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logs = {run.name: steps_of(run) for run in runs}
    window = max(1, min(int(steps.samples.sum()) for steps in logs.values()) // 20)
    longest = max(float(steps.seconds.sum()) for steps in logs.values())
    unit, seconds = next((name, size) for name, size in _TIME_UNITS if longest >= 3 * size or size == 1)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    for name, steps in logs.items():
        mean = running_mean(steps, window=window)
        for axes, place in ((by_samples, np.cumsum(steps.samples)), (by_time, np.cumsum(steps.seconds) / seconds)):
            (line,) = axes.plot(place, mean, label=f"{name} ({len(mean)} steps)")
            axes.plot(place, steps.loss, color=line.get_color(), alpha=0.25, linewidth=0.8)
    by_samples.set(xlabel="samples seen", ylabel="training loss", xlim=(0, None), ylim=(0, None))
    by_time.set(xlabel=f"training time in {unit}", xlim=(0, None))
    for axes in (by_samples, by_time):
        axes.grid(alpha=0.3)
    by_samples.legend(title=f"running mean over {window} samples")
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=120, format="png")


_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
