"""Models of scripts/benchmarks/benchmark_gpu.py, and the steps that train them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.enable import packing_disabled
from hf_bucketing.packing import packed_forward, packed_mse

from .scale import Grid, Scale

RANK = 16
Inputs = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def make_transformer(scale: Scale, *, layers: int, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """Make a Wan transformer of random weights; some layers stay in float32, as where diffusers loads it."""
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = WanTransformer3DModel(
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=scale.text_dim,
            freq_dim=256,
            ffn_dim=scale.ffn_dim,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=1024,
        )
    for name, weight in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            weight.data = weight.data.to(dtype)
    return model


def add_adapters(model: WanTransformer3DModel) -> None:
    """Freeze a transformer and add LoRA in float32, as the training script does."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    from hf_bucketing.adapters.lora import lora_targets
    from hf_bucketing.adapters.settings import AdapterConfig

    model.requires_grad_(False)
    targets = lora_targets(model, AdapterConfig())
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=targets))
    cast_training_params(model, torch.float32)


def draw(scale: Scale, grids: Sequence[Grid], *, seed: int = 0) -> Inputs:
    """Draw latents of token grids, timesteps and texts."""
    generator = torch.Generator().manual_seed(seed)
    latents = [torch.randn(16, t, 2 * h, 2 * w, generator=generator).to(scale.device) for t, h, w in grids]
    timesteps = torch.rand(len(grids), generator=generator).to(scale.device) * 1000
    text = torch.randn(len(grids), scale.text_length, scale.text_dim, generator=generator).to(scale.device)
    return latents, timesteps, text


class Stepper:
    """Take training steps of a Wan transformer of random weights: bf16 autocast, gradient checkpointing, AdamW.

    Args:
        scale: Sizes of the model.
        model: Its transformer.
        lora: Whether adapters are trained, or all weights.
        checkpointing: Whether the backward pass computes activations again.
        backend: Attention backend of packs; None enables no packing.
    """

    def __init__(
        self,
        scale: Scale,
        model: WanTransformer3DModel,
        *,
        lora: bool,
        checkpointing: bool = True,
        backend: str | None = "auto",
    ) -> None:
        self.scale, self.model, self.lora = scale, model, lora
        if lora:
            add_adapters(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        model.train()
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.packing: Any = None
        if backend is not None:
            self.use(backend)

    def use(self, backend: str) -> None:
        """Compute packs by a backend from now on."""
        if self.packing is not None:
            disable_packing(self.model)
            self.packing = None  # also where the next backend is refused
        self.packing = enable_packing(self.model, strip_length=self.scale.strip_length, backend=backend)

    def packed(self, inputs: Inputs) -> torch.Tensor:
        """Take a step on one pack."""
        return self._update(self.loss_of_pack(inputs))

    def loss_of_pack(self, inputs: Inputs) -> torch.Tensor:
        latents, timesteps, text = inputs
        batch = self.packing.pack(latents, timesteps=timesteps, text=text)
        with torch.autocast(self.scale.device, torch.bfloat16):
            output = packed_forward(self.model, batch)
        return packed_mse(output, batch.pack_like(latents), batch.layout).mean()

    def stacked(self, inputs: Inputs) -> torch.Tensor:
        """Take a step on one stack, in which samples are padded to the largest where they differ."""
        latents, timesteps, text = inputs
        stack, real = pad_all(latents)
        with nullcontext() if self.packing is None else packing_disabled(self.model):
            with torch.autocast(self.scale.device, torch.bfloat16):
                output = self.model(stack, timesteps, text, return_dict=False)[0]
            errors = (output - stack).square() * real
            return self._update((errors.flatten(1).sum(1) / (16 * real.flatten(1).sum(1))).mean())

    def _update(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def pad_all(latents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack latents, padded to the largest side along each axis; and ones where they are real, zeros elsewhere."""
    sides = [max(latent.shape[axis] for latent in latents) for axis in (1, 2, 3)]

    def pad(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, [p for axis in (3, 2, 1) for p in (0, sides[axis - 1] - values.shape[axis])])

    masks = [torch.ones_like(latent[:1]) for latent in latents]
    return torch.stack([pad(latent) for latent in latents]), torch.stack([pad(mask) for mask in masks])
