"""How FLUX.3 is packed: blocks of text, blocks of tokens, then blocks of both; text is modulated as at timestep 0.

Positions are those of FLUX.2, with rows and columns half as far apart. The model attends to the padding of texts: pass
the embeddings with that of their window (see the recipe).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Backend, Grid
from ...packing.processors import PackedRowAttnProcessor, Rotary, RowScope, project, rotate_channels
from ...packing.texts import TextTokens
from ..flux2.packing import Flux2Family, number_tokens

POSITION_SCALE = 0.5
"""Distance of neighbouring rows and columns on the axes of positions."""

_SCOPES: dict[str, RowScope] = {
    "mode_blocks": "tokens",
    "txt_mode_blocks": "text",
    "single_transformer_blocks": "joint",
}


class PackedFlux3AttnProcessor(PackedRowAttnProcessor):
    """Attention of `Flux3Attention` over the strips of a pack."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, given cosines and sines of all text slots and then of all tokens."""
        assert image_rotary_emb is not None, "the model always makes them"
        table, strips = torch.stack(image_rotary_emb, -1), len(hidden_states)
        sizes = [strips * active_layout().text_slots] if self.scope == "joint" else []
        sides = table.split([*sizes, len(table) - sum(sizes)])
        rows = torch.cat([side.unflatten(0, (strips, -1)) for side in sides], 1)
        return super().__call__(attn, hidden_states, image_rotary_emb=rows)

    def heads(
        self, attn: Any, states: torch.Tensor, rotary: Sequence[torch.Tensor] | None = None, *, added: bool = False
    ) -> Sequence[torch.Tensor]:
        """Return query, key and value; the former two are normalised and rotated in float32, as by the model."""
        parts = project(attn, states, "to_q", "to_k", "to_v")
        query, key, value = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
        assert rotary is not None, "the model rotates all rows"
        normed = attn.norm_q(query.float()), attn.norm_k(key.float())
        return *(self.rotate(part, rotary).to(value.dtype) for part in normed), value

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate neighbouring channels of `(…, H, D)` by a table of cosines and sines, `(…, D, 2)`."""
        return rotate_channels(tokens, rotary[0].unbind(-1))


class Flux3Family(Flux2Family):
    """Packing of `Flux3Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    References have blocks of their own in this model and are not packed.
    """

    transformer_class = "Flux3Transformer2DModel"
    tested_forwards = ("b18615a4edc8",)
    lora_targets = Family.lora_targets
    without_lora = ("image_cond",)
    stock_processors = ("Flux3AttnProcessor",)
    attention_kwargs = "attention_kwargs"
    text = TextTokens(rows="slots", channels="joint_attention_dim", shortest=1)
    max_references = 0
    runs_alone = True
    original_names = None

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse flow maps, which also take the timestep that a step of the pipeline jumps to."""
        if transformer.config.flow_map:
            raise PackingError(
                "This FLUX.3 transformer is distilled to a flow map (`flow_map`), which predicts the way to another "
                "timestep and not the velocity that a flow is trained on; train the model that it was distilled from."
            )
        super().check(transformer, strip_length=strip_length)

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return the parts that read references."""
        return ("image_cond",)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return nothing: the model embeds no guidance."""
        return {}

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the processor of blocks of tokens, of text or of both; blocks of references keep their own."""
        if "image_cond" in name:
            return None
        return PackedFlux3AttnProcessor(backend, scope=_SCOPES[name.partition(".")[0]])

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the positions of a sample's tokens, `(h·w, 4)`, as those of FLUX.2 but closer."""
        (tokens,) = super().positions(module, grid, base_size, device=device)
        return (tokens * POSITION_SCALE,)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the positions of the pack; text has the modulation of timestep 0 in each sample."""
        number = partial(number_tokens, self.pack_tables(base_size))
        return [transformer.register_forward_pre_hook(number, with_kwargs=True)]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Number tokens and text as the pipeline does."""
        ids = super().unpacked_inputs(transformer, rows)
        return {**ids, "img_ids": ids["img_ids"] * POSITION_SCALE}


FAMILY = Flux3Family()
