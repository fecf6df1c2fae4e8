"""Runs with each kind of adapter and each family of optimizers, killed and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file

from hf_bucketing.adapters.files import ADAPTER_FILES, LORA_WEIGHTS, PEFT_FILES
from hf_bucketing.adapters.kinds import adapters_of, read_exact
from hf_bucketing.runs.review import losses_of
from hf_bucketing.settings import changed
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run

TWO_EPOCHS = {"max_train_steps": None, "num_train_epochs": 2, "train_batch_size": 4, "lora_rank": 3}
PATTERNS = {"lora_rank_pattern": r"blocks\.0\..*=2", "lora_alpha_pattern": "to_q=8", "lora_rslora": True}
KINDS = {
    "lora": {**PATTERNS, "lora_dropout": 0.1, "lora_plus_ratio": 16.0},
    "dora": {"mixed_precision": "bf16", "ema_decay": 0.9},
    "loha": {"lora_rank_pattern": "to_q=2", "lora_dropout": 0.1},
    "lokr": {"batching": "pack", "max_tokens": 640, "strip_length": 16, "mixed_precision": "bf16"},
}
OPTIMIZERS = {
    "adamw_8bit": {},
    "torch.optim:Muon": {"lora_rank": None, "adam_weight_decay": 0.1},
    "torch.optim:Adafactor": {"optimizer_args": ["beta2_decay=-0.7"]},
    "bitsandbytes.optim:Lion8bit": {"lr_scheduler": "cosine"},
    "prodigyopt:Prodigy": {"learning_rate": 1.0, "optimizer_args": ["d_coef=2", "weight_decay=0.01"]},
    "schedulefree:AdamWScheduleFree": {"optimizer_args": ["warmup_steps=2"]},
    "pytorch_optimizer:CAME": {"lr_scheduler": "cosine"},
}


class KilledError(Exception):
    pass


class KilledTrainer(Trainer):
    """A run that ends after a checkpoint and a step."""

    def _finish_step(self) -> None:
        super()._finish_step()
        if self.global_step == 1 + self.config.checkpoints.checkpointing_steps:
            raise KilledError


def check_resume(pipeline: Path, prepared: Path, folder: Path, **settings: Any) -> Path:
    """Check that a killed and resumed run has the losses and the result of a whole one; return its folder."""
    whole = in_process(pipeline, prepared, folder / "whole", checkpointing_steps=2, **{**TWO_EPOCHS, **settings})
    losses = run(whole)
    parts = changed(whole, output_dir=str(folder / "parts"))
    with pytest.raises(KilledError):
        KilledTrainer(parts).run()
    Trainer(changed(parts, resume_from_checkpoint="latest")).run()
    assert len(losses) > 4
    assert losses_of(folder / "parts") == losses
    results = [sorted((folder / name).rglob("*.safetensors")) for name in ("whole", "parts")]
    results = [[file for file in files if "checkpoint-" not in str(file)] for files in results]
    assert results[0]
    for file, other in zip(*results, strict=True):
        expected, found = load_file(file), load_file(other)
        assert all(torch.equal(value, found[name]) for name, value in expected.items()), file
    return folder / "parts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "lora" else pytest.mark.every) for kind in KINDS]
)
def test_adapters_of_each_kind_resume_exactly_load_in_the_stock_pipeline_and_start_other_runs(
    kind: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {"adapter": kind, **KINDS[kind]}
    folder = check_resume(pipeline_dir, prepared_dir, tmp_path, **settings)
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dir)
    if kind in ("lora", "dora"):
        pipeline.load_lora_weights(str(folder))
    else:
        PeftModel.from_pretrained(pipeline.transformer, folder)
    loaded = {name: value for name, value in pipeline.transformer.named_parameters() if "base_layer" not in name}
    assert sum(any(part in name for part in (".lora_", ".hada_", ".lokr_")) for name in loaded) > 0
    written = [name for name in ADAPTER_FILES if (folder / name).is_file()]
    assert set(written) == set(PEFT_FILES if kind in ("loha", "lokr") else [LORA_WEIGHTS]) | (
        {"comfyui_lora_weights.safetensors"} if kind == "lora" else set()
    )
    again = in_process(
        pipeline_dir, prepared_dir, tmp_path / "again", init_from_adapters=str(folder), **{**TWO_EPOCHS, **settings}
    )
    trainer = Trainer(again)
    saved = read_exact(folder).weights
    trained = adapters_of(trainer.recipe.transformer)
    assert trained.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in trained.items())
    trainer.release()


AT_ONCE = ("schedulefree:AdamWScheduleFree",)
"""Optimizers that are tried on every commit; the others run with `-m every`."""


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=pytest.mark.slow if name in AT_ONCE else pytest.mark.every) for name in OPTIMIZERS],
)
def test_optimizers_of_each_family_learn_and_resume_exactly(
    optimizer: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    if optimizer.endswith("Muon") and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    pytest.importorskip(optimizer.partition(".")[0].partition(":")[0].replace("adamw_8bit", "bitsandbytes"))
    settings = {"optimizer": optimizer, "mixed_precision": "bf16", **OPTIMIZERS[optimizer]}
    check_resume(pipeline_dir, prepared_dir, tmp_path, **settings)
    shutil.rmtree(tmp_path)
