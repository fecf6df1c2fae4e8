"""The layouts of data that are read: captions beside files, tables named directly, folders with metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, Features, Image, Value, Video
from PIL import Image as PillowImage

import hf_bucketing
from hf_bucketing import ColumnError, MediaError
from hf_bucketing.columns import MediaMetadata, PreparedDataset, check_captions, load_source, map_columns
from hf_bucketing.media import write_video
from hf_bucketing.media.source import MediaSource
from tests.conftest import run_script_here

VIDEO, PHOTO, PICTURE = (32, 16, 6), (48, 32, 1), (64, 40, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A video, a photo and a picture at three depths, with captions; and files that are no samples."""
    root = tmp_path / "clips"
    deep = root / "trip" / "day 1"
    deep.mkdir(parents=True)
    write_video(deep / "b.mp4", [np.zeros((16, 32, 3), np.uint8)] * 6, fps=8)
    PillowImage.new("RGB", PHOTO[:2]).save(root / "trip" / "c.JPG", format="JPEG")
    PillowImage.new("RGB", PICTURE[:2]).save(root / "a.png")
    (root / "a.txt").write_bytes(b"\xef\xbb\xbfa picture\r\n")
    (deep / "b.txt").write_text("a clip, ü\n", encoding="utf-8")
    (root / "trip" / "c.TXT").write_text("  a photo ")
    (root / "notes.md").write_text("x")
    (root / "readme.txt").write_text("x")
    (root / ".hidden.mp4").write_text("x")
    (root / ".thumbnails").mkdir()
    (root / ".thumbnails" / "d.mp4").write_text("x")
    return root


def remove_captions(folder: Path) -> None:
    for path in folder.rglob("*.[tT][xX][tT]"):
        path.unlink()


def sizes_of(loaded) -> list[tuple[int, int, int]]:
    dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, root=loaded.root))
    return [(row["width"], row["height"], row["num_frames"]) for row in dataset]


def test_captions_beside_files_at_any_depth(folder: Path) -> None:
    loaded = load_source(str(folder))
    assert (loaded.column, loaded.caption_column, loaded.root) == ("file_name", "caption", str(folder))
    assert loaded.dataset["file_name"][:] == ["a.png", "trip/c.JPG", "trip/day 1/b.mp4"]
    assert loaded.dataset["caption"][:] == ["a picture", "a photo", "a clip, ü"]
    assert sizes_of(loaded) == [PICTURE, PHOTO, VIDEO]


def test_what_is_chosen_is_described_with_what_is_ignored_and_an_example(folder: Path) -> None:
    chosen, example = load_source(str(folder)).describe().splitlines()
    assert "3 media files with .txt captions beside them" in chosen
    for ignored in ("1 of other types", "1 hidden,", "1 hidden folders", "1 .txt without a media file"):
        assert ignored in chosen
    assert example == "media column file_name, caption column caption; row 0: a.png · a picture"


def test_missing_empty_and_undecodable_txt_files_are_caption_problems_that_name_the_file(folder: Path) -> None:
    (folder / "a.txt").write_text(" \n")
    (folder / "trip" / "c.TXT").unlink()
    (folder / "trip" / "day 1" / "b.txt").write_bytes("für".encode("latin-1"))
    (folder / "z.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "z.txt").write_text("fine")
    loaded = load_source(str(folder))
    with pytest.raises(ColumnError) as raised:
        check_captions(loaded.dataset, "caption", media_column=loaded.column)
    for part in ("3 of 4", "1 missing (row 1: trip/c.JPG)", "1 empty (row 0: a.png)"):
        assert part in str(raised.value)
    assert "1 not UTF-8 text (row 2: trip/day 1/b.mp4)" in str(raised.value)
    emptied = check_captions(loaded.dataset, "caption", on_error="empty").dataset
    assert emptied["caption"][:] == ["", "", "", "fine"]


def test_media_without_a_caption_file_get_the_caption_that_is_given_for_them(folder: Path) -> None:
    (folder / "trip" / "c.TXT").unlink()
    assert load_source(str(folder), missing_caption="TOK").dataset["caption"][:] == ["a picture", "TOK", "a clip, ü"]
    remove_captions(folder)
    assert load_source(str(folder), missing_caption="TOK").dataset["caption"][:] == ["TOK"] * 3


def test_two_media_files_of_one_stem_are_an_error_that_names_both(folder: Path) -> None:
    (folder / "trip" / "c.mp4").write_text("x")
    with pytest.raises(MediaError, match=r"1 captions .* trip/c\.JPG and trip/c\.mp4"):
        load_source(str(folder))


def test_links_are_followed_and_circles_end(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "e.png").write_bytes((folder / "a.png").read_bytes())
    (elsewhere / "e.txt").write_text("linked")
    os.symlink(elsewhere, folder / "link")
    os.symlink(folder, elsewhere / "back")
    assert load_source(str(folder)).dataset["file_name"][:] == [
        "a.png",
        "link/e.png",
        "trip/c.JPG",
        "trip/day 1/b.mp4",
    ]


@pytest.mark.parametrize(
    ("split", "rows"), [("train[:2]", [0, 1]), ("train[2:]", [2]), ("train[:1]+train[2:]", [0, 2])]
)
def test_parts_of_captions_beside_files(folder: Path, split: str, rows: list[int]) -> None:
    every = load_source(str(folder)).dataset["file_name"][:]
    assert load_source(str(folder), split=split).dataset["file_name"][:] == [every[row] for row in rows]


def test_a_split_that_a_folder_or_table_does_not_have_is_named(folder: Path) -> None:
    (folder.parent / "rows.csv").write_text("path,text\na.png,x\n")
    for source in (folder, folder.parent / "rows.csv"):
        with pytest.raises(MediaError, match=r"(?s)train.*validation|validation.*train"):
            load_source(str(source), split="validation")


ROWS = [("trip/day 1/b.mp4", "a clip, ü"), ("a.png", 'a "picture", wide')]


def write_table(path: Path, rows: list[dict]) -> None:
    frame = pd.DataFrame(rows)
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_table_that_is_named_directly(folder: Path, ending: str, absolute: bool) -> None:
    table = folder / f"my rows [1].{ending}"
    write_table(table, [{"path": str(folder / file) if absolute else file, "text": text} for file, text in ROWS])
    loaded = load_source(str(table))
    assert (loaded.column, loaded.caption_column, loaded.root) == ("path", "text", str(folder))
    assert check_captions(loaded.dataset, "text").dataset["text"][:] == [text for _, text in ROWS]
    assert sizes_of(loaded) == [VIDEO, PICTURE]
    assert "2 rows of my rows [1]." in loaded.describe()


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "parquet"])
def test_a_folder_with_metadata_of_any_kind(folder: Path, ending: str) -> None:
    remove_captions(folder)
    write_table(folder / f"metadata.{ending}", [{"video": file, "prompt": text} for file, text in ROWS])
    loaded = load_source(str(folder))
    assert (loaded.column, loaded.caption_column) == ("video", "prompt")
    assert sizes_of(loaded) == [VIDEO, PICTURE]


@pytest.mark.parametrize("media", ["file_name", "video", "video_path", "path", "file_path", "image"])
@pytest.mark.parametrize("caption", ["caption", "text", "prompt", "description"])
def test_columns_are_found_by_their_usual_names(folder: Path, media: str, caption: str) -> None:
    write_table(folder / "rows.jsonl", [{"id": 1, media: "a.png", caption: "x"}])
    loaded = load_source(str(folder / "rows.jsonl"))
    assert (loaded.column, loaded.caption_column) == (media, caption)


def test_columns_that_could_be_meant_twice_are_named_until_one_is_given(folder: Path) -> None:
    table = folder / "rows.csv"
    write_table(table, [{"video": "a.png", "path": "trip/c.JPG", "caption": "x", "text": "y"}])
    with pytest.raises(ColumnError, match="several media columns: video and path"):
        load_source(str(table))
    with pytest.raises(ColumnError, match="several caption columns: caption and text"):
        load_source(str(table), media_column="path")
    loaded = load_source(str(table), media_column="path", caption_column="text")
    assert (loaded.dataset["path"][:], loaded.dataset["text"][:]) == (["trip/c.JPG"], ["y"])
    assert sizes_of(loaded) == [PHOTO]


def test_a_column_of_media_goes_before_names_of_paths(tmp_path: Path, folder: Path) -> None:
    features = Features(clip=Image(), path=Value("string"), caption=Value("string"))
    rows = {"clip": [str(folder / "a.png")], "path": ["gone.png"], "caption": ["x"]}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    loaded = load_source(str(tmp_path / "rows.parquet"))
    assert (loaded.column, loaded.root) == ("clip", str(tmp_path))
    assert "media column clip" in loaded.describe()
    assert sizes_of(loaded) == [PICTURE]
    both = Features(video=Video(), image=Image())
    rows = {"video": [str(folder / "trip/day 1/b.mp4")], "image": [str(folder / "a.png")]}
    Dataset.from_dict(rows, features=both).to_parquet(str(tmp_path / "both.parquet"))
    with pytest.raises(ColumnError, match="video and image"):
        load_source(str(tmp_path / "both.parquet"))


def test_a_column_that_does_not_exist_is_an_error_that_says_which_would_do(folder: Path) -> None:
    write_table(folder / "metadata.jsonl", [{"file_name": "a.png", "url": "https://x.org/a.png", "caption": "x"}])
    remove_captions(folder)
    with pytest.raises(ColumnError, match=r"no media column 'video', only \['file_name', 'url', 'caption'\]"):
        load_source(str(folder), media_column="video")
    with pytest.raises(ColumnError, match="caption_column caption would do"):
        load_source(str(folder), caption_column="text")
    assert load_source(str(folder)).column == "file_name", "it means the files of a metadata.jsonl"


def test_mistakes_in_naming_a_source_are_said(folder: Path) -> None:
    (folder / "empty.csv").write_text("\n")
    (folder / "head.csv").write_text("path,text\n")
    (folder / "broken.json").write_text("{nope")
    (folder / "latin.csv").write_bytes("path,text\na.png,für\n".encode("latin-1"))
    for name, message in (
        ("gone.csv", "The file .*gone.csv does not exist"),
        ("gone", "folder .*gone does not exist"),
        ("notes.md", "not a table of samples"),
        ("empty.csv", "is empty"),
        ("head.csv", "head.csv holds no rows"),
        ("broken.json", "cannot load .*broken.json"),
        ("latin.csv", "cannot load .*latin.csv.*utf-8"),
    ):
        with pytest.raises((MediaError, ColumnError), match=message):
            load_source(str(folder / name))
    for ending in ("csv", "jsonl"):
        write_table(folder / f"metadata.{ending}", [{"file_name": "a.png", "caption": "x"}])
    with pytest.raises(MediaError, match=r"metadata\.csv and .*metadata\.jsonl"):
        load_source(str(folder))


def test_a_table_in_a_store_that_refuses_says_where_credentials_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):  # as that of botocore
        pass

    def refuse(*args, **options):
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr("hf_bucketing.columns.layouts.load_dataset", refuse)
    with pytest.raises(MediaError, match=r"s3://bucket/a.jsonl cannot be reached \(NoCred.*locate.*the environment"):
        load_source("s3://bucket/a.jsonl")


def test_relative_paths_of_a_data_set_on_the_hub_are_files_of_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_dict({"video": ["clips/a.mp4"], "caption": ["x"]})
    monkeypatch.setattr("hf_bucketing.columns.layouts.load_dataset", lambda name, config, split: rows)
    loaded = load_source("owner/clips")
    source = MediaSource.from_cell(loaded.dataset[0]["video"], root=loaded.root)
    assert source.path == "hf://datasets/owner/clips/clips/a.mp4"


def test_load_source_is_a_name_of_the_package() -> None:
    assert hf_bucketing.load_source is load_source


def test_preparing_from_captions_beside_files(folder: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    flags = ("--pretrained_model_name_or_path", pipeline_dir, "--buckets", "16,32;32,48", "--bucket_frames", "1,5")
    arguments = ("--dataset", folder, *flags, "--output_dir", tmp_path / "out", "--target_fps", 8)
    result = run_script_here("prepare_dataset.py", *arguments)
    assert "row 0: a.png · a picture" in result.stdout
    prepared = PreparedDataset.load(tmp_path / "out")
    assert prepared.root == str(folder)
    assert prepared.dataset["caption"][:] == ["a picture", "a photo", "a clip, ü"]
    assert min(prepared.dataset["bucket_id"]) >= 0
    remove_captions(folder)
    result = run_script_here("prepare_dataset.py", *arguments, check=False)
    assert result.returncode == 1
    assert "No caption column" in result.stderr.strip().splitlines()[-1]
