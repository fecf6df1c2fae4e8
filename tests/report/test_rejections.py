"""Rejected rows are named: in their column, by samplers, and by hf_bucketing prepare."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from datasets import Dataset
from PIL import Image

from hf_bucketing import AssignmentRule, BucketTable, LatentSpec, PlanError, Rejection, Size, open_table
from hf_bucketing.buckets.assignment import count_rejections
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.loaders import BucketBatchSampler, PackBatchSampler
from hf_bucketing.models.registry import recipes
from hf_bucketing.report import describe_assignment, describe_packed_frames
from tests.conftest import run_script_here

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(9, 64, 64)))
LABELS = ["none", "too_small", "aspect", "none", "too_short", "too_small", "unreadable"]


def rows() -> Dataset:
    return Dataset.from_dict({
        "width": [64, 32, 999, 80, 64, 60, -1],
        "height": [64, 32, 100, 80, 64, 64, -1],
        "num_frames": [1, 1, 1, 12, 5, 9, -1],
    })  # fmt: skip


@pytest.fixture
def mapped() -> Dataset:
    return map_columns(rows(), BucketColumns(TABLE, WAN))


def test_the_column_holds_names_however_it_is_computed(mapped: Dataset) -> None:
    columns = BucketColumns(TABLE, WAN)
    plain = rows().map(columns, batched=True)
    stream = list(map_columns(rows().to_iterable_dataset(), columns))
    assert mapped["rejection"][:] == plain["rejection"][:] == [row["rejection"] for row in stream] == LABELS
    assert mapped.features["rejection"].dtype == plain.features["rejection"].dtype == "string"
    assert columns(rows()[:])["rejection"].tolist() == LABELS
    assert Counter(mapped["rejection"]) == {"none": 2, "too_small": 2, "aspect": 1, "too_short": 1, "unreadable": 1}
    counts = {"aspect": 1, "too_short": 1, "too_small": 2, "unreadable": 1}
    assert count_rejections(LABELS) == counts
    numbers = TABLE.assign(*(rows()[name] for name in ("num_frames", "height", "width"))).rejection
    assert count_rejections(numbers) == counts


WHY = "5 of 7 rows were rejected and are never drawn: 1 aspect, 1 too_short, 2 too_small, 1 unreadable."


@pytest.mark.parametrize("kind", ["bucket", "pack"])
@pytest.mark.parametrize("given", ["column", "names", "numbers", "nothing", "shuffled"])
def test_a_sampler_says_once_how_many_rows_were_rejected_and_why(kind, given, mapped, caplog) -> None:
    if given == "shuffled":
        mapped = mapped.shuffle(seed=0)
    column = mapped["bucket_id" if kind == "bucket" else "num_tokens"]
    options = {"num_processes": 1}
    if given not in ("column", "shuffled"):
        column = np.asarray(column)
    if given == "names":
        options["rejection"] = mapped["rejection"]
    if given == "numbers":
        sizes = (mapped[name] for name in ("num_frames", "height", "width"))
        options["rejection"] = TABLE.assign(*sizes).rejection
    if kind == "bucket":
        sampler = BucketBatchSampler(column, table=TABLE, batch_size=1, **options)
    else:
        sampler = PackBatchSampler(column, max_tokens=100, strip_length=1, **options)
    assert len(list(sampler)) <= sampler.plan(1).kept == 2
    assert sampler.plan().summary()["dropped"]["rejected"] == 5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    expected = WHY if given != "nothing" else WHY.split(":")[0] + ': pass rejection=dataset["rejection"] to see why.'
    assert record.getMessage() == expected


def test_a_sampler_is_silent_where_nothing_was_rejected_and_beside_the_main_process(mapped, caplog, monkeypatch):
    kept = mapped.filter(lambda row: row["rejection"] == "none")
    BucketBatchSampler(kept["bucket_id"], table=TABLE, batch_size=1)
    for shared_state in ({}, {"process_index": 0}):  # without accelerate, and beside it
        monkeypatch.setattr(PartialState, "_shared_state", shared_state)
        BucketBatchSampler(mapped["bucket_id"], table=TABLE, batch_size=1, num_processes=2, process_index=1)
    monkeypatch.setattr(PartialState, "_shared_state", {"process_index": 1})
    monkeypatch.setattr(PartialState, "is_main_process", False)
    BucketBatchSampler(mapped["bucket_id"], table=TABLE, batch_size=1, num_processes=2)
    assert not caplog.records
    with pytest.raises(PlanError, match="expected 7, got 2"):
        BucketBatchSampler(mapped["bucket_id"], table=TABLE, batch_size=1, num_processes=1, rejection=["none"] * 2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    sizes = {"own": (480, 832), "hd": (720, 1280), "square": (1000, 1000), "small": (300, 400), "tiny": (90, 90),
             "long": (100, 3000)}  # fmt: skip
    for name, (height, width) in sizes.items():
        Image.new("RGB", (width, height)).save(folder / f"{name}.png")
    (folder / "bad.png").write_bytes(b"\0" * 9)
    lines = [json.dumps({"file_name": f"{name}.png", "caption": name}) for name in [*sizes, "bad"]]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def prepare(images: Path, pipeline: Path, output: Path, *flags: object):
    return run_script_here(
        "prepare_dataset.py",
        *flags,
        dataset=images,
        pretrained_model_name_or_path=pipeline,
        output_dir=output,
        bucket_tokens=8190,
        bucket_frames=1,
        on_error="reject",
    )


def test_preparing_prints_buckets_and_names_rejected_files_with_the_option_that_keeps_them(
    images: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    lines = prepare(images, pipeline_dir, tmp_path / "out").stdout.splitlines()
    cells = [line.split() for line in lines]
    assert ["480×832", "1", "100.0%", "100.0%", "1.00", "0", "1,560"] in cells
    assert ["720×1280", "1", "100.0%", "100.0%", "1.00", "0", "3,600"] in cells
    text = "\n".join(lines)
    assert "3 of 7 rows assigned to 3 of" in text
    assert "2 rows rejected: too_small (every bucket near their aspect ratio would enlarge them): small.png" in text
    assert "to keep them: --max_upscale 2 (keeps 1), --max_upscale 8 (keeps 2)" in text
    assert "1 row rejected: aspect (no bucket is near their aspect ratio): long.png" in text
    assert "1 row rejected: unreadable (their size or frames could not be read): bad.png" in text
    kept = prepare(images, pipeline_dir, tmp_path / "kept", "--max_upscale", 8).stdout
    assert "too_small" not in kept
    assert sum(PreparedDataset.load(tmp_path / "kept").dataset["bucket_id"][row] >= 0 for row in range(7)) == 5


def test_a_remedy_is_named_for_every_reason_of_rejection() -> None:
    reasons = [reason for reason in Rejection if reason != Rejection.NONE]
    size = {name: np.full(len(reasons), 32) for name in ("num_frames", "height", "width")}
    columns = {**size, "bucket_id": np.full(len(reasons), -1), "rejection": [reason.label for reason in reasons]}
    text = describe_assignment(
        columns, table=TABLE, spec=WAN, rule=AssignmentRule(), name_rows=lambda rows: [f"row {row}" for row in rows]
    )
    assert text.startswith(f"0 of {len(reasons)} rows assigned to 0 of 2 buckets\n")
    for row, reason in enumerate(reasons):
        (line,) = [line for line in text.splitlines() if f"rejected: {reason.label} (" in line]
        assert line.endswith(f"row {row}")
    assert text.count("\n    to keep them: ") == len(reasons)
    assert "to keep them: ," not in text


def described(sizes: list[tuple[int, int, int]], table: BucketTable, **options: object) -> str:
    columns = dict(zip(("num_frames", "height", "width"), map(np.array, zip(*sizes, strict=True)), strict=True))
    assigned = table.assign(*columns.values())
    columns |= {"bucket_id": assigned.bucket_id, "rejection": assigned.rejection}
    names = {"name_rows": lambda rows: [f"clip{row}.mp4" for row in rows], "rule": AssignmentRule()}
    return describe_assignment(columns, table=table, spec=WAN, **names, **options)


def test_the_kept_share_of_frames_is_a_column_and_long_samples_are_named_with_clips() -> None:
    text = described([(9, 64, 64), (12, 64, 64), (28, 64, 64), (90, 64, 64)], TABLE)
    cells = [line.split() for line in text.splitlines()]
    assert cells[0] == ["bucket", "rows", "kept", "area", "kept", "frames", "scale", "enlarged", "tokens"]
    assert cells[1][3] == "54.3%", "the mean of 9/9, 9/12, 9/28 and 9/90"
    assert "2 samples lose more than half of the frames: clip3.mp4 keeps 9 of 90. --clips all" in text
    assert "lose" not in described([(9, 64, 64), (18, 64, 64)], TABLE)


def test_the_hint_for_too_short_counts_what_numbers_of_frames_would_keep() -> None:
    sizes = [(1, 64, 64)] * 2 + [(3, 64, 64), (6, 64, 64), (8, 48, 48), (14, 64, 64), (15, 64, 64)]
    long = BucketTable.parse("64,64", frames=[17])
    remedy = "to keep them: add to --bucket_frames, or to the --table: 1 (keeps 2), 13 (keeps 2), 5 (keeps 3)"
    assert remedy in described(sizes, long)
    small = lambda frames: BucketTable.parse("32,32", frames=[frames])  # noqa: E731
    assert "1 (keeps 2), 13 (keeps 2), 5 (keeps 4)" in described(sizes, long, table_of_frames=small)
    assert "to keep them: remove them" in described([(3, 64, 64)], long)


@pytest.mark.parametrize(("max_frames", "sentence"), [
    (17, "In packs, samples keep at most 17 frames (--max_frames); 2 of 4 rows have more."),
    (None, "In packs, samples keep all their frames."),
])  # fmt: skip
def test_preparing_says_how_many_frames_samples_keep_in_packs(max_frames: int | None, sentence: str) -> None:
    assert describe_packed_frames([1, 17, 18, 90], open_table(WAN, max_frames=max_frames)) == sentence


def test_own_sizes_and_the_step_of_token_buckets_are_flags(images: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    native = {size for sizes in recipes()["WanPipeline"].native_sizes for size in (sizes, sizes[::-1])}
    flags = {"wan": (), "other": ("--bucket_sizes", "320,640;400,400"), "none": ("--bucket_sizes", "none"),
             "coarse": ("--aspect_step", "inf")}  # fmt: skip
    tables = {}
    for name, options in flags.items():
        prepare(images, pipeline_dir, tmp_path / name, *options)
        tables[name] = PreparedDataset.load(tmp_path / name).table
    shapes = {name: {size[1:] for size in table.sizes} for name, table in tables.items()}
    assert native <= shapes["wan"]
    assert {(320, 640), (640, 320), (400, 400)} <= shapes["other"]
    assert not native & shapes["none"]
    assert native <= shapes["coarse"]
    assert len(tables["none"]) < len(tables["coarse"]) < len(tables["wan"])


def test_the_report_of_ladders_prints_a_table_in_markdown() -> None:
    flags = ("--bucket_tokens", 8190, "--bucket_frames", 1, "--samples", 2000, "--aspect_steps", "0.08,inf")
    lines = run_script_here("report_ladders.py", *flags).stdout.splitlines()
    *lines, _, novelai = lines
    assert re.fullmatch(r"Of 2,000 images .* keeps [\d,]+ under the default rule .* and 2,000 under .*", novelai)
    assert lines[0].startswith("| own sizes | aspect_step | buckets |")
    assert [line.split(" | ")[1] for line in lines[2:]] == ["0.08", "inf"] * 2
    buckets = [int(line.split(" | ")[2]) for line in lines[2:]]
    assert buckets[0] > buckets[1] > buckets[3]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_tables_that_are_chosen_stand_beside_ladders_and_keep_more() -> None:
    flags = ("--bucket_tokens", 1560, "--bucket_frames", 1, "--samples", 2000, "--bucket_sizes", "none")
    ladder = run_script_here("report_ladders.py", *flags, "--aspect_steps", "inf").stdout.splitlines()[2]
    number = ladder.split(" | ")[2]
    lines = run_script_here("report_ladders.py", *flags, "--aspect_steps", "inf", "--num_buckets", number).stdout
    first, chosen = ([cell.strip("| ") for cell in line.split(" | ")] for line in lines.splitlines()[2:4])
    assert chosen[:3] == ["none", "chosen", number]
    assert float(chosen[5]) > float(first[5]) + 1, "per cent of the mix"
