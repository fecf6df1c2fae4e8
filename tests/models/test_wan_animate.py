"""Wan-Animate: faces and poses of a pack's samples, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward
from tests.models.cases import CASES, Samples, largest_difference
from tests.models.families.wan_animate import CASES as ANIMATE, SIDE

CASE = ANIMATE["wan-animate"]
FACE, POSE, IMAGE = "face_pixel_values", "pose_hidden_states", "encoder_hidden_states_image"


@torch.no_grad()
@pytest.mark.parametrize("name", [FACE, POSE, IMAGE])
def test_what_a_sample_is_shown_leaks_into_no_other_sample(name: str) -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    packing = enable_packing(model, strip_length=4)

    def outputs() -> list[torch.Tensor]:
        batch = samples.pack(packing)
        return batch.unpack(packed_forward(model, batch))

    before, own = outputs(), samples.conditioning[name]
    for victim in (0, 3, 5):
        samples.conditioning[name] = [
            values * torch.nan if row == victim else values for row, values in enumerate(own)
        ]
        if torch.is_tensor(own):
            samples.conditioning[name] = torch.stack(samples.conditioning[name])
        for sample, (output, other) in enumerate(zip(before, outputs(), strict=True)):
            assert torch.equal(output, other) == (sample != victim)
            if sample == victim and name == FACE:  # the tokens of the character see it in attention alone
                assert other.isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_other_backends_keep_the_faces_of_frames_apart(backend: str) -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    batch = samples.pack(enable_packing(model, strip_length=4, backend=backend))
    assert largest_difference(CASE.expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


def test_faces_of_another_length_and_samples_without_a_frame_behind_the_character_are_refused() -> None:
    model, samples = CASE.model(), Samples(case=CASE, order=(0, 1))
    packing = enable_packing(model, strip_length=4)
    samples.conditioning[FACE][0] = torch.zeros(3, 4, SIDE, SIDE)
    with pytest.raises(PackingError, match="have 5 frames, but its samples need 6"):
        packed_forward(model, samples.pack(packing))
    samples = Samples(case=CASE, order=(0, 1))
    samples.latents[1], samples.conditioning[POSE][1] = samples.latents[1][:, :1], samples.conditioning[POSE][1][:, :1]
    with pytest.raises(PackingError, match="a sample has a latent frame of its character"):
        packed_forward(model, samples.pack(packing))


def test_a_strip_leaves_a_place_for_the_frame_without_a_token() -> None:
    with pytest.raises(PackingError, match="strip_length=65 exceeds the 64 positions"):
        enable_packing(CASE.model(), strip_length=65)


@pytest.mark.parametrize("case", [CASE, CASES["wan image"]], ids=["wan-animate", "wan image"])
def test_image_tokens_without_layers_of_their_own_are_refused(case) -> None:
    with pytest.raises(PackingError, match="has `image_dim`, but no `added_kv_proj_dim`"):
        enable_packing(case.model(added_kv_proj_dim=None))
