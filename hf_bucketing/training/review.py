"""Review of a run by its logs: whether every process saw its share, and whether the loss fell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
from ..errors import BucketingError
from ..files import complete_file
from .run_log import log_path, read_log, read_sample_logs

_SEEN = ("kept", "repeated")

_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def losses_of(output_dir: Path) -> list[float]:
    """Return the loss of each optimizer step of a run.

    Raises:
        BucketingError: If the run left no log.
    """
    return [line["train_loss"] for line in read_log(output_dir, "losses")]


class StepLog(NamedTuple):
    """Logged values of each optimizer step.

    Attributes:
        loss (`float64`, shape `(n,)`): Mean loss over the samples of the step.
        samples (`int64`, shape `(n,)`): Samples of all processes in the step.
        seconds (`float64`, shape `(n,)`): Time since the end of the step before.
    """

    loss: FloatArray
    samples: IntArray
    seconds: FloatArray


def steps_of(output_dir: Path) -> StepLog:
    """Return what a run logged of each optimizer step.

    Raises:
        BucketingError: If the run left no log of its steps.
    """
    lines = read_log(output_dir, "losses")
    if not lines or any("samples" not in line or "seconds" not in line for line in lines):
        path = log_path(output_dir, "losses")
        raise BucketingError(f"{path} holds no samples and seconds of each step; train again to draw its losses.")
    return StepLog(
        np.array([line["train_loss"] for line in lines], np.float64),
        np.array([line["samples"] for line in lines], np.int64),
        np.array([line["seconds"] for line in lines], np.float64),
    )


def plans_of(output_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the counts of each epoch's plan, as [`EpochPlan.summary`][hf_bucketing.plans.EpochPlan] gives them.

    Raises:
        BucketingError: If the run left no log.
    """
    return {line["epoch"]: line for line in read_log(output_dir, "plans")}


class SampleCount(NamedTuple):
    """Counts of what all processes together saw in one epoch.

    Attributes:
        epoch (`int`): Epoch that is counted.
        seen (`int`): Number of different samples.
        repeated (`int`): Number of samples seen again.
        steps (`tuple[int, ...]`): Steps of each process.
        buckets (`bool`): Whether the batches had buckets.
        mixed_steps (`int`): Steps in which the processes held different buckets.
    """

    epoch: int
    seen: int
    repeated: int
    steps: tuple[int, ...]
    buckets: bool
    mixed_steps: int


def count_samples(output_dir: Path) -> list[SampleCount]:
    """Count samples over all processes of a run, epoch by epoch.

    Raises:
        BucketingError: If the run left no log.
    """
    logs = read_sample_logs(output_dir)
    counts = []
    for epoch in sorted({line["epoch"] for log in logs for line in log}):
        by_process = [[line for line in log if line["epoch"] == epoch] for log in logs]
        seen = Counter(index for lines in by_process for line in lines for index in line["index"])
        steps = tuple(map(len, by_process))
        buckets = all(line["bucket_id"] is not None for lines in by_process for line in lines)
        mixed = sum(len({line["bucket_id"] for line in together}) > 1 for together in zip(*by_process, strict=False))
        counts.append(SampleCount(epoch, len(seen), seen.total() - len(seen), steps, buckets, mixed))
    return counts


def summarise_losses(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss over the first and over the last tenth of the steps.

    Raises:
        BucketingError: If there are fewer than ten losses.
    """
    if len(losses) < 10:
        raise BucketingError(f"Comparing tenths of a run needs at least ten optimizer steps, got {len(losses)}.")
    tenth = len(losses) // 10
    return _mean(losses[:tenth]), _mean(losses[-tenth:])


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of the losses that are finite, those of skipped steps aside; NaN if there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return float(np.mean(finite)) if finite else math.nan


class Check(NamedTuple):
    """A statement with its figures, and whether it holds."""

    holds: bool
    statement: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.holds else 'FAILED'}  {self.statement}"


class RunReview(NamedTuple):
    """The checks of a run; as text, one line each."""

    name: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks hold."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *map(str, self.checks)])


def review_run(output_dir: Path, *, min_fall: float = 1 / 3) -> RunReview:
    """Compare the logs of a run with its plans.

    Args:
        output_dir (`Path`): Output folder of the run.
        min_fall (`float`): Smallest fall of the loss that passes, as a share of the first loss.

    Raises:
        BucketingError: If the run left no logs or made fewer than ten optimizer steps.
    """
    plans, (first, last) = plans_of(output_dir), summarise_losses(losses_of(output_dir))
    if not plans:
        raise BucketingError(f"The run in {output_dir} drew from a stream, so there is no plan to compare it with.")
    # max_train_steps may cut the last epoch short; all others are compared with their plans.
    epochs = [epoch for epoch in count_samples(output_dir) if max(epoch.steps) == plans[epoch.epoch]["num_steps"]]
    checks = _check_epochs(epochs, plans) if epochs else [Check(False, "no complete epoch")]
    fall = 1 - last / first
    said = f"loss {first:.4f} in the first tenth, {last:.4f} in the last: {fall:.0%} less"
    return RunReview(output_dir.name, (*checks, Check(fall >= min_fall, said)))


def losses_by_bucket(output_dir: Path) -> dict[int, tuple[int, float]]:
    """Return the number of samples of each bucket in the second half of a run, and their mean loss; empty for packs.

    Raises:
        BucketingError: If the run left no log.
    """
    lines = [line for log in read_sample_logs(output_dir) for line in log]
    half = max(line["batch"] for line in lines) // 2
    losses: dict[int, list[float]] = {}
    for line in lines:
        if line["batch"] >= half and line["bucket_id"] is not None:
            losses.setdefault(line["bucket_id"], []).extend(line["loss"])
    return {bucket: (len(values), _mean(values)) for bucket, values in sorted(losses.items())}


def held_out_losses(output_dir: Path) -> list[dict[str, Any]]:
    """Return what a run logged of its held-out loss, one entry per computation; empty if it held nothing out."""
    return read_log(output_dir, "validation") if log_path(output_dir, "validation").is_file() else []


def describe_held_out(output_dir: Path, *, by_bucket: bool = False) -> list[str]:
    """Return the held-out loss of a run as lines of text: its first, lowest and last values, and the last by noise.

    Args:
        output_dir (`Path`): Output folder of the run.
        by_bucket (`bool`): Whether to add the last values of each bucket.
    """
    entries = held_out_losses(output_dir)
    if not entries:
        return []
    first, last = entries[0], entries[-1]
    lowest = min(entries, key=lambda entry: float(entry["validation_loss"]))
    values = ", ".join(
        f"{entry['validation_loss']:.4f} {what} (step {entry['global_step']})"
        for what, entry in (("first", first), ("lowest", lowest), ("last", last))
    )
    counts = sorted({int(entry["samples"]) for entry in entries})
    changed = " samples" if len(counts) == 1 else f" to {counts[-1]} samples, as some could not be read each time"
    levels = ", ".join(f"{one['loss']:.4f} at {one['noise_level']:.2f}" for one in last["by_noise"])
    lines = [
        f"held-out loss of {counts[0]}{changed}: {values}",
        f"held-out loss by noise level, last: {levels}",
    ]
    for one in last["by_bucket"] if by_bucket else []:
        size = "x".join(map(str, one["size"]))
        lines.append(f"bucket {one['bucket_id']:4} ({size}), {one['samples']:6} held out, mean loss {one['loss']:.4f}")
    return [f"{output_dir.name}: {line}" for line in lines]


def review_sources(output_dir: Path) -> list[str]:
    """Return a line per source of a run: samples and repeats of its first epoch, and the mean loss of each half.

    Empty if there was one source.

    Raises:
        BucketingError: If the run left no log.
    """
    plans = plans_of(output_dir)
    counts: dict[str, dict[str, int]] = plans[min(plans)].get("sources", {})
    lines = [line for log in read_sample_logs(output_dir) for line in log if "sources" in line]
    half = max((line["batch"] for line in lines), default=0) // 2
    losses: list[tuple[list[float], list[float]]] = [([], []) for _ in counts]
    for line in lines:
        for source, loss in zip(line["sources"], line["loss"], strict=True):
            losses[source][line["batch"] >= half].append(loss)
    said = []
    for (name, own), halves in zip(counts.items(), losses, strict=True):
        first, second = (f"{_mean(values):.4f}" if values else "none" for values in halves)
        planned = f"{own['kept']} kept, {own['repeated']} repeated and {own['dropped']} dropped in epoch {min(plans)}"
        said.append(f"source {name}: {planned}; mean loss {first} in the first half, {second} in the second")
    return said


def _check_epochs(epochs: Sequence[SampleCount], plans: Mapping[int, Mapping[str, Any]]) -> list[Check]:
    total = len(epochs)
    num_processes = plans[epochs[0].epoch]["num_processes"]
    once = sum((one.seen, one.repeated) == tuple(plans[one.epoch][name] for name in _SEEN) for one in epochs)
    often = "as often as planned" if any(plans[one.epoch]["repeated"] for one in epochs) else "exactly once"
    left = max(plans[epoch.epoch]["dropped"].get("remainder", 0) for epoch in epochs)
    even = sum(set(epoch.steps) == {plans[epoch.epoch]["num_steps"]} for epoch in epochs)
    steps, mixed = sum(epoch.steps[0] for epoch in epochs), sum(epoch.mixed_steps for epoch in epochs)
    checks = [
        Check(once == total, f"every planned sample seen {often} in {once} of {total} epochs"),
        Check(left < num_processes, f"at most {left} dropped per epoch, fewer than the {num_processes} processes"),
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
        steps ([`StepLog`]): Optimizer steps of a run.
        window (`int`): Smallest number of samples to average over, in whole steps.

    Example:
        >>> steps = StepLog(np.array([4.0, 1.0, 2.0, 8.0]), np.array([1, 3, 1, 2]), np.ones(4))
        >>> running_mean(steps, window=4)
        array([ nan, 1.75, 1.25, 3.5 ])
    """
    finite = np.isfinite(steps.loss)  # not the loss of a skipped step
    samples, counted = (np.append(0, np.cumsum(count)) for count in (steps.samples, steps.samples * finite))
    totals = np.append(0.0, np.cumsum(np.where(finite, steps.loss, 0.0) * steps.samples))
    first = np.searchsorted(samples, samples[1:] - window, side="right") - 1
    with np.errstate(invalid="ignore"):
        means = (totals[1:] - totals[first.clip(0)]) / (counted[1:] - counted[first.clip(0)])
    return np.where(first >= 0, means, np.nan)


def time_unit(seconds: float) -> tuple[str, int]:
    """Return the name and the seconds of the largest unit of which a time has at least three, or seconds."""
    return next((name, size) for name, size in _TIME_UNITS if seconds >= 3 * size or size == 1)


def draw_losses(runs: Iterable[Path], path: Path) -> None:
    """Draw the losses of runs over the samples seen and over time, as a PNG.

    This compares runs with different numbers of samples per step at equal work and at equal time. Each line is a
    running mean over the same number of samples in all runs: a twentieth of those of the shortest run. Dots are losses
    of held-out samples.

    Raises:
        BucketingError: If a run left no log.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = list(runs)
    logs = {run.name: steps_of(run) for run in runs}
    held_out_of = {run.name: held_out_losses(run) for run in runs}
    window = max(1, min(int(steps.samples.sum()) for steps in logs.values()) // 20)
    longest = max(float(steps.seconds.sum()) for steps in logs.values())
    unit, seconds = time_unit(longest)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    for name, steps in logs.items():
        mean = running_mean(steps, window=window)
        for axes, place in ((by_samples, np.cumsum(steps.samples)), (by_time, np.cumsum(steps.seconds) / seconds)):
            (line,) = axes.plot(place, mean, label=f"{name} ({len(mean)} steps)")
            axes.plot(place, steps.loss, color=line.get_color(), alpha=0.25, linewidth=0.8)
            if held_out := held_out_of[name]:
                at = np.array([entry["global_step"] for entry in held_out]) - 1
                values = [entry["validation_loss"] for entry in held_out]
                label = f"{name}, held out"
                axes.plot(place[at], values, "o--", color=line.get_color(), markersize=4, label=label)
    by_samples.set(xlabel="samples seen", ylabel="training loss", xlim=(0, None), ylim=(0, None))
    by_time.set(xlabel=f"training time in {unit}", xlim=(0, None))
    for axes in (by_samples, by_time):
        axes.grid(alpha=0.3)
    by_samples.legend(title=f"running mean over {window} samples")
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=120, format="png")
