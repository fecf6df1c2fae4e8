"""TOML files of musubi-tuner, sd-scripts and diffusion-pipe: sources as settings, and keys without effect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from hf_bucketing import MediaError
from hf_bucketing.columns import load_source, load_toml
from hf_bucketing.columns.settings import SourceConfig
from hf_bucketing.columns.source_lists import make_sources, name_sources
from hf_bucketing.columns.trainer_toml import load_repeats
from hf_bucketing.settings import build, names_of
from tests.columns.formats import TEXTS, json_rows, write_captioned_media, write_media

OF_OTHERS = {"repeats", "caption_template", "clips", "control_column", "mask_column"}
"""Settings of several sources, captions, clips and conditions, which those parts add to `SourceConfig`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of captions beside media, their control videos, and a jsonl; the working directory is another one."""
    write_captioned_media(tmp_path / "clips")
    write_media(tmp_path / "depth", "a.mp4")
    json_rows("list.jsonl", "video_path", "caption", control_path="depth/a.mp4")(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def read(folder: Path, text: str) -> tuple[list[dict], list[str]]:
    (folder / "data.toml").write_text(text)
    sources, ignored = load_toml(folder / "data.toml")
    for source in sources:
        own = {name: value for name, value in source.items() if name not in OF_OTHERS}
        assert own.keys() <= set(names_of(SourceConfig)), "all are settings"
        build(SourceConfig, {"bucket_tokens": [60], **own})
    return sources, ignored


def test_musubi_tuner(folder: Path) -> None:
    sources, ignored = read(
        folder,
        """
        [general]
        resolution = [960, 544]
        caption_extension = ".txt"
        batch_size = 1
        enable_bucket = true
        bucket_no_upscale = false

        [[datasets]]
        video_directory = "clips"
        control_directory = "depth"
        cache_directory = "cache"
        target_frames = [1, 25, 45]
        frame_extraction = "uniform"
        frame_sample = 4
        num_repeats = 3
        source_fps = 30.0

        [[datasets]]
        video_jsonl_file = "list.jsonl"
        resolution = [640, 640]
        frame_extraction = "full"
        max_frames = 45

        [[datasets]]
        image_directory = "clips"
        """,
    )
    assert sources == [
        {
            "dataset": str(folder / "clips"),
            "repeats": 3.0,
            "caption_extension": ".txt",
            "control_folder": str(folder / "depth"),
            "control_column": "control",
            "bucket_frames": [1, 25, 45],
            "clips": "uniform:4",
            "media_kind": "videos",
            "name": "clips-videos",
        },
        {"dataset": str(folder / "list.jsonl"), "control_column": "control_path"},
        {
            "dataset": str(folder / "clips"),
            "caption_extension": ".txt",
            "media_kind": "images",
            "name": "clips-images",
        },
    ]
    keys = {sentence.partition(" = ")[0] for sentence in ignored}
    assert keys == {
        "target_frames",
        "batch_size",
        "bucket_no_upscale",
        "resolution",
        "cache_directory",
        "source_fps",
        "max_frames",
    }
    (resolution,) = (sentence for sentence in ignored if sentence.startswith("resolution"))
    assert resolution.startswith("resolution = [960, 544] and [640, 640] has no effect: ")
    assert "`bucket_tokens`" in resolution
    first = load_source(sources[0]["dataset"], companions={"control": sources[0]["control_folder"]})
    assert first.dataset["control"][0] == "depth/a.mp4"
    assert load_source(sources[1]["dataset"]).dataset["caption"][:] == [TEXTS["a.mp4"], TEXTS["b.mp4"]]


@pytest.mark.parametrize(
    ("keys", "clips"),
    [
        ("", "head"),
        ('frame_extraction = "head"', "head"),
        ('frame_extraction = "chunk"', "all"),
        ('frame_extraction = "slide"\nframe_stride = 10', "slide:10"),
        ('frame_extraction = "uniform"', "head"),
        ('frame_extraction = "uniform"\nframe_sample = 2', "uniform:2"),
        ('frame_extraction = "full"', None),
    ],
)
def test_frame_extraction_becomes_clips(folder: Path, keys: str, clips: str | None) -> None:
    ((source,), _) = read(folder, f'[[datasets]]\nvideo_directory = "clips"\n{keys}\n')
    assert source.get("clips") == clips


def test_controls_of_images_and_numbered_ones_are_references(folder: Path) -> None:
    json_rows("images.jsonl", "image_path", "caption", control_path="depth/a.mp4")(folder)
    json_rows("edits.jsonl", "video_path", "caption", control_path_10="a", control_path_0="a", control_path_2="a")(
        folder
    )
    sources, ignored = read(
        folder,
        """
        [[datasets]]
        image_directory = "clips"
        control_directory = "depth"
        control_resolution = [1024, 768]
        no_resize_control = false

        [[datasets]]
        image_jsonl_file = "images.jsonl"

        [[datasets]]
        video_jsonl_file = "edits.jsonl"

        [[directory]]
        path = "clips"
        control_path = ["depth", "depth"]
        """,
    )
    shown = [
        {name: value for name, value in source.items() if name.startswith(("reference", "control"))}
        for source in sources
    ]
    depth = folder / "depth"
    assert shown == [
        {"reference_folder": [depth], "reference_column": ["reference"], "reference_pixels": 1024 * 768},
        {"reference_column": ["control_path"]},
        {"reference_column": ["control_path_0", "control_path_2", "control_path_10"]},
        {"reference_folder": [depth, depth], "reference_column": ["reference"]},
    ]
    assert not ignored


def test_sd_scripts(folder: Path) -> None:
    sources, ignored = read(
        folder,
        """
        [general]
        shuffle_caption = true
        keep_tokens = 1
        flip_aug = false

        [[datasets]]
        resolution = 512
        keep_tokens = 2

          [[datasets.subsets]]
          image_dir = 'clips'
          class_tokens = 'a fox'
          num_repeats = 10
          caption_prefix = 'TOK,'
          enable_wildcard = false

          [[datasets.subsets]]
          image_dir = 'clips'
          caption_extension = '.txt'
          caption_suffix = 'film'
          conditioning_data_dir = 'depth'
          keep_tokens = 3
        """,
    )
    assert sources == [
        {
            "dataset": str(folder / "clips"),
            "repeats": 10.0,
            "caption_extension": ".caption",
            "missing_caption": "a fox",
            "caption_template": "TOK, {caption}",
        },
        {
            "dataset": str(folder / "clips"),
            "caption_extension": ".txt",
            "control_folder": str(folder / "depth"),
            "control_column": "control",
            "caption_template": "{caption} film",
        },
    ]
    assert "keep_tokens = 2 and 3 has no effect: give `keep_tags` when training." in ignored
    loaded = load_source(sources[0]["dataset"], caption_extension=".caption", missing_caption="a fox")
    assert loaded.dataset["caption"][:] == ["a fox"] * 3
    unasked = [sentence for sentence in ignored if "flip_aug" in sentence or "enable_wildcard" in sentence]
    assert not unasked, "nothing was asked for"


def test_diffusion_pipe(folder: Path) -> None:
    sources, ignored = read(
        folder,
        """
        resolutions = [512]
        enable_ar_bucket = true
        num_ar_buckets = 7
        frame_buckets = [1, 33]

        [[directory]]
        path = 'clips'
        mask_path = 'depth'
        num_repeats = 0.5
        caption_prefix = 'TOK, '

        [[directory]]
        path = 'clips'
        frame_buckets = [33]
        some_new_key = 1
        """,
    )
    assert sources == [
        {
            "dataset": str(folder / "clips"),
            "repeats": 0.5,
            "mask_folder": str(folder / "depth"),
            "mask_column": "mask",
            "caption_template": "TOK, {caption}",
            "bucket_frames": [1, 33],
        },
        {"dataset": str(folder / "clips"), "bucket_frames": [1, 33]},
    ]
    assert [sentence.partition(" = ")[0] for sentence in ignored] == ["num_ar_buckets", "resolutions", "some_new_key"]
    assert "some_new_key = 1 has no effect: there is no counterpart." in ignored


def test_paths_begin_at_the_file_or_at_the_working_directory(folder: Path) -> None:
    write_captioned_media(folder / "elsewhere" / "here")
    text = "[[directory]]\npath = '{}'\n"
    assert read(folder, text.format("here"))[0] == [{"dataset": str(folder / "elsewhere" / "here")}]
    assert read(folder, text.format(folder / "clips"))[0] == [{"dataset": str(folder / "clips")}]
    write_captioned_media(folder / "elsewhere" / "clips")
    with pytest.raises(MediaError, match=rf"source 1 of .*: {folder}/clips and .*/elsewhere/clips are both there"):
        read(folder, text.format("clips"))
    with pytest.raises(MediaError, match=r"/none and .*/elsewhere/none do not exist"):
        read(folder, text.format("none"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[general]\nresolution = 1\n", "lists no sources"),
        ("[[datasets]\n", "is no TOML"),
        ("[[datasets]]\nnum_repeats = 2\n", "source 1 of .* needs one of .*got none"),
        (
            "[[datasets]]\nimage_directory = 'clips'\nvideo_directory = 'clips'\n",
            "image_directory and video_directory",
        ),
        ("[[datasets]]\nimage_dir = 'clips'\nmetadata_file = 'list.jsonl'\n", "image_dir and metadata_file"),
        ("[[datasets]]\nvideo_directory = 3\n", "3 where a path is needed"),
        ("[[datasets]]\nvideo_directory = 'clips'\nframe_extraction = 'tail'\n", "'tail'; expected one of head"),
    ],
)
def test_mistakes_in_a_list_of_sources_are_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read(folder, text)


def test_a_list_that_is_not_there_or_not_text_is_named(folder: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.toml cannot be read"):
        load_toml(folder / "gone.toml")
    (folder / "data.toml").write_bytes(b"\xff")
    with pytest.raises(MediaError, match="is no TOML"):
        load_toml(folder / "data.toml")


def test_sources_are_values_of_json_and_yaml(folder: Path) -> None:
    sources, _ = read(folder, "[[directory]]\npath = 'clips'\nmask_path = 'depth'\nnum_repeats = 2\n")
    assert json.loads(json.dumps(sources)) == sources


def test_folders_of_sd_scripts_have_their_repeats_and_words(folder: Path) -> None:
    write_media(folder / "train" / "10_a red fox", "a.mp4", "b.mp4")
    (folder / "train" / "10_a red fox" / "a.txt").write_text("its own caption")
    write_media(folder / "train" / "3_sea", "c.png")
    (folder / "train" / "3_sea" / "c.caption").write_text("the sea")
    (folder / "train" / "log").mkdir()
    said: list[str] = []
    common = {"bucket_tokens": [60], "bucket_frames": [1, 9]}
    sources = make_sources(common, [{"dataset": str(folder / "train")}], say=said.append)
    assert [(source.repeats, source.sidecars.missing_caption) for source in sources] == [(10, "a red fox"), (3, "sea")]
    assert "10_a red fox, 3_sea: repeats" in said[0]
    rows = [
        load_source(
            source.dataset,
            caption_extension=source.sidecars.caption_extension,
            missing_caption=source.sidecars.missing_caption,
        ).dataset["caption"][:]
        for source in sources
    ]
    assert rows == [["its own caption", "a red fox"], ["the sea"]]
    given = make_sources(common, [{"dataset": str(folder / "train"), "repeats": 2.0}])
    assert [source.dataset for source in given] == [str(folder / "train")], "what the caller says counts"


@pytest.mark.parametrize("name", ["2024_trip", "0_none", "holidays"])
def test_other_folders_are_one_source(folder: Path, name: str) -> None:
    write_media(folder / "train" / "10_fox", "a.mp4")
    write_media(folder / "train" / name, "b.mp4")
    assert load_repeats(folder / "train") is None
    assert load_repeats(folder / "clips") is None
    assert load_repeats("owner/name") is None


def write_live_photo(folder: Path) -> None:
    """Write a picture, a clip and a caption of one name, as phones export them."""
    write_media(folder, "IMG_1.mov")
    Image.new("RGB", (64, 48)).save(folder / "IMG_1.jpg")
    (folder / "IMG_1.txt").write_text("a live photo")


def test_a_folder_that_is_a_source_of_images_and_of_videos_is_divided_between_them(folder: Path) -> None:
    """musubi-tuner takes files of one kind from each folder; a Live Photo then gives its picture and its clip."""
    write_live_photo(folder / "clips")
    text = "[[datasets]]\nvideo_directory = 'clips'\n[[datasets]]\nimage_directory = 'clips'\n"
    sources, _ = read(folder, text)
    make_sources({"bucket_tokens": [60]}, [{"dataset": str(folder / "data.toml")}])
    assert name_sources([(source["dataset"], source["name"]) for source in sources]) == [
        "clips-videos",
        "clips-images",
    ]
    found = []
    for source in sources:
        loaded = load_source(source["dataset"], media_kind=source["media_kind"])
        assert "of the other kind" in loaded.layout
        found.append({Path(name).suffix for name in loaded.dataset["file_name"]})
        row = next(row for row in loaded.dataset if row["file_name"].startswith("IMG_1."))
        assert row["caption"] == "a live photo"
    videos, images = found
    assert ".mov" in videos
    assert ".jpg" in images
    assert not videos & images
    alone, _ = read(folder, "[[datasets]]\nimage_directory = 'clips'\n")
    assert "media_kind" not in alone[0], "a folder of one source is read whole"


def test_a_live_photo_is_refused_with_the_kinds_to_choose_from(folder: Path) -> None:
    write_live_photo(folder / "clips")
    with pytest.raises(
        MediaError, match=r'IMG_1\.jpg and IMG_1\.mov; take one kind .*`media_kind="videos"`'
    ) as raised:
        load_source(str(folder / "clips"))
    assert '`media_kind="images"`' in str(raised.value)
    shutil.copy(folder / "clips" / "IMG_1.jpg", folder / "clips" / "IMG_1.png")
    with pytest.raises(MediaError, match=r"IMG_1\.jpg and IMG_1\.mov and IMG_1\.png; rename"):
        load_source(str(folder / "clips"))
    with pytest.raises(MediaError, match="is not a folder"):
        load_source(str(folder / "list.jsonl"), media_kind="images")
