"""What a report looks like: its text, its figures, and the script."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketTable, Size, novelai_ladder, open_table
from hf_bucketing.buckets import CostFit
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.report import SizeColumns, draw_figures, format_report, make_report
from hf_bucketing.report.figures import MAX_BARS, occupancy
from tests.conftest import run_script_here
from tests.report.test_report import SAMPLES, SPEC, TABLE, TWO

TEXT = """\
Train these in buckets: packs would spend 88.8% of the time on padding and waiting, buckets 4.2%.
                     buckets   packs
samples dropped            5       3
kept area, mean        91.7%   95.1%
kept frames, mean      95.8%   99.6%
useful work            95.8%   11.2%
time per sample        1.00×  16.47×
time per kept pixel    1.00×  10.99×
How it is decided: buckets and packs each lose a share of the samples, of the area, of the frames, and of the
processes' time (what is not useful work: padding and waiting). The share that differs most decides; packs have to
lose over 5% less.

17 samples: 12 in 3 of 4 buckets, 5 rejected
rejected by reason: aspect 1, too_short 1, too_small 1, unreadable 1, empty 1
aspect error                       mean  median     max
  |ln(aspect ratio ÷ bucket's)|  0.0930  0.0000  0.2231
  |aspect ratio − bucket's|      0.1875  0.0000  0.5000
kept area 91.7% (mean), enlarged 0 samples

Buckets by size, with batches of 2 on 2 processes: 4 steps, 1 of them mixed
"""


def test_the_text_shows_the_numbers() -> None:
    text = format_report(make_report(SAMPLES, TABLE, spec=SPEC, config=TWO))
    assert text.startswith(TEXT)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "32×64 1 2.000 4 80.0% 100.0% 0.800 0 8 4.48e-07 2 0 0 0" in lines
    assert "9×32×32 2 1.000 1 80.0% 50.0% 1.000 0 12 8.64e-07 0 0 1 0" in lines
    assert "1 buckets without a sample: 3: 9×32×64" in lines
    assert "samples kept 14 12 14" in lines
    assert any(line.startswith("real ÷ computed tokens") and " 100.0% " in line for line in lines)


def test_the_first_buckets_without_a_sample_are_named() -> None:
    many = BucketTable(sizes=tuple(Size(1, 64, 32 * side) for side in range(1, 31)))
    text = format_report(make_report(SizeColumns([1], [64], [64]), many, spec=SPEC, config=TWO))
    said = " ".join(text.partition("29 buckets without a sample: ")[2].split())
    assert said.startswith("0: 64×32, 2: 64×96, 3: 64×128, ")
    assert "20: 64×672, and 9 more (--json, --html)" in said


def web_like(number: int) -> SizeColumns:
    rng = np.random.default_rng(0)
    side, ratio = rng.lognormal(math.log(900), 0.4, number), rng.lognormal(0.1, 0.4, number)
    heights, widths = (np.clip(side * ratio**power, 200, 4000).astype(int) for power in (-0.5, 0.5))
    return SizeColumns(np.ones(number, int), heights, widths)


@pytest.mark.slow
def test_figures_are_complete_png_files(tmp_path: Path) -> None:
    report = make_report(web_like(500), novelai_ladder(), spec=SPEC)
    paths = draw_figures(report, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["aspects.png", "occupancy.png", "tokens.png", "strategies.png"]
    assert sorted(paths) == sorted((tmp_path / "new" / "folder").iterdir()), "and nothing half-written beside them"
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(10**6)) > 20


def test_the_occupancy_figure_names_the_fullest_buckets_alone() -> None:
    few, many = (
        make_report(web_like(3000), novelai_ladder(max_size=(512, 512), step=step), spec=SPEC) for step in (64, 16)
    )
    assert len(few.buckets.used) < MAX_BARS < len(many.buckets.used)
    for report in (few, many):
        shown = report.buckets.used[:MAX_BARS]
        labels = re.findall(r">(\d+×\d+)</text>", occupancy(report).svg)
        assert labels == [f"{bucket.size.height}×{bucket.size.width}" for bucket in shown]
    assert f"the {MAX_BARS} fullest of {len(many.buckets.used)}" in occupancy(many).title


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 8, 8), (1, 64, 64), (0, 0, 0)], ids=["rejected", "one bucket", "unusable"])
def test_figures_and_text_of_the_smallest_data_warn_of_nothing(
    sizes, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    report = make_report(SizeColumns(*([side] for side in sizes)), TABLE, spec=SPEC)
    assert format_report(report)
    assert all(path.stat().st_size for path in draw_figures(report, tmp_path))
    assert not list(recwarn)


def test_reports_need_neither_torch_nor_matplotlib(in_fresh_interpreter: Callable[[str], str]) -> None:
    code = (
        "import sys; from hf_bucketing import LatentSpec, novelai_ladder; from hf_bucketing.report import *\n"
        "spec = LatentSpec(temporal_stride=1, spatial_stride=8)\n"
        "format_report(make_report(SizeColumns([1], [512], [512]), novelai_ladder(), spec=spec))\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(in_fresh_interpreter(code).split())
    assert "hf_bucketing" in loaded
    assert not loaded & {"torch", "datasets", "accelerate", "diffusers", "transformers", "matplotlib", "PIL", "av"}


def report_buckets(dataset: Path, output: Path, *flags: object) -> dict:
    run_script_here("report_buckets.py", dataset, "--json", output, *flags)
    return json.loads(output.read_text())


def test_the_script_prints_writes_and_draws(prepared_dir: Path, tmp_path: Path) -> None:
    flags = ("--batch_size", 3, "--num_processes", 2, "--max_tokens", 640, "--strip_length", 16, "--seed", 4)
    more = ("--json", tmp_path / "report.json", "--figures", tmp_path / "figures", "--width", 96, "--max_area", 9000)
    result = run_script_here("report_buckets.py", prepared_dir, *flags, *more)
    assert "20 samples: 20 in" in result.stdout
    assert "packing joins samples up to 640 tokens" in " ".join(result.stdout.split())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["config"] == {
        "batch_size": 3,
        "num_processes": 2,
        "max_tokens": 640,
        "text_tokens": 0,
        "strip_length": 16,
        "seed": 4,
        "width": 96,
        "max_area": 9000,
        "cost_model": None,
        "rule": {"metric": "log", "max_aspect_error": None, "max_upscale": 1.0},
    }
    spec = {"temporal_stride": 4, "spatial_stride": 8, "patch": [1, 2, 2], "repeats_first": False, "chunk_frames": 0}
    assert report["spec"] == spec
    prepared = PreparedDataset.load(prepared_dir)
    entries = np.bincount(prepared.dataset["bucket_id"], minlength=len(prepared.table))
    assert [bucket["num_samples"] for bucket in report["buckets"]["buckets"]] == entries.tolist()
    assert len(list((tmp_path / "figures").glob("*.png"))) == 4


@pytest.mark.slow
def test_the_script_reports_seconds_with_the_costs_that_a_run_measured(prepared_dir: Path, tmp_path: Path) -> None:
    fit = CostFit(linear=2e-3, quadratic=0.0, per_batch=0.5, residual=0.01, num_steps=100)
    (tmp_path / "cost_model.json").write_text(fit.to_json())
    measured = ("--cost_model", tmp_path / "cost_model.json")
    report = report_buckets(prepared_dir, tmp_path / "report.json", *measured)
    for bucket in report["buckets"]["buckets"]:
        assert bucket["cost"] == pytest.approx(2e-3 * bucket["num_tokens"])
    printed = run_script_here("report_buckets.py", prepared_dir, *measured, "--figures", tmp_path / "figures").stdout
    assert "epoch cost, seconds" in printed
    assert "FLOP" not in printed
    refused = run_script_here("report_buckets.py", prepared_dir, *measured, "--width", 96, check=False)
    assert "Omit --width: it decides the cost of tokens, and --cost_model gives that." in refused.stderr


def test_the_script_tries_other_tables(prepared_dir: Path, tmp_path: Path) -> None:
    table = BucketTable(sizes=(Size(1, 96, 96), Size(17, 64, 112)))
    (tmp_path / "table.json").write_text(table.to_json())
    sizes = {}
    for flags in (
        ("--table", tmp_path / "table.json"),
        ("--buckets", "96,96;64,112", "--bucket_frames", "1,17"),
        ("--novelai", "--max_upscale", 5),
    ):
        report = report_buckets(prepared_dir, tmp_path / "report.json", *flags)
        sizes[flags[0]] = [tuple(bucket["size"].values()) for bucket in report["buckets"]["buckets"]]
    assert sizes["--table"] == list(table.sizes)
    assert sizes["--buckets"] == [(1, 96, 96), (1, 64, 112), (17, 96, 96), (17, 64, 112)]
    assert sizes["--novelai"] == list(novelai_ladder().sizes)
    assert report["buckets"]["enlarged"] > 0, "under --max_upscale 5"


def test_the_script_reads_images_and_rows_without_a_size(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"image": ["a"] * 3, "width": [64, 64, None], "height": [64, 32, 64]})
    data = PreparedDataset(dataset=rows, table=TABLE, open_table=open_table(SPEC), column="image", caption_column=None)
    data.save(tmp_path / "data")
    report = report_buckets(tmp_path / "data", tmp_path / "report.json", "--num_processes", 1)
    assert [bucket["num_samples"] for bucket in report["buckets"]["buckets"]] == [1, 1, 0, 0]
    assert report["buckets"]["rejections"] == {"unreadable": 1}


def test_the_script_reports_the_buckets_that_rows_were_prepared_with(tmp_path: Path) -> None:
    """A source's own limits may give other buckets than those that the table would give by itself."""
    columns = {"width": [64, 64], "height": [64, 64], "num_frames": [1, 1], "fps": [0.0, 0.0]}
    own = {"bucket_id": [0, -1], "rejection": ["none", "too_small"]}
    rows = Dataset.from_dict({"image": ["a"] * 2, **columns, **own})
    data = PreparedDataset(dataset=rows, table=TABLE, open_table=open_table(SPEC), column="image", caption_column=None)
    data.save(tmp_path / "data")
    kept, anew = (
        report_buckets(tmp_path / "data", tmp_path / "report.json", "--num_processes", 1, *flags)["buckets"]
        for flags in ((), ("--max_upscale", 4))
    )
    assert kept["rejections"] == {"too_small": 1}
    assert anew["rejections"] == {}


def test_mistakes_in_reporting_end_in_one_line(prepared_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("buckets")
    cases = [
        ((tmp_path,), "holds no bucketing.json"),
        ((prepared_dir, "--table", tmp_path / "none.json"), "none.json is not a file"),
        ((prepared_dir, "--table", tmp_path / "text.json"), "as BucketTable.to_json writes it"),
        ((prepared_dir, "--buckets", "50,50"), "the next valid size is"),
        ((prepared_dir, "--max_tokens", 20), "Raise --max_tokens"),
        ((prepared_dir, "--batch_size", 0), "--batch_size must be at least 1"),
    ]
    for arguments, message in cases:
        result = run_script_here("report_buckets.py", *arguments, check=False)
        assert result.returncode == 1, message
        assert message in result.stderr.strip().splitlines()[-1], result.stderr[-2000:]
    result = run_script_here("report_buckets.py", prepared_dir, "--novelai", "--buckets", "64,64", check=False)
    assert result.returncode == 2
    assert "not allowed with" in result.stderr


def test_one_process_is_no_plural() -> None:
    config = replace(TWO, num_processes=1, batch_size=1)
    text = format_report(make_report(SizeColumns([1] * 4, [64] * 4, [64] * 4), TABLE, spec=SPEC, config=config))
    assert "on 1 process:" in text
    assert "on 1 process," in text
    assert "1 processes" not in text
    assert "Padding draws 1 sample of any size; bucketing" in text
