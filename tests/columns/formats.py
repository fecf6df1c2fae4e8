"""Layouts of data as trainers document them, each written with real files: the cases of `test_formats.py`."""

from __future__ import annotations

import csv
import io
import json
import shlex
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Image, Value, Video

from hf_bucketing.media import write_image, write_video

CLIP, OTHER, PHOTO = (32, 16, 6), (16, 48, 5), (48, 32, 1)
SIZES = {"a.mp4": CLIP, "b.mp4": OTHER, "c.png": PHOTO}
TEXTS = {"a.mp4": 'a red fox, "running", ü', "b.mp4": "two boats", "c.png": "a house"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A layout, how it is asked for, and what comes of it.

    Attributes:
        title (`str`): What the layout consists of, as README names it.
        who (`str`): Trainers that document it.
        write (callable): Writes it into an empty folder.
        give (`str`): What to give as `--dataset`, relative to that folder, and further flags.
        files (tuple of `str`): Files in the order of the rows.
        options (`dict`): Further arguments of `load_source`.
        references (`tuple` of `int`, *optional*): References of each row, where there are any.
    """

    title: str
    who: str
    write: Callable[[Path], None]
    give: str = "FOLDER"
    files: tuple[str, ...] = ("a.mp4", "b.mp4")
    options: dict[str, str] = field(default_factory=dict)
    references: tuple[int, ...] | None = None

    def dataset(self, folder: Path) -> str:
        """Return what to give as `--dataset`."""
        return shlex.split(self.give)[0].replace("FOLDER", str(folder))


def write_media(folder: Path, *files: str) -> None:
    """Write generated clips and images of three sizes."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height, frames = SIZES.get(path.name, CLIP)
        pixels = [np.full((height, width, 3), 40 * frame, np.uint8) for frame in range(frames)]
        if frames == 1:
            write_image(path, pixels[0])
        else:
            write_video(path, pixels, fps=8)


def write_captioned_media(folder: Path, extension: str = ".txt") -> None:
    for file in ("a.mp4", "deep/b.mp4", "deep/er/c.png"):
        write_media(folder, file)
        (folder / file).with_suffix(extension).write_text(TEXTS[Path(file).name] + "\n", encoding="utf-8")


def with_caption_extension(folder: Path) -> None:
    write_captioned_media(folder, ".caption")


def json_rows(name: str, media: str, caption: str, inner: str = "", **more: object) -> Callable[[Path], None]:
    """Return a function that writes media and a `.json` list or a `.jsonl` of rows."""

    def write(folder: Path) -> None:
        write_media(folder, f"{inner}a.mp4", f"{inner}b.mp4")
        rows = [{media: f"{inner}{file}", caption: TEXTS[file], **more} for file in ("a.mp4", "b.mp4")]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        text = json.dumps(rows, indent=2) if name.endswith(".json") else lines
        (folder / name).write_text(text, encoding="utf-8")

    return write


def csv_rows(name: str, media: str, caption: str, inner: str = "") -> Callable[[Path], None]:
    """Return a function that writes media and a `.csv` or `.tsv`."""

    def write(folder: Path) -> None:
        write_media(folder, f"{inner}a.mp4", f"{inner}b.mp4")
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            table.writerows(
                [(media, caption), *((f"{inner}{file_name}", TEXTS[file_name]) for file_name in ("a.mp4", "b.mp4"))]
            )

    return write


def open_sora(folder: Path) -> None:
    write_media(folder, "a.mp4", "b.mp4")
    columns = ["path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps"]
    with (folder / "data.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for name in ("a.mp4", "b.mp4"):
            width, height, frames = SIZES[name]
            size = (frames, height, width, height / width, height * width, 8.0)
            table.writerow([str(folder / name), TEXTS[name], *size])


def video_x_fun(folder: Path) -> None:
    write_media(folder, "train/a.mp4", "train/c.png")
    rows = [
        {"file_path": f"train/{file}", "text": TEXTS[file], "type": kind}
        for file, kind in (("a.mp4", "video"), ("c.png", "image"))
    ]
    (folder / "metadata.json").write_text(json.dumps(rows, indent=2))


def fast_video(folder: Path, *, lists: bool = False) -> None:
    write_media(folder / "videos", "a.mp4", "b.mp4")
    rows = [{"path": file, "cap": [TEXTS[file]] if lists else TEXTS[file]} for file in ("a.mp4", "b.mp4")]
    (folder / "videos2caption.json").write_text(json.dumps(rows))


def captions_json(folder: Path, *, lists: bool = False) -> None:
    write_media(folder, "a.mp4", "b.mp4")
    captions = {file: [TEXTS[file]] if lists else TEXTS[file] for file in ("a.mp4", "b.mp4")}
    (folder / "captions.json").write_text(json.dumps(captions))


def lines(media: str, captions: str, inner: str = "videos/", listed: str = "videos/") -> Callable[[Path], None]:
    """Return a function that writes media, and their paths and captions line by line."""

    def write(folder: Path) -> None:
        write_media(folder, f"{inner}a.mp4", f"{inner}b.mp4")
        (folder / media).write_text(f"{listed}a.mp4\n{listed}b.mp4\n")
        (folder / captions).write_text(f"{TEXTS['a.mp4']}\n{TEXTS['b.mp4']}", encoding="utf-8")

    return write


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar of files in this order, by their names and contents."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def tar_of(target: Path, *files: str, nested: bool = False) -> None:
    """Write a webdataset tar of media, each with a `.txt`, or a `.json` that holds its caption."""
    work = target.parent / ".work"
    write_media(work, *files)
    members = []
    for file in files:
        text = json.dumps({"caption": TEXTS[file], "id": file}) if nested else TEXTS[file]
        beside = str(Path(file).with_suffix(".json" if nested else ".txt"))
        members += [(file, (work / file).read_bytes()), (beside, text.encode())]
    write_tar(target, members)


def tar_with_txt(folder: Path) -> None:
    tar_of(folder / "clips.tar", "a.mp4", "b.mp4")


def tar_with_json(folder: Path) -> None:
    tar_of(folder / "clips.tar", "a.mp4", "b.mp4", nested=True)


def folder_of_tars(folder: Path) -> None:
    tar_of(folder / "00000.tar", "a.mp4")
    tar_of(folder / "00001.tar", "b.mp4")


def tar_of_images(folder: Path) -> None:
    tar_of(folder / "images.tar", "c.png")


def parquet_of_bytes(folder: Path) -> None:
    write_media(folder / ".work", "a.mp4", "b.mp4")
    cells = [{"path": name, "bytes": (folder / ".work" / name).read_bytes()} for name in ("a.mp4", "b.mp4")]
    features = Features(video=Video(), caption=Value("string"))
    rows = {"video": cells, "caption": [TEXTS["a.mp4"], TEXTS["b.mp4"]]}
    Dataset.from_dict(rows, features=features).to_parquet(str(folder / "data.parquet"))


def nested_parquet(folder: Path) -> None:
    write_media(folder / ".work", "c.png")
    features = Features(image=Image(), annotations={"short": Value("string"), "long": Value("string")})
    cell = {"path": "c.png", "bytes": (folder / ".work" / "c.png").read_bytes()}
    rows = {"image": [cell], "annotations": [{"short": "no", "long": TEXTS["c.png"]}]}
    Dataset.from_dict(rows, features=features).to_parquet(str(folder / "data.parquet"))


def urls(folder: Path) -> None:
    write_media(folder, "a.mp4", "b.mp4")
    rows = [{"url": f"file://{folder}/{file}", "caption": TEXTS[file]} for file in ("a.mp4", "b.mp4")]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def reference_rows(name: str, media: str, *columns: str) -> Callable[[Path], None]:
    """Return a function that writes media and rows that show each file as references, the last row one fewer."""

    def write(folder: Path) -> None:
        write_media(folder, "a.mp4", "b.mp4")
        rows = [{media: file, **dict.fromkeys(columns, file), "caption": TEXTS[file]} for file in ("a.mp4", "b.mp4")]
        del rows[-1][columns[-1]]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        text = json.dumps(rows) if name.endswith(".json") else lines
        (folder / name).write_text(text, encoding="utf-8")

    return write


def references_in_folders(folder: Path) -> None:
    write_captioned_media(folder / "clips")
    write_media(folder / "before", "a.mp4", "deep/b.mp4")
    for number in range(2):
        write_media(folder / "style" / "deep" / "er", "c.png")
        (folder / "style/deep/er/c.png").rename(folder / f"style/deep/er/c_{number}.png")


BESIDE = ("a.mp4", "b.mp4", "c.png")
FORMATS: dict[str, Format] = {
    "captions beside": Format(
        title="`clip.mp4` and `clip.txt`, images too, at any depth",
        who="musubi-tuner, diffusion-pipe, SimpleTuner, ai-toolkit, OneTrainer, finetrainers, sd-scripts",
        write=write_captioned_media,
        files=BESIDE,
    ),
    "captions of other endings": Format(
        title="`clip.mp4` and `clip.caption`",
        who="sd-scripts, musubi-tuner",
        write=with_caption_extension,
        give="FOLDER --caption_extension .caption",
        files=BESIDE,
        options={"caption_extension": ".caption"},
    ),
    "metadata.jsonl": Format(
        title="folder with `metadata.jsonl`: `file_name`, `caption`",
        who="datasets, finetrainers",
        write=json_rows("metadata.jsonl", "file_name", "caption", "clips/"),
    ),
    "metadata.csv": Format(
        title="folder with `metadata.csv`: `file_name`, `text`",
        who="datasets, finetrainers",
        write=csv_rows("metadata.csv", "file_name", "text"),
    ),
    "musubi jsonl": Format(
        title="jsonl of `video_path` or `image_path`, `caption`",
        who="musubi-tuner",
        write=json_rows("videos.jsonl", "video_path", "caption"),
        give="FOLDER/videos.jsonl",
    ),
    "LTX json": Format(
        title="json, jsonl or csv of `video`, `caption`",
        who="LTX-2 trainer",
        write=json_rows("dataset.json", "video", "caption", "videos/"),
        give="FOLDER/dataset.json",
    ),
    "LTX csv": Format(
        title="the same with the older `media_path`",
        who="LTX-2 trainer",
        write=csv_rows("dataset.csv", "media_path", "caption"),
        give="FOLDER/dataset.csv",
    ),
    "musubi controls": Format(
        title="jsonl of `image_path`, `control_path` (or `control_path_0`, `control_path_1`, …), `caption`",
        who="musubi-tuner",
        write=reference_rows("images.jsonl", "image_path", "control_path_0", "control_path_1"),
        give="FOLDER/images.jsonl --reference_column control_path_0 control_path_1",
        references=(2, 1),
    ),
    "LTX references": Format(
        title="json, jsonl or csv of `video`, `reference_video`, `caption`",
        who="LTX-2 trainer",
        write=reference_rows("dataset.json", "video", "reference_video"),
        give="FOLDER/dataset.json --reference_column reference_video",
        references=(1, 0),
    ),
    "references in folders": Format(
        title="folders of references with the names of the media, or `clip_0.png`, `clip_1.png`, …",
        who="musubi-tuner, ai-toolkit, SimpleTuner, diffusion-pipe",
        write=references_in_folders,
        give="FOLDER/clips --reference_folder FOLDER/before FOLDER/style",
        files=BESIDE,
        references=(1, 1, 2),
    ),
    "DiffSynth": Format(
        title="folder with `metadata.csv`: `video` or `image`, `prompt`",
        who="DiffSynth-Studio",
        write=csv_rows("metadata.csv", "video", "prompt"),
    ),
    "VideoX-Fun": Format(
        title="folder with `metadata.json`: `file_path`, `text`, `type`",
        who="VideoX-Fun",
        write=video_x_fun,
        files=("a.mp4", "c.png"),
    ),
    "lines": Format(
        title="`prompts.txt` and `videos.txt` (or `images.txt`), line by line",
        who="finetrainers",
        write=lines("videos.txt", "prompts.txt"),
    ),
    "lines of FastVideo": Format(
        title="`prompt.txt`, `videos.txt` and a folder `videos` of the files",
        who="FastVideo",
        write=lines("videos.txt", "prompt.txt", listed=""),
    ),
    "videos2caption.json": Format(
        title="`videos2caption.json` (`path`, `cap`) and a folder `videos` of the files",
        who="FastVideo",
        write=fast_video,
    ),
    "captions.json": Format(
        title="`captions.json`, which maps each name of a file to a caption or several",
        who="diffusion-pipe",
        write=captions_json,
    ),
    "Open-Sora": Format(
        title="csv of `path`, `text`, `num_frames`, `height`, `width`, `aspect_ratio`, `resolution`, `fps`",
        who="Open-Sora",
        write=open_sora,
        give="FOLDER/data.csv --overwrite",
    ),
    "one table": Format(
        title="folder with one table of any name, and the files that it lists",
        who="",
        write=csv_rows("data.csv", "path", "description", "clips/"),
    ),
    "tsv": Format(
        title="tsv of `path`, `prompt`",
        who="",
        write=csv_rows("data.tsv", "path", "prompt"),
        give="FOLDER/data.tsv",
    ),
    "tar with txt": Format(
        title="tar of `clip.mp4` and `clip.txt`",
        who="webdataset, finetrainers",
        write=tar_with_txt,
        give="FOLDER/clips.tar",
    ),
    "tar with json": Format(
        title="tar of `clip.mp4` and `clip.json`, which holds the caption",
        who="webdataset, OpenVid-1M",
        write=tar_with_json,
        give="FOLDER/clips.tar --caption_column json.caption",
        options={"caption_column": "json.caption"},
    ),
    "folder of tars": Format(title="folder of tars", who="webdataset", write=folder_of_tars),
    "pattern of tars": Format(title="pattern of tars", who="webdataset", write=folder_of_tars, give="'FOLDER/*.tar'"),
    "tar of images": Format(
        title="tar of `image.png` and `image.txt`",
        who="webdataset, img2dataset",
        write=tar_of_images,
        give="FOLDER/images.tar",
        files=("c.png",),
    ),
    "parquet": Format(
        title="parquet with bytes, or with paths",
        who="data sets on the hub",
        write=parquet_of_bytes,
        give="FOLDER/data.parquet",
    ),
    "nested": Format(
        title="columns of dicts",
        who="data sets on the hub",
        write=nested_parquet,
        give="FOLDER/data.parquet --caption_column annotations.long",
        files=("c.png",),
        options={"caption_column": "annotations.long"},
    ),
    "URLs": Format(
        title="URLs (`https://`, `hf://`; others where they are allowed) in place of paths, or of the table",
        who="data sets on the hub",
        write=urls,
        give="FOLDER/data.jsonl",
    ),
}
