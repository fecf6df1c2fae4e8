r"""Convert LoRA weights of diffusers, ComfyUI or another trainer to those of diffusers or ComfyUI.

%(prog)s kohya.safetensors lora.safetensors --to comfyui \
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..command_line.flags import FlagParser
from ..errors import BucketingError


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("source", help="File of LoRA weights, or folder with pytorch_lora_weights.safetensors.")
    parser.add_argument("output", help="File to write; its folder must exist.")
    parser.add_argument("--to", required=True, choices=["diffusers", "comfyui"], help="Program that the file is for.")
    parser.add_argument("--pretrained_model_name_or_path", required=True,
                        help="Pipeline that the weights were trained on, on the hub or in a folder; only its "
                             "configurations are read.")  # fmt: skip
    parser.add_argument("--trained_component", default="transformer", help="Transformer of the pipeline.")
    parser.add_argument("--layers", action="store_true", help="Print the strength of every layer.")
    return parser


def main(args: argparse.Namespace) -> None:
    from dataclasses import replace

    from ..adapters.files import difference, read_lora, strength, write_comfyui, write_diffusers
    from ..adapters.kinds import check_file
    from ..models.loading import empty_transformer
    from ..models.registry import recipe_of

    output, base = Path(args.output), args.pretrained_model_name_or_path
    pipeline_class, transformer = recipe_of(base).pipeline_type(), empty_transformer(base, args.trained_component)
    adapters = read_lora(pipeline_class, transformer, args.source)
    if output.exists():
        raise BucketingError(f"{output} exists; name a new file.")
    renamed = replace(adapters, path=output)
    try:
        if args.to == "comfyui":
            write_comfyui(pipeline_class, transformer, renamed, base_model=base)
        else:
            write_diffusers(pipeline_class, renamed)
            check_file(transformer, renamed)
    except BucketingError:
        output.unlink(missing_ok=True)
        raise
    before, after = adapters.folded(), read_lora(pipeline_class, transformer, output).folded()
    strengths = {layer: (strength(pair), strength(after[layer])) for layer, pair in before.items()}
    if args.layers:
        print(f"{'before':>12} {'after':>12}  layer")
        for layer, (was, now) in strengths.items():
            print(f"{was:12.6g} {now:12.6g}  {layer}")
    weakest, strongest = min(was for was, _ in strengths.values()), max(was for was, _ in strengths.values())
    largest = max(difference(pair, after[layer]) / (strengths[layer][0] or 1) for layer, pair in before.items())
    print(
        f"{len(before)} layers of strength {weakest:.4g} to {strongest:.4g} (norm of the change of their weights); "
        f"largest difference after converting {largest:.1g} of it. Wrote {output}"
    )
