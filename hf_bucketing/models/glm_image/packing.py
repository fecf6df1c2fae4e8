"""GLM-Image: images drawn after tokens of another model, one for each patch; positions and text as of CogView4.

The text is that of words to be drawn, byte by byte. What the image shall be comes as `prior_token_id`, entries of a
code book that the vision-language model of the pipeline writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...devices import to_device
from ...packing.batch import PackedBatch, Rows
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.processors import Rotary
from ..cogview4.packing import CogView4Family, PackedCogView4AttnProcessor

PRIOR, DROPPED = "prior_token_id", "prior_token_drop"


class PackedGlmImageAttnProcessor(PackedCogView4AttnProcessor):
    """Joint attention of GLM-Image over the strips of a pack."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        kv_cache: None = None,
    ) -> Any:
        """Attend inside each sample, see [`PackedJointAttnProcessor`].

        `kv_cache` is None: packs keep no keys of other images. diffusers passes what this signature names.
        """
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class GlmImageFamily(CogView4Family):
    """Packing of `GlmImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `prior_token_id` are whole numbers of the latents' sizes, `(1, 1, height, width)` each, the same in all of a patch;
    `prior_token_drop`, `(n,)`, says which samples are drawn without them; give it on the CPU. `target_size` and
    `crop_coords`, `(n, 2)`, are pixels: height and width, or top and left.
    """

    transformer_class = "GlmImageTransformer2DModel"
    tested_forwards = ("687a1bfbba83",)
    processor_class = PackedGlmImageAttnProcessor
    stock_processors = ("GlmImageAttnProcessor",)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the size and the corner of the whole image, and tokens that are not dropped."""
        config = transformer.config

        def tokens(grids: Sequence[Grid]) -> list[torch.Tensor]:
            side = config.patch_size
            drawn = (torch.randint(config.prior_vq_quantizer_codebook_size, (1, *grid)) for grid in grids)
            return [ids.repeat_interleave(side, 2).repeat_interleave(side, 3) for ids in drawn]

        sizes = super().conditioning(transformer)
        return {
            "target_size": sizes["target_size"],
            "crop_coords": sizes["crop_coords"],
            PRIOR: tokens,
            DROPPED: lambda grids: torch.zeros(len(grids), dtype=torch.bool),
        }

    def rows(self, batch: PackedBatch) -> Rows:
        """Say on the CPU in which strips the tokens are dropped."""
        others, layout = dict(batch.conditioning), batch.layout
        dropped = others.pop(DROPPED).cpu().repeat_interleave(torch.tensor(layout.strips_per_sample))
        rows = super().rows(replace(batch, conditioning=others))
        return replace(rows, conditioning={**rows.conditioning, DROPPED: F.pad(dropped, (0, layout.padding_strips))})

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the token of each patch, and the rows in which they are dropped: the model indexes by these."""
        inputs = super().inputs(rows)
        _, height, width = rows.patch
        dropped = to_device(inputs[DROPPED].cpu().nonzero()[:, 0], rows.latents.device)
        return {**inputs, PRIOR: inputs[PRIOR][:, 0, :, ::height, ::width].flatten(1), DROPPED: dropped}

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the mask of the text, if it has one."""
        return {} if rows.text_mask is None else {"attention_mask": rows.text_mask}


FAMILY = GlmImageFamily()
