"""Quantised frozen weights: which layers have them, what cannot be combined, and runs with them.

Runs with torchao are in quantization_cases.py, for a process that finds it: wherever it is installed, diffusers
imports it, which prints several lines and takes time, so that `make test` installs it in a folder of its own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer

from hf_bucketing import BucketingError
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models import enable_packing
from hf_bucketing.models.loading import Loading, empty_transformer
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.weight_files import TransformerFile
from hf_bucketing.packing import Packing, packed_forward
from hf_bucketing.placement.quantization import (
    kept_linears,
    quantization_of,
    quantized_linears,
)
from tests.conftest import ROOT, run
from tests.models.weight_file_cases import original_state, weights_of, write_file
from tests.training.training_cases import in_process, run as train_here

CASES = "tests/placement/quantization_cases.py"


@pytest.mark.every
@pytest.mark.slow
def test_runs_with_torchao() -> None:
    packages = os.pathsep.join([str(Path(sys.prefix) / "torchao"), *sys.path])
    tried = run([sys.executable, "-c", "import torchao"], env={"PYTHONPATH": packages}, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr.strip().splitlines()[-1])
    command = [sys.executable, "-m", "pytest", ROOT / CASES, "-p", "no:cacheprovider", "-p", "no:xdist", "-x"]
    result = run(command, env={"PYTHONPATH": packages, "PYTEST_XDIST_WORKER": ""}, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ passed", result.stdout), result.stdout


def on_meta(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(diffusers, name)()


def test_the_linear_layers_of_blocks_are_quantised_but_for_sensitive_ones() -> None:
    wan = on_meta("WanTransformer3DModel")
    assert len(quantized_linears(wan)) == 40 * 10
    assert {"blocks.0.attn1.to_q", "blocks.39.attn2.to_out.0", "blocks.7.ffn.net.0.proj"} <= set(
        quantized_linears(wan)
    )
    assert kept_linears(wan) == [
        "condition_embedder.time_embedder.linear_1",
        "condition_embedder.time_embedder.linear_2",
        "condition_embedder.time_proj",
        "condition_embedder.text_embedder.linear_1",
        "condition_embedder.text_embedder.linear_2",
        "proj_out",
    ]
    for name in ("HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel", "LTXVideoTransformer3DModel"):
        model = on_meta(name)
        shares = [sum(layer.weight.numel() for layer in quantized_linears(model).values())]
        shares.append(sum(parameter.numel() for parameter in model.parameters()))
        assert shares[0] > 0.6 * shares[1], name
        assert not any("norm" in layer for layer in quantized_linears(model)), "modulations stay as they are"


def test_a_kept_layer_never_keeps_layers_of_the_blocks_that_share_its_name() -> None:
    flux = on_meta("FluxTransformer2DModel")  # the quantisers would keep all that are called proj_out
    assert "single_transformer_blocks.0.proj_out" in quantized_linears(flux)
    assert {"x_embedder", "context_embedder", "single_transformer_blocks.0.norm.linear"} <= set(kept_linears(flux))
    assert "proj_out" not in kept_linears(flux)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": None}, r'quantize_base="int8".*train adapters \(`lora_rank=16`\)'),
        ({"gradient_checkpointing": False}, r'"int8".*gradient_checkpointing=True.*torchao.*"nf4"'),
        ({"quantize_base": "nf4"}, r'"nf4".*needs a GPU.*quantize_base="int8"'),
        ({"quantize_base": "float8"}, r'"float8".*torchao: pip install "hf_bucketing\[quantization\]"'),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_weights_load(
    settings: dict, message: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda *_, **__: pytest.fail("weights loaded"))
    common = {"lora_rank": 4, "gradient_checkpointing": True, "quantize_base": "int8"}
    with pytest.raises(BucketingError, match=message):
        train_here(in_process(pipeline_dir, prepared_dir, tmp_path, **{**common, **settings}))


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers load weights of bitsandbytes without a GPU, which it refuses; they compute on the CPU too."""
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda *_: {"": "cpu"})


def test_nf4_weights_of_a_file_are_those_of_the_folder(pipeline_dir: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("bitsandbytes")
    without_gpu(monkeypatch)
    file = write_file(tmp_path / "model.safetensors", original_state("wan", weights_of(pipeline_dir)))
    quantization = quantization_of("nf4", empty_transformer(str(pipeline_dir), "transformer"), dtype=torch.float32)
    states = []
    for transformer_file in (None, TransformerFile(path=str(file))):
        loading = Loading(quantization=quantization, transformer_file=transformer_file)
        model = recipe_of(str(pipeline_dir)).load(str(pipeline_dir), loading=loading).transformer
        assert not any(parameter.requires_grad for parameter in model.parameters())
        states.append(model.state_dict())
    whole, of_file = states
    assert whole.keys() == of_file.keys()
    assert any(value.dtype == torch.uint8 for value in whole.values())
    assert all(torch.equal(value, of_file[name]) for name, value in whole.items())


@pytest.mark.filterwarnings("ignore")
def test_nf4_layers_take_steps_on_a_transformer_that_packs(pipeline_dir: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    without_gpu(monkeypatch)
    empty = empty_transformer(str(pipeline_dir), "transformer")
    quantization = quantization_of("nf4", empty, dtype=torch.float32)
    assert (quantization.bnb_4bit_quant_type, quantization.bnb_4bit_use_double_quant) == ("nf4", True)
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir), loading=Loading(quantization=quantization))
    plain = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    model = recipe.transformer
    packed = {name for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}
    assert packed == set(quantized_linears(plain.transformer))
    add_lora(recipe.pipeline, AdapterConfig(lora_rank=4))
    model.enable_gradient_checkpointing()
    packing = enable_packing(model, strip_length=8)
    outputs = [packed_output(packing), packed_output(enable_packing(plain.transformer, strip_length=8))]
    assert 0.0 < float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 0.15
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(4):
        loss = packed_output(packing).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    save_lora(recipe.pipeline, tmp_path)
    plain.pipeline.load_lora_weights(str(tmp_path))
    assert plain.transformer.peft_config


def packed_output(packing: Packing) -> torch.Tensor:
    """Run a pack of two samples."""
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(4, frames, 4, 6, generator=generator) for frames in (3, 1)]
    text = torch.randn(2, 8, packing.transformer.config.text_dim, generator=generator)
    pack = packing.pack(latents, timesteps=torch.tensor([500.0, 200.0]), text=text)
    return packed_forward(packing.transformer.train(), pack)
