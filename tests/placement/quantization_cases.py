"""Runs with frozen weights of int8 and float8, by torchao.

Run by test_quantization.py in a process that finds torchao.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import LORA_WEIGHTS
from hf_bucketing.adapters.lora import add_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.caching.fingerprints import weights_fingerprints
from hf_bucketing.models.compilation import compile_blocks
from hf_bucketing.models.loading import Loading, empty_transformer
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.weight_files import TransformerFile
from hf_bucketing.placement.blocks import blocks_of
from hf_bucketing.placement.offload import offload_blocks
from hf_bucketing.placement.quantization import quantization_of, quantized_linears
from hf_bucketing.runs.review import losses_of
from hf_bucketing.settings import changed
from tests.models.weight_file_cases import original_state, weights_of, write_file
from tests.placement.test_offload import gradients, run_once
from tests.training.test_kinds_and_optimizers import check_resume
from tests.training.training_cases import BATCHING, in_process, run, train

KINDS = {"int8": ("Int8Tensor", 0.01), "float8": ("Float8Tensor", 0.03)}
kinds = pytest.mark.parametrize("kind", KINDS)
LORA = {"lora_rank": 4, "gradient_checkpointing": True, "mixed_precision": "bf16"}


def load(
    folder: Path, kind: str | None, *, dtype: torch.dtype = torch.bfloat16, file: TransformerFile | None = None
) -> Recipe:
    recipe = recipe_of(str(folder))
    empty = empty_transformer(str(folder), "transformer")
    quantization = quantization_of(kind, empty, dtype=dtype)
    loading = Loading(trained_dtype=dtype, quantization=quantization, transformer_file=file)
    return recipe.load(str(folder), loading=loading)


def fingerprint(transformer: Any) -> str:
    return weights_fingerprints(SimpleNamespace(components={"transformer": transformer}))["transformer"]


def with_adapters(folder: Path, kind: str | None) -> Any:
    recipe = load(folder, kind)
    torch.manual_seed(0)
    add_lora(recipe.pipeline, AdapterConfig(lora_rank=4))
    for name, parameter in recipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    recipe.transformer.enable_gradient_checkpointing()
    return recipe.transformer.train()


def step(model: Any) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradients of one forward and backward pass in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = run_once(model)
    loss.backward()
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients(model)])


@kinds
def test_weights_of_a_file_are_quantised_as_those_of_the_folder(kind: str, pipeline_dir: Path, tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", original_state("wan", weights_of(pipeline_dir)))
    whole = load(pipeline_dir, kind).transformer
    model = load(pipeline_dir, kind, file=TransformerFile(path=str(file))).transformer
    assert any(type(value).__name__ == KINDS[kind][0] for value in model.parameters())
    assert fingerprint(model) == fingerprint(whole)


@kinds
def test_the_linear_layers_of_blocks_have_quantised_weights_and_nothing_else(kind: str, pipeline_dir: Path) -> None:
    expected = {f"{name}.weight" for name in quantized_linears(load(pipeline_dir, None).transformer)}
    model = load(pipeline_dir, kind).transformer
    assert {name for name, value in model.named_parameters() if type(value).__name__ == KINDS[kind][0]} == expected
    assert {value.dtype for value in model.norm_out.parameters()} <= {torch.float32}, "kept as the model asks for"
    assert not any(parameter.requires_grad for parameter in model.parameters())


@kinds
def test_losses_and_gradients_are_close_to_those_of_unquantised_weights(kind: str, pipeline_dir: Path) -> None:
    loss, expected = step(with_adapters(pipeline_dir, None))
    quantised_loss, found = step(with_adapters(pipeline_dir, kind))
    tolerance = KINDS[kind][1]
    assert quantised_loss == pytest.approx(loss, rel=tolerance)
    assert 0 < float((found - expected).norm()) <= 2 * tolerance * float(expected.norm())


@kinds
def test_quantised_blocks_wait_on_the_cpu_with_equal_gradients(kind: str, pipeline_dir: Path) -> None:
    loss, expected = step(with_adapters(pipeline_dir, kind))
    model = with_adapters(pipeline_dir, kind)
    offload_blocks(model, 3, device=torch.device("cpu"))
    waiting = [block.ffn.net[2].weight.device.type for block in blocks_of(model)]
    assert waiting == ["meta", "meta", "meta", "cpu"]
    offloaded_loss, found = step(model)
    assert offloaded_loss == loss
    assert torch.equal(found, expected)


@kinds
def test_fingerprints_see_the_numbers_and_the_scales_of_quantised_weights(kind: str, pipeline_dir: Path) -> None:
    pipeline = load(pipeline_dir, kind).pipeline
    before = weights_fingerprints(pipeline)
    assert weights_fingerprints(load(pipeline_dir, kind).pipeline) == before
    assert weights_fingerprints(load(pipeline_dir, None).pipeline)["transformer"] != before["transformer"]
    weight = pipeline.transformer.blocks[1].ffn.net[2].weight
    weight.scale.mul_(1.5)
    scaled = weights_fingerprints(pipeline)["transformer"]
    weight.qdata.view(torch.uint8).bitwise_xor_(1)
    assert len({before["transformer"], scaled, weights_fingerprints(pipeline)["transformer"]}) == 3


@pytest.mark.parametrize(("kind", "batching"), [("int8", "pack")])
def test_runs_learn_what_unquantised_runs_learn_and_resume(
    kind: str, batching: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    batches = {} if batching == "bucket" else {"batching": "pack", "max_tokens": 640, "strip_length": 16}
    plain = in_process(pipeline_dir, prepared_dir, tmp_path / "plain", **LORA, **batches, max_train_steps=2)
    config = changed(plain, quantize_base=kind, output_dir=str(tmp_path / kind), checkpointing_steps=1)
    expected, losses = run(plain), run(config)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=KINDS[kind][1])
    finished = load_file(tmp_path / kind / LORA_WEIGHTS)
    resumed = changed(config, resume_from_checkpoint=str(tmp_path / kind / "checkpoint-1"))
    assert run(resumed) == losses
    assert all(torch.equal(value, finished[name]) for name, value in load_file(tmp_path / kind / LORA_WEIGHTS).items())
    with pytest.raises(BucketingError, match=f"quantize_base was {kind} and is not given"):
        run(changed(resumed, quantize_base=None))
    quantised, stock = (
        load(pipeline_dir, kind, dtype=torch.float32).pipeline,
        DiffusionPipeline.from_pretrained(pipeline_dir),
    )
    outputs = []
    for pipeline in (quantised, stock):
        plain_loss = run_once(pipeline.transformer)
        pipeline.load_lora_weights(str(tmp_path / kind))
        outputs.append((plain_loss.item(), run_once(pipeline.transformer).item()))
    assert outputs[1][0] != outputs[1][1], "stock diffusers applies the adapters"
    assert outputs[0] == pytest.approx(outputs[1], rel=2 * KINDS[kind][1])


def test_compiled_blocks_of_quantised_weights_learn_the_same(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = in_process(pipeline_dir, prepared_dir, tmp_path / "plain", **LORA, quantize_base="int8", max_train_steps=2)
    losses = run(plain)
    compile_eagerly = functools.partial(compile_blocks, backend="aot_eager")
    monkeypatch.setattr("hf_bucketing.training.trained.compile_blocks", compile_eagerly)
    torch._dynamo.reset()
    assert run(changed(plain, output_dir=str(tmp_path / "compiled"), compile=True)) == pytest.approx(losses, rel=2**-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_quantised_transformer_renders_prompts(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    validation = {"validation_prompts": ["red"], "validation_sizes": "1,32,48", "validation_steps": 1}
    run(
        in_process(
            pipeline_dir, prepared_dir, tmp_path, **LORA, **validation,
            quantize_base="int8", offload_blocks=2, validation_inference_steps=2, max_train_steps=1,
        )
    )  # fmt: skip
    assert (tmp_path / "validation" / "step-1" / "1x32x48-red.png").stat().st_size > 0


def test_two_processes_train_a_quantised_base_that_waits(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    flags = ("--lora_rank", 4, "--gradient_checkpointing", "--quantize_base", "float8", "--max_train_steps", 2)
    offload = ("--offload_blocks", 2, "--offload_activations")
    train(pipeline_dir, prepared_dir, tmp_path / "out", *BATCHING["bucket"], *flags, *offload)
    assert len(losses_of(tmp_path / "out")) == 2
    DiffusionPipeline.from_pretrained(pipeline_dir).load_lora_weights(str(tmp_path / "out"))


def test_an_optimizer_of_torchao_learns_and_resumes_exactly(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    settings = {"optimizer": "torchao.optim:AdamW8bit", "lora_rank": None, "mixed_precision": "bf16"}
    check_resume(pipeline_dir, prepared_dir, tmp_path, **settings)
