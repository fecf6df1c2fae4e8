"""What a run changes: its weights, adapters and averages, its clipped gradients, and its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run


def test_a_run_trains_the_adapters_on_captions_of_the_length_and_with_the_clipping_that_are_set(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    settings = {"lora_rank": 2, "lora_alpha": 64, "lora_targets": "to_q", "max_sequence_length": 16,
                "max_grad_norm": 0.01, "max_train_steps": 1}  # fmt: skip
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path, **settings))
    trained = [name for name, parameter in trainer.recipe.transformer.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".to_q.lora_" in name for name in trained)
    (lora,) = trainer.recipe.transformer.peft_config.values()
    assert (lora.r, lora.lora_alpha) == (2, 64)
    assert trainer.recipe.encode_text(["red"]).values.shape[1] == 16
    clip, norms = trainer.accelerator.clip_grad_norm_, []

    def clip_and_measure(parameters, max_norm: float):
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        clip(parameters, max_norm)
        norms.append(float(torch.stack([parameter.grad.norm() for parameter in parameters]).norm()))

    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", clip_and_measure)
    trainer.run()
    assert norms == [pytest.approx(0.01, rel=1e-3)]


@pytest.mark.slow
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


def test_running_out_of_memory_names_the_samples_and_what_to_lower(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path))

    def forward(*args, **kwargs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(trainer.recipe.transformer, "forward", forward)
    with pytest.raises(BucketingError, match=r"ran out on \d+ samples .*lower `train_batch_size`, use `gradient_ch"):
        trainer.run()
