"""HunyuanImage 2.1: rotary positions over rows and columns; text refined by itself, and glyphs, in joint attention.

The pipeline masks the padding of a text: pass what the mask keeps. What an image shall spell has an embedding of its
own, byte by byte (`encoder_hidden_states_2`, with a mask). The model refines the text, embeds the glyphs and puts both
into one row; in a pack it does so with a row per sample, from which the text slots of the strips are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ...errors import PackingError
from ...packing.attention.dispatch import Backend
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.layout import Grid
from ...packing.positions import shape_only
from ...packing.processors import Rotary
from ..joint import JointFamily, hook_text_modulation

GLYPHS, GLYPH_MASK = "encoder_hidden_states_2", "encoder_attention_mask_2"


class HunyuanImageFamily(JointFamily):
    """Packing of `HunyuanImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `encoder_hidden_states_2`, `(n, length, text_embed_2_dim)`, and `encoder_attention_mask_2`, `(n, length)`, are the
    glyphs; `timestep_r`, `(n,)`, of a mean-flow model is the timestep to which its prediction leads.
    """

    transformer_class = "HunyuanImageTransformer2DModel"
    tested_forwards = ("d8631d951c7a",)
    stock_processors = ("HunyuanImageAttnProcessor",)
    text_channels = "text_embed_dim"
    images_only = True
    latents_as = "images"
    position_module = "rope"
    attention_kwargs = "attention_kwargs"
    guidance = 3250.0  # a thousandfold, as its pipeline scales it

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse the refiner, which takes an image as further channels of a clip."""
        if len(transformer.config.patch_size) != 2:
            raise PackingError(
                f"This HunyuanImage transformer has patches of {tuple(transformer.config.patch_size)}: it is the "
                "refiner of finished images. Packs are for the model that makes images from text."
            )
        super().check(transformer, strip_length=strip_length)

    def patch(self, transformer: Transformer) -> Grid:
        """Return one frame, and the patch's rows and columns."""
        rows, columns = transformer.config.patch_size
        return 1, rows, columns

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return glyphs and their mask, any distilled guidance, and the end of a mean flow's step."""
        config, length = transformer.config, 4
        draws: dict[str, Draw] = {}
        if config.text_embed_2_dim is not None:
            draws[GLYPHS] = lambda grids: torch.randn(len(grids), length, config.text_embed_2_dim)
            draws[GLYPH_MASK] = lambda grids: (
                torch.arange(length) < torch.randint(length + 1, (len(grids), 1))
            ).long()
        if config.guidance_embeds:
            draws["guidance"] = lambda grids: torch.full((len(grids),), self.guidance)
        if config.use_meanflow:
            draws["timestep_r"] = lambda grids: torch.zeros(len(grids))
        return draws

    def with_further_text(self, texts: list[torch.Tensor], conditioning: Mapping[str, Any]) -> list[torch.Tensor]:
        """Add a row per glyph, and refuse empty texts, whose mean is NaN."""
        for sample, text in enumerate(texts):
            if not len(text):
                raise PackingError(f"HunyuanImage takes the mean of a text's tokens; text {sample} has none.")
        counts = _glyph_counts(conditioning, len(texts))
        return [F.pad(text, (0, 0, 0, count)) if count else text for text, count in zip(texts, counts, strict=True)]

    def processor(self, name: str, backend: Backend) -> Any:
        """Keep the text refiner's own processor, which attends inside one text."""
        return None if name.startswith("context_embedder.") else super().processor(name, backend)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables as `rope` computes them."""
        latent = shape_only(torch.empty((), device=device), grid, (1, *module.patch_size))
        return tuple(module.forward(latent[:, :, 0]))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the text refiner, the first block, and the norms."""
        return [
            *super().hook_positions(transformer, base_size),
            transformer.context_embedder.register_forward_pre_hook(_by_sample),
            transformer.transformer_blocks[0].register_forward_pre_hook(_fill_slots),
            *hook_text_modulation(transformer, single="last"),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the text mask that the model expects; timesteps come in the dtype of the latents, as its pipeline."""
        mask = torch.ones_like(rows.text[..., 0]) if rows.text_mask is None else rows.text_mask
        timesteps = rows.timesteps.to(rows.latents.dtype)
        return {**super().inputs(rows), "timestep": timesteps, "encoder_attention_mask": mask}

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give the model each sample's text and glyphs in a row of their own."""
        by_sample = {name: batch.conditioning[name] for name in (GLYPHS, GLYPH_MASK) if name in batch.conditioning}
        rest = {name: values for name, values in batch.conditioning.items() if name not in by_sample}
        lengths = batch.layout.text_lengths
        counts = _glyph_counts(by_sample, len(lengths))
        with_glyphs = batch.layout.joint.read_slots(self.text_rows(batch)).split(lengths)
        texts = [text[: len(text) - count] for text, count in zip(with_glyphs, counts, strict=True)]
        masks = [text.new_ones(len(text)) for text in texts]
        return {
            **super().forward_kwargs(replace(batch, conditioning=rest)),
            **by_sample,
            "encoder_hidden_states": pad_sequence(texts, batch_first=True),
            "encoder_attention_mask": pad_sequence(masks, batch_first=True),
        }


def _glyph_counts(conditioning: Mapping[str, torch.Tensor], samples: int) -> list[int]:
    """Return the number of each sample's glyphs."""
    if GLYPH_MASK not in conditioning:
        return [0] * samples
    return [int(count) for count in conditioning[GLYPH_MASK].bool().sum(1).tolist()]


def _by_sample(refiner: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn the timesteps of the strips into those of the samples, whose texts come in a row each."""
    texts, timesteps, mask = args
    return texts, timesteps[active_layout().joint.first_strips], mask


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _fill_slots(block: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Put each sample's refined text and glyphs, the first entries of its row, into the text slots of strips."""
    hidden_states, texts, *rest = args
    layout = active_layout()
    own = [row[:length] for row, length in zip(texts, layout.text_lengths, strict=True)]
    return hidden_states, layout.joint.fill_slots(torch.cat(own)), *rest


FAMILY = HunyuanImageFamily()
