"""Bucket tables chosen from the sizes of samples, so that the most of their frames is kept.

Each sample belongs to the most frames, and there to the largest budget of tokens, of which it fills a size: such
samples and sizes are a group. Within a group the choice of k sizes is exact: by rising aspect ratio, the samples of a
size lie between two boundaries, which depend on its two neighbours alone, so that a dynamic programme over pairs of
neighbours finds the best choice. A second one shares the buckets out among groups.

A sample counts with its kept area, or with nothing where its bucket would enlarge it too much. Such a sample may
still find a bucket, in its group or a lower one ([`BucketTable.assign`]), so that a table keeps at least what was
counted, unless a sample takes a bucket of a higher group, which it fills only at a ratio far from its own.

Samples of one size are counted once, in one sort; all else depends on sizes. Of m sizes to choose from and u sizes of
samples, a group takes m·u operations for its sums, m² for each bucket, and memory of m² + u numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import FloatArray, IntArray
from .assignment import AssignmentRule, as_columns, has_bucket, unusable
from .kept import kept_area
from .ladders import all_ladder_sizes
from .sizes import LatentSpec
from .table import BucketTable

_TIE = 1e-9
"""Kept area, as a share of all samples, that is not worth a bucket: it may be rounding."""

_BLOCK = 64
"""Sizes whose choices are extended together, in a processor's cache."""


def fitted_ladder(
    spec: LatentSpec,
    tokens: Sequence[int],
    samples: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    *,
    num_buckets: int,
    frames: Sequence[int] = (1,),
    sizes: Sequence[tuple[int, int]] = (),
    max_aspect_ratio: float = 4.0,
    tolerance: float = 0.1,
    own_budgets: bool = True,
    rule: AssignmentRule | None = None,
) -> BucketTable:
    """Return at most `num_buckets` sizes, those of which samples keep the largest area.

    It chooses among all sizes that [`token_ladder`] chooses from, for the same budgets and numbers of frames. Each
    sample belongs to the most frames, and to the largest budget, of which it fills a size; each of these that has
    samples gets at least one bucket. Within them the choice is exact: no other has a larger sum of kept areas, where a
    sample takes the bucket nearest to its aspect ratio, and counts nothing if that bucket would enlarge it too much.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        tokens (sequence of `int`): Token budgets per sample, one resolution tier each.
        samples (three arrays of `int`, shape `(n,)`): Frames at the target fps (1 for an image), heights and widths in
            pixels of the samples. Those without a valid size are omitted.
        num_buckets (`int`): Most buckets of the table. It has fewer if more would keep nothing more.
        frames (sequence of `int`): Valid frame counts (`k * temporal_stride + 1`).
        sizes (sequence of `(height, width)`): The model's own sizes in pixels, which may be chosen, and make budgets
            of their own as in [`token_ladder`].
        max_aspect_ratio (`float`): Largest ratio of the longer to the shorter side, at least 1, except of `sizes`.
        tolerance (`float`): Largest relative distance of a bucket's token count from its budget.
        own_budgets (`bool`): Whether one of `sizes` that no budget matches makes a budget of its own, or is omitted.
        rule ([`AssignmentRule`], *optional*): Metric and limits of the assignment; by default log, ln 2, and no
            enlargement.

    Returns:
        [`BucketTable`]: Ordered by frames, budget, and aspect ratio from portrait to landscape.

    Raises:
        BucketingError: As [`token_ladder`], if no sample fills any size, or if `num_buckets` is below the number of
            budgets, at their numbers of frames, that have samples.

    Example:
        >>> spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
        >>> samples = [1, 1, 1], [480, 480, 720], [640, 640, 480]  # two of 4:3, one of 2:3
        >>> for num_buckets in (1, 2):
        ...     table = fitted_ladder(spec, [1024], samples, num_buckets=num_buckets)
        ...     print([(size.height, size.width) for size in table.sizes])
        [(432, 576)]
        [(624, 416), (432, 576)]
    """
    rule = rule or AssignmentRule()
    every, distances = all_ladder_sizes(
        spec,
        tokens,
        frames=frames,
        sizes=sizes,
        max_aspect_ratio=max_aspect_ratio,
        tolerance=tolerance,
        own_budgets=own_budgets,
    )
    groups = _groups_of(every, distances, _count_samples(samples, frames), rule)
    if not groups:
        raise BucketingError(
            "No sample fills a bucket of these budgets and numbers of frames, so that `num_buckets` has none to "
            "choose from.",
            advice=["lower `bucket_tokens`", "add smaller numbers to `bucket_frames`", "raise `max_upscale`"],
        )
    if num_buckets < len(groups):
        raise BucketingError(
            f"`num_buckets` must be at least {len(groups)}, got {num_buckets}: the samples fall into {len(groups)} "
            "budgets and numbers of frames, and each needs a bucket.",
            advice=[f"raise it to {len(groups)}", "give fewer `bucket_tokens`", "give fewer `bucket_frames`"],
        )
    total = sum(int(group.counts.sum()) for group in groups)
    choices = [_best_choices(group, rule, most=num_buckets - len(groups) + 1) for group in groups]
    shared = _share_out([choice.kept for choice in choices], num_buckets, tie=_TIE * total)
    chosen = np.sort(np.concatenate([choice.ids(count) for choice, count in zip(choices, shared, strict=True)]))
    return BucketTable(sizes=tuple(every.sizes[i] for i in chosen), tiers=tuple(every.tiers[i] for i in chosen))


class _Counts(NamedTuple):
    """Sizes of samples, each with their number; arrays of shape `(u,)`."""

    frames: IntArray
    heights: IntArray
    widths: IntArray
    counts: IntArray


def _count_samples(samples: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], frames: Sequence[int]) -> _Counts:
    """Return the sizes of samples with the largest of `frames` that each has; too short ones are omitted."""
    columns = as_columns(*samples)
    counts = np.array(sorted(set(frames)), np.int64)
    position = np.searchsorted(counts, columns[0], side="right") - 1
    position[(unusable(*columns) != 0) | ((columns[0] > 1) & (counts[position] == 1))] = -1
    parts = [np.zeros((4, 0), np.int64)]
    for number, count in enumerate(counts):
        heights, widths = (column[position == number] for column in columns[1:])
        keys, numbers = np.unique((heights << 32) | widths, return_counts=True)
        parts.append(np.stack([np.full_like(keys, count), keys >> 32, keys & 0xFFFFFFFF, numbers]))
    return _Counts(*np.concatenate(parts, axis=1))


class _Group(NamedTuple):
    """Sizes of one number of frames and one budget, and the sizes of its samples, both by rising aspect ratio.

    Attributes:
        ids: Positions of the sizes in the table of all, of shape `(m,)`; of equal ratios, the nearest to the budget
            first.
        shapes: Heights and widths of these sizes, `(m, 2)`.
        heights: Heights of the sizes of samples, `(u,)`.
        widths: Widths of the sizes of samples, `(u,)`.
        counts: Number of samples of each size, `(u,)`.
    """

    ids: IntArray
    shapes: IntArray
    heights: IntArray
    widths: IntArray
    counts: IntArray


def _groups_of(every: BucketTable, distances: FloatArray, samples: _Counts, rule: AssignmentRule) -> list[_Group]:
    """Return the groups that have samples."""
    sizes = np.array(every.sizes, np.int64)
    assigned = every.assign(samples.frames, samples.heights, samples.widths, rule=rule).bucket_id
    keys = np.stack([sizes[:, 0], np.array(every.tiers, np.int64)], axis=1)
    _, of_size = np.unique(keys, axis=0, return_inverse=True)
    of_size = of_size.ravel()
    of_sample = np.where(has_bucket(assigned), of_size[assigned], -1)
    ratios = samples.widths / samples.heights
    groups = []
    for group in np.unique(of_sample[of_sample >= 0]):
        ids, rows = np.flatnonzero(of_size == group), np.flatnonzero(of_sample == group)
        ids = ids[np.lexsort((distances[ids], sizes[ids, 2] / sizes[ids, 1]))]
        rows = rows[np.argsort(ratios[rows], kind="stable")]
        groups.append(_Group(ids, sizes[ids, 1:], samples.heights[rows], samples.widths[rows], samples.counts[rows]))
    return groups


class _Choices(NamedTuple):
    """The best choices of 1, 2, … sizes of a group.

    Attributes:
        kept: Sum of the kept areas of each choice.
        last: Position of the last size of each choice.
        before: For each number of sizes after the first, the best position before each last one, `(m,)`.
        group_ids: The group's `ids`.
    """

    kept: FloatArray
    last: list[int]
    before: list[IntArray]
    group_ids: IntArray

    def ids(self, count: int) -> IntArray:
        """Return the ids of the best choice of so many sizes."""
        positions = [self.last[count - 1]]
        for before in reversed(self.before[: count - 1]):
            positions.append(int(before[positions[-1]]))
        return self.group_ids[positions]


def _best_choices(group: _Group, rule: AssignmentRule, *, most: int) -> _Choices:
    """Return the best choices of up to `most` sizes of a group, fewer if they keep all that any size keeps."""
    gains, ends, largest = _gains(group, rule)
    values, kept, last, before = np.zeros(len(ends)), [], [], []
    for number in range(min(most, len(ends))):
        if number:
            values, position = _with_one_more(values, gains)
            before.append(position)
        totals = values + ends
        last.append(int(totals.argmax()))
        kept.append(float(totals[last[-1]]))
        if kept[-1] >= largest * (1 - _TIE) or kept[-1] == -np.inf:  # of equal ratios, one is chosen
            break
    return _Choices(np.array(kept), last, before, group.ids)


def _with_one_more(values: FloatArray, gains: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return what choices keep at best, by their last size, and the positions of the sizes before; both `(m,)`."""
    best, position = np.empty_like(values), np.zeros(len(values), np.int64)
    for start in range(0, len(values), _BLOCK):  # only sizes of lower ratios come before
        rows = slice(start, start + _BLOCK)
        steps = gains[rows, : rows.stop] + values[: rows.stop]
        position[rows] = steps.argmax(axis=1)
        best[rows] = np.take_along_axis(steps, position[rows, None], axis=1)[:, 0]
    return best, position


def _gains(group: _Group, rule: AssignmentRule) -> tuple[FloatArray, FloatArray, float]:
    """Return what pairs of neighbours in a choice add to its kept area.

    With S(j, b) for what the samples below a boundary b would keep in size j, the samples of size j keep
    S(j, boundary to the next size) − S(j, boundary to the size before). A pair i, j thus adds S(i, b) − S(j, b), and
    the last size adds S(j, ∞).

    Returns:
        The sums that pairs add, `(m, m)` by the second and the first of them, −inf where the second ratio is not above
        the first; those that the last size adds, `(m,)`; and the sum if each sample had its best size.
    """
    ratios = group.shapes[:, 1] / group.shapes[:, 0]
    of_samples = group.widths / group.heights
    least = rule.least_sides(group.shapes)
    gains = np.where(ratios[:, None] > ratios, 0.0, -np.inf)
    ends, best = np.zeros(len(ratios)), np.zeros(len(of_samples))
    for number, (height, width) in enumerate(group.shapes.tolist()):
        low, high = rule.near_ratios(ratios[number])
        near = slice(np.searchsorted(of_samples, low), np.searchsorted(of_samples, high, side="right"))
        heights, widths = group.heights[near], group.widths[near]
        kept = kept_area(heights, widths, target_heights=height, target_widths=width)
        kept *= (heights >= least[number, 0]) & (widths >= least[number, 1])
        sums = np.zeros(len(of_samples) + 1)
        sums[near.start + 1 : near.stop + 1] = np.cumsum(kept * group.counts[near])
        sums[near.stop + 1 :] = sums[near.stop]
        boundaries = rule.boundaries(ratios[number], ratios)
        # A sample on a boundary belongs to the left size.
        kept_below = sums[np.searchsorted(of_samples, boundaries, side="right")]
        gains[number, :number] -= kept_below[:number]
        gains[number + 1 :, number] += kept_below[number + 1 :]
        ends[number] = sums[-1]
        best[near] = np.maximum(best[near], kept)
    return gains, ends, float((best * group.counts).sum())


def _share_out(curves: Sequence[FloatArray], most: int, *, tie: float) -> list[int]:
    """Return how many buckets each group gets, so that the sum of what they keep is the largest; fewer at a tie.

    Args:
        curves (sequence of arrays): What each group keeps with 1, 2, … buckets.
        most (`int`): Most buckets of all groups, at least one for each.
        tie (`float`): Difference of sums that is none.
    """
    best = np.full(most + 1, -np.inf)
    best[0] = 0
    taken = []
    for curve in curves:
        sums, counts = np.full(most + 1, -np.inf), np.zeros(most + 1, np.int64)
        for count, kept in enumerate(curve[:most], start=1):
            with_count = best[: most + 1 - count] + kept
            better = np.flatnonzero(with_count > sums[count:] + tie) + count
            sums[better], counts[better] = with_count[better - count], count
        best = sums
        taken.append(counts)
    number = int(np.flatnonzero(best >= best.max() - tie)[0])
    shared = []
    for counts in reversed(taken):
        shared.append(int(counts[number]))
        number -= shared[-1]
    return shared[::-1]
