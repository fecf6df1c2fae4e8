"""Unreadable samples, and workers that die or hang."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader

from hf_bucketing import BucketingError, BucketTable, ColumnError, LatentSpec, MediaError, Size
from hf_bucketing.columns import BucketColumns, MediaMetadata, map_columns
from hf_bucketing.loaders import (
    BucketBatchSampler,
    BucketCollator,
    FaultRule,
    PackBatchSampler,
    PackCollator,
    Replacements,
)
from hf_bucketing.media import MediaSource, write_video
from hf_bucketing.randomness import ROW
from tests.loaders.test_resume_launch import launch

TABLE = BucketTable(sizes=(Size(1, 32, 32), Size(1, 32, 48), Size(1, 48, 32)))
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
ROWS = 200
CORRUPT = (17, 90)  # one in a hundred


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("images")
    columns: dict[str, list] = {
        name: [] for name in ("image", "width", "height", "bucket_id", "num_tokens", "caption")
    }
    for index in range(ROWS):
        size = TABLE.size(index % 3)
        path = folder / f"{index:03d}.png"
        Image.fromarray(np.full((size.height, size.width, 3), index, np.uint8)).save(path)
        if index in CORRUPT:
            path.write_bytes(b"broken")
        row = {"image": str(path), "width": size.width, "height": size.height, "bucket_id": index % 3}
        row |= {"num_tokens": SPEC.num_tokens(size), "caption": f"image {index}"}
        for name, value in row.items():
            columns[name].append(value)
    return Dataset.from_dict({**columns, "num_frames": [1] * ROWS, "fps": [0.0] * ROWS, ROW: list(range(ROWS))})


def collator(kind: str, images: Dataset, log: Path, *, seed: int | None = 0, **limits):
    options = {
        "column": "image",
        "seed": seed,
        "replacements": FaultRule(on_error="replace", **limits).replacements(images, log=log),
    }
    return BucketCollator(TABLE, **options) if kind == "bucket" else PackCollator(SPEC, **options)


def sampler(kind: str, images: Dataset, **options):
    if kind == "bucket":
        return BucketBatchSampler(images["bucket_id"], table=TABLE, batch_size=8, **options)
    return PackBatchSampler(images["num_tokens"], max_tokens=40, strip_length=1, **options)


def entries(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["bucket", "pack"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_unreadable_samples_are_replaced_alike_and_all_listed(
    kind: str, images: Dataset, num_workers: int, num_processes: int, tmp_path: Path
) -> None:
    log, seen = tmp_path / "logs" / "errors.jsonl", []
    for process in range(num_processes):
        plan = sampler(kind, images, num_processes=num_processes)
        loader = prepare_data_loader(
            DataLoader(
                images, batch_sampler=plan, collate_fn=collator(kind, images, log), num_workers=num_workers, timeout=0
            ),
            num_processes=num_processes,
            process_index=process,
        )
        planned = list(plan.plan(0).batches(process_index=process))
        for batch, rows in zip(loader, planned, strict=True):
            assert len(batch["index"]) == len(batch["pixel_values"]) == len(rows)
            for pixels, index, row, caption in zip(
                batch["pixel_values"], batch["index"], rows.tolist(), batch["caption"], strict=True
            ):
                assert pixels.shape == (3, *TABLE.size(row % 3)) or kind == "pack"
                assert pixels.shape[2] * pixels.shape[3] <= TABLE.size(row % 3).height * TABLE.size(row % 3).width
                assert (index == row) == (row not in CORRUPT)
                assert round((pixels.mean().item() + 1) * 127.5) == index
                assert caption == f"image {index}"
                seen.append(row)
    lines = entries(log)
    assert sorted(seen) == list(range(ROWS))
    assert sorted(line["index"] for line in lines) == list(CORRUPT)
    for line in lines:
        assert f"{line['index']:03d}.png" in line["reason"]
        assert (line["replacement"] - line["index"]) % 3 == 0 or kind == "pack"


def test_a_replacement_follows_seed_epoch_and_index_alone(images: Dataset, tmp_path: Path) -> None:
    def replacement(*, epoch: int = 0, seed: int | None = 0, beside: int = 2) -> int:
        collate = collator("bucket", images, tmp_path / "errors.jsonl", seed=seed, max_error_share=1.0)
        collate.set_epoch(epoch)
        return collate([images[beside], images[17]])["index"][1]

    assert replacement() == replacement(beside=5) != 17
    assert len({replacement(epoch=epoch) for epoch in range(5)}) > 1
    assert len({replacement(seed=seed) for seed in (0, 1, 2, 3)}) > 1


def test_a_replacement_in_a_batch_of_several_buckets_takes_the_base_size(images: Dataset, tmp_path: Path) -> None:
    table = BucketTable(sizes=TABLE.sizes, base=0)
    replacements = Replacements(images, log=tmp_path / "errors.jsonl")
    collate = BucketCollator(table, column="image", seed=0, replacements=replacements)
    batch = collate([images[0], images[17]])
    assert batch["pixel_values"].shape == (2, 3, *TABLE.size(0))
    assert batch["index"][1] % 3 == 17 % 3


def broken(images: Dataset, positions) -> Dataset:
    paths = list(images["image"])
    for position in positions:
        paths[position] = paths[17]
    return images.remove_columns("image").add_column("image", paths)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_the_share_of_an_epoch_stops_training(images: Dataset, num_workers: int, tmp_path: Path) -> None:
    bad = broken(images, [3, 50])
    log = tmp_path / "errors.jsonl"
    loader = DataLoader(
        bad, batch_size=None, sampler=None, collate_fn=lambda row: collate([row]), num_workers=num_workers
    )
    collate = collator("bucket", bad, log, max_error_share=0.015)
    with pytest.raises(MediaError, match=r"4 of 200 samples could not be read in epoch 0, more than .* 1\.50%"):
        list(loader)
    collate = collator("bucket", bad, tmp_path / "other.jsonl", max_error_share=0.02)
    assert len(list(loader)) == ROWS
    collate.set_epoch(1)
    assert len(list(loader)) == ROWS, "each epoch counts for itself"
    assert len(entries(tmp_path / "other.jsonl")) >= 8


FILES = {"video": (25, 64, 96, 24.0), "image": (1, 64, 96, 0.0)}
REPLACED = {
    "half the size": ("video", (25, 32, 48, 24.0), "is a video of 48×32 pixels at 24 fps, but its row was made for a"),
    "turned": ("video", (25, 96, 64, 24.0), "is a video of 64×96 pixels"),
    "half the frame rate": (
        "video",
        (13, 64, 96, 12.0),
        "at 12 fps, but its row was made for a video of 96×64 .* at 24",
    ),
    "a picture": ("video", (1, 64, 96, 0.0), "is an image of 96×64 pixels, but its row was made for a video"),
    "a smaller image": (
        "image",
        (1, 32, 48, 0.0),
        "is an image of 48×32 pixels, but its row was made for an image of",
    ),
    "a turned image": ("image", (1, 96, 64, 0.0), "is an image of 64×96 pixels"),
    "a video for an image": ("image", (25, 64, 96, 24.0), "is a video of 96×64 .* but its row was made for an image"),
}


def write_file(path: Path, *, frames: int, height: int, width: int, fps: float) -> None:
    pixels = np.zeros((frames, height, width, 3), np.uint8)
    if fps:
        write_video(path.with_suffix(".mp4"), pixels, fps=fps)
        path.with_suffix(".mp4").replace(path)
    else:
        Image.fromarray(pixels[0]).save(path, format="PNG")


def rows_and_columns(folder: Path, kind: str, *, streamed: bool, **metadata) -> tuple[list[dict], BucketTable, Path]:
    """Write a file of a kind, and return the rows of its data set or stream with the columns of preparing."""
    frames, height, width, fps = FILES[kind]
    path = folder / "media"  # without an ending, so that a file of any kind may take its place
    write_file(path, frames=frames, height=height, width=width, fps=fps)
    table = BucketTable(sizes=(Size(1, 32, 48), Size(9, 32, 48)))
    rows: Any = Dataset.from_dict({"media": [str(path)], "caption": ["a"], ROW: [0]})
    rows = rows.to_iterable_dataset() if streamed else rows
    rows = map_columns(map_columns(rows, MediaMetadata("media", **metadata)), BucketColumns(table, SPEC))
    return list(rows), table, path


@pytest.mark.parametrize("streamed", [False, True], ids=["rows", "stream"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_file_that_was_replaced_after_preparing_is_an_error(name: str, streamed: bool, tmp_path: Path) -> None:
    kind, (frames, height, width, fps), message = REPLACED[name]
    rows, table, path = rows_and_columns(tmp_path, kind, streamed=streamed)
    collators = [BucketCollator(table, column="media"), PackCollator(SPEC, column="media")]
    for make_batch in collators:
        make_batch(rows)
    write_file(path, frames=frames, height=height, width=width, fps=fps)
    for make_batch in collators:
        with pytest.raises(MediaError, match=f"Cannot load row 0: .*{message}.*Prepare the data set again"):
            make_batch(rows)


def test_a_file_that_was_replaced_counts_as_unreadable(images: Dataset, tmp_path: Path) -> None:
    rows = images.map(lambda row: {"width": row["width"] * 2 if row[ROW] == 3 else row["width"]})
    batch = collator("bucket", rows, tmp_path / "log.jsonl")([rows[0], rows[3]])
    assert batch["index"][0] == 0 != batch["index"][1] != 3
    assert batch["planned_index"] == [0, 3]
    assert "the file was replaced, or the row's sizes are wrong" in entries(tmp_path / "log.jsonl")[0]["reason"]


def test_rows_that_fit_their_file_are_none_that_was_replaced(tmp_path: Path) -> None:
    prepared = [("image", {"target_fps": 16.0}), ("video", {"exact": True}), ("video", {"target_fps": 30.0})]
    for kind, metadata in [*prepared, ("video", {"target_fps": 16.0})]:
        ((row,), table, _) = rows_and_columns(tmp_path, kind, streamed=False, **metadata)
        BucketCollator(table, column="media")([row])
    ((row,), table, _) = rows_and_columns(tmp_path, "video", streamed=False)
    clip = {"num_frames": 9, "clip_start": 0.5}
    for change in ({"fps": 24.2}, {"fps": 23.976}, {"num_frames": 24}, {"num_frames": 26}, clip):
        BucketCollator(table, column="media")([{**row, **change}])
    with pytest.raises(MediaError, match="its row was made for a video of 96×64 pixels at 25 fps"):
        BucketCollator(table, column="media")([{**row, "fps": 25.0}])
    without_sizes = {name: cell for name, cell in row.items() if name not in ("width", "height")}
    BucketCollator(table, column="media")([{**without_sizes, "fps": 25.0}])
    write_file(tmp_path / "media", frames=1, height=64, width=96, fps=24.0)  # columns know no rate of one frame
    BucketCollator(table, column="media")([{**row, "num_frames": 1, "fps": 0.0, "bucket_id": 0}])


def test_a_header_of_a_wrong_rate_is_counted_before_a_file_is_called_replaced(monkeypatch, tmp_path: Path) -> None:
    ((row,), table, _) = rows_and_columns(tmp_path, "video", streamed=False, exact=True)
    modules = [importlib.import_module(f"hf_bucketing.media.{name}") for name in ("probe", "decode")]
    read = modules[0].read_video_header

    def half(source: MediaSource, *, exact: bool = False, **options):
        header = read(source, exact=exact, **options)
        return header if exact else header._replace(info=header.info._replace(fps=header.info.fps / 2))

    for module in modules:
        monkeypatch.setattr(module, "read_video_header", half)
    BucketCollator(table, column="media")([row])


def test_more_than_max_errors_in_a_row_stop_training(images: Dataset, tmp_path: Path) -> None:
    bad = broken(images, range(3, ROWS))
    collate = collator("bucket", bad, tmp_path / "errors.jsonl", max_errors=5, max_error_share=1.0)
    collate([images[0]])
    with pytest.raises(MediaError, match="6 samples in a row"):
        collate([bad[index] for index in range(3, ROWS, 3)])


def test_a_bucket_without_another_readable_sample_is_an_error(images: Dataset, tmp_path: Path) -> None:
    alone = images.select([17, 0, 1])
    for kind in ("bucket", "pack"):
        collate = collator(
            kind, alone.select([0]) if kind == "pack" else alone, tmp_path / "errors.jsonl", max_error_share=1
        )
        with pytest.raises(MediaError, match=r"017.png.*No readable sample was found to replace row 17"):
            collate([alone[0]])


def test_settings_that_cannot_work_are_errors(images: Dataset, tmp_path: Path) -> None:
    for limits, message in (({"max_error_share": 1.5}, "from 0 to 1"), ({"max_errors": -1}, "at least 0")):
        with pytest.raises(BucketingError, match=f"`{next(iter(limits))}` must be {message}"):
            FaultRule(**limits)
    with pytest.raises(BucketingError, match="`on_error` must be"):
        FaultRule(on_error="skip")
    with pytest.raises(BucketingError, match="no argument max_share; did you mean max_error_share"):
        FaultRule(max_share=0.5)
    with pytest.raises(BucketingError, match='got `on_error="raise"`; leave it out'):
        Replacements(images, log=tmp_path / "log", faults=FaultRule(max_errors=3))
    with pytest.raises(ColumnError, match="need a column hf_bucketing_row"):
        Replacements(images.remove_columns(ROW), log=tmp_path / "log")
    assert FaultRule().replacements(images, log=tmp_path / "log") is None
    unlabelled = Replacements(images.remove_columns("num_tokens"), log=tmp_path / "log")
    collate = PackCollator(SPEC, column="image", replacements=unlabelled)
    with pytest.raises(ColumnError, match="chosen by 'num_tokens'"):
        collate([images[17]])


class FakeColumn:
    """A column that is slow to read row by row, as a `Column` of datasets is."""

    def __getitem__(self, rows: slice) -> list[int]:
        assert rows == slice(None), "read at once"
        return [4, 7, 7]


class FakeColumns:
    column_names = (ROW, "bucket_id")

    def __getitem__(self, name: str) -> FakeColumn:
        return FakeColumn()


def test_replacements_read_a_column_at_once(tmp_path: Path) -> None:
    assert Replacements(FakeColumns(), log=tmp_path / "log").column("bucket_id").tolist() == [4, 7, 7]


@pytest.mark.cases(slow=("die",))
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_worker_that_dies_or_hangs_ends_all_processes_and_is_named(fault: str, tmp_path: Path) -> None:
    options = {"epochs": 1, "save_every": 0, "kill_at": 0, "num_workers": 2, "fault": fault, "persistent": True}
    if fault == "hang":  # torch looks for dead workers every 5 seconds without a timeout, else only after it
        options |= {"timeout": 1200, "timeout_once_started": 4}
    result = launch("train", tmp_path, options, num_processes=2, check=False)
    assert result.returncode not in (0, 124)
    happened = {"die": "exited unexpectedly", "hang": "timed out after 4 seconds"}[fault]
    assert re.search(rf"Process \d got no batch after step .* {happened}\. The worker", result.stderr), result.stderr
    assert re.search(r"was to load the rows .*\b\d+\b", result.stderr)


def test_other_errors_of_the_loader_pass_unchanged() -> None:
    from hf_bucketing.loaders import resume
    from tests.loaders.loader_worker import make_sampler

    def collate(rows):
        raise RuntimeError("out of memory")

    accelerator = Accelerator(cpu=True)
    loader = resume(accelerator, accelerator.prepare(DataLoader(range(47), batch_sampler=make_sampler("pack"),
                                                                collate_fn=collate)))  # fmt: skip
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        list(loader)
