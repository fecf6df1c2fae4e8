"""Small models with samples of many sizes, run one by one or packed.

Every family has a row in `CASES`: how its small model is made, its samples, and how the stock model runs one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from hf_bucketing.losses import masked_mse
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models import family_models as models
from tests.models.joint_cases import JOINT_CASES

Size = tuple[int, int, int]
Draw = Callable[..., torch.Tensor]

# Mixed durations, landscape, portrait, square, an image, a single token, two of one size; (frames, height, width).
SIZES = ((3, 4, 6), (1, 8, 4), (5, 6, 6), (1, 2, 2), (3, 4, 6), (1, 10, 6))


TEXT_LENGTHS = (7, 3, 5, 1, 7, 4)


TIMESTEPS = torch.tensor([10.0, 500.0, 900.0, 0.5, 999.0, 333.0])


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A family's small model, its samples, and the stock call for one of them.

    Args:
        make: Makes the model; takes changes of its configuration.
        alone: Runs the stock model on `(C, F, H, W)` as its pipeline does, given timestep, text, conditioning.
        sizes: Latent frames, height and width of each sample.
        text_lengths: As many.
        channels: Of the latents; and of what the model returns.
        text_dim: Of the text embeddings.
        timesteps: One per sample.
        conditioning: Draws what else the model is told, for that number of samples.
        float64: Whether the model computes in float64 throughout.
        empty_text: Whether the model runs a sample without text.
        without_gradient: Parts of the names of parameters that the outputs do not depend on.
    """

    make: Callable[..., torch.nn.Module]
    alone: Callable[..., torch.Tensor]
    sizes: tuple[Size, ...] = SIZES
    text_lengths: tuple[int, ...] = TEXT_LENGTHS
    channels: int = 4
    out_channels: int = 4
    text_dim: int = 16
    timesteps: torch.Tensor = TIMESTEPS
    conditioning: Callable[[Draw, int], Mapping[str, torch.Tensor]] = lambda draw, count: {}
    float64: bool = True
    without_gradient: tuple[str, ...] = ()
    empty_text: bool = True

    def model(self, dtype: torch.dtype = torch.float32, **config: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        model = self.make(**config)
        for parameter in model.parameters():  # many start at zero or one, where errors would not show
            parameter.data += 0.02 * torch.randn_like(parameter)
        model = model.to(dtype)
        if getattr(model, "learnable_pos_embed", None) is not None:
            model.learnable_pos_embed.float()  # Cosmos computes it in no other dtype
        return model


WAN = FamilyCase(make=models.make_wan, alone=models.wan_alone)
WAN_IMAGE = FamilyCase(
    make=models.make_wan_image,
    alone=models.wan_image_alone,
    channels=6,
    text_lengths=(512,) * len(SIZES),  # the stock processor splits text from image tokens at this count
    conditioning=lambda draw, count: {"encoder_hidden_states_image": draw(count, 6, 8)},
)
WAN_FIRST_AND_LAST = replace(WAN_IMAGE, make=partial(models.make_wan_image, pos_embed_seq_len=6))

LATTE = FamilyCase(make=models.make_latte, alone=models.latte_alone, out_channels=8)
IMAGES = tuple((1, height, width) for _, height, width in SIZES)
PIXART = FamilyCase(make=models.make_pixart, alone=models.pixart_alone, sizes=IMAGES, out_channels=8)
PIXART_CONDITIONED = replace(
    PIXART,
    make=partial(models.make_pixart, use_additional_conditions=True),
    conditioning=lambda draw, count: {
        "resolution": torch.tensor([[256.0, 384.0 + 32 * sample] for sample in range(count)]),
        "aspect_ratio": torch.tensor([[256.0 / (384 + 32 * sample)] for sample in range(count)]),
    },
)
LTX = FamilyCase(
    make=models.make_ltx,
    alone=models.ltx_alone,
    conditioning=lambda draw, count: {
        "rope_interpolation_scale": torch.tensor([[8 / (12 + sample), 32.0, 32.0] for sample in range(count)])
    },
    float64=False,
)
LTX_PATCHES = replace(LTX, make=partial(models.make_ltx, patch_size=2, in_channels=16, out_channels=16))
# The stock Allegro cannot run a sample of one token, whose dimension its blocks squeeze away.
ALLEGRO = FamilyCase(
    make=models.make_allegro,
    alone=models.allegro_alone,
    sizes=tuple((1, 2, 4) if size == (1, 2, 2) else size for size in SIZES),
    float64=False,
)
COSMOS = FamilyCase(
    make=models.make_cosmos,
    alone=models.cosmos_alone,
    conditioning=lambda draw, count: {"fps": torch.tensor([12.0 + sample for sample in range(count)])},
    float64=False,
)

COSMOS_ROTARY_ONLY = replace(
    COSMOS,
    make=partial(
        models.make_cosmos,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=16,
        encoder_hidden_states_channels=16,
    ),
)

CASES: dict[str, FamilyCase] = {
    "allegro": ALLEGRO,
    "cosmos": COSMOS,
    "cosmos rotary only": COSMOS_ROTARY_ONLY,
    "latte": LATTE,
    "ltx": LTX,
    "ltx patches": LTX_PATCHES,
    "pixart": PIXART,
    "pixart conditioned": PIXART_CONDITIONED,
    "wan": WAN,
    "wan image": WAN_IMAGE,
    "wan first and last": WAN_FIRST_AND_LAST,
    **{name: FamilyCase(**settings) for name, settings in JOINT_CASES.items()},
}


def make_model(dtype: torch.dtype = torch.float32, **config: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    width = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 3}
    return models.make_wan(**{**width, **config}).to(dtype)


class Samples:
    """Latents, texts, timesteps, conditioning and targets of a family's case."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        seed: int = 1,
        order: tuple[int, ...] | None = None,
        case: FamilyCase = WAN,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = tuple(range(len(case.sizes))) if order is None else order
        self.case = case

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        latents = [draw(case.channels, *size) for size in case.sizes]
        texts = [draw(length, case.text_dim) for length in case.text_lengths]
        targets = [draw(case.out_channels, *size) for size in case.sizes]
        self.latents, self.text, self.targets = ([values[i] for i in order] for values in (latents, texts, targets))
        self.timesteps = case.timesteps[list(order)]
        self.conditioning = {
            name: values[list(order)] for name, values in case.conditioning(draw, len(case.sizes)).items()
        }

    def pack(self, packing):
        return packing.pack(self.latents, timesteps=self.timesteps, text=self.text, conditioning=self.conditioning)

    def alone(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Run each sample by itself through the unpacked model."""
        inputs = zip(self.latents, self.timesteps, self.text, strict=True)
        return [
            self.case.alone(model, x, t, e, **{name: values[sample] for name, values in self.conditioning.items()})
            for sample, (x, t, e) in enumerate(inputs)
        ]

    def loss_alone(self, model: torch.nn.Module) -> torch.Tensor:
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


def assert_same_gradients(
    ones: dict[str, torch.Tensor],
    others: dict[str, torch.Tensor],
    limit: float,
    *,
    without_gradient: tuple[str, ...] = (),
) -> None:
    """Compare each parameter's gradient; where it is zero but for rounding (biases of keys), so must the other be."""
    assert ones.keys() == others.keys()
    whole = float(torch.stack([one.norm() for one in ones.values()]).norm())
    for name, one in ones.items():
        assert (one.norm() > 0) != any(part in name for part in without_gradient), f"{name}: {one.norm()}"
        if one.norm() > 1e-6 * whole:
            assert float((one - others[name]).norm() / one.norm()) <= limit, name
        else:
            assert others[name].norm() <= 1e-6 * whole, name
