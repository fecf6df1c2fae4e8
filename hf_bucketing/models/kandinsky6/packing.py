"""How Kandinsky 6 is packed: as Kandinsky 5, without its sound.

The stock forward runs the video alone where it gets no sound. It numbers text and tokens itself, by batch row: hooks
number the text in slots, and the tokens, by their samples. Positions are scaled as the transformer's configuration
says, the same for all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Backend, Grid
from ...packing.positions import Tables, position_strips
from ..joint import JointFamily, embeddings_of_text
from ..kandinsky5.packing import CONDITION, SCALE, Kandinsky5Family, PackedKandinsky5AttnProcessor, rotated
from ..positions import one_table

SOUND = ("audio_", "va_cross_attention.", "av_cross_attention.", "va_modulation.", "av_modulation.")
"""Parts of the names of parameters that a video without sound does not depend on."""


class PackedKandinsky6AttnProcessor(PackedKandinsky5AttnProcessor):
    """Attention of Kandinsky 6 over the strips of a pack, see [`PackedKandinsky5AttnProcessor`]."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        rotary_emb_kv: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, see [`PackedKandinsky5AttnProcessor`].

        Args:
            attn (`Kandinsky6Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, length, dim)`): Tokens of strips, or their text slots.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`, *optional*): The text slots, if
                tokens attend to these.
            rotary_emb (`torch.Tensor` of shape `(…, 1, D/2, 2, 2)`, *optional*): Rotations of the queries and keys.
            rotary_emb_kv (`torch.Tensor`, *optional*): Unused; the same rotations.
            attn_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        return super().__call__(attn, hidden_states, encoder_hidden_states, rotary_emb)

    def _heads(self, attn: Any, states: torch.Tensor, norm: Any, rotary: torch.Tensor | None) -> torch.Tensor:
        """Turn `(strips, length, H·D)` into normalised `(N, H, D)`, rotated in float32 as by the stock processor."""
        normed: torch.Tensor = norm(states.flatten(0, 1).unflatten(-1, (attn.num_heads, -1)))
        return normed if rotary is None else rotated(normed, rotary).type_as(normed)


class Kandinsky6Family(Kandinsky5Family):
    """Packing of `Kandinsky6Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Models with a visual condition take it as `visual_cond`, of the latents' sizes: its latent and its mask.
    """

    transformer_class = "Kandinsky6Transformer3DModel"
    tested_forwards = ("b7f016f119d3",)
    processor_class = PackedKandinsky6AttnProcessor
    stock_processors = ("Kandinsky6AttnProcessor",)
    original_names = None

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return all that is for sound, and the types of tokens, which no text-to-video model is given."""
        return *SOUND, "visual_token_type_embeddings."

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Attention is dense in all models."""
        Family.check(self, transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the pooled text embeddings, and any visual condition."""
        return {name: draw for name, draw in super().conditioning(transformer).items() if name != SCALE}

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the processor of a block of text or of tokens; blocks of sound are not run, or not for the video."""
        return self.processor_class(backend, scope="text" if "_text_transformer_blocks." in name else "tokens")

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions of tokens and of texts, and the modulation of text."""
        modulations = [
            block.text_modulation.register_forward_pre_hook(embeddings_of_text)
            for block in transformer.video_text_transformer_blocks
        ]
        tables = Tables(partial(one_table, partial(_rotations, transformer.scale_factor)))
        texts = (transformer.video_text_rope_embeddings, transformer.audio_text_rope_embeddings)
        return [
            transformer.visual_rope_embeddings.register_forward_hook(partial(_locate, tables)),
            *(rope.register_forward_hook(_locate_texts) for rope in texts),
            *modulations,
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return latents with channels last, and the mask of the text."""
        inputs = JointFamily.inputs(self, rows)
        latents = [rows.latents, *([inputs.pop(CONDITION)] if CONDITION in inputs else [])]
        mask = None if rows.text_mask is None else rows.text_mask.bool()
        return {**inputs, "hidden_states": torch.cat(latents, 1).movedim(1, -1), "encoder_attention_mask": mask}

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return nothing: the model makes all positions."""
        return {}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a pack as batch rows; hooks number its texts."""
        return JointFamily.rows(self, batch)


def _rotations(scale: tuple[float, float, float], module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the rotations of a sample's tokens, `(t·h·w, 1, D/2, 2, 2)`."""
    axes = tuple(torch.arange(count, device=device) for count in grid)
    # module.forward instead of module(…), which would call the hook again
    rotations: torch.Tensor = module.forward(axes, scale).flatten(0, 2)
    return rotations


@torch.compiler.disable  # loops over the samples of the pack
def _locate(tables: Tables, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of each sample's own tokens, `(strips, 1, 1, strip_length, 1, D/2, 2, 2)`."""
    (rotations,) = position_strips(active_layout(), lambda grid: tables(module, grid, output.device))
    return rotations[:, None, None]


@torch.compiler.disable  # loops over the texts of the pack
def _locate_texts(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of the text in slots, `(strips, text_slots, 1, D/2, 2, 2)`."""
    layout = active_layout()
    positions = torch.cat([torch.arange(length, device=output.device) for length in layout.text_lengths])
    rotations: torch.Tensor = module.forward(layout.joint.fill_slots(positions))
    return rotations


FAMILY = Kandinsky6Family()
