"""The page of a data set's rows: what a model will see of each, what changed, and no text that becomes HTML."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketTable, LatentSpec, Size, open_table
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.media.write import write_video
from hf_bucketing.report.data_rows import DataRow, data_page, write_rows
from hf_bucketing.report.page import render_page
from tests.browser import look_at
from tests.conftest import run_script_here
from tests.report.test_page import Parsed, check_complete

BAD = "</script><img src=x onerror=\"document.title='run'\">'\"\u2028\u2029&amp;${1}`"


def save_images(folder: Path, **columns: list[Any]) -> Path:
    """Prepare a picture that is red at its left and right ends, one that is not an image, and a small one."""
    folder.mkdir(exist_ok=True)
    pixels = np.full((40, 120, 3), (255, 0, 0), np.uint8)
    pixels[:, 20:100] = (0, 0, 255)
    Image.fromarray(pixels).save(folder / "wide '<b>&.png")
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(folder / "small.png")
    (folder / "broken.png").write_bytes(b"no image")
    rows = {
        "image": ["wide '<b>&.png", "broken.png", "small.png"],
        "caption": [[BAD, "second"], ["b"], ["c"]],
        "width": [120, 120, 8],
        "height": [40, 40, 8],
        "num_frames": [1, 1, 1],
        "fps": [0.0] * 3,
        "mask": ["wide '<b>&.png", None, None],
        "person": [["small.png", "wide '<b>&.png"], [], []],
    }
    table = BucketTable(sizes=(Size(1, 32, 64), Size(1, 64, 64)))
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    prepared = PreparedDataset(
        dataset=map_columns(Dataset.from_dict({**rows, **columns}), BucketColumns(table, spec)),
        table=table,
        open_table=open_table(spec),
        column="image",
        caption_column="caption",
        root=str(folder),
        conditions={"mask": "mask", "reference": "person"},
    )
    prepared.save(folder / "prepared")
    return folder / "prepared"


def report(prepared: Path, page: Path, *flags: object) -> list[dict[str, Any]]:
    """Write a page, and return the rows in the scripts beside it."""
    run_script_here("report_data.py", prepared, "--html", page, *flags)
    text = "".join(path.read_text() for path in sorted(page.with_name(f"{page.stem}_files").glob("*.js")))
    return json.loads("[" + text.replace("rows.push(", "").replace("\n)\n", ",").rstrip(",") + "]")


def test_rows_hold_what_the_model_will_see(tmp_path: Path) -> None:
    wide, broken, small = report(save_images(tmp_path / "images"), tmp_path / "data.html")
    assert wide["texts"]["file"] == ["wide '<b>&.png"]
    assert wide["texts"]["stored"] == ["40×120"]
    assert "read as" not in wide["texts"], "an image is read as it is stored"
    assert wide["texts"]["trained at"] == ["32×64, keeps 66.7% of the area"]
    assert wide["texts"]["caption"] == [BAD, "second"]
    assert wide["texts"]["reference"] == ["small.png", "wide '<b>&.png"]
    assert wide["filters"] == {"bucket": "32×64", "rejected": "", "source": "", "change": ""}
    labels, files, *_ = zip(*wide["pictures"], strict=True)
    assert labels == ("image", "mask", "reference 1", "reference 2")
    image, mask, first, second = (Image.open(tmp_path / "data_files" / name) for name in files)
    assert (image.size, mask.size, first.size, second.size) == ((64, 32), (64, 32), (8, 8), (120, 40))
    assert np.array(image)[:, :, 2].min() > 200, "the crop leaves the red ends out"
    assert np.array(second)[:, 0, 0].min() > 200, "a reference is whole"
    assert "broken.png" in broken["fault"]
    assert not broken["pictures"]
    assert small["filters"]["rejected"] == "too_small"
    assert small["texts"]["trained at"] == ["rejected: too_small; packs take rows at their own size"]
    assert [label for label, *_ in small["pictures"]] == ["no bucket"]


def test_references_that_lie_over_their_sample_have_its_crop(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images")
    data = PreparedDataset.load(folder)
    replace(data, references=ReferenceRule(downscale_factor=2)).save(folder)
    wide = report(folder, tmp_path / "data.html")[0]
    assert wide["pictures"][3][0] == "reference 2"
    assert np.array(Image.open(tmp_path / "data_files" / wide["pictures"][3][1]))[:, :, 2].min() > 200


def test_videos_show_three_frames_of_their_clip(prepared_dir: Path, tmp_path: Path) -> None:
    rows = report(prepared_dir, tmp_path / "data.html")
    assert len(rows) == 20
    videos = [row for row in rows if row["pictures"][0][0] == "first, middle and last frame"]
    sizes = {row["number"]: row["filters"]["bucket"].split("×") for row in videos}
    assert videos
    for row in videos:
        _, name, width, height = row["pictures"][0]
        assert (height, width) == (int(sizes[row["number"]][1]), 3 * int(sizes[row["number"]][2]) + 8)
        assert Image.open(tmp_path / "data_files" / name).size == (width, height)


@pytest.mark.slow
def test_stored_is_what_the_file_holds_and_not_what_is_read_of_it(tmp_path: Path, pipeline_dir: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    write_video(folder / "a.mp4", np.zeros((30, 32, 64, 3), np.uint8), fps=24)
    write_video(folder / "b.mp4", np.zeros((30, 32, 64, 3), np.uint8), fps=24)
    (folder / "a.txt").write_text("a clip")
    (folder / "b.txt").write_bytes("schön".encode("latin-1"))
    run_script_here(
        "prepare_dataset.py",
        dataset=folder,
        pretrained_model_name_or_path=pipeline_dir,
        output_dir=tmp_path / "prepared",
        buckets="32,32",
        bucket_frames=9,
        target_fps=8,
        on_caption_error="reject",
    )
    clip, rejected = report(tmp_path / "prepared", tmp_path / "data.html")
    assert clip["texts"]["stored"] == rejected["texts"]["stored"] == ["30×32×64 at 24 fps"]
    assert clip["texts"]["read as"] == ["10×32×64 at 8 fps"]
    assert clip["texts"]["trained at"] == ["9×32×32, keeps 50.0% of the area, 9 of 10 frames"]
    assert rejected["texts"]["trained at"] == ["rejected: caption (not UTF-8 text)"]
    assert "read as" not in rejected["texts"]
    assert "kept area, mean 50.0%" in Parsed((tmp_path / "data.html").read_text()).text
    run_script_here("report_buckets.py", tmp_path / "prepared", "--num_processes", 1, "--html", tmp_path / "b.html")
    page = check_complete((tmp_path / "b.html").read_text())
    assert "kept area, mean 50.0%" in page.text
    assert page.tables["Rejected rows by reason"][1][3].startswith("b.mp4 (not UTF-8 text)")


def test_limits_spread_rows_and_pictures_and_the_page_says_so(prepared_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "data.html"
    rows = report(prepared_dir, page, "--max_rows", 10, "--max_thumbnails", 3)
    assert [row["number"] for row in rows] == np.linspace(0, 19, 10).astype(int).tolist()
    assert [bool(row["pictures"]) for row in rows].count(True) == 3
    assert "Of 20 rows, 10 are shown" in page.read_text()


def test_changes_since_an_earlier_folder_are_marked(tmp_path: Path) -> None:
    was = save_images(tmp_path / "images").rename(tmp_path / "images" / "earlier")
    now = save_images(tmp_path / "images", caption=[["a"], ["b"], ["c"]])
    data = PreparedDataset.load(now)
    replace(data, dataset=data.dataset.select([0, 2])).save(now)
    (tmp_path / "images" / "small.png").touch()
    removed, wide, small = report(now, tmp_path / "data.html", "--compare", was, "--max_thumbnails", 0)
    assert (removed["number"], removed["filters"]["change"]) == (None, "removed")
    assert removed["texts"]["file"] == ["broken.png"]
    assert wide["filters"]["change"] == "changed in file, caption, conditions"
    assert f"caption: {BAD} | second → a" in wide["differences"]
    assert small["filters"]["change"] == "changed in file"
    assert small["differences"] == ["file: written anew"]
    (first,) = [
        row
        for row in report(now, tmp_path / "data.html", "--compare", was, "--max_rows", 1)
        if row["number"] is not None
    ]
    assert first["number"] == 0


def many_rows(count: int) -> list[DataRow]:
    return [
        DataRow(
            number=number,
            texts={"file": [f"{number}.mp4"], "caption": [f"caption {number} " + "word " * 40]},
            filters={
                "bucket": "64×64" if number % 2 else "",
                "rejected": "" if number % 2 else "aspect",
                "source": "",
                "change": "",
            },
        )
        for number in range(count)
    ]


@pytest.mark.slow
def test_rows_are_filtered_searched_and_turned_in_a_browser(tmp_path: Path, browser) -> None:
    rows = many_rows(10_000)
    (tmp_path / "my files").mkdir()
    write_rows(rows, tmp_path / "my files")
    page = data_page(rows, name="d", folder="my files", num_rows=10_000, kept_area=1.0, changes="")
    (tmp_path / "t.html").write_text(render_page(page), encoding="utf-8")
    view = browser.new_page()
    view.goto((tmp_path / "t.html").as_uri())

    def displayed() -> tuple[str, str, int]:
        return view.inner_text("#shown"), view.inner_text("#rows h3 >> nth=0"), view.locator("#rows article").count()

    assert displayed() == ("1–48 of 10,000", "0.mp4", 48)
    view.click("#after")
    assert displayed() == ("49–96 of 10,000", "48.mp4", 48)
    view.select_option("select[name=rejected]", "aspect")
    assert displayed() == ("1–48 of 5,000", "0.mp4", 48)
    view.fill("input[name=text]", "9998 CAPTION")
    assert displayed() == ("1–1 of 1", "9998.mp4", 1)
    assert view.is_disabled("#before")
    assert view.is_disabled("#after")
    view.fill("input[name=text]", "nothing like it")
    assert view.inner_text("#shown") == "No row fits."
    assert view.locator("select").count() == 2, "no filter by what no row has"
    view.close()


@pytest.mark.slow
def test_the_page_is_whole_in_a_browser_and_no_text_becomes_html(tmp_path: Path, prepared_dir, browser) -> None:
    for name, folder in {"images": save_images(tmp_path / "images"), "videos": prepared_dir}.items():
        page = tmp_path / f"{name} #1.html"
        report(folder, page)
        assert not any(look_at(browser, page.as_uri(), widths=(1920, 1280, 390))), name
    view = browser.new_page()
    view.goto((tmp_path / "images #1.html").as_uri())
    assert view.title() == "The data"
    assert view.inner_text("#rows h3 >> nth=0") == "wide '<b>&.png"
    assert BAD in view.locator("#rows article >> nth=0").text_content()
    assert view.locator("#rows img").count() == 5
    view.close()
