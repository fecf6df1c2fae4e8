r"""Measure columns and media metadata against the plain ways, as ratios of one run.

python scripts/benchmark_mapping.py --rows 5300000 --output scripts/benchmark_results/mapping.json
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from hf_bucketing import BucketTable, LatentSpec, novelai_ladder
from hf_bucketing.errors import exit_with_message
from hf_bucketing.mapping import BucketColumns, map_columns
from hf_bucketing.media import MediaSource, iter_frames, probe, write_video

SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))


def median_seconds(function: Callable[[], object], *, runs: int) -> tuple[float, float]:
    """Return the median and the spread (max − min) of several runs after one to warm up."""
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def loop_of_the_seed(table: BucketTable, widths: np.ndarray, heights: np.ndarray) -> dict[int, list[int]]:
    """Assign as NovelAI's script does: one argmin over the aspects per image, in Python."""
    aspects = np.array([size.width / size.height for size in table.sizes])
    buckets: dict[int, list[int]] = {}
    for row, (width, height) in enumerate(zip(widths.tolist(), heights.tolist(), strict=True)):
        bucket = int(np.abs(aspects - width / height).argmin())
        if abs(aspects[bucket] - width / height) < 4:
            buckets.setdefault(bucket, []).append(row)
    return buckets


def extra_memory(rows_dir: str) -> float:
    """Return the MB by which mapping raises the peak memory of a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=send_extra_memory, args=(rows_dir, sender))
    process.start()
    process.join()
    return float(receiver.recv())


def send_extra_memory(rows_dir: str, connection: Connection) -> None:
    datasets.disable_progress_bars()
    dataset = datasets.load_from_disk(rows_dir)
    columns = BucketColumns(novelai_ladder(), SPEC)
    map_columns(dataset.select(range(1000)), columns)  # what imports and the first call take is not counted
    dataset.cleanup_cache_files()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
    before = memory_in_mb("VmRSS")
    map_columns(dataset, columns)
    connection.send(memory_in_mb("VmHWM") - before)


def memory_in_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure_columns(rows: int, runs: int, folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(256, 4096, (2, rows)).astype(np.int32)
    datasets.Dataset.from_dict({"width": widths, "height": heights}).save_to_disk(str(folder / "rows"))
    dataset = datasets.load_from_disk(str(folder / "rows"))
    table = novelai_ladder()

    def map_uncached() -> None:
        dataset.cleanup_cache_files()
        map_columns(dataset, BucketColumns(table, SPEC))

    mapped, mapped_spread = median_seconds(map_uncached, runs=runs)
    memory = extra_memory(str(folder / "rows"))
    frames = np.ones(rows, np.int64)
    assigned, _ = median_seconds(lambda: table.assign(frames, heights, widths), runs=runs)
    start = time.perf_counter()
    loop_of_the_seed(table, widths, heights)
    loop = time.perf_counter() - start
    ladder, _ = median_seconds(novelai_ladder, runs=100)
    return {
        "rows": rows,
        "map_columns_s": mapped,
        "map_columns_spread_s": mapped_spread,
        "map_columns_extra_memory_mb": memory,
        "loop_of_the_seed_s": loop,
        "map_columns_times_faster": loop / mapped,
        "assign_rows_per_s": rows / assigned,
        "novelai_ladder_ms": ladder * 1e3,
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
    headers, _ = median_seconds(lambda: [probe(source) for source in pictures], runs=runs)
    decoded, _ = median_seconds(lambda: [list(iter_frames(source, [0.0])) for source in pictures], runs=1)
    videos, _ = median_seconds(lambda: [probe(source) for source in clips], runs=runs)
    return {
        "image_headers_per_s": files / headers,
        "image_headers_times_faster_than_decoding": decoded / headers,
        "video_headers_per_s": len(clips) / videos,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows of sizes (default: 5.3 M, as NovelAI had).")
    parser.add_argument("--files", type=int, default=400, help="Pictures of 1024×768 pixels; a quarter as many clips.")
    parser.add_argument("--runs", type=int, default=5, help="Runs whose median counts (default: 5).")
    parser.add_argument("--output", type=Path, help="A JSON file for the figures.")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "datasets": datasets.__version__}
    figures: dict[str, object] = {"machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores", **versions}
    with tempfile.TemporaryDirectory() as folder:
        figures.update(measure_columns(args.rows, args.runs, Path(folder)))
        figures.update(measure_media(args.files, args.runs, Path(folder)))
    for name, figure in figures.items():
        print(f"{name:42} {figure:.4g}" if isinstance(figure, float) else f"{name:42} {figure}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    exit_with_message(main)
