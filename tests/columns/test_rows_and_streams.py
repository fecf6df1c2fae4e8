"""The same data as rows and as a stream: the same files, captions and sizes, or the same refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from hf_bucketing import LatentSpec
from hf_bucketing.columns import load_source
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared_stream import PreparedStream, prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.errors import BucketingError, ColumnError, MediaError
from hf_bucketing.settings import build
from tests.columns.formats import FORMATS, SIZES, TEXTS, write_tar
from tests.conftest import run_script_here

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
CAPTIONS = ["NA", "0001", "None", "1e5", " null"]
Write = Callable[[Path, list[Path]], Path]


def tar(*names: str) -> Write:
    """Return what writes a tar of the files that each sample has: `{}.mp4` is a clip, others hold its caption."""

    def write(folder: Path, clips: list[Path]) -> Path:
        members = []
        for number, (clip, caption) in enumerate(zip(clips, CAPTIONS, strict=True)):
            for name in names:
                ending = name.rpartition(".")[2].lower()
                inside = json.dumps({"caption": f"json {caption}"}) if ending == "json" else caption
                data = clip.read_bytes() if ending in ("mp4", "png") else inside.encode()
                members.append((name.format(f"{number:03}"), data))
        write_tar(folder / "data.tar", members)
        return folder / "data.tar"

    return write


def table(ending: str) -> Write:
    def write(folder: Path, clips: list[Path]) -> Path:
        path = folder / f"data.{ending}"
        rows = [{"file_name": clip.name, "caption": text} for clip, text in zip(clips, CAPTIONS, strict=True)]
        for clip in clips:
            (folder / clip.name).write_bytes(clip.read_bytes())
        if ending == "parquet":
            Dataset.from_list(rows).to_parquet(str(path))
        elif ending in ("csv", "tsv"):
            separator = {"csv": ",", "tsv": "\t"}[ending]
            lines = [separator.join(row.values()) for row in rows]
            path.write_text("\n".join([separator.join(rows[0]), *lines]) + "\n")
        else:
            text = json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows)
            path.write_text(text)
        return path

    return write


WRITERS: dict[str, Write] = {
    "mp4 and txt": tar("{}.mp4", "{}.txt"),
    "png and txt": tar("{}.png", "{}.txt"),
    "txt and json": tar("{}.mp4", "{}.txt", "{}.json"),
    "json": tar("{}.mp4", "{}.json"),
    "upper case": tar("{}.MP4", "{}.TXT"),
    "dots": tar("{}.v2.mp4", "{}.v2.txt"),
    **{ending: table(ending) for ending in ("csv", "tsv", "jsonl", "parquet")},
    "list in json": table("json"),
}


@pytest.fixture(scope="module")
def clips(media_dir: Path) -> dict[str, list[Path]]:
    found = {ending: sorted(media_dir.rglob(f"*.{ending}")) for ending in ("mp4", "png")}
    return {ending: [paths[number % len(paths)] for number in range(len(CAPTIONS))] for ending, paths in found.items()}


def config(path: Path, **settings: object) -> SourceConfig:
    buckets = TableConfig(bucket_tokens=[60, 110, 150], bucket_frames=[1, 9, 17, 25])
    return SourceConfig(dataset=str(path), table=buckets, target_fps=8, **settings)


COLUMNS = ("num_frames", "fps", "height", "width", "aspect_ratio", "bucket_id", "num_tokens", "rejection")


def of_rows(source: SourceConfig) -> list[tuple]:
    prepared = prepare(source, spec=SPEC, overwrite=True, say=lambda sentence: None)
    names = (prepared.caption_column, *COLUMNS)
    return list(zip(*(prepared.dataset[name][:] for name in names), strict=True))


def streamed(source: SourceConfig) -> PreparedStream:
    return prepare_stream(source, spec=SPEC, say=lambda sentence: None)[0]


def of_stream(source: SourceConfig) -> list[tuple]:
    return [tuple(row[name] for name in ("caption", *COLUMNS)) for row in streamed(source).open()]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_same_columns_buckets_and_captions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format of docs/formats.md, as rows and as a stream."""
    case = FORMATS[name]
    monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", f"file://{tmp_path}")
    case.write(tmp_path)
    table = {"buckets": "16,32;32,48;48,16", "bucket_frames": [1, 5], "max_upscale": 4.0, "target_fps": 8.0}
    source = build(SourceConfig, {"dataset": case.dataset(tmp_path), **table, **case.options})
    rows = of_rows(source)
    assert of_stream(source) == rows
    for file, (caption, frames, _, height, width, _, bucket, *_) in zip(case.files, rows, strict=True):
        assert (caption[0] if isinstance(caption, list) else caption) == TEXTS[file]
        assert (width, height, frames) == SIZES[file]
        assert bucket >= 0
    stream = load_source(source.dataset, streaming=True, **case.options)
    whole = load_source(source.dataset, **case.options)
    assert (stream.column, stream.caption_column, stream.root) == (whole.column, whole.caption_column, whole.root)
    for loaded, layout in ((whole, f"{len(case.files)} "), (stream, "")):
        assert loaded.describe().startswith(f"{source.dataset}: ")
        assert layout in loaded.layout
        assert TEXTS[case.files[0]] in loaded.describe().splitlines()[1]
    named = [row[stream.caption_column] for row in stream.dataset]
    assert named == whole.dataset[whole.caption_column][:]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets reads no mixed columns")
def test_captions_of_several_types_are_rejected_alike(clips: dict, tmp_path: Path) -> None:
    captions = ["a fox", 3, {"x": 1}, None, "b"]
    rows = [{"file_name": clip.name, "caption": text} for clip, text in zip(clips["mp4"], captions, strict=True)]
    for clip in clips["mp4"]:
        (tmp_path / clip.name).write_bytes(clip.read_bytes())
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = config(tmp_path / "data.jsonl", on_error="reject")
    shown = of_rows(source)
    assert [row[0] for row in shown] == ["a fox", "", "", "", "b"]
    assert [row[-1] for row in shown] == ["none", "caption", "caption", "caption", "none"]
    assert [*map(repr, of_stream(source))] == [*map(repr, shown)], "also those that are not a number"
    with pytest.raises(ColumnError, match="caption"):
        streamed(config(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("name", WRITERS)
def test_rows_and_stream_have_the_same_files_and_captions(name: str, clips: dict, tmp_path: Path) -> None:
    files = clips["png" if name == "png and txt" else "mp4"]
    source = config(WRITERS[name](tmp_path, files))
    expected = CAPTIONS if name != "json" else [f"json {caption}" for caption in CAPTIONS]
    rows = of_rows(source)
    assert [row[0].strip() for row in rows] == [caption.strip() for caption in expected]
    assert of_stream(source) == rows


def test_a_sample_ends_at_the_first_dot_of_its_name_in_a_tar(clips: dict, tmp_path: Path) -> None:
    path = tar("clip.{}.mp4", "clip.{}.txt")(tmp_path, clips["mp4"])
    for read in (of_rows, of_stream):
        with pytest.raises(ColumnError, match="ends at its first dot, so rename files with more dots"):
            read(config(path))


@pytest.mark.parametrize("split", ["train", "train[:2]", "train[2:]", "train[1:4]"])
@pytest.mark.parametrize("name", ["mp4 and txt", "csv", "parquet"])
def test_a_part_of_the_split_has_the_same_rows(name: str, split: str, clips: dict, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path, clips["mp4"])
    rows = of_rows(config(path, split=split))
    assert 0 < len(rows) <= len(CAPTIONS)
    assert of_stream(config(path, split=split)) == rows


@pytest.mark.parametrize("split", ["nonsense", "test", "train[:50%]", "train[-2:]", "train[:2]+train[3:]", ""])
def test_a_split_that_a_stream_cannot_have_is_refused(split: str, clips: dict, tmp_path: Path) -> None:
    path = WRITERS["csv"](tmp_path, clips["mp4"])
    with pytest.raises(MediaError, match="split"):
        streamed(config(path, split=split))


def test_rows_are_not_counted_over_several_shards(clips: dict, tmp_path: Path) -> None:
    """Processes and workers read them at once, so that none knows how many rows the others passed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        WRITERS["mp4 and txt"](tmp_path / name, clips["mp4"])
    with pytest.raises(MediaError, match="cannot be counted in the 2 shards"):
        streamed(config(tmp_path / "*" / "data.tar", split="train[:2]"))


def test_an_empty_cell_of_a_csv_alone_is_a_missing_caption_and_numbers_stay_numbers(tmp_path: Path, clips) -> None:
    path = WRITERS["csv"](tmp_path, clips["mp4"])
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([f"{lines[0]},fps", *(f"{line},NA" for line in lines[1:-1]), f"{clips['mp4'][-1].name},,8"])
    )
    loaded = prepare(config(path, on_error="empty"), spec=SPEC, say=lambda sentence: None)
    assert loaded.dataset["caption"][:] == [*CAPTIONS[:-1], ""]
    assert load_source(str(path)).dataset["fps"][:] == [None] * 4 + [8.0]


def test_a_stream_is_prepared_while_sampled_rows_are_rejected(clips: dict, pipeline_dir: Path, tmp_path: Path) -> None:
    path = WRITERS["csv"](tmp_path, clips["mp4"])
    path.write_text(path.read_text() + "gone.mp4,a file that is not there\n")
    flags = ("--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25", "--streaming", "--on_error", "reject")
    done = run_script_here(
        "prepare_dataset.py",
        *flags,
        dataset=path,
        output_dir=tmp_path / "out",
        target_fps=8,
        pretrained_model_name_or_path=pipeline_dir,
    )
    assert "unreadable" in done.stdout
    assert "gone.mp4" in done.stdout


def test_a_folder_with_a_script_of_a_data_set_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text("import datasets\n")
    for read in (of_rows, of_stream):
        with pytest.raises(BucketingError, match="mine cannot be loaded: Dataset scripts are no longer supported"):
            read(config(tmp_path / "mine"))
