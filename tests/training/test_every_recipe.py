"""Every training recipe from files to a clip: two epochs in buckets and, from a cache, in packs; then a render."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Kandinsky6Transformer3DModel
from PIL import Image
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import loads_lora
from hf_bucketing.conditions.names import CONDITIONS, FRAME_BY_FRAME
from hf_bucketing.media import write_video
from hf_bucketing.models.calls import IMAGES
from hf_bucketing.models.index import index_file
from hf_bucketing.models.registry import recipe_of, recipes
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.settings import changed
from hf_bucketing.synthetic.media import DEMO_CLIPS, Clip, make_media_dataset
from tests.conftest import run_script_here
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin
from tests.models.recipe_cases import REFERENCE, RecipeCase, stock_pipeline
from tests.training.training_cases import in_process, run

PROMPT = "a red square moving right"

TWO_EPOCHS: dict[str, Any] = {
    "num_train_epochs": 2,
    "max_train_steps": None,
    "gradient_accumulation_steps": 2,
    "checkpointing_steps": 1,
    "validation_split": 0.2,
    "validation_noise_levels": 2,
}
PACK: dict[str, Any] = {"batching": "pack", "strip_length": 8, "train_batch_size": 1}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two wide videos and a tall one, two tall images and a wide one, at half the heights and widths of the demo's."""
    folder = tmp_path_factory.mktemp("media") / "clips"
    halves = [clip._replace(height=clip.height // 2, width=clip.width // 2) for clip in DEMO_CLIPS]
    clips = [halves[index] for index in (0, 1, 6, 0, 6, 8)]
    make_media_dataset(folder, num_samples=6, clips=clips)
    add_conditions(folder, clips)
    add_conditions(folder / "videos", clips)
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


@pytest.mark.parametrize(
    "name",
    [
        *one_per_kin(name for name in RECIPES if name != "wan-animate-2"),
        pytest.param("wan-animate-2", marks=pytest.mark.every),  # has runs of its own
    ],
)
def test_a_recipe_trains_on_files_resumes_and_diffusers_renders(
    name: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RECIPES[name]
    pipeline = tiny_folder(case.tiny)
    recipe = recipe_of(str(pipeline))
    common = {"max_sequence_length": case.max_sequence_length}
    runs = {
        "bucket": {**common, **case.bucket_settings},
        "pack": {**common, **PACK, "max_tokens": case.max_tokens},
    }
    if loads_lora(recipe.pipeline_type()):
        runs["pack"] |= {"lora_rank": 2}
    data = prepare(case, clips, pipeline, tmp_path)
    if case.one_size:
        settings = runs.pop("pack")
        with pytest.raises(BucketingError, match="cannot run other sizes"):
            run(in_process(pipeline, data["pack"], tmp_path / "refused", **settings))
    before = render(case, stock_pipeline(pipeline, **case.components))
    for batching, settings in runs.items():
        out = tmp_path / batching
        train_and_resume(pipeline, data[batching], out, **settings)
        trained = stock_pipeline(out if index_file(out) else pipeline, **case.components)
        if "lora_rank" in settings:
            card = (out / "README.md").read_text()
            assert ("pipeline.transformer.register_to_config(" in card) is bool(recipe.read_with_lora)
            trained.transformer.register_to_config(**recipe.read_with_lora)
            trained.load_lora_weights(str(out))
        rendered = render(case, trained)
        assert not np.array_equal(rendered, before)
        if recipe.takes_image:  # trained on few steps, the clip begins with the image as closely as untrained
            distances = [np.abs(clip[0] - first_frame(*clip.shape[1:3])).mean() for clip in (rendered, before)]
            assert distances[0] <= distances[1] + 0.01


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_kandinsky_6_trains_on_first_frames_from_files_and_caches_resumes_and_renders_from_one(
    batching: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RECIPES["kandinsky6"]
    pipeline, out = tiny_folder(case.tiny), tmp_path / "out"
    settings = {"bucket": {}, "pack": {**PACK, "max_tokens": 256}}[batching]
    settings |= {"max_sequence_length": 64, "condition": "appended_first_frame:0.6,none:0.4"}
    data = prepare(case, clips, pipeline, tmp_path, condition=settings["condition"])[batching]
    train_and_resume(pipeline, data, out, **settings)
    trained, before = (
        Kandinsky6Transformer3DModel.from_pretrained(folder / "transformer").visual_token_type_embeddings.weight
        for folder in (out, pipeline)
    )
    assert not torch.equal(trained, before)
    resumed = {**settings, **TWO_EPOCHS, "resume_from_checkpoint": "checkpoint-1"}
    with pytest.raises(BucketingError, match="appended frames, and `condition` appends none: it would train other"):
        run(in_process(pipeline, data, out, **{**resumed, "condition": "none"}))
    ramp = tmp_path / "ramp.png"
    Image.fromarray((first_frame(32, 48) * 255).astype(np.uint8)).save(ramp)
    rendered = {}
    for name, image in {"image": {"image": ramp}, "text": {}}.items():
        size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 64}
        run_script_here("sample_video.py", out, output=tmp_path / f"{name}.mp4", **size, **image)
        rendered[name] = (tmp_path / f"{name}.mp4").read_bytes()
    assert rendered["image"] != rendered["text"]


@pytest.mark.cases(slow=("bucket",))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_minimax_h3_trains_on_first_and_last_frames_and_resumes(
    batching: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RECIPES["minimax-h3"]
    pipeline = tiny_folder(case.tiny)
    settings = {"bucket": case.bucket_settings, "pack": {**PACK, "max_tokens": 1024}}[batching]
    shares = "appended_first_frame:0.4,appended_first_frame+appended_last_frame:0.4,appended_last_frame:0.2:0.5"
    data = prepare(case, clips, pipeline, tmp_path)
    train_and_resume(pipeline, data["bucket"], tmp_path / "out", condition=shares, max_sequence_length=16, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("batching", [pytest.param("bucket", marks=pytest.mark.every), "pack"])
def test_minimax_h3_trains_its_transformer_of_references_resumes_and_renders_with_one(
    batching: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = replace(RECIPES["minimax-h3"], shown=REFERENCE)
    pipeline, out = tiny_folder(case.tiny), tmp_path / "out"
    settings = {"bucket": {}, "pack": {**PACK, "max_tokens": 512, "lora_rank": 2}}[batching]
    settings |= {"max_sequence_length": 64, "trained_component": "transformer_ref"}
    data = prepare(case, clips, pipeline, tmp_path)
    picture = clips / "conditions" / "0-reference.png"
    rendered: dict[str, Any] = {
        "validation_prompts": [PROMPT],
        "validation_references": [str(picture)],
        "validation_sizes": "124,32,64",
        "validation_fps": 24,
        "validation_inference_steps": 2,
        "validation_steps": 2,
    }
    train_and_resume(pipeline, data[batching], out, **settings, **(rendered if batching == "bucket" else {}))
    assert batching == "pack" or [*out.glob("validation/step-2/*.mp4")]
    assert "MiniMaxH3ImageReference.from_file" in (out / "README.md").read_text()
    with pytest.raises(BucketingError, match=r"\(--trained_component transformer_ref\)"):
        run(in_process(pipeline, data["bucket"], tmp_path / "refused", max_sequence_length=16))
    if batching == "pack":
        once = {**settings, **TWO_EPOCHS, "num_train_epochs": 1}
        files = run(in_process(pipeline, data["bucket"], tmp_path / "files", **once, random_crop=False))
        cached = run(in_process(pipeline, data["pack"], tmp_path / "cached-again", **once))
        assert cached == pytest.approx(files, rel=1e-4)
    lora = {"lora_weights": out} if batching == "pack" else {}
    frames = {}
    for name, source in {"before": (pipeline, {}), "after": (pipeline if lora else out, lora)}.items():
        run_script_here(
            "sample_video.py",
            source[0],
            output=tmp_path / f"{name}.mp4",
            trained_component="transformer_ref",
            reference=picture,
            height=32,
            width=64,
            num_inference_steps=2,
            num_frames=124,
            **source[1],
        )
        frames[name] = (tmp_path / f"{name}.mp4").read_bytes()
    assert frames["before"] != frames["after"]


@pytest.mark.slow
def test_minimax_h3_takes_no_videos_as_references(
    clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    refused = run_script_here(
        "prepare_dataset.py",
        dataset=clips,
        output_dir=tmp_path,
        pretrained_model_name_or_path=tiny_folder("minimax-h3"),
        buckets=RECIPES["minimax-h3"].buckets,
        reference_column="control",
        check=False,
    )
    assert re.search(r"control\.mp4 is a video, and the model takes pictures alone", refused.stderr)


def prepare(case: RecipeCase, clips: Path, pipeline: Path, folder: Path, **cached: str | None) -> dict[str, Path]:
    """Prepare the files for a recipe, and cache them, with these settings; return what each way of batching reads."""
    shown = case.shown[-1] if case.shown else ()
    recipe = recipe_of(str(pipeline))
    frames = "1" if recipe.family.images_only else case.bucket_frames
    rule = recipe.reference_rule()
    enlarged = "reference" in shown and (rule.area or rule.shapes)
    run_script_here(
        "prepare_dataset.py",
        dataset=clips if case.images else clips / "videos",
        output_dir=folder / "prepared",
        pretrained_model_name_or_path=pipeline,
        target_fps=case.target_fps,
        buckets=case.buckets,
        bucket_frames=frames,
        max_frames=max(map(int, frames.split(","))),
        **{f"{name}_column": name for name in shown},
        **({"reference_pixels": 32 * 48} if enlarged else {}),
    )
    run_script_here(
        "cache_latents.py",
        dataset_dir=folder / "prepared",
        cache_dir=folder / "cache",
        output_dir=folder / "cached",
        pretrained_model_name_or_path=pipeline,
        batching="pack",
        max_sequence_length=case.max_sequence_length,
        **cached,
    )
    return {"bucket": folder / "prepared", "pack": folder / "cached"}


def train_and_resume(pipeline: Path, data: Path, out: Path, **settings: Any) -> None:
    """Train two epochs, then the second one again from the checkpoint before it: losses and weights are the same."""
    config = in_process(pipeline, data, out, **TWO_EPOCHS, **settings)
    losses = run(config)
    assert np.isfinite(losses).all()
    epochs = [line["epoch"] for line in read_log(out, "losses")]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    held_out = read_log(out, "validation")[-1]
    assert held_out["samples"] == 1
    assert [level["samples"] for level in held_out["by_noise"]] == [1, 1]
    weights = trained_weights(out)
    resumed = changed(config, resume_from_checkpoint=f"checkpoint-{epochs.count(0)}", checkpointing_steps=None)
    assert run(resumed) == losses
    assert [line["global_step"] for line in read_log(out, "resumes")] == [epochs.count(0)]
    assert trained_weights(out) == weights


def trained_weights(out: Path) -> dict[str, bytes]:
    """Return the bytes of the tensors that a run has trained and saved."""
    files = [out / "pytorch_lora_weights.safetensors", *out.glob("transformer*/*.safetensors")]
    weights = {
        f"{path.relative_to(out)}: {name}": values.numpy().tobytes()
        for path in files
        if path.is_file()
        for name, values in load_file(path).items()
    }
    assert weights
    return weights


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
