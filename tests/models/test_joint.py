"""What is particular to models whose text tokens sit in the same attention sequence."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.cogvideox import centred
from hf_bucketing.models.registry import FAMILIES
from hf_bucketing.packing import PackedJointAttnProcessor, packed_forward
from hf_bucketing.packing.joint_family import JointFamily
from tests.models.joint_cases import JOINT_CASES, make_cogvideox, make_flux, make_hunyuan, make_sd3, make_sd35
from tests.packing.packing_cases import CASES, Samples, assert_same_gradients, gradients, largest_difference

JOINT = {name: CASES[name] for name in JOINT_CASES}


def packed_outputs(model, samples: Samples) -> list[torch.Tensor]:
    batch = samples.pack(enable_packing(model, strip_length=4))
    outputs = batch.unpack(packed_forward(model, batch))
    disable_packing(model)
    return outputs


@pytest.mark.parametrize("case", JOINT.values(), ids=JOINT.keys())
def test_two_packs_in_flight_keep_their_own_layouts(case) -> None:
    model = case.model()
    model.enable_gradient_checkpointing()
    both = Samples(case=case, order=(0, 1, 4)), Samples(case=case, order=(5, 2, 3, 3))
    expected = gradients(model, *[samples.loss_alone(model) for samples in both])
    packing = enable_packing(model, strip_length=4)
    losses = [samples.loss_packed(model, packing) for samples in both]
    assert_same_gradients(expected, gradients(model, *losses), 1e-4, without_gradient=case.without_gradient)


@pytest.mark.parametrize("case", JOINT.values(), ids=JOINT.keys())
@torch.no_grad()
def test_conditioning_can_be_drawn_to_try_a_model_out(case) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    given, grids = samples.conditioning, samples.pack(packing).layout.grids
    samples.conditioning = packing.family.draw_conditioning(model, grids)
    assert {name: values.shape for name, values in given.items()} == {
        name: values.shape for name, values in samples.conditioning.items()
    }
    assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()


@pytest.mark.parametrize("name", ["sd3", "sd3.5", "cogvideox", "cogvideox-1.5", "flux"])
@torch.no_grad()
def test_empty_captions_and_long_ones_share_a_pack(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    samples.text[0] = samples.text[0][:0]
    samples.text[2] = torch.randn(40, 16)
    packing = enable_packing(model, strip_length=4)
    assert samples.pack(packing).layout.rows[2] > 1, "a sample of one token has strips for its text"
    disable_packing(model)
    assert largest_difference(samples.alone(model), packed_outputs(model, samples)) <= 1e-5
    samples.text = [text[:0] for text in samples.text]
    assert largest_difference(samples.alone(model), packed_outputs(model, samples)) <= 1e-5


@torch.no_grad()
def test_an_image_of_one_token_does_not_widen_the_strips_of_a_video() -> None:
    case = CASES["cogvideox"]
    packing = enable_packing(case.model(), strip_length=16)
    latents, text = [torch.randn(4, 9, 16, 20), torch.randn(4, 1, 2, 2)], [torch.randn(50, 16)] * 2
    layout = packing.pack(latents, timesteps=torch.ones(2), text=text).layout
    assert layout.joint.text_slots < 10
    assert sum(layout.rows) * (16 + layout.joint.text_slots) < (45 + 1) * (16 + 50) / 2


@pytest.mark.parametrize("case", JOINT.values(), ids=JOINT.keys())
@torch.no_grad()
def test_models_cast_to_bfloat16_err_no_more_than_running_the_samples_alone(case) -> None:
    exact = Samples(case=case).alone(case.model())
    model, samples = case.model(torch.bfloat16), Samples(torch.bfloat16, case=case)
    alone = largest_difference(exact, samples.alone(model))
    assert 0 < largest_difference(exact, packed_outputs(model, samples)) <= 2 * alone


@pytest.mark.parametrize("name", ["sd3", "cogvideox", "flux"])
@torch.no_grad()
def test_fused_projections_are_used(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    model.fuse_qkv_projections()
    outputs = samples.alone(model)
    for part, parameter in model.named_parameters():
        if part.endswith(("to_k.weight", "add_v_proj.weight")):
            parameter.zero_()
    assert largest_difference(outputs, packed_outputs(model, samples)) <= 1e-5


@torch.no_grad()
def test_the_text_refiner_stays_the_stock_one_and_sees_one_row_per_sample() -> None:
    case = CASES["hunyuan"]
    model, samples = case.model(), Samples(case=case)
    batch = samples.pack(enable_packing(model, strip_length=4))
    seen = []
    model.context_embedder.token_refiner.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    packed_forward(model, batch)
    assert seen == [(len(samples.text), max(map(len, samples.text)), 32)]
    for name, processor in model.attn_processors.items():
        assert isinstance(processor, PackedJointAttnProcessor) != name.startswith("context_embedder.")


def test_every_text_token_takes_part_in_joint_attention() -> None:
    for name, family in FAMILIES.items():
        assert isinstance(family, JointFamily) == any(type(c.model()).__name__ == name for c in JOINT.values())
    for case in JOINT.values():
        model, samples = case.model(), Samples(case=case)
        texts = [text.requires_grad_() for text in samples.text]
        samples.loss_packed(model, enable_packing(model, strip_length=4)).backward()
        assert min(float(text.grad.abs().amax(1).min()) for text in texts) > 0


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=200)
def test_grids_are_centred_as_the_pipeline_centres_them(height: int, width: int, base_height: int, base_width: int):
    expected = get_resize_crop_region_for_grid((height, width), base_width, base_height)
    assert centred(height, width, whole=(base_height, base_width)) == expected


def test_models_that_packing_cannot_run_are_refused_with_the_reason() -> None:
    stale, skipping = make_sd3(), make_sd35(dual_attention_layers=())
    stale.fuse_qkv_projections()
    stale.unfuse_qkv_projections()
    skipping.fuse_qkv_projections()
    unfused = make_flux()
    unfused.fuse_qkv_projections()
    unfused.unfuse_qkv_projections()
    enable_packing(unfused)
    cases = {
        "pos_embed_max_size": lambda: enable_packing(make_sd3(pos_embed_max_size=None)),
        "exceeds the 64 positions": lambda: enable_packing(make_sd3(), strip_length=65),
        "holds fused projections that its processor does not use": lambda: enable_packing(stale),
        "skips the norms": lambda: enable_packing(skipping),
        "do not go together": lambda: enable_packing(
            make_cogvideox(patch_size_t=2, use_rotary_positional_embeddings=False)
        ),
        "token_replace": lambda: enable_packing(make_hunyuan(image_condition_type="token_replace")),
        "multiple of 4": lambda: enable_packing(make_flux(in_channels=18)),
    }
    for message, call in cases.items():
        with pytest.raises(PackingError, match=f"(?i){message}"):
            call()


@pytest.mark.parametrize(
    ("name", "sample", "change", "message"),
    [
        ("sd3", 1, {"latent": (4, 2, 8, 4)}, "1 positions for frames"),
        ("sd3", 1, {"latent": (4, 1, 130, 2)}, "64 positions for rows"),
        ("flux", 3, {"latent": (4, 2, 6, 6)}, "1 positions for frames"),
        ("cogvideox-learned", 2, {"latent": (8, 1, 10, 10)}, "learned positions .* for 5×6"),
        ("cogvideox-1.5", 0, {"latent": (4, 2, 12, 12)}, "5 positions for rows"),
        ("cogvideox-1.5", 0, {"latent": (4, 3, 4, 4)}, "does not divide into patches"),
        ("cogvideox-sincos", 4, {"text": (5, 16)}, "takes texts of 7 tokens"),
        ("hunyuan", 5, {"text": (0, 16)}, "mean of a text's tokens; text 5"),
    ],
)
def test_samples_that_the_model_cannot_run_are_refused_with_the_reason(name, sample, change, message) -> None:
    case = CASES[name]
    samples, packing = Samples(case=case), enable_packing(case.model(), strip_length=4)
    if "latent" in change:
        samples.latents[sample] = torch.zeros(change["latent"])
    else:
        samples.text[sample] = torch.zeros(change["text"])
    with pytest.raises(PackingError, match=message):
        samples.pack(packing)
