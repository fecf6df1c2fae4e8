r"""Check on your own model that packing computes the same as running its samples one by one.

%(prog)s Wan-AI/Wan2.1-T2V-1.3B-Diffusers --sizes 5,8,12 1,16,6 3,10,10 --device cuda

Where the model takes references, the second sample has one, the third two, and so on.
"""

from __future__ import annotations

import argparse
import sys

from ..command_line.flags import FlagParser


def grid(text: str) -> tuple[int, int, int]:
    t, h, w = map(int, text.split(","))
    return t, h, w


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("pipeline", help="Pipeline with a transformer, on the hub or in a folder.")
    parser.add_argument("--subfolder", default="transformer", help="Subfolder of the transformer in the pipeline.")
    parser.add_argument("--sizes", type=grid, nargs="+",
                        help="Token grids of the samples as frames,rows,columns (default: four small ones that the "
                             "model takes).")  # fmt: skip
    parser.add_argument("--text_length", type=int, default=64,
                        help="Text tokens of the first sample; each further one has a quarter of the one before. "
                             "Models that take one length alone get that (default: 64).")  # fmt: skip
    parser.add_argument("--strip_length", type=int, default=16, help="Tokens per strip.")
    parser.add_argument("--backend", default="auto", help="Backend of packed attention.")
    parser.add_argument(
        "--dtype", default="float32", choices=["float64", "float32", "bfloat16"], help="Precision of the model."
    )
    parser.add_argument("--device", default="cpu", help="Device to run on, such as cuda.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of latents, texts and timesteps.")
    return parser


def main(args: argparse.Namespace) -> None:
    import torch
    from diffusers import AutoModel

    from ..hub import from_hub
    from ..models import verify_packing
    from ..models.registry import family_of

    dtype = getattr(torch, args.dtype)
    with from_hub(args.pipeline):
        transformer = AutoModel.from_pretrained(args.pipeline, subfolder=args.subfolder).to(args.device, dtype)
    family, generator = family_of(transformer), torch.Generator().manual_seed(args.seed)
    channels, text_dim = family.in_channels(transformer), family.text_dim(transformer)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(args.device, dtype)

    grids = args.sizes or family.trial_grids(transformer)
    fixed = family.text_length(transformer.config)
    lengths = [fixed or max(1, args.text_length >> 2 * sample) for sample in range(len(grids))]
    patch = family.patch(transformer.config)

    def draw_latent(size: tuple[int, int, int]) -> torch.Tensor:
        return draw(channels, *(side * part for side, part in zip(size, patch, strict=True)))

    reference_grids = [family.trial_references(transformer, grid)[:sample] for sample, grid in enumerate(grids)]
    report = verify_packing(
        transformer,
        [draw_latent(size) for size in grids],
        references=[[draw_latent(size) for size in sizes] for sizes in reference_grids],
        timesteps=torch.rand(len(grids), generator=generator).to(args.device) * 1000,
        text=[draw(length, text_dim) for length in lengths],
        strip_length=args.strip_length,
        backend=args.backend,
    )
    print(f"{type(transformer).__name__} in {args.dtype} on {args.device}, token grids {grids}")
    if any(reference_grids):
        print(f"References of the samples: {', '.join(str(len(sizes)) for sizes in reference_grids)}")
    print(report)
    if not report.passed:
        sys.exit("Packing does not compute the same on this model; do not train with it.")
