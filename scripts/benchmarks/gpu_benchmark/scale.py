"""Sizes of scripts/benchmarks/benchmark_gpu.py. Needs no diffusers."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_bucketing import BucketTable, LatentSpec, Size
from hf_bucketing.packing import PackedLayout, SegmentSpans

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Packs whose attention is timed.

    Attributes:
        lengths: About as many tokens as the samples of a pack have.
        heads, key_heads, head_dim: Heads of queries, of keys, and their channels.
        text_length: Tokens of text that each sample attends to, or 0 for its own tokens.
    """

    lengths: tuple[int, ...]
    heads: int = 12
    key_heads: int = 12
    head_dim: int = 128
    text_length: int = 0

    def packs(self, count: int, *, device: str) -> Iterator[SegmentSpans]:
        """Yield the segments of packs whose lengths differ from each other by up to a tenth."""
        draw = random.Random(0)
        for _ in range(count):
            lengths = [max(1, round(length * draw.uniform(0.9, 1.1))) for length in self.lengths]
            layout = PackedLayout(
                grids=tuple((1, 1, length) for length in lengths),
                text_lengths=(self.text_length,) * len(lengths),
                strip_length=min(64, min(lengths)),
                device=torch.device(device),
            )
            yield layout.cross_segments if self.text_length else layout.self_segments

    def flops(self, segments: SegmentSpans) -> int:
        """Return the operations of a forward pass, for pairs of tokens that attend to each other."""
        spans = zip(segments.queries, segments.keys, strict=True)
        pairs = sum((stop - start) * (last - first) for (start, stop), (first, last) in spans)
        return 4 * pairs * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes that are measured: those of Wan 2.1 1.3B on a GPU, small ones elsewhere.

    Attributes:
        heads, head_dim, layers, ffn_dim, text_dim, text_length: Configuration of the transformer.
        epoch_layers: Layers where many steps are taken; ratios of steps do not depend on it.
        strip_length: Tokens per strip of a pack.
        wide: Settings that differ at the width of a larger model.
        parity_pack: Token grids of the samples of a pack.
        attention_cases: Packs whose attention is timed, by name.
        fixed_step, mixed_step: Token grids of a step of one size, and of a pack of as many tokens and pairs of tokens.
        small_step: Token grids of a step of one size with few tokens.
        new_packs: Packs in a row, each of another composition.
        read_steps: Steps in a row that are read in one way or the other.
        sizes, samples: Sizes of a mixed set, and the number of samples drawn from them.
        buckets: Bucket table for that set.
        max_tokens: Tokens per step on it.
        long_clip, short_clip: Samples of the steps whose memory is measured.
        tests: Where the tests of a device are.
        device: Device to measure on.
    """

    heads: int
    head_dim: int
    layers: int
    ffn_dim: int
    text_dim: int
    text_length: int
    epoch_layers: int
    strip_length: int
    wide: dict[str, Any]
    parity_pack: tuple[Grid, ...]
    attention_cases: dict[str, AttentionCase]
    fixed_step: tuple[Grid, ...]
    mixed_step: tuple[Grid, ...]
    small_step: tuple[Grid, ...]
    new_packs: int
    read_steps: int
    sizes: tuple[Size, ...]
    samples: int
    buckets: tuple[Size, ...]
    max_tokens: int
    long_clip: Size
    short_clip: Size
    tests: str
    device: str = "cpu"

    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def table(self) -> BucketTable:
        """Bucket table of the mixed set."""
        return BucketTable(sizes=self.buckets)

    def widened(self) -> "Scale":
        """Return these sizes at the width of a larger model."""
        return replace(self, **self.wide)

    def useful_flops(self, grids: Sequence[Grid], *, layers: int, frozen: bool) -> float:
        """Return the operations of the forward and backward pass of blocks, without recomputation.

        A product of matrices has one in the forward pass, and one for the gradients of its inputs in the backward
        pass; where weights are trained, one more. Those of adapters are not counted.

        Args:
            grids: Token grids of the samples.
            layers: Blocks.
            frozen: Whether the blocks are frozen below adapters.
        """
        width, tokens = self.heads * self.head_dim, [frames * rows * columns for frames, rows, columns in grids]
        of_a_token = 2 * (6 * width**2 + 2 * width * self.ffn_dim)
        texts = len(grids) * self.text_length * 4 * width**2
        products = sum(tokens) * of_a_token + texts
        attention = sum(4 * count * (count + self.text_length) * width for count in tokens)
        return layers * ((2 if frozen else 3) * products + 3 * attention)

    def on(self, device: str) -> "Scale":
        """Return the same sizes on a device."""
        return replace(self, device=device)

    def mixed_set(self) -> list[Size]:
        """Return the sizes of the samples of the mixed set."""
        return [self.sizes[choice] for choice in np.random.default_rng(0).integers(len(self.sizes), size=self.samples)]


MIXED = (11776, 8192, 6464, 4032, 2240, 64)

FULL = Scale(
    heads=12,
    head_dim=128,
    layers=30,
    ffn_dim=8960,
    text_dim=4096,
    text_length=512,
    epoch_layers=8,
    strip_length=64,
    wide={
        "heads": 40,
        "ffn_dim": 13824,
        "layers": 8,
        "fixed_step": ((24, 30, 52),),
        "mixed_step": ((13, 30, 52), (5, 45, 40), (1, 64, 64), (1, 48, 80), (2, 26, 46), (1, 30, 52)),
    },
    parity_pack=((9, 15, 26), (1, 32, 32), (5, 16, 28), (1, 9, 7)),
    attention_cases={
        "mixed": AttentionCase(lengths=MIXED),
        "12 of 1,024 to 4,096": AttentionCase(lengths=tuple(range(1024, 4097, 279))),
        "64 of 256 to 1,024": AttentionCase(lengths=tuple(range(256, 1025, 12))),
        "images": AttentionCase(lengths=(1024,) * 16 + (512,) * 32),
        "mixed, to text": AttentionCase(lengths=MIXED, text_length=512),
        "mixed, 8 heads of keys": AttentionCase(lengths=MIXED, heads=24, key_heads=8),
        "mixed, 64 channels": AttentionCase(lengths=MIXED, heads=32, key_heads=32, head_dim=64),
        "one": AttentionCase(lengths=(32768,)),
    },
    fixed_step=((21, 15, 26),) * 4,
    mixed_step=((21, 26, 15), (21, 20, 28), (9, 20, 36), (5, 16, 28), (7, 18, 32)),
    small_step=((1, 60, 60),) * 3,
    new_packs=8,
    read_steps=4,
    sizes=(
        Size(1, 512, 512), Size(1, 768, 512), Size(1, 448, 640), Size(17, 256, 448), Size(33, 320, 320),
        Size(49, 240, 416), Size(49, 432, 240), Size(81, 240, 416), Size(81, 416, 240), Size(9, 480, 832),
        Size(25, 288, 512), Size(65, 272, 336),
    ),
    samples=40,
    buckets=(
        Size(1, 512, 512), Size(1, 640, 448), Size(1, 448, 640), Size(17, 256, 448), Size(17, 320, 320),
        Size(49, 240, 416), Size(49, 416, 240), Size(49, 272, 336), Size(81, 240, 416), Size(81, 416, 240),
        Size(9, 480, 832),
    ),
    max_tokens=32768,
    long_clip=Size(81, 240, 416),
    short_clip=Size(17, 240, 416),
    tests="tests",
)  # fmt: skip

SMALL = Scale(
    heads=2,
    head_dim=24,
    layers=1,
    ffn_dim=96,
    text_dim=32,
    text_length=6,
    epoch_layers=1,
    strip_length=8,
    wide={"heads": 3, "mixed_step": ((2, 4, 4), (1, 4, 8))},
    parity_pack=((2, 4, 4), (1, 6, 5)),
    attention_cases={
        "mixed": AttentionCase(lengths=(40, 16, 9), heads=2, key_heads=1, head_dim=8),
        "text": AttentionCase(lengths=(40, 16), heads=2, key_heads=2, head_dim=8, text_length=6),
    },
    fixed_step=((2, 4, 4),) * 2,
    mixed_step=((3, 4, 3), (1, 4, 5), (2, 2, 2)),
    small_step=((1, 4, 4),) * 2,
    new_packs=2,
    read_steps=2,
    sizes=(Size(1, 64, 64), Size(5, 32, 64), Size(5, 64, 32), Size(9, 48, 48)),
    samples=6,
    buckets=(Size(1, 64, 64), Size(5, 32, 64), Size(5, 64, 32), Size(9, 48, 48)),
    max_tokens=96,
    long_clip=Size(9, 48, 48),
    short_clip=Size(1, 64, 64),
    tests="tests/placement/test_offload.py",
)
