"""What Z-Image, Lumina 2 and Kandinsky 5 refuse, and what packing leaves of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.errors import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.families.kandinsky5 import Kandinsky5Recipe
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from tests.models.cases import Samples
from tests.models.families import CASES, kandinsky5, lumina2, z_image
from tests.models.recipe_cases import samples_of


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (kandinsky5.make, {"attention_type": "nabla"}, "NABLA"),
        (z_image.make, {"siglip_feat_dim": 8}, "siglip_feat_dim"),
        (z_image.make, {"all_patch_size": (4,)}, r"patches of \(4,\)"),
        (lumina2.make, {"axes_lens": (40, 32, 3)}, "strip_length=4 exceeds the 3 positions"),
    ],
)
def test_variants_that_strips_cannot_carry_are_refused_by_name(make: Any, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(PackingError, match=reason):
        enable_packing(make(**config), strip_length=4)


@pytest.mark.parametrize(("name", "longest"), [("z-image", 96), ("lumina2", 39)])
def test_a_text_leaves_a_position_for_the_image(name: str, longest: int) -> None:
    """Z-Image fills up 96 text tokens to as many, and 97 to 128, after which its 128 positions are taken."""
    case = CASES[name]
    sample = Samples(case=replace(case, sizes=((1, 4, 6),), text_lengths=(longest + 1,), timesteps=torch.ones(1)))
    packing = enable_packing(case.model(), strip_length=4)
    with pytest.raises(PackingError, match=rf"Text 0 has {longest + 1} tokens.* for {longest}"):
        sample.pack(packing)
    batch = sample.pack(packing, text=[sample.text[0][:longest]])
    assert batch.layout.text_lengths == (longest,)


@pytest.mark.parametrize("name", ["z-image", "lumina2"])
def test_videos_are_refused(name: str) -> None:
    case = CASES[name]
    samples = Samples(case=replace(case, sizes=((3, 4, 6),), text_lengths=(4,), timesteps=torch.ones(1)))
    with pytest.raises(PackingError, match=r"has a token grid of|takes images"):
        samples.pack(enable_packing(case.model(), strip_length=4))


def test_z_image_keeps_its_own_method_but_while_packing_is_enabled() -> None:
    model = CASES["z-image"].model()
    enable_packing(model, strip_length=4)
    copied = copy.deepcopy(model)
    disable_packing(model)
    assert "patchify_and_embed" not in vars(model)
    assert copied.patchify_and_embed.args[0] is copied
    disable_packing(copied)
    assert "patchify_and_embed" not in vars(copied)


def test_learned_tokens_of_z_image_take_no_strips_of_their_own() -> None:
    """Strips of 32 tokens hold those with which the model fills up 6, 32 and 33 tokens; attention sees 32, 32, 64."""
    case = CASES["z-image"]
    sizes = ((1, 4, 6), (1, 8, 16), (1, 6, 22))
    samples = Samples(case=replace(case, sizes=sizes, text_lengths=(1, 1, 1), timesteps=torch.ones(3)))
    layout = samples.pack(enable_packing(case.model(), strip_length=32)).layout
    assert layout.strips_per_sample == (1, 1, 2)
    assert layout.spans == ((0, 6), (32, 64), (64, 97))
    assert layout.self_segments.queries == ((0, 32), (32, 64), (64, 128))


@pytest.fixture(scope="module")
def kandinsky(tmp_path_factory: pytest.TempPathFactory) -> Kandinsky5Recipe:
    folder = tmp_path_factory.mktemp("kandinsky") / "pipeline"
    make_tiny_pipeline(folder, family="kandinsky5")
    recipe = Kandinsky5Recipe.load(str(folder), max_sequence_length=64)
    assert isinstance(recipe, Kandinsky5Recipe)
    return recipe


def test_kandinsky_refuses_stacks_whose_text_it_would_have_to_pad(kandinsky: Kandinsky5Recipe) -> None:
    samples = samples_of(kandinsky, fps=[8.0, 8.0], captions=["red", "a blue circle"])
    with pytest.raises(BucketingError, match=r"no mask for text.*tokens\. Train packs"):
        kandinsky.predict(kandinsky.transformer, samples, kandinsky.model_inputs(samples))
    assert kandinsky.refusal(samples_of(kandinsky, fps=[8.0, 8.0], captions=["red", "sky"])) is None


def test_kandinsky_scales_positions_by_the_size_of_each_sample(kandinsky: Kandinsky5Recipe) -> None:
    """Sides from 480 to 854 pixels have the scale of 480p, others that of 720p; there are 8 pixels in a latent one."""
    samples = samples_of(kandinsky, fps=[8.0, 8.0])
    noised = samples.noised._replace(latents=[torch.zeros(4, 1, 60, 104), torch.zeros(4, 1, 90, 160)])
    scales = kandinsky.conditioning(replace(samples, noised=noised))["scale_factor"]
    assert scales.tolist() == [[1, 2, 2], [1, pytest.approx(3.16), pytest.approx(3.16)]]
