"""Look back at a run: did every process see its share, and did the loss fall?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import BucketingError
from ..files import complete_file
from .history import SampleCount, count_samples, losses_of, plans_of, sample_lines


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


def draw_losses(runs: Iterable[Path], path: Path) -> None:
    """Draw the loss curves of runs, each with its running mean over a twentieth of its steps, as a PNG.

    Raises:
        BucketingError: If a run left no log.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        losses = losses_of(run)
        window = max(1, len(losses) // 20)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        (line,) = axes.plot(np.arange(window, len(losses) + 1), smooth, label=f"{run.name} (mean of {window} steps)")
        axes.plot(np.arange(1, len(losses) + 1), losses, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="flow-matching loss (mean squared error)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=120, format="png")
