"""Nine clips of people walking, written as files, and what each way of batching makes of them."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from PIL import Image, ImageDraw

from hf_bucketing import (
    AssignmentRule,
    BucketCollator,
    BucketColumns,
    BucketTable,
    LatentSpec,
    MediaMetadata,
    PackCollator,
    Size,
    ViewRule,
    map_columns,
    open_table,
)
from hf_bucketing.media.write import write_image, write_video
from hf_bucketing.plans import (
    BucketPlanConfig,
    EpochPlan,
    LengthPlanConfig,
    PackPlanConfig,
    plan_buckets,
    plan_lengths,
    plan_packs,
)
from hf_bucketing.plans.packs import strip_tokens
from hf_bucketing.report.measure import Sizes, Targets, bucket_targets

Frame = npt.NDArray[np.uint8]
Clip = list[Frame]

CLIPS = (
    Size(33, 288, 512),
    Size(13, 512, 288),
    Size(33, 304, 496),
    Size(1, 768, 576),
    Size(17, 288, 512),
    Size(1, 720, 592),
    Size(13, 528, 288),
    Size(17, 272, 512),
    Size(1, 752, 560),
)
"""Videos of two and one seconds and images, in landscape and portrait."""

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
BUCKETS = BucketTable(sizes=(Size(33, 288, 496), Size(17, 272, 496), Size(13, 512, 288), Size(1, 720, 560)))
SQUARES = BucketTable(sizes=tuple(Size(frames, 272, 272) for frames in (1, 13, 17, 33)))
STRIP_LENGTH = 64
FPS = 16
SKIES = ("#8fc9f0", "#f6c667", "#a5dba8", "#f4a9a0", "#c3b4ee", "#f2b3d6", "#9adbd6", "#d9cc7a", "#c2cad6")
SHIRTS = ("#c8452f", "#1f5fa8", "#8a2be2", "#177245", "#b3401f", "#2b4c9b", "#a3195b", "#5b3a94", "#d35400")


class Ways(NamedTuple):
    """What the four ways make of the clips: their plans, targets and pixels."""

    dataset: Dataset
    squares: Targets
    bucketed: Targets
    padded: EpochPlan
    batches: EpochPlan
    packs: EpochPlan
    num_tokens: npt.NDArray[np.int64]
    max_tokens: int

    def figures(self) -> dict[str, Any]:
        """Return the figures of the picture."""
        pixels = np.array([math.prod(size) for size in CLIPS])

        def lost(targets: Targets) -> float:
            return float(1 - (pixels * targets.kept_area * targets.kept_frames).sum() / pixels.sum())

        return {
            "clips": [f"{size.frames}×{size.height}×{size.width}" for size in CLIPS],
            "tokens": self.num_tokens.tolist(),
            "max_tokens": self.max_tokens,
            "squares_lost": lost(self.squares),
            "padding": self.padded.summary(num_tokens=self.num_tokens)["padding"],
            "buckets_lost": lost(self.bucketed),
            "batches": self.batches.num_batches,
            "sequences_padded": len(self.padded.indices),
            "sequences_packed": self.packs.num_batches,
            "packed_fill": float(self.num_tokens.sum() / (self.packs.num_batches * self.max_tokens)),
        }


def walker(size: Size, *, sky: str, shirt: str) -> Iterator[Frame]:
    """Yield frames of people walking: one whose head is near the top edge, or in landscape two near the sides."""
    height, width = size.height, size.width
    places = (0.23, 0.77) if width > height else (0.5,)
    for frame in range(size.frames):
        image = Image.new("RGB", (width, height), sky)
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0.86 * height, width, height), fill="#6f7f5f")
        for number, place in enumerate(places):
            walked = (0.14 if width > height else 0.04) * (frame / 32) * (1 - 2 * number)
            draw_person(draw, (place + walked) * width, height, phase=frame / 3 + number, shirt=shirt)
        yield np.asarray(image)


def draw_person(draw: ImageDraw.ImageDraw, x: float, height: int, *, phase: float, shirt: str) -> None:
    """Draw a person of nearly the frame's height who stands at `x`."""
    unit = height / 100
    limb = max(round(6.5 * unit), 2)
    swing = 7 * unit * math.sin(phase)
    for side in (-1, 1):
        draw.line((x, 60 * unit, x + side * (3 * unit + swing), 93 * unit), fill="#2d3142", width=limb + 2)
        draw.line((x, 32 * unit, x - side * (7 * unit + swing), 56 * unit), fill="#e8b58f", width=limb - 1)
    draw.rounded_rectangle((x - 8 * unit, 27 * unit, x + 8 * unit, 64 * unit), 5 * unit, fill=shirt)
    draw.ellipse((x - 10 * unit, 4 * unit, x + 10 * unit, 26 * unit), fill="#e8b58f")
    draw.pieslice((x - 10.5 * unit, 3 * unit, x + 10.5 * unit, 25 * unit), 180, 360, fill="#3b2a20")
    for side in (-1, 1):
        draw.ellipse((x + (4 * side - 1.2) * unit, 14 * unit, x + (4 * side + 1.2) * unit, 17 * unit), fill="#2d3142")
    draw.arc((x - 4 * unit, 16 * unit, x + 4 * unit, 22 * unit), 20, 160, fill="#2d3142", width=max(round(unit), 1))


def write_clips(folder: Path) -> Dataset:
    """Write the clips into a folder, and return a data set with their columns."""
    paths = []
    for number, size in enumerate(CLIPS):
        frames = walker(size, sky=SKIES[number], shirt=SHIRTS[number])
        paths.append(str(folder / f"{number}.{'mp4' if size.frames > 1 else 'png'}"))
        if size.frames > 1:
            write_video(paths[-1], frames, fps=FPS)
        else:
            write_image(paths[-1], next(frames))
    dataset = map_columns(Dataset.from_dict({"video": paths}), MediaMetadata("video", target_fps=FPS))
    return map_columns(dataset, BucketColumns(BUCKETS, SPEC))


def plan_ways(dataset: Dataset) -> Ways:
    """Plan an epoch of each way on one process, in the order of the clips."""
    columns = dataset.select_columns(["num_frames", "height", "width"]).with_format("numpy")[:]
    sizes = Sizes(*(columns[name].astype(np.int64) for name in ("num_frames", "height", "width")))
    own = open_table(SPEC)
    num_tokens = own.num_tokens(own.assign(*sizes).bucket_id, spec=SPEC)
    max_tokens = int(strip_tokens(num_tokens, STRIP_LENGTH).max())
    epoch = {"epoch": 0, "num_processes": 1}
    batches = BucketPlanConfig(batch_size=3, shuffle=False)
    packs = PackPlanConfig(
        max_tokens=max_tokens, strip_length=STRIP_LENGTH, strategy="best_fit_decreasing", shuffle=False
    )
    padded = LengthPlanConfig(batch_size=len(CLIPS), num_buckets=1, shuffle=False)
    return Ways(
        dataset=dataset,
        squares=bucket_targets(sizes, SQUARES, spec=SPEC, rule=AssignmentRule()),
        bucketed=bucket_targets(sizes, BUCKETS, spec=SPEC, rule=AssignmentRule()),
        padded=plan_lengths(num_tokens, padded, **epoch),
        batches=plan_buckets(dataset["bucket_id"], batches, **epoch),
        packs=plan_packs(num_tokens, packs, **epoch),
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    )


def collated(ways: Ways, rows: Sequence[int], *, packed: bool) -> list[Clip]:
    """Return the frames of rows as the loader of packs or of buckets gives them to a model."""
    options = {"views": ViewRule(random_crop=False), "caption_column": None}
    collator = PackCollator(SPEC, **options) if packed else BucketCollator(BUCKETS, **options)
    pixels = collator([ways.dataset[int(row)] for row in rows])["pixel_values"]
    return [[to_image(frame) for frame in sample.unbind(1)] for sample in pixels]


def to_image(frame: Any) -> Frame:
    """Return a frame `(3, H, W)` in [−1, 1] as `(H, W, 3)` bytes."""
    return ((frame.permute(1, 2, 0).numpy() + 1) * 127.5).round().astype(np.uint8)
