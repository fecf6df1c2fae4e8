"""A model that is kin to another is a declaration: that of docs/models/adding-a-model.md packs and trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel

from hf_bucketing import PackingError
from hf_bucketing.models import families as package, registry
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import families, family_of, find_family, find_recipe, recipe_of, recipes
from hf_bucketing.packing.batch import Rows
from hf_bucketing.synthetic.pipelines.wan import components, transformer
from tests.conftest import ROOT
from tests.docs.pages import Page
from tests.models.cases import CASES, Samples, largest_difference, packed_outputs
from tests.training.training_cases import in_process, run

pytestmark = pytest.mark.usefixtures("hooks_that_look")  # the forward below is of this module

PAGE = ROOT / "docs" / "models" / "adding-a-model.md"
LOOK_UPS = [look_up for look_up in vars(registry).values() if hasattr(look_up, "cache_clear")]


class ExampleTransformer3DModel(WanTransformer3DModel):
    """Wan with timesteps from 0 to 1 and a mask of its text, as if diffusers had it."""

    __module__ = WanTransformer3DModel.__module__

    def forward(self, *, timestep: torch.Tensor, encoder_attention_mask: torch.Tensor | None, **inputs: Any) -> Any:
        if encoder_attention_mask is not None:
            inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, : int(encoder_attention_mask.sum())]
        return super().forward(timestep=timestep * 1000, **inputs)


class ExamplePipeline(WanPipeline):
    """Its pipeline."""

    __module__ = WanPipeline.__module__


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recipe]]:
    """Return the recipe of the page's module, which lies in a folder of its own."""
    (module,) = (block for block in Page(PAGE.name, PAGE.read_text()).blocks("python") if "RECIPES = " in block)
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "example.py").write_text(module)
    for kind in (ExampleTransformer3DModel, ExamplePipeline):
        monkeypatch.setattr(diffusers, kind.__name__, kind, raising=False)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "families")])
    for look_up in LOOK_UPS:
        look_up.cache_clear()
    yield recipes()["ExamplePipeline"]
    for look_up in LOOK_UPS:
        look_up.cache_clear()
    del sys.modules[f"{package.__name__}.example"], package.example  # type: ignore[attr-defined]


def test_a_kin_model_is_a_declaration_of_twenty_lines(example: type[Recipe], tmp_path: Path) -> None:
    lines = (tmp_path / "families" / "example.py").read_text().splitlines()
    assert len([line for line in lines if line]) <= 20
    assert not [line for line in lines if "def " in line], "no method"
    assert families()["ExampleTransformer3DModel"] is example.family is find_family("ExampleTransformer3DModel")
    assert find_recipe("ExamplePipeline") is example


def test_its_packs_and_stacks_compute_what_the_model_computes_of_single_samples(example: type[Recipe]) -> None:
    def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        inputs = {
            "hidden_states": latent[None],
            "encoder_hidden_states": text[None],
            "timestep": timestep[None] / 1000,
        }
        return model(**inputs, encoder_attention_mask=None).sample[0]

    def make(**config: Any) -> ExampleTransformer3DModel:
        return ExampleTransformer3DModel(**CASES["wan"].model().config, **config)

    case = replace(CASES["wan"], make=make, alone=alone)
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    assert family_of(model) is example.family
    with torch.no_grad():
        expected = samples.alone(model)
        assert largest_difference(packed_outputs(model, samples), expected) <= 1e-12
        latent, timestep, text = samples.latents[0], samples.timesteps[0], samples.text[0]
        padded = torch.cat([text, torch.full_like(text[:3], 7.0)])[None]
        mask = (torch.arange(len(text) + 3) < len(text))[None]
        rows = Rows(latents=latent[None], timesteps=timestep[None], text=padded, text_mask=mask, patch=(1, 2, 2))
        assert largest_difference(list(example.family.run(model, rows)), expected[:1]) <= 1e-12, "the mask is passed"


def test_it_trains_from_files(example: type[Recipe], prepared_dir: Path, tmp_path: Path) -> None:
    pipeline, out = tmp_path / "pipeline", tmp_path / "out"
    torch.manual_seed(0)
    model = ExampleTransformer3DModel(**transformer().config)
    ExamplePipeline(**components(), transformer=model).save_pretrained(pipeline)
    assert recipe_of(str(pipeline)) is example
    losses = run(in_process(pipeline, prepared_dir, out, batching="pack", max_tokens=256, max_train_steps=1))
    assert len(losses) == 1
    trained = ExampleTransformer3DModel.from_pretrained(out / "transformer")
    assert not torch.equal(trained.patch_embedding.weight, model.patch_embedding.weight)


def test_without_a_declaration_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "ExampleTransformer3DModel", ExampleTransformer3DModel, raising=False)
    with pytest.raises(PackingError, match="ExampleTransformer3DModel overrides the forward of diffusers' Wan"):
        family_of(ExampleTransformer3DModel(**CASES["wan"].model().config))
