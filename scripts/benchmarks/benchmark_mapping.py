r"""Measure columns and media metadata, beside the loop and the decoding that they replace.

python scripts/benchmarks/benchmark_mapping.py --rows 5300000 --output scripts/benchmarks/results/mapping.json
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmark_tools import benchmark_parser, in_fresh_process, machine, measure_parts, seconds_of, timed_with_memory
from PIL import Image

from hf_bucketing import BucketBatchSampler, BucketTable, LatentSpec, novelai_ladder
from hf_bucketing.columns import BucketColumns, MediaMetadata, column_array, map_columns
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.media import MediaSource, iter_frames, probe, write_video
from hf_bucketing.synthetic.media import Clip, render
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

_REPEATED_CLIPS = 64
PARTS = ["columns", "chosen", "media", "headers", "preparing"]
"""What is measured, one after the other."""
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
        "assign_in_a_loop_s": loop,
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
        "images_decoded_per_s": files / decoded.median,
        "video_headers_per_s": len(clips) / videos.median,
    }


def write_clips(folder: Path, count: int) -> list[Path]:
    """Write H.264 clips of random sizes, lengths and frame rates."""
    rng = np.random.default_rng(0)
    paths = [folder / f"clip-{number:05}.mp4" for number in range(count)]
    for path in paths:
        height, width = (rng.integers(6, 20, 2) * 8).tolist()
        clip = Clip(int(rng.integers(5, 34)), height, width, int(rng.choice([8, 16, 24, 30])))
        frames = render(clip, shape="circle", color="red", direction="left")
        write_video(path, frames, fps=clip.fps)
    return paths


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure_headers(clips: list[Path], runs: int) -> dict[str, float]:
    """Measure `MediaMetadata` by processor time, in this process and through `map_columns` in two more."""
    metadata = MediaMetadata("path", target_fps=16)
    cells = [str(path) for path in clips]
    run = count()

    def map_in_two_processes() -> None:
        # A further column makes this another data set, whose result is not in datasets' cache.
        dataset = datasets.Dataset.from_dict({"path": cells, "run": [next(run)] * len(cells)})
        map_columns(dataset, metadata, num_proc=2)

    (alone,) = seconds_of(lambda: metadata({"path": cells}), runs=runs, clock=time.process_time)
    (mapped,) = seconds_of(map_in_two_processes, runs=runs, clock=processor_seconds)
    return {
        "header_files": len(clips),
        "header_files_per_s_and_core": len(clips) / alone.median,
        "header_files_per_s_and_core_of_two_processes": len(clips) / mapped.median,
    }


def measure_preparing(rows: int, clips: list[Path], runs: int, folder: Path) -> dict[str, float]:
    """Measure scripts/prepare_dataset.py, from its start, on a table with size columns that repeats some clips."""
    sizes = MediaMetadata("path")({"path": [str(path) for path in clips]})
    chosen = np.random.default_rng(0).integers(0, len(clips), rows)
    columns = {name: np.array(sizes[name])[chosen] for name in ("width", "height", "num_frames", "fps")}
    names = pa.array([str(path) for path in clips]).take(pa.array(chosen))
    captions = pa.array([f"clip {number} of a circle that moves" for number in range(rows)])
    pq.write_table(pa.table({"file_name": names, "caption": captions, **columns}), folder / "rows.parquet")
    make_tiny_pipeline(folder / "pipeline")
    script = Path(__file__).parents[1] / "prepare_dataset.py"
    command = [sys.executable, script, "--dataset", folder / "rows.parquet", "--output_dir", folder / "prepared"]
    command += ["--pretrained_model_name_or_path", folder / "pipeline"]
    command += ["--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25"]

    def prepare() -> None:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "HF_DATASETS_CACHE": cache}
            subprocess.run(command, check=True, capture_output=True, env=environment)

    before, load = processor_seconds(), os.getloadavg()[0]
    taken = []
    for _ in range(runs):  # each in a process of its own, so that there is nothing to warm up
        start = time.perf_counter()
        prepare()
        taken.append(time.perf_counter() - start)
    processor = processor_seconds() - before
    return {
        "prepared_rows": rows,
        "prepare_s": statistics.median(taken),
        "prepare_spread_s": max(taken) - min(taken),
        "prepare_load_at_start": load,
        "prepare_processor_s": processor / runs,
    }


def measure_chosen(rows: int, runs: int, folder: Path) -> dict[str, object]:
    """Measure columns and plans of rows that indices choose beside those of a whole data set, per row."""
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(256, 4096, (2, rows)).astype(np.int32)
    datasets.Dataset.from_dict({"width": widths, "height": heights}).save_to_disk(str(folder / "chosen"))
    whole = datasets.load_from_disk(str(folder / "chosen"))
    columns = BucketColumns(novelai_ladder(), SPEC)
    chosen = {
        "none": whole,
        "select": whole.select(rng.permutation(rows)),
        "shuffle": whole.shuffle(seed=0),
        "train_test_split": whole.train_test_split(0.02, seed=0)["train"],
    }
    mapped = {way: map_columns(data, columns) for way, data in chosen.items()}
    ways = len(chosen)
    seconds = seconds_of(
        *(partial(map_in_memory, data, columns) for data in chosen.values()),
        *(partial(plan_of_column, data) for data in mapped.values()),
        *(partial(column_array, data, "width") for data in chosen.values()),
        runs=runs,
    )
    per_row = np.array([taken.median for taken in seconds]).reshape(3, ways) / [len(data) for data in chosen.values()]
    table = []
    for number, (way, data) in enumerate(chosen.items()):
        start = time.perf_counter()
        gathered = np.asarray(data["width"][:])
        own = (time.perf_counter() - start) / len(data)
        assert np.array_equal(gathered, column_array(data, "width")), "the same cells"
        mapping, planning = (per_row[:2, number] / per_row[:2, 0]).tolist()
        table.append({
            "rows chosen by": way, "map_columns": mapping, "sampler and plan": planning,
            "datasets ÷ column_array": float(own / per_row[2, number]),
        })  # fmt: skip
    return {"chosen_rows": rows, "ratios_of_chosen_rows": table}


def map_in_memory(dataset: datasets.Dataset, columns: BucketColumns) -> None:
    """Map a data set without the cache of datasets."""
    dataset.cleanup_cache_files()
    map_columns(dataset, columns)


def plan_of_column(dataset: datasets.Dataset) -> None:
    BucketBatchSampler(dataset["bucket_id"], table=novelai_ladder(), batch_size=8, num_processes=1).plan()


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows of sizes.")
    parser.add_argument("--files", type=int, default=400, help="Pictures of 1024×768 pixels; a quarter as many clips.")
    parser.add_argument("--header_files", type=int, default=2000, help="Clips whose headers MediaMetadata reads.")
    parser.add_argument("--chosen_rows", type=int, default=1_000_000, help="Rows that are chosen from all.")
    parser.add_argument("--prepared_rows", type=int, default=1_000_000, help="Rows with sizes that are prepared.")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="What is measured; other figures of the file stay."
    )
    return parser


def main(args: argparse.Namespace) -> None:
    datasets.disable_progress_bars()
    figures = machine("numpy", "datasets")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips = write_clips(folder, args.header_files) if {"headers", "preparing"} & {*args.parts} else []
        measures: dict[str, Callable[[], Mapping[str, object]]] = {
            "columns": lambda: measure_columns(args.rows, args.runs, folder),
            "chosen": lambda: measure_chosen(args.chosen_rows, args.runs, folder),
            "media": lambda: measure_media(args.files, args.runs, folder),
            "headers": lambda: measure_headers(clips, args.runs),
            "preparing": lambda: measure_preparing(args.prepared_rows, clips[:_REPEATED_CLIPS], args.runs, folder),
        }
        measure_parts(measures, args.parts, figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
