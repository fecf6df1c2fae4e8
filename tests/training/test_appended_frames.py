"""Runs that append frames of their samples: what plans, streams and memory count, and runs from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from synthetic.media import Clip, make_media_dataset

from hf_bucketing import BucketingError, Size
from hf_bucketing.loaders.resume import resume
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import sample_shape
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.data import make_data
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.run_data import ModelTokens
from hf_bucketing.training.streamed import make_streamed_data, open_stream
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run

PIPELINE = "ltx-condition"
CONDITION = "first_frame+appended_keyframes@2:0.5,none:0.5"
PACK = {"batching": "pack", "max_tokens": 512, "strip_length": 16}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "bucket": ("prepared", {"max_tokens": 512, "train_batch_size": 4}),
    "pack": ("prepared", PACK),
    "stream": ("stream", {"streaming": True, "max_tokens": 512, "train_batch_size": 4}),
    "streamed-packs": ("stream", {"streaming": True, **PACK}),
}
each_mode = pytest.mark.parametrize("mode", MODES)
CLIPS = (Clip(9, 64, 96, 8), Clip(5, 64, 64, 8), Clip(1, 64, 64))
TOKENS = {9: (3 + 2) * 8 * 12, 5: (2 + 1) * 8 * 8, 1: 8 * 8}
"""Tokens of a sample by its frames, with those of the most frames that are appended: 2, but 1 of 2 latent frames."""


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("appended")
    made = {name: folder / name for name in ("prepared", "cached", "stream")} | {PIPELINE: tiny_folder(PIPELINE)}
    make_media_dataset(folder / "clips", num_samples=6, clips=CLIPS)
    for output, flags in {"prepared": {}, "stream": {"streaming": True}}.items():
        run_script_here(
            "prepare_dataset.py",
            dataset=folder / "clips",
            pretrained_model_name_or_path=made[PIPELINE],
            output_dir=made[output],
            target_fps=8,
            bucket_frames="1,5,9",
            buckets="64,96;64,64",
            **flags,
        )
    return made


def settings_of(mode: str, folders: dict[str, Path], output: Path, **settings: Any) -> TrainingConfig:
    data, flags = MODES[mode]
    common = {"lora_rank": 2, "max_sequence_length": 16, "condition": CONDITION}
    return in_process(folders[PIPELINE], folders[data], output, **{**common, **flags, **settings})


def make(config: TrainingConfig, pipeline: Path) -> Any:
    spec, tokens = recipe_of(str(pipeline)).read_spec(str(pipeline)), ModelTokens(width=32)
    if config.stream.streaming:
        return make_streamed_data(config, spec, tokens, opened=open_stream(config, Accelerator(cpu=True)))
    return make_data(config, spec, tokens)


@each_mode
def test_appended_frames_count_in_limits_and_in_the_largest_step(mode, folders, tmp_path: Path) -> None:
    data = make(settings_of(mode, folders, tmp_path), folders[PIPELINE])
    if mode in ("bucket", "pack"):
        assert {tuple(pair) for pair in zip(data.dataset["num_frames"], data.num_tokens.tolist(), strict=True)} == {
            *TOKENS.items()
        }
    accelerator = Accelerator(cpu=True)
    loader = resume(accelerator, accelerator.prepare(data.loader) if mode in ("bucket", "pack") else data.loader)
    for batch in loader:
        rows = data.rows_of(loader, batch, epoch=0)
        assert rows.tokens.tolist() == [TOKENS[size[0]] for size in batch["size"]]
        assert rows.tokens.sum() <= 512
    largest = data.largest_step()
    sizes, tokens = largest.sizes, largest.tokens
    assert tokens == sum(TOKENS[size.frames] for size in sizes)
    for size, shown in zip(sizes, largest.references, strict=True):
        assert shown == (size._replace(frames=1),) * {9: 2, 5: 1, 1: 0}[size.frames]


def test_the_memory_of_a_sample_is_planned_with_the_most_appended_frames(folders) -> None:
    components = read_components(str(folders[PIPELINE]))
    with_, without = (
        sample_shape(components, PlanConfig(condition=condition), Size(9, 64, 96)) for condition in (CONDITION, None)
    )
    assert with_.tokens == TOKENS[9]
    assert with_.tokens - without.tokens == 2 * 8 * 12
    assert len(with_.references) == 2


@pytest.mark.slow
@each_mode
def test_a_run_resumes_exactly(mode, folders, tmp_path: Path) -> None:
    settings = {"max_train_steps": 4, "checkpointing_steps": 2, "num_train_epochs": 4}
    whole = run(settings_of(mode, folders, tmp_path / "out", **settings))
    again = settings_of(mode, folders, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2")
    assert run(again) == whole
    without = {**settings, "condition": "first_frame:0.5,none:0.5"}
    assert run(settings_of(mode, folders, tmp_path / "without", **without)) != whole


@pytest.mark.slow
def test_tokens_that_fit_are_searched_with_appended_frames(folders, tmp_path: Path) -> None:
    config = settings_of("pack", folders, tmp_path / "out", max_tokens="auto", max_train_steps=1)
    run(config)
    assert (tmp_path / "out" / "training_config.json").read_text().count('"max_tokens": "auto"') == 0


@pytest.mark.slow
def test_a_cache_refuses_frames_that_it_does_not_hold(folders, tmp_path: Path) -> None:
    run_script_here(
        "cache_latents.py",
        dataset_dir=folders["prepared"],
        pretrained_model_name_or_path=folders[PIPELINE],
        cache_dir=tmp_path / "cache",
        output_dir=folders["cached"],
        batching="pack",
        max_sequence_length=16,
    )
    with pytest.raises(BucketingError, match=r"encodes the frames that it is shown.*not from a cache"):
        Trainer(settings_of("pack", {**folders, "prepared": folders["cached"]}, tmp_path / "out"))
