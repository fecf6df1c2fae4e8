"""How Wan 2.1 and 2.2 are packed: rotary positions; text and image tokens in cross-attention.

Wan attends to the zeros after its text (512 tokens): pass the embeddings with them, as its pipeline makes them, or
with a text_mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.family import Draw, Family, TimestepsPer, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, shape_only
from ...packing.processors import Keys, PackedAttnProcessor, Rotary, project
from ...packing.texts import TextTokens
from ..positions import rotary_tables

TEXT_LENGTH = 512
"""Text tokens that diffusers' image-to-video models expect behind the image tokens."""
IMAGE_TOKENS = "encoder_hidden_states_image"
"""Argument of the transformer's forward for the image encoder's output."""
CLIP_TOKENS = 257
"""Tokens that CLIP ViT-H, Wan's image encoder, makes of an image."""


class PackedWanAttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of Wan's `WanAttention` over the strips of a pack.

    In image-to-video models, the image tokens of all samples precede the texts, in one batch row.
    """

    norms_whole_width = True

    def text_keys(self, attn: Any, text: torch.Tensor, layout: PackedLayout) -> Sequence[Keys]:
        """Return the keys of the texts, and of image-to-video models those of the image tokens."""
        if attn.add_k_proj is None:
            return super().text_keys(attn, text, layout)
        stored = layout.num_stored_text_tokens
        image, text = text.split([text.shape[1] - stored, stored], 1)
        key, value = project(attn, image, "add_k_proj", "add_v_proj")
        key, value = self.split_heads(attn, key, attn.norm_added_k), self.split_heads(attn, value)
        return [*super().text_keys(attn, text, layout), Keys(key, value, layout.even_segments(image.shape[1]))]

    def rotate(self, tokens: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Rotate neighbouring channels of `(N, H, D)` as Wan does, which does not round float64 tokens to float32."""
        cosines, sines = (table.flatten(0, 1)[:, None] for table in rotary)
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = cosines[..., 0::2], sines[..., 1::2]
        rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
        return rotated.flatten(-2).type_as(tokens)


class WanFamily(Family):
    """Packing of `WanTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Families of models that grew out of Wan derive from it.

    Wan 2.2's pipelines may give each token a timestep (`expand_timesteps`), such as 0 for a clean first frame.

    Image-to-video models that attend to the first frame (and the last) take `encoder_hidden_states_image`,
    `(n, image tokens, image_dim)`: the image encoder's output for the frame, or for both frames one after the other.
    """

    transformer_class = "WanTransformer3DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("cbdc8a11aa2f", "96f65c99f94a")
    processor_class = PackedWanAttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = ("WanAttnProcessor",)
    processors_read_fusion = True
    text = TextTokens(channels="text_dim", padding="keep_padding")
    cast_inputs: ClassVar[tuple[str, ...]] = (*Family.cast_inputs, IMAGE_TOKENS)
    interpolates = True
    position_module = "rope"
    timesteps_per: ClassVar[TimestepsPer] = "token"
    attention_kwargs = "attention_kwargs"
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (
        ("blocks.*.attn1.to_q", "blocks.*.self_attn.q"),
        ("blocks.*.attn1.to_k", "blocks.*.self_attn.k"),
        ("blocks.*.attn1.to_v", "blocks.*.self_attn.v"),
        ("blocks.*.attn1.to_out.0", "blocks.*.self_attn.o"),
        ("blocks.*.attn2.to_q", "blocks.*.cross_attn.q"),
        ("blocks.*.attn2.to_k", "blocks.*.cross_attn.k"),
        ("blocks.*.attn2.to_v", "blocks.*.cross_attn.v"),
        ("blocks.*.attn2.to_out.0", "blocks.*.cross_attn.o"),
        ("blocks.*.attn2.add_k_proj", "blocks.*.cross_attn.k_img"),
        ("blocks.*.attn2.add_v_proj", "blocks.*.cross_attn.v_img"),
        ("blocks.*.ffn.net.0.proj", "blocks.*.ffn.0"),
        ("blocks.*.ffn.net.2", "blocks.*.ffn.2"),
    )

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse also models that embed image tokens without layers for them, which would read them as text."""
        super().check(transformer, strip_length=strip_length)
        config = transformer.config
        if config.get("image_dim") is not None and config.get("added_kv_proj_dim") is None:
            raise PackingError(
                f"This {type(transformer).__name__} has `image_dim`, but no `added_kv_proj_dim`: its tokens attend to "
                "image and text tokens as one text, which packs hold apart. Set both or neither."
            )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the rotary table's length, on each axis."""
        longest = int(transformer.rope.max_seq_len)
        return longest, longest, longest

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the length at which image-to-video models divide text from image tokens."""
        return None if config.get("image_dim") is None else TEXT_LENGTH

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the image tokens of image-to-video models."""
        if transformer.condition_embedder.image_embedder is None:
            return {}
        shape = transformer.config.pos_embed_seq_len or CLIP_TOKENS, transformer.config.image_dim
        return {IMAGE_TOKENS: lambda grids: torch.randn(len(grids), *shape)}

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables of `rope`, or such tables of stretched coordinates."""
        if base_size is None:
            # module.forward instead of module(…), which would call the hook again
            like = torch.empty((), device=device)
            return tuple(table[0, :, 0] for table in module.forward(shape_only(like, grid, module.patch_size)))
        axes = axis_coordinates(grid, base_size, device=module.freqs_cos.device, dtype=torch.float64)
        return rotary_tables((module.t_dim, module.h_dim, module.w_dim), axes, dtype=torch.float64)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the embedding of image tokens, which takes a row per sample; attention takes one row."""
        handles = super().hook_positions(transformer, base_size)
        images = transformer.condition_embedder.image_embedder
        if images is not None:
            handles += [
                images.register_forward_pre_hook(_row_per_frame),
                images.register_forward_hook(_one_row),
            ]
        return handles

    def breaks_graphs(self, config: Mapping[str, Any]) -> bool:
        """Return whether tokens attend to image tokens, whose number a pack's layout does not know."""
        return config.get("image_dim") is not None

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a row per strip; image tokens keep a row per sample, as attention takes them."""
        others = dict(batch.conditioning)
        images = others.pop(IMAGE_TOKENS, None)
        rows = super().rows(replace(batch, conditioning=others))
        if images is None:
            return rows
        return replace(rows, conditioning={**rows.conditioning, IMAGE_TOKENS: to_device(images, batch.strips.device)})

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the image tokens, a row per frame."""
        if IMAGE_TOKENS not in rows.conditioning:
            return {}
        embedder = transformer.condition_embedder.image_embedder
        return {IMAGE_TOKENS: _frames(embedder, rows.conditioning[IMAGE_TOKENS])}


def _row_per_frame(embedder: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _frames(embedder, args[0])


def _one_row(embedder: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.flatten(0, 1)[None]


def _frames(embedder: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return image tokens `(n, tokens, dim)`, split into a row per frame for models of a first and a last frame."""
    return tokens if embedder.pos_embed is None else tokens.unflatten(1, (2, -1)).flatten(0, 1)


FAMILY = WanFamily()
