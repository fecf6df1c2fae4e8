"""Every setting of a run does something, and impossible ones are errors."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.columns import CacheInfo, PreparedDataset
from hf_bucketing.media import ViewRule
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.data import make_data
from hf_bucketing.training.history import losses_of
from hf_bucketing.training.loop import Trainer
from tests.conftest import run_script_here


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Let each test begin without the state that accelerate keeps in a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def in_process(pipeline: Path, prepared: Path, output: Path, **settings) -> TrainingConfig:
    common = {"report_to": "none", "dataloader_num_workers": 0, "max_sequence_length": 32, "max_train_steps": 3,
              "train_batch_size": 2, "learning_rate": 5e-3}  # fmt: skip
    return TrainingConfig(pretrained_model_name_or_path=str(pipeline), dataset_dir=str(prepared),
                          output_dir=str(output), **{**common, **settings})  # fmt: skip


def run(config: TrainingConfig) -> list[float]:
    Trainer(config).run()
    return losses_of(Path(config.output_dir))


@pytest.mark.slow
def test_settings_change_the_run(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    def losses(name: str, **settings) -> list[float]:
        return run(in_process(pipeline_dir, prepared_dir, tmp_path / name, **settings))

    plain = losses("plain")
    assert losses("again") == plain
    for number, settings in enumerate([
        {"seed": 1}, {"weighting_scheme": "uniform"}, {"lr_scheduler": "cosine"}, {"max_grad_norm": 0.01},
        {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 3}, {"adam_weight_decay": 50.0},
        {"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_epsilon": 0.1}, {"max_sequence_length": 16},
        {"capacity": 300}, {"caption_dropout": 1.0}, {"center_crop": True},
        {"lora_rank": 2}, {"lora_rank": 2, "lora_alpha": 64}, {"lora_rank": 2, "lora_targets": "to_q"},
        {"flip_probability": 1.0},
        {"longest_first": True}, {"tail": "drop"}, {"tail": "repeat"},
    ]):  # fmt: skip
        changed = losses(str(number), **settings)
        assert changed != plain, settings
        plain = losses("adapters", lora_rank=2) if settings == {"lora_rank": 2} else plain
        plain = losses("plain") if "lora_targets" in settings else plain
    packed = {"batching": "pack", "capacity": 640, "strip_length": 16}
    plain = losses("packed", **packed)
    for settings in (
        {"loss_reduction": "token"},
        {"random_resize": 32},
        {"pack_strategy": "sequential"},
        {"pack_strategy": "best_fit_decreasing"},
        {"balance": "cost"},
    ):
        assert losses("-".join(map(str, settings.values())), **packed, **settings) != plain, settings
    assert losses("strips", **{**packed, "strip_length": 1}) != plain, "the packs are others"


def test_the_settings_of_views_reach_the_collator(pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(ffmpeg_major_version=8))
    views = {"center_crop": True, "frame_picking": "uniform", "flip_probability": 0.3, "video_decoder": "torchcodec"}
    config = in_process(pipeline_dir, prepared_dir, tmp_path, **views)
    spec = PreparedDataset.load(prepared_dir).spec
    rule = ViewRule(random_crop=False, frame_picking="uniform", flip_probability=0.3, video_decoder="torchcodec")
    assert make_data(config, spec, width=96).loader.collate_fn.views == rule
    packs = dataclasses.replace(config, batching="pack", capacity="640", random_resize=32)
    collator = make_data(packs, spec, width=96).loader.collate_fn
    assert (collator.views, collator.resize.min_side) == (rule, 32)


@pytest.mark.parametrize("setting", [
    {"center_crop": True}, {"frame_picking": "start"}, {"flip_probability": 0.5}, {"video_decoder": "torchcodec"},
])  # fmt: skip
def test_cached_latents_refuse_what_changes_decoding(
    pipeline_dir, prepared_dir, tmp_path, monkeypatch, setting
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(ffmpeg_major_version=8))
    cache = CacheInfo(
        folder="cache", batching="bucket", latents_model="m", text_model=None, empty_text_key=None, views={}
    )
    prepared = dataclasses.replace(PreparedDataset.load(prepared_dir), cache=cache)
    prepared.save(tmp_path / "cached")
    config = in_process(pipeline_dir, tmp_path / "cached", tmp_path, **setting)
    with pytest.raises(BucketingError, match=f"`{next(iter(setting))}` change what is decoded"):
        make_data(config, prepared.spec, width=96)


def test_a_run_leaves_its_settings_and_its_metrics(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path, batching="pack", capacity=640, strip_length=16,
                        validation_prompts=["red"], validation_sizes="5,32,48", validation_steps=2,
                        validation_inference_steps=1, ema_decay=0.0)  # fmt: skip
    losses = run(config)
    assert TrainingConfig(**json.loads((tmp_path / "training_config.json").read_text())) == config
    entries = [json.loads(line) for line in (tmp_path / "logs" / "losses.jsonl").read_text().splitlines()]
    assert [entry["train_loss"] for entry in entries] == losses
    for entry in entries:
        assert 0 < entry["fill"] <= 1
        assert entry["imbalance"] == 1
        assert entry["tokens"] == pytest.approx(entry["fill"] * 640)
        assert entry["tokens_per_second"] > entry["samples_per_second"] > 0
        assert entry["seconds"] * entry["samples_per_second"] == pytest.approx(entry["samples"])
        levels = [value for name, value in entry.items() if name.startswith("loss_by_noise/")]
        assert min(levels) <= entry["train_loss"] <= max(levels)
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["step-2"]
    samples = [json.loads(line) for line in (tmp_path / "logs" / "samples-0.jsonl").read_text().splitlines()]
    assert [sum(one["loss"]) / len(one["loss"]) for one in samples] == pytest.approx(losses, abs=1e-5)


def test_the_8_bit_optimizer_trains_and_resumes(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50", reason="older ones take no steps on a CPU")
    eight = {"optimizer": "adamw_8bit", "max_train_steps": 4, "checkpointing_steps": 2}
    whole = run(in_process(pipeline_dir, prepared_dir, tmp_path / "whole", **eight))
    assert whole != run(in_process(pipeline_dir, prepared_dir, tmp_path / "plain", max_train_steps=4))
    parts = in_process(pipeline_dir, prepared_dir, tmp_path / "parts", **{**eight, "max_train_steps": 2})
    run(parts)
    assert run(dataclasses.replace(parts, max_train_steps=4, resume_from_checkpoint="latest")) == whole


def test_averaged_weights_are_saved(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")

    for name, decay in (("last", None), ("slow", 1.0), ("average", 0.5)):
        run(in_process(pipeline_dir, prepared_dir, tmp_path / name, ema_decay=decay))
    first, last, slow, average = (
        weights(path) for path in (pipeline_dir, *(tmp_path / n for n in ("last", "slow", "average")))
    )
    name = "blocks.0.attn1.to_q.weight"
    assert torch.equal(slow[name], first[name]) or float((slow[name] - first[name]).norm()) < float(
        (last[name] - first[name]).norm()
    )
    assert not torch.equal(average[name], last[name])
    assert float((average[name] - last[name]).norm()) < float((first[name] - last[name]).norm())


def test_a_dry_run_and_an_automatic_capacity_train_nothing(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch, capsys
) -> None:
    from hf_bucketing.training import budget
    from hf_bucketing.training import train as run_training

    tokens = PreparedDataset.load(prepared_dir).dataset["num_tokens"]
    original, tried = budget.find_capacity, []

    def small_memory(try_step, **limits):
        def limited(capacity: int) -> None:
            tried.append(capacity)
            try_step(capacity)
            if capacity > 1000:
                raise RuntimeError("CUDA out of memory.")

        return original(limited, **limits)

    monkeypatch.setattr(budget, "find_capacity", small_memory)
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", batching="pack", capacity="auto",
                        strip_length=16, dry_run=True)  # fmt: skip
    run_training(config)
    printed = capsys.readouterr().out
    assert tried[0] >= sum(tokens) * 0.9
    assert f"--capacity auto found {tried[-1]} tokens" in printed
    assert 900 <= tried[-1] <= 1000
    assert "Memory estimate per process" in printed
    assert "20 kept, 0 repeated" in printed
    assert not (tmp_path / "out" / "model_index.json").exists()


def test_samples_beyond_the_models_positions_are_refused_before_training(
    pipeline_dirs, media_dir, tmp_path: Path
) -> None:
    flags = ("--target_fps", 8, "--bucket_tokens", "400", "--bucket_frames", "1,17,25", "--output_dir", tmp_path / "p")
    latte = pipeline_dirs["latte"]
    run_script_here("prepare_dataset.py", "--dataset", media_dir, "--pretrained_model_name_or_path", latte, *flags)
    config = in_process(latte, tmp_path / "p", tmp_path, batching="pack", capacity=4000)
    with pytest.raises(BucketingError, match=r"cannot take the \d+ samples of .* 16 positions for frames"):
        Trainer(config)
    run_script_here(
        *("prepare_dataset.py", "--dataset", media_dir, "--pretrained_model_name_or_path", latte, *flags),
        *("--max_frames", 16),
    )
    data = PreparedDataset.load(tmp_path / "p")
    sizes = Trainer(config).data.sizes(np.arange(len(data.dataset)))
    cut = [min(frames, 16) for frames in data.dataset["num_frames"]]
    assert [size.frames for size in sizes] == cut
    assert max(data.dataset["num_frames"]) > 16
    assert len(run(config)) == 3


def test_running_out_of_memory_names_the_samples_and_what_to_lower(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path))

    def forward(*args, **kwargs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(trainer.recipe.transformer, "forward", forward)
    with pytest.raises(BucketingError, match=r"ran out on 2 samples .*lower `train_batch_size`, use `gradient_check"):
        trainer.run()


@pytest.mark.parametrize("change", [
    {"batching": "both"}, {"mixed_precision": "fp8"}, {"weighting_scheme": "cosmap"}, {"max_train_steps": 0},
    {"capacity": "much"}, {"capacity": 0}, {"caption_dropout": 2.0}, {"lora_alpha": 4}, {"balance": "cost"},
    {"optimizer": "sgd"}, {"seed": -1}, {"dataloader_num_workers": -1}, {"lr_warmup_steps": 5},
    {"video_decoder": "ffmpeg"},
])  # fmt: skip
def test_impossible_settings_are_errors(change) -> None:
    with pytest.raises(BucketingError):
        TrainingConfig(pretrained_model_name_or_path="m", dataset_dir="d", output_dir="o", **change)
