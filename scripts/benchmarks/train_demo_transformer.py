"""Train the transformer and the text encoder of the demo's pipeline on clips before bright backgrounds.

python scripts/benchmarks/train_demo_transformer.py --output scripts/benchmarks/results/demo_transformer.json
"""

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from benchmark_tools import machine, report
from safetensors.torch import load_file, save_file

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file
from hf_bucketing.synthetic.demo import TRANSFORMER_FILE, VAE_FILE, fitted_vae, text_encoder, tokenizer, transformer
from hf_bucketing.synthetic.media import COLORS, DIRECTIONS, SHAPES, Clip, render

CLIPS = (
    *(Clip(5, height, width) for height, width in ((64, 64), (64, 112), (112, 64), (80, 128), (128, 80), (96, 96))),
    *(Clip(9, height, width) for height, width in ((64, 64), (64, 112), (112, 64), (64, 128), (128, 64), (80, 80))),
    *(Clip(1, height, width) for height, width in ((112, 112), (96, 160), (160, 96))),
)
TOKENS = 700
"""Tokens per step, as many clips of one size as they hold."""
BRIGHTNESS = (100.0, 120.0)
"""Lowest levels of the backgrounds, which in the demo's data are 10."""
TEXT_LENGTHS = (32, 226)
"""Lengths to which texts are padded: short in most steps, and that of the pipeline's default in every sixteenth."""
SHIFT = 3.0
"""Shift of the noise levels, that of the pipeline's scheduler."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--weights", type=Path, default=TRANSFORMER_FILE, help="File of weights to write.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--steps", type=int, default=6000, help="Steps of the optimizer.")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="Highest learning rate.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights, clips and noise.")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    encoder, model, tokenize = text_encoder().train(), transformer(), tokenizer()
    sets = [encoded(clip, repeats=1 if clip.frames == 1 else 3, rng=rng) for clip in CLIPS]
    trained = [*model.parameters(), *encoder.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.05)
    began, losses = time.process_time(), []
    for step in range(1, args.steps + 1):
        latents, captions = sets[rng.integers(len(sets))]
        tokens = latents[0, 0].numel() // 4
        rows = rng.integers(len(latents), size=max(TOKENS // tokens, 2))
        texts = ["" if rng.random() < 0.1 else captions[row] for row in rows]
        embeddings = embed(encoder, tokenize, texts, length=TEXT_LENGTHS[step % 16 == 0])
        loss = loss_of(model, latents[rows], embeddings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == args.steps:
            save({"transformer": model, "text_encoder": encoder}, args.weights)
            print(f"step {step}: loss {np.mean(losses[-100:]):.3f}, {time.process_time() - began:.0f} s", flush=True)
    figures = {"steps": args.steps, "loss": float(np.mean(losses[-100:])), "cpu_seconds": time.process_time() - began}
    report({**machine("diffusers", "torch"), **figures, "bytes": args.weights.stat().st_size}, args.output)


@torch.no_grad()
def encoded(clip: Clip, *, repeats: int, rng: np.random.Generator) -> tuple[torch.Tensor, list[str]]:
    """Return latents and captions of every shape, colour and direction, `repeats` times with other backgrounds."""
    vae, latents, captions = fitted_vae(load_file(VAE_FILE)), [], []
    for shape, color, direction in list(itertools.product(SHAPES, COLORS, DIRECTIONS)) * repeats:
        shown = {"shape": shape, "color": color, "direction": direction}
        frames = np.stack(list(render(clip, **shown, brightness=rng.uniform(*BRIGHTNESS))))
        pixels = torch.from_numpy(frames)[None].permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents.append(vae.encode(pixels).latent_dist.mode())
        subject = f"a {color} {shape}" + (f" moving {direction}" if clip.frames > 1 else "")
        captions.append(("" if clip.frames > 1 else "a picture of ") + f"{subject} on a bright background")
    return torch.cat(latents), captions


def embed(encoder: torch.nn.Module, tokenize: object, texts: list[str], *, length: int) -> torch.Tensor:
    """Return the embeddings of texts with zeros up to a length, as the pipeline's, `(n, length, channels)`."""
    tokens = tokenize(texts, padding=True, return_tensors="pt")
    embeddings = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state * tokens.attention_mask[..., None]
    return torch.nn.functional.pad(embeddings, (0, 0, 0, length - embeddings.shape[1]))


def loss_of(model: torch.nn.Module, latents: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the loss of flow matching at random noise levels."""
    levels = torch.sigmoid(torch.randn(len(latents)))
    levels = SHIFT * levels / (1 + (SHIFT - 1) * levels)
    sigma, noise = levels.view(-1, 1, 1, 1, 1), torch.randn(latents.shape)
    noisy = (1 - sigma) * latents + sigma * noise
    return (model(noisy, levels * 1000, embeddings, return_dict=False)[0] - (noise - latents)).pow(2).mean()


def save(models: dict[str, torch.nn.Module], file: Path) -> None:
    """Write the weights of models in float16, by their names; of tied weights once."""
    weights = {
        f"{name}.{key}": value.half().contiguous().clone()
        for name, model in models.items()
        for key, value in model.named_parameters()
    }
    with complete_file(file) as partial:
        save_file(weights, partial)


if __name__ == "__main__":
    run_script(main, make_parser)
