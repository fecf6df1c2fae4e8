"""Collators: from rows to tensors, in DataLoader workers."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hf_bucketing import BucketingError, BucketTable, ColumnError, CropBox, MediaError, Size
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.loaders import BucketBatchSampler, BucketCollator, PackBatchSampler, PackCollator
from hf_bucketing.media import MediaSource, View, ViewRule, write_video
from hf_bucketing.media.sample import load_sample
from hf_bucketing.randomness import ROW


@pytest.fixture
def data(prepared_dir: Path) -> PreparedDataset:
    return PreparedDataset.load(prepared_dir)


def bucket_collator(data: PreparedDataset, **options) -> BucketCollator:
    return BucketCollator(data.table, **{"column": data.column, "root": data.root, **options})


def pack_collator(data: PreparedDataset, **options) -> PackCollator:
    return PackCollator(data.spec, **{"column": data.column, "root": data.root, **options})


def rows_of(data: PreparedDataset, *positions: int):
    return [data.dataset[position] for position in positions]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bucket_batches_are_stacked_at_their_bucket_size(data: PreparedDataset, num_workers: int) -> None:
    sampler = BucketBatchSampler(data.dataset["bucket_id"], table=data.table, batch_size=3)
    loader = DataLoader(
        data.dataset, batch_sampler=sampler, collate_fn=bucket_collator(data, seed=0), num_workers=num_workers
    )
    seen = []
    for batch in loader:
        size = data.table.size(batch["bucket_id"])
        assert batch["pixel_values"].shape == (len(batch["index"]), 3, *size)
        assert batch["pixel_values"].dtype == torch.float32
        assert -1 <= batch["pixel_values"].min() < batch["pixel_values"].max() <= 1
        assert batch["size"] == [size] * len(batch["index"])
        assert batch["caption"] == [data.dataset[index]["caption"] for index in batch["index"]]
        assert all(isinstance(crop, CropBox) for crop in batch["crop"])
        seen += batch["index"]
    assert sorted(seen) == list(range(len(data.dataset)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pack_batches_are_lists_at_native_size(data: PreparedDataset, num_workers: int) -> None:
    tokens = [
        data.spec.num_tokens(data.spec.snap(Size(r["num_frames"], r["height"], r["width"]))) for r in data.dataset
    ]
    sampler = PackBatchSampler(tokens, max_tokens=600)
    loader = DataLoader(
        data.dataset, batch_sampler=sampler, collate_fn=pack_collator(data, seed=0), num_workers=num_workers
    )
    seen = []
    for batch in loader:
        for pixels, size, index in zip(batch["pixel_values"], batch["size"], batch["index"], strict=True):
            assert pixels.shape == (3, *size)
            assert data.spec.num_tokens(size) == tokens[index]
        seen += batch["index"]
    assert sorted(seen) == list(range(len(data.dataset)))


@pytest.mark.slow
def test_seeded_crops_follow_seed_epoch_and_index_alone(data: PreparedDataset) -> None:
    rows = [row for row in data.dataset if row["bucket_id"] == data.dataset[0]["bucket_id"]]

    def pixels(*, seed=0, epoch=0, reverse=False):
        collator = bucket_collator(data, seed=seed)
        collator.set_epoch(epoch)
        values = collator(rows[::-1] if reverse else rows)["pixel_values"]
        return values.flip(0) if reverse else values

    assert torch.equal(pixels(), pixels())
    assert torch.equal(pixels(), pixels(reverse=True))
    assert not torch.equal(pixels(), pixels(seed=1))
    assert not torch.equal(pixels(), pixels(epoch=1))


def test_persistent_workers_see_the_epoch_change(data: PreparedDataset) -> None:
    collator = bucket_collator(data, seed=0)
    loader = DataLoader(
        data.dataset, batch_sampler=[[0], [2], [5]], collate_fn=collator, num_workers=1, persistent_workers=True
    )
    for epoch in (0, 4):
        collator.set_epoch(epoch)
        alone = bucket_collator(data, seed=0)
        alone.set_epoch(epoch)
        for batch, position in zip(loader, (0, 2, 5), strict=True):
            assert torch.equal(batch["pixel_values"], alone(rows_of(data, position))["pixel_values"])


def test_unseeded_crops_follow_torchs_random_state_and_centred_ones_nothing(data: PreparedDataset) -> None:
    def pixels(seed: int, **options):
        torch.manual_seed(seed)
        return bucket_collator(data, **options)(rows_of(data, 0))["pixel_values"]

    centred = ViewRule(random_crop=False)
    assert torch.equal(pixels(0), pixels(0))
    assert not torch.equal(pixels(0), pixels(1))
    assert torch.equal(pixels(0, views=centred), pixels(1, views=centred))


def test_a_sample_is_resized_to_cover_and_cropped_where_asked(tmp_path: Path) -> None:
    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, :50, 0] = 255
    picture[:, 50:, 1] = 255
    Image.fromarray(picture).save(tmp_path / "halves.png")
    source = MediaSource.from_cell(str(tmp_path / "halves.png"))
    left, box = load_sample(source, View(size=Size(1, 20, 20), fps=0.0, position=(0.5, 0.0)))
    right, _ = load_sample(source, View(size=Size(1, 20, 20), fps=0.0, position=(0.5, 1.0)))
    assert box == CropBox(0, 0, 20, 20)
    assert left[:, 0].mean((1, 2)).tolist() == pytest.approx([1, -1, -1], abs=0.02)
    assert right[:, 0].mean((1, 2)).tolist() == pytest.approx([-1, 1, -1], abs=0.02)
    exact, _ = load_sample(source, View(size=Size(1, 40, 100), fps=0.0))
    assert torch.equal(exact[:, 0], torch.from_numpy(picture).permute(2, 0, 1) / 127.5 - 1)


def test_frames_are_picked_at_the_rows_fps_from_a_random_start(tmp_path: Path) -> None:
    write_video(tmp_path / "ramp.mp4", [np.full((32, 32, 3), 20 + 4 * n, np.uint8) for n in range(48)], fps=16)
    row = {"video": str(tmp_path / "ramp.mp4"), "num_frames": 24, "fps": 8.0, "width": 32, "height": 32, "caption": ""}
    starts = set()
    for index in range(30):
        collator = BucketCollator(BucketTable(sizes=(Size(9, 32, 32),)), seed=0)
        pixels = collator([{**row, "bucket_id": 0, ROW: index}])["pixel_values"]
        numbers = ((pixels.mean((0, 1, 3, 4)) + 1) * 127.5 - 20) / 4
        first = round(float(numbers[0]))
        assert numbers.tolist() == pytest.approx(list(range(first, first + 18, 2)), abs=0.5)
        starts.add(first)
    assert min(starts) <= 4
    assert max(starts) >= 24
    assert all(start % 2 == 0 for start in starts)


def test_a_broken_file_is_an_error_that_names_the_row(data: PreparedDataset, tmp_path: Path) -> None:
    shutil.copytree(data.root, tmp_path / "media")
    row = data.dataset[0]
    (tmp_path / "media" / row[data.column]).write_bytes(b"broken")
    for collator in (
        bucket_collator(data, root=str(tmp_path / "media")),
        pack_collator(data, root=str(tmp_path / "media")),
    ):
        with pytest.raises(MediaError, match=r"Cannot load row 0: .*0000\.mp4"):
            collator([row])


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"caption": None}, ColumnError, r"lacks \['caption'\].* as `caption_column`, or give None"),
    ({"bucket_id": None}, ColumnError, "lacks"),
    ({"fps": None}, ColumnError, "MediaMetadata"),
    ({ROW: None}, ColumnError, "add_column"),
    ({"num_frames": 3}, MediaError, "Cannot load row 0: .* has 3 frames, too few"),
])  # fmt: skip
def test_rows_that_lack_something_are_errors(data: PreparedDataset, change, error, message: str) -> None:
    row = {**data.dataset[0], **change}
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(error, match=message):
        bucket_collator(data, seed=0)([row])


def test_rows_of_several_buckets_cannot_be_stacked(data: PreparedDataset) -> None:
    with pytest.raises(BucketingError, match="BucketBatchSampler"):
        bucket_collator(data)(rows_of(data, 0, 1))


def test_captions_and_index_are_optional(data: PreparedDataset) -> None:
    row = {name: value for name, value in data.dataset[0].items() if name not in ("caption", ROW)}
    batch = bucket_collator(data, caption_column=None)([row])
    assert set(batch) == {"pixel_values", "size", "crop", "flip", "fps", "bucket_id"}


@pytest.mark.parametrize("make", [BucketCollator, PackCollator])
@pytest.mark.parametrize(("setting", "new"), [
    ({"random_crop": False}, r"views=ViewRule\(random_crop=…\)"),
    ({"frame_picking": "start"}, r"views=ViewRule\(frame_picking=…\)"),
    ({"flip_probability": 0.5}, r"views=ViewRule\(flip_probability=…\)"),
    ({"video_decoder": "pyav"}, r"views=ViewRule\(video_decoder=…\)"),
    ({"on_error": "raise"}, "replacements=Replacements"),
])  # fmt: skip
def test_settings_of_values_that_are_passed_are_refused_with_those_values(make, setting, new: str) -> None:
    with pytest.raises(BucketingError, match=rf"{make.__name__} takes {new}.* in place of {next(iter(setting))}"):
        make(None, **setting)


@pytest.mark.parametrize("make", [BucketCollator, PackCollator])
def test_all_options_of_a_collator_are_listed_in_its_signature(make) -> None:
    parameters = inspect.signature(make).parameters
    shared = [
        "column",
        "caption_column",
        "captions",
        "root",
        "other_roots",
        "conditions",
        "references",
        "audio",
        "sources",
        "views",
        "seed",
        "replacements",
    ]
    assert list(parameters)[1 : len(shared) + 1] == shared
    assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values())
