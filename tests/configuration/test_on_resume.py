"""What a resumed run takes from its checkpoint, what from its settings, and what it refuses; adapters' checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from diffusers import DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError, PlanError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, LORA_WEIGHTS
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.caching.fingerprints import weights_fingerprints
from hf_bucketing.configuration.on_resume import (
    ON_RESUME,
    applied_changes,
    check_references,
    resumed_config,
    settings_of,
)
from hf_bucketing.models.registry import families, recipe_of
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.settings import changed, names_of
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.checkpoint import PROGRESS, find_checkpoint
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run

Make = Callable[..., TrainingConfig]


@pytest.fixture
def make(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> Make:
    """Make settings of a short run."""

    def config(output: str = "out", **settings: Any) -> TrainingConfig:
        return in_process(pipeline_dir, prepared_dir, tmp_path / output, **settings)

    return config


def resumed(config: TrainingConfig, **settings: Any) -> TrainingConfig:
    return changed(config, resume_from_checkpoint="latest", **settings)


def messages(caplog) -> list[str]:
    """Messages without the number of the process that accelerate puts before them."""
    return [message.removeprefix("[RANK 0] ") for message in caplog.messages]


def learning_rates(config: TrainingConfig) -> list[float]:
    lines = (Path(config.output_dir) / "logs" / "losses.jsonl").read_text().splitlines()
    return [json.loads(line)["lr"] for line in lines]


def test_every_setting_has_one_rule_for_resuming() -> None:
    assert sorted(ON_RESUME) == sorted(names_of(TrainingConfig))


@pytest.mark.slow
def test_changed_settings_of_the_optimizer_are_applied_and_said(make: Make, caplog) -> None:
    caplog.set_level(logging.INFO)
    first = make(max_train_steps=2, checkpointing_steps=2, lr_scheduler="polynomial", num_train_epochs=2)
    run(first)
    changed = {"learning_rate": 1e-3, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_weight_decay": 0.5,
               "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "max_train_steps": 4}  # fmt: skip
    config = resumed(first, **changed)
    trainer = Trainer(config)
    caplog.clear()
    trainer._resume()
    group, plain = trainer.trained.optimizer.param_groups
    assert plain == {**group, "weight_decay": 0.0, "params": plain["params"]}, "biases and norms do not decay"
    assert group["betas"] == (0.5, 0.9)
    assert (group["weight_decay"], group["eps"], group["initial_lr"]) == (0.5, 1e-6, 1e-3)
    assert group["lr"] == pytest.approx(0.5e-3, rel=1e-3), "half of the four steps of the new schedule are left"
    assert trainer.trained.lr_scheduler.get_last_lr() == [group["lr"]] * 2
    (line,) = [line for line in messages(caplog) if line.startswith("Settings changed since checkpoint-2: ")]
    for name, value in changed.items():
        assert f"{name} {first.flat()[name]} → {value}" in line
    assert line.count("→") == len(changed)
    trainer.release()
    run(config)
    assert learning_rates(config)[2:] == pytest.approx([0.25e-3, 1e-7], rel=1e-2)
    assert len(losses_of(Path(config.output_dir))) == 4
    (logged,) = read_log(Path(config.output_dir), "resumes")
    assert (logged["global_step"], logged["num_processes"]) == (2, 1)
    assert line.endswith(", ".join(logged["changes"]))


@pytest.mark.slow
def test_a_run_resumed_with_the_same_settings_says_no_change_and_repeats_its_losses(make: Make, caplog) -> None:
    settings = {"lora_rank": 2, "lora_alpha": 6, "ema_decay": 0.5, "lr_scheduler": "cosine", "max_train_steps": 4}
    whole = run(make("whole", **settings))
    first = make(**settings, checkpointing_steps=2, checkpoints_total_limit=2)
    run(first)
    shutil.rmtree(Path(first.output_dir) / "checkpoint-4")
    caplog.set_level(logging.INFO)
    assert run(resumed(first, lora_alpha=None)) == whole, "an alpha that is not given is that of the checkpoint"
    assert "Resumed after optimizer step 2, in epoch 0" in messages(caplog)
    assert not any("Settings changed" in line for line in messages(caplog))


@pytest.mark.slow
def test_a_schedule_ends_with_a_run_that_was_resumed_with_other_windows(make: Make) -> None:
    first = make(max_train_steps=None, lr_scheduler="cosine", checkpointing_steps=4, checkpoints_total_limit=1)
    run(first)
    out = Path(first.output_dir)
    for path in sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[1:]:
        shutil.rmtree(path)
    step = int(next(iter(out.glob("checkpoint-*"))).name[11:])
    second = resumed(first, gradient_accumulation_steps=2, checkpointing_steps=None)
    total = len(run(second))
    assert step < total < len(learning_rates(first)) + step + 1
    assert learning_rates(second)[-1] == pytest.approx(0.0, abs=1e-9)


@pytest.fixture
def checked(make: Make) -> Callable[..., tuple[TrainingConfig, list[str]]]:
    """Resume a run of some settings with others, as far as settings are compared."""

    def check(before: dict[str, Any], after: dict[str, Any]) -> tuple[TrainingConfig, list[str]]:
        accelerator = Accelerator(cpu=True)
        saved = json.loads(json.dumps(settings_of(make(**before), accelerator)))
        config = make(**after)
        return resumed_config(saved, config, accelerator), applied_changes(saved, config, accelerator)

    return check


PACKED = {"batching": "pack", "max_tokens": 640}


@pytest.mark.parametrize(("before", "after", "message"), [
    ({}, {"batching": "pack", "max_tokens": 640}, "batching was bucket and is pack"),
    ({"lora_rank": 4}, {}, "lora_rank was 4 and is not given"),
    ({}, {"lora_rank": 4}, "lora_rank was not given and is 4"),
    ({"lora_rank": 4}, {"lora_rank": 8}, "lora_rank was 4 and is 8"),
    ({"lora_rank": 4, "lora_alpha": 8}, {"lora_rank": 4, "lora_alpha": 4}, "lora_alpha was 8 and is 4"),
    ({"lora_rank": 4}, {"lora_rank": 4, "lora_targets": "to_q"}, "lora_targets was not given and is to_q"),
    ({"ema_decay": 0.9}, {}, "ema_decay was 0.9 and is not given"),
    ({}, {"optimizer": "adamw_8bit"}, "optimizer was adamw and is adamw_8bit"),
    ({}, {"trained_component": "transformer_2"}, "trained_component was transformer and is transformer_2"),
    ({}, {"weighting_scheme": "uniform"}, "weighting_scheme was not given and is uniform"),
    ({"shift": 3.0}, {"shift": "pixels"}, "shift was 3.0 and is pixels"),
    ({"guidance": 1.0}, {"guidance": 3.5}, "guidance was 1.0 and is 3.5"),
    ({}, {"guidance": 3.5}, "guidance was not given and is 3.5"),
    ({}, {"snr_gamma": 5.0}, "snr_gamma was not given and is 5.0"),
    ({}, {"loss_reduction": "token"}, "loss_reduction was sample and is token"),
    ({}, {"max_sequence_length": 16}, "max_sequence_length was 32 and is 16"),
    ({**PACKED, "random_resize": 32}, {**PACKED, "random_resize": 48}, "random_resize was 32 and is 48"),
])  # fmt: skip
def test_settings_that_must_stay_equal_are_refused_by_name(checked, before, after, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        checked(before, after)


def test_settings_that_are_gone_do_not_keep_a_checkpoint_from_being_resumed(make: Make) -> None:
    accelerator = Accelerator(cpu=True)
    saved = {**settings_of(make(), accelerator), "validation_max_tokens": 4096}
    assert resumed_config(saved, make(), accelerator) == make()
    assert applied_changes(saved, make(), accelerator) == []


def test_precision_and_sharding_are_compared_as_accelerate_chose_them(make: Make, monkeypatch) -> None:
    accelerator = Accelerator(cpu=True)
    saved = settings_of(make(), accelerator)
    assert saved["mixed_precision"] == "no"
    assert resumed_config(saved, make(mixed_precision="no"), accelerator)
    with pytest.raises(BucketingError, match="mixed_precision was bf16 and is no"):
        resumed_config({**saved, "mixed_precision": "bf16"}, make(), accelerator)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(BucketingError, match="distributed_type was not sharded and is FSDP"):
        resumed_config(saved, make(), accelerator)


def test_settings_left_open_are_those_of_the_checkpoint(checked) -> None:
    config, changes = checked({**PACKED, "lora_rank": 2, "lora_alpha": 8}, {**PACKED, "max_tokens": "auto",
                                                                           "lora_rank": 2})  # fmt: skip
    assert (config.batches.max_tokens, config.adapters.lora_alpha, changes) == (640, 8, [])


@pytest.mark.parametrize("change", [
    {"caption_dropout": 0.5}, {"flip_probability": 0.5}, {"random_crop": False}, {"frame_picking": "start"},
    {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}, {"on_error": "replace"},
    {"lr_scheduler": "cosine"}, {"num_train_epochs": 3}, {"max_errors": 3}, {"max_error_share": 0.5},
])  # fmt: skip
def test_settings_that_take_effect_at_once_are_said(checked, change) -> None:
    config, changes = checked({}, change)
    ((name, value),) = change.items()
    assert config.flat()[name] == value
    assert [line.split()[0] for line in changes] == [name]


def test_settings_of_the_plan_are_refused_by_the_samplers_state_and_others_of_the_path_are_free(make: Make) -> None:
    first = make(max_train_steps=1, checkpointing_steps=1)
    run(first)
    with pytest.raises(PlanError, match="batch_size was 2 and is 3"):
        run(resumed(first, train_batch_size=3))
    with pytest.raises(PlanError, match="seed was 0 and is 1"):
        run(resumed(first, seed=1))
    with pytest.raises(BucketingError, match="lora_rank was not given and is 4"):
        Trainer(resumed(first, lora_rank=4))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["full", "adapters"])
def test_other_weights_of_the_same_architecture_are_refused(settings, make: Make, pipeline_dir, tmp_path) -> None:
    first = make(max_train_steps=1, checkpointing_steps=1, **settings)
    run(first)
    shutil.copytree(pipeline_dir, tmp_path / "moved")
    Trainer(resumed(first, pretrained_model_name_or_path=str(tmp_path / "moved"))).release()
    make_tiny_pipeline(tmp_path / "other", seed=1)
    with pytest.raises(BucketingError, match=r"other weights than those of .*other: text_encoder had .*transformer"):
        Trainer(resumed(first, pretrained_model_name_or_path=str(tmp_path / "other")))


def test_a_fingerprint_sees_changed_weights_of_each_component_and_reads_few_of_them(pipeline_dir: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dir)
    before = weights_fingerprints(pipeline)
    assert set(before) == {"text_encoder", "transformer", "vae"}
    assert weights_fingerprints(DiffusionPipeline.from_pretrained(pipeline_dir)) == before
    with torch.no_grad():
        pipeline.transformer.blocks[0].ffn.net[2].weight.mul_(1.001)
    after = weights_fingerprints(pipeline)
    assert {name for name in before if before[name] != after[name]} == {"transformer"}
    large = torch.nn.Linear(1, 10**6, bias=False)
    pipeline.components["vae"].large = large
    first = weights_fingerprints(pipeline)["vae"]
    with torch.no_grad():
        large.weight[64] += 1  # behind the first block that is read
    assert weights_fingerprints(pipeline)["vae"] == first
    with torch.no_grad():
        large.weight.add_(1)
    assert weights_fingerprints(pipeline)["vae"] != first


def test_latest_begins_anew_until_there_is_something_to_resume_or_to_lose(make: Make, tmp_path, caplog) -> None:
    Accelerator(cpu=True)
    out = tmp_path / "out"
    assert find_checkpoint(out, "latest") is None
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert messages(caplog)[-1] == f"{out} has no checkpoint to resume. Starting a new training run."
    (out / "logs").mkdir(parents=True)
    (out / "logs" / "losses.jsonl").write_text("{}\n{}\n")
    assert find_checkpoint(out, "latest") is None, "a run that was stopped before its first checkpoint"
    assert "the 2 optimizer steps in its logs were not saved and are lost" in messages(caplog)[-1]
    for result in (LORA_WEIGHTS, "model_index.json"):
        (out / result).touch()
        with pytest.raises(BucketingError, match=f"{out} holds the result of a finished run .*{result}"):
            find_checkpoint(out, "latest")
        (out / result).unlink()


def test_a_new_run_warns_that_it_replaces_the_result_of_a_finished_one(make: Make, caplog) -> None:
    config = make(max_train_steps=1)
    Path(config.output_dir).mkdir(exist_ok=True)
    (Path(config.output_dir) / LORA_WEIGHTS).touch()
    Trainer(config).release()
    (line,) = [message for message in messages(caplog) if "finished run" in message]
    assert f"{config.output_dir} holds the result of a finished run ({LORA_WEIGHTS}), which this run replaces" in line


def test_checkpoints_of_another_run_or_an_earlier_release_are_refused_by_name(tmp_path) -> None:
    Accelerator(cpu=True)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / PROGRESS).write_text(json.dumps({"global_step": 4, "log": {}}))
    for name in ("latest", "checkpoint-4", str(checkpoint)):
        with pytest.raises(BucketingError, match=r"checkpoint-4 has layout 1 .* this one reads layout 4"):
            find_checkpoint(tmp_path / "out", name)
    with pytest.raises(BucketingError, match=r"belongs to the run in .*out, .*as --output_dir, not .*other"):
        find_checkpoint(tmp_path / "other", str(checkpoint))


@pytest.mark.slow
def test_a_checkpoint_of_adapters_holds_them_and_no_more_however_large_the_base(
    make: Make, pipeline_dir: Path, tmp_path: Path, caplog
) -> None:
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dir)
    wider = {**pipeline.transformer.config, "ffn_dim": 8192}
    pipeline.transformer = WanTransformer3DModel.from_config(wider)
    pipeline.save_pretrained(tmp_path / "large")
    bases, sizes = [pipeline_dir, tmp_path / "large"], []
    caplog.set_level(logging.INFO)
    for number, base in enumerate(bases):
        config = make(f"out-{number}", pretrained_model_name_or_path=str(base), lora_rank=2, max_train_steps=1,
                      checkpointing_steps=1)  # fmt: skip
        run(config)
        checkpoint = Path(config.output_dir) / "checkpoint-1"
        sizes.append(sum(path.stat().st_size for path in checkpoint.iterdir()))
    weights = [sum(path.stat().st_size for path in base.glob("transformer/*.safetensors")) for base in bases]
    assert weights[1] - weights[0] > 2**20
    assert abs(sizes[1] - sizes[0]) < 1000, "no more than the length of a path"
    lines = [line for line in messages(caplog) if "checkpoint-1" in line]
    assert len(lines) == 2, "accelerate's lines are silent"
    assert all(line.startswith("Saved checkpoint-1 (0.") for line in lines)
    assert logging.getLogger("accelerate").level != logging.WARNING, "only while states are saved"
    plain = DiffusionPipeline.from_pretrained(tmp_path / "large")
    plain.load_lora_weights(str(checkpoint))
    assert [config.r for config in plain.transformer.peft_config.values()] == [2]
    assert (checkpoint / COMFYUI_WEIGHTS).is_file()
    assert (checkpoint.parent / COMFYUI_WEIGHTS).is_file()
    in_checkpoint, in_the_end = load_file(checkpoint / LORA_WEIGHTS), load_file(checkpoint.parent / LORA_WEIGHTS)
    assert all(torch.equal(in_checkpoint[name], in_the_end[name]) for name in in_the_end)


@pytest.mark.slow
def test_a_run_begins_with_the_adapters_of_another(make: Make, tmp_path: Path, caplog) -> None:
    first = make("first", lora_rank=2, lora_alpha=6, max_train_steps=2, checkpointing_steps=2)
    run(first)
    caplog.set_level(logging.INFO)
    for source in ("first", "first/checkpoint-2", f"first/{LORA_WEIGHTS}"):
        start = str(tmp_path / source)
        trainer = Trainer(make(init_from_adapters=start, lora_rank=2, learning_rate=1e-9, max_train_steps=1))
        assert trainer.config.adapters.lora_alpha == 6, "as the file says"
        assert trainer.recipe.transformer.peft_config["default"].lora_alpha == 6
        trainer.run()
        AcceleratorState._reset_state(reset_partial_state=True)
        saved, original = (load_file(tmp_path / name / LORA_WEIGHTS) for name in ("out", "first"))
        assert saved.keys() == original.keys()
        assert all(torch.allclose(saved[name], original[name], atol=1e-6) for name in saved)
        assert any(line.startswith("Starting from the adapters of ") for line in messages(caplog))
        caplog.clear()


@pytest.fixture
def adapters(make: Make, pipeline_dir: Path, tmp_path: Path) -> Path:
    """A file of adapters of rank 2 and alpha 6."""
    pipeline = recipe_of(str(pipeline_dir)).load(str(pipeline_dir)).pipeline
    add_lora(pipeline, AdapterConfig(lora_rank=2, lora_alpha=6))
    (tmp_path / "adapters").mkdir()
    save_lora(pipeline, tmp_path / "adapters")
    return tmp_path / "adapters" / LORA_WEIGHTS


@pytest.mark.parametrize(("settings", "message"), [
    ({"lora_rank": 4}, "rank 2, not `lora_rank=4`"),
    ({"lora_rank": 2, "lora_alpha": 2}, "alpha 6, not `lora_alpha=2`"),
    ({"lora_rank": 2, "lora_targets": "to_q"}, r"\d+ layers, while `lora_targets` names \d+ \(one .*: .*to_"),
    ({"lora_rank": 2, "init_from_adapters": "nowhere"}, "nowhere does not exist"),
])  # fmt: skip
def test_adapters_that_do_not_fit_are_refused_by_name(make: Make, adapters: Path, settings, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        Trainer(make(**{"init_from_adapters": str(adapters), **settings}))


def test_files_that_are_no_plain_adapters_are_refused_and_ones_without_alpha_have_scale_one(
    make: Make, adapters: Path, tmp_path: Path
) -> None:
    weights = load_file(adapters)
    save_file(weights, tmp_path / "plain.safetensors")
    start = {"lora_rank": 2, "init_from_adapters": str(tmp_path / "plain.safetensors")}
    trainer = Trainer(make(**start))
    assert trainer.config.adapters.lora_alpha == 2
    trainer.release()
    for content in ({"text_encoder.lora_A.weight": torch.ones(2, 2)}, {}):
        save_file({**(weights if content else {}), **content}, tmp_path / "plain.safetensors")
        with pytest.raises(BucketingError, match="must hold plain LoRA weights of a transformer"):
            Trainer(make(**start))
    (tmp_path / "plain.safetensors").write_text("no tensors")
    with pytest.raises(BucketingError, match="cannot be read as LoRA weights"):
        Trainer(make(**start))


@pytest.mark.parametrize(("settings", "message"), [
    ({}, r"give their rank too \(`lora_rank`\)"),
    ({"lora_rank": 2, "resume_from_checkpoint": "checkpoint-2"}, "omit one of them"),
])  # fmt: skip
def test_beginning_with_adapters_needs_lora_and_a_new_run(make: Make, settings, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        make(init_from_adapters="adapters", **settings)


def test_a_run_that_resumes_on_other_processes_at_the_end_of_an_epoch_describes_the_next_one(make: Make) -> None:
    trainer = Trainer(make(max_train_steps=None, num_train_epochs=2))
    sampler = trainer.data.sampler
    steps = sampler._ordered_plan(0, 2, None).num_steps
    sampler.load_state_dict({**sampler.state_dict(), "consumed": [[2, steps]]})
    assert sampler.plan().num_steps == 0
    assert f"  Steps per epoch = {sampler.plan(1).num_steps} on each process" in trainer.describe()[4]
    sampler.load_state_dict({**sampler.state_dict(), "consumed": [[2, steps - 1]]})
    lines = trainer.describe()
    assert f"  Samples left of epoch 0 = {sampler.plan().kept} kept" in lines[3]
    assert f"  Steps left of epoch 0 = {sampler.plan().num_steps} on each process" in lines[4]
    trainer.release()


def test_a_run_that_begins_to_append_frames_trains_other_weights_where_these_have_some(make: Make) -> None:
    without, appending = ({"condition": shares} for shares in (None, "appended_first_frame:0.5,none:0.5"))
    for was, now, said in ((without, appending, "appends some"), (appending, without, "appends none")):
        config = make(**now)
        with pytest.raises(BucketingError, match=rf"{said}: it would train other .*`visual_token_type_embeddings`"):
            check_references(was, config, families()["Kandinsky6Transformer3DModel"])
        check_references(was, config, families()["WanTransformer3DModel"])
        check_references(now, config, families()["Kandinsky6Transformer3DModel"])
