"""How Qwen-Image 2.1 is packed: tokens attend to their sample and its text, text only to the text before it.

The pipeline masks the padding of a text: pass what the mask keeps. Timesteps are the scheduler's, up to 1000; the
model gets a thousandth of them. Text is modulated by timestep 0, so that it depends on nothing but itself. The model
makes room for tokens in fours, one for each token of the text encoder that an image would take: a strip is a multiple
of four tokens. The positions of an image follow its text, whose padding therefore has to be cut off.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import Tables
from ...packing.processors import PackedRowAttnProcessor, attend
from ...packing.texts import TextTokens, pad_texts
from ..joint import JointFamily, joint_tables

SLOT = 4
"""Tokens that stand in the place of one token of the text encoder."""
POSITIONS = 1024
"""Rows or columns on either side of the middle of an image that the model has positions for."""


class PackedQwenImage21AttnProcessor(PackedRowAttnProcessor):
    """Attention of Qwen-Image 2.1 over the strips of a pack, causal in the text."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        layer_cache: None = None,
        kv_cache_mode: None = None,
        cache_write_slice: None = None,
        segments: Any = None,
        key_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; the layout takes the place of masks and segments, and caches are not used."""
        assert rotary_emb is not None, "the model rotates all rows"
        layout = active_layout()
        sizes = [layout.text_slots, layout.strip_length]
        sides = zip(hidden_states.split(sizes, 1), rotary_emb.split(sizes, 1), strict=True)
        text, tokens = (self.heads(attn, states, [table]) for states, table in sides)
        query, key, value = (layout.joint.gather(*pair) for pair in zip(tokens, text, strict=True))
        of_tokens, _ = layout.joint.scatter(attend(query, key, value, layout.joint.segments, backend=self.backend))
        attended = torch.cat([_attend_causally(layout, *text), of_tokens], 1).flatten(2)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](attended))
        return projected


@torch.compiler.disable  # splits the texts of the pack
def _attend_causally(layout: PackedLayout, *heads: torch.Tensor) -> torch.Tensor:
    """Let each token of a text attend to itself and those before it; heads are `(strips, text_slots, H, D)`."""
    lengths = layout.text_lengths
    query, key, value = (pad_texts(layout.joint.read_slots(part).split(lengths))[0].transpose(1, 2) for part in heads)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    return layout.joint.fill_slots(torch.cat([row[:length] for row, length in zip(attended, lengths, strict=True)]))


class QwenImage21Family(JointFamily):
    """Packing of `QwenImage21Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "QwenImage21Transformer2DModel"
    tested_forwards = ("4fc520b59176",)
    processor_class = PackedQwenImage21AttnProcessor
    stock_processors = ("QwenImage21AttnProcessor", "QwenImage21FlexAttnProcessor")
    text = TextTokens(rows="slots", channels="context_in_dim", shortest=1)
    images_only = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    original_names = (  # ComfyUI fuses the other layers of the feed-forward
        ("transformer_blocks.*.attn.**", "transformer_blocks.*.attn.**"),
        ("transformer_blocks.*.img_mlp.out", "transformer_blocks.*.img_mlp.out"),
    )

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse other patches than the pipeline's, text modulated by a sample's timestep, and odd strips."""
        config = transformer.config
        if config.patch_size != 1 or not config.causal_condition:
            raise PackingError(
                "Qwen-Image 2.1 packs with patch_size=1 and causal_condition=True, as its pipeline runs it; got "
                f"{config.patch_size} and {config.causal_condition}."
            )
        if strip_length % SLOT:
            raise PackingError(
                f"Qwen-Image 2.1 makes room for tokens in groups of {SLOT}: use a strip_length of at least {SLOT} "
                f"that is a multiple of it, got {strip_length}."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides for which there are positions, counted from the middle in both directions."""
        return 1, 2 * POSITIONS, 2 * POSITIONS

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of even sides, for which the stock model makes room."""
        return [(frames, 2 * rows, 2 * columns) for frames, rows, columns in super().trial_grids(transformer)]

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the rotary tables of rows."""
        return [transformer.pos_embed.register_forward_hook(partial(_locate, Tables(_positions)))]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return also the token grid and where it stands: behind the text."""
        tokens, length = math.prod(rows.grid), rows.text.shape[1]
        device = (rows.latents if rows.text_mask is None else rows.text_mask).device
        slots = torch.arange(length + tokens // SLOT, device=device) >= length
        return {
            **super().inputs(rows),
            "timestep": rows.timesteps / 1000,
            "img_shapes": [[rows.grid]] * len(rows.latents),
            "img_mask": slots.expand(len(rows.latents), -1),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the mask of the text."""
        return {"encoder_hidden_states_mask": None if rows.text_mask is None else rows.text_mask.bool()}

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Return latents without the text, which the model returns in front of them."""
        return super().restored(output[:, -math.prod(grid) :], grid, patch)


def _positions(module: Any, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the rotary tables of a sample's tokens, `(h·w, D/2)`, and of its text, `(length, D/2)`, by the module."""
    grid, length = key
    of_image = torch.arange(length + math.prod(grid), device=device) >= length
    table = module.forward([grid], of_image, device=device)  # instead of module(…), which would call the hook again
    return table[length:], table[:length]


def _locate(tables: Tables, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    tokens, text = joint_tables(tables, module)
    return torch.cat([text, tokens], 1)


FAMILY = QwenImage21Family()
