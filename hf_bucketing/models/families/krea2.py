"""Krea 2 Raw and Turbo: images in 2×2 blocks; layers of a text encoder, fused and refined; then one sequence.

The pipeline masks the padding of a text, which lies inside it: pass what the mask keeps. A text token holds the layers
of the text encoder side by side, `num_text_layers · text_hidden_dim` channels. Timesteps are the scheduler's, up to
1000; the model gets a thousandth of them, as from its pipeline. Text is not rotated.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.processors import PackedJointAttnProcessor, Rotary, attend
from ...packing.segments import SegmentSpans
from ...packing.texts import TextTokens, apply_text_mask, pad_texts
from ..joint import JointFamily, ModulatedRows, of_text
from ..recipe import Recipe
from ..shift import ShiftLaw
from ..texts import TextEmbeddings
from .flux import FluxFamily, token_ids
from .qwen_image import QwenImageRecipe

DISTILLED_SHIFT = math.exp(1.15)
"""Shift with which the pipeline calls distilled models (`is_distilled`), whatever the size."""


class PackedKrea2AttnProcessor(PackedJointAttnProcessor):
    """Gated attention of Krea 2 over the strips of a pack: of text and tokens, or of the text that it refines."""

    def segments(self, layout: PackedLayout) -> tuple[SegmentSpans, ...]:
        """Return the segments of text and tokens, and those of text alone."""
        return layout.joint.segments, layout.joint.text_segments

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; rows of text slots alone come without tables."""
        inner = {name: getattr(attn, name) for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k")}
        attention = SimpleNamespace(heads=attn.num_heads, **inner)  # without the projection that follows the gate
        if image_rotary_emb is None:
            query, key, value = self.heads(attention, hidden_states.flatten(0, 1))
            segments = active_layout().joint.text_segments
            attended: Any = attend(query, key, value, segments, backend=self.backend).flatten(1)
        else:
            attended = super().__call__(attention, hidden_states, image_rotary_emb=image_rotary_emb)
        gated = attended.view_as(hidden_states) * torch.sigmoid(attn.to_gate(hidden_states))
        projected: torch.Tensor = attn.to_out[0](gated)
        return projected


class Krea2Family(FluxFamily):
    """Packing of `Krea2Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Krea 2 Raw and Turbo"
    transformer_class = "Krea2Transformer2DModel"
    tested_forwards = ("99d7733c78e5",)
    processor_class = PackedKrea2AttnProcessor
    stock_processors = ("Krea2AttnProcessor",)
    stock_attention = (".layerwise_blocks.",)
    processors_read_fusion = False
    text = TextTokens(rows="slots", channels="text_hidden_dim", shortest=1)
    attention_kwargs = "attention_kwargs"
    position_module = "rotary_emb"
    max_references = 0
    untraceable = "in packs, torch cannot trace how its blocks modulate texts beside tokens"
    original_names = (
        *(
            (f"{ours}.*.attn.{layer}", f"{original}.*.attn.{name}")
            for ours, original in (
                ("transformer_blocks", "blocks"),
                ("text_fusion.layerwise_blocks", "txtfusion.layerwise_blocks"),
                ("text_fusion.refiner_blocks", "txtfusion.refiner_blocks"),
            )
            for layer, name in (
                ("to_q", "wq"),
                ("to_k", "wk"),
                ("to_v", "wv"),
                ("to_out.0", "wo"),
                ("to_gate", "gate"),
            )
        ),
        ("transformer_blocks.*.ff.**", "blocks.*.mlp.**"),
        ("text_fusion.layerwise_blocks.*.ff.**", "txtfusion.layerwise_blocks.*.mlp.**"),
        ("text_fusion.refiner_blocks.*.ff.**", "txtfusion.refiner_blocks.*.mlp.**"),
    )
    original_prefix = "diffusion_model."
    text_norms = row_norms = ()

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of all layers of a text token."""
        return super().text_dim(transformer) * int(transformer.config.num_text_layers)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the text's layers, and the blocks, to modulate text by its own sample's timestep."""
        return [
            *super().hook_positions(transformer, base_size),
            transformer.text_fusion.register_forward_pre_hook(_separate_layers),
            *(block.register_forward_pre_hook(_modulate_row) for block in transformer.transformer_blocks),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Place tokens as the pipeline does, behind text at zero; the hook replaces these positions in a pack."""
        tokens = token_ids(rows.grid, device=rows.latents.device)
        return {
            **JointFamily.inputs(self, rows),
            "position_ids": torch.cat([tokens.new_zeros(rows.text.shape[1], 3), tokens]),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the text's layers apart, and its mask."""
        layers = rows.text.unflatten(-1, (transformer.config.num_text_layers, -1))
        mask = None if rows.text_mask is None else rows.text_mask.bool()
        return {"encoder_hidden_states": layers, "encoder_attention_mask": mask}


def _separate_layers(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (text,) = args
    return (text.unflatten(-1, (module.projector.in_features, -1)),)


def _modulate_row(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Modulate the text before each row's tokens as its own sample."""
    hidden_states, embedding, *others = args
    text, length = of_text(embedding), active_layout().strip_length
    rows = ModulatedRows([text, embedding], [hidden_states.shape[1] - length, length])
    return hidden_states, embedding if text is embedding else rows, *others


class Krea2Recipe(Recipe):
    """Recipe of `Krea2Pipeline`; see [`Recipe`]."""

    pipeline_class = "Krea2Pipeline"
    family = Krea2Family()
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1024, 1024),)
    vae_strides = QwenImageRecipe.vae_strides

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, with the layers of a token side by side.

        The pipeline puts padding inside a text and masks it. Here it follows the text, so that it can be trimmed:
        all tokens of a text have one position, and their order makes no difference.
        """
        values, mask = self._encode_prompt(captions)
        values, mask = pad_texts(apply_text_mask("masked", values.flatten(2), mask=mask))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)

    def shift(self) -> float | ShiftLaw:
        """Return the shift by size, or that of distilled models."""
        return DISTILLED_SHIFT if self.pipeline.config.is_distilled else super().shift()


RECIPES = (Krea2Recipe,)
