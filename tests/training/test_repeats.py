"""Runs in which rows occur several times in an epoch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.losses.per_sample import global_mean
from hf_bucketing.models.objectives import Objective
from hf_bucketing.training import loop
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 1}
PACK |= {"token_drop_rate": 0.3}
each_batching = pytest.mark.parametrize("batches", [{}, PACK], ids=["bucket", "pack"])


@pytest.fixture
def repeated_dir(prepared_dir: Path, tmp_path: Path) -> Path:
    """Three rows, each three times per epoch."""
    prepared = PreparedDataset.load(prepared_dir)
    rows = prepared.dataset.select(range(3))
    dataclasses.replace(prepared, dataset=rows.add_column(ROW_WEIGHT, [3.0] * len(rows))).save(tmp_path / "repeated")
    return tmp_path / "repeated"


@pytest.mark.slow
@each_batching
def test_each_occurrence_has_its_own_noise_and_a_resumed_run_repeats_the_whole_one(
    batches, pipeline_dir, repeated_dir, tmp_path: Path, monkeypatch
) -> None:
    drawn: dict[tuple[int, int, int], tuple[float, float]] = {}
    add_noise = Objective.__call__

    def record(self, latents, *, indices, epoch, occurrences):
        noised = add_noise(self, latents, indices=indices, epoch=epoch, occurrences=occurrences)
        for place, key in enumerate(zip(indices, occurrences, strict=True)):
            drawn[(epoch, *key)] = (float(noised.timesteps[place]), float(noised.latents[place].std()))
        return noised

    monkeypatch.setattr(Objective, "__call__", record)
    settings = {**batches, "random_crop": True, "caption_dropout": 0.5, "checkpointing_steps": 1,
                "max_train_steps": None, "num_train_epochs": 1}  # fmt: skip
    whole = run(in_process(pipeline_dir, repeated_dir, tmp_path / "out", **settings))
    epoch = [key for key in drawn if key[0] == 0]
    assert {key[1:] for key in epoch} == {(row, number) for row in range(3) for number in range(3)}
    for place in range(2):
        assert len({drawn[key][place] for key in epoch}) == len(epoch), "no two noises and no two timesteps are alike"
    AcceleratorState._reset_state(reset_partial_state=True)
    before = dict(drawn)
    resumed = run(
        in_process(pipeline_dir, repeated_dir, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-1")
    )
    assert resumed == whole
    assert drawn == before


@pytest.mark.slow
def test_the_trained_model_is_in_training_in_every_step_so_that_it_drops_tokens(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    config = in_process(
        pipeline_dir, prepared_dir, tmp_path, **PACK, max_train_steps=2, validation_split=0.1,
        validation_loss_steps=1, validation_noise_levels=1, validation_prompts=["a cat"], validation_steps=1,
        validation_sizes="5,32,32", validation_inference_steps=1,
    )  # fmt: skip
    trainer = Trainer(config)
    modes = []

    def mean(losses: torch.Tensor, *args, **options) -> torch.Tensor:
        modes.append({module.training for module in trainer.recipe.transformer.modules()})
        frozen = (trainer.recipe.pipeline.vae, trainer.recipe.pipeline.text_encoder)
        modes.append({not module.training for part in frozen for module in part.modules()})
        return global_mean(losses, *args, **options)

    monkeypatch.setattr(loop, "global_mean", mean)
    trainer.run()
    assert modes == [{True}] * 4
