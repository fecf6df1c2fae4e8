"""Lumina 2 and Z-Image: tokens and text have refiners of their own, then attend to each other in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables
from ...packing.processors import PackedRowAttnProcessor, RowScope
from ...packing.strips import by_strip
from ...packing.texts import TextTokens, pad_texts
from ..joint import JointFamily, ModulatedRows, joint_tables, of_text
from ..recipe import Recipe
from ..texts import TextEmbeddings

_SCOPES: dict[str, RowScope] = {"noise_refiner": "tokens", "context_refiner": "text", "layers": "joint"}
PATCH, FRAMES_OF_PATCH = 2, 1
"""Patch with which the pipeline calls Z-Image; a model may have embeddings of several."""
_METHOD = "patchify_and_embed"
"""Method of Z-Image that a pack replaces."""


class RefinedFamily(JointFamily):
    """Base of the families with a `noise_refiner` of tokens, a `context_refiner` of text, and `layers` of both.

    Both models run from noise at time 0 to data at time 1 and predict data − noise. Their pipelines turn that round,
    and so do these families: outputs are noise − data, as for the others.
    """

    processor_class: ClassVar[type[PackedRowAttnProcessor]] = PackedRowAttnProcessor
    text = TextTokens(rows="slots", channels="cap_feat_dim")
    images_only = True
    negates = True

    def axes(self, transformer: Transformer) -> tuple[int, int, int]:
        """Return the model's positions for text and, after it, the image, for rows, and for columns."""
        first, rows, columns = transformer.config.axes_lens
        return first, rows, columns

    def limits(self, transformer: Transformer) -> Grid:
        return 1, *self.axes(transformer)[1:]

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also texts after which the model has no position for the image."""
        super().check_layout(transformer, layout, stretched=stretched)
        longest = self.longest_text(transformer)
        for sample, length in enumerate(layout.text_lengths):
            if length > longest:
                raise PackingError(
                    f"Text {sample} has {length} tokens, but this model has positions for {longest}; shorten it."
                )

    def longest_text(self, transformer: Transformer) -> int:
        """Return the text tokens after which there is still a position for the image."""
        return self.axes(transformer)[0] - 1

    def processor(self, name: str, backend: Backend) -> Any:
        return self.processor_class(backend, scope=_SCOPES[name.partition(".")[0]])


class Lumina2Family(RefinedFamily):
    """Lumina 2: rotary positions of the text and, after it, of the image; refiners of both; flow matching.

    The pipeline masks the padding of a text: pass what the mask keeps. The stock model sees every strip as an image
    with a text of `text_slots` tokens; `rope_embedder` gets hooks that replace the positions by those in the strips'
    own samples.
    """

    title = "Lumina 2"
    transformer_class = "Lumina2Transformer2DModel"
    tested_forwards = ("5a928d818acb",)
    stock_processors = ("Lumina2AttnProcessor2_0",)
    text = replace(RefinedFamily.text, shortest=1)
    latents_as = "images"
    width_settings = ("hidden_size",)
    attention_kwargs = "attention_kwargs"
    timestep_unit = 1000
    turns_timesteps = True
    row_norms = ("layers.*.norm1",)
    text_first = True

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions, and the norms, to modulate text by its own sample's timestep."""
        locate = partial(_locate, Tables(_lumina_positions))
        return [
            transformer.rope_embedder.register_forward_pre_hook(_without_waiting),
            transformer.rope_embedder.register_forward_hook(locate),
            *self.hook_norms(transformer),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        return {
            **super().inputs(rows),
            "encoder_attention_mask": rows.known_mask.long(),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Move the model's tables of positions to the device once, instead of a copy in each forward."""
        _move_tables(transformer.rope_embedder, rows.latents.device)
        return {}


def _lumina_positions(module: Any, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the rotary tables of a sample's tokens, `(h·w, D/2)`, and of its text, `(length, D/2)`, by the module."""
    (_, rows, columns), length = key
    _move_tables(module, device)
    image = torch.empty(1, 0, rows * module.patch_size, columns * module.patch_size, device=device)
    mask = torch.ones(1, length, dtype=torch.long)  # on the CPU, where its length is read
    _, of_text, of_tokens, *_ = module.forward(image, mask)  # instead of module(…), which would call the hook again
    return of_tokens[0], of_text[0]


def _without_waiting(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Put the mask of the text slots, whose sums the module reads, on the CPU: in a pack all of them count.

    The module's tables, which it would copy to the device in each forward, are moved there once.
    """
    tokens, mask = args
    _move_tables(module, tokens.device)
    return tokens, torch.ones(mask.shape, dtype=mask.dtype)


def _move_tables(module: Any, device: torch.device) -> None:
    module.freqs_cis = [to_device(table, device) for table in module.freqs_cis]


def _locate(tables: Tables, module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the tables of text slots, of tokens, and of rows of both, in what the module returns."""
    tokens, _, _, _, *lengths = output
    strips, slots = joint_tables(tables, module)
    return tokens, slots, strips, torch.cat([slots, strips], 1), *lengths


class Lumina2Recipe(Recipe):
    """Recipe of `Lumina2Pipeline`; see [`Recipe`]."""

    pipeline_class = "Lumina2Pipeline"
    family = Lumina2Family()
    image_vae = True
    default_sequence_length = 256
    native_sizes = ((1024, 1024),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions after the system prompt, and empty ones without it, as the pipeline its negative prompt."""
        text, empty = super().encode_text(captions), [not caption for caption in captions]
        if not any(empty):
            return text
        values, mask = self.pipeline._get_gemma_prompt_embeds(
            [""], device=self.pipeline.text_encoder.device, max_sequence_length=self.max_sequence_length
        )
        return text.replaced(empty, TextEmbeddings(values, mask))

    def shift(self) -> float:
        """Return the scheduler's shift, the same for all sizes: the pipeline counts the channels as tokens."""
        shift = super().shift()
        return shift if isinstance(shift, float) else shift(tokens=self.latent_channels, pixels=1)


class PackedZSingleStreamAttnProcessor(PackedRowAttnProcessor):
    """Attention of Z-Image's blocks over the strips of a pack."""

    text_first = False


class ZImageFamily(RefinedFamily):
    """Z-Image and Z-Image-Turbo: lists of images and captions, filled up with learned tokens; flow matching.

    The stock model fills up each image and each caption to a multiple of 32 with a learned token. These tokens take
    part in attention, so a pack has as many of them per sample (`multiple_of` of its layout), at the end of the
    sample's last strip and of its text. What remains of that strip is padding as in every pack.

    `patchify_and_embed` makes tokens, positions and the masks of learned tokens of a list; `forward` does the rest
    with them. It would fill up every strip by itself. So while packing is enabled, the transformer has an attribute of
    that name which returns the tokens of strips with the positions that the stock method gives them in their own
    sample, and with the masks of the learned tokens. `forward` and all other methods stay as they are.
    """

    title = "Z-Image and Z-Image-Turbo"
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
    token_patch = (FRAMES_OF_PATCH, PATCH, PATCH)

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
        setattr(transformer, _METHOD, partial(_patchify_strips, transformer, Tables(_z_image_positions)))
        modulations = [layer.adaLN_modulation for layer in transformer.layers]
        return [_Shadow(transformer), *(modulation.register_forward_hook(_modulate_row) for modulation in modulations)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return lists of images and of captions without padding, and the time from noise to data, as the pipeline."""
        return {"x": list(rows.latents), "t": (1000 - rows.timesteps) / 1000, "cap_feats": rows.texts}


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


def _z_image_positions(
    transformer: Transformer, key: tuple[Grid, int], *, device: torch.device
) -> tuple[torch.Tensor, ...]:
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


class ZImageRecipe(Recipe):
    """Recipe of `ZImagePipeline`; see [`Recipe`]."""

    pipeline_class = "ZImagePipeline"
    family = ZImageFamily()
    image_vae = True
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the tokenizer's chat template, and pad them to `max_sequence_length` for a mask."""
        texts, _ = self._encode_prompt(list(captions))  # which writes into the list
        values, mask = pad_texts(texts)
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)


REFUSED = {
    "ZImageOmniPipeline": (
        "it fills up each reference with learned tokens, and adds what SigLIP sees in it to the sequence of its sample"
    )
}


RECIPES = (
    Lumina2Recipe,
    ZImageRecipe,
)
