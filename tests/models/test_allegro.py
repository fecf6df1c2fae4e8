"""Allegro: the reason for which its pipeline is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLAllegro

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of


def test_the_pipeline_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "AllegroPipeline"}))
    with pytest.raises(BucketingError, match=r"AllegroPipeline, which cannot be trained: .* tiles of 24×320×320"):
        recipe_of(str(tmp_path))


@torch.no_grad()
def test_its_vae_encodes_nothing_that_does_not_fill_its_tiles() -> None:
    """If diffusers changes this, Allegro can have a recipe."""
    vae = AutoencoderKLAllegro(block_out_channels=(32,) * 4, layers_per_block=1, sample_size=160).eval()
    pixels = torch.rand(1, 3, 25, 160, 168)
    with pytest.raises(NotImplementedError, match="without tiling"):
        vae.encode(pixels)
    vae.enable_tiling()
    assert vae.kernel == (24, 160, 160)
    latents, beyond = vae.encode(pixels).latent_dist.mode(), pixels.clone()
    beyond[:, :, 24:], beyond[..., 160:] = 0, 0
    assert torch.equal(latents, vae.encode(beyond).latent_dist.mode())
    assert not torch.equal(latents, vae.encode(-pixels).latent_dist.mode())
    short = pixels[:, :, :17, :, :160]
    assert torch.equal(vae.encode(short).latent_dist.mode(), vae.encode(-short).latent_dist.mode())
