"""Wan image-to-video: conditions, what is refused, and rendering with an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, Size
from hf_bucketing.caching.fingerprints import latents_fingerprint
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.configuration.outputs import ValidationConfig
from hf_bucketing.media import MediaSource, probe
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import Samples
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import plan_components
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.training.evaluation import Validation, images_of
from tests.conftest import run_script_here
from tests.models.recipe_cases import samples_of

NAMES = ("wan-i2v", "wan-flf2v", "wan-2.2-i2v", "wan-2.2-ti2v")


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Callable[[str], str]:
    """Return the folder of a tiny pipeline."""
    return lambda name: str(tiny_folder(name))


def load(folder: str, **options: Any) -> Recipe:
    return recipe_of(folder).load(folder, **options)


def clips(frames: int, count: int = 2, side: int = 64) -> torch.Tensor:
    """Return clips of pixels that 8 bits hold, as decoded media have them."""
    generator = torch.Generator().manual_seed(frames)
    return torch.randint(0, 256, (count, 3, frames, side, side), generator=generator).float() / 127.5 - 1


@pytest.mark.parametrize("name", NAMES)
def test_blank_conditions_have_the_shapes_of_encoded_ones(name: str, folder, monkeypatch) -> None:
    monkeypatch.setattr("hf_bucketing.models.families.wan.CLIP_TOKENS", 5)  # of the tiny image encoder
    recipe = load(folder(name))
    media = recipe.encode_media(clips(5))
    latents = media.pop("latents")
    blank = recipe.blank_conditions(latents[0])
    assert {key: values.shape for key, values in blank.items()} == {
        key: values.shape[1:] for key, values in media.items()
    }
    assert latents.shape[1] == recipe.latent_channels


@pytest.mark.parametrize("name", NAMES)
def test_without_the_part_vae_neither_vae_nor_image_encoder_are_opened(name: str, folder) -> None:
    cached = load(folder(name), loading=Loading(parts=("trained",)))
    assert cached.pipeline.vae is None
    assert cached.pipeline.image_encoder is None
    encoders = load(folder(name), loading=Loading(parts=("vae",), dtype=torch.bfloat16))
    assert encoders.transformer is None
    assert encoders.encode_media(clips(5)).keys() == load(folder(name)).encode_media(clips(5)).keys()
    assert {module.dtype for module in encoders.modules("vae")} == {torch.float32}


def test_caches_of_one_and_of_two_frames_have_different_keys(folder) -> None:
    first, both = (load(folder(name)) for name in ("wan-i2v", "wan-flf2v"))
    both.pipeline.vae.load_state_dict(first.pipeline.vae.state_dict())
    both.pipeline.vae.register_to_config(**{
        name: first.pipeline.vae.config[name] for name in ("latents_mean", "latents_std")
    })  # fmt: skip
    both.pipeline.image_encoder.load_state_dict(first.pipeline.image_encoder.state_dict())
    assert latents_fingerprint(first) != latents_fingerprint(both)


@pytest.mark.parametrize(("name", "fewest"), [("wan-i2v", 2), ("wan-flf2v", 3), ("wan-2.2-i2v", 2)])
def test_samples_that_are_all_condition_are_refused(name: str, fewest: int, folder) -> None:
    recipe = load(folder(name))
    assert recipe.fewest_frames == fewest
    with pytest.raises(BucketingError, match=r"nothing to predict.*without images"):
        recipe.encode_media(clips(1))
    table = BucketTable.parse("32,32", frames=[1, fewest])
    recipe.check_frames(table, [1, 1])
    with pytest.raises(BucketingError, match=rf"2 of the samples have fewer than the {fewest} frames.*without images"):
        recipe.check_frames(table, [0, 1, 0])


@torch.no_grad()
def test_an_image_is_text_to_image_where_the_first_frame_would_stay_clean(folder) -> None:
    recipe = load(folder("wan-2.2-ti2v"))
    image, video = (samples_of(recipe, torch.ones(1, 4, frames, 4, 4), fps=[8.0]) for frames in (1, 3))
    inputs = recipe.model_inputs(image)
    assert [levels.tolist() for levels in inputs.timesteps] == [[7.0]]
    assert all(bool((weight == 1).all()) for weight in inputs.weights)
    inputs = recipe.model_inputs(video)
    assert [levels.tolist() for levels in inputs.timesteps] == [[0.0, 7.0, 7.0]]
    assert inputs.weights[0].mean((0, 2, 3)).tolist() == [0, 1, 1]


def test_the_first_frame_stays_clean_and_the_rest_is_noisy(folder) -> None:
    recipe = load(folder("wan-2.2-ti2v"))
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    latents = list(recipe.encode_latents(clips(9)))
    noised = objective(latents, indices=[0, 1], epoch=0)
    samples = Samples(noised=noised, text=recipe.encode_text(["a", "b"]), fps=torch.tensor([8.0, 8.0]))
    for clean, noisy, shown in zip(latents, noised.latents, recipe.model_inputs(samples).latents, strict=True):
        assert torch.equal(shown[:, 0], clean[:, 0])
        assert torch.equal(shown[:, 1:], noisy[:, 1:])


def test_captions_of_another_length_are_refused_where_the_model_divides_them_from_image_tokens(folder) -> None:
    with pytest.raises(BucketingError, match="captions of 512 tokens"):
        load(folder("wan-i2v"), max_sequence_length=64)
    assert load(folder("wan-2.2-i2v"), max_sequence_length=64).max_sequence_length == 64


def test_a_text_to_video_pipeline_with_timesteps_per_token_becomes_image_to_video_when_saved_as_such(
    folder, tmp_path: Path
) -> None:
    from diffusers import WanImageToVideoPipeline

    assert recipe_of(folder("wan-2.2-t2v-5b")).takes_image is False
    WanImageToVideoPipeline.from_pretrained(folder("wan-2.2-t2v-5b")).save_pretrained(tmp_path)
    recipe = load(str(tmp_path))
    assert recipe.takes_image
    inputs = recipe.model_inputs(samples_of(recipe, torch.ones(1, 4, 2, 4, 4), fps=[8.0]))
    assert inputs.timesteps[0].tolist() == [0.0, 7.0]


def test_the_second_transformer_is_trained_at_low_noise(folder) -> None:
    recipe = load(folder("wan-2.2-i2v"), trained="transformer_2", loading=Loading(parts=("trained", "vae")))
    assert recipe.pipeline.transformer is None
    assert recipe.sigmas() == (0.0, 0.9)
    media = {name: list(values) for name, values in recipe.encode_media(clips(5)).items()}
    assert list(media) == ["latents", "image_latents"]


@pytest.mark.cases(slow=("wan-2.2-i2v",))
@pytest.mark.parametrize("name", NAMES)
def test_memory_is_planned_with_the_image_encoder(name: str, folder) -> None:
    components = read_components(folder(name))
    config = PlanConfig.from_flat(sample_size=[5, 64, 64], device="cpu", mixed_precision="no", train_batch_size=2)
    planned = plan_components(components, config).phases["media encoding"].vae
    recipe = load(folder(name))
    weights = sum(
        parameter.numel() * parameter.element_size()
        for part in recipe.modules("vae")
        for parameter in part.parameters()
    )
    assert planned >= weights


def save_image(path: Path, frame: torch.Tensor) -> str:
    Image.fromarray(((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()).save(path)
    return str(path)


@torch.no_grad()
def test_a_clip_with_a_clean_first_frame_begins_with_the_image_as_the_vae_returns_it(folder, tmp_path) -> None:
    recipe = load(folder("wan-2.2-ti2v"))
    frame = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4) * 2 - 1, (64, 96), mode="bilinear")[0]
    save_image(tmp_path / "first.png", frame)
    image = Image.open(tmp_path / "first.png")
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64}
    rendered = recipe.render("red", Size(5, 64, 96), image=image, **options)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    vae = recipe.pipeline.vae
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample[0, :, 0]
    expected = (decoded.clamp(-1, 1) / 2 + 0.5).permute(1, 2, 0).numpy()
    assert np.abs(rendered[0] - expected).max() < 1e-4
    assert np.abs(rendered[1] - expected).max() > 1e-2


def validation(recipe: Recipe, files: list[str], tmp_path: Path, size: Size) -> Validation:
    config = ValidationConfig(
        validation_prompts=["red", "blue"], validation_images=files, validation_inference_steps=1,
        validation_guidance_scale=1.0,
    )  # fmt: skip
    count = recipe.num_images(recipe.config)
    images = images_of(config, per_prompt=count, pipeline_class=recipe.pipeline_class)
    return Validation(
        config=config,
        images=images,
        references=[()] * len(images),
        rule=ReferenceRule(),
        sizes=[size],
        seed=0,
        folder=tmp_path,
    )


@pytest.mark.parametrize("name", ["wan-flf2v", "wan-2.2-ti2v"])
def test_validation_begins_each_prompt_with_its_image(name: str, folder, tmp_path, monkeypatch) -> None:
    recipe, size = load(folder(name)), Size(5, 64, 96)
    files = [
        save_image(tmp_path / f"{number}.png", frame) for number, frame in enumerate(clips(4, count=1)[0].unbind(1))
    ]
    files = files[: 2 * recipe.num_images(recipe.config)]
    shown = []
    render = type(recipe).render

    def recorded(self, prompt, size, *, image, last_image=None, **options):
        shown.append((prompt, image, last_image))
        return render(self, prompt, size, image=image, last_image=last_image, **options)

    monkeypatch.setattr(type(recipe), "render", recorded)
    validation(recipe, files, tmp_path / "out", size).render(recipe, Accelerator(cpu=True), step=1)
    assert [prompt for prompt, *_ in shown] == ["red", "blue"]
    assert {image.size for _, image, _ in shown} == {(96, 64)}
    assert all((last is None) == (name == "wan-2.2-ti2v") for *_, last in shown)
    facts = probe(MediaSource.from_cell(str(tmp_path / "out" / "step-1" / "5x64x96-red.mp4")))
    assert facts.num_frames == 5
    with pytest.raises(BucketingError, match=r"per prompt.*got 1"):
        validation(recipe, files[:1], tmp_path, size)


def test_validation_images_are_refused_where_there_is_nothing_to_begin(folder) -> None:
    with pytest.raises(BucketingError, match="no effect without `validation_prompts`"):
        ValidationConfig(validation_images=["a.png"])
    config = ValidationConfig(validation_prompts=["red"], validation_images=["a.png"])
    with pytest.raises(BucketingError, match="WanPipeline takes none"):
        images_of(config, per_prompt=0, pipeline_class="WanPipeline")


def test_the_script_samples_with_an_image_and_refuses_what_does_not_fit(folder, tmp_path) -> None:
    image = save_image(tmp_path / "first.png", clips(1, count=1)[0, :, 0])
    size = ("--height", 64, "--width", 64, "--num_inference_steps", 1)
    output = tmp_path / "clip.mp4"
    run_script_here(
        "sample_video.py", folder("wan-2.2-ti2v"), "--image", image, "--output", output, "--num_frames", 5, *size
    )
    assert probe(MediaSource.from_cell(str(output))).num_frames == 5
    png = tmp_path / "one.png"
    run_script_here("sample_video.py", folder("wan"), "--output", png, *size, "--max_sequence_length", 64)
    assert Image.open(png).size == (64, 64)
    for name, flags, message in (
        ("wan-2.2-ti2v", (), "begins with an image, and some end with one; give --image"),
        ("wan-flf2v", ("--image", image), "give --last_image"),
        ("wan", ("--image", image), "Omit --image: a WanPipeline takes none"),
        ("wan", ("--num_frames", 5), "holds one frame, not 5"),
    ):
        failed = run_script_here(
            "sample_video.py", folder(name), "--output", tmp_path / "x.png", *flags, *size, check=False
        )
        assert message in failed.stderr
