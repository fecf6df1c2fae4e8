"""Runs with compiled blocks: they learn what others learn, and are refused by name where blocks cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from hf_bucketing import BucketingError
from hf_bucketing.models.compilation import compile_blocks
from hf_bucketing.settings import changed
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from hf_bucketing.training import trained
from hf_bucketing.training.loop import Trainer
from tests.training.test_kinds_and_optimizers import check_resume
from tests.training.training_cases import in_process, run

PACKS = {"batching": "pack", "max_tokens": 640, "strip_length": 16}
LORA = {"lora_rank": 4, "gradient_checkpointing": True}
RENDERS = {"validation_prompts": ["red"], "validation_sizes": "1,32,48", "validation_steps": 2}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Compile without a code generator, and return the graphs that were compiled."""
    compiled: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(trained, "compile_blocks", partial(compile_blocks, backend=remember))
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


RUNS = {
    "buckets": {},
    "packs": {**PACKS, **LORA},
    "packs bf16": {**PACKS, **LORA, "mixed_precision": "bf16"},
    "bf16": {**LORA, "mixed_precision": "bf16"},
    "padded": {"batching": "length", "max_tokens": 640, **LORA},
    "some checkpointed": {**PACKS, "gradient_checkpointing": 2},
    "dora": {**LORA, "adapter": "dora"},
    "loha": {**LORA, "adapter": "loha"},
    "lokr": {**LORA, "adapter": "lokr"},
    "offload_blocks": {**LORA, "offload_blocks": 2},
    "offload_activations": {**LORA, "offload_activations": True},
    "ema, rendered": {"ema_decay": 0.9, "validation_inference_steps": 2, **RENDERS},
    "packs, rendered": {**PACKS, "lora_rank": 4, "validation_inference_steps": 2, **RENDERS},
    "preservation": {**LORA, "preservation": "prior", "preservation_share": 0.5},
}


AT_ONCE = ("packs bf16",)
"""Runs that are compared on every commit; the others run with `-m every`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in AT_ONCE else pytest.mark.every) for name in RUNS]
)
def test_a_compiled_run_has_the_losses_of_another(
    name: str, graphs: list[Any], pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "eager", max_train_steps=4, **RUNS[name])
    losses = run(config)
    assert not graphs
    compiled = run(changed(config, output_dir=str(tmp_path / "compiled"), compile=True))
    assert graphs
    assert compiled == pytest.approx(losses, rel=2**-7 if "bf16" in name else 1e-5)


@pytest.mark.every
@pytest.mark.parametrize("batches", [{}, PACKS], ids=["buckets", "packs"])
def test_a_killed_and_resumed_run_has_the_losses_and_the_result_of_a_whole_one(
    batches: dict[str, Any], pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    check_resume(pipeline_dir, prepared_dir, tmp_path, **batches, gradient_checkpointing=True, compile=True)


def test_a_model_whose_blocks_diffusers_does_not_name_is_refused_before_it_is_loaded(
    prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_pipeline(tmp_path / "sd3", family="sd3")
    monkeypatch.setattr(Trainer, "_load", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(BucketingError, match="a SD3Transformer2DModel: diffusers names no repeated"):
        Trainer(in_process(tmp_path / "sd3", prepared_dir, tmp_path / "out", compile=True))


def test_two_compilers_are_refused(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    with pytest.raises(BucketingError, match="ACCELERATE_DYNAMO_BACKEND"):
        Trainer(in_process(pipeline_dir, prepared_dir, tmp_path, compile=True))
