"""What a sample is shown lies over it in place and time, in buckets, packs, caches and streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketCollator, BucketTable, LatentSpec, MediaError, PackCollator, Size
from hf_bucketing.caching import CacheConfig, CachedCollator, LatentColumns
from hf_bucketing.columns import CacheInfo, map_columns
from hf_bucketing.columns.prepared_stream import PreparedStream, prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.loaders import FaultRule, RandomResize, resume
from hf_bucketing.media import MediaColumns, ViewRule, write_video
from hf_bucketing.randomness import ROW
from hf_bucketing.streaming import BucketGrouping, PackGrouping, StreamingBucketBatcher
from tests.columns.stream_cases import write_table

pytestmark = pytest.mark.usefixtures("files_anywhere")

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
RULE = ReferenceRule(multiples=SPEC.multiples)
HEIGHT, WIDTH, FRAMES, FPS = 68, 100, 24, 8
CONDITIONS = {"first_frame": "first", "last_frame": "last", "control": "control", "mask": "mask", "reference": "ref"}
SIZES = {"width": WIDTH, "height": HEIGHT, "num_frames": FRAMES, "fps": float(FPS)}


def scene(second: float, *, scale: float = 1.0) -> np.ndarray:
    """Return a frame with a red square, whose place tells the time in eighths of a second, and a green one."""
    step = int(second * FPS + 1e-6)
    squares = [square(24 + step, 30 + 1.5 * step, scale=scale), square(20, 70, scale=scale)]
    return (np.stack([*squares, 0 * squares[0]], -1) * 255).round().astype(np.uint8)


def square(row: float, column: float, *, scale: float) -> np.ndarray:
    """Return how much of each pixel lies in a square of 12 pixels, given its centre, both before scaling."""

    def share(side: int, middle: float) -> np.ndarray:
        return np.clip(6 * scale + 0.5 - abs(np.arange(round(side * scale)) + 0.5 - middle * scale), 0, 1)

    return np.outer(share(HEIGHT, row), share(WIDTH, column))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video and its conditions of other sizes, one at another rate; images and a broken file."""
    folder = tmp_path_factory.mktemp("conditions")
    write_video(folder / "clip.mp4", (scene(i / 8) for i in range(FRAMES)), fps=FPS)
    write_video(folder / "control.mp4", (scene(i / 8, scale=2) for i in range(FRAMES)), fps=FPS)
    write_video(folder / "control_at_16.mp4", (scene(i / 16) for i in range(2 * FRAMES)), fps=2 * FPS)
    masks = (scene(i / 8, scale=0.5)[..., :1].repeat(3, -1) for i in range(FRAMES))
    write_video(folder / "mask.mp4", masks, fps=FPS)
    still = scene(0.0)
    for name, frame in {"first": still, "last": scene(0.0, scale=1.5), "image": still}.items():
        Image.fromarray(frame).save(folder / f"{name}.png")
    Image.fromarray(still[..., 0]).save(folder / "mask.png")
    reference = np.zeros((40, 200, 3), np.uint8)
    reference[:, :100, 2] = 255
    Image.fromarray(reference).save(folder / "ref.png")
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


class Case(NamedTuple):
    """How a sample is shown: its view, its size in a bucket, and what its row holds beside the usual."""

    views: ViewRule
    size: Size = Size(9, 48, 80)
    row: Mapping[str, Any] = MappingProxyType({})


FIXED = ViewRule(random_crop=False)
CASES = {
    "resize": Case(FIXED, size=Size(9, 34, 50)),
    "crop": Case(ViewRule(frame_picking="start"), size=Size(9, 48, 64)),
    "flip": Case(replace(FIXED, flip_probability=1.0, flip_references=True)),
    "random start": Case(replace(FIXED, frame_picking="random")),
    "uniform": Case(replace(FIXED, frame_picking="uniform"), size=Size(5, 48, 80)),
    "other fps": Case(FIXED, row={"fps": 4.0, "num_frames": FRAMES // 2}),
    "control of other fps": Case(FIXED, row={"control": "control_at_16.mp4"}),
    "clip": Case(FIXED, row={"clip_start": 1.25, "num_frames": FRAMES // 2}),
}


def rows_of(case: Case, **cells: Any) -> list[dict[str, Any]]:
    files = {"file": "clip.mp4", "first": "first.png", "last": "last.png", "ref": "ref.png"}
    files |= {"control": "control.mp4", "mask": "mask.mp4"}
    common = {"caption": "", "bucket_id": 0, "num_tokens": 20, "rejection": "none"}
    return [{**files, **SIZES, **common, **case.row, **cells, ROW: index} for index in range(2)]


def options(folder: Path, case: Case) -> dict[str, Any]:
    own = {"column": "file", "root": str(folder), "conditions": CONDITIONS, "references": RULE}
    return {**own, "views": case.views, "seed": 3}


def bucket(folder: Path, case: Case, _tmp: Path) -> dict[str, Any]:
    return BucketCollator(BucketTable(sizes=(case.size,)), **options(folder, case))(rows_of(case)[1:])


def pack(folder: Path, case: Case, _tmp: Path) -> dict[str, Any]:
    return PackCollator(SPEC, **options(folder, case))(rows_of(case)[1:])


def resized_pack(folder: Path, case: Case, _tmp: Path) -> dict[str, Any]:
    resize = RandomResize(spec=SPEC, min_side=48, seed=0)
    batch = PackCollator(SPEC, resize=resize, **options(folder, case))(rows_of(case))
    assert len({size[1:] for size in batch["size"]}) == 2
    return batch


def encoded(
    folder: Path,
    case: Case,
    tmp: Path,
    rows: list[dict[str, Any]],
    *,
    conditions: Mapping[str, str] = CONDITIONS,
    on_error: str = "raise",
) -> tuple[Dataset, Counter[str]]:
    """Write rows to a cache of pixels and conditions as they are; return them with keys, and what was counted."""
    latents = LatentColumns(
        encode=lambda pixels, shown: {"latents": pixels, **shown},
        model="pixels",
        table=BucketTable(sizes=(case.size,)),
        files=MediaColumns(column="file", root=str(folder), conditions=conditions, references=RULE),
        config=CacheConfig(folder=str(tmp), views=case.views, seed=3, on_error=on_error),
    )
    return map_columns(Dataset.from_list(rows), latents), latents.counts


def from_cache(rows: Dataset, tmp: Path) -> dict[str, Any]:
    info = CacheInfo(
        folder=str(tmp), batching="bucket", latents_model="", text_model=None, empty_text_key=None, views={}
    )
    batch = CachedCollator(info, caption_column=None)(list(rows))
    return {**batch, "pixel_values": batch["latents"], "shown": batch["conditions"]}


def cache(folder: Path, case: Case, tmp: Path) -> dict[str, Any]:
    return from_cache(encoded(folder, case, tmp, rows_of(case)[1:])[0], tmp)


def stream(folder: Path, case: Case, _tmp: Path, *, packs: bool = False) -> dict[str, Any]:
    rows, table = Dataset.from_list(rows_of(case)[1:]).to_iterable_dataset(), BucketTable(sizes=(case.size,))
    if packs:
        grouping, collate = PackGrouping(max_tokens=1000), PackCollator(SPEC, **options(folder, case))
    else:
        grouping = BucketGrouping(table=table, batch_size=2)
        collate = BucketCollator(table, **options(folder, case))
    batches = StreamingBucketBatcher(rows, grouping, collate_fn=collate)
    (batch,) = resume(Accelerator(cpu=True), batches.make_loader())
    return batch


def stream_of_packs(folder: Path, case: Case, tmp: Path) -> dict[str, Any]:
    return stream(folder, case, tmp, packs=True)


def described_stream(folder: Path, case: Case, tmp: Path, *, packs: bool = False) -> dict[str, Any]:
    """Load a row from a table that was described as a stream, and read again from that description."""
    row = {**rows_of(case)[1], "start": case.row.get("clip_start"), "end": FRAMES / FPS}
    names = {"file": "video", "caption": "caption", "start": "start", "end": "end"}
    names |= {column: column for column in CONDITIONS.values()}
    if row["start"] is None:
        del names["start"], names["end"]
    cells = {new: row[old] for old, new in names.items()}
    cells |= {name: str(folder / file) for name, file in cells.items() if name in {"video", *CONDITIONS.values()}}
    write_table(tmp / "rows.jsonl", [{**cells, "caption": "c"}])
    size = case.size
    config = SourceConfig(
        dataset=str(tmp / "rows.jsonl"),
        target_fps=row["fps"],
        clips="scenes" if "start" in names else None,
        table=TableConfig(buckets=f"{size.height},{size.width}", bucket_frames=[size.frames]),
        **{f"{name}_column": column for name, column in CONDITIONS.items()},
    )
    prepare_stream(config, spec=SPEC, say=lambda sentence: None)[0].save(tmp / "stream")
    prepared = PreparedStream.load(tmp / "stream")
    own = {**options(folder, case), "column": prepared.column, "root": prepared.root}
    own |= {"conditions": prepared.conditions, "caption_column": prepared.caption_column}
    grouping: Any = PackGrouping(max_tokens=1000) if packs else BucketGrouping(table=prepared.table, batch_size=2)
    collate = PackCollator(prepared.open_table, **own) if packs else BucketCollator(prepared.table, **own)
    batches = StreamingBucketBatcher(prepared.open(packed=packs), grouping, collate_fn=collate)
    (batch,) = resume(Accelerator(cpu=True), batches.make_loader())
    return batch


def described_stream_of_packs(folder: Path, case: Case, tmp: Path) -> dict[str, Any]:
    return described_stream(folder, case, tmp, packs=True)


FAST = ("crop", "clip")
"""Cases of the ways of loading that load as others do, for the fast tests."""

WAYS = [
    pytest.param(load, name, marks=[] if load in (bucket, pack, cache) or name in FAST else pytest.mark.slow)
    for load in (bucket, pack, cache, resized_pack, stream, stream_of_packs)
    for name in CASES
]
WAYS += [
    pytest.param(load, name, marks=[] if name == "clip" else pytest.mark.slow)
    for load in (described_stream, described_stream_of_packs)
    for name in ("crop", "flip", "random start", "control of other fps", "clip")
]


def centre(marked: torch.Tensor) -> tuple[float, float]:
    """Return the row and column of the centre of a bright square `(h, w)` on a dark ground."""
    bright = (marked - 0.5).clamp(min=0)
    assert bright.sum() > 4, "the square is in sight"
    rows, columns = (torch.arange(side) + 0.5 for side in bright.shape)
    return float((bright.sum(1) * rows).sum() / bright.sum()), float((bright.sum(0) * columns).sum() / bright.sum())


def lies_over(condition: torch.Tensor, sample: torch.Tensor) -> bool:
    """Return whether the squares of two frames `(h, w)` in [0, 1] are less than a third of a pixel apart."""
    assert condition.shape == sample.shape
    return float(np.abs(np.subtract(centre(condition), centre(sample))).max()) < 1 / 3


@pytest.mark.parametrize(("load", "name"), WAYS)
def test_marked_pixels_stay_together(load: Callable[..., dict[str, Any]], name: str, media: Path, tmp_path) -> None:
    batch = load(media, CASES[name], tmp_path)
    shown = batch["shown"]
    assert list(shown) == list(CONDITIONS) or load is cache
    for row, pixels in enumerate(batch["pixel_values"]):
        red, green = (pixels[:2] + 1) / 2
        control, mask = (shown["control"][row][:2] + 1) / 2, shown["mask"][row]
        assert control.shape == (2, *red.shape)
        assert mask.shape == (1, *red.shape)
        assert mask.clamp(0, 1).equal(mask)
        for frame in range(len(red)):
            assert lies_over(control[0, frame], red[frame])
            assert lies_over(control[1, frame], green[frame])
            assert lies_over(mask[0, frame], red[frame])
        for still in ("first_frame", "last_frame"):
            assert shown[still][row].shape == (3, 1, *red.shape[1:])
            assert lies_over((shown[still][row][1, 0] + 1) / 2, green[0])
        (reference,) = shown["reference"][row]
        height, width = reference.shape[2:]
        assert reference.shape[:2] == (3, 1)
        assert height % 16 == width % 16 == 0
        assert height * width <= red[0].numel()
        assert width > 4 * height
        reference = reference.flip(-1) if name == "flip" else reference
        assert reference[2, 0, :, : width // 2 - 4].min() > 0.9 > -0.9 > reference[2, 0, :, width // 2 + 4 :].max()


def test_the_cases_differ_in_what_they_show(media: Path, tmp_path: Path) -> None:
    def places(name: str) -> list[tuple[float, float]]:
        frames = (bucket(media, CASES[name], tmp_path)["pixel_values"][0][0] + 1) / 2
        return [centre(frame) for frame in frames]

    plain, flipped = places("other fps"), places("flip")
    assert all(first < second for (_, first), (_, second) in pairwise(plain))
    assert all(first > second for (_, first), (_, second) in pairwise(flipped))
    times = {name: np.diff(places(name), axis=0)[:, 0].mean() for name in ("resize", "uniform", "other fps")}
    assert times["uniform"] > 2.5 * times["other fps"] / 2 > times["resize"]
    rows = {name: places(name)[0][0] for name in ("other fps", "random start", "clip")}
    assert len({round(row) for row in rows.values()}) == 3


def test_images_serve_every_frame_and_a_missing_mask_is_white(media: Path) -> None:
    case = CASES["flip"]
    collate = BucketCollator(BucketTable(sizes=(case.size,)), **options(media, case))
    shown = collate(rows_of(case, control="image.png", mask="mask.png"))["shown"]
    for name in ("control", "mask"):
        assert shown[name][0].shape[1:] == case.size
        assert torch.equal(shown[name][0][:, 0], shown[name][0][:, -1])
        assert lies_over(shown[name][0][0, 0], shown["first_frame"][0][0, 0])
    assert collate(rows_of(case, mask=None))["shown"]["mask"][0].eq(1).all()


def test_an_image_has_a_mask_and_a_control_too(media: Path) -> None:
    case = Case(FIXED, size=Size(1, 48, 64), row={"num_frames": 1, "fps": 0.0})
    own = {**options(media, case), "conditions": {"mask": "mask", "control": "control"}}
    collate = BucketCollator(BucketTable(sizes=(case.size,)), **own)
    batch = collate(rows_of(case, file="image.png", mask="mask.png", control="image.png"))
    assert torch.equal(batch["shown"]["control"][0], batch["pixel_values"][0])
    assert lies_over(batch["shown"]["mask"][0][0, 0], (batch["pixel_values"][0][0, 0] + 1) / 2)
    with pytest.raises(MediaError, match=r"row 0: The mask .*mask.mp4 is a video, but .* as its sample is one"):
        collate(rows_of(case, file="image.png", control="image.png"))


def test_a_rounded_condition_takes_the_resized_size_of_its_sample(media: Path, tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 255, (20, 30), dtype=np.uint8)  # 68 × 100 pixels × 0.3 have 20.4 rows
    Image.fromarray(grey).save(tmp_path / "grey.png")
    case = CASES["flip"]
    collate = BucketCollator(BucketTable(sizes=(case.size,)), **options(media, case))
    batch = collate(rows_of(case, mask=str(tmp_path / "grey.png"))[:1])
    pixels = torch.from_numpy(grey)[None, None] / 255
    resized = torch.nn.functional.interpolate(pixels, (54, 80), mode="bilinear", antialias=True)
    assert batch["crop"][0] == (3, 0, 48, 80)
    assert torch.allclose(batch["shown"]["mask"][0][0, 0], resized[0, 0, 3:51].flip(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"control": None}, "Cannot load row 0: The control of row 0 is missing: the column control holds none"),
        ({"first": "mask.mp4"}, "The first_frame .*mask.mp4 is a video, but it must be an image"),
        ({"ref": ["ref.png", "broken.mp4"]}, "broken.mp4 is neither an image nor a video"),
        ({"ref": ["ref.png", "none.png"]}, "Cannot load row 0: .*none.png does not exist"),
        ({"reference_sizes": [1, 40, 100]}, "The references of .*clip.mp4 .*ref.png.* prepare the data set again"),
        ({"reference_sizes": []}, "The references of .*clip.mp4 .*ref.png.* prepare the data set again"),
        ({"mask": "ref.png"}, r"The mask .*ref.png has 200×40 pixels, but its sample 100×68"),
        ({"control": "broken.mp4"}, "broken.mp4 is neither an image nor a video"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_row_and_file(cells, message: str, media: Path) -> None:
    case = CASES["resize"]
    with pytest.raises(MediaError, match=message):
        BucketCollator(BucketTable(sizes=(case.size,)), **options(media, case))(rows_of(case, **cells))


@pytest.mark.parametrize("make", [BucketCollator, PackCollator])
def test_a_replacement_brings_its_own_conditions(make, media: Path, tmp_path: Path) -> None:
    case = CASES["resize"]
    rows = rows_of(case)
    rows[0] |= {"control": "broken.mp4"}
    rows[1] |= {"control": "image.png", "mask": None}
    replacements = FaultRule(on_error="replace", max_error_share=1.0).replacements(
        Dataset.from_list(rows), log=tmp_path / "log.jsonl"
    )
    own = {**options(media, case), "replacements": replacements}
    table = BucketTable(sizes=(case.size,)) if make is BucketCollator else SPEC
    batch = make(table, **own)(rows[:1])
    assert batch["index"] == [1]
    assert torch.equal(batch["shown"]["control"][0][:, 0], batch["shown"]["control"][0][:, -1])
    assert batch["shown"]["mask"][0].eq(1).all()


def test_a_cache_encodes_again_what_is_shown_otherwise(media: Path, tmp_path: Path) -> None:
    case = CASES["resize"]

    def count(conditions: dict[str, str], **cells: Any) -> int:
        return encoded(media, case, tmp_path, rows_of(case, **cells)[:1], conditions=conditions)[1]["encoded"]

    assert [count({}), count({})] == [1, 0]
    assert [count({"mask": "mask"}), count({"mask": "mask"})] == [1, 0]
    assert count({"mask": "mask"}, mask="mask.png") == 1
    assert count({"mask": "control"}) == 1
    assert count({"control": "mask"}) == 1
    assert count({}) == 0


def test_references_of_several_sizes_are_cached_in_one_stack(media: Path, tmp_path: Path) -> None:
    case = CASES["resize"]
    rows = rows_of(case)
    rows[1]["ref"] = "image.png"
    references = from_cache(encoded(media, case, tmp_path, rows)[0], tmp_path)["shown"]["reference"]
    assert [tuple(picture.shape) for (picture,) in references] == [(3, 1, 16, 80), (3, 1, 32, 48)]


def test_a_sample_has_any_number_of_references_from_lists_and_columns(media: Path, tmp_path: Path) -> None:
    case = CASES["flip"]
    own = {**options(media, case), "conditions": {"reference": "ref,more"}}
    cells = [("ref.png", None), (None, {"path": None, "bytes": None}), (["image.png", None], ["ref.png", "clip.mp4"])]
    rows = [{**rows_of(case)[0], "ref": ref, "more": more} for ref, more in cells]
    batch = BucketCollator(BucketTable(sizes=(case.size,)), **own)(rows)["shown"]["reference"]
    assert [[tuple(pixels.shape) for pixels in references] for references in batch] == [
        [(3, 1, 16, 128)],
        [],
        [(3, 1, 48, 64), (3, 1, 16, 128), (3, 9, 48, 64)],
    ]
    assert batch[0][0].equal(batch[2][1])
    pack = PackCollator(SPEC, **own)(rows)["shown"]["reference"]
    assert [[tuple(pixels.shape[1:]) for pixels in references] for references in pack] == [
        [(1, 32, 192)],
        [],
        [(1, 64, 96), (1, 32, 192), (21, 64, 96)],
    ]


def test_a_largest_area_makes_references_smaller_and_never_larger(media: Path) -> None:
    case = CASES["resize"]
    for pixels, size in ((2000, (16, 96)), (10**6, (32, 192)), (300, (16, 32))):
        rule = replace(RULE, max_pixels=pixels)
        collate = BucketCollator(BucketTable(sizes=(case.size,)), **{**options(media, case), "references": rule})
        ((picture,), _) = collate(rows_of(case))["shown"]["reference"]
        assert tuple(picture.shape) == (3, 1, *size)


@pytest.mark.parametrize("name", ["crop", "flip", "random start", "uniform", "clip"])
@pytest.mark.parametrize("file", ["control.mp4", "control_at_16.mp4"])
def test_references_that_lie_over_their_sample_have_its_crop_flip_and_times(name: str, file: str, media: Path) -> None:
    case = CASES[name]
    collate = BucketCollator(
        BucketTable(sizes=(case.size,)),
        **options(media, case)
        | {"references": ReferenceRule(downscale_factor=2, multiples=(8, 8))}
        | {"views": replace(case.views, flip_references=False)},
    )
    batch = collate(rows_of(case, ref=[file], control=file))
    shown = batch["shown"]
    for control, (reference,) in zip(shown["control"], shown["reference"], strict=True):
        assert reference.shape == (3, case.size.frames, case.size.height // 2, case.size.width // 2)
        halved = torch.nn.functional.avg_pool2d(control.transpose(0, 1), 2).transpose(0, 1)
        for channel in range(2):
            for frame in range(case.size.frames):
                assert lies_over((reference[channel, frame] + 1) / 2, (halved[channel, frame] + 1) / 2)


def test_what_lies_over_a_sample_must_have_its_shape_and_kind(media: Path) -> None:
    case = CASES["resize"]
    rule = ReferenceRule(downscale_factor=2, multiples=(2, 2))
    collate = BucketCollator(BucketTable(sizes=(case.size,)), **{**options(media, case), "references": rule})
    with pytest.raises(MediaError, match=r"The reference .*ref.png has 200×40 pixels, but its sample 100×68"):
        collate(rows_of(case))
    image = Case(FIXED, size=Size(1, 48, 64), row={"num_frames": 1, "fps": 0.0})
    collate = BucketCollator(BucketTable(sizes=(image.size,)), **options(media, image))
    rows = rows_of(image, file="image.png", mask=None, control="image.png", ref="control.mp4")
    with pytest.raises(MediaError, match=r"The reference .*control.mp4 is a video, but .* as its sample is one"):
        collate(rows)


def test_an_unreadable_condition_is_an_unreadable_sample_of_a_cache(media: Path, tmp_path: Path) -> None:
    case = CASES["resize"]
    rows = rows_of(case)
    rows[0]["mask"], rows[1]["ref"] = "broken.mp4", "none.png"
    keyed, counts = encoded(media, case, tmp_path, rows, on_error="reject")
    assert keyed["latents_key"][:] == ["", ""]
    assert counts == {"unreadable": 2}
    with pytest.raises(MediaError, match="broken"):
        encoded(media, case, tmp_path, rows[:1])
