"""Train the transformer and the text encoder of the demo's pipeline on square clips before bright backgrounds.

python scripts/train_demo_transformer.py --output hf_bucketing/testing/demo_transformer.safetensors
"""

import argparse
import itertools
import time

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.testing.demo_models import make_text_encoder, make_tokenizer, make_transformer, make_vae
from hf_bucketing.testing.media import COLORS, DIRECTIONS, SHAPES, Clip, render


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--vae", default=None)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--shift", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


@torch.no_grad()
def encode_all(vae, clips, captions_of, rng, repeats):
    latents, captions = [], []
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    for shape, color, direction in itertools.product(SHAPES, COLORS, DIRECTIONS):
        for _ in range(repeats):
            frames = np.stack(
                list(
                    render(
                        clips, shape=shape, color=color, direction=direction, offset=rng.random(),
                        brightness=rng.uniform(100, 180),
                    )
                )
            )
            x = torch.from_numpy(frames)[None].permute(0, 4, 1, 2, 3).float() / 127.5 - 1
            latents.append((vae.encode(x).latent_dist.mode() - mean) / std)
            captions.append(captions_of(shape, color, direction))
    return torch.cat(latents), captions


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    vae = make_vae(args.vae)
    tokenizer, text_encoder, transformer = make_tokenizer(), make_text_encoder(), make_transformer()
    print(sum(p.numel() for m in (transformer, text_encoder) for p in m.parameters()))
    began = time.process_time()
    sets = [
        encode_all(
            vae, Clip(9, 64, 64), lambda s, c, d: f"a {c} {s} moving {d} on a bright background", rng, args.repeats
        ),
        encode_all(vae, Clip(1, 64, 64), lambda s, c, d: f"a picture of a {c} {s} on a bright background", rng, 2),
    ]
    for latents, _ in sets:
        print(latents.shape, f"mean {latents.mean():.2f} std {latents.std():.2f}", f"{time.process_time() - began:.0f}s", flush=True)
    parameters = [*transformer.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.05)
    text_encoder.train()
    losses = []
    for step in range(args.steps):
        latents, captions = sets[int(rng.random() < 0.2)]
        rows = rng.integers(len(latents), size=args.batch_size)
        x = latents[rows]
        texts = ["" if rng.random() < 0.1 else captions[row] for row in rows]
        ids = tokenizer(texts, padding="max_length", max_length=64, truncation=True, return_tensors="pt")
        length = 512 if step % 8 == 7 else 64
        embeds = text_encoder(ids.input_ids, ids.attention_mask).last_hidden_state * ids.attention_mask[..., None]
        embeds = torch.nn.functional.pad(embeds, (0, 0, 0, length - 64))
        noise = torch.randn(x.shape)
        sigma = torch.sigmoid(torch.randn(len(x)))
        sigma = args.shift * sigma / (1 + (args.shift - 1) * sigma)
        s = sigma.view(-1, 1, 1, 1, 1)
        out = transformer((1 - s) * x + s * noise, sigma * 1000, embeds, return_dict=False)[0]
        loss = (out - (noise - x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 200 == 199:
            print(step, f"{np.mean(losses[-200:]):.4f} {time.process_time() - began:.0f}s", flush=True)
            state = {f"transformer.{k}": v for k, v in transformer.state_dict().items()}
            state |= {f"text_encoder.{k}": v for k, v in text_encoder.state_dict().items() if k != "encoder.embed_tokens.weight"}
            save_file({k: v.half().contiguous() for k, v in state.items()}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
