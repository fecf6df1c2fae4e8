"""Several adapters in one pipeline, each at a strength of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import read_lora
from hf_bucketing.adapters.kinds import merge_adapters
from hf_bucketing.adapters.loading import load_adapters, set_strengths
from hf_bucketing.adapters.lora import save_lora
from hf_bucketing.adapters.settings import Adapter, parse_adapter
from tests.adapters.test_kinds import KINDS, kinds, trained


@torch.no_grad()
def output(pipeline: WanPipeline) -> torch.Tensor:
    generator, config = torch.Generator().manual_seed(0), pipeline.transformer.config
    latents = torch.randn(1, config.in_channels, 2, 4, 6, generator=generator)
    text = torch.randn(1, 7, config.text_dim, generator=generator)
    return pipeline.transformer(latents, torch.tensor([500]), text).sample


@pytest.fixture
def saved(pipeline_dir: Path, tmp_path: Path):
    """Save adapters of random weights of a kind, and return their folder and what the model gives with them."""

    def save(kind: str, name: str = "adapter", seed: int = 0) -> tuple[str, torch.Tensor]:
        torch.manual_seed(seed)
        recipe = trained(pipeline_dir, kind)
        save_lora(recipe.pipeline, tmp_path / name)
        return str(tmp_path / name), output(recipe.pipeline)

    return save


@kinds
def test_strength_1_is_as_trained_and_0_is_the_base(kind: str, saved, pipeline_dir: Path) -> None:
    path, expected = saved(kind)
    pipeline = WanPipeline.from_pretrained(pipeline_dir)
    base, adapters = output(pipeline), [Adapter(path)]
    load_adapters(pipeline, adapters, trained="transformer")
    for factor, there in ((1.0, expected), (0.0, base), (1.0, expected)):
        set_strengths(pipeline, adapters, factor=factor)
        torch.testing.assert_close(output(pipeline), there, rtol=0, atol=1e-5 * factor)
    set_strengths(pipeline, adapters, factor=0.5)
    half = output(pipeline)
    assert min(float((half - base).abs().max()), float((half - expected).abs().max())) > 1e-3
    set_strengths(pipeline, [Adapter(path, 0.5)], factor=1.0)
    assert torch.equal(output(pipeline), half)


@torch.no_grad()
def test_alpha_tensors_that_diffusers_ignores_count(pipeline_dir: Path, tmp_path: Path) -> None:
    pipeline, merged = (WanPipeline.from_pretrained(pipeline_dir) for _ in range(2))
    torch.manual_seed(0)
    layer, file = "transformer.blocks.0.attn1.to_q", tmp_path / "lora.safetensors"
    inputs = pipeline.transformer.blocks[0].attn1.to_q.in_features
    pair = {f"{layer}.lora_A.weight": torch.randn(2, inputs), f"{layer}.lora_B.weight": torch.randn(inputs, 2)}
    save_file({**pair, f"{layer}.alpha": torch.tensor(0.5)}, file)
    merge_adapters(WanPipeline, merged.transformer, file)
    load_adapters(pipeline, [Adapter(str(file))], trained="transformer")
    torch.testing.assert_close(output(pipeline), output(merged), rtol=0, atol=1e-5)


def test_several_adapters_add_their_changes_at_their_strengths(saved, pipeline_dir: Path) -> None:
    first, second = Adapter(saved("lora", "first")[0], 0.5), Adapter(saved("lora", "second", seed=1)[0], -2.0)
    pipeline, merged = (WanPipeline.from_pretrained(pipeline_dir) for _ in range(2))
    with torch.no_grad():
        for adapter in (first, second):
            for name, (down, up) in read_lora(WanPipeline, merged.transformer, adapter.path).folded().items():
                merged.transformer.get_submodule(name).weight += 0.7 * adapter.strength * (up @ down)
    load_adapters(pipeline, [first, second], trained="transformer")
    set_strengths(pipeline, [first, second], factor=0.7)
    torch.testing.assert_close(output(pipeline), output(merged), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("lo") and kind != "lora"])
def test_a_kind_that_cannot_be_loaded_with_others_is_refused(kind: str, saved, pipeline_dir: Path) -> None:
    adapters = [Adapter(saved("lora", "first")[0]), Adapter(saved(kind)[0])]
    with pytest.raises(BucketingError, match=r"is LoHa or LoKr, .* merge it into the pipeline first"):
        load_adapters(WanPipeline.from_pretrained(pipeline_dir), adapters, trained="transformer")


def test_a_path_may_hold_the_sign_of_a_strength(tmp_path: Path) -> None:
    (tmp_path / "rank=8").mkdir()
    for text, adapter in (
        ("trained", Adapter("trained", 1.0)),
        ("trained=-0.5", Adapter("trained", -0.5)),
        ("a=b", Adapter("a=b", 1.0)),
        (f"{tmp_path}/rank=8", Adapter(f"{tmp_path}/rank=8", 1.0)),
        (f"{tmp_path}/rank=8=0.5", Adapter(f"{tmp_path}/rank=8", 0.5)),
    ):
        assert parse_adapter(text) == adapter
