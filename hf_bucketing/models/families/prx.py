"""PRX: images whose tokens attend to a text and to each other at once; the text itself attends to nothing.

The pipeline masks the padding of a text: pass what the mask keeps. Models with an embedding of the resolution get that
of each strip's own sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ...devices import to_device
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid
from ...packing.processors import Processor, Rotary, attend
from ...packing.segments import SegmentSpans
from ...packing.texts import TextTokens
from ..joint import JointFamily
from ..recipe import Recipe
from ..texts import TextEmbeddings


class PackedPRXAttnProcessor(Processor):
    """Attention of PRX over the strips of a pack: of tokens to the text and the tokens of their sample."""

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        joint = layout.joint.segments

        def make() -> SegmentSpans:
            return SegmentSpans(
                queries=layout.attended_spans,
                keys=joint.keys,
                num_queries=layout.num_tokens,
                num_keys=joint.num_keys,
            )

        return (joint.made("of tokens", make),)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`PRXAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`): The text slots.
            attention_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.
            image_rotary_emb (`tuple` of one `torch.Tensor` of shape `(strips, strip_length, D/2, 2, 2)`): Rotations.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        assert image_rotary_emb is not None, "the model rotates all tokens"
        layout, (rotations,) = active_layout(), image_rotary_emb
        query, key, value = attn.img_qkv_proj(hidden_states).unflatten(-1, (3, attn.heads, -1)).unbind(2)
        text_key, text_value = attn.txt_kv_proj(encoder_hidden_states).unflatten(-1, (2, attn.heads, -1)).unbind(2)
        query, key = (_rotated(heads, rotations) for heads in (attn.norm_q(query), attn.norm_k(key)))
        key, value = layout.joint.gather(key, attn.norm_added_k(text_key)), layout.joint.gather(value, text_value)
        (segments,) = self.segments(layout)
        attended = attend(query.flatten(0, 1), key, value, segments, backend=self.backend)
        output: torch.Tensor = attn.to_out[0](attended.flatten(1)).view_as(hidden_states)
        return output


def _rotated(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of `(strips, length, H, D)` in float32, as the stock processor does."""
    even, odd = heads.float().unflatten(-1, (-1, 1, 2)).unbind(-1)
    turned = rotations.unsqueeze(2)[..., 0] * even + rotations.unsqueeze(2)[..., 1] * odd
    return turned.flatten(-2).type_as(heads)


class PRXFamily(JointFamily):
    """Packing of `PRXTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "PRX"
    transformer_class = "PRXTransformer2DModel"
    tested_forwards = ("6cd7ad599e14",)
    processor_class = PackedPRXAttnProcessor  # type: ignore[assignment]
    stock_processors = ("PRXAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="context_in_dim", mask="attention_mask")
    images_only = True
    latents_as = "images"
    strips_have_positions = False
    position_module = "pe_embedder"
    attention_kwargs = "attention_kwargs"
    width_settings = ("hidden_size",)
    lora_targets = ("img_qkv_proj", "txt_kv_proj", "to_out.0")
    timestep_unit = 1000

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Number tokens by row and column; return their rotations, `(h·w, D/2, 2, 2)`."""
        _, rows, columns = over_grid(axis_coordinates(grid, base_size, device=device))
        # module.forward instead of module(…), which would call the hook again
        return (module.forward(torch.stack([rows, columns], 1)[None])[0, 0],)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the embedding of the resolution, where there is one."""
        handles = super().hook_positions(transformer, base_size)
        embedder, side = transformer.resolution_embedder, transformer.config.patch_size
        if embedder is not None:
            handles.append(embedder.register_forward_pre_hook(partial(_resolutions, side), with_kwargs=True))
        return handles


@torch.compiler.disable  # loops over the samples of the pack
def _resolutions(side: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the heights and widths of the samples of strips, `(strips,)` each, in latent rows and columns."""
    layout = active_layout()
    sides = torch.tensor([[rows * side, columns * side] for _, rows, columns in layout.grids], dtype=torch.float32)
    height, width = to_device(sides, layout.device)[layout.strip_segments].unbind(1)
    return (height, width, *args[2:]), kwargs


class PRXRecipe(Recipe):
    """Recipe of `PRXPipeline`, whose VAE is one of FLUX.1's kind or a deep-compression autoencoder; see [`Recipe`].

    Captions are cut to `max_sequence_length` tokens; the pipeline's own length is that of its tokenizer.
    """

    pipeline_class = "PRXPipeline"
    family = PRXFamily()
    image_vae = True
    default_sequence_length = 256
    trims_text = True
    native_sizes = ((256, 256), (512, 512), (1024, 1024))
    call_defaults = MappingProxyType({"use_resolution_binning": False})
    """Else the pipeline makes the nearest of its own sizes and stretches that."""

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE, which an autoencoder has from the blocks of its encoder."""
        blocks = vae.get("encoder_block_out_channels")
        return super().vae_strides(vae) if blocks is None else (1, 2 ** (len(blocks) - 1))

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1]: by an autoencoder as they are, else to the mode."""
        vae = self.pipeline.vae
        encoded = vae.encode(pixel_values[:, :, 0].to(vae.dtype))
        latents = encoded.latent if "latent" in encoded else encoded.latent_dist.mode()
        shifted: torch.Tensor = latents - (vae.config.get("shift_factor") or 0.0)
        return (shifted * vae.config.scaling_factor)[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        values, mask, *_ = self.pipeline.encode_prompt(
            captions,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            tokenizer_max_length=self.max_sequence_length,
        )
        return TextEmbeddings(values, mask.long())


REFUSED = {"PRXPixelPipeline": "its model makes pixels, where a run trains on the latents of a VAE"}


RECIPES = (PRXRecipe,)
