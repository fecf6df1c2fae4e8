"""Data that is not as its layout says, and layouts that could be meant twice: errors that name what to change."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value, Video

from hf_bucketing import ColumnError, LatentSpec, MediaError
from hf_bucketing.columns import MediaMetadata, PreparedDataset, check_captions, load_source, map_columns
from hf_bucketing.columns.nested import nested_names, with_nested
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from tests.columns.formats import (
    TEXTS,
    captions_json,
    csv_rows,
    fast_video,
    folder_of_tars,
    json_rows,
    lines,
    nested_parquet,
    tar_with_json,
    tar_with_txt,
    write_captioned_media,
    write_media,
)
from tests.media.http_server import serving


def captions(loaded) -> list[str]:
    checked = check_captions(loaded.dataset, loaded.caption_column, media_column=loaded.column)
    return checked.dataset[loaded.caption_column][:]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let datasets open URLs, here of this machine alone."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_two_layouts_that_could_be_meant_are_both_named_until_one_is_given(tmp_path: Path) -> None:
    write_captioned_media(tmp_path)
    json_rows("metadata.jsonl", "file_name", "caption")(tmp_path)
    with pytest.raises(MediaError, match=r"2 ways.*metadata\.jsonl.*\.txt captions beside") as raised:
        load_source(str(tmp_path))
    assert str(tmp_path / "metadata.jsonl") in raised.value.advice[0]
    assert 'caption_extension=".txt"' in raised.value.advice[1]
    assert len(load_source(str(tmp_path / "metadata.jsonl")).dataset) == 2
    assert len(load_source(str(tmp_path), caption_extension="txt").dataset) == 4


def test_a_table_without_captions_leaves_them_to_the_files_beside_the_media(tmp_path: Path) -> None:
    write_captioned_media(tmp_path)
    (tmp_path / "metadata.csv").write_text("file_name,score\na.mp4,1\n")
    loaded = load_source(str(tmp_path))
    assert captions(loaded) == [TEXTS[name] for name in ("a.mp4", "b.mp4", "c.png")]
    assert "not used" in loaded.describe()
    assert "1 rows of metadata.csv" in loaded.describe()


def test_tables_that_could_both_be_meant_are_named(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        csv_rows(name, "path", "text")(tmp_path)
    with pytest.raises(MediaError, match=r"one\.csv and .*two\.csv could both be meant"):
        load_source(str(tmp_path))
    (tmp_path / "two.csv").write_text("epoch,loss\n1,2\n")
    assert "one.csv" in load_source(str(tmp_path)).layout, "the other one lists no files"


def test_lines_that_do_not_match_are_counted(tmp_path: Path) -> None:
    lines("videos.txt", "prompts.txt")(tmp_path)
    with (tmp_path / "prompts.txt").open("a") as file:
        file.write("\n\none more\n\n")
    with pytest.raises(MediaError, match=r"videos\.txt has 2 lines and .*prompts\.txt 4"):
        load_source(str(tmp_path))


def test_lists_of_lines_are_named_where_several_could_be_meant_or_one_is_missing(tmp_path: Path) -> None:
    lines("videos.txt", "prompts.txt")(tmp_path)
    lines("images.txt", "captions.txt")(tmp_path)
    with pytest.raises(MediaError, match=r"videos\.txt and .*images\.txt could both be meant"):
        load_source(str(tmp_path))
    with pytest.raises(MediaError, match=r"prompts\.txt and .*captions\.txt could both be meant"):
        load_source(str(tmp_path / "videos.txt"))
    (tmp_path / "captions.txt").unlink()
    assert len(load_source(str(tmp_path / "videos.txt")).dataset) == 2
    (tmp_path / "prompts.txt").write_text("\n")
    with pytest.raises(MediaError, match=r"prompts\.txt is empty"):
        load_source(str(tmp_path / "videos.txt"))
    (tmp_path / "prompts.txt").unlink()
    with pytest.raises(MediaError, match=r"videos\.txt needs one file of captions"):
        load_source(str(tmp_path / "videos.txt"))


def test_empty_and_undecodable_lines_are_captions_that_are_named(tmp_path: Path) -> None:
    lines("videos.txt", "prompts.txt")(tmp_path)
    (tmp_path / "prompts.txt").write_bytes(b"\nf\xfcr\n")
    loaded = load_source(str(tmp_path))
    with pytest.raises(ColumnError, match=r"1 empty \(row 0: videos/a.mp4\); 1 not UTF-8 text \(row 1"):
        captions(loaded)


def test_dicts_are_never_captions(tmp_path: Path) -> None:
    tar_with_json(tmp_path)
    tar = str(tmp_path / "clips.tar")
    with pytest.raises(ColumnError, match=r"'json' .* holds dicts; .* json\.caption, json\.id"):
        load_source(tar, caption_column="json")
    with pytest.raises(ColumnError, match=r"no caption column 'json\.text', only .*'json\.caption', 'json\.id'"):
        load_source(tar, caption_column="json.text")
    found = load_source(tar)
    assert found.caption_column == "json.caption", "the only text with such a name"
    assert captions(found) == [TEXTS["a.mp4"], TEXTS["b.mp4"]]
    assert "caption column json.caption; row 0" in found.describe()


def test_texts_of_dicts_that_could_both_be_meant_are_named(tmp_path: Path) -> None:
    rows = {"path": ["a.mp4"], "meta": [{"caption": "x", "text": "y"}]}
    Dataset.from_dict(rows).to_parquet(str(tmp_path / "data.parquet"))
    with pytest.raises(ColumnError, match=r"meta\.caption and meta\.text"):
        load_source(str(tmp_path / "data.parquet"))


def test_a_nested_column_is_not_copied(tmp_path: Path) -> None:
    features = Features(sample={"video": Video(), "about": {"text": Value("string")}})
    rows = {"sample": [{"video": {"path": "a.mp4", "bytes": bytes(2**18)}, "about": {"text": "x"}}] * 4}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data.parquet"))
    dataset = load_source(
        str(tmp_path / "data.parquet"), media_column="sample.video", caption_column="sample.about.text"
    ).dataset
    assert dataset["sample.about.text"][:] == ["x"] * 4
    before = pa.total_allocated_bytes()
    again = with_nested(dataset.remove_columns(["sample.video"]), ["sample.video"])
    assert pa.total_allocated_bytes() - before < 2**17
    assert type(again.features["sample.video"]) is Video
    assert nested_names(dataset)[:4] == ["sample", "sample.video", "sample.about", "sample.about.text"]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets reads no mixed columns")
def test_texts_of_dicts_whose_keys_differ_by_row(tmp_path: Path) -> None:
    rows = [
        {"path": "a.mp4", "meta": {"caption": "a fox", "score": 1}},
        {"path": "b.mp4", "meta": {"caption": "b", "crop": {"top": 1}}},
        {"path": "c.mp4", "meta": {"score": {}}},
        {"path": "d.mp4", "meta": {"caption": {"text": "no"}, "crop": []}},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_source(str(tmp_path / "data.jsonl"), caption_column="meta.caption")
    with pytest.raises(ColumnError, match=r"1 missing \(row 2: c\.mp4\); 1 a dict \(row 3: d\.mp4\)"):
        captions(loaded)
    usable = check_captions(loaded.dataset, "meta.caption", on_error="empty").dataset
    assert usable["meta.caption"][:] == ["a fox", "b", "", ""]


def test_nested_media_and_captions_are_prepared(tmp_path: Path) -> None:
    nested_parquet(tmp_path)
    with pytest.raises(ColumnError, match=r"annotations\.short, annotations\.long"):
        load_source(str(tmp_path / "data.parquet"), caption_column="annotations")
    assert load_source(str(tmp_path / "data.parquet")).caption_column is None


def test_captions_of_a_tar_that_are_missing_or_undecodable_are_named(tmp_path: Path) -> None:
    tar_with_txt(tmp_path)
    write_media(tmp_path / ".work", "c.png")
    with tarfile.open(tmp_path / "clips.tar", "a") as tar:
        for number in range(4):
            tar.add(tmp_path / ".work" / "a.mp4", f"more{number}.mp4")
            if number < 3:
                member = tarfile.TarInfo(f"more{number}.txt")
                member.size = 2
                tar.addfile(member, io.BytesIO(b"ok"))
    with pytest.raises(ColumnError, match=r"1 missing \(row 5: more3\.mp4\)"):
        captions(load_source(str(tmp_path / "clips.tar")))
    with tarfile.open(tmp_path / "latin.tar", "w") as tar:
        tar.add(tmp_path / ".work" / "a.mp4", "a.mp4")
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"\xfc"))
    with pytest.raises(MediaError, match=r"latin\.tar.*utf-8"):
        load_source(str(tmp_path / "latin.tar"))


@pytest.mark.parametrize(("name", "message"), [("gone.tar", "No file is named"), ("gone/*.tar", "No file is named")])
def test_tars_that_do_not_exist_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(MediaError, match=f"{message} .*gone"):
        load_source(str(tmp_path / name))


def test_captions_of_fastvideo_may_be_lists(tmp_path: Path) -> None:
    fast_video(tmp_path, lists=True)
    loaded = load_source(str(tmp_path))
    assert loaded.dataset["cap"][:] == [[TEXTS["a.mp4"]], [TEXTS["b.mp4"]]]
    assert loaded.root == str(tmp_path / "videos")


def test_a_json_that_maps_files_to_captions(tmp_path: Path) -> None:
    captions_json(tmp_path, lists=True)
    assert load_source(str(tmp_path)).dataset["caption"][:] == [[TEXTS["a.mp4"]], [TEXTS["b.mp4"]]]
    path = tmp_path / "captions.json"
    for content, message in (({"a.mp4": {"text": "x"}}, r"a\.mp4 has \{'text'"), ({}, "it is empty")):
        path.write_text(json.dumps(content))
        with pytest.raises(MediaError, match=rf"captions\.json must map .*{message}"):
            load_source(str(path))
    path.write_text(json.dumps([{"path": "a.mp4", "text": "x"}]))
    assert captions(load_source(str(path))) == ["x"], "any other json is a table"


def test_files_of_the_same_stems_in_other_folders_become_columns(tmp_path: Path) -> None:
    write_captioned_media(tmp_path / "clips")
    write_media(tmp_path / "clips" / "depth" / "deep", "b.mp4")
    write_media(tmp_path / "masks", "a.mp4")
    (tmp_path / "masks" / "a.mp4").rename(tmp_path / "masks" / "a.mov")
    loaded = load_source(
        str(tmp_path / "clips"),
        companions={"control": str(tmp_path / "clips" / "depth"), "mask": str(tmp_path / "masks")},
    )
    assert loaded.dataset["file_name"][:] == [f"clips/{name}" for name in ("a.mp4", "deep/b.mp4", "deep/er/c.png")]
    assert loaded.dataset["control"][:] == [None, "clips/depth/deep/b.mp4", None], "no sample is a control"
    assert loaded.dataset["mask"][:] == ["masks/a.mov", None, None]
    assert loaded.root == str(tmp_path), "the folder above all that were named"
    assert "2 without a control; 2 without a mask" in loaded.layout
    write_media(tmp_path / "masks", "a.mp4")
    with pytest.raises(MediaError, match=r"a\.mov and a\.mp4"):
        load_source(str(tmp_path / "clips"), companions={"mask": str(tmp_path / "masks")})
    for folder, message in (("none", "does not exist"), ("empty", "No file of .*empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(MediaError, match=message):
            load_source(str(tmp_path / "clips"), companions={"mask": str(tmp_path / folder)})


def test_references_have_the_stem_of_their_sample_and_maybe_a_number(tmp_path: Path) -> None:
    write_captioned_media(tmp_path / "clips")
    first, second = tmp_path / "first", tmp_path / "second"
    write_media(first / "deep", "b.mp4")
    for name in ("a_10.png", "a_2.png", "deep/b_0001.png", "deep/b_x.png", "c_0.png"):
        write_media(tmp_path, "c.png")
        (first / name).parent.mkdir(exist_ok=True)
        (tmp_path / "c.png").rename(first / name)
    write_media(second, "a.mp4")
    loaded = load_source(str(tmp_path / "clips"), companions={"reference": [str(first), str(second)]})
    assert loaded.dataset["reference"][:] == [
        ["first/a_2.png", "first/a_10.png", "second/a.mp4"],
        ["first/deep/b.mp4", "first/deep/b_0001.png"],
        [],
    ], "deep/er/c.png has none"
    assert loaded.layout.endswith("; 1 without a reference")
    stream = load_source(str(tmp_path / "clips"), companions={"reference": [str(first), str(second)]}, streaming=True)
    assert [row["reference"] for row in stream.dataset] == loaded.dataset["reference"][:]
    write_media(first, "a_2.mp4")
    with pytest.raises(MediaError, match=r"a_2\.(mp4|png) and a_2"):
        load_source(str(tmp_path / "clips"), companions={"reference": [str(first)]})


def test_a_numbered_reference_with_the_stem_of_another_sample_belongs_to_that_one(tmp_path: Path) -> None:
    for folder in ("clips", "edits"):
        write_media(tmp_path / folder, "a.mp4", "a_1.mp4")
    for stem in ("a", "a_1"):
        (tmp_path / "clips" / f"{stem}.txt").write_text("x")
    loaded = load_source(str(tmp_path / "clips"), companions={"reference": str(tmp_path / "edits")})
    assert loaded.dataset["reference"][:] == [["edits/a.mp4"], ["edits/a_1.mp4"]]


def test_a_media_column_of_another_type_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"path": 1, "text": "x"}\n{"path": 2, "text": "y"}\n')
    loaded = load_source(str(tmp_path / "data.jsonl"))
    with pytest.raises(MediaError, match=r"2 of 2 files .*: row 0: Expected a path.*got int.*; row 1: Expected"):
        map_columns(loaded.dataset, MediaMetadata("path", root=loaded.root))
    reject = MediaMetadata("path", root=loaded.root, on_error="reject")
    assert map_columns(loaded.dataset, reject)["width"][:] == [-1, -1]


def test_captions_beside_media_that_are_asked_for_and_not_there_are_an_error(tmp_path: Path) -> None:
    csv_rows("metadata.csv", "path", "text")(tmp_path)
    with pytest.raises(MediaError, match=r"2 media files and 0 \.caption files"):
        load_source(str(tmp_path), caption_extension=".caption")
    with pytest.raises(MediaError, match=r"metadata\.csv is not a folder"):
        load_source(str(tmp_path / "metadata.csv"), caption_extension=".caption")


def test_a_folder_of_tars_beside_media_is_not_a_webdataset(tmp_path: Path) -> None:
    folder_of_tars(tmp_path)
    write_captioned_media(tmp_path)
    assert ".txt captions beside" in load_source(str(tmp_path)).layout


@pytest.mark.usefixtures("online")
def test_a_table_at_a_url_names_files_below_it(tmp_path: Path) -> None:
    json_rows("data.jsonl", "path", "text", "clips/")(tmp_path)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.rglob("*.*"):
        memory.pipe(f"/set/{path.relative_to(tmp_path)}", path.read_bytes())
    loaded = load_source("memory://set/data.jsonl")
    assert loaded.root == "memory://set"
    assert captions(loaded) == [TEXTS["a.mp4"], TEXTS["b.mp4"]]
    source = SourceConfig(
        dataset="memory://set/data.jsonl", table=TableConfig(buckets="16,32;16,48", bucket_frames=[1, 5])
    )
    prepared = prepare(source, spec=LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)), say=str)
    prepared.save(tmp_path / "out")
    assert PreparedDataset.load(tmp_path / "out").root == "memory://set"
    for name, message in (("gone.jsonl", "gone"), ("notes.md", "no table and no tar"), ("", "no table")):
        with pytest.raises(MediaError, match=message):
            load_source(f"memory://set/{name}")


def test_a_table_and_tar_on_a_server_are_read_and_dead_urls_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="fsspec[http] is not installed")
    monkeypatch.setattr(
        datasets.config, "HF_HUB_OFFLINE", False
    )  # datasets then opens no URL, this machine's included
    json_rows("data.json", "video", "caption")(tmp_path)
    tar_with_txt(tmp_path)
    with serving(tmp_path) as served:
        rows = json.loads((tmp_path / "data.json").read_text())
        (tmp_path / "more.json").write_text(json.dumps([*rows, {"video": "gone.mp4", "caption": "x"}]))
        loaded = load_source(f"{served.url}/more.json?token=1")
        reject = MediaMetadata("video", root=loaded.root, on_error="reject")
        assert map_columns(loaded.dataset, reject)["width"][:] == [32, 16, -1]
        with pytest.raises(MediaError, match=rf"{served.url}/gone\.mp4"):
            map_columns(loaded.dataset, MediaMetadata("video", root=loaded.root))
        assert captions(load_source(f"{served.url}/clips.tar")) == [TEXTS["a.mp4"], TEXTS["b.mp4"]]
        with pytest.raises(MediaError, match=rf"{served.url}/none\.csv"):
            load_source(f"{served.url}/none.csv")


def test_a_toml_is_no_single_source(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text("[general]\n")
    with pytest.raises(MediaError, match="load_toml"):
        load_source(str(tmp_path / "data.toml"))
    with pytest.raises(MediaError, match=r"gone\.toml does not exist"):
        load_source(str(tmp_path / "gone.toml"))
