"""Train the VAE of the demo's pipeline on generated clips, and measure what it reproduces of clips held out.

python scripts/train_demo_vae.py
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from benchmark_tools import machine, write_figures
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file
from hf_bucketing.testing.demo import VAE_FILE, trained_vae, vae
from hf_bucketing.testing.media import DEMO_CLIPS, Clip
from hf_bucketing.testing.scenes import demo_clip, scene

BATCHES = (
    *((4, Clip(9, 32, 32)), (4, Clip(9, 32, 32)), (8, Clip(5, 32, 32)), (2, Clip(13, 32, 40)), (16, Clip(1, 48, 40))),
    *((4, Clip(5, 40, 48)), (4, Clip(5, 48, 40)), (3, Clip(9, 32, 48)), (1, Clip(9, 72, 64))),
)
"""Sizes of batches, and of the crops in them."""
HELD_OUT = 10**6
"""Seed of the clips to measure on, which no seed of training may be."""
OTHER_CLIPS = (Clip(5, 48, 176), Clip(13, 144, 80), Clip(1, 256, 256))
"""Sizes that the demo does not have."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output", type=Path, default=VAE_FILE, help="File of weights to write.")
    parser.add_argument("--result", type=Path, default=Path("scripts/benchmark_results/demo_vae.json"), help="JSON.")
    parser.add_argument("--steps", type=int, default=3000, help="Steps of the optimizer.")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="Highest learning rate.")
    parser.add_argument("--init", type=Path, help="File of weights to start from, by default random ones.")
    parser.add_argument(
        "--decoder_only", action="store_true", help="Keep the encoder of --init, and with it the latents."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights and clips.")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = trained_vae(args.init) if args.init else vae()
    if not args.init:
        start_with_little_noise(model)
    began = time.process_time()
    trained = [*model.decoder.parameters(), *model.post_quant_conv.parameters()]
    if not args.decoder_only:
        trained = list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.05)
    for step in range(1, args.steps + 1):
        count, clip = BATCHES[rng.integers(len(BATCHES))]
        loss = loss_of(model, batch_of(count, clip, rng))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == args.steps:
            save(model, args.output, keep_latents=args.decoder_only)
            row = measure(args.output, DEMO_CLIPS[3:4])[0]
            print(f"step {step}: {row}, {time.process_time() - began:.0f} CPU seconds", flush=True)
    rows = measure(args.output, (*DEMO_CLIPS, *OTHER_CLIPS))
    for row in rows:
        print(row)
    settings = {"steps": args.steps, "seed": args.seed, "cpu_seconds": round(time.process_time() - began)}
    least = min(row["PSNR of demo clips, dB"] for row in rows)
    write_figures({**settings, "least_psnr": least, "kilobytes": kilobytes(args.output), "rows": rows}, args.result)


def start_with_little_noise(model: AutoencoderKLWan) -> None:
    """Make the deviations of the first latents small, without which the decoder learns from noise at first."""
    with torch.no_grad():
        model.quant_conv.weight[model.config.z_dim :] *= 0.1
        model.quant_conv.bias[model.config.z_dim :] -= 5


def batch_of(count: int, clip: Clip, rng: np.random.Generator) -> torch.Tensor:
    """Draw crops of larger clips, `(count, 3, frames, height, width)`, in [-1, 1]."""
    crops = []
    for _ in range(count):
        height, width = (max(side, int(rng.integers(56, 144))) for side in clip[1:3])
        large = Clip(clip.frames, height, width)
        frames = demo_clip(large, rng)[0] if rng.random() < 0.6 else scene(large, rng)
        top, left = rng.integers(0, height - clip.height + 1), rng.integers(0, width - clip.width + 1)
        crops.append(frames[:, top : top + clip.height, left : left + clip.width])
    return pixels_of(np.stack(crops))


def pixels_of(clips: np.ndarray) -> torch.Tensor:
    """Return clips `(n, frames, height, width, 3)` as `(n, 3, frames, height, width)` in [-1, 1]."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def loss_of(model: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    """Return absolute and squared errors, and a little of the divergence from a normal distribution."""
    posterior = model.encode(pixels).latent_dist
    error = model.decode(posterior.sample()).sample - pixels
    divergence = (posterior.mean.pow(2) + posterior.var - 1 - posterior.logvar).mean() / 2
    return error.abs().mean() + 2 * error.pow(2).mean() + 2e-4 * divergence


@torch.no_grad()
def save(model: AutoencoderKLWan, file: Path, *, keep_latents: bool) -> None:
    """Write weights in float16, with means and deviations of latents by which these have mean 0 and deviation 1."""
    if not keep_latents:
        rng = np.random.default_rng(HELD_OUT + 1)
        clips = [demo_clip(clip, rng)[0] for clip in (Clip(9, 64, 64), Clip(9, 64, 112), Clip(9, 112, 64)) * 8]
        clips += [scene(Clip(9, 64, 96), rng) for _ in range(12)]
        flat = [model.encode(pixels_of(clip[None])).latent_dist.mode().transpose(0, 1).flatten(1) for clip in clips]
        latents = torch.cat(flat, dim=1)
        model.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    moments = {name: torch.tensor(model.config[name]) for name in ("latents_mean", "latents_std")}
    with complete_file(file) as partial:
        save_file({**weights, **moments}, partial)


@torch.no_grad()
def measure(file: Path, clips: tuple[Clip, ...]) -> list[dict[str, object]]:
    """Return a row per size: peak signal-to-noise ratio of three demo clips and of three scenes held out, in dB."""
    model, rng, rows = trained_vae(file), np.random.default_rng(HELD_OUT), []
    for clip in clips:
        of_demo = np.mean([psnr(model, demo_clip(clip, rng)[0]) for _ in range(3)])
        of_scenes = np.mean([psnr(model, scene(clip, rng)) for _ in range(3)])
        size = f"{clip.frames}×{clip.height}×{clip.width}"
        rows.append(
            {"size": size, "PSNR of demo clips, dB": float(of_demo), "PSNR of other scenes, dB": float(of_scenes)}
        )
    return rows


def psnr(model: AutoencoderKLWan, frames: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of a clip `(frames, height, width, 3)` that was encoded and decoded."""
    pixels = pixels_of(frames[None])[:, :, : (len(frames) - 1) // 4 * 4 + 1]
    decoded = model.decode(model.encode(pixels).latent_dist.mode()).sample
    return float(10 * torch.log10(4 / (decoded - pixels).pow(2).mean()))


def kilobytes(file: Path) -> float:
    """Return the size of a file in units of 1,000 bytes, which it can be read from."""
    load_file(file)
    return file.stat().st_size / 1000


if __name__ == "__main__":
    run_script(main, make_parser)
