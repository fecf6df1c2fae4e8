"""HunyuanVideo 1.5: rotary positions; image tokens, glyph text and refined text in joint attention with the tokens.

The latents have the channels of the condition and of its mask behind their own. The stock forward embeds the image
tokens, the glyph text (ByT5) and the text (Qwen2.5-VL) of each sample, and joins the three by their masks, at which
the CPU waits for the device a dozen times per sample. In a pack, hooks embed image tokens and glyphs without their
padding and join them with the refined text in an order that the CPU knows; the stock forward gets all of it as one
text, with masks that keep everything. A hook on the first block fills the text slots of the samples' strips.

Whether there is an image is decided for each sample: embeddings that are all zero, as the text-to-video pipeline
passes them, are none. Where there are image embeddings, that is read from the device, once per pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import local
from typing import TYPE_CHECKING, Any

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.texts import apply_text_mask
from ..hunyuan_video.packing import HunyuanVideoFamily
from ..joint import JointFamily, hook_text_modulation, order_by_sample

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TokenRefiner

GLYPHS, GLYPH_MASK, IMAGE = "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds"
ORDER = "token_order"
"""Argument of the forward that a hook takes away: where each sample's own tokens lie, see [`order_by_sample`]."""
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729
"""Tokens that the pipelines pass of the glyph text, padding included, and of an image."""


class HunyuanVideo15Family(HunyuanVideoFamily):
    """Packing of `HunyuanVideo15Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    It takes `encoder_hidden_states_2` of shape `(n, tokens, text_embed_2_dim)` with the mask
    `encoder_attention_mask_2`, and `image_embeds` of shape `(n, tokens, image_embed_dim)`, zeros for samples without
    an image.
    """

    transformer_class = "HunyuanVideo15Transformer3DModel"
    tested_forwards = ("2ae84770e72f",)
    stock_processors = ("HunyuanVideo15AttnProcessor2_0",)
    text = replace(HunyuanVideoFamily.text, rows="per_sample")
    cast_inputs = (*HunyuanVideoFamily.cast_inputs, GLYPHS, GLYPH_MASK, IMAGE)

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return what the last block does with the text after attention."""
        last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
        return f"{last}attn.to_add_out", f"{last}ff_context"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models distilled by MeanFlow, which embed a second timestep."""
        if transformer.config.use_meanflow:
            raise PackingError(
                "This HunyuanVideo 1.5 transformer embeds a second timestep (use_meanflow=True), as distilled models "
                "do, for which there is no training objective here; use a model without it."
            )
        JointFamily.check(self, transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the glyph text with its mask, and the image tokens; drawn with an image for every other sample."""
        config = transformer.config

        def image(count: int) -> torch.Tensor:
            return torch.randn(count, IMAGE_TOKENS, config.image_embed_dim) * (torch.arange(count) % 2).view(-1, 1, 1)

        return {
            GLYPHS: lambda grids: torch.randn(len(grids), GLYPH_TOKENS, config.text_embed_2_dim),
            GLYPH_MASK: lambda grids: (torch.arange(GLYPH_TOKENS) < torch.arange(len(grids))[:, None] * 5).float(),
            IMAGE: lambda grids: image(len(grids)),
        }

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens of each sample's glyph text, and those of its image if it has one."""
        glyphs = conditioning[GLYPH_MASK].bool().cpu().sum(1).tolist()
        return tuple(map(sum, zip(glyphs, _image_lengths(conditioning[IMAGE]), strict=True)))

    def rows(self, batch: PackedBatch) -> Rows:
        """Return also the image tokens and glyphs of all samples without their padding, with their order."""
        layout = batch.layout
        tokens, images = (to_device(batch.conditioning[name], batch.text.device) for name in (GLYPHS, IMAGE))
        glyphs = apply_text_mask("masked", tokens, mask=batch.conditioning[GLYPH_MASK])
        counts = list(map(len, glyphs))
        of_image = [added - count for added, count in zip(layout.added_lengths or (), counts, strict=True)]
        shown = [image[:length] for image, length in zip(images, of_image, strict=True)]
        added = {
            GLYPHS: torch.cat(glyphs)[None],
            IMAGE: torch.cat(shown)[None],
            ORDER: order_by_sample(layout, of_image, counts),
        }
        return replace(super().rows(replace(batch, conditioning={})), conditioning=added)

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return timesteps in the model's dtype, as its pipelines pass them: it embeds them in their own dtype."""
        return {"timestep": rows.timesteps.to(transformer.dtype)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also what embeds timesteps, the text refiner, the first block, and the norms of text."""
        return [
            *JointFamily.hook_positions(self, transformer, base_size),
            transformer.time_embed.register_forward_pre_hook(_in_its_dtype),
            transformer.register_forward_pre_hook(_embed_added, with_kwargs=True),
            transformer.image_embedder.register_forward_pre_hook(_on_its_device),
            transformer.context_embedder.register_forward_pre_hook(_timestep_per_sample),
            transformer.context_embedder.register_forward_hook(_join_texts),
            transformer.cond_type_embed.register_forward_pre_hook(_kinds),
            transformer.transformer_blocks[0].register_forward_pre_hook(_fill_slots),
            *hook_text_modulation(transformer),
        ]


def _in_its_dtype(time_embed: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (timesteps,) = args
    return (timesteps.to(time_embed.timestep_embedder.linear_1.weight.dtype),)


def _timestep_per_sample(refiner: HunyuanVideo15TokenRefiner, args: tuple[Any, ...]) -> tuple[Any, ...]:
    texts, timesteps, masks = args
    return texts, timesteps[active_layout().joint.first_strips], masks.of_texts


def _image_lengths(images: torch.Tensor) -> list[int]:
    """Return how many tokens `(n, tokens, dim)` each sample has of an image; one of zeros is none."""
    if not images.shape[1]:
        return [0] * len(images)
    return ((images != 0).flatten(1).any(1) * images.shape[1]).tolist()


class _Taken(local):
    """Embedded tokens until they join the texts, and the order and kinds of all, in the forward of a thread."""

    added: tuple[torch.Tensor, ...] = ()
    order: torch.Tensor
    kinds: torch.Tensor


_taken = _Taken()


@torch.compiler.disable  # the tokens of each pack are as many as they are
def _embed_added(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Embed image tokens and glyphs here, and leave the stock forward none of them to sort by masks."""
    active_layout()  # says what is wrong where there is none
    rest = dict(kwargs)
    _taken.order, images, glyphs = rest.pop(ORDER), rest.pop(IMAGE), rest.pop(GLYPHS)
    _taken.added = transformer.image_embedder(images)[0], transformer.context_embedder_2(glyphs)[0]
    first_text = images.shape[1] + glyphs.shape[1]
    _taken.kinds = (_taken.order < first_text).long() + (_taken.order < images.shape[1]).long()
    masks = _KeepAll(rest["encoder_attention_mask"])
    none = {
        IMAGE: images[:, :0].detach().cpu(),  # where the stock forward asks whether all of them are zero
        GLYPHS: glyphs[:, :0],
        "encoder_attention_mask": masks,
        GLYPH_MASK: masks,
    }
    return args, {**rest, **none}


def _on_its_device(embedder: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (images,) = args
    return (images.to(active_layout().device),)


@torch.compiler.disable
def _join_texts(refiner: Any, args: tuple[Any, ...], texts: torch.Tensor) -> torch.Tensor:
    """Return the samples' image tokens, glyphs and refined text one after another, in one row."""
    tokens = torch.cat([*_taken.added, texts.flatten(0, 1)])
    _taken.added = ()
    return tokens.index_select(0, _taken.order)[None]


def _kinds(embedder: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the kind of each token of the row that [`_join_texts`] makes: 2 of an image, 1 of glyphs, 0 of text."""
    (kinds,) = args
    return (_taken.kinds[None],) if kinds.shape[1] else args  # the stock forward gets no image tokens and glyphs


class _KeepAll:
    """Stands for the masks of the row that [`_join_texts`] makes, and for the real one of the texts before it.

    The stock forward indexes by masks, for which it would wait for the device; here, by slices.
    """

    dtype = torch.bool
    device = torch.device("cpu")

    def __init__(self, of_texts: torch.Tensor) -> None:
        self.of_texts = of_texts

    def bool(self) -> _KeepAll:
        return self

    def __iter__(self) -> Iterator[_All]:
        return iter([_All((slice(None),))])


class _All(tuple[slice, ...]):
    """An index of all tokens of a row, in the place of a mask."""

    def __invert__(self) -> tuple[slice, ...]:
        return (slice(0),)

    def __getitem__(self, index: Any) -> Any:
        """Return a mask by a mask; what the blocks get of it is not used in a pack."""
        return torch.ones(0, dtype=torch.bool)


def _fill_slots(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the joined tokens, a row of all samples, into the text slots of the samples' strips."""
    strips, joined, *rest = args
    return strips, active_layout().joint.fill_slots(joined[0]), *rest


FAMILY = HunyuanVideo15Family()
