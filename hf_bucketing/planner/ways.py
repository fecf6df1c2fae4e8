"""Ways of batching that a suggestion tries: buckets, of tables by the model and by the rows, and packs of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..buckets.arrays import BoolArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET, AssignmentRule, Rejection, has_bucket
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..columns.settings import TableConfig
from ..plans.ways import WayName
from ..report.measure import AssignedColumns, Sizes, Targets, assigned_targets, bucket_targets, packed_targets
from .components import Components

_FRAMES = 81
_QUANTILES = (0, 0.25, 0.5, 0.75)
_SMALLER = 4
"""Factor between the two budgets of a table of the model's own sizes, see docs/choosing-a-table.md."""


def tables_of(components: Components, sizes: Sizes, *, num_buckets: int | None = None) -> dict[str, TableConfig]:
    """Return bucket tables to try: one for each of the model's own sizes, and one for the sizes of the rows.

    Each has two budgets of tokens: that of its size at the most frames, and a quarter, or quartiles of the rows.
    Frames are quantiles of those of the rows, up to 81 or as many as the model takes.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        sizes ([`Sizes`][hf_bucketing.report.measure.Sizes]): Sizes of readable rows.
        num_buckets (`int`, *optional*): Most buckets of further tables, one of the same budgets and frames for each,
            whose sizes are chosen from those of the rows; by default there are none.
    """
    recipe, spec = components.recipe, components.spec
    frames = _frames_of(components, sizes.frames)
    packed = packed_targets(sizes, spec=spec, max_area=None, max_frames=frames[-1])
    tokens = packed.num_tokens[packed.num_tokens > 0]
    tables = {}
    for height, width in dict.fromkeys(recipe.native_sizes):
        budget = spec.num_tokens(spec.snap(Size(frames[-1], height, width), mode="down"))
        tables[f"{height}×{width}"] = _table([budget // _SMALLER, budget], frames)
    if len(tokens):
        quartiles = np.quantile(tokens, [0.25, 0.75]).astype(int).tolist()
        tables["sizes of the data"] = _table(quartiles, frames)
    if num_buckets is None:
        return tables
    chosen = {
        f"{name}, {num_buckets} chosen": replace(table, num_buckets=num_buckets) for name, table in tables.items()
    }
    return {**tables, **chosen}


def _table(budgets: list[int], frames: list[int]) -> TableConfig:
    return TableConfig(bucket_tokens=sorted({*budgets} - {0}) or [1], bucket_frames=frames)


def _frames_of(components: Components, frames: IntArray) -> list[int]:
    """Return numbers of frames of buckets: 1 for images, and quantiles of those of videos."""
    videos = frames[frames > 1]
    if components.recipe.family.images_only or not len(videos):
        return [1]
    fixed = components.transformer.config.get("video_length")
    if fixed is not None:
        return [int(fixed)]
    spec = components.spec
    wanted = np.minimum(np.quantile(videos, _QUANTILES, method="lower"), _FRAMES).astype(int).tolist()
    counts = {spec.snap(Size(max(count, 1), *spec.multiples)).frames for count in wanted}
    return sorted({*counts, *([1] if (frames == 1).any() else [])})


class Way(NamedTuple):
    """A way of batching rows.

    Attributes:
        name (`str`): Name of its table, and whether rows are bucketed or packed.
        settings (`TableConfig`, *optional*): The table; None for that of a prepared folder.
        table ([`BucketTable`]): The table itself.
        batching (`"bucket"` or `"pack"`): Buckets or packs.
        targets ([`Targets`][hf_bucketing.report.measure.Targets]): What becomes of each row.
    """

    name: str
    settings: TableConfig | None
    table: BucketTable
    batching: WayName
    targets: Targets

    def without(self, rows: BoolArray) -> Way:
        """Return the way in which rows, of shape `(n,)`, are rejected as too large for packs."""
        targets = self.targets._replace(
            bucket_id=np.where(rows, np.int32(REJECTED_BUCKET), self.targets.bucket_id),
            rejection=np.where(rows, np.int8(Rejection.TOO_LARGE), self.targets.rejection),
            num_tokens=np.where(rows, 0, self.targets.num_tokens),
            condition_tokens=np.where(rows, 0, self.targets.condition_tokens),
        )
        return self._replace(targets=targets)


def ways_of(
    tables: Mapping[str, tuple[TableConfig | None, BucketTable]],
    sizes: Sizes,
    *,
    spec: LatentSpec,
    rule: AssignmentRule | None = None,
    assigned: AssignedColumns | None = None,
) -> Iterator[Way]:
    """Iterate over buckets of each table, and packs of rows at their own size, cut to as many frames.

    Rows are prepared with a table for packs too: of tables with as many frames, the one that rejects fewest rows.

    Args:
        tables (mapping): Tables by name, each with its settings.
        sizes ([`Sizes`][hf_bucketing.report.measure.Sizes]): Sizes of the rows.
        spec ([`LatentSpec`]): Strides and patch of the model.
        rule ([`AssignmentRule`], *optional*): Limits of the assignment of buckets.
        assigned ([`AssignedColumns`][hf_bucketing.report.measure.AssignedColumns], *optional*): Buckets that the rows
            have, where there is one table; by default they are assigned.
    """
    targets_of = partial(bucket_targets, sizes, spec=spec, rule=rule or AssignmentRule())
    if assigned is not None:
        targets_of = partial(
            assigned_targets, sizes, assigned.bucket_id.astype(np.int32), assigned.rejection, spec=spec
        )
    bucketed = {name: targets_of(table=table) for name, (_, table) in tables.items()}
    for name, (settings, table) in tables.items():
        yield Way(f"{name}, buckets", settings, table, "bucket", bucketed[name])
    widest = sorted(tables, key=lambda name: -int(has_bucket(bucketed[name].bucket_id).sum()))
    packed: dict[int, str] = {}
    for name in widest:
        packed.setdefault(tables[name][1].max_frames, name)
    for frames, name in packed.items():
        targets = packed_targets(sizes, spec=spec, max_area=None, max_frames=frames)
        yield Way(f"own sizes of at most {frames} frames, packs", *tables[name], "pack", targets)
