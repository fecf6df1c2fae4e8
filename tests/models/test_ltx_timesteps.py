"""Packs of LTX-Video and LTX-2 with a timestep per token or per frame, against the stock models in float64."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import families
from hf_bucketing.packing import packed_forward
from tests.models.cases import Samples, largest_difference
from tests.models.families import CASES


def timesteps_of(samples: Samples, patch: tuple[int, int, int], *, by_frame: bool) -> list[torch.Tensor]:
    """Draw timesteps whose first frame is clean, per frame or per token of each sample."""
    generator = torch.Generator().manual_seed(2)
    drawn = []
    for latent in samples.latents:
        frames, height, width = (side // part for side, part in zip(latent.shape[1:], patch, strict=True))
        count = 1 if by_frame else height * width
        steps = 1000 * torch.rand(frames, count, generator=generator)
        steps[0] = 0
        drawn.append(steps.flatten())
    return drawn


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ltx")])
@torch.no_grad()
def test_a_timestep_per_token_or_frame_gives_what_the_stock_model_gives(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    patch = families()[type(model).__name__].patch(model.config)
    whole = samples.alone(model)
    for by_frame in (True, False) if case.timestep_per_token else (True,):
        timesteps = timesteps_of(samples, patch, by_frame=by_frame)
        per_token = timesteps
        if by_frame:
            sides = [(latent.shape[2] // patch[1]) * (latent.shape[3] // patch[2]) for latent in samples.latents]
            per_token = [steps.repeat_interleave(side) for steps, side in zip(timesteps, sides, strict=True)]
        expected = [
            case.alone(model, x, t, e, **{key: values[sample] for key, values in samples.conditioning.items()})
            for sample, (x, t, e) in enumerate(zip(samples.latents, per_token, samples.text, strict=True))
        ]
        assert largest_difference(expected, whole) > 1e-3
        packing = enable_packing(model, strip_length=4)
        batch = samples.pack(packing, timesteps=timesteps)
        packed = batch.unpack(packed_forward(model, batch))
        disable_packing(model)
        assert largest_difference(expected, packed) <= 1e-11 * max(
            1.0, *(float(output.abs().max()) for output in expected)
        )
