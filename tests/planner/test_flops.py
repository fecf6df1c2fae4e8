"""Counted operations of training: published values, what is frozen, what is computed again, and torch's own count."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_bucketing import Size
from hf_bucketing.adapters import AdapterConfig
from hf_bucketing.packing.family import output_of
from hf_bucketing.planner import PlanConfig
from hf_bucketing.planner.components import Component, read_components
from hf_bucketing.planner.time import training_flops
from hf_bucketing.planner.trace import TracedStep, _inputs, trace
from hf_bucketing.planner.trackers import Flops
from hf_bucketing.settings import changed

CONFIG = PlanConfig.from_flat(
    device="cpu", mixed_precision="no", cached="all", max_sequence_length=16, train_batch_size=1
)
LORA = AdapterConfig(lora_rank=16)
SIZES = [Size(1, 32, 96), Size(1, 64, 64), Size(9, 96, 128)]
TEXT = 512


def wan(*, layers: int, heads: int, ffn: int) -> Component:
    """Return a transformer of Wan 2.1 by its width and depth."""
    config = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "ffn_dim": ffn,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "patch_size": [1, 2, 2],
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "eps": 1e-6,
    }
    return Component(library="diffusers", class_name="WanTransformer3DModel", config_json=json.dumps(config))


WAN_14B = TracedStep(
    transformer=wan(layers=40, heads=40, ffn=13824),
    latent_sizes=((24, 60, 104),),
    text_length=TEXT,
    mixed_precision="bf16",
)
WAN_1_3B = dataclasses.replace(WAN_14B, transformer=wan(layers=30, heads=12, ffn=8960), latent_sizes=((21, 60, 104),))


def model_flops(flops: Flops) -> float:
    return flops.forward + flops.backward


@pytest.mark.cases(fast=("1.3B",), slow=("14B",))
@pytest.mark.parametrize(("step", "published"), [(WAN_14B, 6.184e15), (WAN_1_3B, 0.849e15)], ids=["14B", "1.3B"])
def test_the_count_is_that_of_megatron_bridge(step: TracedStep, published: float) -> None:
    """Megatron-Bridge #5249: 37,440 and 32,760 tokens, 512 of text, all weights trained."""
    flops = trace(step).flops
    assert model_flops(flops) == pytest.approx(published, rel=0.001)
    assert flops.backward == pytest.approx(2 * flops.forward, rel=0.001)


@pytest.mark.every
def test_frozen_weights_have_no_gradients_and_checkpoints_compute_blocks_again() -> None:
    (frames, height, width), layers, dim, ffn = WAN_14B.latent_sizes[0], 40, 5120, 13824
    tokens = frames * height * width // 4
    linear = layers * (2 * tokens * (6 * dim**2 + 2 * dim * ffn) + 2 * TEXT * 2 * dim**2)
    attention = layers * 4 * dim * (tokens**2 + TEXT * tokens)
    checkpointed = dataclasses.replace(WAN_14B, gradient_checkpointing=True)
    full, full_again = trace(WAN_14B).flops, trace(checkpointed).flops
    lora = trace(dataclasses.replace(WAN_14B, adapters=LORA)).flops
    lora_again = trace(dataclasses.replace(checkpointed, adapters=LORA)).flops
    close = {"rel": 0.005}  # adapters, embeddings and the output
    assert full.forward == pytest.approx(linear + attention, **close)
    assert model_flops(lora) == pytest.approx(2 * linear + 3 * attention, **close)
    assert full.recomputed == pytest.approx(attention / 2, **close), "scores of fused attention"
    assert full_again.hardware == pytest.approx(4 * linear + 4.5 * attention, **close)
    assert lora_again.hardware == pytest.approx(3 * linear + 4.5 * attention, **close)
    assert model_flops(full_again) == pytest.approx(model_flops(full)), "recomputation trains nothing"


@pytest.mark.every
def test_predictions_of_the_base_model_count_apart(tiny_folder: Callable[[str], Path]) -> None:
    components = read_components(str(tiny_folder("wan")))
    config = changed(CONFIG, lora_rank=2)
    alone = training_flops(components, config, SIZES)
    preserved = training_flops(components, changed(config, slider=["a|b"]), SIZES)
    assert preserved.model == alone.model
    assert alone.base.of_samples([100]) == 0
    forward = trace(WAN_1_3B).flops.forward
    based = dataclasses.replace(WAN_1_3B, adapters=LORA, base_predictions=3)
    assert trace(based).flops.base == pytest.approx(3 * forward, rel=1e-6), "three passes without adapters"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "qwen-image", "flux", "sd3", "pixart-sigma"])
def test_torch_counts_as_many_operations_in_a_real_pass(tiny_folder: Callable[[str], Path], name: str) -> None:
    """By the plain products of attention, whose backward pass keeps the scores."""
    components = read_components(str(tiny_folder(name)))
    spec = components.spec
    size = spec.snap(Size(1 if components.recipe.family.images_only else 9, 64, 96))
    step = TracedStep(
        transformer=components.transformer,
        latent_sizes=(spec.latent_size(size),),
        text_length=components.recipe.text_length(CONFIG.run.max_sequence_length),
    )
    model = components.transformer.model_class.from_config(components.transformer.config)
    inputs = {
        name: torch.ones_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
        for name, value in _inputs(components.transformer.build(), step).items()
    }
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output_of(model(**inputs, return_dict=False)).square().mean().backward()
    assert model_flops(trace(step).flops) == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.slow
def test_checkpoints_change_recomputation_alone(tiny_folder: Callable[[str], Path]) -> None:
    components = read_components(str(tiny_folder("qwen-image")))
    checkpointed = changed(CONFIG, gradient_checkpointing=True)
    sizes = [components.spec.snap(size._replace(frames=1)) for size in SIZES]
    plain, again = (training_flops(components, config, sizes) for config in (CONFIG, checkpointed))
    assert again.model == plain.model
    assert again.recomputed.linear > plain.recomputed.linear
