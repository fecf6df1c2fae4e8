"""Bucket tables: ordered sets of target sizes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import IntArray, column_values
from .assignment import Assignment, AssignmentRule, BucketSearch, as_columns
from .sizes import LatentSpec, Size


@functools.lru_cache(maxsize=8)
def _search(sizes: tuple[Size, ...], tiers: tuple[int, ...], rule: AssignmentRule) -> BucketSearch:
    return BucketSearch(sizes, tiers, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTable:
    """An ordered, immutable set of bucket sizes; a bucket's id is its position.

    Args:
        sizes (`tuple[Size, ...]`): The buckets, all different, at least one.
        tiers (`tuple[int, ...]`, *optional*): Resolution tier of each bucket, larger for higher resolution.
            A sample takes the highest tier that does not enlarge it. Defaults to one tier.
        base (`int`, *optional*): Id of the bucket whose size mixed batches take.

    Raises:
        BucketingError: On an empty table, a bucket named twice, a side below 1, or unsuitable `tiers` or `base`.
    """

    sizes: tuple[Size, ...]
    tiers: tuple[int, ...] = field(default=())
    base: int | None = None

    def __post_init__(self) -> None:
        sizes = tuple(Size(*map(int, size)) for size in self.sizes)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "tiers", tuple(map(int, self.tiers)) or (0,) * len(sizes))
        if not sizes:
            raise BucketingError("A bucket table needs at least one size.")
        before: set[Size] = set()
        for position, size in enumerate(sizes):
            if min(size) < 1:
                raise BucketingError(f"Bucket {position} is {size}; every side must be at least 1.")
            if size in before:
                raise BucketingError(f"The table holds bucket {size} twice; name each size once.")
            before.add(size)
        if len(self.tiers) != len(sizes):
            raise BucketingError(f"A table of {len(sizes)} buckets needs as many tiers, got {len(self.tiers)}.")
        if self.base is not None and not 0 <= self.base < len(sizes):
            raise BucketingError(f"base={self.base} is not the id of one of the {len(sizes)} buckets.")

    @classmethod
    def parse(cls, text: str, *, frames: Sequence[int] = (1,)) -> BucketTable:
        """Read diffusers' bucket text, `"height,width;height,width"`, once for each number of frames.

        Raises:
            BucketingError: If a part of the text is not two whole numbers.

        Example:
            >>> BucketTable.parse("480,832;832,480", frames=[1, 49]).sizes[2]
            Size(frames=49, height=480, width=832)
        """
        pairs = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            numbers = part.split(",")
            if len(numbers) != 2 or not all(number.strip().isdigit() for number in numbers):
                raise BucketingError(f'Expected "height,width;height,width", got {part!r} in {text!r}.')
            pairs.append((int(numbers[0]), int(numbers[1])))
        return cls(sizes=tuple(Size(count, *pair) for count in frames for pair in pairs))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def max_frames(self) -> int:
        """Frames of the longest bucket."""
        return max(size.frames for size in self.sizes)

    def size(self, bucket_id: int) -> Size:
        """Return the size of a bucket.

        Raises:
            BucketingError: If the table has no such bucket.
        """
        if not 0 <= bucket_id < len(self.sizes):
            raise BucketingError(f"The table has buckets 0 to {len(self.sizes) - 1}, not {bucket_id}.")
        return self.sizes[bucket_id]

    def num_tokens(self, bucket_ids: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of each bucket id, 0 for rejected samples; shape as given.

        Raises:
            BucketingError: If a bucket of the table does not divide into whole tokens.
        """
        per_bucket = np.array([*map(spec.num_tokens, self.sizes), 0], np.int64)  # REJECTED_BUCKET (−1) is the last one
        return np.take(per_bucket, column_values(bucket_ids, np.int64))

    def assign(
        self,
        frames: npt.ArrayLike,
        heights: npt.ArrayLike,
        widths: npt.ArrayLike,
        *,
        rule: AssignmentRule | None = None,
    ) -> Assignment:
        """Assign each sample to the bucket that loses least of it.

        Images go to one-frame buckets, videos to buckets of more frames: as many frames as the sample can fill, then
        the highest tier, and in it the nearest aspect ratio. If that bucket would enlarge the sample too much, another
        of the tier that keeps 94 % of the frame or more (|ln(ratio ÷ bucket's)| up to 0.06) replaces it. If there is
        none, the search continues with the next lower tier, then with fewer frames. Ties go to the bucket that comes
        first in the table.

        Args:
            frames (array of `int`, shape `(n,)`): Frames at the target fps; 1 for an image, negative if unreadable.
            heights (array of `int`, shape `(n,)`): Heights in pixels.
            widths (array of `int`, shape `(n,)`): Widths in pixels.
            rule ([`AssignmentRule`], *optional*): Metric and limits; by default log, ln 2, and no enlargement.

        Returns:
            [`Assignment`]: Arrays of shape `(n,)`.

        Raises:
            BucketingError: If the three arrays differ in length.
        """
        return _search(self.sizes, self.tiers, rule or AssignmentRule()).assign(*as_columns(frames, heights, widths))

    def with_base(self, size: Sequence[int] | None = None) -> BucketTable:
        """Return the same table with a base bucket, for batches that mix buckets (`remainder="catch_all"`).

        Bucket ids do not change. Give the new table to the sampler and to the collator.

        Args:
            size (`(height, width)` or `(frames, height, width)`, *optional*): A bucket of the table; without frames,
                the one with the fewest frames. By default the bucket that most samples can fill: the one nearest to a
                square among those with the fewest frames and the lowest tier.

        Raises:
            BucketingError: If the table has no such bucket.

        Example:
            >>> table = BucketTable.parse("480,832;640,640;832,480", frames=[1, 49]).with_base()
            >>> table.size(table.base)
            Size(frames=1, height=640, width=640)
        """
        wanted = None if size is None else tuple(map(int, size))
        fitting = [
            position
            for position, bucket in enumerate(self.sizes)
            if wanted in (None, tuple(bucket), (bucket.height, bucket.width))
        ]
        if not fitting:
            sizes = ", ".join(map(str, self.sizes))
            raise BucketingError(
                f"The base must be a bucket of the table, (height, width) or (frames, height, width), not {size}; the "
                f"table has {sizes}."
            )

        def unlikely(position: int) -> tuple[float, ...]:
            frames, height, width = self.sizes[position]
            return frames, self.tiers[position], round(abs(math.log(width / height)), 9)

        return replace(self, base=min(fitting, key=unlikely))

    def images_at_video_sizes(self) -> BucketTable:
        """Return the table whose one-frame buckets are the heights and widths of its buckets of more frames.

        Images then train at the sizes of videos, as in Open-Sora-Plan. Other one-frame buckets are dropped; the
        buckets of videos keep their order and tiers, and follow those of images. The buckets of images get one tier
        per number of frames and tier of the videos, higher for larger frames: a large image takes the size of the
        largest videos. A size that comes from several of them belongs to the highest.

        Raises:
            BucketingError: If the table has no bucket of more than one frame, or its base bucket would be dropped.

        Example:
            >>> table = BucketTable(sizes=((1, 64, 64), (9, 48, 80), (9, 80, 48), (17, 48, 80)))
            >>> [tuple(size) for size in table.images_at_video_sizes().sizes]
            [(1, 48, 80), (1, 80, 48), (9, 48, 80), (9, 80, 48), (17, 48, 80)]
        """
        videos = [(size, tier) for size, tier in zip(self.sizes, self.tiers, strict=True) if size.frames > 1]
        if not videos:
            raise BucketingError(
                "Images can take the sizes of videos only if the table has buckets of several frames."
            )
        areas: dict[tuple[int, int], int] = {}
        for size, tier in videos:
            areas[size.frames, tier] = max(areas.get((size.frames, tier), 0), size.height * size.width)
        ranks = {area: rank for rank, area in enumerate(sorted(set(areas.values())))}
        images: dict[Size, int] = {}
        for size, tier in videos:
            image, rank = Size(1, size.height, size.width), ranks[areas[size.frames, tier]]
            images[image] = max(images.get(image, 0), rank)
        sizes = (*images, *(size for size, _ in videos))
        if self.base is not None and self.sizes[self.base] not in sizes:
            raise BucketingError(
                f"The base bucket {self.sizes[self.base]} is not a size of a video; give the table another base first."
            )
        return BucketTable(
            sizes=sizes,
            tiers=(*images.values(), *(tier for _, tier in videos)),
            base=None if self.base is None else sizes.index(self.sizes[self.base]),
        )

    def to_json(self) -> str:
        """Return the table as JSON text; [`from_json`][BucketTable.from_json] reads it back unchanged."""
        sizes = [list(size) for size in self.sizes]
        return json.dumps({"version": 1, "sizes": sizes, "tiers": list(self.tiers), "base": self.base})

    @classmethod
    def from_json(cls, text: str) -> BucketTable:
        """Read a table that [`to_json`][BucketTable.to_json] wrote.

        Raises:
            BucketingError: If the text is not such a table.
        """
        try:
            data = json.loads(text)
            if data["version"] != 1:
                raise BucketingError(f"This release reads bucket tables of version 1, got {data['version']!r}.")
            return cls(sizes=tuple(Size(*size) for size in data["sizes"]), tiers=data["tiers"], base=data["base"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise BucketingError(f"Expected a table as BucketTable.to_json writes it: {error}.") from error

    @property
    def ids_mark(self) -> str:
        """Text that marks a `bucket_id` column as this table's; it depends on all that gives an id its meaning."""
        return f"ids of table {hashlib.sha256(repr([tuple(size) for size in self.sizes]).encode()).hexdigest()[:16]}"

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that depend on all sizes, tiers, the base, and their order."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def union_of_tables(tables: Sequence[BucketTable]) -> tuple[BucketTable, list[IntArray]]:
    """Return a table with the buckets of several, and for each of these the ids of its buckets in it.

    Buckets of equal size become one, so that the rows of several sources share batches. They keep the order in which
    they first occur. Tiers of different tables are compared by their largest frames: a bucket that several tables
    have takes the highest. Tables with the same buckets and tiers give that table.

    Args:
        tables (sequence of [`BucketTable`]): At least one.

    Returns:
        The table, and one `int64` array of shape `(number of buckets,)` per given table.

    Raises:
        BucketingError: If there is no table, or two have different base buckets.

    Example:
        >>> a, b = BucketTable.parse("64,96;96,64"), BucketTable.parse("80,80;96,64")
        >>> table, ids = union_of_tables([a, b])
        >>> [tuple(size) for size in table.sizes], [positions.tolist() for positions in ids]
        ([(1, 64, 96), (1, 96, 64), (1, 80, 80)], [[0, 1], [2, 1]])
    """
    if not tables:
        raise BucketingError("A union of bucket tables needs at least one table.")
    bases = list(dict.fromkeys(table.sizes[table.base] for table in tables if table.base is not None))
    if len(bases) > 1:
        raise BucketingError(
            f"The tables have different base buckets, {' and '.join(map(str, bases))}, and batches that mix buckets "
            "take one size; give them the same base, or none."
        )
    sizes = tuple(dict.fromkeys(size for table in tables for size in table.sizes))
    position = {size: number for number, size in enumerate(sizes)}
    tiers = _tiers(tables)
    union = BucketTable(
        sizes=sizes, tiers=tuple(tiers[size] for size in sizes), base=position[bases[0]] if bases else None
    )
    return union, [np.array([position[size] for size in table.sizes], np.int64) for table in tables]


def _tiers(tables: Sequence[BucketTable]) -> dict[Size, int]:
    """Return the tier of each size: that of its table, if all agree, or the rank of that tier's largest frame."""
    named: dict[Size, set[int]] = {}
    areas: dict[tuple[int, int], int] = {}
    for number, table in enumerate(tables):
        for size, tier in zip(table.sizes, table.tiers, strict=True):
            named.setdefault(size, set()).add(tier)
            areas[number, tier] = max(areas.get((number, tier), 0), size.height * size.width)
    if all(set(table.sizes) == set(tables[0].sizes) for table in tables) and all(
        len(tiers) == 1 for tiers in named.values()
    ):
        return {size: next(iter(tiers)) for size, tiers in named.items()}
    rank = {area: number for number, area in enumerate(sorted(set(areas.values())))}
    ranks: dict[Size, int] = {}
    for number, table in enumerate(tables):
        for size, tier in zip(table.sizes, table.tiers, strict=True):
            ranks[size] = max(ranks.get(size, 0), rank[areas[number, tier]])
    return ranks
