"""The held-out loss of a run by its logs: how it fell by size, source, condition and noise level, and where not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..buckets.sizes import Size
from ..report.text import size_label
from .logs import Logs


class HeldOutRow(NamedTuple):
    """Change of the held-out loss of some samples since the start.

    Attributes:
        name (`str`): What they have in common.
        samples (`int`): Their number.
        changes (list of `float`): At each noise level, such as -0.1 for a tenth less.
        mean (`float`): Change of the mean over noise levels, each as likely as training draws it.
    """

    name: str
    samples: int
    changes: list[float]
    mean: float


class HeldOutChanges(NamedTuple):
    """Changes of the held-out loss of a run, of all samples, of each size and of each source.

    Attributes:
        noise_levels (list of `float`): Mean noise levels of the columns.
        rows (list of [`HeldOutRow`]): All samples, then sizes from the smallest, then sources.
    """

    noise_levels: list[float]
    rows: list[HeldOutRow]


def held_out_changes(logs: Logs) -> HeldOutChanges | None:
    """Return how the held-out loss changed from the first to the last time; None if it was computed less than twice.

    The first one is that of the model before training, unless `validation_loss_on_start` was off.
    """
    if len(logs.held_out) < 2:
        return None
    first, last = logs.held_out[0], logs.held_out[-1]
    before, after = _parts_of(first), _parts_of(last)
    rows = [
        HeldOutRow(
            name,
            part["samples"],
            (np.array(part["by_noise"]) / np.array(before[name]["by_noise"]) - 1).tolist(),
            part["loss"] / before[name]["loss"] - 1,
        )
        for name, part in after.items()
        if name in before
    ]
    return HeldOutChanges([level["noise_level"] for level in last["by_noise"]], rows)


def _parts_of(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the losses of all samples, and by size, source and condition; logs of before lack all but the first."""
    by_noise = [level["loss"] for level in entry["by_noise"]]
    parts = {"all": {"samples": entry["samples"], "loss": entry["validation_loss"], "by_noise": by_noise}}
    sizes = sorted(entry["by_bucket"], key=lambda bucket: math.prod(bucket["size"]))
    parts |= {size_label(Size(*bucket["size"])): bucket for bucket in sizes if "by_noise" in bucket}
    parts |= {source["source"]: source for source in entry.get("by_source", [])}
    return parts | {f"shown {losses['condition']}": losses for losses in entry.get("by_condition", [])}


def describe_held_out(logs: Logs, *, by_bucket: bool = False) -> list[str]:
    """Return the held-out loss of a run as lines of text: its first, lowest and last values, and the last by noise.

    Args:
        logs ([`Logs`][hf_bucketing.runs.logs.Logs]): Logs of the run.
        by_bucket (`bool`): Whether to add the last values of each bucket.
    """
    entries = logs.held_out
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
    levels = ", ".join(f"{level['loss']:.4f} at {level['noise_level']:.2f}" for level in last["by_noise"])
    lines = [
        f"held-out loss of {counts[0]}{changed}: {values}",
        f"held-out loss by noise level, last: {levels}",
    ]
    if (changes := held_out_changes(logs)) is not None:
        least = max(changes.rows[1:], key=lambda row: row.mean, default=changes.rows[0])
        lines.append(
            f"held-out loss since step {first['global_step']}: {changes.rows[0].mean:+.0%}, least learned "
            f"{least.name} ({least.mean:+.0%})"
        )
    for bucket in last["by_bucket"] if by_bucket else []:
        size = "x".join(map(str, bucket["size"]))
        lines.append(
            f"bucket {bucket['bucket_id']:4} ({size}), {bucket['samples']:6} held out, mean loss {bucket['loss']:.4f}"
        )
    return [f"{logs.name}: {line}" for line in lines]
