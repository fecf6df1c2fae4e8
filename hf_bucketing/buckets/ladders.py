"""Ladders: rules that generate bucket tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import BucketingError
from .sizes import LatentSpec, Size
from .table import BucketTable


def novelai_ladder(
    max_size: tuple[int, int] = (512, 768),
    min_dim: int = 256,
    *,
    max_dim: int = 1024,
    step: int = 64,
    base: tuple[int, int] | None = (512, 512),
) -> BucketTable:
    """Return NovelAI's image buckets: for each side, the longest other side within an area cap.

    Both passes are made: the tallest bucket for each width and the widest for each height. Buckets stand in order of
    width, and of falling height for equal widths. Source: NovelAI's aspect ratio bucketing (2022).

    Args:
        max_size (`tuple[int, int]`): Two sides in pixels whose product caps the area of a bucket, inclusive.
        min_dim (`int`): Shortest side in pixels, a multiple of `step`.
        max_dim (`int`): Longest side in pixels.
        step (`int`): Sides are multiples of this many pixels.
        base (`tuple[int, int]`, *optional*): `(height, width)` of a bucket that the table holds in any case and that
            batches of mixed buckets use.

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
    max_aspect_ratio: float = 4.0,
    num_aspect_ratios: int = 9,
    tolerance: float = 0.1,
) -> BucketTable:
    """Return buckets of nearly equal token counts, for each token budget and number of frames.

    A budget is spent on the whole sample, so more frames mean smaller frames and batches of one budget cost the same.
    Aspect ratios are spaced evenly in log space from 1/max to max; each bucket has its mirror image. A size within
    the tolerance of two budgets belongs to the smaller one.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        tokens (sequence of `int`): Token budgets per sample, one resolution tier each.
        frames (sequence of `int`): Valid frame counts (`k * temporal_stride + 1`).
        max_aspect_ratio (`float`): Largest ratio of the longer to the shorter side, at least 1.
        num_aspect_ratios (`int`): Odd number of aspect ratios per budget, half of them portrait; ratios that no
            bucket within the tolerance comes near are left out.
        tolerance (`float`): Largest relative distance of a bucket's token count from its budget.

    Returns:
        [`BucketTable`]: Ordered by frames, budget, and aspect ratio from portrait to landscape; the tier of a bucket
        is the rank of its budget.

    Raises:
        BucketingError: On an invalid number of frames or of aspect ratios, or when a budget has no bucket for some
            number of frames.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> table = token_ladder(spec, [60], frames=[17], num_aspect_ratios=3, max_aspect_ratio=1.4)
        >>> [(size.height, size.width) for size in table.sizes]
        [(64, 48), (48, 64)]
    """
    if num_aspect_ratios < 1 or num_aspect_ratios % 2 == 0 or max_aspect_ratio < 1:
        raise BucketingError(
            f"num_aspect_ratios must be odd and max_aspect_ratio at least 1, "
            f"got {num_aspect_ratios} and {max_aspect_ratio}."
        )
    if not tokens or not frames or not 0 <= tolerance < 1:
        raise BucketingError("token_ladder needs a budget, a number of frames, and a tolerance from 0 to below 1.")
    sizes, tiers = [], []
    for count in sorted(set(frames)):
        per_frame, _, _ = spec.grid(Size(count, *spec.multiples))
        for tier, budget in enumerate(sorted(set(tokens))):
            shapes = _shapes(budget / per_frame, spec, (max_aspect_ratio, num_aspect_ratios, tolerance))
            if not shapes:
                raise BucketingError(
                    f"No frame of {budget / per_frame:.1f} ± {tolerance:.0%} tokens exists with an aspect ratio up to "
                    f"{max_aspect_ratio}: a budget of {budget} tokens over {count} frames ({per_frame} token frames) "
                    "is too small. Raise the budget or the tolerance, or leave that number of frames out."
                )
            new = [Size(count, *shape) for shape in shapes if Size(count, *shape) not in sizes]
            sizes += new
            tiers += [tier] * len(new)
    return BucketTable(sizes=tuple(sizes), tiers=tuple(tiers))


def _shapes(budget: float, spec: LatentSpec, limits: tuple[float, int, float]) -> list[tuple[int, int]]:
    """Return `(height, width)` in pixels with about `budget` tokens per frame, from portrait to landscape."""
    max_ratio, num_ratios, tolerance = limits
    step_height, step_width = spec.multiples
    squarest, longest = budget * (1 + tolerance), budget * (1 - tolerance) / max_ratio
    per_height = step_width / step_height  # a frame of landscape shape has at most sqrt(tokens · this) rows of tokens
    candidates = [
        (height * step_height, width * step_width)
        for height in range(max(1, int(math.sqrt(longest * per_height))), int(math.sqrt(squarest * per_height)) + 2)
        for width in range(
            max(1, math.ceil(budget * (1 - tolerance) / height)), int(budget * (1 + tolerance) / height) + 1
        )
        if step_width * width >= step_height * height and step_width * width <= max_ratio * step_height * height
    ]
    if not candidates:
        return []
    half, chosen = num_ratios // 2, set()
    spacing = math.log(max_ratio) / max(half, 1)
    for rank in range(half + 1):

        def distance(shape: tuple[int, int], goal: float = rank * spacing) -> tuple[float, float, int]:
            pixels = shape[0] * shape[1]
            wanted = budget * step_height * step_width
            return round(abs(math.log(shape[1] / shape[0]) - goal), 9), abs(pixels - wanted), shape[0]

        best = min(candidates, key=distance)
        if distance(best)[0] <= max(spacing / 2, math.log(1.1)):
            chosen.add(best)
    mirrored = {(width, height) for height, width in chosen}
    if step_height != step_width:
        mirrored = {shape for shape in mirrored if shape[0] % step_height == 0 and shape[1] % step_width == 0}
    return sorted(chosen | mirrored, key=lambda shape: (shape[1] / shape[0], shape))
