"""Ladders: rules that generate bucket tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..errors import BucketingError
from .arrays import FloatArray
from .sizes import LatentSpec, Size
from .table import BucketTable

BUCKET_FRAMES = (1, 17, 49, 81)
"""Numbers of frames that buckets have by default, where a model takes videos."""

COMMON_RATIOS = (1, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2, 21 / 9)
"""Common aspect ratios of images and videos, width ÷ height of a landscape."""


def novelai_ladder(
    max_size: tuple[int, int] = (512, 768),
    min_dim: int = 256,
    *,
    max_dim: int = 1024,
    step: int = 64,
    base: tuple[int, int] | None = (512, 512),
) -> BucketTable:
    """Return NovelAI's image buckets: for each side, the longest other side within an area cap.

    The table holds the tallest bucket for each width and the widest for each height, by rising width and, for equal
    widths, by falling height. Source: NovelAI's aspect ratio bucketing (2022).

    NovelAI enlarges small images. Our default rule rejects them instead; `AssignmentRule.novelai()` is NovelAI's.
    `hf_bucketing report ladders` counts what either keeps.

    Args:
        max_size (`tuple[int, int]`): Two sides in pixels whose product caps the area of a bucket, inclusive.
        min_dim (`int`): Shortest side in pixels, a multiple of `step`.
        max_dim (`int`): Longest side in pixels.
        step (`int`): Sides are multiples of this many pixels.
        base (`tuple[int, int]`, *optional*): `(height, width)` of a bucket that the table always holds, and whose size
            mixed batches take.

    Returns:
        [`BucketTable`]: 19 buckets of one frame with the defaults.

    Raises:
        BucketingError: If `min_dim` or `base` are no multiples of `step`, `base` exceeds the cap or the longest
            side, or no bucket fits.

    Example:
        >>> table = novelai_ladder()
        >>> len(table), table.size(0), table.size(table.base)
        (19, Size(frames=1, height=1024, width=256), Size(frames=1, height=512, width=512))
    """
    area = max_size[0] * max_size[1]
    if step < 1 or min_dim < step or min_dim % step:
        raise BucketingError(f"min_dim={min_dim} must be a multiple of step={step}, and both at least 1.")
    sides = range(min_dim, max_dim + 1, step)
    longest = {side: min(sides[-1], area // side // step * step) for side in sides if side * min_dim <= area}
    if not longest:
        raise BucketingError(
            f"No bucket fits: min_dim={min_dim}, max_dim={max_dim} and an area of at most {area} pixels leave none."
        )
    shapes = {(height, width) for width, height in longest.items()} | set(longest.items())
    if base is not None:
        if base[0] % step or base[1] % step or base[0] * base[1] > area or not all(s in sides for s in base):
            raise BucketingError(
                f"base={base} must have sides from {min_dim} to {max_dim} in steps of {step} "
                f"and at most {area} pixels (max_size={max_size})."
            )
        shapes.add((base[0], base[1]))
    ordered = sorted(shapes, key=lambda shape: (shape[1], -shape[0]))
    return BucketTable(
        sizes=tuple(Size(1, height, width) for height, width in ordered),
        base=None if base is None else ordered.index(base),
    )


def token_ladder(
    spec: LatentSpec,
    tokens: Sequence[int],
    *,
    frames: Sequence[int] = (1,),
    sizes: Sequence[tuple[int, int]] = (),
    max_aspect_ratio: float = 4.0,
    aspect_step: float = 0.08,
    tolerance: float = 0.1,
    own_budgets: bool = True,
) -> BucketTable:
    """Return buckets of nearly equal token counts, for each token budget and number of frames.

    A budget covers the whole sample, so more frames mean smaller frames and batches of one budget cost the same.
    Each budget gets the common aspect ratios ([`COMMON_RATIOS`] and their transposes, at the nearest sizes of whole
    tokens), and evenly spaced ones (in log space) wherever two neighbours are more than `aspect_step` apart.

    A size of the model's own joins the budget whose tolerance it meets. Where no budget matches at some number of
    frames, the size makes a budget of its own with all aspect ratios, so that a sample slightly smaller than it, or of
    another shape, does not fall to the next lower budget.

    A larger `aspect_step` makes fewer buckets, which crop more but fill more of their batches. With Wan's own sizes,
    8,190 and 32,760 tokens, 1, 17, 49 and 81 frames and a `max_aspect_ratio` of 2.5, steps of 0.08, 0.16 and inf make
    356, 212 and 164 buckets, which keep 98.3, 97.4 and 96.0 % of a mix of sizes and 95.8, 92.4 and 89.2 % of the worst
    aspect ratio; of 100,000 samples, 25, 17 and 13 % of the batches are not full. `hf_bucketing report ladders`
    measures other choices.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        tokens (sequence of `int`): Token budgets per sample, one resolution tier each. No bucket has more tokens than
            the largest budget; only those of `sizes` may exceed it, by the tolerance.
        frames (sequence of `int`): Valid frame counts (`k * temporal_stride + 1`).
        sizes (sequence of `(height, width)`): The model's own sizes in pixels, rounded down to whole tokens. They and
            their transposes are buckets at each number of frames at which the largest budget admits them.
        max_aspect_ratio (`float`): Largest ratio of the longer to the shorter side, at least 1, except of `sizes`.
        aspect_step (`float`): Largest distance of neighbouring aspect ratios, as |ln(ratio ÷ ratio)|; a larger one
            makes fewer buckets, and `math.inf` keeps only the common ratios.
        tolerance (`float`): Largest relative distance of a bucket's token count from its budget.
        own_budgets (`bool`): Whether one of `sizes` that no budget matches makes a budget of its own, or is omitted.

    Returns:
        [`BucketTable`]: Ordered by frames, budget, and aspect ratio from portrait to landscape; the tier of a bucket
        is the rank of its budget at its number of frames. An aspect ratio is missing where no size within the
        tolerance comes near it, as happens if a frame has few tokens.

    Raises:
        BucketingError: On an invalid number of frames or a limit out of range, or when a budget has no bucket for
            some number of frames.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> table = token_ladder(spec, [60], frames=[17], max_aspect_ratio=1.4)
        >>> [(size.height, size.width) for size in table.sizes]
        [(64, 48), (48, 64)]
        >>> Size(81, 480, 832) in token_ladder(spec, [8190, 32760], frames=[81], sizes=[(480, 832)]).sizes
        True
    """
    if not aspect_step > 0:
        raise BucketingError(f"token_ladder needs an aspect_step above 0, got {aspect_step}.")
    goals = _aspect_goals(max(max_aspect_ratio, 1), aspect_step)
    reach = max(aspect_step / 2 if math.isfinite(aspect_step) else 0, math.log(1.1))
    limits: dict[str, Any] = {"max_aspect_ratio": max_aspect_ratio, "tolerance": tolerance}
    buckets: dict[Size, int] = {}
    for tier in _ladder_tiers(spec, tokens, frames=frames, sizes=sizes, own_budgets=own_budgets, **limits):
        free = [shape for shape in tier.candidates if Size(tier.frames, *shape) not in buckets]
        shapes = tier.own | _nearest_shapes(free, goals, reach=reach, area=tier.area)
        for shape in sorted(_with_mirrored(shapes, spec), key=lambda shape: (shape[1] / shape[0], shape)):
            buckets.setdefault(Size(tier.frames, *shape), tier.rank)
    return BucketTable(sizes=tuple(buckets), tiers=tuple(buckets.values()))


def all_ladder_sizes(
    spec: LatentSpec,
    tokens: Sequence[int],
    *,
    frames: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    max_aspect_ratio: float,
    tolerance: float,
    own_budgets: bool,
) -> tuple[BucketTable, FloatArray]:
    """Return all sizes that [`token_ladder`], whose arguments these are, chooses from, and their distances.

    A size within the tolerance of two budgets belongs to the nearer one.

    Returns:
        The table, ordered by frames, budget and aspect ratio, of equal ratios the smallest first; and
        the distance of each size from its budget, |ln(area ÷ area of the budget)|, of shape `(n,)`.

    Raises:
        BucketingError: As [`token_ladder`].
    """
    nearest: dict[Size, tuple[float, int]] = {}
    limits: dict[str, Any] = {"max_aspect_ratio": max_aspect_ratio, "tolerance": tolerance}
    for tier in _ladder_tiers(spec, tokens, frames=frames, sizes=sizes, own_budgets=own_budgets, **limits):
        for shape in _with_mirrored(tier.own | {*tier.candidates}, spec):
            found = abs(math.log(math.prod(shape) / tier.area)), tier.rank
            nearest[Size(tier.frames, *shape)] = min(found, nearest.get(Size(tier.frames, *shape), found))
    ordered = sorted(nearest, key=lambda size: (size.frames, nearest[size][1], size.width / size.height, size))
    distances, tiers = zip(*(nearest[size] for size in ordered), strict=True)
    return BucketTable(sizes=tuple(ordered), tiers=tiers), np.array(distances)


class _LadderTier(NamedTuple):
    """A budget of tokens at a number of frames.

    Attributes:
        frames: Number of frames.
        rank: Rank of the budget among those of this number of frames.
        area: Pixels of a frame that takes all of the budget.
        own: The model's own sizes within the tolerance, `(height, width)` in pixels.
        candidates: All landscapes and squares of whole tokens within the tolerance, `(height, width)` in pixels.
    """

    frames: int
    rank: int
    area: float
    own: set[tuple[int, int]]
    candidates: list[tuple[int, int]]


def _ladder_tiers(
    spec: LatentSpec,
    tokens: Sequence[int],
    *,
    frames: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    max_aspect_ratio: float,
    tolerance: float,
    own_budgets: bool,
) -> Iterator[_LadderTier]:
    """Iterate over the budgets of a ladder by frames and tokens; arguments and errors are [`token_ladder`]'s."""
    if max_aspect_ratio < 1:
        raise BucketingError(f"max_aspect_ratio must be at least 1, got {max_aspect_ratio}.")
    if not tokens or not frames or not 0 <= tolerance < 1:
        raise BucketingError("A ladder needs a budget, a number of frames, and a tolerance from 0 to below 1.")
    native, largest = _on_grid(sizes, spec), max(tokens)
    for count in sorted(set(frames)):
        per_frame, _, _ = spec.grid(Size(count, *spec.multiples))
        admitted = {shape: spec.num_tokens(Size(count, *shape)) for shape in native}
        admitted = {shape: number for shape, number in admitted.items() if number <= largest * (1 + tolerance)}
        budgets = sorted(set(tokens))
        for number in admitted.values():  # the first of like sizes makes the budget of the others
            if own_budgets and not any(abs(number - budget) <= tolerance * budget for budget in budgets):
                budgets.append(number)
        for rank, budget in enumerate(sorted(budgets)):
            own = {shape for shape, n in admitted.items() if abs(n - budget) <= tolerance * budget}
            limits = (budget * (1 - tolerance), min(budget * (1 + tolerance), largest))
            candidates = _candidates(limits[0] / per_frame, limits[1] / per_frame, spec, max_aspect_ratio)
            if not candidates:
                raise BucketingError(
                    f"No frame of {limits[0] / per_frame:.1f} to {limits[1] / per_frame:.1f} tokens exists with an "
                    f"aspect ratio up to {max_aspect_ratio}: a budget of {budget} tokens over {count} frames "
                    f"({per_frame} token frames) is too small.",
                    advice=["raise `tokens`", "raise `tolerance`", f"leave {count} out of `frames`"],
                )
            yield _LadderTier(count, rank, budget / per_frame * math.prod(spec.multiples), own, candidates)


def _with_mirrored(shapes: set[tuple[int, int]], spec: LatentSpec) -> set[tuple[int, int]]:
    """Return shapes with their transposes that are whole tokens."""
    mirrored = {(width, height) for height, width in shapes}
    return shapes | (mirrored & set(_on_grid(list(mirrored), spec)))


def _on_grid(sizes: Sequence[tuple[int, int]], spec: LatentSpec) -> list[tuple[int, int]]:
    """Return the sizes and their transposes, each once, rounded down to whole tokens."""
    both = [side for height, width in sizes for side in ((height, width), (width, height))]
    return list(dict.fromkeys(spec.snap(Size(1, *shape), mode="down")[1:] for shape in both))


def _aspect_goals(max_ratio: float, step: float) -> list[float]:
    """Return the logarithms of the wanted landscape aspect ratios: common ones, and others between distant ones.

    Example:
        >>> [round(math.exp(goal), 2) for goal in _aspect_goals(1.6, 0.1)]
        [1.0, 1.08, 1.16, 1.25, 1.33, 1.41, 1.5, 1.6]
    """
    anchors = [math.log(ratio) for ratio in COMMON_RATIOS if ratio <= max_ratio]
    if math.log(max_ratio) - anchors[-1] > step / 2:
        anchors.append(math.log(max_ratio))
    goals = anchors[:1]
    for left, right in pairwise(anchors):
        parts = max(1, math.ceil((right - left) / step - 1e-9))
        goals += [left + (right - left) * part / parts for part in range(1, parts + 1)]
    return goals


def _candidates(fewest: float, most: float, spec: LatentSpec, max_ratio: float) -> list[tuple[int, int]]:
    """Return `(height, width)` in pixels of all landscapes and squares with `fewest` to `most` tokens per frame."""
    step_height, step_width = spec.multiples
    per_height = step_width / step_height  # a landscape has at most sqrt(tokens · this) rows of tokens
    rows = range(max(1, int(math.sqrt(fewest / max_ratio * per_height))), int(math.sqrt(most * per_height)) + 2)
    shapes = [
        (height * step_height, width * step_width)
        for height in rows
        for width in range(max(1, math.ceil(fewest / height - 1e-9)), int(most / height + 1e-9) + 1)
    ]
    return [(height, width) for height, width in shapes if height <= width <= max_ratio * height + 1e-9]


def _nearest_shapes(
    candidates: list[tuple[int, int]], goals: Sequence[float], *, reach: float, area: float
) -> set[tuple[int, int]]:
    """Return the candidate nearest to each aspect ratio; among equally near ones, the nearest to the wanted area."""
    if not candidates:
        return set()
    heights, widths = np.array(candidates).T
    ratios, far = np.log(widths) - np.log(heights), np.abs(heights * widths - area)
    chosen = set()
    for goal in goals:
        distance = np.round(np.abs(ratios - goal), 9)
        best = int(np.lexsort((heights, far, distance))[0])
        if distance[best] <= reach:
            chosen.add(candidates[best])
    return chosen
