"""Padding, bucketing and packing of one mixed set."""

from collections.abc import Callable

import numpy as np
import torch

from hf_bucketing import BucketBatchSampler, PackBatchSampler, Size

from .measuring import Cases, Figures, Run
from .models import Stepper, draw, make_transformer
from .scale import Scale

Batches = list[list[Size]]


def cases(run: Run) -> Cases:
    """Yield epochs of LoRA on one mixed set, with fewer layers, in padded batches, in buckets and in packs.

    `real_tokens_per_s` counts the tokens of samples without padding, in buckets at the sizes of the buckets.
    """
    scale = run.scale
    sizes = scale.mixed_set()
    trainer = Stepper(scale, make_transformer(scale, layers=scale.epoch_layers, dtype=torch.bfloat16), lora=True)
    for name, epoch in STRATEGIES.items():

        def measure(name: str = name, epoch: Batches = epoch(scale, sizes)) -> Figures:  # noqa: B008
            batches = [draw(scale, [scale.spec.grid(size) for size in batch]) for batch in epoch]
            take = trainer.packed if name == "packing" else trainer.stacked
            samples = sum(map(len, epoch))
            figures: Figures = {"steps": len(batches), "samples": samples, "layers": scale.epoch_layers}
            with run.peak_memory(figures):
                seconds = run.medians({name: lambda: [take(batch) for batch in batches]})[name]
            real = sum(scale.spec.num_tokens(size) for batch in epoch for size in batch)
            speeds = {"samples_per_s": samples / seconds, "real_tokens_per_s": real / seconds}
            return {**figures, "s": seconds, **speeds}

        yield name, measure


def padded(scale: Scale, sizes: list[Size]) -> Batches:
    """Return random batches of as many samples as `max_tokens` holds of the largest."""
    count = scale.max_tokens // max(map(scale.spec.num_tokens, sizes))
    order = np.random.default_rng(0).permutation(len(sizes))
    return [[sizes[row] for row in order[start : start + count]] for start in range(0, len(sizes), count)]


def bucketed(scale: Scale, sizes: list[Size]) -> Batches:
    assigned = scale.table.assign(*np.array(sizes).T)
    sampler = BucketBatchSampler(
        assigned.bucket_id, table=scale.table, max_tokens=scale.max_tokens, spec=scale.spec, num_processes=1
    )
    return [[scale.table.size(int(assigned.bucket_id[row])) for row in batch] for batch in sampler.plan(0).batches()]


def packed(scale: Scale, sizes: list[Size]) -> Batches:
    tokens = [scale.spec.num_tokens(size) for size in sizes]
    sampler = PackBatchSampler(tokens, max_tokens=scale.max_tokens, strip_length=scale.strip_length, num_processes=1)
    return [[sizes[row] for row in batch] for batch in sampler.plan(0).batches()]


STRATEGIES: dict[str, Callable[[Scale, list[Size]], Batches]] = {
    "padding": padded,
    "bucketing": bucketed,
    "packing": packed,
}
