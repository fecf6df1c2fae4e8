"""HunyuanImage 2.1: rotary positions over rows and columns; text refined by itself, and glyphs, in joint attention.

The pipeline masks the padding of a text: pass what the mask keeps. What an image shall spell has an embedding of its
own, byte by byte (`encoder_hidden_states_2`, with a mask). The stock forward refines the text, embeds the glyphs, and
puts both into one row by their masks, at which the CPU waits for the device several times per sample. In a pack, hooks
embed the glyphs without their padding and fill the text slots of the strips, in an order that the CPU knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from threading import local
from typing import Any

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.names import Backend, Grid
from ...packing.positions import shape_only
from ...packing.processors import Rotary
from ...packing.texts import TextTokens, apply_text_mask
from ..joint import JointFamily, hook_text_modulation, order_by_sample

GLYPHS, GLYPH_MASK = "encoder_hidden_states_2", "encoder_attention_mask_2"


class HunyuanImageFamily(JointFamily):
    """Packing of `HunyuanImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `encoder_hidden_states_2`, `(n, length, text_embed_2_dim)`, and `encoder_attention_mask_2`, `(n, length)`, are the
    glyphs; `timestep_r`, `(n,)`, of a mean-flow model is the timestep to which its prediction leads.
    """

    transformer_class = "HunyuanImageTransformer2DModel"
    tested_forwards = ("d8631d951c7a",)
    stock_processors = ("HunyuanImageAttnProcessor",)
    text = TextTokens(rows="per_sample", channels="text_embed_dim", shortest=1)
    cast_inputs = (*JointFamily.cast_inputs, GLYPHS, GLYPH_MASK, "timestep")
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

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return glyphs and their mask, any distilled guidance, and the end of a mean flow's step."""
        config, length = transformer.config, 4
        draws = dict(super().conditioning(transformer))
        if config.text_embed_2_dim is not None:
            draws[GLYPHS] = lambda grids: torch.randn(len(grids), length, config.text_embed_2_dim)
            draws[GLYPH_MASK] = lambda grids: (
                torch.arange(length) < torch.randint(length + 1, (len(grids), 1))
            ).long()
        if config.use_meanflow:
            draws["timestep_r"] = lambda grids: torch.zeros(len(grids))
        return draws

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the tokens of each sample's glyphs, where the model has them."""
        mask = conditioning.get(GLYPH_MASK)
        return None if mask is None else tuple(mask.bool().cpu().sum(1).tolist())

    def processor(self, name: str, backend: Backend) -> Any:
        """Keep the text refiner's own processor, which attends inside one text."""
        return None if name.startswith("context_embedder.") else super().processor(name, backend)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables as `rope` computes them."""
        latent = shape_only(torch.empty((), device=device), grid, (1, *module.patch_size))
        return tuple(module.forward(latent[:, :, 0]))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the transformer, the text refiner and the norms."""
        return [
            *super().hook_positions(transformer, base_size),
            transformer.register_forward_pre_hook(_embed_glyphs, with_kwargs=True),
            transformer.context_embedder.register_forward_pre_hook(_by_sample),
            transformer.context_embedder.register_forward_hook(_fill_slots),
            *hook_text_modulation(transformer, single="last"),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the text mask that the model expects; timesteps come in the dtype of the latents, as its pipeline."""
        timesteps = rows.timesteps.to(rows.latents.dtype)
        return {**super().inputs(rows), "timestep": timesteps, "encoder_attention_mask": rows.known_mask}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the glyphs of all samples in one row, without their padding."""
        others = dict(batch.conditioning)
        glyphs, mask = others.pop(GLYPHS, None), others.pop(GLYPH_MASK, None)
        rows = super().rows(replace(batch, conditioning=others))
        if glyphs is None:
            return rows
        real = apply_text_mask("masked", to_device(glyphs, batch.text.device), mask=mask)
        return replace(rows, conditioning={**rows.conditioning, GLYPHS: torch.cat(real)[None]})


def _by_sample(refiner: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn the timesteps of the strips into those of the samples, whose texts come in a row each."""
    texts, timesteps, mask = args
    return texts, timesteps[active_layout().joint.first_strips], mask


class _Taken(local):
    """The embedded glyphs of the forward that a thread computes, `(tokens, dim)`, until they join the texts."""

    glyphs: tuple[torch.Tensor, ...] = ()


_taken = _Taken()


@torch.compiler.disable  # the glyphs of each pack are as many as they are
def _embed_glyphs(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Embed the glyphs here, so that the stock forward finds none to sort by masks."""
    rest = dict(kwargs)
    glyphs = rest.pop(GLYPHS, None)
    _taken.glyphs = () if glyphs is None else (transformer.context_embedder_2(glyphs)[0],)
    return args, rest


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _fill_slots(refiner: torch.nn.Module, args: tuple[torch.Tensor, ...], texts: torch.Tensor) -> torch.Tensor:
    """Put each sample's glyphs and its refined text into the text slots of strips."""
    layout, glyphs = active_layout(), _taken.glyphs
    _taken.glyphs = ()
    order = order_by_sample(layout, *([layout.added_lengths] if layout.added_lengths else []))
    return layout.joint.fill_slots(torch.cat([*glyphs, texts.flatten(0, 1)]).index_select(0, order))


FAMILY = HunyuanImageFamily()
