"""The table of model families: a small model each, its samples, and how the stock model runs one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import WanTransformer3DModel

from hf_bucketing.losses import masked_mse
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models import cross_models, joint_models

Size = tuple[int, int, int]
Draw = Callable[..., torch.Tensor]

# Mixed durations, landscape, portrait, square, an image, a single token, two of one size; (frames, height, width).
SIZES = ((3, 4, 6), (1, 8, 4), (5, 6, 6), (1, 2, 2), (3, 4, 6), (1, 10, 6))
TEXT_LENGTHS = (7, 3, 5, 1, 7, 4)
TIMESTEPS = torch.tensor([10.0, 500.0, 900.0, 0.5, 999.0, 333.0])


class Expected(NamedTuple):
    """What the samples alone give in float32: outputs, the mean of their losses, and its gradients."""

    outputs: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    model = model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith("learnable_pos_embed"):
            module.float()  # Cosmos computes it in no other dtype
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyCase:
    """A family's small model, its samples, and the stock call for one of them.

    Args:
        make: Makes the model; takes changes of its configuration.
        alone: Runs the stock model on `(C, F, H, W)` as its pipeline does, given timestep, text, conditioning.
        sizes: Latent frames, height and width of each sample.
        text_lengths: As many.
        channels: Channels of the latents.
        out_channels: Channels of the model's output.
        text_dim: Channels of the text embeddings.
        timesteps: One per sample.
        conditioning: Draws the further inputs of the model, for that number of samples.
        empty_text: Whether the model runs a sample without text.
        timestep_per_token: Whether the stock model, where it takes several timesteps, takes one per token, or per
            frame only.
        shortest_strip: Fewest tokens of a strip.
        without_gradient: Parts of the names of parameters that the outputs do not depend on.
        lora_targets: Ends of the names of layers that get adapters.
        on_cpu: Makes a context in which the stock model runs forward and backward on a CPU.
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
    without_gradient: tuple[str, ...] = ()
    empty_text: bool = True
    timestep_per_token: bool = True
    shortest_strip: int = 1
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v")
    on_cpu: Callable[[], AbstractContextManager[None]] = nullcontext

    def model(self, dtype: torch.dtype = torch.float32, **config: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        model = self.make(**config)
        for parameter in model.parameters():  # many start at zero or one, where errors would not show
            parameter.data += 0.02 * torch.randn_like(parameter)
        return in_dtype(model, dtype)

    @cached_property
    def expected(self) -> Expected:
        """What the default samples give when they run alone through the stock model, computed once."""
        model, samples = self.model(), Samples(case=self)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            outputs = samples.alone(model)
            loss = samples.loss_of(outputs)
            values = gradients(model, loss)
        return Expected([output.detach() for output in outputs], float(loss.detach()), values)


WAN = FamilyCase(make=cross_models.make_wan, alone=cross_models.wan_alone)
WAN_IMAGE = FamilyCase(
    make=cross_models.make_wan_image,
    alone=cross_models.wan_image_alone,
    channels=6,
    text_lengths=(512,) * len(SIZES),  # the stock processor splits text from image tokens at this count
    conditioning=lambda draw, count: {"encoder_hidden_states_image": draw(count, 6, 8)},
)
LATTE = FamilyCase(make=cross_models.make_latte, alone=cross_models.latte_alone, out_channels=8)
PIXART = FamilyCase(
    make=cross_models.make_pixart,
    alone=cross_models.pixart_alone,
    sizes=tuple((1, height, width) for _, height, width in SIZES),
    out_channels=8,
)
PIXART_CONDITIONED = replace(
    PIXART,
    make=partial(cross_models.make_pixart, use_additional_conditions=True),
    conditioning=lambda draw, count: {
        "resolution": torch.tensor([[256.0, 384.0 + 32 * sample] for sample in range(count)]),
        "aspect_ratio": torch.tensor([[256.0 / (384 + 32 * sample)] for sample in range(count)]),
    },
)
LTX = FamilyCase(
    make=cross_models.make_ltx,
    alone=cross_models.ltx_alone,
    conditioning=lambda draw, count: {
        "rope_interpolation_scale": torch.tensor([[8 / (12 + sample), 32.0, 32.0] for sample in range(count)])
    },
)
COSMOS = FamilyCase(
    make=cross_models.make_cosmos,
    alone=cross_models.cosmos_alone,
    conditioning=lambda draw, count: {"fps": torch.tensor([12.0 + sample for sample in range(count)])},
    timestep_per_token=False,
)
COSMOS_ROTARY_ONLY = replace(
    COSMOS,
    make=partial(
        cross_models.make_cosmos,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=16,
        encoder_hidden_states_channels=16,
    ),
)

IMAGE_SIZES = ((1, 4, 6), (1, 8, 4), (1, 2, 2), (1, 6, 6), (1, 4, 6), (1, 10, 4))
VIDEO_SIZES = ((3, 4, 6), (1, 8, 4), (5, 6, 6), (1, 2, 2), (3, 10, 12), (1, 10, 12))
SD3 = FamilyCase(
    make=joint_models.make_sd3,
    alone=joint_models.sd3_alone,
    sizes=IMAGE_SIZES,
    conditioning=lambda draw, count: {"pooled_projections": draw(count, 20)},
    without_gradient=("1.attn.add_q_proj", "1.attn.norm_added_q"),  # the last block's text goes nowhere
)
COGVIDEOX = FamilyCase(make=joint_models.make_cogvideox, alone=joint_models.cogvideox_alone)
COGVIDEOX_SINCOS = replace(
    COGVIDEOX, make=joint_models.make_cogvideox_sincos, sizes=VIDEO_SIZES, text_lengths=(7,) * len(VIDEO_SIZES)
)
COGVIDEOX_LEARNED = replace(
    COGVIDEOX_SINCOS,
    make=joint_models.make_cogvideox_learned,
    channels=8,
    sizes=tuple((frames, 10, 12) for frames, _, _ in VIDEO_SIZES),
)
COGVIDEOX_15 = replace(
    COGVIDEOX,
    make=joint_models.make_cogvideox_15,
    sizes=tuple((2 * frames, height, width) for frames, height, width in VIDEO_SIZES),
    conditioning=lambda draw, count: {"ofs": 2 + draw(count)},
)
HUNYUAN = FamilyCase(
    make=joint_models.make_hunyuan,
    alone=joint_models.hunyuan_alone,
    empty_text=False,
    conditioning=lambda draw, count: {
        "pooled_projections": draw(count, 20),
        "guidance": 1000 * (6 + draw(count)),
    },
)
FLUX = FamilyCase(
    make=joint_models.make_flux,
    alone=joint_models.flux_alone,
    sizes=IMAGE_SIZES,
    conditioning=lambda draw, count: {"pooled_projections": draw(count, 20), "guidance": 3.5 + draw(count)},
)

CROSS: dict[str, FamilyCase] = {
    "cosmos": COSMOS,
    "cosmos rotary only": COSMOS_ROTARY_ONLY,
    "latte": LATTE,
    "ltx": LTX,
    "ltx patches": replace(LTX, make=partial(cross_models.make_ltx, patch_size=2, in_channels=16, out_channels=16)),
    "pixart": PIXART,
    "pixart conditioned": PIXART_CONDITIONED,
    "wan": WAN,
    "wan image": WAN_IMAGE,
    "wan first and last": replace(WAN_IMAGE, make=partial(cross_models.make_wan_image, pos_embed_seq_len=6)),
}
"""Families whose text is attended to apart."""

JOINT: dict[str, FamilyCase] = {
    "sd3": SD3,
    "sd3.5": replace(SD3, make=joint_models.make_sd35),
    "cogvideox": COGVIDEOX,
    "cogvideox-sincos": COGVIDEOX_SINCOS,
    "cogvideox-learned": COGVIDEOX_LEARNED,
    "cogvideox-1.5": COGVIDEOX_15,
    "hunyuan": HUNYUAN,
    "flux": FLUX,
}
"""Families whose text attends in one sequence with the tokens."""

CASES = {**CROSS, **JOINT}


def each_case(cases: Mapping[str, FamilyCase]) -> pytest.MarkDecorator:
    """Run a test with each case of a table."""
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


each_family = each_case(CASES)


def make_model(dtype: torch.dtype = torch.float32, **config: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    width = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 3}
    return cross_models.make_wan(**{**width, **config}).to(dtype)


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
            name: values[list(order)] if torch.is_tensor(values) else [values[sample] for sample in order]
            for name, values in case.conditioning(draw, len(case.sizes)).items()
        }

    def pack(self, packing, **options: Any):
        inputs = {"timesteps": self.timesteps, "text": self.text, "conditioning": self.conditioning, **options}
        return packing.pack(self.latents, **inputs)

    def alone(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Run each sample by itself through the unpacked model."""
        inputs = zip(self.latents, self.timesteps, self.text, strict=True)
        return [
            self.case.alone(model, x, t, e, **{name: values[sample] for name, values in self.conditioning.items()})
            for sample, (x, t, e) in enumerate(inputs)
        ]

    def loss_of(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(outputs, self.targets, strict=True)
        return torch.cat([masked_mse(output[None], target[None]) for output, target in pairs]).mean()

    def loss_alone(self, model: torch.nn.Module) -> torch.Tensor:
        return self.loss_of(self.alone(model))

    def loss_packed(self, model: torch.nn.Module, packing) -> torch.Tensor:
        batch = self.pack(packing)
        return packed_mse(packed_forward(model, batch), batch.pack_like(self.targets), batch.layout).mean()


def gradients(model: torch.nn.Module, *losses: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def packed_outputs(model, samples: Samples, *, strip_length: int = 4, **options) -> list[torch.Tensor]:
    """Run the samples packed and disable packing again."""
    packing = enable_packing(model, strip_length=strip_length, **options)
    batch = samples.pack(packing)
    outputs = batch.unpack(packed_forward(model, batch))
    disable_packing(model)
    return outputs


@torch.no_grad()
def outputs_with_nan(
    case: FamilyCase, name: str, victims: Sequence[int]
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """Yield each victim with the outputs of a pack, and those where its conditioning of that name is NaN."""
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)

    def outputs() -> list[torch.Tensor]:
        batch = samples.pack(packing)
        return batch.unpack(packed_forward(model, batch))

    before, own = outputs(), samples.conditioning[name]
    for victim in victims:
        shown = [values * torch.nan if row == victim else values for row, values in enumerate(own)]
        samples.conditioning[name] = torch.stack(shown) if torch.is_tensor(own) else shown
        yield victim, before, outputs()


def largest_difference(outputs, others) -> float:
    return max(float((output - other).detach().abs().max()) for output, other in zip(outputs, others, strict=True))


def assert_same_gradients(
    expected: dict[str, torch.Tensor],
    others: dict[str, torch.Tensor],
    limit: float,
    *,
    without_gradient: tuple[str, ...] = (),
) -> None:
    """Compare each parameter's gradient; where it is zero but for rounding (biases of keys), so must the other be."""
    assert expected.keys() == others.keys()
    whole = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for name, gradient in expected.items():
        assert (gradient.norm() > 0) != any(part in name for part in without_gradient), f"{name}: {gradient.norm()}"
        if gradient.norm() > 1e-6 * whole:
            assert float((gradient - others[name]).norm() / gradient.norm()) <= limit, name
        else:
            assert others[name].norm() <= 1e-6 * whole, name


def embed_time_in_the_dtype_of_the_weights(transformer: Any) -> None:
    """Let the stock Motif-Video run in float64."""

    def cast(embedder: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0].to(embedder.linear_1.weight.dtype),)

    transformer.time_text_embed.timestep_embedder.register_forward_pre_hook(cast)
