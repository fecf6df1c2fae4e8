"""Streams that are described by their first rows: what is found, checked and computed, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import IterableDataset

from hf_bucketing import BucketingError, LatentSpec, open_table
from hf_bucketing.columns import PreparedDataset, column_array, prepared_stream
from hf_bucketing.columns.layouts import SourceRows
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared import MANIFEST
from hf_bucketing.columns.prepared_stream import PreparedStream, StreamSample, StreamSource, prepare_stream
from hf_bucketing.columns.settings import RowsConfig, SourceConfig, TableConfig
from hf_bucketing.errors import ColumnError, MediaError
from hf_bucketing.loaders import BucketCollator, CaptionRule, resume
from hf_bucketing.media import ViewRule, write_image, write_video
from hf_bucketing.media.source import MediaSource
from hf_bucketing.randomness import ROW
from hf_bucketing.streaming import BucketGrouping, StreamingBucketBatcher, StreamLimits
from tests.columns.stream_cases import samples_of, write_parquet, write_table, write_tars
from tests.columns.test_prepared import record_of_download

pytestmark = pytest.mark.usefixtures("files_anywhere")

SPEC = LatentSpec(temporal_stride=8, spatial_stride=16, patch=(1, 1, 1))
SIZES = ("width", "height", "num_frames", "fps")


def config(dataset: object, **settings) -> SourceConfig:
    table = TableConfig(bucket_tokens=[60, 110, 150], bucket_frames=[1, 9, 17, 25])
    return SourceConfig(**{"dataset": str(dataset), "table": table, "target_fps": 8.0, **settings})


def prepared(dataset: object, **settings) -> PreparedStream:
    return prepare_stream(config(dataset, **settings), spec=SPEC, say=lambda sentence: None)[0]


@pytest.fixture(scope="module")
def tars(media_dir: Path, tmp_path_factory) -> Path:
    return write_tars(tmp_path_factory.mktemp("stream") / "tars", media_dir, shards=4)


@pytest.fixture(scope="module")
def parquet(media_dir: Path, tmp_path_factory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("stream") / "parquet", media_dir, shards=3)


@pytest.mark.slow
def test_a_stream_has_the_columns_of_the_same_rows_prepared_whole(media_dir, tars, parquet, tmp_path: Path) -> None:
    table = write_table(media_dir / "videos.jsonl", samples_of(media_dir))
    whole = prepare(config(table), spec=SPEC, say=lambda sentence: None).dataset
    names = ("caption", "width", "height", "num_frames", "fps", "bucket_id", "num_tokens", "rejection")
    wanted = sorted(zip(*(column_array(whole, name).tolist() for name in names), strict=True))
    sources = {tars: 4, f"{tars}/*.tar": 4, parquet: 3, table: 1}
    for source, shards in sources.items():
        prepared(source).save(tmp_path / "stream")
        stream = PreparedStream.load(tmp_path / "stream")
        assert stream.num_shards == shards
        assert stream.sample.rows == len(whole)
        rows = list(stream.open())
        assert sorted(tuple(row[name] for name in names) for row in rows) == wanted
        indices = [row[ROW] for row in rows]
        assert len(set(indices)) == len(rows)
        assert all(0 <= index < 2**63 for index in indices)
        assert sorted(row[ROW] for row in stream.open(packed=True, shuffle_buffer=5, seed=1)) == sorted(indices)


def test_only_the_first_rows_are_read_and_sizes_come_from_columns_that_agree(media_dir, tmp_path: Path) -> None:
    sample = samples_of(media_dir)[0]
    size = {"width": 128, "height": 72, "num_frames": 33, "fps": 16.0}
    file = {**sample, **size, "file_name": str(media_dir / sample["file_name"])}
    gone = {**file, "file_name": "gone.mp4", "width": 96, "height": 96}
    path = write_table(tmp_path / "rows.jsonl", [file] * 64 + [gone] * 40)
    stream = prepared(path)
    assert stream.sample.rows == 64
    assert stream.parts[0].source.sizes_from == "columns"
    assert stream.parts[0].source.size_columns == ",".join(f"{name}={name}" for name in SIZES)
    rows = list(stream.open())
    assert [(row["width"], row["num_frames"], row["fps"]) for row in rows[::100]] == [(128, 17, 8.0), (96, 17, 8.0)]
    assert prepared(path, sizes_from="headers").parts[0].source.sizes_from == "headers"
    wrong = write_table(tmp_path / "wrong.jsonl", [{**file, "width": 130}])
    with pytest.raises(ColumnError, match=r"has width 130, .* but the file has width 128"):
        prepared(wrong)


def test_captions_that_are_no_text_follow_on_error_in_every_row(media_dir, tmp_path: Path) -> None:
    rows = [{**row, "file_name": str(media_dir / row["file_name"])} for row in samples_of(media_dir)[:3]]
    path = write_table(tmp_path / "rows.jsonl", [rows[0], {**rows[1], "caption": None}, rows[2]])
    with pytest.raises(ColumnError, match=r"column 'caption' are not text: 1 missing \(row 1: .*0001\.mp4\)"):
        prepared(path)
    for on_error, rejection in (("reject", "caption"), ("empty", "none")):
        row = list(prepared(path, on_error=on_error).open())[1]
        assert (row["caption"], row["rejection"]) == ("", rejection)


def test_an_unreadable_file_is_an_error_that_names_it_or_rejected(media_dir, tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "tars", media_dir, shards=1)
    data = (folder / "00000.tar").read_bytes().replace(b"ftyp", b"xxxx", 1).replace(b"moov", b"xxxx", 1)
    (folder / "00000.tar").write_bytes(data)
    with pytest.raises(MediaError, match=r"00000\.tar/0000\.mp4"):
        prepared(folder)
    stream = prepared(folder, on_error="reject")
    assert [row["rejection"] for row in stream.open()][:2] == ["unreadable", "none"]


def test_columns_of_conditions_come_with_their_row_under_their_own_names(media_dir, tmp_path: Path) -> None:
    row = samples_of(media_dir)[0]
    file, short = (str(media_dir / row["file_name"]) for row in samples_of(media_dir)[:2])
    path = write_table(tmp_path / "rows.jsonl", [{**row, "file_name": file, "depth": file}])
    stream = prepared(path, control_column="depth")
    assert [shown["control"] for shown in stream.open()] == [file]
    assert stream.conditions == {"control": "control"}
    stream.save(tmp_path / "stream")
    assert PreparedStream.load(tmp_path / "stream") == stream
    with pytest.raises(ColumnError, match="no control column 'pose'"):
        prepared(path, control_column="pose")
    write_table(path, [{**row, "file_name": file, "depth": depth} for depth in (file, short, None)])
    with pytest.raises(
        MediaError,
        match=rf"2 of 3 rows .*: row 1 \({file}\): The control .* has .* pixels, but its.*; row 2 \({file}\): ",
    ):
        prepared(path, control_column="depth")
    stream = prepared(path, control_column="depth", on_error="reject")
    assert [shown["rejection"] for shown in stream.open()] == ["none", "condition", "condition"]


def test_captions_become_the_same_lists_of_texts_as_those_of_rows_prepared_whole(media_dir, tmp_path: Path) -> None:
    texts = [(["a", "b"], "c"), ([], "d"), (["e"], None)]
    rows = [
        {**row, "file_name": str(media_dir / row["file_name"]), "of": {"all": short}, "long": long}
        for row, (short, long) in zip(samples_of(media_dir), texts, strict=False)
    ]
    path = write_table(tmp_path / "rows.jsonl", rows)
    stream = prepared(path, caption_column="of.all,long", caption_template="TOK, {caption}")
    shown = list(stream.open())
    assert [row["caption"] for row in shown] == [["TOK, a", "TOK, b", "TOK, c"], ["TOK, d"], ["TOK, e"]]
    drawn = {CaptionRule().caption(shown[0], stream.caption_column, seed=0, epoch=epoch) for epoch in range(20)}
    assert drawn == {"TOK, a", "TOK, b", "TOK, c"}
    write_table(path, rows[1:2])
    (alone,) = prepared(path, caption_column="long", caption_template="TOK, {caption}").open()
    assert (alone["caption"], alone[ROW]) == ("TOK, d", shown[1][ROW]), "whatever rows lie beside it"


def test_sizes_come_from_columns_of_other_names_without_opening_a_file(tmp_path: Path) -> None:
    row = {"file_name": "gone.mp4", "caption": "c", "meta": {"w": 96, "h": 80, "rate": 16.0}, "seconds": 2.0}
    (tmp_path / "gone.mp4").touch()
    path = write_table(tmp_path / "rows.jsonl", [row] * 65)
    names = {"size_columns": "width=meta.w,height=meta.h,fps=meta.rate,duration=seconds", "sizes_from": "columns"}
    prepared(path, **names).save(tmp_path / "stream")
    stream = PreparedStream.load(tmp_path / "stream")
    assert {tuple(row[name] for name in SIZES) for row in stream.open()} == {(96, 80, 16, 8.0)}
    write_table(path, [row] * 64 + [{**row, "seconds": None}])
    with pytest.raises(ColumnError, match=r"1 of 1 rows lack a size: row 0 \(gone\.mp4\) has .* seconds None"):
        list(prepared(path, **names).open())
    assert list(prepared(path, **names, on_error="reject").open())[-1]["rejection"] == "unreadable"
    with pytest.raises(ColumnError, match="there is no column width2"):
        prepared(path, size_columns="width=width2", sizes_from="columns")


CLIP = ("caption", "clip_start", "clip_end", *SIZES, "bucket_id")


@pytest.mark.parametrize("clips", ["uniform:3", "scenes"])
def test_clips_are_those_of_rows_prepared_whole_and_each_has_its_own_index(clips: str, media_dir, tmp_path) -> None:
    scenes = {"start": [0.0, 0.5, 0.8], "end": [1.2, 1.7, 2.0], "caption": ["a", "b", "c"]}
    rows = [{**row, "file_name": str(media_dir / row["file_name"]), **scenes} for row in samples_of(media_dir)[:2]]
    path = write_table(tmp_path / "rows.jsonl", rows)
    settings = {"clips": clips, **({} if clips == "scenes" else {"clip_frames": 9})}
    whole = prepare(config(path, **settings), spec=SPEC, say=lambda sentence: None)
    stream = prepared(path, **settings)
    shown = list(stream.open())
    assert [[row[name] for name in CLIP] for row in shown] == [[row[name] for name in CLIP] for row in whole.dataset]
    assert len(shown) == len({row[ROW] for row in shown}) == stream.sample.rows == 6
    assert sorted(row[ROW] for row in stream.open(shuffle_buffer=4)) == sorted(row[ROW] for row in shown)
    read = BucketCollator(stream.table, column=stream.column, views=ViewRule(random_crop=False))
    pixels = [read([row])["pixel_values"] for row in shown[:3:2]]
    collate = BucketCollator(whole.table, column=whole.column, views=ViewRule(random_crop=False))
    assert all(map(torch.equal, pixels, (collate([row])["pixel_values"] for row in whole.dataset.select([0, 2]))))
    assert not torch.equal(pixels[0][..., :1, :, :], pixels[1][..., :1, :, :])
    if clips == "scenes":
        write_table(path, [{**rows[0], "end": [1.2, 1.7, 20.0]}])
        with pytest.raises(ColumnError, match=rf"1 clips do not lie .*: row 0: .*, {rows[0]['file_name']}"):
            prepared(path, **settings)
        assert [row["rejection"] for row in prepared(path, **settings, on_error="reject").open()][2] == "clip"
        write_table(path, [{name: rows[0][name] for name in ("file_name", "caption")}])
        with pytest.raises(ColumnError, match="reads the columns start and end, in seconds, but the data set has"):
            prepared(path, **settings)


def rows_that_count(total: int, read: list[int]):
    for number in range(total):
        read.append(number)
        size = {"width": 96, "height": 96, "num_frames": 1, "fps": 0.0}
        yield {"image": {"path": f"{number}.png", "bytes": bytes(1000)}, "caption": "a picture", **size}


def test_a_stream_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were read and not yet handed out are those of open batches, and some that are read together."""
    read: list[int] = []
    rows = IterableDataset.from_generator(partial(rows_that_count, 400, read))
    monkeypatch.setattr(prepared_stream, "find_rows", lambda request: SourceRows(dataset=rows, layout="rows"))
    table = TableConfig(buckets="96,96", bucket_frames=[1]).make(SPEC)
    sizes = ",".join(f"{name}={name}" for name in SIZES)
    source = RowsConfig(dataset="rows", media_column="image", caption_column="caption", size_columns=sizes)
    dataset = PreparedStream(
        parts=(StreamSource(source=source, root=None, table=table),),
        table=table,
        open_table=open_table(SPEC),
        num_shards=1,
        sample=StreamSample(rows=1, row_bytes=1, buckets={}, sizes=[]),
    ).open()
    handed = 0
    stream = StreamingBucketBatcher(
        dataset, BucketGrouping(table=table, batch_size=4), collate_fn=lambda rows: {"rows": rows},
        config=StreamLimits(max_buffered_bytes=40_000),
    )  # fmt: skip
    for batch in itertools.takewhile(lambda batch: not batch.ended, stream):
        handed += batch.size
        assert len(read) - handed <= 25, "a quarter of the bytes read ahead, in whole lots of eight"
    assert handed == 400


@pytest.fixture
def sources(media_dir, tars, tmp_path: Path) -> list[SourceConfig]:
    """Tars, a folder of captions beside media, and a table with masks, each with buckets of its own."""
    rows = samples_of(media_dir)
    for row in rows[:5]:
        shutil.copy(media_dir / row["file_name"], tmp_path / Path(row["file_name"]).name)
        (tmp_path / Path(row["file_name"]).with_suffix(".txt").name).write_text(f"beside {row['caption']}")
    more = [{**row, "file_name": str(media_dir / row["file_name"]), "own": None} for row in rows[:4]]
    more[0]["own"] = more[0]["file_name"]
    table = write_table(tmp_path.parent / f"{tmp_path.name}.jsonl", more)
    small = TableConfig(bucket_tokens=[60], bucket_frames=[1, 9])
    return [
        config(tars, name="tars", weight=2.0),
        config(tmp_path, name="folder", weight=1.0, table=small),
        config(table, name="table", weight=1.0, mask_column="own"),
    ]


@pytest.mark.cases(fast=("True",), slow=("False",))
@pytest.mark.parametrize("packed", [False, True])
def test_several_sources_are_mixed_by_their_shares_and_each_row_comes_once(sources, packed: bool, tmp_path) -> None:
    whole = prepare(sources, spec=SPEC, say=lambda sentence: None)
    stream, columns = prepare_stream(sources, spec=SPEC, say=lambda sentence: None)
    stream.save(tmp_path / "out")
    assert PreparedStream.load(tmp_path / "out") == stream
    assert stream.table == whole.table
    assert columns["bucket_id"].tolist() == column_array(whole.dataset, "bucket_id").tolist()
    options = {"packed": packed, "seed": 3}
    rows = list(stream.open(**options))
    assert [row[ROW] for row in stream.open(**options)] == [row[ROW] for row in rows]
    assert len({row[ROW] for row in rows}) == len(rows) == len(whole.dataset)
    if not packed:
        sizes = ("num_frames", "height", "width", "bucket_id")
        names = (whole.caption_column, *sizes)
        expected = sorted(zip(*(column_array(whole.dataset, name).tolist() for name in names), strict=True))
        assert sorted(tuple(row[name] for name in ("caption", *sizes)) for row in rows) == expected
    read = [MediaSource.from_cell(row["media"], root=stream.root, other_roots=stream.other_roots) for row in rows]
    assert len(read) == len(rows)
    shuffled = list(stream.open(shuffle_buffer=5, seed=1))
    assert sorted(row[ROW] for row in shuffled) == sorted(row[ROW] for row in rows)
    assert sum(row["mask"] is not None for row in rows) == 1, "the others have none, as rows of other sources"


def test_the_first_rows_of_several_sources_come_by_their_weights(media_dir, tmp_path: Path) -> None:
    rows = [{**row, "file_name": str(media_dir / row["file_name"])} for row in samples_of(media_dir)[:1]]
    sizes = {"width": 128, "height": 72, "num_frames": 33, "fps": 16.0}
    configs = []
    for name, weight in (("many", 3.0), ("few", 1.0)):
        path = write_table(tmp_path / f"{name}.jsonl", [{**row, **sizes, "caption": name} for row in rows * 400])
        configs.append(config(path, weight=weight, sizes_from="columns"))
    stream, _ = prepare_stream(configs, spec=SPEC, say=lambda sentence: None)
    captions = [row["caption"] for row in itertools.islice(stream.open(), 400)]
    assert 0.68 < captions.count("many") / 400 < 0.82
    by_turns, _ = prepare_stream(
        [replace(config, weight=None) for config in configs], spec=SPEC, say=lambda sentence: None
    )
    assert [row["caption"] for row in itertools.islice(by_turns.open(), 4)] == ["many", "few"] * 2


def collate_indices(rows):
    return {"index": [row[ROW] for row in rows]}


@pytest.mark.cases(fast=("0",), slow=("4",))
@pytest.mark.parametrize("shuffle_buffer", [0, 4])
def test_a_stream_of_several_sources_resumes_exactly(sources, shuffle_buffer: int) -> None:
    stream, _ = prepare_stream(sources, spec=SPEC, say=lambda sentence: None)

    def loader():
        rows = stream.open(seed=2, shuffle_buffer=shuffle_buffer)
        grouping = BucketGrouping(table=stream.table, batch_size=2)
        batcher = StreamingBucketBatcher(rows, grouping, collate_fn=collate_indices)
        return resume(Accelerator(cpu=True), batcher.make_loader())

    whole = loader()
    states, wanted = [whole.state_dict()], []
    for batch in whole:
        wanted.append(batch["index"])
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert len(wanted) > 6
    for finished, state in list(enumerate(states))[:-1:3]:
        again = loader()
        again.load_state_dict(state)
        assert [batch["index"] for batch in again] == wanted[finished:]


def test_sources_of_a_stream_that_cannot_go_together_are_refused(sources) -> None:
    with pytest.raises(BucketingError, match="Give all sources a `weight`, or none"):
        prepare_stream([sources[0], replace(sources[1], weight=None)], spec=SPEC, say=lambda sentence: None)
    control = replace(sources[2], mask_column=None, control_column="file_name")
    with pytest.raises(ColumnError, match="The source folder has no control column, which others have"):
        prepare_stream([sources[1], control], spec=SPEC, say=lambda sentence: None)


EARLIER = {
    "local": True,
    "source": {
        "dataset": "../rows.jsonl", "config_name": None, "split": "train", "media_column": "file_name",
        "caption_columns": ["caption", "long"], "caption_template": "TOK, {caption}",
        "sizes": {name: name for name in SIZES}, "target_fps": 8.0, "clips": "uniform:2", "clip_frames": 9,
        "on_error": "reject", "on_caption_error": "empty", "conditions": {"control": "depth"},
    },
    "rule": {"metric": "log", "max_aspect_error": None, "max_upscale": 1.0},
    "num_shards": 1,
    "sample": {"rows": 2, "row_bytes": 11, "buckets": {"1": 2}, "sizes": [[9, 72, 128]]},
}  # fmt: skip
"""Entry of a manifest that an earlier release wrote, which had other names for the settings of a source."""


def test_a_stream_that_an_earlier_release_described_has_the_same_rows(tmp_path: Path) -> None:
    size = {"width": 128, "height": 72, "num_frames": 33, "fps": 16.0}
    write_video(tmp_path / "a.mp4", [np.zeros((72, 128, 3), np.uint8)] * 33, fps=16)
    row = {"file_name": "a.mp4", "caption": ["x", "y"], "long": "z", "depth": "a.mp4", **size}
    path = write_table(tmp_path / "rows.jsonl", [row])
    settings = {"caption_column": "caption,long", "caption_template": "TOK, {caption}", "control_column": "depth"}
    settings |= {"clips": "uniform:2", "clip_frames": 9, "on_error": "reject", "on_caption_error": "empty"}
    now = prepared(path, table=TableConfig(buckets="64,96", bucket_frames=[1, 9]), **settings)
    now.save(tmp_path / "stream")
    manifest = json.loads((tmp_path / "stream" / MANIFEST).read_text())
    (tmp_path / "stream" / MANIFEST).write_text(json.dumps({**manifest, "stream": EARLIER}))
    earlier = PreparedStream.load(tmp_path / "stream")
    assert (earlier.parts[0].source, earlier.root) == (now.parts[0].source, now.root)
    assert [row[ROW] for row in earlier.open()] == [1957456681678402035, 8055056557228664191]


def test_what_a_stream_cannot_be_is_refused_by_name(media_dir, tars, parquet, prepared_dir, tmp_path: Path) -> None:
    prepared(tars).save(tmp_path / "stream")
    with pytest.raises(BucketingError, match=r"describes a stream .* with `streaming=True`"):
        PreparedDataset.load(tmp_path / "stream")
    with pytest.raises(BucketingError, match="holds rows and describes no stream"):
        PreparedStream.load(prepared_dir)
    both = config(tars, table=TableConfig(buckets="96,96", bucket_frames=[9], image_sizes="video"))
    for source, error, message in (
        (config(tars, caption_column="json"), ColumnError, r"holds dicts; name .* `caption_column`: json\.caption"),
        (
            config(tars, caption_column="txt"),
            ColumnError,
            r"no caption column 'txt'.*; caption_column json\.cap",
        ),
        (config(media_dir / "images"), ColumnError, "No caption column was found"),
        (
            config(f"{tars.parent.parent}/stream*/*/*.[tp]*"),
            MediaError,
            r"names \.parquet, \.tar files; those of a pattern must be of one",
        ),
        (config(f"{tars.parent}/*"), MediaError, "No file is named"),
        (config(tars, table=TableConfig(buckets="512,512", bucket_frames=[9])), BucketingError, "too_small"),
        (both, BucketingError, "Omit `image_sizes`: a stream does not know the sizes of its videos"),
        (
            config(tars, table=TableConfig(bucket_tokens=[60], bucket_frames=[1, 9], num_buckets=4)),
            BucketingError,
            "Omit `num_buckets`: a stream does not know the sizes of its rows",
        ),
        (config(tars, repeats=2.0), BucketingError, "Omit `repeats`: a stream does not know how many rows"),
        (config(write_table(tmp_path / "empty.jsonl", [])), MediaError, "is empty; write one row"),
    ):
        with pytest.raises(error, match=message):
            prepare_stream(source, spec=SPEC, say=lambda sentence: None)


@pytest.mark.parametrize("changes", [
    {"root": "../../clips"}, {"source": {"dataset": "../../clips/rows.jsonl"}}, {"local": False, "root": "file:///"},
    {"source": {"mask_folder": "/masks"}}, {"source": {"reference_folder": ["../beside", "/masks"]}},
])  # fmt: skip
def test_a_downloaded_stream_reads_only_what_lies_in_its_download(
    changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_BUCKETING_ALLOWED_PATHS")
    for folder in ("clips", "data/beside"):
        (tmp_path / folder).mkdir(parents=True)
        write_image(tmp_path / folder / "a.png", np.zeros((256, 256, 3), np.uint8))
        write_table(tmp_path / folder / "rows.jsonl", [{"file_name": "a.png", "caption": "x"}])
    stream = tmp_path / "data" / "stream"
    prepared(tmp_path / "clips" / "rows.jsonl").save(stream)
    assert len(list(PreparedStream.load(stream).open())) == 1, "prepared here"
    prepared(tmp_path / "data" / "beside" / "rows.jsonl").save(stream)
    record_of_download(tmp_path / "data", "stream/bucketing.json")
    assert len(list(PreparedStream.load(stream).open())) == 1, "within its download"
    manifest = json.loads((stream / MANIFEST).read_text())
    part = manifest["stream"]
    part |= {**changes, "source": {**part["source"], **changes.get("source", {})}}
    (stream / MANIFEST).write_text(json.dumps(manifest))
    record_of_download(tmp_path / "data", "stream/bucketing.json")
    with pytest.raises(BucketingError, match=r"stream reads files from .*HF_BUCKETING_ALLOWED_PATHS="):
        PreparedStream.load(stream)
