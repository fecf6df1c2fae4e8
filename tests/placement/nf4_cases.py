"""Frozen weights of nf4, by bitsandbytes, on a CPU.

Run by test_quantization.py in a process that finds bitsandbytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer

from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models import enable_packing
from hf_bucketing.models.loading import Loading, empty_transformer
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.weight_files import TransformerFile
from hf_bucketing.packing import Packing, packed_forward
from hf_bucketing.placement.quantization import quantization_of, quantized_linears
from tests.models.weight_file_cases import original_state, weights_of, write_file


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers load weights of bitsandbytes without a GPU, which it refuses; they compute on the CPU too."""
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda *_: {"": "cpu"})


def test_nf4_weights_of_a_file_are_those_of_the_folder(pipeline_dir: Path, tmp_path: Path, monkeypatch) -> None:
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
