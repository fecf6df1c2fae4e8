"""How Z-Image is packed: each strip is an image of the list that its forward takes, beside `text_slots` of caption.

The stock model fills up each image and each caption to a multiple of 32 with a learned token. These tokens take part
in attention, so a pack has as many of them per sample (`multiple_of` of its layout), at the end of the sample's last
strip and of its text. What remains of that strip is padding as in every pack.

`patchify_and_embed` makes tokens, positions and the masks of learned tokens of a list; `forward` does the rest with
them. It would fill up every strip by itself. So while packing is enabled, the transformer has an attribute of that
name which returns the tokens of strips with the positions that the stock method gives them in their own sample, and
with the masks of the learned tokens. `forward` and all other methods stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import Tables
from ...packing.processors import PackedRowAttnProcessor
from ...packing.strips import by_strip
from ..joint import ModulatedRows, of_text
from ..refined import RefinedFamily

PATCH, FRAMES_OF_PATCH = 2, 1
"""Patch with which the pipeline calls the model; a model may have embeddings of several."""


class PackedZSingleStreamAttnProcessor(PackedRowAttnProcessor):
    """Attention of Z-Image's blocks over the strips of a pack."""

    text_first = False


class ZImageFamily(RefinedFamily):
    """Packing of `ZImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "ZImageTransformer2DModel"
    tested_forwards = ("4887c0456a13",)
    processor_class = PackedZSingleStreamAttnProcessor
    stock_processors = ("ZSingleStreamAttnProcessor",)
    cast_inputs = ("x", "cap_feats")
    strips_have_positions = False
    width_settings = ("dim",)
    attention_kwargs = "joint_attention_kwargs"
    original_names = (
        ("layers.**", "layers.**"),
        ("noise_refiner.**", "noise_refiner.**"),
        ("context_refiner.**", "context_refiner.**"),
    )
    original_prefix = "transformer."  # diffusers before 0.40 needs an alpha behind the other

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models of another patch, and those that also read images."""
        config = transformer.config
        if (PATCH, FRAMES_OF_PATCH) not in zip(config.all_patch_size, config.all_f_patch_size, strict=True):
            raise PackingError(
                f"This Z-Image transformer has patches of {config.all_patch_size} and {config.all_f_patch_size}; its "
                f"pipeline calls it with patches of {PATCH} and {FRAMES_OF_PATCH}."
            )
        if config.siglip_feat_dim is not None:
            raise PackingError(
                "This Z-Image Omni transformer reads images beside the text (siglip_feat_dim), in an order and at "
                "positions of their own, and packing passes text alone; use a Z-Image text-to-image model."
            )
        super().check(transformer, strip_length=strip_length)

    def patch(self, config: Mapping[str, Any]) -> Grid:
        """Return the patch with which the pipeline calls the model."""
        return FRAMES_OF_PATCH, PATCH, PATCH

    def longest_text(self, transformer: Transformer) -> int:
        """Return the longest text that, filled up, still has a position for the image after it."""
        return (super().longest_text(transformer) - 1) // _multiple() * _multiple()

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Return the layout with text slots, and with room for the learned tokens of each sample."""
        layout = replace(layout, multiple_of=_multiple())
        return super().fit_text(transformer, layout, pad_to=pad_to, pad_text_to=pad_text_to)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Replace what `patchify_and_embed` makes, and let the layers modulate text by its own sample's timestep."""
        setattr(transformer, _METHOD, partial(_patchify_strips, transformer, Tables(_positions)))
        modulations = [layer.adaLN_modulation for layer in transformer.layers]
        return [_Shadow(transformer), *(modulation.register_forward_hook(_modulate_row) for modulation in modulations)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return lists of images and of captions without padding, and the time from noise to data, as the pipeline."""
        return {"x": list(rows.latents), "t": (1000 - rows.timesteps) / 1000, "cap_feats": rows.texts}


_METHOD = "patchify_and_embed"


@dataclass(frozen=True)
class _Shadow:
    """The handle of an attribute that hides a method of the transformer."""

    transformer: Any

    def remove(self) -> None:
        delattr(self.transformer, _METHOD)


def _multiple() -> int:
    """Return the multiple to which the stock model fills up images and captions."""
    from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

    return int(SEQ_MULTI_OF)


def _positions(transformer: Transformer, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the positions of a sample's tokens, `(t·h·w, 3)`, and of its text with learned tokens, by the stock."""
    (frames, rows, columns), length = key
    size = frames * FRAMES_OF_PATCH, rows * PATCH, columns * PATCH
    # without channels, so that only positions are made
    image, text = torch.empty(0, *size, device=device), torch.empty(length, 0, device=device)
    method = getattr(type(transformer), _METHOD)
    _, (filled,), _, (of_tokens,), (of_text,), _, _ = method(transformer, [image], [text], PATCH, FRAMES_OF_PATCH)
    return of_tokens[: frames * rows * columns], of_text[: len(filled)]  # the stock forward too reads no more of them


@torch.compiler.disable  # loops over the samples of the pack
def _patchify_strips(
    transformer: Transformer,
    tables: Tables,
    strips: Sequence[torch.Tensor],
    texts: Sequence[torch.Tensor],
    patch_size: int,
    f_patch_size: int,
) -> tuple[list[Any], ...]:
    """Return what `patchify_and_embed` does, for strips `(C, 1, p, strip_length·p)` and texts `(text_slots, dim)`.

    These are tokens and texts, the sizes of the strips, the positions of both, and where both are learned tokens.
    """
    layout, device = active_layout(), strips[0].device
    tokens, _, _ = transformer._patchify_image(torch.cat(list(strips), -1), patch_size, f_patch_size)
    samples = zip(layout.grids, layout.text_lengths, strict=True)
    of_tokens, of_texts = zip(*(tables(transformer, sample, device) for sample in samples), strict=True)
    text_positions = of_texts[0].new_zeros(len(strips) * layout.text_slots, 3)
    learned, learned_text = (
        torch.zeros(count, dtype=torch.bool, device=device) for count in (layout.num_tokens, len(text_positions))
    )
    for (_, real), (_, stop) in zip(layout.spans, layout.attended_spans, strict=True):
        learned[real:stop] = True
    places = layout.joint.text_segments.queries
    for (start, stop), length, positions in zip(places, layout.text_lengths, of_texts, strict=True):
        text_positions[start:stop] = positions
        learned_text[start + length : stop] = True
    return (
        list(tokens.split(layout.strip_length)),
        list(texts),
        [tuple(strip.shape[1:]) for strip in strips],
        list(by_strip(of_tokens, layout)),
        list(text_positions.split(layout.text_slots)),
        list(learned.split(layout.strip_length)),
        list(learned_text.split(layout.text_slots)),
    )


def _modulate_row(
    module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor | ModulatedRows | None:
    """Modulate the text after each row's tokens as its own sample."""
    layout = active_layout()
    text = of_text(output)
    return None if text is output else ModulatedRows([output, text], [layout.strip_length, layout.text_slots])


FAMILY = ZImageFamily()
