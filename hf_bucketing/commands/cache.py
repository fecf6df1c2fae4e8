r"""Encode the latents and captions of a prepared data set once, for training that decodes and encodes nothing.

%(prog)s --dataset_dir demo/prepared --pretrained_model_name_or_path demo/tiny-wan \
    --cache_dir demo/cache --output_dir demo/cached

Also under `accelerate launch`: each process encodes its share. Run again, it encodes only what is missing or changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import BucketingError
from ..caching.settings import CacheConfig
from ..command_line.config_file import CACHE, CACHED_DIR
from ..command_line.flags import FlagParser, from_flags
from ..command_line.script import run_script
from ..errors import FlagError
from ..files import check_folder_writable
from .script_settings import settings_of_scripts

if TYPE_CHECKING:
    from ..columns import PreparedDataset
    from ..models.recipe import Recipe

INTERRUPTED = "What was encoded stays in the cache; run the same command again."

DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--dataset_dir", required=True, help="Folder that hf_bucketing prepare wrote.")
    parser.add_argument(
        "--pretrained_model_name_or_path",
        required=True,
        help="Pipeline whose VAE and text encoder encode, on the hub or in a folder.",
    )
    parser.add_argument(
        "--vae_file", help="File with the weights of the VAE, as in training (default: those of the pipeline)."
    )
    parser.add_argument(
        "--cache_dir",
        required=True,
        help="Folder of the entries, or a URL such as s3://bucket/cache; one that holds entries is completed.",
    )
    parser.add_argument(
        "--output_dir",
        required=True,
        help="Prepared folder to write, with the keys of the entries, for --dataset_dir of training.",
    )
    parser.add_settings(CacheConfig)
    parser.add_argument("--mixed_precision", choices=list(DTYPES), default="no", help="Precision of the text encoder.")
    parser.add_argument(
        "--vae_tiling",
        action="store_true",
        help="Encode sample by sample and tile by tile, which takes less memory and changes results slightly.",
    )
    parser.add_argument("--max_sequence_length", type=int, help="Text tokens per caption (default: the pipeline's).")
    parser.add_argument(
        "--condition", help="Conditions of training: the frames that they append are encoded too (default: none)."
    )
    parser.add_config(CACHE, others=settings_of_scripts, names={"output_dir": (CACHED_DIR,)})
    return parser


def main(args: argparse.Namespace) -> None:
    from accelerate import Accelerator

    from ..caching import cache_dataset
    from ..columns import PreparedDataset
    from ..conditions.shares import read_conditions
    from ..configuration.prepared import check_same_settings
    from ..loaders.processes import check_shared
    from ..media.remote import is_url
    from ..media.rows import check_flips
    from ..models.caption_lengths import describe_caption_lengths
    from ..models.registry import recipe_of
    from ..training.data_changes import describe_edited_texts

    _check_folders(args)
    accelerator = Accelerator()
    if not is_url(args.cache_dir):
        advice = "the main process reads the entries of all, so give a --cache_dir on a disk that all machines share"
        check_shared(accelerator, Path(args.cache_dir).resolve(), advice=advice)
    prepared = PreparedDataset.load(args.dataset_dir)
    check_same_settings(args.config, args.dataset_dir, settings=prepared.settings, cached=False)
    for sentence in describe_edited_texts(prepared, args.dataset_dir) if accelerator.is_main_process else ():
        print(sentence)
    config = from_flags(CacheConfig, args, folder=args.cache_dir)
    check_flips(config.views, prepared.conditions, prepared.references)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    if prepared.spec != recipe.read_spec(args.pretrained_model_name_or_path):
        raise BucketingError(
            f"{args.dataset_dir} was prepared for {prepared.spec}, which is not what "
            f"{args.pretrained_model_name_or_path} has; prepare it again for this model."
        )
    conditions = None if args.condition is None else read_conditions(args.condition)
    config = replace(config, appended_frames=None if conditions is None else conditions.appended_frames)
    loaded = _load(args, prepared, recipe)
    loaded.check_conditions(prepared.shown, drawn=() if conditions is None else conditions.all, cached=True)
    model, length = args.pretrained_model_name_or_path, loaded.max_sequence_length
    if accelerator.is_main_process:
        for sentence in describe_caption_lengths(prepared, recipe, model, max_sequence_length=length):
            print(sentence)
    loaded.to(accelerator.device)
    cached, counts = cache_dataset(prepared, loaded, config)
    if cached is not None:
        _save(args, cached, counts, made_with=prepared.settings)
    accelerator.end_training()


def _check_folders(args: argparse.Namespace) -> None:
    """Check that entries and the prepared folder can be written, and do not overlap."""
    from ..caching.store import TensorCache
    from ..media.remote import is_url

    cache_dir = Path(args.cache_dir).resolve()
    if not is_url(args.cache_dir) and Path(args.output_dir).resolve() in (cache_dir, *cache_dir.parents):
        raise FlagError("--cache_dir must lie outside --output_dir, which is replaced as a whole.")
    TensorCache(args.cache_dir).check_writable()
    check_folder_writable(args.output_dir)


def _load(args: argparse.Namespace, prepared: PreparedDataset, recipe: type[Recipe]) -> Recipe:
    """Load the models that encode."""
    import torch

    from ..models.loading import Loading, ModelPart

    parts: tuple[ModelPart, ...] = ("vae",) if prepared.caption_column is None else ("vae", "text_encoders")
    return recipe.load(
        args.pretrained_model_name_or_path,
        max_sequence_length=args.max_sequence_length,
        trained=recipe.transformer_for(prepared.shown),
        loading=Loading(
            parts=parts,
            dtype=getattr(torch, DTYPES[args.mixed_precision]),
            vae_file=args.vae_file,
            vae_tiling=args.vae_tiling,
        ),
        audio=prepared.audio is not None,
    )


def _save(
    args: argparse.Namespace, cached: PreparedDataset, counts: Mapping[str, int], *, made_with: Mapping[str, Any]
) -> None:
    """Write the prepared folder, and say what was encoded."""
    from ..caching.views import describe_latents

    flags = {name: value for name, value in vars(args).items() if name != "config"}
    info = None if cached.cache is None else replace(cached.cache, prepared=args.dataset_dir)
    replace(cached, cache=info, settings={**made_with, CACHE: flags}).save(args.output_dir)
    for name in ("encoded", "found", "unreadable", "rejected"):
        print(f"{counts[name]:8} rows {name}")
    for name in ("encoded", "found"):
        print(f"{counts[f'captions {name}']:8} captions {name}")
    for name, what in (("not finite", "rows"), ("captions not finite", "captions")):
        if counts[name]:
            print(f"{counts[name]:8} {what} not finite: the model makes NaN or infinite numbers of them")
    print(f"Latents: {describe_latents(cached)}")
    print(f"Saved to {args.output_dir}; entries in {args.cache_dir}")


if __name__ == "__main__":
    run_script(main, make_parser, interrupted=INTERRUPTED)
