"""Buckets divided so that what is in one part can be stacked, conditions included."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.assignment import has_bucket
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from .rows import RowConditions


class BucketParts(NamedTuple):
    """Buckets divided so that the rows of a part can be stacked: conditions included, all have equal sizes.

    Attributes:
        ids (`int64`, shape `(n,)`): Part of each row, numbered from 0; rejected rows keep their bucket id.
        bucket_ids (`int64`, shape `(k,)`): Bucket of each part.
        condition_tokens (`int64`, shape `(k,)`): Tokens of the conditions of a row of each part.
    """

    ids: IntArray
    bucket_ids: IntArray
    condition_tokens: IntArray

    def buckets_of(self, labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return labels of batches with the bucket in place of each part; other labels stay what they are."""
        buckets, of_part = labels.copy(), has_bucket(labels)
        buckets[of_part] = self.bucket_ids[labels[of_part]]
        return buckets


def bucket_parts(
    bucket_ids: npt.ArrayLike, conditions: RowConditions, *, table: BucketTable | OpenTable, spec: LatentSpec
) -> BucketParts:
    """Divide buckets by the sizes of the conditions of their rows.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        conditions ([`RowConditions`]): Conditions of the rows.
        table ([`BucketTable`] or [`OpenTable`]): Their table.
        spec ([`LatentSpec`]): Strides and patch of the model.
    """
    ids = np.asarray(bucket_ids, np.int64)
    usable, samples = has_bucket(ids), sample_sizes(ids, table)
    keys = ids
    for signatures in conditions.signatures(samples, spec=spec):
        keys = keys * (signatures.max(initial=0) + 1) + signatures
    tokens = conditions.num_tokens(samples, spec=spec)
    _, first, of_row = np.unique(keys[usable], return_index=True, return_inverse=True)
    parts = ids.copy()
    parts[usable] = of_row.ravel()
    return BucketParts(parts, ids[usable][first], tokens[usable][first])


def tokens_with(
    conditions: RowConditions,
    tokens: IntArray,
    bucket_ids: npt.ArrayLike,
    *,
    table: BucketTable | OpenTable,
    spec: LatentSpec,
) -> IntArray:
    """Return tokens of rows with those of their conditions, `(n,)`; the same array where there are no conditions.

    Args:
        conditions ([`RowConditions`]): Conditions of the rows.
        tokens (array of `int`, shape `(n,)`): Tokens of the samples themselves.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        table ([`BucketTable`] or [`OpenTable`]): Their table.
        spec ([`LatentSpec`]): Strides and patch of the model.
    """
    return tokens + conditions.num_tokens(sample_sizes(bucket_ids, table), spec=spec) if conditions else tokens


def sample_sizes(bucket_ids: npt.ArrayLike, table: BucketTable | OpenTable) -> IntArray:
    """Return frames, height and width of the bucket of each row, `(n, 3)`; 0 for rejected rows."""
    ids, of_row = np.unique(np.asarray(bucket_ids, np.int64), return_inverse=True)
    sizes = [table.size(bucket) if bucket >= 0 else (0, 0, 0) for bucket in ids.tolist()]
    return np.array(sizes, np.int64).reshape(-1, 3)[of_row.ravel()]
