"""Review of a run by its logs: whether every process saw its share, and whether the loss fell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray
from ..errors import BucketingError
from ..marks import mark
from ..report.charts import Chart, Line, line_chart
from .logs import Logs, StepLog
from .recount import Leg, Recount, recount
from .run_log import read_log

MIN_FALL = -0.5
"""Smallest fall of the loss that passes: a model that is trained already hardly falls, and one that diverges rises."""

FEWEST_STEPS = 10
"""Fewest optimizer steps that have tenths."""

_NAMED_STEPS = 10
"""Most skipped steps that are named."""

_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def losses_of(output_dir: Path) -> list[float]:
    """Return the loss of each optimizer step of a run.

    Raises:
        BucketingError: If the run left no log.
    """
    return [line["train_loss"] for line in read_log(output_dir, "losses")]


def summarise_losses(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss over the first and over the last tenth of the steps.

    Raises:
        BucketingError: If there are fewer than ten losses.
    """
    if len(losses) < FEWEST_STEPS:
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
        return f"  {mark(self.holds):6}  {self.statement}"


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


def review_run(logs: Logs, *, min_fall: float = MIN_FALL) -> RunReview:
    """Recount the logs of a run, and compare them with its plans.

    Args:
        logs ([`Logs`][hf_bucketing.runs.logs.Logs]): Logs of the run.
        min_fall (`float`): Smallest fall of the loss that passes, as a share of the first loss; below 0, how far it
            may rise.

    Raises:
        BucketingError: If the run left no logs, or those of an earlier release.
    """
    run = recount(logs)
    checks = [_check_end(run)]
    if run.faults:
        more = f"; and {len(run.faults) - 1} more" if len(run.faults) > 1 else ""
        checks.append(Check(False, f"the logs are not those of whole steps: {run.faults[0]}{more}"))
    else:
        sentence = f"no line of the logs is lost, doubled or moved: {run.batches} batches of each process"
        ignored = (
            f", and {run.unfinished} after the last optimizer step that are not counted" if run.unfinished else ""
        )
        checks += [
            Check(True, sentence + ignored),
            *_check_epochs(run, drops=logs.settings.get("remainder") == "drop"),
        ]
    parts = {f" of {name}": lines for name, lines in logs.by_expert.items()} or {"": logs.losses}
    checks += [_check_fall(lines, of=name, min_fall=min_fall) for name, lines in parts.items()]
    return RunReview(logs.name, tuple(checks))


def _check_fall(lines: Sequence[Mapping[str, Any]], *, of: str, min_fall: float) -> Check:
    """Compare the losses of the first and the last tenth of optimizer steps."""
    if len(lines) < FEWEST_STEPS:
        return Check(True, f"{len(lines)} optimizer steps{of}, too few to compare tenths of the loss")
    first, last = summarise_losses([line["train_loss"] for line in lines])
    fall = 1 - last / first
    change = f"{abs(fall):.0%} {'more' if fall < 0 else 'less'}"
    said = f"loss{of} {first:.4f} in the first tenth, {last:.4f} in the last: {change}"
    return Check(fall >= min_fall, said)


def losses_by_bucket(logs: Logs) -> dict[int, tuple[int, float]]:
    """Return how many samples of each bucket the second half of a run has, and their mean loss; empty for packs."""
    half = max(line["batch"] for line in logs.batches) // 2
    losses: dict[int, list[float]] = {}
    for line in logs.batches:
        if line["batch"] >= half and line["bucket_id"] is not None:
            losses.setdefault(line["bucket_id"], []).extend(line["loss"])
    return {bucket: (len(values), _mean(values)) for bucket, values in sorted(losses.items())}


def review_sources(logs: Logs) -> list[str]:
    """Return a line per source of a run: its samples, of plans those of the first epoch, and the loss of each half.

    Empty if there was one source.
    """
    epoch, plan = min(logs.first_plans.items(), default=(0, {}))
    counts: dict[str, dict[str, int]] = plan.get("sources", {})
    lines = [line for line in logs.batches if "sources" in line] if counts else []
    half = max((line["batch"] for line in lines), default=0) // 2
    losses: list[tuple[list[float], list[float]]] = [([], []) for _ in counts]
    for line in lines:
        for source, loss in zip(line["sources"], line["loss"], strict=True):
            losses[source][line["batch"] >= half].append(loss)
    said = []
    for (name, kept), halves in zip(counts.items(), losses, strict=True):
        first, second = (f"{_mean(values):.4f}" if values else "none" for values in halves)
        planned = f"{sum(map(len, halves))} samples"  # of a stream, which has no plan
        if kept:
            planned = (
                f"{kept['kept']} kept, {kept['repeated']} repeated and {kept['dropped']} dropped in epoch {epoch}"
            )
        said.append(
            f"{logs.name}: source {name}: {planned}; mean loss {first} in the first half, {second} in the second"
        )
    return said


def review_experts(logs: Logs) -> list[str]:
    """Return a line per transformer of a run that trains two: its steps, and their mean loss in each half of them."""
    said = []
    for name, lines in logs.by_expert.items():
        losses, half = [line["train_loss"] for line in lines], len(lines) // 2
        first, second = (f"{_mean(part):.4f}" if part else "none" for part in (losses[:half], losses[half:]))
        said.append(
            f"{logs.name}: expert {name}: {len(lines)} of {len(logs.losses)} optimizer steps; mean loss {first} in "
            f"the first half, {second} in the second"
        )
    return said


def describe_end(status: Mapping[str, Any]) -> str:
    """Return how a run ended, in words, by what [`read_status`][hf_bucketing.runs.run_log.read_status] returns."""
    name: str | None = status.get("status")
    return {None: "its end was not logged", "running": "still running or killed"}.get(name, str(name))


def _check_end(run: Recount) -> Check:
    """Check that a run made all its steps, or is about to; and name the steps that changed no weights."""
    planned, status = run.status.get("max_train_steps"), run.status.get("status")
    said = f"{run.steps} of {planned} optimizer steps" if planned else f"{run.steps} optimizer steps"
    said += f", {describe_end(run.status)}"
    if run.experts:
        said += f"; {', '.join(f'{count} of {name}' for name, count in run.experts.items())}"
    if run.skipped:
        more = ", …" if len(run.skipped) > _NAMED_STEPS else ""
        named = ", ".join(map(str, run.skipped[:_NAMED_STEPS]))
        said += f"; {len(run.skipped)} changed no weights, as loss or gradients were not finite: {named}{more}"
    complete = run.steps == planned if status == "finished" else status in (None, "running")
    return Check(complete, said)


def _check_epochs(run: Recount, *, drops: bool) -> list[Check]:
    """Compare the samples of each epoch, whose logs are whole, with its plans."""
    epochs, legs = run.epochs, [leg for legs in run.epochs.values() for leg in legs]
    total, steps = len(epochs), sum(leg.steps for leg in legs)
    last = legs[-1]
    if "num_steps" not in last.plan:
        passes = len({leg.plan["pass_began"] for leg in legs})
        rows = sum(leg.samples for leg in legs)
        said = f"{rows} rows of the stream in {passes} passes over it, none twice in a pass"
        return [
            Check(True, said + _said_of_replaced(run)),
            Check(True, f"equal steps on all processes in {total} of {total} epochs, {steps} in all"),
        ]
    once = sum(map(_as_planned, epochs.values()))
    often = "as often as planned" if any(leg.plan["repeated"] for leg in legs) else "exactly once"
    said = f"every planned sample seen {often} in {once} of {total} epochs"
    if not last.complete:
        said += f", as far as they go: {last.steps} of {last.plan['num_steps']} steps in the last"
    checks = [Check(once == total, said + _said_of_replaced(run))]
    dropped = [leg.plan["dropped"].get("remainder", 0) for leg in legs]
    few = all(count < leg.plan["num_processes"] for count, leg in zip(dropped, legs, strict=True))
    reason = 'as `remainder="drop"` asks for' if drops else "fewer than the processes"
    checks.append(Check(few or drops, f"at most {max(dropped)} dropped per epoch, {reason}"))
    checks.append(Check(True, f"equal steps on all processes in {total} of {total} epochs, {steps} in all"))
    if all(leg.has_buckets for leg in legs):
        mixed, planned = (sum(counts) for counts in ((leg.mixed_steps for leg in legs), map(_planned_as_mixed, legs)))
        right = (
            all(leg.mixed_steps == leg.plan["num_mixed_steps"] for leg in legs if leg.complete) and mixed <= planned
        )
        checks.append(
            Check(
                right, f"one bucket on all processes in {steps - mixed} of {steps} steps, {planned} planned as mixed"
            )
        )
    return checks


def _said_of_replaced(run: Recount) -> str:
    return f"; {run.replaced} unreadable samples were replaced" if run.replaced else ""


def _planned_as_mixed(leg: Leg) -> int:
    return int(leg.plan["num_mixed_steps"])


def _as_planned(legs: Sequence[Leg]) -> bool:
    """Return whether the legs of an epoch hold what was planned, as far as they went."""
    repeats = any(leg.plan["repeated"] for leg in legs)
    for leg in legs:
        kept, repeated = leg.plan["kept"], leg.plan["repeated"]
        total, again = leg.samples, leg.samples - leg.different
        # Where rows repeat, a plan counts as kept also those that an earlier leg held.
        known = repeats and leg.plan["consumed"]
        if total > kept + repeated or (leg.complete and total < kept + repeated):
            return False
        if not known and (again > repeated or (leg.complete and again < repeated)):
            return False
    return True


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


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it, such as `"2.3 hours"`.

    Example:
        >>> duration(5400.0), duration(20.0)
        ('90.0 minutes', '20.0 seconds')
    """
    unit, size = time_unit(seconds)
    return f"{seconds / size:.1f} {unit}"


def time_unit(seconds: float) -> tuple[str, int]:
    """Return the name and the seconds of the largest unit of which a time has at least three, or seconds."""
    return next((name, size) for name, size in _TIME_UNITS if seconds >= 3 * size or size == 1)


def loss_charts(runs: Sequence[Logs]) -> list[Chart]:
    """Chart the losses of runs over the samples seen and over time.

    This compares runs with different numbers of samples per step at equal work and at equal time. Each line is a
    running mean over the same number of samples in all runs: a twentieth of those of the shortest run. Dots are losses
    of held-out samples.

    Raises:
        BucketingError: If a run logged no samples and seconds of its steps.
    """
    window = max(1, min(int(run.steps.samples.sum()) for run in runs) // 20)
    unit, seconds = time_unit(max(float(run.steps.seconds.sum()) for run in runs))
    places: dict[str, Callable[[StepLog], FloatArray]] = {
        "samples seen": lambda steps: np.cumsum(steps.samples).astype(np.float64),
        f"training time in {unit}": lambda steps: np.cumsum(steps.seconds) / seconds,
    }
    charts = []
    for label, place in places.items():
        lines = []
        for colour, run in enumerate(runs):
            x = place(run.steps)
            lines.append(Line("", x, run.steps.loss, colour, "faint"))
            lines.append(Line(run.name, x, running_mean(run.steps, window=window), colour))
            at = np.array([entry["global_step"] for entry in run.held_out], np.int64)
            values = np.array([entry["validation_loss"] for entry in run.held_out], np.float64)
            lines.append(Line(f"{run.name}, held out", np.append(0.0, x)[at], values, colour, "dots"))
        charts.append(
            line_chart(
                lines,
                title=f"Loss over {label}",
                alt=f"Training loss over {label} of {', '.join(run.name for run in runs)}.",
                x_label=label,
                y_label="loss",
                note=f"Thick: running mean over {window:,} samples; pale: single steps; dots: the held-out samples.",
            )
        )
    return charts
