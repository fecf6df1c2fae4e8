"""Runs with references from files to a render: packs and batches, files and caches, and exact resumption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image
from safetensors.numpy import load_file

from hf_bucketing import BucketingError
from hf_bucketing.batching.streamed import open_stream
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.references import REFERENCE_SIZES, ReferenceRule
from hf_bucketing.media import write_video
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.runs.review import losses_of
from hf_bucketing.settings import changed
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from tests.conftest import as_flags, run_script_here
from tests.models.families import RECIPES
from tests.models.families.qwen_image import of_small_pictures
from tests.models.kin import one_per_kin
from tests.training.training_cases import count_samples, in_process, run, train, train_until

pytestmark = pytest.mark.slow

IN_CONTEXT = ("ltx", "ltx2-in-context")
"""Recipes whose references lie over their samples."""
NAMES = (
    "flux2",
    "flux2-klein",
    "flux2-klein-kv",
    "flux3",
    "flux-kontext",
    "qwen-image-edit",
    "qwen-image-edit-2509",
    "qwen-image-edit-2511",
    "qwen-image-2.1",
    "wan-vace",
    *IN_CONTEXT,
)
NUM_SAMPLES = 8
TEXT_TOKENS = 64
CLIPS = (Clip(9, 64, 96, 4), Clip(9, 96, 64, 4), Clip(1, 64, 96), Clip(1, 80, 80))
SIDES = ((64, 96), (96, 64), (80, 80))
"""Heights and widths of references that have sizes of their own."""


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> Iterator[None]:
    with of_small_pictures():
        yield


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of eight samples: of images, and of images and videos."""
    folder = tmp_path_factory.mktemp("media")
    make_samples(folder / "images", clips=[clip._replace(frames=1, fps=0) for clip in CLIPS])
    make_samples(folder / "videos", clips=CLIPS)
    return folder


def make_samples(folder: Path, *, clips: Sequence[Clip]) -> None:
    """Make samples with columns of 0 to 3 references, of at most one, and of 0 to 3 that lie over their sample."""
    make_media_dataset(folder, num_samples=NUM_SAMPLES, clips=clips)
    metadata, rows = folder / "metadata.jsonl", []
    for number, line in enumerate(metadata.read_text().splitlines()):
        row = json.loads(line)
        clip, rng = clips[int(Path(row["file_name"]).stem) % len(clips)], np.random.default_rng(number)
        files = [f"{number}_{position}.png" for position in range(number % 4)]
        for file, sides in zip(files, SIDES, strict=False):
            Image.fromarray(rng.integers(0, 256, (*sides, 3), dtype=np.uint8)).save(folder / file)
        over = f"{number}_over.{'png' if clip.frames == 1 else 'mp4'}"
        frames = rng.integers(0, 256, (clip.frames, clip.height, clip.width, 3), dtype=np.uint8)
        if clip.frames == 1:
            Image.fromarray(frames[0]).save(folder / over)
        else:
            write_video(folder / over, frames, fps=clip.fps)
        rows.append({**row, "several": files, "single": files[:1], "over": [over] * (number % 4)})
    metadata.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(name: str, clips: Path, pipeline: Path, output: Path, *, most: int, streaming: bool = False) -> None:
    """Prepare the media with at most so many references for a recipe, as rows or as a stream."""
    case, recipe = RECIPES[name], recipe_of(str(pipeline))
    images_only = recipe.family.images_only
    over = {"reference_downscale_factor": 2} if name in IN_CONTEXT else {}
    sizes = over or ({} if recipe.reference_condition().in_front else {"reference_pixels": 80 * 96})
    run_script_here(
        "prepare_dataset.py",
        dataset=clips / ("images" if images_only else "videos"),
        output_dir=output,
        pretrained_model_name_or_path=pipeline,
        target_fps=case.target_fps,
        buckets=case.buckets,
        bucket_frames="1" if images_only else "1,9",
        reference_column="over" if over else "several" if most > 1 else "single",
        **sizes,
        **({"streaming": True} if streaming else {}),
    )
    if streaming:
        return
    prepared = PreparedDataset.load(output)
    assert prepared.references.in_front == recipe.reference_condition().in_front
    counts = [len(sizes) // 3 for sizes in prepared.dataset[REFERENCE_SIZES]]
    assert counts == [min(number % 4, most) for number in range(NUM_SAMPLES)]


def settings_of(pipeline: Path, batching: str) -> dict[str, Any]:
    """Return the settings of an epoch of LoRA in batches, or in packs of three samples or a few more."""
    settings: dict[str, Any] = {"lora_rank": 2, "max_sequence_length": TEXT_TOKENS, "batching": batching}
    settings["train_batch_size"] = 1 if batching == "pack" else 2
    if batching == "pack":
        text = TEXT_TOKENS + recipe_of(str(pipeline)).reference_condition().text_tokens
        settings |= {"max_tokens": 3 * text + 192, "strip_length": 8}
    return {**settings, "max_train_steps": None, "num_train_epochs": 1}


def render(name: str, pipeline: Path, clips: Path, output: Path, **flags: object) -> np.ndarray:
    """Render a picture by the script, with a reference if the pipeline's call takes one."""
    if name in IN_CONTEXT:
        shown = {"reference": clips / "images" / "2_over.png", "reference_downscale_factor": 2}
    else:
        shown = {"reference": clips / "images" / "2_0.png", "reference_pixels": 80 * 96}
    recipe = recipe_of(str(pipeline))
    run_script_here(
        "sample_video.py",
        pipeline,
        output=output,
        height=128,
        width=192,
        num_inference_steps=2,
        **({"max_sequence_length": TEXT_TOKENS} if "max_sequence_length" in recipe.call_parameters() else {}),
        **flags,
        **(shown if "reference" in recipe.call_arguments() else {}),
    )
    return np.asarray(Image.open(output))


@pytest.mark.parametrize("name", one_per_kin(NAMES, few=True))
def test_a_recipe_trains_with_references_in_packs_and_batches_and_renders_with_one(
    name: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder(RECIPES[name].tiny)
    recipe = recipe_of(str(pipeline))
    prepare(name, clips, pipeline, tmp_path / "prepared", most=min(3, recipe.reference_condition().most))
    dropout = {} if recipe.reference_condition().in_front else {"reference_dropout": 0.2}
    for batching in ("bucket", "pack"):
        out = tmp_path / batching
        losses = run(in_process(pipeline, tmp_path / "prepared", out, **settings_of(pipeline, batching), **dropout))
        assert np.isfinite(losses).all()
        (epoch,) = count_samples(out)
        assert epoch.seen == NUM_SAMPLES
        assert len(losses) > 1
    before = render(name, pipeline, clips, tmp_path / "before.png")
    after = render(name, pipeline, clips, tmp_path / "after.png", lora_weights=tmp_path / "pack")
    assert not np.array_equal(before, after)


@pytest.mark.parametrize(
    "name",
    [
        "qwen-image-edit-2511",
        *(pytest.param(name, marks=pytest.mark.every) for name in ("flux2-klein-kv", "qwen-image-2.1", "wan-vace")),
    ],
)
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_cache_trains_as_the_files_and_a_resumed_run_repeats_itself(
    batching: str, name: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder(RECIPES[name].tiny)
    settings = settings_of(pipeline, batching)
    prepare(name, clips, pipeline, tmp_path / "files", most=3)
    run_script_here(
        "cache_latents.py",
        dataset_dir=tmp_path / "files",
        cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached",
        pretrained_model_name_or_path=pipeline,
        batching=batching,
        max_sequence_length=settings["max_sequence_length"],
    )
    settings |= {"checkpointing_steps": 2, "num_train_epochs": 2, "seed": 1}
    losses = {}
    for source, own in {"files": {"random_crop": False}, "cached": {}}.items():
        out = tmp_path / f"trained-{source}"
        losses[source] = run(in_process(pipeline, tmp_path / source, out, **settings, **own))
        assert len(losses[source]) > 2
        written = kept(out)
        resumed = in_process(
            pipeline, tmp_path / source, out, **settings, **own, resume_from_checkpoint="checkpoint-2"
        )
        run(resumed)
        assert losses_of(out) == losses[source]
        assert kept(out) == written
    assert losses["cached"] == pytest.approx(losses["files"], rel=1e-4)


@pytest.mark.parametrize("streaming", [False, True])
def test_preparing_names_or_rejects_rows_with_more_references_than_the_pipeline_takes(
    streaming: bool, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {
        "dataset": clips / "images",
        "pretrained_model_name_or_path": tiny_folder("flux-kontext"),
        "output_dir": tmp_path,
        "buckets": RECIPES["flux-kontext"].buckets,
        "reference_column": "several",
        **({"streaming": True} if streaming else {}),
    }
    refused = run_script_here("prepare_dataset.py", **settings, check=False)
    assert refused.returncode == 1
    assert "4 of 8 rows have conditions that do not fit" in refused.stderr
    assert re.search(
        r"row 2 \(\S+\.\w+\): It has 2 references, but the model takes at most 1: 2_1\.png \(column several\)",
        refused.stderr,
    )
    rejected = run_script_here("prepare_dataset.py", **settings, on_error="reject")
    assert "4 of 8 rows have conditions that do not fit" in rejected.stdout
    assert "Saved" in rejected.stdout


@pytest.mark.parametrize(("name", "batching"), [("flux2-klein", "bucket"), ("qwen-image-edit-2511", "pack")])
def test_a_resumed_stream_with_references_repeats_itself(
    name: str, batching: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, out = tiny_folder(RECIPES[name].tiny), tmp_path / "trained"
    prepare(name, clips, pipeline, tmp_path / "prepared", most=3, streaming=True)
    drawn = {"reference_dropout": 0.2} if batching == "bucket" else {"condition": "reference:0.7,none:0.3"}
    settings = {**settings_of(pipeline, batching), "streaming": True, "shuffle_buffer": 3, **drawn}
    settings |= {"checkpointing_steps": 7, "num_train_epochs": None, "max_train_steps": 9}
    losses = run(in_process(pipeline, tmp_path / "prepared", out, **settings))
    assert count_samples(out)[0].seen == NUM_SAMPLES
    whole = kept(out)
    run(in_process(pipeline, tmp_path / "prepared", out, **settings, resume_from_checkpoint="checkpoint-7"))
    assert losses_of(out) == losses
    assert kept(out) == whole


@pytest.mark.cases(slow=("pack-False",))
@pytest.mark.parametrize(("batching", "streaming"), [("pack", False), ("bucket", True)])
def test_a_killed_run_with_references_repeats_an_uninterrupted_one(
    batching: str, streaming: bool, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, prepared = tiny_folder("flux2-klein"), tmp_path / "prepared"
    prepare("flux2-klein", clips, pipeline, prepared, most=3, streaming=streaming)
    settings = {**settings_of(pipeline, batching), "reference_dropout": 0.2, "num_train_epochs": 2}
    settings |= {"checkpointing_steps": 2, "max_train_steps": 4}
    settings |= {"streaming": True, "steps_per_epoch": 2} if streaming else {}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(in_process(pipeline, prepared, whole, **settings, dataloader_num_workers=1))
    log = parts / "logs" / "losses.jsonl"
    train_until(
        lambda: log.exists() and log.read_text().count("\n") >= 3 and any(parts.glob("checkpoint-*")),
        *(pipeline, prepared, parts, *as_flags(**settings)),
        num_processes=1,
    )
    assert not (parts / "pytorch_lora_weights.safetensors").exists()
    resumed = in_process(
        pipeline, prepared, parts, **settings, dataloader_num_workers=1, resume_from_checkpoint="latest"
    )
    assert run(resumed) == expected
    assert len(expected) == 4
    assert kept(parts) == kept(whole)


def test_a_stream_rejects_rows_with_more_references_than_the_model_of_the_run_takes(
    clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder("flux2-klein")
    prepare("flux2-klein", clips, pipeline, tmp_path, most=3, streaming=True)
    config = in_process(pipeline, tmp_path, tmp_path / "out", streaming=True)
    taken, accelerator = ReferenceRule(most=2), Accelerator(cpu=True)
    assert len(list(open_stream(config, accelerator).dataset)) == NUM_SAMPLES
    with pytest.raises(BucketingError, match="It has 3 references, but the model takes at most 2"):
        list(open_stream(config, accelerator, taken=taken).dataset)
    rows = open_stream(changed(config, on_error="replace"), accelerator, taken=taken).dataset
    assert [row["rejection"] for row in rows].count("condition") == NUM_SAMPLES // 4


def kept(folder: Path) -> tuple[dict[str, bytes], str]:
    """Return the adapters and the log of samples of a run."""
    adapters = load_file(folder / "pytorch_lora_weights.safetensors")
    return {name: weights.tobytes() for name, weights in adapters.items()}, (
        folder / "logs" / "samples-0.jsonl"
    ).read_text()


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_processes_that_share_the_tokens_of_references_have_the_losses_of_one(
    batching: str, clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder("ltx")
    prepare("ltx", clips, pipeline, tmp_path / "prepared", most=3)
    settings = settings_of(pipeline, batching)
    expected = run(in_process(pipeline, tmp_path / "prepared", tmp_path / "one", **settings))
    given = {name: value for name, value in settings.items() if value is not None}
    train(pipeline, tmp_path / "prepared", tmp_path / "two", *as_flags(**given), "--context_parallel_degree", 2)
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    assert len(expected) > 2
