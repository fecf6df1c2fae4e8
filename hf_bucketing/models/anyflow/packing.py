"""How AnyFlow is packed: as Wan, with a second timestep, that to which a step leads.

The pipeline attends to the zeros after a text: pass the embeddings with them, or with a text_mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Grid
from ...packing.positions import PackTables
from ...packing.processors import PackedAttnProcessor, Rotary
from ...packing.texts import TextTokens

NEXT = "r_timestep"


class PackedAnyFlowAttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of AnyFlow over the strips of a pack."""

    norms_whole_width: ClassVar[bool] = True

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, see [`PackedAttnProcessor`].

        Args:
            attn (`AnyFlowAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(any, tokens, dim)`, *optional*): The texts.
            attention_mask (`None`): Unused; the layout takes its place.
            rotary_emb (mapping, *optional*): `query`, the complex rotations of the tokens, `(strips, strip_length,
                D/2)`, and the same as `key`.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        rotary = None if rotary_emb is None else (rotary_emb["query"],)
        return super().__call__(attn, hidden_states, encoder_hidden_states, image_rotary_emb=rotary)

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Multiply pairs of channels of `(N, H, D)` as complex numbers, as the stock processor does."""
        rotations = rotary[0].flatten(0, 1)[:, None]
        pairs = torch.view_as_complex(tokens.to(rotations.real.dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotations).flatten(-2).type_as(tokens)


class AnyFlowFamily(Family):
    """Packing of `AnyFlowTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `r_timestep`, `(n,)`, is the timestep to which a step leads.
    """

    transformer_class = "AnyFlowTransformer3DModel"
    tested_forwards = ("935a8ea760ab",)
    processor_class = PackedAnyFlowAttnProcessor
    stock_processors = ("AnyFlowAttnProcessor", "AnyFlowCrossAttnProcessor")
    text = TextTokens(channels="text_dim", padding="keep_padding")
    latents_as = "frames_first"
    position_module = "rope"
    attention_kwargs = "attention_kwargs"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that attend to an image, whose tokens precede the text of a batch row."""
        if transformer.config.image_dim is not None:
            raise PackingError(
                "This AnyFlow transformer puts the tokens of an image in front of the text of a batch row (image_dim),"
                " and the texts of a pack share one. Use a text-to-video model."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the rotary table's length, on each axis."""
        return (int(transformer.rope.max_seq_len),) * 3

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the timesteps to which steps lead."""
        return {NEXT: lambda grids: torch.zeros(len(grids))}

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return a sample's complex rotations, `(t·h·w, D/2)`."""
        frames, *sides = grid
        # module.forward instead of module(…), which would call the hook again
        return (module.forward({"total_frames": frames, "full_frame_shape": sides}, device)["query"][0, 0],)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions, which queries and keys have in common."""
        return [transformer.rope.register_forward_hook(partial(_locate, self.pack_tables(base_size)))]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return both timesteps for each frame of a row."""
        inputs, frames = super().inputs(rows), rows.latents.shape[2]
        by_frame = {name: inputs[name][:, None].expand(-1, frames) for name in ("timestep", NEXT)}
        return {**inputs, **by_frame}


def _locate(tables: PackTables, module: Any, args: tuple[Any, ...], output: Any) -> dict[str, torch.Tensor]:
    (rotations,) = tables(module)
    return {"query": rotations, "key": rotations}


FAMILY = AnyFlowFamily()
