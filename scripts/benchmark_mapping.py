r"""Compare columns and media metadata with straightforward code, as ratios of one run.

python scripts/benchmark_mapping.py --rows 5300000 --output scripts/benchmark_results/mapping.json
"""

import argparse
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
from benchmark_tools import benchmark_parser, in_fresh_process, machine, report, seconds_of, timed_with_memory
from PIL import Image

from hf_bucketing import BucketTable, LatentSpec, novelai_ladder
from hf_bucketing.columns import BucketColumns, map_columns
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.media import MediaSource, iter_frames, probe, write_video

SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))


def assign_in_a_loop(table: BucketTable, widths: np.ndarray, heights: np.ndarray) -> dict[int, list[int]]:
    """Assign as NovelAI's script does: one argmin over the aspects per image, in Python."""
    aspects = np.array([size.width / size.height for size in table.sizes])
    buckets: dict[int, list[int]] = {}
    for row, (width, height) in enumerate(zip(widths.tolist(), heights.tolist(), strict=True)):
        bucket = int(np.abs(aspects - width / height).argmin())
        if abs(aspects[bucket] - width / height) < 4:
            buckets.setdefault(bucket, []).append(row)
    return buckets


def mapping_cost(rows_dir: str) -> tuple[float, float]:
    datasets.disable_progress_bars()
    dataset = datasets.load_from_disk(rows_dir)
    columns = BucketColumns(novelai_ladder(), SPEC)

    def warm_up() -> None:
        map_columns(dataset.select(range(1000)), columns)
        dataset.cleanup_cache_files()

    return timed_with_memory(lambda: map_columns(dataset, columns), warm_up)


def measure_columns(rows: int, runs: int, folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(256, 4096, (2, rows)).astype(np.int32)
    datasets.Dataset.from_dict({"width": widths, "height": heights}).save_to_disk(str(folder / "rows"))
    dataset = datasets.load_from_disk(str(folder / "rows"))
    table = novelai_ladder()

    def map_uncached() -> None:
        dataset.cleanup_cache_files()
        map_columns(dataset, BucketColumns(table, SPEC))

    _, memory = in_fresh_process(mapping_cost, rows_dir=str(folder / "rows"))
    frames = np.ones(rows, np.int64)
    mapped, assigned = seconds_of(map_uncached, lambda: table.assign(frames, heights, widths), runs=runs)
    start = time.perf_counter()
    assign_in_a_loop(table, widths, heights)
    loop = time.perf_counter() - start
    (ladder,) = seconds_of(novelai_ladder, runs=100)
    return {
        "rows": rows,
        "map_columns_s": mapped.median,
        "map_columns_spread_s": mapped.spread,
        "map_columns_extra_memory_mb": memory,
        "loop_of_the_seed_s": loop,
        "map_columns_times_faster": loop / mapped.median,
        "assign_rows_per_s": rows / assigned.median,
        "novelai_ladder_ms": ladder.median * 1e3,
    }


def measure_media(files: int, runs: int, folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    pictures, clips = [], []
    for number in range(files):
        path = folder / f"{number}.{'png' if number % 2 else 'jpg'}"
        base = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        base.resize((1024, 768)).save(path)
        pictures.append(MediaSource.from_cell(str(path)))
    for number in range(files // 4):
        path = folder / f"{number}.mp4"
        frames = rng.integers(0, 255, (8, 64, 96, 3), dtype=np.uint8)
        write_video(path, frames, fps=8)
        clips.append(MediaSource.from_cell(str(path)))
    headers, videos = seconds_of(
        lambda: [probe(source) for source in pictures], lambda: [probe(source) for source in clips], runs=runs
    )
    (decoded,) = seconds_of(lambda: [list(iter_frames(source, [0.0])) for source in pictures], runs=1)
    return {
        "image_headers_per_s": files / headers.median,
        "image_headers_times_faster_than_decoding": decoded.median / headers.median,
        "video_headers_per_s": len(clips) / videos.median,
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows of sizes.")
    parser.add_argument("--files", type=int, default=400, help="Pictures of 1024×768 pixels; a quarter as many clips.")
    return parser


def main(args: argparse.Namespace) -> None:
    datasets.disable_progress_bars()
    figures = machine("numpy", "datasets")
    with tempfile.TemporaryDirectory() as folder:
        figures.update(measure_columns(args.rows, args.runs, Path(folder)))
        figures.update(measure_media(args.files, args.runs, Path(folder)))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
