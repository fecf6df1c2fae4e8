"""Fit the linear VAE of the demo's pipeline to generated clips, and measure what it reproduces of clips held out.

python scripts/benchmarks/fit_demo_vae.py --output scripts/benchmarks/results/demo_vae.json
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from benchmark_tools import machine, report
from safetensors.torch import save_file

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file
from hf_bucketing.synthetic.demo import CHANNELS, SIDE, VAE_FILE, fitted_vae
from hf_bucketing.synthetic.media import DEMO_CLIPS, Clip, demo_clip, scene

FITTED = (Clip(3, 96, 96), Clip(3, 64, 112), Clip(3, 112, 64), Clip(3, 72, 128))
"""Sizes to fit to."""
OTHER_CLIPS = (Clip(5, 48, 176), Clip(13, 144, 80), Clip(1, 256, 256))
"""Sizes to measure on beside the demo's."""
DRAWN = 12
"""Clips per size and kind to fit to."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--weights", type=Path, default=VAE_FILE, help="File of weights to write.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the clips.")
    return parser


def main(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    fit = principal_components(
        np.concatenate([blocks_of(draw(clip, rng)) for draw, clip in itertools.product(DRAWS, FITTED * DRAWN)])
    )
    with complete_file(args.weights) as partial:
        save_file(fit, partial)
    vae = fitted_vae(fit)
    held_out = np.random.default_rng((args.seed, 1))
    rows = [row_of(vae, clip, held_out) for clip in (*DEMO_CLIPS, *OTHER_CLIPS)]
    for row in rows:
        print(row)
    figures = {}
    for column in list(rows[0])[1:]:
        name, values = (
            column.removeprefix("PSNR of ").removesuffix(", dB").replace(" ", "_"),
            [row[column] for row in rows],
        )
        figures |= {f"lowest_psnr_{name}": min(values), f"mean_psnr_{name}": float(np.mean(values))}
    report(
        {**machine("diffusers", "torch"), **figures, "bytes": args.weights.stat().st_size, "rows": rows}, args.output
    )


DRAWS = (lambda clip, rng: demo_clip(clip, rng)[0], scene)
"""Clips like the demo's, and clips of many kinds."""


def blocks_of(frames: np.ndarray) -> np.ndarray:
    """Return the blocks of frames `(frames, height, width, 3)`, as the VAE orders them: `(n, 192)` in [-1, 1]."""
    count, height, width, _ = frames.shape
    levels = frames.astype(np.float64) / 127.5 - 1
    cut = levels.reshape(count, height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return cut.transpose(0, 1, 3, 5, 4, 2).reshape(-1, 3 * SIDE**2)  # colour, column, row, as diffusers' patchify


def principal_components(blocks: np.ndarray) -> dict[str, torch.Tensor]:
    """Return what [`fitted_vae`][hf_bucketing.synthetic.demo.fitted_vae] takes."""
    mean = blocks.mean(0)
    variances, directions = np.linalg.eigh(np.cov((blocks - mean).T))
    deviations, kept = variances[::-1][:CHANNELS] ** 0.5, directions.T[::-1][:CHANNELS]
    # Large components stay larger, by the root of their deviation: they emerge first from the noise, and weigh more.
    scales = (deviations * deviations.mean())[:, None] ** 0.5
    fit = {"mean": mean, "components": kept / scales, "blocks": kept * scales}
    return {name: torch.from_numpy(np.ascontiguousarray(values)).float() for name, values in fit.items()}


def row_of(vae: torch.nn.Module, clip: Clip, rng: np.random.Generator) -> dict[str, object]:
    """Return the mean peak signal-to-noise ratio of four clips of either kind."""
    measured = {
        f"PSNR of {kind}, dB": float(np.mean([psnr(vae, draw(clip, rng)) for _ in range(4)]))
        for kind, draw in zip(("demo clips", "other scenes"), DRAWS, strict=True)
    }
    return {"size": f"{clip.frames}×{clip.height}×{clip.width}", **measured}


@torch.no_grad()
def psnr(vae: torch.nn.Module, frames: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio, in dB, of frames that were encoded and decoded."""
    pixels = torch.from_numpy(frames)[None].permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    return float(10 * torch.log10(4 / (decoded - pixels).pow(2).mean()))


if __name__ == "__main__":
    run_script(main, make_parser)
