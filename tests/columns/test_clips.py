"""Clips of videos: their rows, and that the first frame of each is the one at its start, however it is read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from PIL import Image

from hf_bucketing import ColumnError, LatentSpec, ViewRule, open_table
from hf_bucketing.buckets.assignment import CLIP_SIZE
from hf_bucketing.caching import CacheConfig, CachedCollator
from hf_bucketing.caching.columns import LatentColumns
from hf_bucketing.columns import BucketColumns, CacheInfo, ClipRows, ClipRule, PreparedDataset, cut_clips, map_columns
from hf_bucketing.columns.clips import scene_clips, spaced_clips
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.loaders import BucketCollator, PackCollator
from hf_bucketing.media import write_video
from hf_bucketing.randomness import ROW
from tests.conftest import as_flags, run_script_here
from tests.media.test_media import HEIGHT, WIDTH, numbered_frames
from tests.media.test_video import encode

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def rule(mode: str, *, frames: int | None = 4, number: int = 1) -> ClipRule:
    return ClipRule(mode=mode, frames=frames, number=number)


@pytest.mark.parametrize(("clips", "expected"), [
    (rule("head"), [(0, 0, 4), (1, 0, 1), (2, 0, -1), (3, 0, 4), (4, 0, 4), (5, 0, 3)]),
    (rule("uniform", number=3),
     [(0, 0, 4), (0, 3, 4), (0, 6, 4), (1, 0, 1), (2, 0, -1), (3, 0, 4), (3, 2, 4), (3, 5, 4), (4, 0, 4), (4, 1, 4),
      (5, 0, 3)]),
    (rule("slide", number=3), [(0, 0, 4), (0, 3, 4), (0, 6, 4), (1, 0, 1), (2, 0, -1), (3, 0, 4), (3, 3, 4), (4, 0, 4),
                               (5, 0, 3)]),
    (rule("all"), [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 1), (2, 0, -1), (3, 0, 4), (3, 4, 5), (4, 0, 5),
                   (5, 0, 3)]),
], ids=["head", "uniform", "slide", "all"])  # fmt: skip
def test_clips_begin_at_whole_frames_and_stay_in_the_video(clips: ClipRule, expected) -> None:
    frames, fps = [10, 1, -1, 9, 5, 3], [2.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    found = spaced_clips(clips, frames, fps)
    first = np.rint(found.start * np.array(fps)[found.source]).astype(int)
    assert [*zip(found.source.tolist(), first.tolist(), found.num_frames.tolist(), strict=True)] == expected
    assert not found.wrong.any()
    videos = np.array(fps)[found.source] > 0
    assert np.allclose(found.end[videos], (first + found.num_frames)[videos] / 2.0)
    assert ((first + found.num_frames)[videos] <= np.array(frames)[found.source][videos]).all()


def test_scenes_are_cut_at_their_seconds_and_wrong_ones_are_marked() -> None:
    cells = [
        ((0.0, 1.0), [(0.0, 1.0, 2)]),
        (([0.5, 1.0], [1.0, 5.5]), [(0.5, 1.0, 1), (1.0, 5.5, 8)]),
        ((None, None), [(0.0, 5.0, 10)]),
        (([], []), [(0.0, 5.0, 10)]),
        ((0.3, 5.0), [(0.3, 5.0, 9)]),
        ((4.5, 4.6), [(4.5, 4.6, 1)]),
    ]
    starts, ends = zip(*(times for times, _ in cells), strict=True)
    clips = scene_clips(starts, ends, [10] * len(cells), [2.0] * len(cells))
    found = zip(
        clips.source.tolist(), clips.start.tolist(), clips.end.tolist(), clips.num_frames.tolist(), strict=True
    )
    assert [*found] == [(row, *clip) for row, (_, clips_of_row) in enumerate(cells) for clip in clips_of_row]
    assert not clips.wrong.any()
    wrong = [
        (5.0, 6.0),
        (1.0, 6.0),
        (2.0, 2.0),
        (3.0, 1.0),
        (-1.0, 1.0),
        (math.nan, 1.0),
        (0.0, math.inf),
        (0.0, None),
        (None, 1.0),
        ([0.0, 1.0], [1.0]),
        ("0:01", "0:02"),
        (True, 2.0),
    ]
    starts, ends = zip(*wrong, strict=True)
    clips = scene_clips(starts, ends, [10] * len(wrong), [2.0] * len(wrong))
    assert clips.wrong.all()
    assert clips.source.tolist() == list(range(len(wrong)))
    assert scene_clips([0.0, 0.0], [1.0, 1.0], [1, -1], [0.0, 0.0]).wrong.tolist() == [True, False], "an image"


@pytest.mark.parametrize("text", ["heads", "uniform", "uniform:0", "slide:x", "head:2", "slide:-3", "uniform:1.5", ""])
def test_an_unknown_mode_or_number_is_an_error(text: str) -> None:
    with pytest.raises(ColumnError, match="`clips`"):
        SourceConfig(dataset="x", clips=text, table=TableConfig(buckets="48,80"))
    with pytest.raises(ColumnError, match="Omit `clip_frames`"):
        SourceConfig(dataset="x", clip_frames=9, table=TableConfig(buckets="48,80"))


MARKS = 3
"""Grey levels from one frame to the next."""

NAMES = ["even.mp4", "uneven.mp4", "fast.mp4", "short.mp4", "image.png"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video at 12 fps, one of variable rate, one at 24 fps, a short one and an image; frames show their number."""
    folder = tmp_path_factory.mktemp("videos")
    frames = [np.full((HEIGHT, WIDTH, 3), 20 + MARKS * number, np.uint8) for number in range(61)]
    write_video(folder / "even.mp4", frames, fps=12)
    stamps = [round(1000 * (n / 12 + n % 3 / 40)) for n in range(61)]
    encode(folder / "uneven.mp4", frames, stamps=stamps, g="12", bf="2")
    write_video(folder / "fast.mp4", frames, fps=24)
    write_video(folder / "short.mp4", frames[:7], fps=12)
    Image.fromarray(frames[0]).save(folder / "image.png")
    rows = [{"file_name": name, "caption": f"of {name}", "start": None, "end": None} for name in NAMES]
    rows[0].update(start=[0.5, 2.0], end=[2.0, 5.083], caption=["first", "second"])
    rows[2].update(start=[0.03], end=[2.5])
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepared(videos: Path, clips: str | None, **options) -> PreparedDataset:
    table = TableConfig(buckets="48,80", bucket_frames=[1, 5, 9, 13])
    source = SourceConfig(dataset=str(videos), target_fps=12.0, table=table, clips=clips, **options)
    return prepare(source, spec=SPEC, say=lambda sentence: None)


def marks(pixels: torch.Tensor) -> list[int]:
    """Return the numbers that the frames `(3, F, H, W)` show."""
    return [round((level - 20) / MARKS) for level in ((pixels.mean((0, 2, 3)) + 1) * 127.5).tolist()]


def number_at(row, second: float) -> int:
    """Return the number of the frame on display at a second of a row's file."""
    name = Path(row["file_name"]).name
    if name == "uneven.mp4":
        stamps = [n / 12 + n % 3 / 40 for n in range(61)]
        return max(n for n, stamp in enumerate(stamps) if stamp <= second + 0.25 / 12)
    rate = 24 if name == "fast.mp4" else 12
    return math.floor(second * rate + 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clips",
    [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("head", "uniform:4", "slide:7")), "all", "scenes"],
)
def test_every_clip_begins_with_the_frame_at_its_start_in_buckets_packs_and_caches(
    videos: Path, tmp_path: Path, clips: str
) -> None:
    data = prepared(videos, clips)
    dataset = data.dataset.add_column(ROW, np.arange(len(data.dataset)))
    counts = {"head": 5, "uniform:4": 14, "slide:7": 19, "all": 15, "scenes": 6}
    assert len(dataset) == counts[clips]
    assert dataset["rejection"][:] == ["none"] * len(dataset)
    media = {"column": data.column, "root": data.root, "views": ViewRule(random_crop=False)}
    latents = LatentColumns(
        encode=lambda pixels, shown: {"latents": pixels},
        model="none",
        table=data.table,
        files=data.files,
        config=CacheConfig(folder=str(tmp_path)),
    )
    cached = map_columns(dataset, latents)
    assert len({*cached["latents_key"]}) == len(dataset)
    info = CacheInfo(
        folder=str(tmp_path), batching="bucket", latents_model="", text_model=None, empty_text_key=None, views={}
    )
    ways = [
        (BucketCollator(data.table, **media), dataset, "pixel_values"),
        (PackCollator(data.open_table, **media), dataset, "pixel_values"),
        (CachedCollator(info, caption_column=None), cached, "latents"),
    ]
    for collator, rows, key in ways:
        for row in rows:
            shown = marks(collator([row])[key][0])
            fps = row["fps"] or 1.0
            times = [(row["clip_start"] or 0.0) + frame / fps for frame in range(len(shown))]
            assert shown == [number_at(row, time) for time in times]
            assert len(shown) >= min(row["num_frames"] - 3, 13)
    if clips in ("all", "uniform:4"):
        last = max(
            (row for row in dataset if Path(row["file_name"]).name == "even.mp4"), key=lambda row: row["clip_end"]
        )
        assert round(last["clip_end"] * 12) == 61, "the last frame of the video is in a clip"


@pytest.mark.slow
def test_random_frames_of_a_clip_stay_inside_it(videos: Path) -> None:
    data = prepared(videos, "slide:20", clip_frames=20)
    collator = BucketCollator(data.table, column=data.column, root=data.root, seed=0)
    rows = [{**row, ROW: 0} for row in data.dataset if Path(row["file_name"]).name == "even.mp4"]
    assert [round(row["clip_start"] * 12) for row in rows] == [0, 20, 40]
    firsts: set[int] = set()
    for epoch in range(12):
        collator.set_epoch(epoch)
        for row in rows:
            shown = marks(collator([row])["pixel_values"][0])
            start = round(row["clip_start"] * 12)
            assert len(shown) == 13
            assert start <= shown[0] <= shown[-1] < start + 20
            firsts.add(shown[0] - start)
    assert len(firsts) > 4


def test_a_scene_takes_its_own_caption(videos: Path) -> None:
    data = prepared(videos, "scenes")
    assert data.dataset["caption"][:] == ["first", "second", *(f"of {name}" for name in NAMES[1:])]
    rows = [{"start": [0.0, 1.0], "end": [1.0, 2.0], "caption": ["a", "b", "c"], "file": "x.mp4"}]
    sizes = {"width": 8, "height": 8, "num_frames": 30, "fps": 10.0}
    three = Dataset.from_list([{**row, **sizes} for row in rows])
    with pytest.raises(ColumnError, match=r"1 of 1 rows have .*: row 0: 3 captions for 2 clips; give"):
        cut_clips(three, ClipRule(mode="scenes"), media_column="file", caption_column="caption")


def test_a_clip_beyond_the_end_is_named_or_rejected_for_that_reason(tmp_path: Path, pipeline_dir: Path) -> None:
    write_video(tmp_path / "a.mp4", numbered_frames(24), fps=12)
    (tmp_path / "no.mp4").write_bytes(b"no video")
    lines = ["file_name,caption,start,end,index", "a.mp4,x,0.5,1.5,7", "a.mp4,y,1.0,2.5,7", "a.mp4,z,,,7"]
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    flags = as_flags(
        dataset=tmp_path,
        pretrained_model_name_or_path=pipeline_dir,
        output_dir=tmp_path / "out",
        buckets="48,80",
        bucket_frames="1,9",
        target_fps=12,
        clips="scenes",
    )
    result = run_script_here("prepare_dataset.py", *flags, check=False)
    assert result.returncode == 1
    assert "1 clips do not lie in their files: row 1: 1.0 to 2.5 s of 2.000 s, a.mp4" in result.stderr
    (tmp_path / "metadata.csv").write_text("\n".join([*lines, "no.mp4,w,0.1,0.2,7"]))
    result = run_script_here("prepare_dataset.py", *flags, "--on_error", "reject")
    assert "their clip does not lie in its file" in result.stdout
    data = PreparedDataset.load(tmp_path / "out").dataset
    assert data["rejection"][:] == ["none", "clip", "none", "unreadable"]
    assert data["num_frames"][:] == [12, CLIP_SIZE, 24, -1]
    packs = map_columns(data, BucketColumns(open_table(SPEC), SPEC), overwrite=True)
    assert packs["rejection"][:] == ["none", "clip", "none", "unreadable"]


def test_clips_have_indices_of_their_own_and_whole_files_are_as_before(videos: Path, tmp_path: Path) -> None:
    whole = prepared(videos, None, caption_template="{caption}")
    assert "clip_start" not in whole.dataset.column_names
    assert len(whole.dataset) == 5
    numbered = whole.dataset.add_column(ROW, [50, 40, 30, 20, 10])
    clips = cut_clips(numbered, rule("all", frames=9), media_column="file_name").dataset
    replace(whole, dataset=clips).save(tmp_path / "clips")
    saved = PreparedDataset.load(tmp_path / "clips").dataset
    assert saved[ROW][:] == list(range(len(clips)))
    assert len(clips) == 20


def sized(count: int, **columns) -> Dataset:
    sizes = {"width": np.full(count, 8), "height": np.full(count, 8), "fps": np.full(count, 10.0)}
    return Dataset(pa.table({"num_frames": np.full(count, 95), **sizes, **columns}))


def test_bytes_of_files_are_not_copied_for_their_clips() -> None:
    files = pa.array([{"bytes": bytes([number]) * 2**16, "path": None} for number in range(40)])
    dataset = sized(40, file=files).shuffle(seed=0)
    order = dataset._indices.column(0).to_pylist()
    before = pa.total_allocated_bytes()
    clips = cut_clips(dataset, rule("all", frames=10), media_column="file").dataset
    assert len(clips) == 400
    assert pa.total_allocated_bytes() - before < 2**20 < files.nbytes
    assert [row["file"]["bytes"][0] for row in clips] == [number for number in order for _ in range(10)]


def test_streams_are_cut_by_the_same_rules() -> None:
    columns = {
        "file": ["a", "b"],
        "caption": [["x", "y"], ["z"]],
        "start": [[0.0, 1.0], [8.0]],
        "end": [[1.0, 2.0], [9.9]],
    }
    dataset = sized(2, **columns)
    scenes = ClipRule(mode="scenes")
    for clips in (rule("uniform", number=3), scenes):
        options = {"on_error": "reject", "caption_column": "caption"}
        expected = cut_clips(dataset, clips, media_column="file", **options).dataset
        stream = dataset.to_iterable_dataset().map(ClipRows(clips, **options), batched=True)
        assert [*stream] == [*expected]
    with pytest.raises(
        ColumnError, match=r"1 clips do not lie in their files: row 1: \[8.0\] to \[9.9\] s of 9.500 s"
    ):
        next(iter(dataset.to_iterable_dataset().map(ClipRows(scenes), batched=True)))


def test_columns_of_scenes_must_be_there_and_hold_numbers() -> None:
    scenes = ClipRule(mode="scenes")
    with pytest.raises(ColumnError, match="reads the columns start and end, in seconds, but the data set has"):
        cut_clips(sized(1, file=["a"]), scenes, media_column="file")
    for wrong in (["0:01"], [{"a": 1}]):
        with pytest.raises(ColumnError, match="The column start must hold seconds"):
            cut_clips(sized(1, file=["a"], start=wrong, end=[1.0]), scenes, media_column="file")
