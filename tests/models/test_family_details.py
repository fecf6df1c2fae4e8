"""What is particular to single families: refusals, conditioning, fused projections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos
from diffusers.utils import is_torchvision_available

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing, verify_packing
from hf_bucketing.models.families import cosmos
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import PackedAttnProcessor, PackedLayout, packed_forward, use_layout
from hf_bucketing.packing.attention import dispatch, torch_backends
from hf_bucketing.packing.family import freeze_unused
from tests.models.cases import Samples, largest_difference
from tests.models.cross_models import make_cosmos
from tests.models.families import CASES, wan_vace
from tests.packing.flash_attention import flash_attention_4


@pytest.mark.parametrize("name", ["pixart", "wan", "wan image", "sd3", "cogvideox", "flux"])
@torch.no_grad()
def test_fused_projections_are_used(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    model.fuse_qkv_projections()
    outputs = samples.alone(model)
    for key, parameter in model.named_parameters():
        if any(part in key for part in (".to_k.", ".to_v.", ".add_k_proj.", ".add_v_proj.")):
            parameter.zero_()
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert largest_difference(outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


def test_missing_unknown_and_short_conditioning_are_refused_by_name() -> None:
    cases = [
        ("ltx", {}, r"needs conditioning \['rope_interpolation_scale'\], each with 6 rows; got none.*`model_inputs`"),
        ("cosmos", {"fps": torch.ones(5)}, r"\['fps'\], each with 6 rows; got {'fps': \(5,\)}"),
        ("pixart", {"resolution": torch.ones(6, 2)}, "needs conditioning none"),
        ("pixart conditioned", {"resolution": torch.ones(6, 2)}, "'aspect_ratio'"),
        ("wan image", {}, "encoder_hidden_states_image"),
    ]
    for name, conditioning, message in cases:
        samples = Samples(case=CASES[name])
        samples.conditioning = conditioning
        packing = enable_packing(CASES[name].model())
        with pytest.raises(PackingError, match=message):
            samples.pack(packing)


def test_videos_are_refused_by_a_model_of_images() -> None:
    case = CASES["pixart"]
    samples = Samples(case=case)
    samples.latents[2] = torch.zeros(4, 3, 4, 4)
    with pytest.raises(PackingError, match="Sample 2 has 3 latent frames, but PixArtTransformer2DModel takes images"):
        samples.pack(enable_packing(case.model()))


def test_image_to_video_refuses_texts_that_the_stock_model_would_cut_wrongly() -> None:
    samples = Samples(case=CASES["wan image"])
    samples.text[1] = samples.text[1][:500]
    model = CASES["wan image"].model()
    with pytest.raises(PackingError, match=r"texts of 512 tokens, .* text 1 has 500"):
        samples.pack(enable_packing(model))


def test_cosmos_refuses_what_packing_does_not_carry_or_the_machine_cannot_run() -> None:
    with pytest.raises(PackingError, match="image contexts"):
        enable_packing(make_cosmos(img_context_dim_in=8, img_context_dim_out=36))
    model: CosmosTransformer3DModel = make_cosmos(concat_padding_mask=True, in_channels=4)
    if is_torchvision_available():
        enable_packing(model)
    else:
        with pytest.raises(PackingError, match="install torchvision"):
            enable_packing(model)


@torch.no_grad()
def test_wan_2_2_with_a_timestep_for_every_token_of_a_video_is_one_timestep_per_sample() -> None:
    case = CASES["wan"]
    model, samples = case.model(), Samples(case=case)
    batch = samples.pack(enable_packing(model, strip_length=4))
    packed = batch.unpack(packed_forward(model, batch))
    disable_packing(model)
    expanded = [
        model(latent[None], timestep.expand(1, length), text[None]).sample[0]  # as expand_timesteps of its pipeline
        for latent, timestep, length, text in zip(
            samples.latents, samples.timesteps, batch.layout.lengths, samples.text, strict=True
        )
    ]
    assert largest_difference(expanded, packed) <= 1e-5


def test_a_processor_refuses_an_unknown_scope() -> None:
    with pytest.raises(PackingError, match=r"'spatial_position'.*got 'place'"):
        PackedAttnProcessor(scope="place")


def test_a_processor_refuses_modules_that_mix_tokens_outside_attention() -> None:
    from diffusers.models.attention_processor import Attention

    attention = Attention(query_dim=8, heads=2, dim_head=4, norm_num_groups=2, processor=PackedAttnProcessor())
    layout = PackedLayout(grids=((1, 1, 2),), text_lengths=(1,), strip_length=2)
    with use_layout(layout), pytest.raises(PackingError, match="group norm"):
        attention(torch.zeros(1, 2, 8))


@torch.no_grad()
def test_cosmos_with_a_padding_mask_gets_one_of_zeros(monkeypatch) -> None:
    resized = []

    def resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        resized.append(mask)
        return torch.nn.functional.interpolate(mask, size=size, mode=interpolation)

    modes = SimpleNamespace(NEAREST="nearest")
    torchvision = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=modes)
    monkeypatch.setattr(transformer_cosmos, "transforms", torchvision, raising=False)
    monkeypatch.setattr(cosmos, "is_torchvision_available", lambda: True)
    case = replace(CASES["cosmos"], make=partial(make_cosmos, concat_padding_mask=True))
    model, samples = case.model(), Samples(case=case)
    outputs = samples.alone(model)
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert largest_difference(outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5
    assert resized[-1].shape == (1, 1, 2, 8)
    assert not any(mask.any() for mask in resized)


def test_an_image_of_frame_rate_0_runs_in_a_cosmos_pack_as_the_model_runs_images() -> None:
    model, latents = make_cosmos(), [torch.randn(4, frames, 8, 12) for frames in (1, 3)]
    text, timesteps = torch.randn(2, 6, 16), torch.tensor([500.0, 20.0])
    rates = {"fps": torch.tensor([0.0, 12.0])}
    report = verify_packing(model, latents, timesteps=timesteps, text=text, conditioning=rates)
    assert report.passed, str(report)


@torch.no_grad()
def test_the_attention_of_latte_over_frames_stays_on_segments_where_auto_is_varlen(monkeypatch) -> None:
    """A flash kernel computes segments in blocks of 64 to 128, so it would compute 128 times as many tokens."""
    calls = []

    def offsets(query, key, value, segments, options):
        calls.append(("varlen", segments))
        return torch_backends.attend_by_segments(query, key, value, segments, options)

    def runs(query, key, value, segments, options):
        calls.append(("segments", segments))
        return torch_backends.attend_by_segments(query, key, value, segments, options)

    case = CASES["latte"]
    model, samples = case.model(), Samples(case=case, order=(0, 1))
    samples.latents = [torch.randn(4, 5, 16, 18), torch.randn(4, 1, 20, 16)]
    expected = samples.alone(model)
    monkeypatch.setattr(dispatch, "HALF", (torch.float32,))
    with flash_attention_4():
        monkeypatch.setattr(dispatch, "_BACKENDS", {"varlen:fa4": offsets, "segments": runs})
        batch = samples.pack(enable_packing(model, strip_length=16))
        assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-5
    over_frames = batch.layout.by_frame.spatial_positions
    assert len(over_frames.queries) == 8 * 9 + 10 * 8
    assert {name for name, segments in calls if segments is over_frames} == {"segments"}
    assert {name for name, segments in calls if segments is not over_frames} == {"varlen"}


@torch.no_grad()
def test_conditioning_of_the_size_of_latents_may_come_as_a_list_or_as_a_stack() -> None:
    case = wan_vace.CASES["wan-vace"]
    model, samples = case.model(), Samples(case=case, order=(0, 4))
    packing, control = enable_packing(model, strip_length=4), samples.conditioning["control_hidden_states"]
    assert isinstance(control, (list, tuple))
    outputs = packed_forward(model, samples.pack(packing))
    samples.conditioning["control_hidden_states"] = torch.stack(list(control))
    assert torch.equal(packed_forward(model, samples.pack(packing)), outputs)
    samples.conditioning["control_hidden_states"] = [values.mean((1, 2, 3)) for values in control]
    with pytest.raises(PackingError, match=r"has shape .*; expected \(channels, frames, height, width\)"):
        samples.pack(packing)
    samples.conditioning["control_hidden_states"] = list(control)[::-1]
    samples.conditioning["control_hidden_states"][0] = control[0][:, :, :2]
    with pytest.raises(PackingError, match="Expected tensors with the token grids"):
        samples.pack(packing)


@pytest.mark.parametrize(("name", "length"), [("longcat-image", 512), ("easyanimate", 256)])
def test_texts_of_another_length_than_the_one_of_a_pipeline_are_refused(name: str, length: int) -> None:
    samples = Samples(case=CASES[name])
    samples.text[1] = samples.text[1][:-1]
    with pytest.raises(PackingError, match=f"takes texts of {length} tokens, .* text 1 has {length - 1}"):
        samples.pack(enable_packing(CASES[name].model()))


def test_what_embeds_an_image_of_motif_video_is_frozen() -> None:
    model = CASES["motif-video"].model(image_embed_dim=8)
    freeze_unused(family_of(model), model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("image_embedder.")} != set()
