r"""Compare ways of batching samples with 0 to 3 references of their own sizes: equal batches, padding, and packs.

python scripts/benchmarks/benchmark_references.py --output scripts/benchmarks/results/references.json

Targets and references have the shapes of photographs: each is one of seven aspect ratios, drawn by how common they
are, and a sample has 0, 1, 2 or 3 references, as often as each other. Steps and tokens are those of the library's own
plans, for one process. An epoch of the smallest set is then trained with a small FLUX.2 on the CPU in each way.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from benchmark_tools import benchmark_parser, machine, report, seconds_of
from diffusers import Flux2Transformer2DModel

from hf_bucketing import LatentSpec, Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward, packed_mse
from hf_bucketing.packing.batch import Rows
from hf_bucketing.packing.pack import Packing
from hf_bucketing.plans import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs
from hf_bucketing.plans.packs import strip_tokens

Grids: TypeAlias = tuple[tuple[int, int, int], ...]
"""Token grids of a sample: its own, then those of its references."""

BATCH_SIZE, MOST_REFERENCES, STRIP_LENGTH = 4, 3, 32
SHAPES = {(3, 4): 0.2, (4, 3): 0.2, (2, 3): 0.2, (3, 2): 0.2, (1, 1): 0.1, (9, 16): 0.05, (16, 9): 0.05}
"""Aspect ratios, height ÷ width, and how common each is."""
SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
CHANNELS, TEXT_TOKENS, TEXT_DIM = 32, 32, 48


class Batches(NamedTuple):
    """An epoch in one way of batching: rows of each batch, and the tokens that each is computed with."""

    rows: list[np.ndarray]
    computed: np.ndarray


def grid_of(shape: tuple[int, int], side: int) -> tuple[int, int, int]:
    """Return the token grid of a picture of an aspect ratio and about side × side pixels."""
    height, width = shape
    scale = side / (height * width) ** 0.5
    return SPEC.grid(SPEC.snap(Size(1, round(height * scale), round(width * scale)), mode="nearest"))


def draw_samples(count: int, side: int) -> list[Grids]:
    rng = np.random.default_rng(count)
    grids = [grid_of(shape, side) for shape in SHAPES]
    drawn = rng.choice(len(grids), (count, 1 + MOST_REFERENCES), p=list(SHAPES.values()))
    numbers = rng.integers(0, MOST_REFERENCES + 1, count)
    return [tuple(grids[shape] for shape in row[: 1 + number]) for row, number in zip(drawn, numbers, strict=True)]


def tokens_of(samples: Sequence[Grids]) -> np.ndarray:
    return np.array([sum(t * h * w for t, h, w in grids) for grids in samples])


def padded(samples: Sequence[Grids]) -> Grids:
    """Return the grids that hold those of all samples of a batch, place by place."""
    grids = np.zeros((len(samples), 1 + MOST_REFERENCES, 3), np.int64)
    for row, sample in enumerate(samples):
        grids[row, : len(sample)] = sample
    largest = grids.max(0)
    return tuple((t, h, w) for t, h, w in largest.tolist() if t)


def batches_of(plan: EpochPlan) -> list[np.ndarray]:
    return np.split(plan.indices, plan.offsets[1:-1])


def in_buckets(samples: Sequence[Grids]) -> Batches:
    """Batch samples whose target and references have equal sizes."""
    numbers = {grids: number for number, grids in enumerate(dict.fromkeys(samples))}
    ids = [numbers[grids] for grids in samples]
    rows = batches_of(plan_buckets(ids, BucketPlanConfig(batch_size=BATCH_SIZE), epoch=0, num_processes=1))
    return Batches(rows, np.array([tokens_of([samples[row] for row in batch]).sum() for batch in rows]))


def in_padding(samples: Sequence[Grids]) -> Batches:
    """Batch any samples, padded to the largest target and the largest reference of each place."""
    plan = plan_buckets([0] * len(samples), BucketPlanConfig(batch_size=BATCH_SIZE), epoch=0, num_processes=1)
    rows = batches_of(plan)
    largest = tokens_of([padded([samples[row] for row in batch]) for batch in rows])
    return Batches(rows, largest * [len(batch) for batch in rows])


def in_packs(samples: Sequence[Grids]) -> Batches:
    """Pack any samples, with as many tokens as a full batch of mean samples has."""
    tokens = tokens_of(samples)
    most = int(BATCH_SIZE * tokens.mean()) // STRIP_LENGTH * STRIP_LENGTH
    config = PackPlanConfig(max_tokens=most, strip_length=STRIP_LENGTH, strategy="best_fit_decreasing")
    rows = batches_of(plan_packs(tokens, config, epoch=0, num_processes=1))
    strips = strip_tokens(tokens, STRIP_LENGTH)
    return Batches(rows, np.array([strips[batch].sum() for batch in rows]))


WAYS = {"equal batches": in_buckets, "padding": in_padding, "packs": in_packs}


def rows_of_table(count: int, side: int) -> list[dict[str, Any]]:
    samples = draw_samples(count, side)
    rows = []
    for way, batch in WAYS.items():
        batches = batch(samples)
        full = sum(len(members) for members in batches.rows if len(members) >= BATCH_SIZE)
        rows.append(
            {
                "samples": count,
                "way": way,
                "in full batches": None if way == "packs" else full / count,
                "real ÷ computed tokens": float(tokens_of(samples).sum() / batches.computed.sum()),
                "steps": len(batches.rows),
                "samples per step": count / len(batches.rows),
            }
        )
    return rows


def make_model(layers: int, heads: int) -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        in_channels=4 * CHANNELS, num_layers=layers, num_single_layers=layers, attention_head_dim=64,
        num_attention_heads=heads, joint_attention_dim=TEXT_DIM, axes_dims_rope=(16, 16, 16, 16),
        guidance_embeds=False,
    )  # fmt: skip


def latents_of(grids: Grids) -> list[torch.Tensor]:
    return [torch.randn(CHANNELS, t, 2 * h, 2 * w) for t, h, w in grids]


def train_stacks(model: torch.nn.Module, samples: Sequence[Grids], batches: Batches) -> None:
    """Train on batches of one size, which their samples have or are padded to."""
    family = family_of(model)
    for members in batches.rows:
        stacks = [
            torch.stack([latent] * len(members)) for latent in latents_of(padded([samples[row] for row in members]))
        ]
        rows = Rows(
            latents=stacks[0],
            references=stacks[1:],
            timesteps=torch.full((len(members),), 500.0),
            text=torch.randn(len(members), TEXT_TOKENS, TEXT_DIM),
            patch=family.patch(model.config),
        )
        (family.run(model, rows) - stacks[0]).square().mean().backward()


def train_packs(model: torch.nn.Module, packing: Packing, samples: Sequence[Grids], batches: Batches) -> None:
    for members in batches.rows:
        latents, references = [], []
        for row in members:
            own, *shown = latents_of(samples[row])
            latents.append(own)
            references.append(shown)
        pack = packing.pack(
            latents,
            references=references,
            timesteps=torch.full((len(members),), 500.0),
            text=torch.randn(len(members), TEXT_TOKENS, TEXT_DIM),
        )
        packed_mse(packed_forward(model, pack), pack.pack_like(latents), pack.layout).mean().backward()


def measure_epochs(count: int, side: int, *, runs: int, layers: int, heads: int) -> dict[str, float]:
    """Return the processor seconds of an epoch of a small model in each way, and how many times faster packs are."""
    samples = draw_samples(count, side)
    epochs = {way: batch(samples) for way, batch in WAYS.items()}
    packed, plain = make_model(layers, heads), make_model(layers, heads)
    packing = enable_packing(packed, strip_length=STRIP_LENGTH)
    seconds = seconds_of(
        lambda: train_stacks(plain, samples, epochs["equal batches"]),
        lambda: train_stacks(plain, samples, epochs["padding"]),
        lambda: train_packs(packed, packing, samples, epochs["packs"]),
        runs=runs,
        clock=time.process_time,
    )
    equal, padding, packs = (taken.median for taken in seconds)
    return {
        "epoch_samples": float(count),
        "epoch_equal_batches_s": equal,
        "epoch_padding_s": padding,
        "epoch_packs_s": packs,
        "epoch_packs_times_faster_than_equal_batches": equal / packs,
        "epoch_packs_times_faster_than_padding": padding / packs,
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[40, 200, 1000], help="Sizes of the data sets.")
    parser.add_argument("--side", type=int, default=1024, help="Pixels along the side of a square picture.")
    parser.add_argument("--epoch_side", type=int, default=256, help="The same in the epoch that is trained.")
    parser.add_argument("--layers", type=int, default=2, help="Blocks of each kind of the model that is trained.")
    parser.add_argument("--heads", type=int, default=4, help="Attention heads of that model, of 64 channels each.")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    figures = machine("torch", "diffusers")
    figures["ways"] = [row for count in args.samples for row in rows_of_table(count, args.side)]
    figures |= measure_epochs(args.samples[0], args.epoch_side, runs=args.runs, layers=args.layers, heads=args.heads)
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
