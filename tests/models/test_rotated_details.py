"""What is particular to Qwen-Image, CogView4 and HunyuanImage: refusals, and how their pipelines call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig

from hf_bucketing import BucketingError, PackingError
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing import packed_forward
from tests.models.cases import Samples, largest_difference
from tests.models.families import CASES
from tests.models.recipe_cases import samples_of


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("qwen-image", {"use_layer3d_rope": True}, "Qwen-Image-Layered"),
        ("qwen-image", {"use_additional_t_cond": True}, "Qwen-Image-Layered"),
        ("qwen-image", {"guidance_embeds": True}, "no embedding of guidance"),
        ("qwen-image", {"patch_size": 1}, "2×2 latent pixels.*got 1 and 16"),
        ("hunyuan-image", {"patch_size": (1, 1, 1), "rope_axes_dim": (4, 6, 6)}, r"patches of \(1, 1, 1\).*refiner"),
    ],
)
def test_variants_that_no_pack_holds_are_refused(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        enable_packing(CASES[name].model(**config))


def test_a_text_beyond_the_positions_of_qwen_image_is_refused() -> None:
    packing = enable_packing(CASES["qwen-image"].model())
    latents, timesteps = [torch.zeros(4, 1, 4, 40)], torch.ones(1)
    packing.pack(latents, timesteps=timesteps, text=[torch.zeros(4086, 16)])
    with pytest.raises(PackingError, match="sample 0 has 4087 tokens from position 10 on, and this model has 4096"):
        packing.pack(latents, timesteps=timesteps, text=[torch.zeros(4087, 16)])


def test_an_empty_text_of_hunyuan_image_is_refused() -> None:
    packing = enable_packing(CASES["hunyuan-image distilled"].model())
    with pytest.raises(PackingError, match="text 1 has none"):
        packing.pack(
            [torch.zeros(4, 1, 4, 4)] * 2,
            timesteps=torch.ones(2),
            text=[torch.zeros(1, 16), torch.zeros(0, 16)],
            conditioning={"guidance": torch.ones(2), "timestep_r": torch.ones(2)},
        )


@pytest.mark.parametrize("size", [(32, 48), (128, 128)])
def test_cogview4_gets_the_timesteps_of_its_pipeline_at_each_noise_level(size: tuple[int, int], tiny_folder) -> None:
    folder = str(tiny_folder("cogview4"))
    recipe = recipe_of(folder).load(folder, max_sequence_length=16)
    pipeline, timesteps = recipe.pipeline, []
    handle = recipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: timesteps.append(kwargs["timestep"][0]), with_kwargs=True
    )
    height, width = size
    pipeline("red", height=height, width=width, num_inference_steps=5, guidance_scale=1.0, output_type="latent")
    handle.remove()
    levels = pipeline.scheduler.sigmas[:-1]
    latents = torch.zeros(5, 4, 1, height // 8, width // 8)
    samples = samples_of(recipe, latents, fps=[1.0] * 5, timesteps=(1000 * levels).tolist())
    assert not torch.allclose(torch.stack(timesteps), 1000 * levels, rtol=1e-2)
    assert torch.allclose(recipe.model_inputs(samples).timesteps, torch.stack(timesteps), rtol=1e-5)


def test_cogview4_shifts_as_its_scheduler_says(tiny_folder) -> None:
    folder = str(tiny_folder("cogview4"))
    recipe = recipe_of(folder).load(folder)
    law: Any = recipe.shift()
    assert law(tokens=16, pixels=32 * 128) == pytest.approx(0.75 * 2 + 0.25)  # 16 tokens, 4 of them the base
    recipe.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    assert recipe.shift() == 2.0


def test_a_stack_has_no_more_padding_than_its_longest_text_needs(tiny_folder) -> None:
    folder = str(tiny_folder("qwen-image"))
    recipe = recipe_of(folder).load(folder, max_sequence_length=64)
    text = recipe.encode_text(["red", "a blue"])
    assert text.values.shape[1] == 64
    assert text.mask is not None
    lengths = text.mask.sum(1)
    assert lengths[1] - lengths[0] == 3
    assert text.trimmed().values.shape[1] == int(lengths[1]) == text.trimmed().mask.shape[1]


@torch.no_grad()
def test_words_in_quotation_marks_are_given_to_hunyuan_image_as_glyphs(tiny_folder) -> None:
    folder = str(tiny_folder("hunyuan-image"))
    recipe = recipe_of(folder).load(folder, max_sequence_length=64)
    captions = ['a sign "open"', "a sign", 'a sign "closed today"']
    latents = torch.randn(3, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    samples = samples_of(recipe, latents, fps=[1.0] * 3, timesteps=[100.0, 500.0, 900.0], captions=captions)
    inputs = recipe.model_inputs(samples)
    embeds, mask, glyphs, glyph_mask = recipe.pipeline.encode_prompt(captions, batch_size=3)
    assert glyph_mask.sum(1).tolist() == [14, 0, 22]  # Text "open". and so on, and the end
    expected = recipe.transformer(
        latents[:, :, 0], samples.noised.timesteps, embeds, mask, None, glyphs, glyph_mask, torch.full((3,), 1000.0)
    ).sample
    assert torch.allclose(recipe.predict(recipe.transformer, samples, inputs)[:, :, 0], expected, atol=1e-6)
    packing = enable_packing(recipe.transformer, strip_length=8)
    batch = packing.pack(
        list(latents),
        timesteps=inputs.timesteps,
        conditioning=inputs.conditioning,
        **samples.text.pack_kwargs(),
    )
    packed = torch.stack(batch.unpack(packed_forward(recipe.transformer, batch)))
    assert torch.allclose(packed[:, :, 0], expected, atol=1e-6)
    samples = samples_of(recipe, latents, fps=[1.0] * 3, timesteps=[100.0, 500.0, 900.0], captions=["a sign"] * 3)
    plain = recipe.conditioning(samples)["encoder_attention_mask_2"]
    assert plain.sum() == 0


def test_a_model_of_mean_flow_is_not_trained_by_flow_matching(tiny_folder) -> None:
    folder = str(tiny_folder("hunyuan-image"))
    recipe = recipe_of(folder).load(folder)
    recipe.transformer.register_to_config(use_meanflow=True)
    with pytest.raises(BucketingError, match="mean flow"):
        recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)


@pytest.mark.parametrize("name", ["qwen-image", "cogview4", "hunyuan-image"])
@torch.no_grad()
def test_the_scale_of_adapters_reaches_a_pack(name: str) -> None:
    model, samples = CASES[name].model(), Samples(case=CASES[name])
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    whole, half = (packed_forward(model, batch, attention_kwargs={"scale": scale}) for scale in (1.0, 0.5))
    assert largest_difference([whole], [packed_forward(model, batch)]) == 0
    model.set_adapters(["default"], [0.5])
    assert largest_difference([half], [packed_forward(model, batch)]) <= 1e-6
    assert largest_difference([half], [whole]) > 1e-5
