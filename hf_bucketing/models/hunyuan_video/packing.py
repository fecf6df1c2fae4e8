"""HunyuanVideo: rotary positions over frames, rows and columns; text refined by itself, then in joint attention.

The pipeline masks the padding of a text: pass what the mask keeps. Text is refined before the blocks, by attention
over a whole text and by its mean. That runs once per sample, and the result fills the text slots of its strips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.names import Backend, Grid
from ...packing.positions import axis_coordinates
from ...packing.processors import Rotary
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_text_modulation, texts_by_sample
from ..positions import rotary_tables

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTokenRefiner


class HunyuanVideoFamily(JointFamily):
    """Packing of `HunyuanVideoTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "HunyuanVideoTransformer3DModel"
    tested_forwards = ("a1b9ec91c058",)
    stock_processors = ("HunyuanVideoAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="text_embed_dim", shortest=1)
    interpolates = True
    position_module = "rope"
    attention_kwargs = "attention_kwargs"
    guidance = 6000.0  # a thousandfold, as its pipeline scales it
    without_lora = ("context_embedder.",)  # the text refiner, whose adapters diffusers misreads from other names
    original_names = (
        ("transformer_blocks.*.attn.to_q", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.to_k", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.to_v", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.add_q_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.add_k_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.add_v_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.to_out.0", "double_blocks.*.img_attn_proj"),
        ("transformer_blocks.*.attn.to_add_out", "double_blocks.*.txt_attn_proj"),
        ("transformer_blocks.*.ff.net.0.proj", "double_blocks.*.img_mlp.fc1"),
        ("transformer_blocks.*.ff.net.2", "double_blocks.*.img_mlp.fc2"),
        ("transformer_blocks.*.ff_context.net.0.proj", "double_blocks.*.txt_mlp.fc1"),
        ("transformer_blocks.*.ff_context.net.2", "double_blocks.*.txt_mlp.fc2"),
        ("single_transformer_blocks.*.attn.to_q", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.attn.to_k", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.attn.to_v", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.proj_mlp", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.proj_out", "single_blocks.*.linear2"),
    )

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that modulate the first frame differently from the other frames of a batch row."""
        if transformer.config.image_condition_type == "token_replace":
            raise PackingError(
                "This HunyuanVideo transformer modulates the tokens of the first frame differently from the others "
                "(image_condition_type='token_replace'), and packing cannot tell them apart in a strip; use a "
                "text-to-video or 'latent_concat' model."
            )
        super().check(transformer, strip_length=strip_length)

    def processor(self, name: str, backend: Backend) -> Any:
        """Keep the text refiner's own processor, which attends inside one text."""
        return None if name.startswith("context_embedder.") else super().processor(name, backend)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables as `rope` computes them."""
        axes = axis_coordinates(grid, base_size, device=device)
        return rotary_tables(module.rope_dim, axes, theta=module.theta)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the input and output of the text refiner, and the norms, as for Flux."""
        refiner = transformer.context_embedder
        return [
            *super().hook_positions(transformer, base_size),
            refiner.register_forward_pre_hook(_gather_texts),
            refiner.register_forward_hook(_fill_slots),
            *hook_text_modulation(transformer, single="last"),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the text mask that the model expects; in a pack, the layout takes its place."""
        return {**super().inputs(rows), "encoder_attention_mask": rows.known_mask}


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _gather_texts(refiner: HunyuanVideoTokenRefiner, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn text slots `(strips, text_slots, dim)`, timesteps and mask by strip into one row per sample."""
    slots, timesteps, _ = args
    texts, mask = texts_by_sample(slots)
    return texts, timesteps[active_layout().joint.first_strips], mask


@torch.compiler.disable
def _fill_slots(
    refiner: HunyuanVideoTokenRefiner, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """Put the refined texts `(n, length, dim)` into the text slots of the samples' strips."""
    layout = active_layout()
    texts = [text[:length] for text, length in zip(output, layout.text_lengths, strict=True)]
    return layout.joint.fill_slots(torch.cat(texts))


FAMILY = HunyuanVideoFamily()
