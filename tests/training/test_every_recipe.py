"""Every training recipe from files to a clip: two steps on batches and, from a cache, on packs; then a render.

Variants of a pipeline, such as wan-i2v of wan, train from a cache alone: their steps on files are those of
tests/training/test_steps_on_a_device.py and tests/models/test_recipe_suite.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic.media import DEMO_CLIPS, Clip, make_media_dataset

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import loads_lora
from hf_bucketing.media import write_video
from hf_bucketing.media.conditions import CONDITIONS, FRAME_BY_FRAME
from hf_bucketing.models.calls import IMAGES
from hf_bucketing.models.index import index_file
from hf_bucketing.models.registry import recipe_of, recipes
from hf_bucketing.training.run_log import read_log
from tests.conftest import run_script_here
from tests.models.families import RECIPES, VARIANTS
from tests.models.recipe_cases import RecipeCase, stock_pipeline
from tests.training.training_cases import in_process, run

pytestmark = pytest.mark.slow

PROMPT = "a red square moving right"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten of the demo's videos and images, at half their heights and widths."""
    folder = tmp_path_factory.mktemp("media") / "clips"
    halves = [clip._replace(height=clip.height // 2, width=clip.width // 2) for clip in DEMO_CLIPS]
    make_media_dataset(folder, num_samples=10, clips=halves)
    add_conditions(folder, halves)
    add_conditions(folder / "videos", halves)
    return folder


def add_conditions(folder: Path, clips: Sequence[Clip]) -> None:
    """Write a file of each condition for each sample of a folder, and columns of their names."""
    metadata, rows = folder / "metadata.jsonl", []
    for line in metadata.read_text().splitlines():
        row = json.loads(line)
        number = int(Path(row["file_name"]).stem)
        clip, rng = clips[number % len(clips)], np.random.default_rng(number)
        moving = rng.integers(0, 256, (clip.frames, clip.height, clip.width, 3), dtype=np.uint8)
        moving[:, :, : clip.width // 2] = 255
        (folder / "conditions").mkdir(exist_ok=True)
        for name in CONDITIONS:
            is_video = name in FRAME_BY_FRAME and clip.frames > 1
            row[name] = f"conditions/{number}-{name}.{'mp4' if is_video else 'png'}"
            if is_video:
                write_video(folder / row[name], moving, fps=clip.fps)
            else:
                picture = Image.fromarray(moving[0])
                (picture.resize((72, 64)) if name == "reference" else picture).save(folder / row[name])
        rows.append(row)
    metadata.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_files_and_diffusers_renders(
    name: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RECIPES[name]
    pipeline, prepared = tiny_folder(case.tiny), tmp_path / "prepared"
    recipe = recipe_of(str(pipeline))
    shown = case.shown[-1] if case.shown else ()
    frames = "1" if recipe.family.images_only else case.bucket_frames
    run_script_here(
        "prepare_dataset.py",
        dataset=clips if case.images else clips / "videos",
        output_dir=prepared,
        pretrained_model_name_or_path=pipeline,
        target_fps=case.target_fps,
        buckets=case.buckets,
        bucket_frames=frames,
        max_frames=max(map(int, frames.split(","))),
        **{f"{name}_column": name for name in shown},
    )
    run_script_here(
        "cache_latents.py",
        dataset_dir=prepared,
        cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached",
        pretrained_model_name_or_path=pipeline,
        batching="pack",
        max_sequence_length=case.max_sequence_length,
    )
    common = {"max_train_steps": 2, "max_sequence_length": case.max_sequence_length}
    common |= {"validation_split": 0.2, "validation_noise_levels": 2}
    pack = {"batching": "pack", "max_tokens": case.max_tokens, "strip_length": 8, "train_batch_size": 1}
    adapters = {"lora_rank": 2} if loads_lora(recipe.pipeline_type()) else {}
    runs = {"bucket": (prepared, case.bucket_settings), "pack": (tmp_path / "cached", {**pack, **adapters})}
    if case.one_size:
        data, settings = runs.pop("pack")
        with pytest.raises(BucketingError, match="cannot run other sizes"):
            run(in_process(pipeline, data, tmp_path / "refused", **common, **settings))
    elif name in VARIANTS:
        del runs["bucket"]
    before = render(case, stock_pipeline(pipeline, **case.components))
    for batching, (data, settings) in runs.items():
        out = tmp_path / batching
        losses = run(in_process(pipeline, data, out, **common, **settings))
        assert len(losses) == 2
        assert np.isfinite(losses).all()
        _start, held_out = read_log(out, "validation")
        assert held_out["samples"] in (1, 2)
        assert [level["samples"] for level in held_out["by_noise"]] == [held_out["samples"]] * 2
        folder = out if index_file(out) else pipeline
        trained = stock_pipeline(folder, **case.components)
        if "lora_rank" in settings:
            trained.load_lora_weights(str(out))
        rendered = render(case, trained)
        assert not np.array_equal(rendered, before)
        if recipe.takes_image:  # trained on few steps, the clip begins with the image as closely as untrained
            distances = [np.abs(clip[0] - first_frame(*clip.shape[1:3])).mean() for clip in (rendered, before)]
            assert distances[0] <= distances[1] + 0.01


def render(case: RecipeCase, pipeline: Any) -> np.ndarray:
    """Call a stock pipeline, with the first and the last frame if it takes them."""
    height, width = (int(side) for side in case.buckets.split(";")[0].split(","))
    pipeline.set_progress_bar_config(disable=True)
    ramp = (first_frame(height, width) * 255).astype(np.uint8)
    recipe = recipes()[type(pipeline).__name__]
    count = recipe.num_images(pipeline.transformer.config) if recipe.takes_image else 0
    options = dict(zip(IMAGES[:count], [Image.fromarray(ramp)] * count, strict=True))
    if "height" in recipe.call_parameters():
        options |= {"height": height, "width": width}
    else:  # its sides have about this mean, in the image's ratio
        pipeline.target_size = int((height * width) ** 0.5)
    result = pipeline(
        prompt=PROMPT,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **options,
        **case.render,
    )
    pictures = recipe.frames_of(result)
    assert np.isfinite(pictures).all()
    assert pictures.shape[-1] in (3, 4)  # Qwen-Image 2.1 makes pictures with opacity
    assert "height" not in options or pictures.shape[-3:-1] == (height, width)
    return pictures


def first_frame(height: int, width: int) -> np.ndarray:
    """Return a picture that grows brighter from the first row to the last."""
    return np.linspace(0, 1, height * width * 3).reshape(height, width, 3)
