"""A model of two layers in bf16 against float32: packs by kernel, and the stock model one sample at a time."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from hf_bucketing.losses import masked_mse
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward, packed_mse

from .measuring import BACKENDS, Cases, Figures, Run, relative
from .models import Inputs, draw, make_transformer
from .scale import Scale

Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def cases(run: Run) -> Cases:
    """Yield the errors of outputs and gradients: of the stock model, and of packs by each backend."""
    scale = run.scale
    model, inputs = make_transformer(scale, layers=2), draw(scale, scale.parity_pack)
    exact = run_alone(scale, model, inputs, dtype=torch.float32)

    def errors(compute: Callable[[], Results]) -> Callable[[], Figures]:
        def compared() -> Figures:
            outputs, gradients = compute()
            return {
                "output_relative_error": relative(outputs, exact[0]),
                "gradients_relative_error": relative(gradients, exact[1]),
            }

        return compared

    yield "stock", errors(lambda: run_alone(scale, model, inputs, dtype=torch.bfloat16))
    for backend in BACKENDS:
        yield backend, errors(lambda backend=backend: run_packed(scale, model, inputs, backend))  # type: ignore[misc]


def run_alone(scale: Scale, model: torch.nn.Module, inputs: Inputs, *, dtype: torch.dtype) -> Results:
    """Return the outputs of the stock model, one sample at a time, and the gradients of its weights."""
    mixed = nullcontext() if dtype == torch.float32 else torch.autocast(scale.device, dtype)
    outputs = []
    for latent, timestep, words in zip(*inputs, strict=True):
        with mixed:
            output = model(latent[None], timestep[None], words[None], return_dict=False)[0]
        masked_mse(output.float(), latent[None]).sum().backward()
        outputs.append(output[0].detach())
    return outputs, gradients_of(model)


def run_packed(scale: Scale, model: torch.nn.Module, inputs: Inputs, backend: str) -> Results:
    """Return the same of one pack, in bf16."""
    latents, timesteps, text = inputs
    packing = enable_packing(model, strip_length=scale.strip_length, backend=backend)
    try:
        batch = packing.pack(latents, timesteps=timesteps, text=text)
        with torch.autocast(scale.device, torch.bfloat16):
            output = packed_forward(model, batch)
        packed_mse(output.float(), batch.pack_like(latents), batch.layout).sum().backward()
        return [sample.detach() for sample in batch.unpack(output)], gradients_of(model)
    finally:
        disable_packing(model)


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients
