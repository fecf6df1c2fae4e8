"""The scripts that make and prepare data: what they write, and what they say to a person's mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from datasets import load_dataset
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, Size
from hf_bucketing.columns import PreparedDataset, load_source
from hf_bucketing.commands.table import COMMANDS
from hf_bucketing.media import MediaSource, probe
from hf_bucketing.synthetic.media import DEMO_CLIPS, make_media_dataset
from tests.conftest import ROOT, run_script, run_script_here


def test_the_demo_data_set_has_the_shapes_that_make_training_hard(media_dir: Path) -> None:
    lines = [json.loads(line) for line in (media_dir / "metadata.jsonl").read_text().splitlines()]
    infos = [probe(MediaSource.from_cell(line["file_name"], root=media_dir)) for line in lines]
    videos = [info for info in infos if info.num_frames > 1]
    assert len({(info.width, info.height) for info in infos}) >= 6
    assert {(info.width > info.height) - (info.width < info.height) for info in infos} == {-1, 0, 1}
    assert len({round(info.num_frames / info.fps, 1) for info in videos}) >= 3
    assert {info.fps for info in videos} == {8.0, 16.0}
    assert {Path(line["file_name"]).suffix for line in lines} == {".mp4", ".png", ".jpg"}
    assert all(line["caption"].split()[-1] == "background" for line in lines)


def test_it_loads_as_json_and_its_videos_as_videofolder(media_dir: Path) -> None:
    rows = load_dataset("json", data_files=str(media_dir / "metadata.jsonl"), split="train")
    assert set(rows.column_names) == {"file_name", "caption"}
    videos = load_dataset("videofolder", data_dir=str(media_dir / "videos"), split="train")
    assert set(videos.column_names) == {"video", "caption"}
    assert len(videos) == sum(name.endswith(".mp4") for name in rows["file_name"])


def test_the_same_seed_writes_the_same_data(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_script_here("make_demo_dataset.py", "--output_dir", tmp_path / name, "--num_samples", 9, "--seed", seed)
    texts = [(tmp_path / name / "metadata.jsonl").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    pictures = [Image.open(tmp_path / name / "images" / "0007.png").tobytes() for name in "abc"]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.slow
def test_existing_folders_of_other_things_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for script in ("make_demo_dataset.py", "make_tiny_pipeline.py"):
        result = run_script_here(script, "--output_dir", tmp_path, check=False)
        assert result.returncode == 1
        assert "choose another folder" in result.stderr.splitlines()[-1]
    for options in ({"num_samples": 0}, {"num_samples": 1, "clips": ()}):
        with pytest.raises(BucketingError, match="needs a sample"):
            make_media_dataset(tmp_path / "new", **options)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def prepare(dataset: object, pipeline: Path, output: Path, *flags: object, check: bool = True):
    here = "--num_proc" not in flags  # whose processes are not forked from this one
    return (run_script_here if here else run_script)(
        "prepare_dataset.py",
        *(flags or ("--bucket_tokens", "60,110", "--bucket_frames", "1,9,17", "--target_fps", 8)),
        check=check,
        dataset=dataset,
        pretrained_model_name_or_path=pipeline,
        output_dir=output,
    )


def test_preparing_keeps_every_row_and_counts_the_rejected(media_dir, pipeline_dir, tmp_path: Path) -> None:
    result = prepare(media_dir, pipeline_dir, tmp_path / "out", "--buckets", "64,96;96,64", "--bucket_frames", "9")
    data = PreparedDataset.load(tmp_path / "out")
    assert len(data.dataset) == 20
    images = sum(DEMO_CLIPS[number % 9].frames == 1 for number in range(20))
    assert f"{images} rows rejected: too_short" in result.stdout
    assert data.dataset["rejection"][:].count("none") == 20 - images
    assert data.table.sizes[0] == (9, 64, 96)


@pytest.mark.parametrize(
    "flags",
    [
        ("--split", "train[:5]"),
        pytest.param(("--num_proc", 2), marks=pytest.mark.slow),
        ("--caption_column", "file_name"),
    ],
    ids=str,
)
def test_flags_of_preparing_have_an_effect(flags, media_dir, pipeline_dir, tmp_path: Path) -> None:
    common = ("--bucket_tokens", "60,110", "--bucket_frames", "1,9,17", "--target_fps", 8)
    prepare(media_dir, pipeline_dir, tmp_path / "out", *common, *flags)
    data = PreparedDataset.load(tmp_path / "out")
    assert len(data.dataset) == (5 if "--split" in flags else 20)
    assert data.caption_column == ("file_name" if "--caption_column" in flags else "caption")


def test_a_chosen_table_is_printed_beside_the_ladder_and_kept(media_dir, pipeline_dir, tmp_path: Path) -> None:
    flags = ("--bucket_tokens", "60,110", "--bucket_frames", "1,9,17", "--target_fps", 8)
    ladder = prepare(media_dir, pipeline_dir, tmp_path / "ladder", *flags).stdout.splitlines()
    chosen = prepare(media_dir, pipeline_dir, tmp_path / "chosen", *flags, "--num_buckets", 8).stdout.splitlines()
    (line,) = [line for line in ladder if "rows assigned to" in line]
    mine, other = [line for line in chosen if "rows assigned to" in line]
    assert other == f"without --num_buckets: {line}"
    said = run_script_here("report_buckets.py", tmp_path / "chosen", "--batch_size", 1, "--num_processes", 1).stdout
    (area,) = re.findall(r"kept area (.*) on average", mine)
    assert f"kept area {area} (mean)" in said
    assert len(PreparedDataset.load(tmp_path / "chosen").table) <= 8


def test_a_table_file_and_the_limits_of_assignment_are_used(media_dir, pipeline_dir, tmp_path: Path) -> None:
    table = BucketTable(sizes=(Size(1, 256, 128), Size(1, 224, 224)))
    (tmp_path / "table.json").write_text(table.to_json())
    flags = ("--table", tmp_path / "table.json", "--target_fps", 8)
    none, some = (
        prepare(media_dir, pipeline_dir, tmp_path / name, *flags, *more).stdout
        for name, more in {"never": (), "larger": ("--max_upscale", 2)}.items()
    )
    assert "No row has a bucket" in none, "and which packs still take"
    assert "No row has a bucket" not in some
    prepare(media_dir, pipeline_dir, tmp_path / "nearer", *flags, "--max_upscale", 2, "--max_aspect_error", 0.1)
    kept = [PreparedDataset.load(tmp_path / name).dataset["bucket_id"] for name in ("never", "larger", "nearer")]
    assert PreparedDataset.load(tmp_path / "never").table == table
    assert [sum(bucket >= 0 for bucket in column) for column in kept] == [0, 6, 2]


def test_mistakes_in_preparing_end_in_one_line(media_dir, pipeline_dir, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    make_media_dataset(broken, num_samples=3)
    (broken / "videos" / "0001.mp4").write_bytes(b"\0" * 99)
    ladder = ("--bucket_tokens", "60", "--bucket_frames", "1,9")
    cases = [
        (tmp_path / "nowhere", ladder, "does not exist"),
        (media_dir, ("--bucket_tokens", "60", "--buckets", "64,64"), "one of --bucket_tokens"),
        (media_dir, ("--buckets", "64x64"), "'64x64'"),
        (media_dir, (*ladder, "--num_buckets", 1), "--num_buckets must be at least 2, got 1"),
        (media_dir, (*ladder, "--num_buckets", 4, "--aspect_step", 0.1), "Omit --aspect_step"),
        (media_dir, (*ladder, "--num_buckets", 4, "--bucket_sizes", "64,96"), "--bucket_sizes names some"),
        (media_dir, (*ladder, "--media_column", "clip"), "no media column 'clip'"),
        (media_dir, (*ladder, "--caption_column", "text"), "no caption column 'text'"),
        (broken, ladder, "0001.mp4"),
        (media_dir, (*ladder, "--pretrained_model_name_or_path", tmp_path), "no diffusers pipeline"),
        (
            "nobody/nothing",
            ladder,
            "reach the Hugging Face hub to download nobody/nothing (HF_HUB_OFFLINE is set)",
        ),
    ]
    for dataset, flags, message in cases:
        result = prepare(dataset, pipeline_dir, tmp_path / "out", *flags, check=False)
        assert result.returncode == (2 if "one of --bucket_tokens" in message else 1), message
        assert message in result.stderr.strip().splitlines()[-1], result.stderr[-2000:]
        assert not (tmp_path / "out").exists()
    prepare(broken, pipeline_dir, tmp_path / "out", *ladder, "--on_error", "reject")
    assert PreparedDataset.load(tmp_path / "out").dataset["bucket_id"][1] == -1


def test_a_table_that_no_sample_fits_is_an_error_before_training(media_dir, pipeline_dir, tmp_path: Path) -> None:
    prepare(media_dir, pipeline_dir, tmp_path / "out", "--buckets", "512,512", "--bucket_frames", "1,81")
    result = run_script_here(
        "train_text_to_video.py",
        pretrained_model_name_or_path=pipeline_dir,
        dataset_dir=tmp_path / "out",
        report_to="none",
        output_dir=tmp_path / "trained",
        check=False,
    )
    assert result.returncode == 1
    assert "every row was rejected" in result.stderr.strip().splitlines()[-1]


MODULES = {"benchmark_tools.py", "published_data_sets.py", "yardsticks.py"}
SCRIPTS = sorted(
    path.relative_to(ROOT / "scripts").as_posix()
    for folder in ("", "benchmarks", "tools")
    for path in (ROOT / "scripts" / folder).glob("*.py")
    if path.name not in MODULES
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script: str) -> None:
    assert f"scripts/{script}" in run_script_here(script, "--help").stdout


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "/" not in script and "ray" not in script])
def test_a_script_that_users_launch_is_a_command(script: str) -> None:
    text = (ROOT / "scripts" / script).read_text()
    (module,) = re.findall(r"^from hf_bucketing\.commands\.(\w+) import .*main, make_parser$", text, re.MULTILINE)
    assert module in {command.module for command in COMMANDS.values()}
    code = text.split('"""')[2]
    assert len(code.splitlines()) <= 7


def test_a_videofolder_is_found_by_its_column(media_dir: Path, tmp_path: Path) -> None:
    for path in (media_dir / "videos").glob("*.mp4"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    loaded = load_source(str(tmp_path))
    assert loaded.column == "video"
    assert loaded.root == str(tmp_path)
