"""Sizes and models of scripts/benchmark_gpu.py."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from synthetic.published import write_published_configs

from hf_bucketing import BucketTable, LatentSpec, Size
from hf_bucketing.adapters.lora import lora_targets
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.placement.quantization import quantization_of

Grid = tuple[int, int, int]
RANK = 16


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes that are measured: those of Wan 2.1 1.3B on a GPU, small ones elsewhere.

    Attributes:
        heads, head_dim, layers, ffn_dim, text_dim, text_length: Configuration of the transformer.
        epoch_layers: Layers where many steps are taken; ratios of steps do not depend on it.
        strip_length: Tokens per strip of a pack.
        parity_packs: Token grids of the samples of several packs.
        attention_cases: Lengths of the segments whose attention is timed, by name.
        attention_batch: Samples of the flash call that is compared with cases of several segments.
        fixed_step, mixed_step: Token grids of a step of one size, and of a pack of as many tokens and pairs of tokens.
        read_steps: Steps in a row that are read in one way or the other.
        sizes, samples: Sizes of a mixed set, and the number of samples drawn from them.
        buckets: Bucket table for that set.
        max_tokens: Tokens per step on it.
        long_clip, short_clip: Samples of the steps whose memory is measured.
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
    parity_packs: tuple[tuple[Grid, ...], ...]
    attention_cases: dict[str, tuple[int, ...]]
    attention_batch: int
    fixed_step: tuple[Grid, ...]
    mixed_step: tuple[Grid, ...]
    read_steps: int
    sizes: tuple[Size, ...]
    samples: int
    buckets: tuple[Size, ...]
    max_tokens: int
    long_clip: Size
    short_clip: Size
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

    def on(self, device: str) -> "Scale":
        """Return the same sizes on a device."""
        return replace(self, device=device)

    def mixed_set(self) -> list[Size]:
        """Return the sizes of the samples of the mixed set."""
        return [self.sizes[choice] for choice in np.random.default_rng(0).integers(len(self.sizes), size=self.samples)]


FULL = Scale(
    heads=12,
    head_dim=128,
    layers=30,
    ffn_dim=8960,
    text_dim=4096,
    text_length=512,
    epoch_layers=8,
    strip_length=64,
    parity_packs=(
        ((9, 15, 26), (1, 32, 32), (5, 16, 28), (1, 9, 7)),
        ((13, 18, 32), (1, 64, 64), (3, 7, 9)),
        ((1, 8, 8),) * 20,
    ),
    attention_cases={
        "one": (32768,),
        "eight_equal": (4096,) * 8,
        "mixed": (11776, 8192, 6464, 4032, 2240, 64),
        "images": (1024,) * 16 + (512,) * 32,
    },
    attention_batch=8,
    fixed_step=((21, 15, 26),) * 4,
    mixed_step=((21, 26, 15), (21, 20, 28), (9, 20, 36), (5, 16, 28), (7, 18, 32)),
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
    parity_packs=(((2, 4, 4), (1, 6, 5)), ((1, 2, 3),) * 4),
    attention_cases={"one": (64,), "mixed": (40, 16, 8)},
    attention_batch=2,
    fixed_step=((2, 4, 4),) * 2,
    mixed_step=((3, 4, 3), (1, 4, 5), (2, 2, 2)),
    read_steps=2,
    sizes=(Size(1, 64, 64), Size(5, 32, 64), Size(5, 64, 32), Size(9, 48, 48)),
    samples=6,
    buckets=(Size(1, 64, 64), Size(5, 32, 64), Size(5, 64, 32), Size(9, 48, 48)),
    max_tokens=96,
    long_clip=Size(9, 48, 48),
    short_clip=Size(1, 64, 64),
)


def make_transformer(scale: Scale, *, layers: int, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """Make a Wan transformer of random weights; some layers stay in float32, as where diffusers loads it."""
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = WanTransformer3DModel(
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=scale.text_dim,
            freq_dim=256,
            ffn_dim=scale.ffn_dim,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=1024,
        )
    for name, weight in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            weight.data = weight.data.to(dtype)
    return model


def add_adapters(model: WanTransformer3DModel) -> None:
    """Freeze a transformer and add LoRA in float32, as the training script does."""
    model.requires_grad_(False)
    targets = lora_targets(model, AdapterConfig())
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=targets))
    cast_training_params(model, torch.float32)


def save_pipeline(scale: Scale, folder: Path, *, layers: int) -> None:
    """Save a transformer in bf16 in a pipeline whose other components have configurations, but no weights."""
    write_published_configs(folder, "wan-1.3b")
    make_transformer(scale, layers=layers, dtype=torch.bfloat16).save_pretrained(str(folder / "transformer"))


def load_transformer(scale: Scale, folder: Path, kind: str | None) -> WanTransformer3DModel:
    """Load the saved transformer in bf16, its blocks quantised in a format of `--quantize_base`."""
    config = WanTransformer3DModel.load_config(str(folder), subfolder="transformer")
    with torch.device("meta"):
        empty = WanTransformer3DModel.from_config(config)
    options: dict[str, Any] = {}
    if kind is not None:
        options = {"quantization_config": quantization_of(kind, empty, dtype=torch.bfloat16)}
    model = WanTransformer3DModel.from_pretrained(
        str(folder), subfolder="transformer", torch_dtype=torch.bfloat16, **options
    )
    return model.to(scale.device)
