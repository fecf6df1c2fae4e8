r"""Merge adapters into the transformer of a pipeline, and save a pipeline that needs no adapters.

%(prog)s Wan-AI/Wan2.1-T2V-1.3B-Diffusers runs/lora merged
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..command_line.flags import FlagParser
from ..errors import BucketingError


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("pipeline", help="Pipeline that the adapters were trained on, on the hub or in a folder.")
    parser.add_argument("adapters", help="Folder of a run or of peft, or a file of LoRA weights of any trainer.")
    parser.add_argument("output", help="Folder to write; it must not exist.")
    parser.add_argument(
        "--trained_component",
        choices=["transformer", "transformer_2", "transformer_ref"],
        default="transformer",
        help="Transformer that the adapters belong to; those of both experts are merged one after the other.",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    import torch

    from ..adapters.kinds import merge_adapters
    from ..adapters.lora import check_component
    from ..models.loading import Loading, ModelPart, pipeline_folder, saved_dtype
    from ..models.registry import recipe_of
    from ..training.checkpoint import save_pipeline

    output, component = Path(args.output), args.trained_component
    if output.exists():
        raise BucketingError(f"{output} exists; name a new folder.")
    check_component(args.adapters, component=component)
    source = pipeline_folder(args.pipeline)
    dtype = saved_dtype(Path(source) / component)
    parts: tuple[ModelPart, ...] = ("trained",)
    loading = Loading(parts=parts, dtype=dtype, trained_dtype=dtype)
    recipe = recipe_of(str(source)).load(str(source), trained=component, loading=loading)
    with torch.no_grad():
        count = merge_adapters(type(recipe.pipeline), recipe.transformer, args.adapters)
    save_pipeline(recipe, output, source=Path(source))
    print(f"Merged the adapters of {count} layers into the {component} of {args.pipeline} ({dtype}). Wrote {output}")
