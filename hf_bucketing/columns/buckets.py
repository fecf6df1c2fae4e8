"""Columns of the bucket, token count, aspect ratio and rejection of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Features, Value

from ..buckets.assignment import AssignmentRule, Rejection
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .arrays import whole_numbers

_LABELS = [reason.label for reason in Rejection]


@dataclass(frozen=True, slots=True)
class BucketColumns:
    """Compute `aspect_ratio`, `bucket_id`, `num_tokens` and `rejection` from `width`, `height` and `num_frames`.

    A vectorised batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; takes lists, numpy
    arrays or Arrow columns. Without a `num_frames` column, all rows are images. Rejected rows get `bucket_id` −1, 0
    tokens, and the label of a [`Rejection`][hf_bucketing.Rejection] such as `"too_small"`; other rows get `"none"`.
    Rows without a size count as unreadable.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): Table that rows are assigned to. `open_table(spec)` gives each row
            its own rounded size, for packing; its images may take the sizes of videos.
        spec ([`LatentSpec`]): Strides and patch of the model, by which pixels become tokens.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule], *optional*): Metric and limits of a `BucketTable`.

    Raises:
        BucketingError: If `rule` is given with an open table, which has its own rule.
    """

    table: BucketTable | OpenTable
    spec: LatentSpec
    rule: AssignmentRule | None = field(default=None, kw_only=True)
    rule_version: int = field(default=2, init=False)

    input_columns = ("width", "height")
    optional_columns = ("num_frames",)
    output_columns = ("aspect_ratio", "bucket_id", "num_tokens", "rejection")
    vectorised = True

    def __post_init__(self) -> None:
        if self.rule is not None and isinstance(self.table, OpenTable):
            raise BucketingError(
                "`rule` has no effect with an open table, which fits every sample, or has its own rule for images; "
                "leave it out."
            )

    @property
    def features(self) -> Features:
        """Types of the four columns; that of `bucket_id` says which table the ids belong to."""
        types = zip(self.output_columns, ("float32", "int32", "int64", "string"), strict=True)
        marks = {"bucket_id": self.table.ids_mark}
        return Features({name: Value(dtype, id=marks.get(name)) for name, dtype in types})

    def __call__(self, batch: Mapping[str, Sequence[Any]] | pa.Table) -> dict[str, npt.NDArray[Any]] | pa.Table:
        """Return the four columns for a batch of sizes; for an Arrow table, return a table.

        Raises:
            BucketingError: If a bucket of the table does not divide into whole tokens of `spec`.
            ColumnError: If a size column does not hold whole numbers.
        """
        width, height = whole_numbers(batch, "width"), whole_numbers(batch, "height")
        names = batch.column_names if isinstance(batch, pa.Table) else batch
        frames = whole_numbers(batch, "num_frames") if "num_frames" in names else np.ones_like(width)
        if isinstance(self.table, OpenTable):
            assignment = self.table.assign(frames, height, width)
        else:
            assignment = self.table.assign(frames, height, width, rule=self.rule)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (width / height).astype(np.float32)
        ratio[(height < 1) | (width < 1)] = np.nan
        columns = {
            "aspect_ratio": ratio,
            "bucket_id": assignment.bucket_id,
            "num_tokens": self.table.num_tokens(assignment.bucket_id, spec=self.spec),
        }
        if isinstance(batch, pa.Table):
            return pa.table({**columns, "rejection": pa.array(_LABELS).take(pa.array(assignment.rejection))})
        return {**columns, "rejection": np.array(_LABELS, object)[assignment.rejection]}
