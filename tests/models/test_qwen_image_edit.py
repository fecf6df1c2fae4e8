"""Qwen-Image-Edit: text that sees the references, renders with and without them, and runs from files to losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessor

from hf_bucketing import BucketingError, Size
from hf_bucketing.media import write_image
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.first_frame import pictures
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.texts import TextEmbeddings
from hf_bucketing.packing import packed_forward
from tests.conftest import run_script_here
from tests.models.families.qwen_image import of_small_pictures
from tests.models.pipeline_calls import record_call
from tests.training.training_cases import in_process, run

EDIT, PLUS, CLEAN = "qwen-image-edit", "qwen-image-edit-2509", "qwen-image-edit-2511"
SIZES = ((40, 72), (64, 64), (96, 32), (50, 20))
"""Heights and widths of references."""
OPTIONS = {"num_inference_steps": 1, "true_cfg_scale": 1.0}


@pytest.fixture(scope="module")
def recipe_named(tiny_folder: Callable[[str], Path]) -> Callable[[str], Recipe]:
    """Return the recipe of a tiny pipeline."""

    @cache
    def load(name: str) -> Recipe:
        folder = str(tiny_folder(name))
        recipe = recipe_of(folder).load(folder, max_sequence_length=64)
        recipe.pipeline.set_progress_bar_config(disable=True)
        return recipe

    return load


def drawn(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    levels = [torch.randint(0, 256, (3, 1, *size), generator=generator) for size in SIZES[:count]]
    return [pixels / 255 * 2 - 1 for pixels in levels]


def frames_of(references: Sequence[torch.Tensor]) -> list[Any]:
    return [pictures(pixels.transpose(0, 1)) for pixels in references]


@pytest.mark.parametrize(("name", "count"), [(EDIT, 1), *((PLUS, count) for count in (1, 2, 4))])
def test_the_text_is_the_one_that_the_pipeline_passes_with_these_pictures(name: str, count: int, recipe_named) -> None:
    recipe, references = recipe_named(name), drawn(count)
    with of_small_pictures():
        shown = recipe.reference_arguments(frames_of(references), Size(1, 32, 32))
        call = record_call(recipe.pipeline, prompt="red", height=32, width=32, **shown, **OPTIONS)
        text = recipe.encode_text(["a blue circle", "red"], [[], references])
    assert call["encoder_hidden_states_mask"] is None
    assert text.mask.sum(1).tolist() == [46, call["encoder_hidden_states"].shape[1]]
    assert torch.equal(text.values[1][text.mask[1].bool()], call["encoder_hidden_states"][0])
    assert not torch.equal(text.values[1], recipe.encode_text(["red"], [references[:-1]]).values[0])


def test_long_captions_are_cut_and_pictures_are_not(recipe_named) -> None:
    recipe, references = recipe_named(PLUS), [drawn(2)]
    (whole,), _, _ = replace(recipe, max_sequence_length=200).encode_text(["x" * 80], references)
    (cut,), _, _ = recipe.encode_text(["x" * 80], references)
    end = len("<|im_end|>\n<|im_start|>assistant\n")
    assert len(whole) - len(cut) == 80 + end - 64
    assert torch.equal(cut, whole[: len(cut)])


def test_a_plan_counts_what_the_encoder_makes_of_none_to_four_references(
    recipe_named, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, processor = recipe_named(PLUS), Qwen2VLImageProcessor()  # of the published size
    monkeypatch.setattr(recipe.pipeline.processor, "image_processor", processor)
    letters, tokens = len("Picture 1: "), 5  # of the tiny tokenizer and of the published one
    lengths = [
        recipe.encode_text(["red"], [[torch.zeros(3, 1, 46, 50)] * count]).values.shape[1] for count in range(5)
    ]
    counted = recipe.reference_condition().text_tokens - tokens + letters
    assert [length - lengths[0] for length in lengths] == [count * counted for count in range(5)]


@pytest.mark.parametrize(("name", "beside"), [(EDIT, 2), (PLUS, 7)])
def test_no_picture_of_up_to_five_to_one_takes_more_text_than_is_counted(
    name: str, beside: int, recipe_named, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, processor = recipe_named(name), Qwen2VLImageProcessor(max_pixels=2 * 1024**2)
    monkeypatch.setattr(recipe.pipeline.image_processor, "resize", lambda _, height, width: (height, width))
    sides = [(10_000, round(10_000 * ratio)) for ratio in np.geomspace(1, 5, 2_000)]
    shown = [recipe._for_text(SimpleNamespace(width=w, height=h)) for w, h in [*sides, *(s[::-1] for s in sides)]]
    patches = [processor.get_number_of_image_patches(*size, {}) for size in shown]
    assert max(patches) // 4 + beside == recipe.reference_condition().text_tokens


@pytest.mark.parametrize("name", [EDIT, PLUS])
def test_renders_have_references_or_none(name: str, recipe_named, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, calls, size = recipe_named(name), [], Size(1, 32, 48)
    hook = recipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    with of_small_pictures():
        for references in ([], drawn(1)):
            generator = torch.Generator().manual_seed(0)
            rendered = recipe.render("red", size, references=frames_of(references), generator=generator, **OPTIONS)
            assert rendered.shape == (1, 32, 48, 3)
            text = recipe.encode_text(["red"], [references])
            assert torch.equal(calls[-1]["encoder_hidden_states"], text.values)
    hook.remove()
    assert [len(call["img_shapes"][0]) for call in calls] == [1, 2]


def test_renders_with_more_references_than_the_pipeline_takes_are_refused(recipe_named) -> None:
    with pytest.raises(BucketingError, match="QwenImageEditPipeline takes at most 1 references, got 2"):
        recipe_named(EDIT).render("red", Size(1, 32, 48), references=frames_of(drawn(2)))


@torch.no_grad()
def test_a_pack_of_clean_references_warns_of_nothing(recipe_named, caplog: pytest.LogCaptureFixture) -> None:
    model = recipe_named(CLEAN).transformer
    latents, shown = [torch.randn(4, 1, 4, 4), torch.randn(4, 1, 6, 2)], [torch.randn(4, 1, 2, 6)]
    packing = enable_packing(model, strip_length=3)
    batch = packing.pack(
        latents, references=[shown, []], timesteps=torch.tensor([10.0, 500.0]), text=torch.randn(2, 5, 32)
    )
    caplog.clear()
    packed_forward(model, batch)
    disable_packing(model)
    assert len({tuple(shapes) for shapes in packing.family.rows(batch).conditioning["img_shapes"]}) > 1
    assert not caplog.records


def test_dropped_captions_of_another_length_are_padded() -> None:
    text = TextEmbeddings(torch.ones(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    empty = TextEmbeddings(torch.full((2, 5, 4), 2.0), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    values, mask, _ = text.replaced([True, False], empty)
    assert values[:, :, 0].tolist() == [[2, 2, 2, 2, 2], [1, 1, 1, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images with none to three references."""
    folder, rng, rows = tmp_path_factory.mktemp("edits"), np.random.default_rng(0), []

    def write(name: str, size: tuple[int, int]) -> str:
        write_image(folder / name, rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        return name

    for row in range(8):
        references = [write(f"{row}-{number}.png", SIZES[number]) for number in range(row % 4)]
        file = write(f"{row}.png", (48, 32) if row % 2 else (32, 48))
        rows.append({"file_name": file, "caption": "red " * (1 + row % 3), "reference": references})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_stacks_packs_and_caches_of_samples_with_none_to_three_references_agree(
    edits: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, prepared = tiny_folder(CLEAN), tmp_path / "prepared"
    run_script_here(
        "prepare_dataset.py",
        dataset=edits,
        output_dir=prepared,
        pretrained_model_name_or_path=pipeline,
        buckets="32,48;48,32",
        bucket_frames=1,
        max_frames=1,
        reference_column="reference",
        reference_pixels=48 * 32,
    )
    losses = {}
    for batching in ("bucket", "pack"):
        run_script_here(
            "cache_latents.py",
            dataset_dir=prepared,
            cache_dir=tmp_path / "cache",
            output_dir=tmp_path / f"cached-{batching}",
            pretrained_model_name_or_path=pipeline,
            batching=batching,
            max_sequence_length=64,
        )
        settings = {"max_sequence_length": 64, "max_train_steps": None, "num_train_epochs": 2, "caption_dropout": 0.5}
        settings |= {"learning_rate": 1e-5, "batching": batching}
        settings |= {"max_tokens": 900, "strip_length": 8} if batching == "pack" else {}
        for data in (prepared, tmp_path / f"cached-{batching}"):
            out = tmp_path / f"{batching}-{data.name}"
            losses[batching, data.name] = run(in_process(pipeline, data, out, **settings))
            assert np.isfinite(losses[batching, data.name]).all()
        assert losses[batching, "prepared"] == pytest.approx(losses[batching, f"cached-{batching}"], rel=1e-4)


def test_the_text_encoder_sees_the_reference_that_the_pipeline_resizes_once(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = str(tiny_folder("qwen-image-edit"))
    recipe = recipe_of(folder).load(folder)
    rule = recipe.reference_rule().in_pixels((16, 16))
    ((_, height, width),) = rule.sizes([[1, 1000, 2022]], [[1, 64, 64]]).tolist()
    (picture,) = pictures(torch.zeros(1, 3, height, width))
    assert picture.size == recipe._for_text(picture).size == (1472, 736)  # resized again, it would be 1440×736
