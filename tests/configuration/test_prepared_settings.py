"""Settings of preparing and of caching that changed after a folder was made are refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.columns.source_lists import settings_of_sources, sources_from
from hf_bucketing.command_line.config_file import PRESETS, read_config_file, write_config
from hf_bucketing.commands import prepare
from hf_bucketing.commands.script_settings import settings_kept
from hf_bucketing.configuration.prepared import check_same_settings
from hf_bucketing.errors import BucketingError
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import settings_to_repeat
from tests.conftest import run_script_here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of a cached folder of two sources, as its config.yaml holds them."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "stills").mkdir()
    monkeypatch.chdir(tmp_path)
    table = TableConfig(bucket_tokens=[60, 110], bucket_frames=[1, 9], bucket_sizes=[(64, 96), (96, 64)])
    sources = [
        SourceConfig(dataset="clips", target_fps=8.0, repeats=3.0, table=table),
        SourceConfig(dataset="stills", target_fps=8.0, caption_template="TOK, {caption}", table=table),
    ]
    cache = {"views_per_sample": 2, "flip_probability": 0.5, "max_sequence_length": 64, "batch_size": 8}
    folders = {"dataset_dir": "prepared", "cache_dir": "cache"}
    settings = {
        "prepare_dataset": {"pretrained_model_name_or_path": "model", "output_dir": "prepared"},
        "sources": settings_of_sources(sources),
        "cache_latents": {**folders, **cache},
    }
    (tmp_path / "config.yaml").write_text(write_config(settings))
    return read_config_file("config.yaml").plain()


def refused(text: str, settings: dict[str, Any], **options: Any) -> str:
    """Return what is refused of a file; `""` for nothing."""
    Path("run.yaml").write_text(text)
    file = read_config_file("run.yaml", find_paths=True)
    try:
        check_same_settings(file, "cached", settings=settings, **options)
    except BucketingError as error:
        return str(error)
    return ""


def test_settings_that_mean_the_same_pass(folder: dict[str, Any], tmp_path: Path) -> None:
    here = tmp_path / "clips"
    for text in (
        "lora_rank: 4\n",
        "target_fps: 8\nbucket_tokens: [60, 110]\nbucket_frames: 1,9\nbucket_sizes: 64,96;96,64\n",
        "bucket_tokens: '60,110'\nbucket_sizes:\n- [64, 96]\n- [96, 64]\nclips:\nsplit: train\naspect_step: 0.08\n",
        f"dataset: [{here}/, stills]\nprepare_dataset:\n  target_fps: 8.0\n",
        "target_fps: 8\nsources:\n- dataset: clips\n  repeats: 3\n- {dataset: ./stills, repeats: 1, name: stills}\n",
        "target_fps: 4\nprepare_dataset: {target_fps: 8}\n",
        "on_error: reject\nflip_probability: 0.25\nmax_sequence_length: 16\nseed: 3\n",
        "views_per_sample: 2\nbatch_size: 1\ncache_latents: {flip_probability: 0.50, max_sequence_length: 64}\n",
        "caption_template: 'TOK, {caption}'\n",  # of one source, where the other may have its own
    ):
        assert refused(text, folder) == "", text
    assert refused("target_fps: 4\n", {}) == "", "folders of earlier versions do not hold their settings"
    assert refused("views_per_sample: 4\n", folder, cached=False) == ""


def test_settings_that_differ_are_named_with_both_values(folder: dict[str, Any], tmp_path: Path) -> None:
    for text, differences in {
        "target_fps: 4\nbucket_tokens: [60, 220]\n": "target_fps is 4 and was 8; bucket_tokens is 60,220 and was "
        "60,110",
        "buckets: 64,96\n": "buckets is 64,96 and was not given",
        "clips: head\n": "clips is head and was not given",
        "sources:\n- {dataset: clips, repeats: 1}\n- {dataset: clips}\n": "repeats of clips is 1 and was 3; dataset "
        f"of stills is {tmp_path / 'clips'} and was {tmp_path / 'stills'}",
        "dataset: clips\n": f"sources is clips and was {tmp_path / 'clips'},{tmp_path / 'stills'}",
        "views_per_sample: 4\n": "views_per_sample is 4 and was 2",
        "max_sequence_length: 8\ncache_latents: {max_sequence_length: 16}\n": "max_sequence_length is 16 and was 64",
    }.items():
        differences = differences.replace(f"is {tmp_path / 'clips'}", "is clips")
        said = refused(text, folder)
        assert f"than those of run.yaml: {differences}. Give the values" in said, said
    said = refused("target_fps: 4\n", folder)
    prepared, clips, stills = (tmp_path / name for name in ("prepared", "clips", "stills"))
    assert said.endswith(
        f"hf_bucketing prepare --config run.yaml --output_dir {prepared} --dataset {clips} {stills} "
        "--pretrained_model_name_or_path model && hf_bucketing cache --config run.yaml --dataset_dir "
        f"{prepared} --cache_dir {tmp_path / 'cache'} --output_dir cached"
    )
    assert "hf_bucketing prepare" not in refused("views_per_sample: 4\n", folder)
    with pytest.raises(BucketingError, match="those of this command: target_fps is 4 and was 8"):
        check_same_settings(None, "cached", settings=folder, flags={"target_fps": 4.0})


def test_a_folder_that_was_moved_with_its_files_is_compared_by_their_names(
    folder: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("clips", "stills"):
        (tmp_path / "moved" / name).mkdir(parents=True)
        (tmp_path / name).rmdir()
    assert refused("dataset: [moved/clips, moved/stills]\n", folder) == ""
    assert "dataset of clips is" in refused("dataset: [moved/stills, moved/clips]\n", folder)


def test_a_run_records_what_was_prepared_and_cached_in_place_of_its_file(folder: dict[str, Any]) -> None:
    Path("run.yaml").write_text(
        "target_fps: 8\nbucket_tokens: 60,110\nmax_upscale: 1\non_error: reject\ngpu_memory: 24\ncache_dir: cache\n"
        "prepare_dataset: {num_proc: 2}\ncache_latents: {batch_size: 3}\n"
        "sources:\n- dataset: clips\n- dataset: stills\n"
    )
    config = TrainingConfig(pretrained_model_name_or_path="m", dataset_dir="cached", output_dir="o")
    saved = settings_to_repeat(config, made_with=folder, kept=partial(settings_kept, read_config_file("run.yaml")))
    del saved["train_text_to_video"]
    assert saved == {"on_error": "reject", "gpu_memory": "24", "cache_dir": "cache", **folder}
    assert refused(write_config(saved), folder) == ""


def test_every_script_that_reads_a_folder_refuses_a_file_of_other_settings(
    prepared_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bucket_tokens: [60, 220]\ntarget_fps: 8\n")
    common = {"config": file, "check": False}
    model = {"pretrained_model_name_or_path": pipeline_dir}
    out = {"output_dir": tmp_path / "out"}
    difference = "bucket_tokens is 60,220 and was 60,110,150"
    for said in (
        run_script_here("train_text_to_video.py", dataset_dir=prepared_dir, dry_run=True, **common, **model, **out),
        run_script_here(
            "cache_latents.py", dataset_dir=prepared_dir, cache_dir=tmp_path / "cache", **common, **model, **out
        ),
        run_script_here("suggest_run.py", dataset=prepared_dir, gpu_memory=24, **common, **model, **out),
        run_script_here("report_buckets.py", prepared_dir, **common),
    ):
        assert (said.returncode, difference in said.stderr) == (1, True), said.stderr[-2000:]
    said = run_script_here(
        "suggest_run.py", dataset=prepared_dir, target_fps=4, gpu_memory=24, check=False, **model, **out
    )
    assert "target_fps is 4 and was 8" in said.stderr


@pytest.mark.slow
def test_every_preset_fits_a_folder_that_was_prepared_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = sorted(PRESETS.glob("*/*.yaml"))
    assert presets
    monkeypatch.chdir(tmp_path)
    parser = prepare.make_parser()
    for preset in presets:
        args = parser.parse_args(["--config", str(preset), "--dataset", "clips", "--output_dir", "prepared"])
        made_with = write_config({"sources": settings_of_sources(sources_from(vars(args), args.config))})
        (tmp_path / "config.yaml").write_text(made_with)
        check_same_settings(args.config, "prepared", settings=read_config_file("config.yaml").plain())
        other = {"sources": [{"dataset": "clips", "bucket_tokens": ["1"]}]}
        with pytest.raises(
            BucketingError, match=f"{preset.name}: bucket_tokens is .* and was 1[.;].* --dataset clips"
        ):
            check_same_settings(args.config, "prepared", settings=other)
