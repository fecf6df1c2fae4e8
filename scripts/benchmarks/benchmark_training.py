r"""Compare the data path of training with straightforward code and with the step that it feeds, as ratios of one run.

python scripts/benchmarks/benchmark_training.py --output scripts/benchmarks/results/training.json
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
from benchmark_tools import benchmark_parser, machine, report, seconds_of
from torch.utils.data import DataLoader

from hf_bucketing import BucketTable, open_table, token_ladder
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of, text_of
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.columns import BucketColumns, MediaMetadata, PreparedDataset, load_source, map_columns
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.loaders import BucketBatchSampler, BucketCollator, worker_options
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW
from hf_bucketing.synthetic.media import make_media_dataset
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

FAMILIES = ("wan", "ltx", "latte")
BATCH_SIZE = 4


def load(folder: Path, family: str) -> Recipe:
    path = str(folder / f"tiny-{family}")
    make_tiny_pipeline(path, family=family)
    return recipe_of(path).load(path)


def measure_encoding(folder: Path, *, images: int, side: int, runs: int) -> dict[str, float]:
    """Compare one call of the VAE for all images with one call for each."""
    figures: dict[str, float] = {"images": images, "image_side": side}
    pixels = torch.rand(images, 3, 1, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for family in FAMILIES:
        recipe = load(folder, family)

        def one_by_one(recipe: Recipe = recipe) -> list[torch.Tensor]:
            return [recipe.encode_latents(image[None]) for image in pixels]

        difference = (recipe.encode_latents(pixels) - torch.cat(one_by_one())).abs().max()
        assert difference < 1e-4, f"{family} differs by {difference}"
        together, loop = seconds_of(lambda recipe=recipe: recipe.encode_latents(pixels), one_by_one, runs=runs)
        figures[f"{family}_images_encoded_together_per_s"] = images / together.median
        figures[f"{family}_spread_s"] = together.spread
        figures[f"{family}_together_times_faster_than_one_by_one"] = loop.median / together.median
    return figures


def prepare(folder: Path, recipe: Recipe, samples: int) -> PreparedDataset:
    """Prepare generated media as the demo does."""
    make_media_dataset(folder / "media", num_samples=samples)
    spec = type(recipe).read_spec(str(folder / "tiny-wan"))
    table: BucketTable = token_ladder(spec, [60, 110, 150], frames=[1, 9, 17, 25], max_aspect_ratio=2.5)
    loaded = load_source(str(folder / "media"), caption_column="caption")
    dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, target_fps=8, root=loaded.root))
    dataset = map_columns(dataset, BucketColumns(table, spec))
    dataset = dataset.add_column(ROW, range(len(dataset)))
    return PreparedDataset(
        dataset=dataset,
        table=table,
        open_table=open_table(spec),
        column=loaded.column,
        caption_column="caption",
        root=loaded.root,
    )


def loader_of(data: PreparedDataset, collator: Callable[..., Any], workers: int) -> DataLoader[Any]:
    sampler = BucketBatchSampler(data.dataset["bucket_id"], table=data.table, batch_size=BATCH_SIZE, num_processes=1)
    return DataLoader(
        data.dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        persistent_workers=workers > 0,
        **worker_options(workers),
    )


def train(recipe: Recipe, batches: Iterable[dict[str, Any]]) -> None:
    """Take an optimizer step per batch, as the training script does."""
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    step = BucketStep(recipe=recipe, objective=objective)
    optimizer = torch.optim.AdamW(recipe.transformer.parameters())
    for batch in batches:
        step(recipe.transformer, batch, epoch=0).values.mean().backward()
        torch.nn.utils.clip_grad_norm_(recipe.transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def encode(recipe: Recipe, batches: Iterable[dict[str, Any]]) -> None:
    for batch in batches:
        media_of(recipe, batch)
        text_of(recipe, batch)


def measure_data_path(folder: Path, *, samples: int, workers: int, runs: int) -> dict[str, float]:
    """Compare an epoch of batches, decoded and resized by workers, with the training steps that take them."""
    recipe = load(folder, "wan")
    data = prepare(folder, recipe, samples)
    collator = BucketCollator(data.table, column=data.column, root=data.root, seed=0)
    loader = loader_of(data, collator, workers)
    batches = list(loader)
    cached, _ = cache_dataset(data, recipe, CacheConfig(folder=str(folder / "cache")))
    assert cached is not None
    assert cached.cache is not None
    entries = loader_of(cached, CachedCollator(cached.cache), workers)
    timed = seconds_of(
        lambda: sum(len(batch["index"]) for batch in loader),
        lambda: train(recipe, batches),
        lambda: encode(recipe, batches),
        lambda: sum(len(batch["index"]) for batch in entries),
        runs=runs,
    )
    delivered, trained, encoded, read = (seconds.median for seconds in timed)
    return {
        "samples": samples,
        "workers": workers,
        "batch_size": BATCH_SIZE,
        "delivered_samples_per_s": samples / delivered,
        "delivered_spread_s": timed[0].spread,
        "training_samples_per_s": samples / trained,
        "data_path_times_what_training_consumes": trained / delivered,
        "cached_samples_per_s": samples / read,
        "cache_times_faster_than_decoding_and_encoding": (delivered + encoded) / read,
        "encoding_share_of_training": encoded / trained,
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--images", type=int, default=16, help="Images that are encoded together.")
    parser.add_argument("--side", type=int, default=64, help="Pixels along both sides of an image.")
    parser.add_argument("--samples", type=int, default=18, help="Samples of the demo data set.")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers.")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="Threads of torch (default: one per core)."
    )
    return parser


def main(args: argparse.Namespace) -> None:
    datasets.disable_progress_bars()
    torch.set_num_threads(args.threads)
    figures = {**machine("torch", "diffusers"), "threads": args.threads, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        figures.update(measure_encoding(Path(folder), images=args.images, side=args.side, runs=args.runs))
    with tempfile.TemporaryDirectory() as folder:
        figures.update(measure_data_path(Path(folder), samples=args.samples, workers=args.workers, runs=args.runs))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
