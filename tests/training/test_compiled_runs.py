"""Runs with compiled blocks: they learn what others learn, and are refused by name where blocks cannot be compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from hf_bucketing.models.compilation import compile_blocks
from hf_bucketing.training import trained
from tests.training.training_cases import in_process, run

PACKS = {"batching": "pack", "max_tokens": 640, "strip_length": 16}
LORA = {"lora_rank": 4, "gradient_checkpointing": True}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile without a code generator, and count the operations of each graph."""
    made: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(trained, "compile_blocks", partial(compile_blocks, backend=count))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


RUNS = {
    "buckets": {},
    "packs": PACKS,
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {**LORA, "lora_dropout": 0.0},
    "bf16": {**LORA, "mixed_precision": "bf16"},
    "packs, bf16": {**LORA, **PACKS, "mixed_precision": "bf16"},
    "dora": {**LORA, "adapter": "dora"},
    "loha": {**LORA, "adapter": "loha"},
    "lokr": {**LORA, "adapter": "lokr"},
    "offload_blocks": {**LORA, "offload_blocks": 2},
    "offload_activations": {**LORA, "offload_activations": True},
    "offload_activations alone": {"lora_rank": 4, "offload_activations": True},
    "ema": {
        "ema_decay": 0.9,
        "validation_prompts": ["red"],
        "validation_sizes": "1,32,48",
        "validation_steps": 2,
        "validation_inference_steps": 2,
    },
    "preservation": {**LORA, "preservation": "prior", "preservation_share": 0.5},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_has_the_losses_of_another(
    name: str, graphs: list[int], pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {"max_train_steps": 6, "train_batch_size": 2, **RUNS[name]}
    losses = run(in_process(pipeline_dir, prepared_dir, tmp_path / "eager", **settings))
    assert not graphs
    import collections

    torch._dynamo.utils.counters.clear()
    compiled = run(in_process(pipeline_dir, prepared_dir, tmp_path / "compiled", **settings, compile=True))
    print(
        name,
        len(graphs),
        dict(torch._dynamo.utils.counters["graph_break"]).keys(),
        max(abs(a - b) for a, b in zip(losses, compiled)),
    )
    assert graphs
    assert compiled == pytest.approx(losses, rel=1e-5 if "bf16" not in name else 0.02)
