"""How SkyReels-V2 is packed: as Wan, with a timestep per latent frame where it is trained by diffusion forcing.

The stock model takes timesteps per frame of a row (`enable_diffusion_forcing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.family import Draw, Transformer
from ..wan.packing import WanFamily

FPS = "fps"


class SkyReelsV2Family(WanFamily):
    """Packing of `SkyReelsV2Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Models with `inject_sample_info` take `fps`, `(n,)`: 0 for 16 frames per second and 1 for others, as the pipeline
    numbers them.
    """

    transformer_class = "SkyReelsV2Transformer3DModel"
    tested_forwards = ("5641354bc875",)
    stock_processors = ("SkyReelsV2AttnProcessor",)
    timesteps_per = "frame"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse attention to earlier blocks of frames alone, which a pack does not have."""
        if transformer.config.num_frame_per_block > 1:
            raise PackingError(
                f"This model attends by blocks of num_frame_per_block={transformer.config.num_frame_per_block} frames "
                "to earlier blocks alone; a pack attends to whole samples. Set it to 1, or train buckets."
            )
        super().check(transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return also the number of the frame rate, for models that embed it."""
        draws = super().conditioning(transformer)
        if not transformer.config.inject_sample_info:
            return draws
        return {**draws, FPS: lambda grids: torch.arange(len(grids)) % 2}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the numbers of the frame rates where they were given, for a list of them."""
        rows, layout = super().rows(batch), batch.layout
        if FPS not in batch.conditioning:
            return rows
        rates = batch.conditioning[FPS].tolist()
        counts = [*layout.strips_per_sample, layout.padding_strips]
        by_strip = [rate for rate, count in zip([*rates, rates[-1]], counts, strict=True) for _ in range(count)]
        return replace(rows, conditioning={**rows.conditioning, FPS: torch.tensor(by_strip)})

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the forward, with diffusion forcing where there are timesteps of tokens.

        Raises:
            PackingError: If the model embeds the frame rate, and there are such timesteps for several rates.
        """
        kwargs, forces = super().inputs(rows), rows.timesteps.ndim == 2
        if FPS in kwargs:
            rates = kwargs[FPS].tolist()
            if forces:
                # the stock forward adds the embedding of a single rate to all rows, but fails for a rate of each
                rates = list(set(rates))
                if len(rates) > 1:
                    raise PackingError(
                        "A SkyReels-V2 that embeds the frame rate (inject_sample_info) takes timesteps of single "
                        "frames for samples of one rate at a time, as diffusers adds the two. Train samples of 16 "
                        "frames per second apart from others and from images, or pass one timestep per sample."
                    )
            kwargs[FPS] = rates
        return {**kwargs, "enable_diffusion_forcing": True} if forces else kwargs


FAMILY = SkyReelsV2Family()
