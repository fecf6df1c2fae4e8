"""Calls of a pipeline that render together give what they give one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_bucketing import Size
from hf_bucketing.models import rendering
from hf_bucketing.models.calls import IMAGES
from hf_bucketing.models.families.motif_video import MotifVideoRecipe
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.rendering import Call, render_together
from hf_bucketing.packing import PackedBatch
from tests.models.cases import embed_time_in_the_dtype_of_the_weights

SIZES = (Size(9, 32, 64), Size(17, 32, 32), Size(9, 64, 32))
PROMPTS = ('a square that says "red"', "x", "a large blue circle on grey")
PICTURE = Image.linear_gradient("L").convert("RGB")
TOGETHER: dict[str, dict[str, Any]] = {
    "wan": {"guidance_scale": 3.0},
    "flux": {"guidance_scale": 3.5},
    "qwen-image": {"true_cfg_scale": 3.0, "negative_prompt": "grey"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "auraflow": {"guidance_scale": 3.0},
    "bria": {"guidance_scale": 3.0},
    "chronoedit": {"guidance_scale": 3.0},
    "cogvideox": {"guidance_scale": 6.0},
    "cogvideox-i2v": {"guidance_scale": 6.0},
    "cogview3plus": {"guidance_scale": 3.0},
    "cogview4": {"guidance_scale": 3.0},
    "easyanimate": {"guidance_scale": 3.0},
    "flux-control": {"control_image": PICTURE},
    "flux2": {},
    "flux3": {},
    "hunyuan-image": {},
    "hunyuan-video": {},
    "hunyuan-video-1.5-image": {"guidance_scale": 3.0},
    "krea2": {"guidance_scale": 3.0},
    "longcat-image": {"guidance_scale": 3.0, "enable_prompt_rewrite": False},
    "ltx": {"guidance_scale": 3.0},
    "ltx-i2v": {"guidance_scale": 3.0},
    "lumina2": {"guidance_scale": 3.0, "negative_prompt": "grey"},
    "mochi": {"guidance_scale": 1.0},
    "motif-video": {"guidance_scale": 3.0},
    "ovis-image": {"guidance_scale": 3.0},
    "pixart-alpha": {"guidance_scale": 3.0},
    "pixart-sigma": {"guidance_scale": 1.0},
    "prx": {"guidance_scale": 3.0},
    "sd3": {"guidance_scale": 3.0},
    "skyreels-v2": {"guidance_scale": 3.0},
    "skyreels-v2-df": {"guidance_scale": 3.0, "ar_step": 1},
    "skyreels-v2-i2v": {"guidance_scale": 3.0},
    "wan-2.2-i2v": {"guidance_scale": 3.0},
    "wan-2.2-t2v-5b": {"guidance_scale": 3.0},
    "wan-2.2-ti2v": {"guidance_scale": 3.0},
    "wan-flf2v": {"guidance_scale": 3.0},
    "wan-i2v": {"guidance_scale": 3.0},
    "wan-vace": {"guidance_scale": 3.0},
}
"""Pipelines, with arguments of their calls."""
ONE_BY_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "chroma": ("changes its forward", {}),
    "ernie-image": ("passes no `encoder_hidden_states`", {}),
    "flux-kontext": ("tokens where its size has", {"image": PICTURE, "max_area": 32 * 48, "_auto_resize": False}),
    "ideogram4": ("tokens where its size has", {}),
    "kandinsky5": ("passes no visual_cond", {}),
    "kandinsky6": ("passes no visual_cond", {}),
    "ltx-condition": ("passes no rope_interpolation_scale", {}),
    "ltx2": ("passes num_frames", {}),
    "ltx2-i2v": ("passes num_frames", {"image_crf": 0}),
    "qwen-image-2.1": ("passes kv_cache_mode", {}),
}
"""Pipelines that render one by one, with a part of the reason."""


def loaded(folder: Path) -> Recipe:
    recipe = recipe_of(str(folder)).load(str(folder))
    recipe.pipeline.set_progress_bar_config(disable=True)
    for component in recipe.pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(torch.float32 if "kandinsky" in str(folder) else torch.float64).eval()
    if isinstance(recipe, MotifVideoRecipe):
        embed_time_in_the_dtype_of_the_weights(recipe.transformer)
    return recipe


def calls_of(recipe: Recipe, **options: Any) -> list[Call]:
    calls = []
    for number, (prompt, size) in enumerate(zip(PROMPTS, SIZES, strict=True)):
        made = recipe.spec.snap(size._replace(frames=1) if recipe.family.images_only else size)
        picture = PICTURE.resize((made.width, made.height))
        count = recipe.num_images(recipe.transformer.config) if recipe.takes_image else 0
        shown = dict.fromkeys(IMAGES[:count], picture)

        @torch.no_grad()
        def run(
            recipe: Recipe, prompt: str = prompt, size: Size = made, seed: int = number, shown: Any = shown
        ) -> np.ndarray:
            noise = torch.Generator().manual_seed(seed)
            return recipe.render(prompt, size, generator=noise, num_inference_steps=3, **shown, **options)

        calls.append(Call(recipe.spec.grid(made), run))
    return calls


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives the number of samples of each pack that is run."""
    counts: list[int] = []
    forward = rendering.packed_forward

    def record(transformer: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
        counts.append(len(batch.layout))
        return forward(transformer, batch)

    monkeypatch.setattr(rendering, "packed_forward", record)
    return counts


@pytest.mark.parametrize(
    ("name", "options"),
    [*TOGETHER.items(), *(pytest.param(*case, marks=pytest.mark.every) for case in OTHERS.items())],
)
def test_calls_together_give_what_they_give_alone(
    name: str, options: dict[str, Any], tiny_folder: Callable[[str], Path], packs: list[int], caplog: Any
) -> None:
    recipe = loaded(tiny_folder(name))
    calls = calls_of(recipe, **options)
    alone = [call.run(recipe) for call in calls]
    assert not packs
    with caplog.at_level(logging.WARNING):
        together = render_together(recipe, calls, strip_length=8)
    assert "one by one" not in caplog.text
    assert len(packs) >= 3, "one per step"
    assert min(packs[:3]) >= len(calls), "longer clips may take further steps"
    for frames, expected in zip(together, alone, strict=True):
        assert np.abs(frames - expected).max() < 1e-6
    again = calls[0].run(recipe)
    assert np.array_equal(again, alone[0]), "the transformer is the stock one again"


def test_packs_hold_at_most_max_tokens(tiny_folder: Callable[[str], Path], packs: list[int]) -> None:
    recipe = loaded(tiny_folder("wan"))
    calls = calls_of(recipe, guidance_scale=1.0)
    largest = max(t * h * w for t, h, w in (call.grid for call in calls))
    one_by_one = render_together(recipe, calls, strip_length=8, max_tokens=largest)
    assert set(packs) == {1}
    for frames, call in zip(one_by_one, calls, strict=True):
        assert np.abs(frames - call.run(recipe)).max() < 1e-6


@pytest.mark.parametrize(
    ("name", "reason", "options"),
    [
        ("z-image", "passes no", {}),
        *(pytest.param(name, *case, marks=pytest.mark.every) for name, case in ONE_BY_ONE.items()),
    ],
)
def test_a_pipeline_that_does_more_renders_one_by_one(
    name: str, reason: str, options: dict[str, Any], tiny_folder: Callable[[str], Path], caplog: Any
) -> None:
    recipe = loaded(tiny_folder(name))
    calls = calls_of(recipe, **options)
    alone = [call.run(recipe) for call in calls]
    with caplog.at_level(logging.WARNING):
        together = render_together(recipe, calls, strip_length=8)
    assert recipe.pipeline_class in caplog.text
    assert reason in caplog.text
    for frames, expected in zip(together, alone, strict=True):
        assert np.array_equal(frames, expected)


def test_a_vae_takes_latents_of_the_precision_of_the_transformer(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("flux2"))
    pipeline = recipe_of(folder).load(folder, loading=Loading(dtype=torch.bfloat16)).pipeline
    latents = torch.zeros(1, pipeline.vae.config.latent_channels, 4, 4, dtype=torch.bfloat16)
    assert pipeline.vae.decode(latents).sample.dtype == torch.float32


def test_an_error_of_one_call_ends_all(tiny_folder: Callable[[str], Path]) -> None:
    recipe = loaded(tiny_folder("wan"))
    ended = []

    def fails_at_the_end(step: int) -> Callable[..., Any]:
        def after_step(pipeline: Any, number: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            if number == step:
                raise ValueError("no more")
            return values

        return after_step

    def run(recipe: Recipe, step: int) -> np.ndarray:
        try:
            return recipe.render(
                "x", SIZES[0], num_inference_steps=3, callback_on_step_end=fails_at_the_end(step), guidance_scale=1.0
            )
        finally:
            ended.append(step)

    grid = recipe.spec.grid(SIZES[0])
    with pytest.raises(ValueError, match="no more"):
        render_together(recipe, [Call(grid, lambda recipe, step=step: run(recipe, step)) for step in (9, 1, 9)])
    assert len(ended) == 3
    calls = calls_of(recipe, guidance_scale=1.0)
    assert np.abs(render_together(recipe, calls)[0] - calls[0].run(recipe)).max() < 1e-6, "it can be packed again"
