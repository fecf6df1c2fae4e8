"""Pipelines of two transformers, as Wan 2.2 A14B: each is trained in a run of its own, at its noise levels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline

from hf_bucketing import BucketingError
from hf_bucketing.adapters.lora import check_component, start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models.objectives import FlowMatching
from hf_bucketing.models.wan.recipe import WanRecipe
from tests.training.training_cases import in_process, run

OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}
EXPERTS = ("transformer", "transformer_2")
BOUNDARY = 0.875


@pytest.fixture(scope="module")
def expert_dir(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline = WanPipeline.from_pretrained(pipeline_dir)
    torch.manual_seed(1)
    second = type(pipeline.transformer).from_config(pipeline.transformer.config)
    components = {**pipeline.components, "transformer_2": second}
    path = tmp_path_factory.mktemp("experts") / "wan"
    WanPipeline(**components, boundary_ratio=BOUNDARY).save_pretrained(path)
    return path


def weights(pipeline: DiffusionPipeline, name: str) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in getattr(pipeline, name).parameters()])


def test_each_transformer_is_trained_at_the_noise_levels_that_the_pipeline_calls_it_at(expert_dir: Path) -> None:
    called: dict[str, list[float]] = {name: [] for name in EXPERTS}
    pipeline = WanPipeline.from_pretrained(expert_dir)
    for name in EXPERTS:
        getattr(pipeline, name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: called[name].append(float(kwargs["timestep"][0])), with_kwargs=True
        )
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        "red", height=32, width=32, num_frames=5, num_inference_steps=20, guidance_scale=1.0, output_type="latent"
    )
    latents = [torch.zeros(1, 1, 1, 1)] * 500
    whole = FlowMatching(shift=3.0)(latents, indices=range(500), epoch=0).timesteps
    for name in EXPERTS:
        recipe = WanRecipe.load(str(expert_dir), trained=name)
        low, high = (1000 * level for level in recipe.sigmas())
        assert called[name]
        assert low <= min(called[name]) <= max(called[name]) <= high
        drawn = recipe.objective(**OPTIONS)(latents, indices=range(500), epoch=0).timesteps
        assert low <= float(drawn.min()) < float(drawn.max()) <= high
        inside = (whole >= low) & (whole <= high)
        assert torch.equal(drawn[inside], whole[inside]), "only others are drawn anew"
        trained = {
            part for part in EXPERTS if any(p.requires_grad for p in getattr(recipe.pipeline, part).parameters())
        }
        assert trained == {name}


@pytest.mark.parametrize(
    "batching",
    [pytest.param({}, marks=pytest.mark.slow), {"batching": "pack", "max_tokens": 640, "strip_length": 16}],
    ids=["bucket", "pack"],
)
def test_a_run_changes_the_second_transformer_alone(batching, expert_dir, prepared_dir, tmp_path: Path) -> None:
    validation = {"validation_prompts": ["red"], "validation_sizes": "5,32,48", "validation_steps": 1,
                  "validation_inference_steps": 10}  # fmt: skip
    run(in_process(expert_dir, prepared_dir, tmp_path, trained_component="transformer_2", max_train_steps=1,
                   **validation, **batching))  # fmt: skip
    before, after = (DiffusionPipeline.from_pretrained(path) for path in (expert_dir, tmp_path))
    assert after.config.boundary_ratio == BOUNDARY
    assert torch.equal(weights(before, "transformer"), weights(after, "transformer"))
    assert not torch.equal(weights(before, "transformer_2"), weights(after, "transformer_2"))
    assert len(list((tmp_path / "validation" / "step-1").glob("*.mp4"))) == 1


def test_adapters_of_the_second_transformer_load_into_it(expert_dir, prepared_dir, tmp_path: Path) -> None:
    run(in_process(expert_dir, prepared_dir, tmp_path, trained_component="transformer_2", lora_rank=2,
                   max_train_steps=2))  # fmt: skip
    pipeline = WanPipeline.from_pretrained(expert_dir)
    pipeline.load_lora_weights(str(tmp_path), load_into_transformer_2=True)
    adapted = {name for name in EXPERTS if getattr(getattr(pipeline, name), "peft_config", {})}
    assert adapted == {"transformer_2"}


def test_adapters_of_another_transformer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "training_config.json").write_text('{"trained_component": "transformer_2"}')
    (tmp_path / "checkpoint-3").mkdir()
    for path in (tmp_path, tmp_path / "pytorch_lora_weights.safetensors", tmp_path / "checkpoint-3"):
        config = AdapterConfig(lora_rank=2, init_from_adapters=str(path))
        with pytest.raises(BucketingError, match=r"holds adapters of transformer_2, .* this run trains transformer;"):
            start_adapters(None, config, component="transformer")
        check_component(str(path), component="transformer_2")


def test_a_pipeline_without_a_second_transformer_and_levels_that_do_not_rise_are_refused(pipeline_dir: Path) -> None:
    with pytest.raises(BucketingError, match="has no transformer_2 to train"):
        WanRecipe.load(str(pipeline_dir), trained="transformer_2")
    with pytest.raises(BucketingError, match="from 0 to 1"):
        FlowMatching(sigmas=(0.5, 0.5))
