"""The demo's pipeline, what it reproduces, and the measures of what a clip shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from hf_bucketing.models.registry import recipe_of
from hf_bucketing.synthetic.demo import CHANNELS, VAE_FILE, fitted_vae, make_demo_pipeline
from hf_bucketing.synthetic.media import DEMO_CLIPS, Clip, demo_clip, look_at, render, scene
from tests.conftest import run_script_here


def clip_of(clip: Clip, **shown: Any) -> np.ndarray:
    return np.stack(list(render(clip, **shown)))


@pytest.mark.parametrize("clip", [Clip(5, 64, 112), Clip(9, 112, 64)])
@pytest.mark.parametrize(
    ("shape", "color", "direction"),
    [("square", "red", "right"), ("circle", "blue", "down"), ("diamond", "white", "up"), ("circle", "yellow", "left")],
)
def test_clips_are_recognised(clip: Clip, shape: str, color: str, direction: str) -> None:
    seen = look_at(clip_of(clip, shape=shape, color=color, direction=direction))
    assert (seen.shape, seen.color, seen.direction) == (shape, color, direction)
    assert seen.overlap > 0.9
    assert seen.agrees(f"a {color} {shape} moving {direction} on a dark background")
    assert not seen.agrees(f"a green {shape} moving {direction} on a dark background")
    before = look_at(clip_of(clip, shape=shape, color=color, direction=direction, brightness=110.0))
    assert before.background == "bright"
    assert not before.agrees(f"a {color} {shape} moving {direction} on a dark background")


def test_noise_and_empty_clips_are_not_recognised() -> None:
    assert look_at(np.full((5, 32, 48, 3), 40, np.uint8)).color is None
    noise = np.random.default_rng(0).integers(0, 255, (5, 32, 48, 3)).astype(np.uint8)
    assert look_at(noise).color is None
    still = clip_of(Clip(1, 64, 64), shape="square", color="red", direction="up").repeat(5, axis=0)
    assert look_at(still).direction is None


@torch.no_grad()
@pytest.mark.parametrize("clip", [DEMO_CLIPS[3], Clip(5, 48, 176), Clip(1, 160, 160)])
def test_the_vae_reproduces_clips_of_any_size(clip: Clip) -> None:
    vae, rng = fitted_vae(load_file(VAE_FILE)), np.random.default_rng(5)
    for frames in (demo_clip(clip, rng)[0], scene(clip, rng)):
        pixels = torch.from_numpy(frames)[None].permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents = vae.encode(pixels).latent_dist
        error = (vae.decode(latents.mode()).sample - pixels).pow(2).mean()
        assert latents.mean.shape == (1, CHANNELS, clip.frames, clip.height // 8, clip.width // 8)
        assert float(latents.std.max()) < 1e-3
        assert 10 * torch.log10(4 / error) > 24


@pytest.mark.slow
def test_the_pipeline_loads_renders_and_is_shown(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    make_demo_pipeline(pipeline)
    assert recipe_of(str(pipeline)).pipeline_class == "WanPipeline"
    loaded = DiffusionPipeline.from_pretrained(pipeline)
    words = loaded.tokenizer("a red square moving right on a dark background").input_ids
    assert len(words) == 10
    figure = tmp_path / "figure.png"
    flags = ("--before", pipeline, "--after", pipeline, "--figure", figure, "--num_inference_steps", 2)
    result = run_script_here("tools/show_demo.py", *flags)
    assert "in the data      a red square (overlap 100%) moving right" in result.stdout
    assert figure.stat().st_size > 10_000
    failed = run_script_here("tools/show_demo.py", *flags, "--min_recognised", 3, check=False)
    assert failed.returncode == 1
