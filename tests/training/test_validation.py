"""Prompts that a run renders between its steps."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.command_line.config_file import write_config
from hf_bucketing.commands.train import make_parser
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.configuration.outputs import ValidationConfig
from hf_bucketing.errors import FlagError
from hf_bucketing.media import MediaSource, probe
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.evaluation import Validation, parse_sizes

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def load(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


def test_validation_sizes_are_read_and_checked() -> None:
    assert parse_sizes("1,64,64; 9,64,112", WAN) == [Size(1, 64, 64), Size(9, 64, 112)]
    with pytest.raises(BucketingError, match="frames,height,width"):
        parse_sizes("64x64", WAN)
    with pytest.raises(BucketingError, match="nearest"):
        parse_sizes("8,64,64", WAN)


@pytest.mark.parametrize(("family", "frames"), [("wan", 5), ("ltx", 5), ("latte", 16)])
def test_prompts_are_rendered_to_files_and_to_the_tracker(family, frames, pipeline_dirs, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    shown = {}

    class Tracker:
        name = "one of pictures"

        def log_images(self, values, step):
            shown.update({(name, step): images for name, images in values.items()})

    accelerator.trackers = [Tracker()]
    recipe = load(pipeline_dirs[family])
    recipe.transformer.train()
    validation = Validation(
        config=ValidationConfig(
            validation_prompts=["a red square!"],
            validation_inference_steps=2,
            validation_guidance_scale=2.0,
            validation_fps=8,
        ),
        images=[()],
        references=[()],
        rule=ReferenceRule(),
        sizes=[Size(frames, 32, 64)],
        seed=0,
        folder=tmp_path,
    )
    size = f"{frames}×32×64 (frames×height×width)"
    assert validation.describe() == f"1 prompt at {size} (--validation_sizes), in 2 steps each"
    validation.render(recipe, accelerator, step=3)
    name = f"{frames}x32x64-a-red-square"
    info = probe(MediaSource.from_cell(str(tmp_path / "step-3" / f"{name}.mp4")))
    assert (info.num_frames, info.height, info.width, info.fps) == (frames, 32, 64, 8.0)
    first = shown.pop((name, 3))
    assert first.shape == (min(frames, 8), 32, 64, 3)
    assert not shown
    assert recipe.transformer.training
    validation.render(recipe, accelerator, step=4)
    assert np.abs(first.astype(int) - shown[name, 4]).max() <= 1, "the same noise"


def test_prompts_that_begin_alike_are_rendered_to_files_of_their_own(tmp_path: Path) -> None:
    size, prompts = Size(1, 32, 64), ["a dog " * 20, "a dog " * 30, "a cat", "a dog " * 20]
    config = ValidationConfig(validation_prompts=prompts)
    validation = Validation(
        config=config,
        images=[()] * 4,
        references=[()] * 4,
        rule=ReferenceRule(),
        sizes=[size],
        seed=0,
        folder=tmp_path,
    )
    files = [validation.file_of(number, size, step=1) for number in range(4)]
    assert len({*files}) == 4
    assert files[2].name == "1x32x64-a-cat.png"
    assert files[3].stem == f"{files[0].stem}-3"


def test_every_prompt_is_rendered_at_every_size_as_by_the_pipeline_alone(pipeline_dirs, tmp_path: Path) -> None:
    recipe, prompts, sizes = load(pipeline_dirs["wan"]), ["red", "a blue square"], [Size(1, 32, 64), Size(1, 64, 32)]
    validation = Validation(
        config=ValidationConfig(
            validation_prompts=prompts, validation_inference_steps=2, validation_guidance_scale=2.0
        ),
        images=[(), ()],
        references=[(), ()],
        rule=ReferenceRule(),
        sizes=sizes,
        seed=0,
        folder=tmp_path,
    )
    validation.render(recipe, Accelerator(cpu=True), step=1)
    assert len([*tmp_path.rglob("*.png")]) == 4
    for size, (number, prompt) in product(sizes, enumerate(prompts)):
        with torch.no_grad():
            (frame,) = recipe.render(
                prompt,
                size,
                num_inference_steps=2,
                guidance_scale=2.0,
                generator=torch.Generator().manual_seed(0),
            )
        with Image.open(validation.file_of(number, size, step=1)) as picture:
            assert np.abs(np.asarray(picture) - frame * 255).max() <= 0.51


def test_files_of_earlier_runs_may_name_a_removed_setting_unless_they_use_it(tmp_path: Path) -> None:
    file, out = tmp_path / "config.yaml", ["--output_dir", str(tmp_path)]
    settings = {"pretrained_model_name_or_path": "p", "dataset_dir": "d", "validation_steps": 5}
    file.write_text(write_config({"train_text_to_video": {**settings, "validation_max_tokens": None}}))
    assert make_parser().parse_args(["--config", str(file), *out]).validation_steps == 5
    reason = (
        r"config\.yaml, line 2: there is no setting validation_max_tokens any more: prompts are rendered one after"
    )
    file.write_text("validation_steps: 5\nvalidation_max_tokens: 4096\n")
    with pytest.raises(FlagError, match=reason):
        make_parser().parse_args(["--config", str(file)])
    file.write_text("train_text_to_video:\n  validation_max_tokens: 4096\n")
    with pytest.raises(FlagError, match=reason):
        make_parser().parse_args(["--config", str(file)])
