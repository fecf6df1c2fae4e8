"""Cosmos: rotary positions in seconds, and learned positions in every block; text with zero padding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import local
from typing import Any

import torch
from diffusers.utils import is_torchvision_available

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid, shape_only
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens


class CosmosFamily(Family):
    """Packing of `CosmosTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `fps`, `(n,)`, is the frame rate of each sample, 0 for images. A condition mask (video-to-world) is a channel of
    the latents. The padding mask is zero everywhere, as in the pipeline.
    """

    transformer_class = "CosmosTransformer3DModel"
    tested_forwards = ("a451f9478991",)
    stock_processors = ("CosmosAttnProcessor2_0",)
    text = TextTokens(padding="keep_padding")
    cast_inputs = (*Family.cast_inputs, "padding_mask")
    interpolates = True
    timesteps_per = "frame"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that attend to image contexts, and models that need what is not installed."""
        if transformer.config.get("img_context_dim_in"):
            raise PackingError("This Cosmos transformer also attends to image contexts, which packing does not carry.")
        if transformer.config.concat_padding_mask and not is_torchvision_available():
            raise PackingError(
                "This Cosmos transformer resizes its padding mask with torchvision; install torchvision."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the learned positions of each axis; else the longest axis of the rotary positions."""
        t, h, w = transformer.rope.max_size
        longest = max(t, h, w)
        return (longest, longest, longest) if transformer.learnable_pos_embed is None else (t, h, w)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding, before the projection that some models have."""
        config = transformer.config
        projected = config.get("use_crossattn_projection")
        return int(config.crossattn_proj_in_channels if projected else config.text_embed_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the frame rate; drawn as 24 frames per second for all."""
        return {"fps": lambda grids: torch.full((len(grids),), 24.0)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook `rope` and the learned positions."""
        learned = transformer.learnable_pos_embed
        if learned is not None and base_size is not None:
            raise PackingError("Learned positions cannot be stretched to a base size; use positions='native'.")
        handles = [
            transformer.rope.register_forward_pre_hook(_take_rates, with_kwargs=True),
            transformer.rope.register_forward_hook(partial(_rotate, base_size)),
        ]
        if learned is not None:
            handles += [learned.register_forward_pre_hook(_shorten), learned.register_forward_hook(_look_up)]
        return handles

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add a padding mask of zeros, and give timesteps of frames the shape that the model asks for."""
        inputs = {**super().inputs(rows), "padding_mask": rows.latents.new_zeros(1, 1, *rows.latents.shape[3:])}
        if rows.timesteps.ndim == 2:
            inputs["timestep"] = inputs["timestep"][:, None, :, None, None]
        return inputs

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the one frame rate of all rows; none for images."""
        rate = rows.conditioning["fps"][0]
        return {"fps": rate if rate else None}


class _Taken(local):
    """The frame rates of the forward that a thread computes, which `rope` cannot take by strip."""

    rates: torch.Tensor


_taken = _Taken()


def _take_rates(rope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    _taken.rates = kwargs["fps"]
    return (_shorten(rope, args),), {**kwargs, "fps": None}


def _shorten(module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a latent of one token: what the module makes of it is replaced, and a strip may exceed its positions."""
    return shape_only(args[0], (1, 1, 1), module.patch_size)


def _rotate(
    base_size: Grid | None, rope: Any, args: tuple[torch.Tensor, ...], output: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = _angles(rope, base_size, _taken.rates, device=args[0].device)
    return angles.cos(), angles.sin()


def _look_up(embed: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    # embed.forward instead of embed(…), which would call this hook again
    def table(grid: Grid) -> tuple[torch.Tensor, ...]:
        return tuple(embed.forward(shape_only(args[0], grid, embed.patch_size)))

    (positions,) = position_strips(active_layout(), table)
    return positions


def _angles(rope: Any, base_size: Grid | None, rates: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Return the angle of each channel of a head, `(strips, strip_length, head_dim)`; frames count in 1/24 seconds."""

    def table(grid: Grid) -> tuple[torch.Tensor, ...]:
        return over_grid(axis_coordinates(grid, base_size, device=device))

    frames, rows, columns = position_strips(active_layout(), table)
    rates = torch.where(rates == 0, rope.base_fps, rates).to(device)  # as the model's own forward does without fps
    frames = frames / rates[:, None] * rope.base_fps
    axes = ((frames, rope.dim_t, rope.t_ntk_factor), (rows, rope.dim_h, rope.h_ntk_factor))
    parts = []
    for coordinates, dim, factor in (*axes, (columns, rope.dim_w, rope.w_ntk_factor)):
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32)[: dim // 2] / dim
        parts.append(coordinates[..., None] * (1.0 / (10000.0 * factor) ** exponents))
    return torch.cat([*parts, *parts], dim=-1)


FAMILY = CosmosFamily()
