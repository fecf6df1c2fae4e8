"""What is particular to LTX-2: audio stays apart and untrained, frame rates and noise levels are each sample's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError, PackingError
from hf_bucketing.adapters.lora import start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.caching.fingerprints import text_fingerprint
from hf_bucketing.models import enable_packing, verify_packing
from hf_bucketing.models.families.ltx2 import FAMILY
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.batch import Rows
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.trace import TracedStep, trace
from tests.models.cases import Samples, largest_difference
from tests.models.families import CASES


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("ltx2")


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder), max_sequence_length=64)


@torch.no_grad()
def test_one_text_of_two_samples_is_modulated_by_the_noise_level_of_each() -> None:
    case = CASES["ltx2.3"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    samples.text = [samples.text[0]] * len(samples.text)
    expected = samples.alone(model)
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-11
    padded = samples.pack(packing, pad_to=110, pad_text_to=60)
    assert largest_difference(expected, padded.unpack(packed_forward(model, padded))) <= 1e-11
    samples.conditioning["sigma"] = samples.conditioning["sigma"].flip(0)
    other = samples.pack(packing)
    assert largest_difference(expected, other.unpack(packed_forward(model, other))) > 1e-3


@torch.no_grad()
def test_a_stack_has_the_frame_rate_of_each_row() -> None:
    case = CASES["ltx2"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    samples.text[4] = samples.text[0] + 1
    expected, rows = samples.alone(model), [0, 4]  # of one size, at 12 and 16 frames a second
    output = FAMILY.run(
        model,
        Rows(
            latents=torch.stack([samples.latents[row] for row in rows]),
            timesteps=samples.timesteps[rows],
            text=torch.stack([samples.text[row] for row in rows]),
            patch=(1, 1, 1),
            conditioning={name: values[rows] for name, values in samples.conditioning.items()},
        ),
    )
    assert largest_difference([expected[row] for row in rows], list(output)) <= 1e-11


def test_models_that_modulate_text_need_its_noise_level_and_others_do_not_take_it() -> None:
    for name, message in (("ltx2", "got {'fps': .*, 'sigma'"), ("ltx2.3", "needs conditioning .*'sigma'")):
        samples = Samples(case=CASES[name])
        conditioning = {"fps": torch.ones(6), **({"sigma": torch.ones(6)} if name == "ltx2" else {})}
        with pytest.raises(PackingError, match=message):
            samples.pack(enable_packing(CASES[name].model()), conditioning=conditioning)


@pytest.mark.parametrize("name", ["ltx2", "ltx2.3"])
def test_the_verifier_passes(name: str) -> None:
    model, samples = CASES[name].model(), Samples(case=CASES[name], order=(0, 1, 3))
    grids = [tuple(latent.shape[1:]) for latent in samples.latents]
    conditioning = FAMILY.draw_conditioning(model, grids)
    inputs = {"timesteps": samples.timesteps, "text": samples.text, "conditioning": conditioning}
    report = verify_packing(model, samples.latents, **inputs, strip_length=4)
    assert report.passed, str(report)


def test_audio_is_neither_trained_nor_adapted(recipe: Recipe) -> None:
    def of_audio(name: str) -> bool:
        return any(part in name for part in FAMILY.unused(recipe.transformer))

    parameters = dict(recipe.transformer.named_parameters())
    assert {name for name, parameter in parameters.items() if not parameter.requires_grad} == set(
        filter(of_audio, parameters)
    )
    assert any(map(of_audio, parameters))
    start_adapters(recipe.pipeline, AdapterConfig(lora_rank=2))
    adapted = [name for name, parameter in recipe.transformer.named_parameters() if parameter.requires_grad]
    assert len(adapted) == 2 * 2 * 8  # A and B, in two blocks, of four projections in self- and cross-attention
    assert not any(map(of_audio, adapted))


def test_a_length_that_the_connectors_cannot_fill_up_is_refused(folder: Path) -> None:
    with pytest.raises(BucketingError, match=r"`max_sequence_length` must be a multiple of 16, .* got 60"):
        recipe_of(str(folder)).load(str(folder), max_sequence_length=60)


@pytest.mark.slow
def test_a_plan_of_memory_counts_what_is_trained(folder: Path, recipe: Recipe) -> None:
    transformer = read_components(str(folder)).transformer
    traced = trace(TracedStep(transformer=transformer, latent_sizes=((2, 4, 4),), text_length=8))
    assert traced.trained == sum(
        parameter.numel() for parameter in recipe.transformer.parameters() if parameter.requires_grad
    )


@torch.no_grad()
def test_connectors_are_loaded_with_the_text_encoders_and_their_weights_count_in_the_cache(folder, recipe) -> None:
    loaded = type(recipe).load(str(folder), loading=Loading(parts=("trained", "vae"))).pipeline
    assert loaded.text_encoder is loaded.connectors is None
    assert loaded.audio_vae is not None
    other = type(recipe).load(str(folder), loading=Loading(parts=("trained", "text_encoders"))).pipeline
    assert other.connectors is not None
    assert other.vae is other.audio_vae is other.vocoder is None
    before = text_fingerprint(recipe)
    next(recipe.pipeline.connectors.parameters()).add_(1)
    assert text_fingerprint(recipe) != before
