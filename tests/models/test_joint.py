"""What is particular to models whose text tokens attend in one sequence with the tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from hypothesis import given, settings, strategies as st

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.families.cogvideox import centred
from hf_bucketing.models.joint import JointFamily
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import PackedJointAttnProcessor, packed_forward
from hf_bucketing.packing.layout import PackedLayout, best_text_slots
from hf_bucketing.packing.strips import to_strips
from tests.models.cases import CASES, JOINT, Samples, each_case, largest_difference, packed_outputs
from tests.models.joint_models import make_cogvideox, make_flux, make_hunyuan, make_sd3, make_sd35
from tests.packing.test_compile import Graphs


@pytest.mark.parametrize("name", ["sd3", "sd3.5", "cogvideox", "cogvideox-1.5", "flux"])
@torch.no_grad()
def test_empty_captions_and_long_ones_share_a_pack(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    samples.text[0] = samples.text[0][:0]
    samples.text[2] = torch.randn(40, 16)
    packing = enable_packing(model, strip_length=4)
    layout = samples.pack(packing).layout
    assert layout.strips_per_sample[2] * layout.text_slots < 40, "its text fills the slots of other samples' strips"
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
    assert layout.num_strips * (16 + layout.joint.text_slots) < (45 + 1) * (16 + 50) / 2


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
    for case in JOINT.values():
        model, samples = case.model(), Samples(case=case)
        texts = [text.requires_grad_() for text in samples.text]
        samples.loss_packed(model, enable_packing(model, strip_length=4)).backward()
        assert min(float(text.grad.abs().amax(1).min()) for text in texts) > 0


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=200)
def test_grids_are_centred_as_the_pipeline_centres_them(height: int, width: int, base_height: int, base_width: int):
    expected = get_resize_crop_region_for_grid((height, width), base_width, base_height)
    assert centred(height, width, base=(base_height, base_width)) == expected


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
        ("sd3", 1, {"latent": (4, 2, 8, 4)}, "2 latent frames, but .* takes images"),
        ("sd3", 1, {"latent": (4, 1, 130, 2)}, "64 positions for rows"),
        ("flux", 3, {"latent": (4, 2, 6, 6)}, "2 latent frames, but .* takes images"),
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


@each_case(JOINT)
def test_a_fixed_text_length_is_a_multiple_of_the_strips(case) -> None:
    samples, packing = Samples(case=case), enable_packing(case.model(), strip_length=4)
    assert samples.pack(packing, pad_to=120, pad_text_to=480).layout.text_slots == 4
    assert samples.pack(packing, pad_to=120).layout.num_strips == 120
    for pad_to, pad_text_to in ((None, 480), (120, 500), (120, 0)):
        with pytest.raises(PackingError, match="multiple of pad_to"):
            samples.pack(packing, pad_to=pad_to, pad_text_to=pad_text_to)


def test_text_slots_are_a_multiple_of_the_processes_that_share_them() -> None:
    family = family_of(make_flux())
    layout = PackedLayout(grids=((1, 2, 4),), text_lengths=(5,), strip_length=4, processes=2)
    fitted, _ = family.fit_text(None, layout, pad_to=None, pad_text_to=None)
    assert (best_text_slots(layout), fitted.text_slots, fitted.row_sizes) == (3, 4, (2, 2))
    with pytest.raises(PackingError, match=r"a multiple of pad_to, times the 2 processes .*, got 9 and 3"):
        family.fit_text(None, layout, pad_to=3, pad_text_to=9)


@pytest.mark.parametrize("name", ["sd3", "cogvideox", "flux", "hunyuan"])
def test_packs_of_small_and_large_images_with_long_texts_are_filled(name: str) -> None:
    model = CASES[name].model()
    family, draws, fills = family_of(model), random.Random(0), []
    for _ in range(50):  # 256 to 1,024 pixels, in tokens of 16
        grids = tuple((1, draws.randint(16, 64), draws.randint(16, 64)) for _ in range(draws.randint(4, 16)))
        layout = PackedLayout(grids=grids, text_lengths=(333,) * len(grids), strip_length=64)
        layout, _ = JointFamily.fit_text(family, model, layout, pad_to=None, pad_text_to=None)
        entries = layout.num_strips * (layout.strip_length + layout.text_slots)
        fills.append((sum(layout.lengths) + sum(layout.text_lengths)) / entries)
    assert sum(fills) / len(fills) >= 0.95


@pytest.mark.parametrize("name", ["cogvideox", "cogvideox-1.5", "cogvideox-sincos", "hunyuan"])
@torch.no_grad()
def test_a_video_whose_last_frames_are_dropped_is_a_shorter_one(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case, order=(0, 1, 2))
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    kept = tuple(torch.arange(h * w) for _, h, w in batch.layout.grids)
    layout = replace(batch.layout, kept=kept)
    layout = replace(layout, text_slots=best_text_slots(layout))
    dropped = replace(batch, strips=to_strips(samples.latents, batch.patch, layout=layout), layout=layout)
    outputs = dropped.unpack(packed_forward(model, dropped))
    disable_packing(model)
    frames = batch.patch[0]
    samples.latents = [latent[:, :frames] for latent in samples.latents]
    assert largest_difference(samples.alone(model), [output[:, :frames] for output in outputs]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["flux", *(pytest.param(name, marks=pytest.mark.every) for name in ("sd3.5", "hunyuan", "cogvideox"))],
)
@torch.no_grad()
def test_packs_of_one_shape_need_no_further_graph(name: str) -> None:
    torch._dynamo.reset()
    case, graphs = CASES[name], Graphs()
    fewer = {"hunyuan": {"num_single_layers": 1, "num_refiner_layers": 1}, "flux": {"num_single_layers": 1}}
    model = case.model(num_layers=1, **fewer.get(name, {}))
    packing = enable_packing(model, strip_length=4, backend="dense")
    compiled = torch.compile(model, backend=graphs)
    counts = []
    for seed, order in enumerate([(0, 1), (5, 3, 2, 2), (4,), (1, 2, 3, 4, 5)]):
        batch = Samples(case=case, seed=seed, order=order).pack(packing, pad_to=120, pad_text_to=480)
        assert largest_difference([packed_forward(compiled, batch)], [packed_forward(model, batch)]) <= 1e-6
        counts.append(graphs.count)
    assert 0 < counts[-1] <= counts[1] + 2
    torch._dynamo.reset()
