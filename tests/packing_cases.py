"""A small Wan model and samples of many sizes, run one by one or packed."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel

from hf_bucketing.losses import masked_mse, packed_mse
from hf_bucketing.packing import packed_forward

SIZES = ((3, 4, 6), (1, 8, 4), (5, 6, 6), (1, 2, 2), (3, 4, 6), (1, 10, 6))


TEXT_LENGTHS = (7, 3, 5, 1, 7, 4)


TIMESTEPS = torch.tensor([10.0, 500.0, 900.0, 0.5, 999.0, 333.0])


def make_model(dtype: torch.dtype = torch.float32, **config) -> WanTransformer3DModel:
    torch.manual_seed(0)
    settings = {
        **{"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 24, "in_channels": 4},
        **{"out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "num_layers": 3},
        **{"cross_attn_norm": True, "rope_max_seq_len": 64},
    }
    return WanTransformer3DModel(**{**settings, **config}).to(dtype)


class Samples:
    """Latents, texts, timesteps and targets of the sizes above."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, *, seed: int = 1, order: tuple[int, ...] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = tuple(range(len(SIZES))) if order is None else order

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        latents, texts = [draw(4, *size) for size in SIZES], [draw(length, 16) for length in TEXT_LENGTHS]
        targets = [draw(4, *size) for size in SIZES]
        self.latents, self.text, self.targets = ([values[i] for i in order] for values in (latents, texts, targets))
        self.timesteps = TIMESTEPS[list(order)]

    def pack(self, packing):
        return packing.pack(self.latents, timesteps=self.timesteps, text=self.text)

    def alone(self, model: WanTransformer3DModel) -> list[torch.Tensor]:
        """Run each sample by itself through the unpacked model."""
        inputs = zip(self.latents, self.timesteps, self.text, strict=True)
        return [model(x[None], t[None], e[None]).sample[0] for x, t, e in inputs]

    def loss_alone(self, model: WanTransformer3DModel) -> torch.Tensor:
        outputs = zip(self.alone(model), self.targets, strict=True)
        return torch.cat([masked_mse(output[None], target[None]) for output, target in outputs]).mean()

    def loss_packed(self, model: torch.nn.Module, packing) -> torch.Tensor:
        batch = self.pack(packing)
        return packed_mse(packed_forward(model, batch), batch.pack_like(self.targets), batch.layout).mean()


def gradients(model: torch.nn.Module, *losses: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(ones, others) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ones, others, strict=True))


def assert_same_gradients(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor], limit: float) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert one.norm() > 0, f"{name} has no gradient to compare"
        assert float((one - others[name]).norm() / one.norm()) <= limit, name
